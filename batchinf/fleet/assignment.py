"""Who gets which shards: those whose engine is up first, then those that can prepare shards until theirs is.

What `shards` decides is carried out here. A replica that prepares shards has begun none: whoever is up and has less to
do takes them from it, without a word from it, as one that starts may be slow to hear, or never come up at all.
"""

from collections.abc import Container, Iterable, Sequence

from batchinf.base import faults
from batchinf.fleet.fleet import Ended, Fleet, Member
from batchinf.fleet.trials import Trials
from batchinf.records import Shard
from batchinf.replica.messages import Begin, Revoke
from batchinf.schedule.shards import PendingShards, ReplicaLoad, next_shards, revocations


class Assignment:
    """The shards of a job on their way to its replicas and back."""

    def __init__(self, fleet: Fleet, pending: PendingShards, trials: Trials) -> None:
        self._fleet = fleet
        self._pending = pending
        self._trials = trials
        self._attempts: dict[int, int] = {}

    def assign(self) -> None:
        """Hand out what is pending, and ask back what others could do sooner."""
        self._trials.give(self._next_attempt)
        self._hand_out()
        is_any_free = False
        for index, shards in revocations(self._pending, self._loads()).items():
            member = self._fleet.members[index]
            if member.is_running:
                self._fleet.revoke(member, shards)
            else:
                self._withdraw(member, shards)
                is_any_free = True
        if is_any_free:
            self._hand_out()

    def begin(self, member: Member) -> None:
        """A member's engine is up: it may run what it has prepared. One that took over a case runs that alone."""
        if self._trials.has_case(member):
            self._withdraw(member, tuple(member.shards))
        if member.replica is not None:
            member.replica.send(Begin())

    def take_back(self, member: Member, shards: Iterable[int]) -> None:
        """A member has given these back, untouched."""
        back = [index for index in shards if member.shards.pop(index, None) is not None]
        self._forget_attempt(back)
        member.revoking.clear()
        self._pending.give_back(back)

    def note_ended(self, end: Ended, held: Container[int]) -> None:
        """An incarnation is over: what it had not done is another's, save the shards that are `held`."""
        shards = [shard.index for shard in end.shards]
        if end.member.info is None:
            self._forget_attempt(shards)
        self._pending.give_back(index for index in shards if index not in held)

    def _withdraw(self, member: Member, shards: Sequence[int]) -> None:
        """Take shards from a member that was not told to begin: they are another's at once, whether it hears or not."""
        if member.replica is not None:
            member.replica.send(Revoke(tuple(shards)))
        self.take_back(member, shards)

    def _hand_out(self) -> None:
        for index, shard in next_shards(self._pending, self._loads(), is_gathering=self._is_gathering):
            faults.point("coordinator.before_assign")
            condemned = self._trials.condemned_in(shard)
            self._fleet.assign(self._fleet.members[index], [shard], self._next_attempt([shard]), condemned)

    @property
    def _is_gathering(self) -> bool:
        """Whether replicas come up for the first time, while the first shards may be others than the rest."""
        members = self._fleet.members
        is_first = any(m.replica is not None and m.info is None and not m.restarts for m in members)
        return is_first and not self._pending.is_in_order

    def _loads(self) -> list[ReplicaLoad]:
        return [self._load(index, member) for index, member in enumerate(self._fleet.members) if member.takes_shards]

    def _load(self, index: int, member: Member) -> ReplicaLoad:
        is_up, is_free = member.is_running, not self._trials.is_on_trial(member)
        if not is_up:
            # Its case's shards go before all others.
            is_free = not self._trials.has_case(member)
        is_accepting = not member.is_stopping and is_free
        movable = self._trials.movable(member)
        return ReplicaLoad(index, member.window_rows, member.outstanding_rows, movable, is_accepting, is_up)

    def _next_attempt(self, shards: Iterable[Shard]) -> int:
        """The number of the try that begins now for these shards: the greatest of theirs."""
        for shard in shards:
            self._attempts[shard.index] = self._attempts.get(shard.index, 0) + 1
        return max(self._attempts[shard.index] for shard in shards)

    def _forget_attempt(self, shards: Iterable[int]) -> None:
        for index in shards:
            self._attempts[index] -= 1
