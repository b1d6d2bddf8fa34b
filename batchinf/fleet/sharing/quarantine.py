"""Finds the row that kills engines, by the lists of the rows that were in an engine at each death.

1. After the first death, all rows that were in the engine run again, on any replica.
2. Rows that were in an engine at two deaths are suspects. They run apart, on one replica: the first half of them alone,
   and so on, until one suspect is left. A half that survives costs no restart, and its results are stored.
3. A row is condemned if it was alone in the engine at two deaths. If no half has survived, another row runs alone
   before the second: if the engine dies of that one too, the engine itself may be broken, and the death counts against
   its replica.

One row that kills costs at most log2(rows in the engine) + 3 restarts, whatever ends the engine. Rows that kill only
together survive apart, and none of them is condemned.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np
import numpy.typing as npt

from batchinf.base.storage import adapter
from batchinf.base.text import counted
from batchinf.fleet.fleet import Ended, Fleet
from batchinf.fleet.replica import FleetReplica
from batchinf.manifest.lines import Condemned, Suspects
from batchinf.manifest.log import Manifest
from batchinf.manifest.state import State
from batchinf.records import Lease, Shard
from batchinf.replica.messages import Assign, InFlightRequest, Key, Trial
from batchinf.schedule.positions import RunOrder
from batchinf.schedule.shards import shard_at

RowIndices = tuple[int, ...]
_DEATHS_ALONE = 2
_LONGEST_CAUSE = 300


@dataclass(frozen=True, slots=True)
class Case(Suspects):
    """A case of suspected rows, and how it goes on."""

    @property
    def rows(self) -> RowIndices:
        """All rows whose death counts in this case."""
        return self.suspects + self.others

    @property
    def is_on_trial(self) -> bool:
        return self.replica is not None

    @property
    def condemned(self) -> int | None:
        """The row that kills engines; None if that is not certain."""
        return self.suspects[0] if self.num_alone == _DEATHS_ALONE else None

    @property
    def group(self) -> RowIndices:
        """The rows that run next, alone in the engine."""
        if self.num_alone and self.others and not self.has_survived:
            return self.others[:1]
        return self.suspects[: max(1, len(self.suspects) // 2)]

    def died(self, replica: int, in_flight: Sequence[InFlightRequest]) -> "Case":
        """The case after one more death, with these requests in the engine of this replica."""
        ran = _rows(in_flight)
        suspects = tuple(row for row in _least_likely_first(self.suspects, in_flight) if row in ran)
        if not suspects:
            return replace(self, others=tuple(row for row in self.others if row not in ran))
        cleared = self.suspects if self.is_on_trial else tuple(ran)
        return replace(
            self,
            suspects=suspects,
            replica=replica,
            others=self.others + tuple(row for row in cleared if row not in suspects),
            num_alone=self.num_alone + (tuple(ran) == suspects and len(suspects) == 1),
        )

    def is_nearer(self, before: "Case") -> bool:
        """Whether the last death has brought the search nearer to its end, and does not count against its replica.

        before: the case before that death.
        """
        if self.condemned is not None:
            return self.has_survived
        is_smaller = len(self.suspects) < len(before.suspects)
        return is_smaller or self.num_alone > before.num_alone or not before.is_on_trial

    def survived(self, rows: Iterable[int]) -> "Case":
        """The case after the engine survived these rows."""
        survivors = set(rows)
        return replace(self, suspects=tuple(row for row in self.suspects if row not in survivors), has_survived=True)


def _rows(in_flight: Iterable[InFlightRequest]) -> dict[int, None]:
    """The distinct rows of these requests, in order."""
    return dict.fromkeys(request.row_index for request in in_flight)


def _least_likely_first(rows: Iterable[int], in_flight: Iterable[InFlightRequest]) -> list[int]:
    """These rows, those without output last: a prompt kills more often than a later token.

    Rows that survive cost no restart. So a search takes the fewest restarts if the row that kills comes last.
    """
    without_output = {request.row_index for request in in_flight if not request.has_output}
    return sorted(rows, key=without_output.__contains__)


def case_of(death: str, replica: int, in_flight: Sequence[InFlightRequest], cases: Iterable[Case]) -> Case:
    """The case of a death, with this death. It is a new one if none of its rows was in an engine at an earlier death.

    death: the incarnation that died. cases: those that are open.
    """
    ran = _rows(in_flight)
    in_common = [(sum(row in ran for row in case.rows), case) for case in cases]
    known = [(case.is_on_trial, num_rows, case) for num_rows, case in in_common if num_rows]
    if not known:
        return Case(death, tuple(_least_likely_first(ran, in_flight)))
    *_, case = max(known, key=lambda item: item[:2])
    return case.died(replica, in_flight)


class Quarantine:
    """All open cases of a job, and the condemned rows. Each death is in the manifest before anything runs again.

    A replica that runs suspects runs nothing else. Other replicas run the leases without suspects.
    """

    def __init__(
        self,
        order: RunOrder,
        state: State,
        is_done: npt.NDArray[np.bool_],
        *,
        fleet: Fleet,
        manifest: Manifest,
    ) -> None:
        """state: of the manifest; open cases of an earlier coordinator are continued.

        is_done: bool [total_shards], the shards that no replica has to run.
        """
        cases = [adapter(Case).validate_python(asdict(suspects)) for suspects in state.of(Suspects)]
        self._cases = {case.origin: case for case in cases}
        self._condemned = {each.row_index: each.message or "" for each in state.of(Condemned)}
        self._order = order
        self._fleet = fleet
        self._manifest = manifest
        self._given: dict[int, tuple[str, str, RowIndices]] = {}
        for shard in {lease.index for case in cases for lease in case.leases}:
            if is_done[shard]:
                self.forget(shard)
        self._hand_over()

    @property
    def leases(self) -> dict[Key, Lease]:
        """Leases that only the replica of their case may run, by key."""
        cases = (case for case in self._cases.values() if case.is_on_trial)
        return {lease.key: lease for case in cases for lease in case.leases}

    def _case_on(self, replica: FleetReplica) -> Case | None:
        """The case whose suspects a replica runs next."""
        return next((case for case in self._cases.values() if case.replica == replica.number), None)

    def is_on_trial(self, replica: FleetReplica) -> bool:
        """Whether only suspects may run on a replica."""
        return self._case_on(replica) is not None

    def condemned_in(self, places: Shard) -> tuple[tuple[int, str], ...]:
        """Rows of a shard or a lease that must not reach an engine, each with its error message."""
        rows = self._order.of(places) if self._condemned else ()
        return tuple(item for item in self._condemned.items() if item[0] in rows)

    # -- events ------------------------------------------------------------------------------------------------------

    def note_death(self, end: Ended) -> str:
        """Record an end in the manifest's next commit. Returns a message for the user; "" if there is none."""
        if not end.in_flight:
            self._hand_over()
            return ""
        case = case_of(end.incarnation, end.replica.number, end.in_flight, self._cases.values())
        before = self._cases.get(case.origin)
        case = replace(case, leases=self._leases_of(case, before, end))
        self._manifest.event(
            "death",
            replica=end.replica.number,
            incarnation=end.incarnation,
            cause=end.cause[:_LONGEST_CAUSE],
            num_rows=len(_rows(end.in_flight)),
        )
        if before is not None and case.is_nearer(before):
            self._fleet.excuse(end)
        if case.condemned is not None:
            self._condemn(case.condemned, end)
            self._close(case)
        else:
            self._cases[case.origin] = case
            self._manifest.record(case)
        self._hand_over()
        return _told(case, before, end)

    def _leases_of(self, case: Case, before: Case | None, end: Ended) -> tuple[Lease, ...]:
        """The leases with rows of a case, as the replica held them when it died. before: the case before that death."""
        if before is not None and before.is_on_trial:
            held = {lease.key: lease for lease in end.leases}
            return tuple(held.get(lease.key, lease) for lease in before.leases)
        rows_of = {lease: self._order.of(lease) for lease in end.leases}
        return tuple(lease for lease, rows in rows_of.items() if any(row in rows for row in case.rows))

    def _condemn(self, row: int, end: Ended) -> None:
        message = f"the engine died whenever this row was in it: {end.cause}"[:_LONGEST_CAUSE]
        self._condemned[row] = message
        self._manifest.record(Condemned(row, message))
        self._manifest.event("condemned", row_index=row, message=message)

    def _hand_over(self) -> None:
        """Give the cases of replicas that were given up to the others, in turn."""
        left = [replica.number for replica in self._fleet.replicas if not replica.is_given_up]
        for number, case in enumerate(self._cases.values()):
            if left and case.is_on_trial and case.replica not in left:
                self._cases[case.origin] = replace(case, replica=left[number % len(left)])

    def give(self) -> None:
        """Give each running replica the next suspects of its case, unless it has them already."""
        for replica in self._fleet.replicas:
            case = self._case_on(replica)
            if case is None or not replica.is_running:
                continue
            trial = (replica.current.name, case.origin, case.group)
            if self._given.get(replica.number) != trial:
                self._given[replica.number] = trial
                self._fleet.give(replica, Trial(_again(case.leases), case.group))

    def survived(self, replica: FleetReplica, rows: Iterable[int]) -> None:
        """A replica's engine survived these rows, which ran apart. Without suspects, all other rows run."""
        if (case := self._case_on(replica)) is None:
            return
        case = self._cases[case.origin] = case.survived(rows)
        if not case.suspects:
            self._close(case)
            leases = _again(case.leases)
            condemned = tuple(item for lease in leases for item in self.condemned_in(lease))
            self._fleet.give(replica, Assign(leases, condemned))

    def forget(self, shard: int) -> None:
        """Forget the cases and condemned rows of a committed shard."""
        self._forget_leases(lambda lease: lease.index == shard)
        for row, _ in self.condemned_in(shard_at(self._order.extents, shard)):
            del self._condemned[row]
            self._manifest.record(Condemned(row, None))

    def note_stored(self, lease: Lease) -> None:
        """The results of a lease are in the journal: no row of it runs again."""
        self._forget_leases(lambda other: other.key == lease.key)

    def _forget_leases(self, is_finished: Callable[[Lease], bool]) -> None:
        for case in [case for case in self._cases.values() if any(map(is_finished, case.leases))]:
            leases = tuple(lease for lease in case.leases if not is_finished(lease))
            self._cases[case.origin] = replace(case, leases=leases)
            if not leases:
                self._close(case)

    def _close(self, case: Case) -> None:
        if self._cases.pop(case.origin, None) is not None:
            self._manifest.record(replace(case, leases=()))


def _again(leases: Iterable[Lease]) -> tuple[Lease, ...]:
    """These leases for one more try."""
    return tuple(replace(lease, attempts=lease.attempts + 1) for lease in leases)


def _told(case: Case, before: Case | None, end: Ended) -> str:
    """What a death means for the rows that were in the engine, for the user."""
    if case.condemned is not None:
        return f"row {case.condemned} kills the engine: it becomes an error row"
    if before is None:
        if end.was_host_lost:
            return "the rows that were in the engine count as not tried"
        return f"{counted(len(case.suspects), 'row')} of its engine will run again"
    if case.suspects == before.suspects and case.others != before.others:
        return "it died without a suspected row in it too, so the engine itself may be broken"
    runs = "runs" if len(case.suspects) == 1 else "run"
    return f"{counted(len(case.suspects), 'row')} may have caused it, and {runs} separately"
