"""Counts the finished output rows of a run. The coordinator uses it."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from batchinf.fleet.fleet import Ended
from batchinf.fleet.replica import FleetReplica
from batchinf.records import Part
from batchinf.replica.messages import LeaseDone
from batchinf.tasks.base import Task


@dataclass(kw_only=True, eq=False)
class RowCount:
    """The finished output rows of a job, or of a retry, and the errors among them."""

    task: Task
    replicas: Sequence[FleetReplica]
    num_inputs: int
    """Input rows of the whole job, or of the retry."""
    num_committed_shards: int
    """Shards of which nothing is left to run."""
    num_committed_rows: int = 0
    """Output rows that were run and are in committed parts."""
    num_committed_errors: int = 0
    """Errors among these rows."""
    num_committed_inputs: int = 0
    """Input rows of these rows."""
    _errors: Counter[str] = field(default_factory=Counter)
    """Of finished leases, since the start."""
    _stored: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    """Finished output rows, errors among them, and their input rows, that the journal keeps for shards whose part is
    not made yet."""
    _num_kept: int = 0
    """Finished output rows of open shards that stopped replicas had: the journal keeps them."""

    def add_lease(self, finished: LeaseDone) -> None:
        """A lease is finished. Without a part, the journal keeps its rows until its shard is one."""
        self._errors.update(finished.errors)
        if finished.part is None:
            num_rows, num_errors, num_inputs = self._stored.get(finished.lease.index, (0, 0, 0))
            num_errors += sum(finished.errors.values())
            num_inputs += finished.lease.num_to_run
            self._stored[finished.lease.index] = num_rows + finished.num_rows, num_errors, num_inputs

    def add_part(self, part: Part, num_inputs: int) -> None:
        """A part is committed. num_inputs: input rows that were run for it."""
        self.num_committed_shards += 1
        self.num_committed_inputs += num_inputs
        self.num_committed_rows += part.num_rows - part.num_kept
        self.num_committed_errors += part.num_errors - part.num_kept_errors
        self._stored.pop(part.shard, None)

    def add_kept(self, end: Ended) -> None:
        """The journal keeps the finished rows of a replica that was told to stop."""
        self._num_kept += end.num_open_rows

    @property
    def num_in_journal(self) -> int:
        """Finished output rows, of this run, that the journal keeps until their shards are parts."""
        return self._num_kept + self._num_stored

    @property
    def num_done(self) -> int:
        """Finished output rows, by commits and by the replicas' latest reports."""
        return min(self.num_rows, self.num_committed_rows + self.num_in_journal + self._num_open)

    @property
    def num_rows(self) -> int:
        """Output rows of the whole job; see `Task.expected_rows`."""
        num_stored = sum(num_inputs for _, _, num_inputs in self._stored.values())
        num_open = sum(replica.num_open_inputs for replica in self.replicas)
        return self.task.expected_rows(
            self.num_inputs,
            num_done=self.num_committed_rows + self._num_stored + self._num_open,
            num_inputs_done=self.num_committed_inputs + num_stored + num_open,
        )

    @property
    def _num_stored(self) -> int:
        return sum(num_rows for num_rows, _, _ in self._stored.values())

    @property
    def _num_open(self) -> int:
        return sum(replica.num_open_rows for replica in self.replicas)

    @property
    def num_errors(self) -> int:
        """Errors among `num_done`."""
        num_stored = sum(num_errors for _, num_errors, _ in self._stored.values())
        return self.num_committed_errors + num_stored + self._open_errors.total()

    @property
    def errors(self) -> dict[str, int]:
        """Errors since the start by type, the most frequent first."""
        return dict((self._errors + self._open_errors).most_common())

    @property
    def _open_errors(self) -> Counter[str]:
        """Errors of rows that are in no finished lease, by type."""
        return sum((replica.open_errors for replica in self.replicas), Counter())
