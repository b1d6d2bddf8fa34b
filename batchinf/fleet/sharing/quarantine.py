"""Finds the row that kills engines: keeps the suspects of each death, and runs them apart until one is condemned.

1. After the first death, all rows that were in the engine run again, once.
2. After the second, the rows that were there both times are accused. Those whose prompts had not run yet are probed one
   by one, for one token each. That costs no restart until the culprit runs. The others run by halves.
3. A row is condemned if the engine died with it alone. If that death may have had another cause, it has to happen
   twice: after a signal from outside (the kernel's out-of-memory killer, `kill -9`), or if a probe was not the first
   request in the engine.

A row that kills at its prompt costs at most 4 restarts, any other at most log2(window) + 2, or + 3 with signals from
outside. That holds only if the suspects' leases stay with their replica, even if another one is idle.

If a replica is lost with its host, its rows count as not tried, and any replica may run them. Rows that were in the
engines of two lost hosts are accused, as after step 2.
"""

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from batchinf.base.storage import adapter
from batchinf.base.text import counted
from batchinf.fleet.fleet import Ended, Fleet
from batchinf.fleet.replica import FleetReplica
from batchinf.manifest.log import Manifest
from batchinf.manifest.state import State
from batchinf.records import Lease, Shard
from batchinf.replica.messages import Assign, InFlightRequest, Key, Trial
from batchinf.schedule.positions import RunOrder
from batchinf.schedule.shards import shard_at

RowIndices = tuple[int, ...]
_CASE = "case/"
_CONDEMNED = "condemned/"
_LONGEST_CAUSE = 300


@dataclass(frozen=True, slots=True)
class Case:
    """Deaths of one replica that may have one cause."""

    origin: str
    """The incarnation that died first."""
    replica: int
    leases: tuple[Lease, ...]
    """Those with suspects; they stay with the replica."""
    suspects: RowIndices
    """Rows that were in the engine at every death so far."""
    stage: Literal["replay", "probe", "halve", "lost"] = "replay"
    """`replay`: all rows run again. `probe`: the accused run alone for one token. `halve`: half of the accused run
    alone. `lost`: the case only remembers the rows of a lost host."""
    accused: RowIndices = ()
    """Suspects to try now, in this order."""
    later: tuple[RowIndices, ...] = ()
    """Groups to try afterwards."""
    num_deaths: int = 1
    is_found: bool = False
    """A row was condemned since the last full run."""
    doubted: int | None = None
    """The row that was alone in the engine at the last death, if that death may have had another cause."""

    @property
    def is_on_trial(self) -> bool:
        """Whether only accused rows may run on the replica."""
        return self.stage in ("probe", "halve")

    @property
    def groups(self) -> tuple[RowIndices, ...]:
        """The groups of rows to run next, each group alone in the engine."""
        if self.stage == "probe":
            return tuple((row,) for row in self.accused)
        return (self.accused[: max(1, len(self.accused) // 2)],) if self.stage == "halve" else ()

    def died(self, in_flight: Sequence[InFlightRequest], is_fresh: bool, is_outside: bool) -> tuple["Case", int | None]:
        """The case after one more death, and the row that caused it if that is certain.

        in_flight: requests in the engine. is_fresh: this incarnation had survived no trial before. is_outside: it was
        killed from outside.
        """
        case = replace(self, num_deaths=self.num_deaths + 1)
        there = _rows(in_flight)
        if self.stage == "replay":
            return case._accuse(in_flight), None
        tried = {row for group in self.groups for row in group}
        live = tuple(row for row in there if row in tried)
        if len(live) > 1:
            return replace(case, accused=live, later=()), None
        is_certain = not is_outside and (is_fresh or self.stage == "halve")
        if live and (is_certain or self.doubted == live[0]):
            return case._condemn(live[0]), live[0]
        return case._try_again(live), None

    def _try_again(self, live: RowIndices) -> "Case":
        """Try the same rows again. live: the row that was in the engine, which comes first; empty if none was."""
        rest = tuple(row for row in self.accused if row not in live)
        accused = live + rest if self.stage == "probe" else live or self.accused
        return replace(self, accused=accused, doubted=live[0] if live else None)

    def _accuse(self, in_flight: Sequence[InFlightRequest]) -> "Case":
        suspects = set(self.suspects)
        both = [request for request in in_flight if request.row_index in suspects]
        if not both:
            return replace(self, suspects=_rows(in_flight), num_deaths=1)
        new = _rows(request for request in both if not request.has_output)
        old = _rows(request for request in both if request.has_output)
        # Rows that survive their probe run in full after the others: rows may kill together that do not kill alone.
        accused, *later = [rows for rows in (new, old, new) if rows]
        return replace(
            self,
            suspects=_rows(both),
            stage="probe" if new else "halve",
            accused=accused,
            later=tuple(later),
            is_found=False,
            doubted=None,
        )

    def _condemn(self, row: int) -> "Case":
        suspects = tuple(suspect for suspect in self.suspects if suspect != row)
        case = replace(self, suspects=suspects, is_found=True, doubted=None)
        if self.stage == "probe":
            # The other probes cost no restart, and rows that kill engines often come together.
            return replace(case, accused=tuple(other for other in self.accused if other != row))._go_on()
        return replace(case, stage="replay", accused=(), later=())

    def survived(self, rows: Iterable[int]) -> "Case":
        """The case after the engine survived these rows."""
        well = set(rows)
        return replace(self, accused=tuple(row for row in self.accused if row not in well), doubted=None)._go_on()

    def _go_on(self) -> "Case":
        if self.accused:
            return self
        if self.later and not self.is_found:
            return replace(self, stage="halve", accused=self.later[0], later=self.later[1:])
        return replace(self, stage="replay", later=(), suspects=self.suspects if self.is_found else ())


def _rows(in_flight: Iterable[InFlightRequest]) -> RowIndices:
    return tuple(dict.fromkeys(item.row_index for item in in_flight))


class Quarantine:
    """All open cases of a job, and the condemned rows. Does no input or output."""

    def __init__(self, cases: Iterable[Case] = (), condemned: Mapping[int, str] | None = None) -> None:
        """condemned: error messages by row."""
        self._cases = {case.origin: case for case in cases}
        self.condemned = dict(condemned or {})

    @property
    def leases(self) -> dict[Key, Lease]:
        """Leases that only their case's replica may run, by key."""
        cases = (case for case in self._cases.values() if case.stage != "lost")
        return {lease.key: lease for case in cases for lease in case.leases}

    def of(self, replica: int) -> Case | None:
        """The oldest open case of a replica."""
        cases = self._cases.values()
        return next((case for case in cases if case.replica == replica and case.stage != "lost"), None)

    def died(
        self,
        replica: int,
        incarnation: str,
        leases: Iterable[Lease],
        in_flight: Sequence[InFlightRequest],
        *,
        is_fresh: bool = True,
        is_outside: bool = False,
        is_host_lost: bool = False,
        rows_of: Callable[[Lease], Container[int]] = lambda lease: range(lease.start, lease.stop),
    ) -> tuple[Case, int | None]:
        """The case of a replica after its death, and the row that is condemned, if any. leases: those that it held.

        is_fresh, is_outside: see `Case.died`. is_host_lost: its host was lost with it. rows_of: the rows of a lease.
        """
        case = self.of(replica)
        condemned = None
        if case is not None:
            case, condemned = case.died(in_flight, is_fresh, is_outside)
        elif is_host_lost:
            case = self._lost_with_host(replica, incarnation, in_flight)
        else:
            case = Case(incarnation, replica, (), _rows(in_flight))
        held = {lease.key: lease for lease in leases}
        by_key = {lease.key: held.get(lease.key, lease) for lease in case.leases}
        for key, lease in held.items():
            rows = rows_of(lease)
            if any(request.row_index in rows for request in in_flight):
                by_key[key] = lease
        case = replace(case, leases=tuple(by_key[key] for key in sorted(by_key)))
        self._cases[case.origin] = case
        return case, condemned

    def _lost_with_host(self, replica: int, incarnation: str, in_flight: Sequence[InFlightRequest]) -> Case:
        """Accuse the rows that were on another lost host before; if there are none, only remember these rows."""
        before = {row for case in self._cases.values() if case.stage == "lost" for row in case.suspects}
        again = tuple(row for row in _rows(in_flight) if row in before)
        if not again:
            return Case(incarnation, replica, (), _rows(in_flight), stage="lost")
        return Case(incarnation, replica, (), again)._accuse(in_flight)

    def survived(self, replica: int, rows: Iterable[int]) -> Case | None:
        """The case of a replica after its engine survived rows on trial; None if it has no case."""
        case = self.of(replica)
        if case is not None and case.is_on_trial:
            case = self._cases[case.origin] = case.survived(rows)
        return case

    def finished(self, is_finished: Callable[[Lease], bool]) -> list[str]:
        """Remove leases that have run. Returns the names of the cases that this closes."""
        closed = []
        for case in [case for case in self._cases.values() if any(map(is_finished, case.leases))]:
            leases = tuple(lease for lease in case.leases if not is_finished(lease))
            left = self._cases[case.origin] = replace(case, leases=leases)
            if not left.leases:
                del self._cases[case.origin]
                closed.append(case.origin)
        return closed

    def hand_over(self, replicas: Sequence[int]) -> None:
        """Give the cases of all other replicas to these, in turn."""
        for number, case in enumerate(list(self._cases.values())):
            if case.replica not in replicas:
                self._cases[case.origin] = replace(case, replica=replicas[number % len(replicas)])


def _kept(state: State, prefix: str) -> list[Mapping[str, Any]]:
    """The fields of the manifest's events that are kept under names with this prefix."""
    return [event.fields for name, event in state.kept.items() if name.startswith(prefix)]


class Trials:
    """Runs the trials of a quarantine. Each death is in the manifest before anything runs again.

    While a case is on trial, its replica runs nothing else. Other replicas run the leases without suspects.
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
        # The manifest's events have more fields.
        cases = [adapter(Case).validate_python(fields) for fields in _kept(state, _CASE)]
        condemned = {fields["row_index"]: fields["message"] for fields in _kept(state, _CONDEMNED)}
        self._order = order
        self._fleet = fleet
        self._manifest = manifest
        self._quarantine = Quarantine(cases, condemned)
        self._given: dict[int, tuple[str, str]] = {}
        self._tried_in: set[str] = set()  # incarnations that have survived a trial
        self._num_tried: dict[int, int] = {}  # by replica: probes survived since the last row was condemned
        for shard in {lease.index for case in cases for lease in case.leases}:
            if is_done[shard]:
                self.forget(shard)
        self._quarantine.hand_over([replica.number for replica in fleet.replicas])

    @property
    def leases(self) -> dict[Key, Lease]:
        """Leases that only the replica of their case may run, by key."""
        return self._quarantine.leases

    def movable(self, replica: FleetReplica) -> tuple[Lease, ...]:
        """Leases that another replica may run, oldest first. Suspects stay: another death would begin a new search."""
        held = self.leases
        return tuple(lease for lease in replica.unbegun if lease.key not in held) if held else replica.unbegun

    def is_on_trial(self, replica: FleetReplica) -> bool:
        """Whether only suspects may run on a replica."""
        case = self._quarantine.of(replica.number)
        return case is not None and case.is_on_trial

    def has_case(self, replica: FleetReplica) -> bool:
        """Whether a replica has leases of an open case to run."""
        return self._quarantine.of(replica.number) is not None

    def condemned_in(self, places: Shard) -> tuple[tuple[int, str], ...]:
        """Rows of a shard or a lease that must not reach an engine, each with its error message."""
        condemned = self._quarantine.condemned
        rows = self._order.of(places) if condemned else ()
        return tuple(item for item in condemned.items() if item[0] in rows)

    def note_death(self, end: Ended) -> str:
        """Record an end in the manifest's next commit. Returns a message for the user; "" if there is none."""
        if not end.in_flight:
            self._hand_over()
            return ""
        number = end.replica.number
        is_fresh = end.incarnation not in self._tried_in
        before = self._quarantine.of(number)
        case, row = self._quarantine.died(
            number,
            end.incarnation,
            end.leases,
            end.in_flight,
            is_fresh=is_fresh,
            is_outside=end.was_killed,
            is_host_lost=end.was_host_lost,
            rows_of=self._order.of,
        )
        self._keep(case, end)
        if row is not None:
            message = f"the engine died whenever this row was in it: {end.cause}"[:_LONGEST_CAUSE]
            self._quarantine.condemned[row] = message
            self._manifest.event("condemned", kept_as=f"{_CONDEMNED}{row}", row_index=row, message=message)
            said = f"row {row} kills the engine: it becomes an error row"
            # If row after row is condemned and nothing finishes between them, the engine itself is broken. A survived
            # probe does not prove that an engine works that dies after a few steps.
            if self._num_tried.pop(number, 0) and before is not None and before.stage == "probe":
                self._fleet.excuse(end)
        elif case.is_on_trial:
            # The search makes progress with each death, until one row is left.
            self._fleet.excuse(end)
            runs = "runs" if len(case.accused) == 1 else "run"
            said = f"{counted(len(case.accused), 'row')} may have caused it, and {runs} separately"
        elif case.stage == "lost":
            said = "the rows that were in the engine count as not tried"
        else:
            said = f"{counted(len(case.suspects), 'row')} of its engine will run again"
        self._hand_over()
        return said

    def _keep(self, case: Case, end: Ended) -> None:
        self._manifest.event(
            "death",
            kept_as=f"{_CASE}{case.origin}",
            incarnation=end.incarnation,
            cause=end.cause[:_LONGEST_CAUSE],
            was_killed=end.was_killed,
            **asdict(case),
        )

    def _hand_over(self) -> None:
        left = [replica.number for replica in self._fleet.replicas if not replica.is_given_up]
        if left:
            self._quarantine.hand_over(left)

    def give(self) -> None:
        """Give each running replica the leases of its case, or its next trial, unless it has them already."""
        for replica in self._fleet.replicas:
            case = self._quarantine.of(replica.number)
            if case is None or not replica.is_running:
                continue
            trial = (case.origin, replica.current.name)
            if self._given.get(replica.number) == trial:
                continue
            self._given[replica.number] = trial
            leases = tuple(replace(lease, attempts=lease.attempts + 1) for lease in case.leases)
            if case.is_on_trial:
                self._fleet.give(replica, Trial(leases, case.groups, case.stage == "probe"))
            else:
                condemned = tuple(item for lease in leases for item in self.condemned_in(lease))
                self._fleet.give(replica, Assign(leases, condemned))

    def survived(self, replica: FleetReplica, rows: Iterable[int]) -> None:
        """A replica's engine survived a trial of these rows."""
        before = self._quarantine.of(replica.number)
        if before is not None and replica.is_live:
            self._tried_in.add(replica.current.name)
            if before.stage == "probe":
                self._num_tried[before.replica] = self._num_tried.get(before.replica, 0) + 1
        after = self._quarantine.survived(replica.number, rows)
        # All probes were given at once; other groups are given one by one.
        if before is None or after is None or not before.stage == after.stage == "probe":
            self._given.pop(replica.number, None)

    def forget(self, shard: int) -> None:
        """Forget the cases and condemned rows of a committed shard."""
        self._forget_leases(lambda lease: lease.index == shard)
        for row, _ in self.condemned_in(shard_at(self._order.extents, shard)):
            del self._quarantine.condemned[row]
            self._manifest.event("forgotten", kept_as=f"{_CONDEMNED}{row}")

    def note_stored(self, lease: Lease) -> None:
        """The results of a lease are in the journal: no row of it runs again."""
        self._forget_leases(lambda other: other.key == lease.key)

    def _forget_leases(self, is_finished: Callable[[Lease], bool]) -> None:
        for name in self._quarantine.finished(is_finished):
            self._manifest.event("forgotten", kept_as=f"{_CASE}{name}")
