"""Assigns leases: first to replicas whose engine is up, then to those that prepare leases while their engine starts.

`schedule/leases.py` decides; this module carries out the decisions. A replica whose engine is not up has begun no
lease. The coordinator takes its leases back without waiting for an answer, because a starting replica may answer late
or never. If a replica ends before its engine is up, or with its host, its leases do not count as tried.

In a trial of `tune`, no replica begins before the engines of all are up: otherwise a short trial would measure the
first engine alone, since the next one on its GPU starts half a minute later.
"""

import math
import time
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import replace

from batchinf.base import faults
from batchinf.fleet.fleet import Ended, Fleet, FleetReplica, Key
from batchinf.fleet.quarantine import Trials
from batchinf.records import Lease
from batchinf.replica.messages import WARMING_UP, Begin, Revoke
from batchinf.schedule.leases import PendingRows, ReplicaLoad, Sharing, hold_s, next_leases, revocations

# While few rows are left, each replica reports so often, but with many replicas not more than 1,000 reports a second.
_REPORT_S, _REPORTS_PER_S = 0.05, 1000
# With more replicas, what is left is counted once in each look at all of them, and not after each message.
_FEW_REPLICAS = 64


class Assignment:
    """Hands out the rows of a job, and takes them back."""

    def __init__(
        self,
        fleet: Fleet,
        pending: PendingRows,
        trials: Trials,
        *,
        most_tokens: int | None = None,
        begins_together: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """most_tokens: that a row generates, each in a step of its own; None if unknown.

        begins_together: replicas wait until the engines of all are up, but not for one that fails more often. clock: in
        seconds.
        """
        self._fleet = fleet
        self._pending = pending
        self._trials = trials
        self._most_tokens = most_tokens
        self._clock = clock
        self._is_waiting = begins_together
        self._first_ready_at: float | None = None
        self._last_ready_at = 0.0
        self._sharing: Sharing | None = None

    def assign(self) -> None:
        """Hand out pending rows, and take back leases that another replica can run sooner."""
        if self._is_waiting:
            if self._is_any_awaited:
                self._hand_out(self._fleet.replicas)
                return
            self._is_waiting = False
            for replica in self._fleet.replicas:
                if replica.is_running:
                    self.begin(replica)
        self._trials.give()
        self._sharing = None
        self._hand_out(self._fleet.replicas)
        if self._pending:
            return
        is_any_free = False
        loads = [self._load(one) for one in self._fleet.replicas if one.takes_leases]
        for index, leases in revocations(self._pending, loads, self._share(loads), is_holding=self._is_holding).items():
            owner = self._fleet.replicas[index]
            if owner.is_running:
                self._fleet.revoke(owner, leases)
            else:
                self._withdraw(owner, leases)
                is_any_free = True
        if is_any_free:
            self._sharing = None
            self._hand_out(self._fleet.replicas)

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
        return is_any_coming and self._clock() - self._last_ready_at <= self._fleet.stall_timeout_s

    def assign_to(self, replicas: Iterable[FleetReplica]) -> None:
        """Hand out pending rows to these replicas alone: after `assign`, only they may have room.

        A replica with a quarantine case waits for `assign`, which gives it the case first.
        """
        if len(self._fleet.replicas) <= _FEW_REPLICAS:
            self._sharing = None
        self._hand_out(one for one in replicas if not self._trials.has_case(one))

    def begin(self, replica: FleetReplica) -> None:
        """A replica's engine is up: let it run the leases that it prepared, or only its quarantine case, if any.

        While replicas wait for each other, it does nothing; `assign` lets all of them begin.
        """
        self._last_ready_at = self._clock()
        self._first_ready_at = self._first_ready_at or self._last_ready_at
        if self._is_waiting:
            return
        if self._trials.has_case(replica):
            self._withdraw(replica, tuple(replica.leases.values()))
        if replica.handle is not None:
            replica.handle.send(Begin())

    def take_back(self, replica: FleetReplica, keys: Iterable[Key]) -> None:
        """Make these leases pending again. The replica has given them back and had not begun them."""
        back = [lease for key in keys if (lease := replica.leases.pop(key, None)) is not None]
        replica.revoking.clear()
        self._pending.give_back(back)

    def note_ended(self, end: Ended, held: Container[Key]) -> None:
        """An incarnation has ended: its leases become pending again, except those that are `held`."""
        was_tried = not (end.replica.info is None or end.was_host_lost or self._is_waiting)
        left = [lease for lease in end.leases if lease.key not in held]
        self._pending.give_back(replace(lease, attempts=lease.attempts + was_tried) for lease in left)

    def note_stored(self, lease: Lease) -> None:
        """The journal has the results of a lease. With the last lease of a shard, a replica can make its part."""
        self._trials.note_stored(lease)
        self._pending.store(lease)

    def _withdraw(self, replica: FleetReplica, leases: Sequence[Lease]) -> None:
        """Take leases from a replica that was not told to begin. Others may run them before it reads the message."""
        keys = tuple(lease.key for lease in leases)
        if replica.handle is not None and keys:
            replica.handle.send(Revoke(keys))
        self.take_back(replica, keys)

    def _hand_out(self, replicas: Iterable[FleetReplica]) -> None:
        if not self._pending:
            return
        loads = [self._load(one) for one in replicas if one.takes_leases]
        if not loads:
            return
        sharing = self._sharing or self._share([self._load(one) for one in self._fleet.replicas if one.takes_leases])
        self._sharing = sharing
        given: dict[int, list[Lease]] = {}
        for index, lease in next_leases(self._pending, loads, sharing, is_gathering=self._is_gathering):
            given.setdefault(index, []).append(lease)
        progress_s = max(_REPORT_S, len(self._fleet.replicas) / _REPORTS_PER_S) if sharing.are_few else 1.0
        for index, leases in given.items():
            faults.point("coordinator.before_assign")
            condemned = tuple(item for lease in leases for item in self._trials.condemned_in(lease))
            self._fleet.assign(self._fleet.replicas[index], leases, condemned, progress_s=progress_s)

    def _share(self, loads: Sequence[ReplicaLoad]) -> Sharing:
        """loads: of all replicas that take leases."""
        num_absent = sum(not (one.takes_leases or one.is_given_up) for one in self._fleet.replicas)
        num_awaited = len(self._awaited) if self._is_holding else 0
        return Sharing.of(self._pending, loads, num_awaited=num_awaited, num_absent=num_absent)

    @property
    def _coming(self) -> list[FleetReplica]:
        """Replicas whose engine starts for the first time."""
        return [one for one in self._fleet.replicas if one.handle is not None and one.info is None and not one.restarts]

    @property
    def _awaited(self) -> list[FleetReplica]:
        """Replicas that share the rows while these are held back: those that start, in any case for the first time."""
        if any(one.is_running for one in self._fleet.replicas) and not self._is_waiting:
            return self._coming
        return [one for one in self._fleet.replicas if not (one.is_running or one.is_given_up)]

    @property
    def _is_holding(self) -> bool:
        """Whether rows are held back for replicas that are not up."""
        if self._is_waiting or not any(one.is_running for one in self._fleet.replicas):
            return True
        coming = self._coming
        if not coming or self._first_ready_at is None:
            return False
        is_promised = any(one.state == WARMING_UP for one in coming)
        return self._clock() - self._first_ready_at < hold_s(self._work_s, is_promised=is_promised)

    @property
    def _work_s(self) -> float | None:
        """How long the rows take at most, by what the engines have shown; None if they have shown nothing."""
        up = [one for one in self._fleet.replicas if one.is_running]
        found = []
        steps_s = [one.intake.step_s for one in up if one.intake is not None and one.intake.step_s is not None]
        if self._most_tokens is not None and steps_s and all(not one.progress.engine.num_waiting for one in up):
            found.append(self._most_tokens * max(steps_s))
        num_rows = sum(one.progress.num_answered for one in up) // self._fleet.requests_per_row
        if num_rows and self._first_ready_at is not None:
            left = self._pending.num_rows + sum(one.outstanding_rows for one in self._fleet.replicas)
            found.append(left * (self._clock() - self._first_ready_at) / num_rows)
        return min(found, default=None)

    @property
    def _is_gathering(self) -> bool:
        """Whether some replicas are starting for the first time, and the first shards may differ from the rest.

        A replica that is up then gets only enough rows to fill its engine, while many rows are left.
        """
        return bool(self._coming) and not self._pending.is_in_order

    def _load(self, replica: FleetReplica) -> ReplicaLoad:
        is_up, is_free = replica.is_running and not self._is_waiting, not self._trials.is_on_trial(replica)
        if not is_up:
            # The leases of a quarantine case run before all others.
            is_free = not self._trials.has_case(replica)
        runs = None if replica.intake is None else replica.intake.rows
        return ReplicaLoad(
            replica.number,
            replica.window_rows,
            replica.outstanding_rows,
            self._trials.movable(replica),
            is_accepting=not replica.is_stopping and is_free,
            is_up=is_up,
            engine_rows=replica.window_rows if self._is_waiting else runs,
        )
