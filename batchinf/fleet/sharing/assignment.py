"""Assigns leases to the replicas whose engine is up.

`schedule/leases.py` decides; this module carries out the decisions. If a replica ends with its host, its leases do not
count as tried.

In a trial of `tune`, no replica begins before the engines of all are up: otherwise a short trial would measure the
first engine alone, since the next one on its GPU starts half a minute later.
"""

import math
import time
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import replace

from batchinf.base import faults
from batchinf.fleet.fleet import Ended, Fleet
from batchinf.fleet.replica import FleetReplica
from batchinf.fleet.sharing.quarantine import Quarantine
from batchinf.records import Lease
from batchinf.replica.messages import WARMING_UP, Assign, Key
from batchinf.schedule.leases import PendingRows, ReplicaLoad, Sharing, hold_s, next_leases, revocations

# While few rows are left, each replica reports so often, but with many replicas not more than 1,000 reports a second.
_REPORT_S = 0.05
_REPORTS_PER_S = 1000
# With more replicas, what is left is counted once in each look at all of them, and not after each message.
_FEW_REPLICAS = 64


class Assignment:
    """Hands out the rows of a job, and takes them back."""

    def __init__(
        self,
        fleet: Fleet,
        pending: PendingRows,
        quarantine: Quarantine,
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
        self._quarantine = quarantine
        self._most_tokens = most_tokens
        self._clock = clock
        self._is_waiting = begins_together
        self._first_ready_at: float | None = None
        self._last_ready_at = 0.0
        # The shares as of the last count of the rows that are left; None if they have to be counted.
        self._sharing: Sharing | None = None
        self._gathers = False

    # -- what the coordinator tells it -------------------------------------------------------------------------------

    def assign(self) -> None:
        """Hand out pending rows, and take back leases that another replica can run sooner."""
        if self._is_waiting:
            if self._is_any_awaited:
                return
            self._is_waiting = False
        self._quarantine.give()
        self._hand_out_anew()
        if not self._pending:
            self._take_from_the_busy()

    def assign_to(self, replicas: Iterable[FleetReplica]) -> None:
        """Hand out pending rows to these replicas alone: after `assign`, only they may have room."""
        if self._is_waiting or not self._pending:
            return
        if self._sharing is None or len(self._fleet.replicas) <= _FEW_REPLICAS:
            self._count_left(self._loads(self._fleet.replicas))
        self._hand_out(self._loads(replicas))

    def note_ready(self) -> None:
        """The engine of a replica is up."""
        self._last_ready_at = self._clock()
        self._first_ready_at = self._first_ready_at or self._last_ready_at

    def take_back(self, leases: Iterable[Lease]) -> None:
        """Make leases pending again that a replica has given back. It had not begun them."""
        self._pending.give_back(leases)

    def note_ended(self, end: Ended, held: Container[Key]) -> None:
        """An incarnation has ended: its leases become pending again, except those that are `held`."""
        was_tried = not end.was_host_lost
        left = [lease for lease in end.leases if lease.key not in held]
        self._pending.give_back(replace(lease, attempts=lease.attempts + was_tried) for lease in left)

    def note_stored(self, lease: Lease) -> None:
        """The journal has the results of a lease. With the last lease of a shard, a replica can make its part."""
        self._quarantine.note_stored(lease)
        self._pending.store(lease)

    # -- hand out and take back --------------------------------------------------------------------------------------

    def _hand_out_anew(self) -> None:
        """Compute the shares again from the rows that are left, and hand out rows to all that have room."""
        self._sharing = None
        if self._pending:
            loads = self._loads(self._fleet.replicas)
            self._count_left(loads)
            self._hand_out(loads)

    def _count_left(self, loads: Sequence[ReplicaLoad]) -> None:
        """loads: of all replicas whose engine is up."""
        self._sharing = self._share(loads)
        self._gathers = self._is_gathering

    def _hand_out(self, loads: Sequence[ReplicaLoad]) -> None:
        if not loads:
            return
        sharing = self._sharing
        assert sharing is not None
        by_replica: dict[int, list[Lease]] = {}
        for number, lease in next_leases(self._pending, loads, sharing, is_gathering=self._gathers):
            by_replica.setdefault(number, []).append(lease)
        progress_s = max(_REPORT_S, len(self._fleet.replicas) / _REPORTS_PER_S) if sharing.are_few else 1.0
        for number, leases in by_replica.items():
            faults.point("coordinator.before_assign")
            condemned = tuple(item for lease in leases for item in self._quarantine.condemned_in(lease))
            self._fleet.give(self._fleet.replicas[number], Assign(tuple(leases), condemned, progress_s))

    def _take_from_the_busy(self) -> None:
        """Ask for leases that another replica can run sooner."""
        loads = self._loads(self._fleet.replicas)
        for number, leases in revocations(self._pending, loads, self._share(loads)).items():
            self._fleet.revoke(self._fleet.replicas[number], leases)

    def _loads(self, replicas: Iterable[FleetReplica]) -> list[ReplicaLoad]:
        return [self._load(replica) for replica in replicas if replica.is_running]

    def _load(self, replica: FleetReplica) -> ReplicaLoad:
        return ReplicaLoad(
            replica=replica.number,
            window_rows=replica.window_rows,
            outstanding_rows=replica.outstanding_rows,
            unbegun=replica.unbegun,
            is_accepting=not replica.is_stopping and not self._quarantine.is_on_trial(replica),
            engine_rows=replica.current.engine_rows,
            num_stored=sum(lease.is_stored for lease in replica.current.leases.values()),
        )

    def _share(self, loads: Sequence[ReplicaLoad]) -> Sharing:
        """loads: of all replicas whose engine is up."""
        num_absent = sum(not (replica.is_running or replica.is_given_up) for replica in self._fleet.replicas)
        num_awaited = len(self._coming) if self._is_holding else 0
        return Sharing.of(self._pending, loads, num_awaited=num_awaited, num_absent=num_absent)

    # -- replicas that are not up ------------------------------------------------------------------------------------

    @property
    def _running(self) -> list[FleetReplica]:
        return [replica for replica in self._fleet.replicas if replica.is_running]

    @property
    def _coming(self) -> list[FleetReplica]:
        """Replicas whose engine starts for the first time."""
        starting = (replica for replica in self._fleet.replicas if replica.is_live and not replica.is_up)
        return [replica for replica in starting if not replica.restarts]

    @property
    def _is_any_awaited(self) -> bool:
        """Whether those that are up wait for a replica that has not failed more often than they have.

        If all replicas fail once, because the memory is too small, they wait for each other after the next start.
        """
        coming = [replica.restarts for replica in self._fleet.replicas if not (replica.is_up or replica.is_given_up)]
        up = [replica.restarts for replica in self._running]
        if not up:
            return bool(coming)
        is_any_coming = min(coming, default=math.inf) <= max(up)
        return is_any_coming and self._clock() - self._last_ready_at <= self._fleet.stall_timeout_s

    @property
    def _is_holding(self) -> bool:
        """Whether rows are held back for replicas that are not up."""
        coming = self._coming
        if not coming or self._first_ready_at is None:
            return False
        is_promised = any(replica.state == WARMING_UP for replica in coming)
        return self._clock() - self._first_ready_at < hold_s(self._work_s, is_promised=is_promised)

    @property
    def _work_s(self) -> float | None:
        """How long the rows take at most, by what the engines have shown; None if they have shown nothing."""
        estimates = (self._work_s_by_steps, self._work_s_by_rows)
        return min((estimate for estimate in estimates if estimate is not None), default=None)

    @property
    def _work_s_by_steps(self) -> float | None:
        """The time of a row's steps; None while rows wait in an engine for others to end."""
        states = [replica.current for replica in self._running]
        steps_s = [state.step_s for state in states if state.step_s is not None]
        if self._most_tokens is None or not steps_s or any(state.progress.engine.num_waiting for state in states):
            return None
        return self._most_tokens * max(steps_s)

    @property
    def _work_s_by_rows(self) -> float | None:
        """The time of the rows that are left, as fast as rows were answered so far."""
        answered = (replica.current.progress.num_answered / replica.mean_requests for replica in self._running)
        num_rows = int(sum(answered))
        if not num_rows or self._first_ready_at is None:
            return None
        left = self._pending.num_rows + sum(replica.outstanding_rows for replica in self._fleet.replicas)
        return left * (self._clock() - self._first_ready_at) / num_rows

    @property
    def _is_gathering(self) -> bool:
        """Whether some replicas are starting for the first time, and the first shards may differ from the rest.

        A replica that is up then gets only enough rows to fill its engine, while many rows are left.
        """
        return bool(self._coming) and not self._pending.is_in_order
