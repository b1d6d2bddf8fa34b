"""Assigns shards: first to replicas whose engine is up, then to those that prepare shards while their engine starts.

`schedule/shards.py` decides; this module carries out the decisions. A replica whose engine is not up has begun no
shard. The coordinator takes its shards back without waiting for an answer, because a starting replica may answer late
or never. If a replica ends before its engine is up, or with its host, its shards do not count as tried.

In a trial of `tune`, no replica begins before the engines of all are up: otherwise a short trial would measure the
first engine alone, since the next one on its GPU starts half a minute later.
"""

import math
import time
from collections.abc import Container, Iterable, Sequence

from batchinf.base import faults
from batchinf.fleet.fleet import Ended, Fleet, FleetReplica
from batchinf.fleet.quarantine import Trials
from batchinf.records import Shard
from batchinf.replica.messages import Begin, Revoke
from batchinf.schedule.shards import PendingShards, ReplicaLoad, next_shards, revocations


class Assignment:
    """Hands out the shards of a job, and takes them back."""

    def __init__(self, fleet: Fleet, pending: PendingShards, trials: Trials, *, begins_together: bool = False) -> None:
        """begins_together: replicas wait until the engines of all are up, but not for one that fails more often."""
        self._fleet = fleet
        self._pending = pending
        self._trials = trials
        self._attempts: dict[int, int] = {}
        self._is_waiting = begins_together
        self._takers: set[tuple[int, int]] = set()  # while replicas wait: those that take shards, with their windows
        self._last_ready_at = 0.0

    def assign(self) -> None:
        """Hand out pending shards, and take back shards that another replica can run sooner."""
        if self._is_waiting:
            self._share_anew()
            if self._is_any_awaited:
                return
            self._is_waiting = False
            for replica in self._fleet.replicas:
                if replica.is_running:
                    self.begin(replica)
        self._trials.give(self._next_attempt)
        self._hand_out(self._fleet.replicas)
        if self._pending:
            return
        is_any_free = False
        loads = [self._load(one) for one in self._fleet.replicas if one.takes_shards]
        for index, shards in revocations(self._pending, loads).items():
            replica = self._fleet.replicas[index]
            if replica.is_running:
                self._fleet.revoke(replica, shards)
            else:
                self._withdraw(replica, shards)
                is_any_free = True
        if is_any_free:
            self._hand_out(self._fleet.replicas)

    def _share_anew(self) -> None:
        """Hand out shards while no replica has begun. Each replica that takes shards gets an equal share.

        In a short trial, the first one to take shards gets all of them, and its engine may be up long before the next.
        """
        takers = {(one.number, one.window_rows) for one in self._fleet.replicas if one.takes_shards}
        self._hand_out(self._fleet.replicas)
        if takers - self._takers and len(takers) > 1 and not self._pending:
            for replica in self._fleet.replicas:
                if replica.shards:
                    self._withdraw(replica, tuple(replica.shards))
            self._hand_out(self._fleet.replicas)
        self._takers = takers

    @property
    def _is_any_awaited(self) -> bool:
        """Whether those that are up wait for a replica that has not failed more often than they have.

        If all replicas fail once, because the memory is too small, they wait for each other after the next start.
        """
        coming = [one for one in self._fleet.replicas if one.info is None and not one.is_given_up]
        up = [one for one in self._fleet.replicas if one.is_running]
        if not up:
            return bool(coming)
        is_any_coming = min((one.restarts for one in coming), default=math.inf) <= max(one.restarts for one in up)
        return is_any_coming and time.monotonic() - self._last_ready_at <= self._fleet.stall_timeout_s

    def assign_to(self, replicas: Iterable[FleetReplica]) -> None:
        """Hand out pending shards to these replicas alone: after `assign`, only they may have room.

        A replica with a quarantine case waits for `assign`, which gives it the case first.
        """
        self._hand_out(one for one in replicas if not self._trials.has_case(one))

    def begin(self, replica: FleetReplica) -> None:
        """A replica's engine is up: let it run the shards that it prepared, or only its quarantine case, if any.

        While replicas wait for each other, it does nothing; `assign` lets all of them begin.
        """
        if self._is_waiting:
            self._last_ready_at = time.monotonic()
            return
        if self._trials.has_case(replica):
            self._withdraw(replica, tuple(replica.shards))
        if replica.handle is not None:
            replica.handle.send(Begin())

    def take_back(self, replica: FleetReplica, shards: Iterable[int]) -> None:
        """Make these shards pending again. The replica has given them back and had not begun them."""
        back = [index for index in shards if replica.shards.pop(index, None) is not None]
        self._forget_attempt(back)
        replica.revoking.clear()
        self._pending.give_back(back)

    def note_ended(self, end: Ended, held: Container[int]) -> None:
        """An incarnation has ended: its shards become pending again, except those that are `held`."""
        shards = [shard.index for shard in end.shards]
        if end.replica.info is None or end.was_host_lost or self._is_waiting:
            self._forget_attempt(shards)
        self._pending.give_back(index for index in shards if index not in held)

    def _withdraw(self, replica: FleetReplica, shards: Sequence[int]) -> None:
        """Take shards from a replica that was not told to begin. Others may run them before it reads the message."""
        if replica.handle is not None:
            replica.handle.send(Revoke(tuple(shards)))
        self.take_back(replica, shards)

    def _hand_out(self, replicas: Iterable[FleetReplica]) -> None:
        if not self._pending:
            return
        loads = [self._load(one) for one in replicas if one.takes_shards]
        for index, shard in next_shards(self._pending, loads, is_gathering=self._is_gathering):
            faults.point("coordinator.before_assign")
            condemned = self._trials.condemned_in(shard)
            self._fleet.assign(self._fleet.replicas[index], [shard], self._next_attempt([shard]), condemned)

    @property
    def _is_gathering(self) -> bool:
        """Whether some replicas are starting for the first time, and the first shards may differ from the rest.

        A replica that is up then gets only enough rows to fill its engine.
        """
        return self._is_first_start and not self._pending.is_in_order

    @property
    def _is_first_start(self) -> bool:
        return any(m.handle is not None and m.info is None and not m.restarts for m in self._fleet.replicas)

    def _load(self, replica: FleetReplica) -> ReplicaLoad:
        is_up, is_free = replica.is_running and not self._is_waiting, not self._trials.is_on_trial(replica)
        if not is_up:
            # The shards of a quarantine case run before all others.
            is_free = not self._trials.has_case(replica)
        is_accepting = not replica.is_stopping and is_free
        movable = self._trials.movable(replica)
        return ReplicaLoad(replica.number, replica.window_rows, replica.outstanding_rows, movable, is_accepting, is_up)

    def _next_attempt(self, shards: Iterable[Shard]) -> int:
        """Count one more attempt for each of these shards, and return the highest count."""
        for shard in shards:
            self._attempts[shard.index] = self._attempts.get(shard.index, 0) + 1
        return max(self._attempts[shard.index] for shard in shards)

    def _forget_attempt(self, shards: Iterable[int]) -> None:
        for index in shards:
            self._attempts[index] -= 1
