"""Counts finished output rows and errors, in committed parts, in the journal and in replicas, for the coordinator."""

from collections import Counter
from collections.abc import Sequence

from batchinf.fleet.fleet import Ended
from batchinf.fleet.replica import FleetReplica, LeaseFinished
from batchinf.manifest.state import Committed
from batchinf.records import Part


class RowCount:
    """The finished output rows of a job, or of a retry, and the errors among them."""

    def __init__(self, num_rows: int, committed: Committed, replicas: Sequence[FleetReplica]) -> None:
        """num_rows: of the whole job. committed: its shards with a part so far."""
        self.num_rows = num_rows
        self.committed = committed
        self._replicas = replicas
        self._errors: Counter[str] = Counter()  # of finished leases, since the start
        # Finished output rows, and errors among them, that the journal keeps for shards whose part is not made yet.
        self._stored: dict[int, tuple[int, int]] = {}
        # Finished output rows of open shards that stopped replicas had: the journal keeps them.
        self._num_kept = 0

    def add_lease(self, finished: LeaseFinished) -> None:
        """A lease is finished. Without a part, the journal keeps its rows until its shard is one."""
        self._errors.update(finished.errors)
        if finished.part is None:
            num_rows, num_errors = self._stored.get(finished.lease.index, (0, 0))
            num_errors += sum(finished.errors.values())
            self._stored[finished.lease.index] = num_rows + finished.num_rows, num_errors

    def add_part(self, part: Part) -> None:
        """A part is committed."""
        self.committed.add(part)
        self._stored.pop(part.shard, None)

    def add_kept(self, end: Ended) -> None:
        """The journal keeps the finished rows of a replica that was told to stop."""
        self._num_kept += end.num_open_rows

    @property
    def num_in_journal(self) -> int:
        """Finished output rows, of this run, that the journal keeps until their shards are parts."""
        return self._num_kept + sum(num_rows for num_rows, _ in self._stored.values())

    @property
    def num_done(self) -> int:
        """Finished output rows, by commits and by the replicas' latest reports."""
        open_rows = sum(replica.num_open_rows for replica in self._replicas)
        return min(self.num_rows, self.committed.num_rows + self.num_in_journal + open_rows)

    @property
    def num_errors(self) -> int:
        """Errors among `num_done`."""
        num_stored = sum(num_errors for _, num_errors in self._stored.values())
        return self.committed.num_errors + num_stored + self._open_errors.total()

    @property
    def errors(self) -> dict[str, int]:
        """Errors since the start by type, the most frequent first."""
        return dict((self._errors + self._open_errors).most_common())

    @property
    def _open_errors(self) -> Counter[str]:
        """Errors of rows that are in no finished lease, by type."""
        return sum((replica.open_errors for replica in self._replicas), Counter())
