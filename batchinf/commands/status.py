"""Looking at a job from outside, from its files alone: how it stands, and its first finished rows."""

import contextlib
import time
from collections import Counter
from collections.abc import Generator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from batchinf.base.errors import OutputError
from batchinf.base.slices import JobFolder, Slice, job_folders, read_cut, source_folder
from batchinf.base.storage import Folder
from batchinf.fleet.status import JobStatus, duration, read_status, short_count, status_line
from batchinf.job.open import carried_columns, open_job_input
from batchinf.manifest.lock import LOCK, Holder, judge
from batchinf.manifest.names import part_name
from batchinf.manifest.state import State, read_state
from batchinf.output.counts import remarks
from batchinf.output.journal import Journal
from batchinf.schedule.order import RunOrder
from batchinf.schedule.shards import shard_at, total_rows, total_shards
from batchinf.source.damage import python_rows
from batchinf.spec.job import JobSpec
from batchinf.tasks.registry import task_of

_SHARDS_TO_LOOK_AT = 1000
_AT_WORK = ("starting", "running", "stopping")


def status_lines(out: str) -> list[str]:
    """How a job stands, for people; of one in slices their sum, and a line for each."""
    jobs = job_folders(out)
    if jobs[0].slice is not None:
        return _slices_lines(out, jobs)
    folder, state = _open(out)
    snapshot = read_status(folder)
    lines = [f"{out}: {_stands(folder, state, snapshot)}", *_total_lines([(folder, state)], *_totals(state))]
    if len(state.extents) > 1:
        times = ", ".join(f"{extent.num_rows:,}" for extent in state.extents)
        lines.append(f"rows came in {len(state.extents)} times: {times}")
    if state.retries:
        retry = state.retries[max(state.retries)]
        num_replaced = sum(part.retry == retry.number for part in state.parts.values())
        lines.append(f"{retry}: {num_replaced:,} of {retry.num_shards:,} parts replaced")
    if snapshot is not None and not state.is_done and _live_holder(folder) is not None:
        lines.append(f"{duration(time.time() - snapshot.updated_at)} ago: {status_line(snapshot)}")
        lines.extend(
            f"  replica {replica.replica}: {replica.state}, {replica.in_flight} requests in the engine, "
            f"{replica.num_running} running, KV cache {replica.kv_cache_usage:.0%}, {replica.restarts} restarts"
            for replica in snapshot.replicas
        )
    return lines


def _totals(state: State) -> tuple[int, int]:
    # Output rows and parts of a whole job.
    spec = _spec(state)
    return total_rows(state.extents) * task_of(spec).num_rows_per_input, total_shards(state.extents)


def _total_lines(jobs: Sequence[tuple[Folder, State]], num_rows: int, num_shards: int) -> list[str]:
    """The job, and what is committed of it, over all of its slices that have begun."""
    states = [state for _, state in jobs]
    first = min(states, key=lambda state: state.header.created_at)
    header, spec = first.header, _spec(first)
    return [
        f"model {spec.model.name}, task {task_of(spec).name}, begun {header.created_at}, "
        f"{sum(state.last_epoch for state in states)} start(s), "
        f"{duration(sum(state.device_s for state in states))} of device time in ended replicas",
        f"committed: {sum(state.num_rows for state in states):,} of {num_rows:,} rows in "
        f"{sum(len(state.parts) for state in states):,} of {num_shards:,} parts, "
        f"{sum(state.num_errors for state in states):,} errors, "
        f"{sum(state.num_bytes for state in states) / 2**20:,.1f} MiB, "
        f"{short_count(sum(state.num_prompt_tokens for state in states))} prompt and "
        f"{short_count(sum(state.num_output_tokens for state in states))} output tokens",
        *remarks(jobs),
    ]


def _slices_lines(out: str, jobs: Sequence[JobFolder]) -> list[str]:
    cut = read_cut(out)
    assert cut is not None
    begun: list[tuple[Folder, State]] = []
    numbers = Counter[str]()
    lines = []
    for job in jobs:
        if (state := _read(job.folder)) is None:
            numbers["not begun"] += 1
            lines.append(f"  slice {job.slice} has not begun")
        else:
            begun.append((job.folder, state))
            numbers[_doing(job.folder, state, read_status(job.folder))[0]] += 1
            lines.extend(_slice_lines(job, state))
    summary = ", ".join(f"{number} {doing}" for doing, number in numbers.items())
    # What is to come of slices that have not begun is known in rows, but not in parts.
    num_rows = cut.num_rows * cut.identity.get("sampling.n", 1)
    num_shards = sum(total_shards(state.extents) for _, state in begun)
    total = _total_lines(begun, num_rows, num_shards) if begun else []
    return [f"{out}: {cut.num_slices} slices: {summary}", *total, *lines]


def _slice_lines(job: JobFolder, state: State) -> list[str]:
    snapshot = read_status(job.folder)
    stands = _stands(job.folder, state, snapshot)
    rows = f"{state.num_rows:,} of {_totals(state)[0]:,} rows, {state.num_errors:,} errors"
    lines = [f"  slice {job.slice}: {stands}; {rows}"]
    if snapshot is not None and not state.is_done and _live_holder(job.folder) is not None:
        lines.append(f"    {duration(time.time() - snapshot.updated_at)} ago: {status_line(snapshot)}")
    return lines


def _stands(folder: Folder, state: State, snapshot: JobStatus | None) -> str:
    doing, holder = _doing(folder, state, snapshot)
    if holder is not None:
        return f"{doing}, by {holder} since {holder.since}"
    return doing if state.is_done else f"{doing} before its end; run the same command again to go on"


def _doing(folder: Folder, state: State, snapshot: JobStatus | None) -> tuple[str, Holder | None]:
    """What becomes of a job in one word, and who runs it."""
    if state.is_done:
        return "done", None
    holder = _live_holder(folder)
    if holder is None:
        return "stopped", None
    # A snapshot of an earlier life says nothing of this one.
    return (snapshot.state if snapshot is not None and snapshot.state in _AT_WORK else "starting"), holder


def _live_holder(folder: Folder) -> Holder | None:
    try:
        holder = Holder.decode(folder.read(LOCK))
    except FileNotFoundError:
        return None
    return holder if holder is not None and judge(holder) != "dead" else None


def head_rows(out: str, num_rows: int) -> list[dict[str, Any]]:
    """The first `num_rows` finished rows as Python values, in the order of their places in the input; with an
    `input.order` of its own, those of the job's first parts.
    """
    rows: list[dict[str, Any]] = []
    with contextlib.closing(_tables_of_all(out, num_rows)) as tables:
        for table in tables:
            found = python_rows(table.slice(0, num_rows - len(rows)))
            rows.extend(values or {"error": error} for values, error in found)
            if len(rows) >= num_rows:
                break
    return rows


def _tables_of_all(out: str, num_rows: int) -> Generator[pa.Table, None, None]:
    jobs = job_folders(out)
    if jobs[0].slice is None:
        yield from _finished_tables(*_open(out), num_rows)
        return
    for job in jobs:
        if (state := _read(job.folder)) is not None:
            yield from _finished_tables(job.folder, state, num_rows)


def _finished_tables(folder: Folder, state: State, num_rows: int) -> Generator[pa.Table, None, None]:
    with contextlib.ExitStack() as stack:
        journalled = None
        for shard in range(min(total_shards(state.extents), _SHARDS_TO_LOOK_AT)):
            if shard in state.parts:
                yield from _part_tables(folder, f"parts/{part_name(shard)}")
            else:
                if journalled is None:
                    journalled = _Journalled(folder, state)
                    stack.callback(journalled.close)
                yield journalled.rows(shard, num_rows)


def _part_tables(folder: Folder, name: str) -> Generator[pa.Table, None, None]:
    try:
        with pq.ParquetFile(folder.path(name)) as file:
            yield from (file.read_row_group(index) for index in range(file.num_row_groups))
    except (pa.ArrowException, OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:300]
        raise OutputError(f"{folder.path(name)} is damaged: {reason}") from error


class _Journalled:
    """Finished rows that are in no part yet."""

    def __init__(self, folder: Folder, state: State) -> None:
        self._spec = _spec(state)
        self._task = task_of(self._spec)
        self._journal = Journal(folder, "look", self._task.result_schema)
        cache = source_folder(folder, Slice.of(state.header.identity))
        self._source = open_job_input(self._spec, cache, state.source_fingerprints, "ignore")
        self._columns = carried_columns(self._spec)
        self._order = RunOrder(folder, state.extents)

    def close(self) -> None:
        """Close the input."""
        self._source.close()

    def rows(self, shard: int, num_rows: int) -> pa.Table:
        """The journal's first results of one shard, as output rows."""
        # Segments that are gone by now are in a part: they are seen at the next look.
        tables = []
        for segment in self._journal.recover(shard).segments:
            with contextlib.suppress(FileNotFoundError):
                tables.append(segment.table())
        results = pa.concat_tables(tables or [self._task.result_schema.empty_table()])
        own = self._order.of(shard_at(self._order.extents, shard))
        is_own = pa.array(own.locals(results["row_index"].to_numpy()) >= 0)
        order = [("row_index", "ascending"), ("request_index", "ascending")]
        results = results.filter(is_own).sort_by(order).slice(0, num_rows)
        indices = list(dict.fromkeys(results["row_index"].to_pylist()))
        if not self._columns:
            return self._task.reduce(None, results)
        columns = [self._source.read_columns(index, index + 1, self._columns) for index in indices]
        empty = self._source.read_columns(0, 0, self._columns)
        return self._task.reduce(pa.concat_tables(columns or [empty]), results)


def _open(out: str) -> tuple[Folder, State]:
    folder = Folder(out)
    state = _read(folder)
    if state is None:
        if (holder := _live_holder(folder)) is not None:
            raise OutputError(f"{out} holds no job yet: {holder} reads its input, since {holder.since}")
        raise OutputError(f"{out} holds no job: there is no manifest in it; give a job's output.path")
    return folder, state


def _read(folder: Folder) -> State | None:
    return read_state(folder) if folder.exists("manifest") else None


def _spec(state: State) -> JobSpec:
    try:
        return JobSpec.model_validate(state.header.spec)
    except ValueError as error:
        raise OutputError("the manifest holds a job that this batchinf cannot read: use the right version") from error
