"""Looking at a job from outside, from its files alone: how it stands, and its first finished rows."""

import contextlib
import time
from collections.abc import Generator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from batchinf.arrow_damage import python_rows
from batchinf.errors import OutputError
from batchinf.job import SOURCE_FOLDER, carried_columns, open_input
from batchinf.journal import Journal
from batchinf.lock import LOCK, Holder, judge
from batchinf.manifest import State, read_state
from batchinf.parts import part_name
from batchinf.shards import shard_at, total_rows, total_shards
from batchinf.spec import JobSpec
from batchinf.status import JobStatus, count, describe, duration, read_status
from batchinf.storage import Folder
from batchinf.tasks import get_task

_SHARDS_TO_LOOK_AT = 1000
_AT_WORK = ("starting", "running", "stopping")


def status_lines(out: str) -> list[str]:
    """How a job stands, for people."""
    folder, state = _open(out)
    spec = _spec(folder, state)
    num_rows, num_shards = total_rows(state.extents) * spec.sampling.n, total_shards(state.extents)
    snapshot = read_status(folder)
    lines = [
        f"{out}: {_stands(folder, state, snapshot)}",
        f"model {spec.model.name}, task {spec.task}, begun {state.header.created_at}, "
        f"{state.last_epoch} start(s), {duration(state.device_s)} of device time in ended replicas",
        f"committed: {state.num_rows:,} of {num_rows:,} rows in {len(state.parts):,} of {num_shards:,} parts, "
        f"{state.num_errors:,} errors, {state.num_bytes / 2**20:,.1f} MiB, "
        f"{count(state.num_prompt_tokens)} prompt and {count(state.num_output_tokens)} output tokens",
    ]
    if snapshot is not None and not state.is_done and _live_holder(folder) is not None:
        lines.append(f"{duration(time.time() - snapshot.updated_at)} ago: {describe(snapshot)}")
        lines.extend(
            f"  replica {replica.replica}: {replica.state}, {replica.in_flight} requests in the engine, "
            f"{replica.num_running} running, KV cache {replica.kv_cache_usage:.0%}, {replica.restarts} restarts"
            for replica in snapshot.replicas
        )
    return lines


def _stands(folder: Folder, state: State, snapshot: JobStatus | None) -> str:
    if state.is_done:
        return "done"
    holder = _live_holder(folder)
    if holder is not None:
        # A snapshot of an earlier life says nothing of this one.
        doing = snapshot.state if snapshot is not None and snapshot.state in _AT_WORK else "starting"
        return f"{doing}, by {holder} since {holder.since}"
    return "stopped before its end; run the same command again to go on"


def _live_holder(folder: Folder) -> Holder | None:
    try:
        holder = Holder.decode(folder.read(LOCK))
    except FileNotFoundError:
        return None
    return holder if holder is not None and judge(holder) != "dead" else None


def head_rows(out: str, num_rows: int) -> list[dict[str, Any]]:
    """The first `num_rows` finished rows as Python values, in the order of the shards."""
    folder, state = _open(out)
    rows: list[dict[str, Any]] = []
    with contextlib.closing(_finished_tables(folder, state, num_rows)) as tables:
        for table in tables:
            found = python_rows(table.slice(0, num_rows - len(rows)))
            rows.extend(values or {"error": error} for values, error in found)
            if len(rows) >= num_rows:
                break
    return rows


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
        self._spec = _spec(folder, state)
        self._task = get_task(self._spec)
        self._journal = Journal(folder, "look", self._task.result_schema)
        self._source = open_input(self._spec, folder.path(SOURCE_FOLDER))
        self._columns = carried_columns(self._spec)
        self._extents = state.extents

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
        own = shard_at(self._extents, shard)
        is_own = (pc.field("row_index") >= own.start) & (pc.field("row_index") < own.stop)
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
    state = read_state(folder) if folder.exists("manifest") else None
    if state is None:
        raise OutputError(f"{out} holds no job: there is no manifest in it; give a job's output.path")
    return folder, state


def _spec(folder: Folder, state: State) -> JobSpec:
    try:
        return JobSpec.model_validate(state.header.spec)
    except ValueError as error:
        raise OutputError(f"{folder.path('manifest')} holds a job that this batchinf cannot read") from error
