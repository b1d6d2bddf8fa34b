"""Carries out what `quarantine` finds: deaths go into the manifest before anything is run again, suspects stay put.

While a case is on trial its replica runs nothing else; the other replicas go on with all shards that have no suspect.
"""

from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt

from batchinf.fleet.fleet import Ended, Fleet, Member
from batchinf.fleet.quarantine import Case, Quarantine
from batchinf.manifest.log import Manifest
from batchinf.manifest.state import State
from batchinf.records import Shard
from batchinf.replica.messages import Trial
from batchinf.schedule.order import RunOrder
from batchinf.schedule.shards import shard_at

_CASE, _CONDEMNED = "case/", "condemned/"
_LONGEST_CAUSE = 300


class Trials:
    """The open cases of a job, over all of its replicas."""

    def __init__(
        self,
        order: RunOrder,
        state: State,
        is_done: npt.NDArray[np.bool_],
        fleet: Fleet,
        manifest: Manifest,
    ) -> None:
        """state: as the manifest has it: cases that an earlier coordinator left open are gone on with.

        is_done: bool [total_shards], the shards that nobody is to run.
        """
        kept = [event.fields for event in state.kept.values()]
        cases = [Case.of(fields) for fields in kept if fields["kept_as"].startswith(_CASE)]
        condemned = {
            fields["row_index"]: fields["message"] for fields in kept if fields["kept_as"].startswith(_CONDEMNED)
        }
        self._order = order
        self._fleet = fleet
        self._manifest = manifest
        self._quarantine = Quarantine(cases, condemned)
        self._given: dict[int, tuple[str, str]] = {}
        self._tried_in: set[str] = set()  # incarnations out of whose engine a trial came well
        self._num_tried: dict[int, int] = {}  # probes that went well since the last row was condemned
        for case in cases:
            for shard in case.shards:
                if is_done[shard]:
                    self.forget(shard)
        self._quarantine.hand_over([member.slot.replica for member in fleet.members])

    @property
    def shards(self) -> set[int]:
        """Shards that nobody but their case's replica may run."""
        return self._quarantine.shards

    def movable(self, member: Member) -> tuple[int, ...]:
        """Shards that another may run in a member's stead, oldest first.

        A suspect that killed another replica would begin a search of its own there, and what was found here would not
        count.
        """
        held = self.shards
        return tuple(shard for shard in member.unbegun if shard not in held)

    def is_on_trial(self, member: Member) -> bool:
        """Whether nothing but suspects may be in a member's engine."""
        case = self._quarantine.of(member.slot.replica)
        return case is not None and case.is_on_trial

    def has_case(self, member: Member) -> bool:
        """Whether a member has shards of an open case to run."""
        return self._quarantine.of(member.slot.replica) is not None

    def condemned_in(self, shard: Shard) -> tuple[tuple[int, str], ...]:
        """Rows of a shard that must not reach an engine, with what to say of it."""
        condemned = self._quarantine.condemned
        rows = self._order.of(shard) if condemned else ()
        return tuple(item for item in condemned.items() if item[0] in rows)

    def note_death(self, end: Ended) -> str:
        """Take in an end, in the manifest's next commit; what there is to say of it to the user."""
        if not end.flight:
            self._hand_over()
            return ""
        replica = end.member.slot.replica
        is_fresh = end.incarnation not in self._tried_in
        before = self._quarantine.of(replica)
        case, row = self._quarantine.died(
            replica, end.incarnation, end.shards, end.flight, is_fresh, end.was_killed, self._order.of
        )
        self._keep(case, end)
        if row is not None:
            message = f"the engine died whenever this row was in it: {end.cause}"[:_LONGEST_CAUSE]
            self._quarantine.condemned[row] = message
            self._manifest.event("condemned", kept_as=f"{_CONDEMNED}{row}", row_index=row, message=message)
            said = f"row {row} kills the engine: it becomes an error row"
            # An engine that condemns row after row, and does nothing well between them, is broken itself. A probe that
            # went well says little of one that does not outlive a few steps.
            if self._num_tried.pop(replica, 0) and before is not None and before.stage == "probe":
                self._fleet.excuse(end.member)
        elif case.is_on_trial:
            # The search makes headway with each death, until one row is left.
            self._fleet.excuse(end.member)
            said = f"{len(case.accused)} rows are suspected of it, and run apart"
        else:
            said = f"the {len(case.suspects)} rows that were in the engine run again"
        self._hand_over()
        return said

    def _keep(self, case: Case, end: Ended) -> None:
        incarnation, cause = end.incarnation, end.cause[:_LONGEST_CAUSE]
        self._manifest.event(
            "death",
            kept_as=f"{_CASE}{case.origin}",
            incarnation=incarnation,
            cause=cause,
            was_killed=end.was_killed,
            **case.fields(),
        )

    def _hand_over(self) -> None:
        left = [member.slot.replica for member in self._fleet.members if not member.is_given_up]
        if left:
            self._quarantine.hand_over(left)

    def give(self, next_attempt: Callable[[Iterable[Shard]], int]) -> None:
        """Give each replica that is up, and has not got it yet, its case's shards or the next trial of them."""
        for member in self._fleet.members:
            case = self._quarantine.of(member.slot.replica)
            if case is None or not member.is_running or member.replica is None:
                continue
            given = case.origin, member.replica.launch.incarnation
            if self._given.get(member.slot.replica) == given:
                continue
            self._given[member.slot.replica] = given
            shards = tuple(shard_at(self._order.extents, index) for index in case.shards)
            if case.is_on_trial:
                trial = Trial(shards, case.groups, case.stage == "probe", next_attempt(shards))
                self._fleet.try_rows(member, trial)
            else:
                for shard in shards:
                    self._fleet.assign(member, [shard], next_attempt([shard]), self.condemned_in(shard))

    def survived(self, member: Member, rows: Iterable[int]) -> None:
        """A member's engine came well out of a trial of these rows."""
        before = self._quarantine.of(member.slot.replica)
        if before is not None and member.replica is not None:
            self._tried_in.add(member.replica.launch.incarnation)
            if before.stage == "probe":
                self._num_tried[before.replica] = self._num_tried.get(before.replica, 0) + 1
        after = self._quarantine.survived(member.slot.replica, rows)
        # All probes were given at once; anything else comes one by one.
        if before is None or after is None or not before.stage == after.stage == "probe":
            self._given.pop(member.slot.replica, None)

    def forget(self, shard: int) -> None:
        """A shard is committed: what was known of its rows is of no more use."""
        for name in self._quarantine.committed(shard):
            self._manifest.event("forgotten", kept_as=f"{_CASE}{name}")
        for row, _ in self.condemned_in(shard_at(self._order.extents, shard)):
            del self._quarantine.condemned[row]
            self._manifest.event("forgotten", kept_as=f"{_CONDEMNED}{row}")
