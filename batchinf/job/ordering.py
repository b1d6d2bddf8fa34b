"""The order in which a job's rows run: `input.order`, resolved at the start and again for rows that come later."""

import dataclasses
import itertools
import time
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import pyarrow as pa
import xxhash

from batchinf.base.errors import OutputError
from batchinf.base.storage import Folder
from batchinf.job.choose import CheckLock, Say, begin_choice, check_slice, choose_again
from batchinf.job.job import Job
from batchinf.job.scratch import scratch_database
from batchinf.manifest.state import State
from batchinf.prompts.builder import Outline
from batchinf.records import Int64Array
from batchinf.schedule.positions import RunOrder, positions_name, read_positions, write_positions
from batchinf.spec.job import JobSpec

# (bytes of a block, end of the blocks of this size). 64 bytes are about 16 tokens of text, or 16 token ids, and vLLM's
# own blocks have 16 tokens. Blocks further back in a long prompt are longer: there a partial block matters little.
_BLOCKS = ((64, 4 << 10), (256, 32 << 10), (1 << 10, 256 << 10))
_HASH_BYTES = 4
_ENDS = [
    *range(_BLOCKS[0][0], _BLOCKS[0][1] + 1, _BLOCKS[0][0]),
    *(end for (_, begin), (size, stop) in itertools.pairwise(_BLOCKS) for end in range(begin + size, stop + 1, size)),
]
_MEMORY = "512MB"


def prefix_key(beginning: bytes) -> bytes:
    """The sort key of a prompt: 4 bytes for each block of its beginning; the last may be short. At most 1.6 KB."""
    key = bytearray()
    start = 0
    for end in _ENDS:
        if start >= len(beginning):
            break
        key += xxhash.xxh32_digest(beginning[start:end])
        start = end
    return bytes(key)


def shared_bytes(one: bytes, other: bytes) -> int:
    """Bytes that two prompts have in common from the beginning, by their keys. Only whole blocks count."""
    most = min(len(one), len(other)) // _HASH_BYTES
    num_blocks = next((i for i in range(most) if one[4 * i : 4 * i + 4] != other[4 * i : 4 * i + 4]), most)
    return _ENDS[num_blocks - 1] if num_blocks else 0


def shared_in_order(keys: Sequence[bytes]) -> int:
    """Bytes that prompts have in common with any earlier one. Assumes a cache that keeps all earlier prompts."""
    seen: set[int] = set()
    total = 0
    for key in keys:
        chain = xxhash.xxh3_64()
        shared = 0
        for i in range(0, len(key), _HASH_BYTES):
            chain.update(key[i : i + _HASH_BYTES])
            digest = chain.intdigest()
            if digest in seen:
                shared = i // _HASH_BYTES + 1
            seen.add(digest)
        total += _ENDS[shared - 1] if shared else 0
    return total


def shared_when_sorted(keys: Iterable[bytes]) -> int:
    """Bytes that prompts have in common with the previous prompt, after sorting by their keys."""
    ordered = sorted(keys)
    return sum(shared_bytes(one, other) for one, other in itertools.pairwise(ordered))


KeyedRows = tuple[Int64Array, Sequence[bytes | None]]


def sort_rows(
    folder: Folder, keyed: Iterable[KeyedRows], num_waves: int = 1, num_hands: int = 1
) -> Iterator[Int64Array]:
    """Sort rows by their keys, on disk in the output folder if they do not fit into memory; some rows at a time.

    keyed: rows, by position, and the key of each. Rows with the same key are in the order of their positions. Rows
    without a key come last.

    The rows can be dealt like cards: the ordered rows are cut into waves of equal size, and each wave is dealt, row by
    row, into hands. The hands then follow each other.
    """
    with scratch_database(folder, _MEMORY) as scratch:
        scratch.run("CREATE TABLE keys (is_last BOOLEAN, key BLOB, row BIGINT)")
        num_rows = 0
        for rows, keys in keyed:
            # Rows without a prompt have no key. If they ran among the first thousand rows, their errors could end the
            # job.
            is_last = pa.array([key is None for key in keys])
            keys_or_empty = pa.array([key or b"" for key in keys], pa.binary())
            batch = pa.table({"is_last": is_last, "key": keys_or_empty, "row": pa.array(rows)})
            scratch.run("INSERT INTO keys FROM batch", batch=batch)
            num_rows += len(rows)
        query = "SELECT row FROM keys ORDER BY is_last, key, row"
        if (num_waves, num_hands) != (1, 1):
            size = max(1, -(-num_rows // num_waves))
            ranks = "SELECT row, row_number() OVER (ORDER BY is_last, key, row) - 1 AS rank FROM keys"
            query = f"SELECT row FROM ({ranks}) ORDER BY rank // {size}, rank % {size} % {num_hands}, rank"
        for batch in scratch.batches(query):
            yield np.asarray(batch.column(0).to_numpy(), np.int64)


# Rows read at once.
_AT_ONCE = 256
# `auto` samples SAMPLED_ROWS rows in runs of RUN_ROWS consecutive rows. A run stands for the rows that a cache would
# remember if rows ran in the input's order.
SAMPLED_ROWS = 20_000
RUN_ROWS = 500
# `auto` sorts by prefix if this saves at least this share of the prompts, compared with the input's order.
LEAST_SAVED = 0.1
_MOST_TOKENS = 2**32 - 1
# The longer half of the rows runs first. Each half is dealt into hands, and each hand goes from the longest row to the
# shortest, so that all shards of a half are alike. In plain order, or with more waves, the replica that is up first
# gets the longest rows, and the others wait for it at the end (`benchmarks/tail.py`).
WAVES_AND_HANDS = (2, 128)


def begin(job: Job, say: Say, check_lock: CheckLock) -> tuple[RunOrder, str]:
    """Choose and order the rows of a new job. Returns them, and the value of `input.order` by which they run."""
    chosen = begin_choice(job, say, check_lock)
    ordered_by: str = job.spec.input.order
    if ordered_by == "auto":
        ordered_by = _decide(job, chosen, say)
    return in_order(job, chosen, ordered_by, None, say=say, check_lock=check_lock), ordered_by


def in_order(
    job: Job,
    chosen: RunOrder,
    ordered_by: str,
    state: State | None,
    *,
    say: Say = lambda line: None,
    check_lock: CheckLock = lambda: None,
) -> RunOrder:
    """Store the chosen rows in the order that `ordered_by` names, and return it. check_lock: see `write_positions`."""
    if ordered_by == "input" or len(chosen) < 2:
        return chosen
    began = time.monotonic()
    say(f"ordering {len(chosen):,} rows by {_WORDS[ordered_by]}")
    # The order covers the whole extent, because rows with the same prefix may be anywhere in it. Each part is sorted by
    # position again. Seeds and prompts depend only on positions, so the order changes no value.
    builder = job.prompt_builder(state)
    keyed = (
        (rows, [_key(builder.outline(row), ordered_by) for row in job.source.read_rows(rows, builder.columns)])
        for rows in chosen.pieces(_AT_ONCE)
    )
    rows_in_order = sort_rows(job.folder, keyed, *(WAVES_AND_HANDS if ordered_by == "longest" else ()))
    stored = write_positions(job.folder, chosen.number, rows_in_order, job.source.num_rows, check_lock=check_lock)
    say(f"the rows are in order; that took {time.monotonic() - began:.1f} s")
    extent = dataclasses.replace(chosen.extents[0], positions=stored.digest)
    return RunOrder(job.folder, [extent], chosen.number)


def restore(job: Job, state: State, say: Say) -> None:
    """Make missing or altered files of positions again. Raises OutputError if there are other rows in them now."""
    if job.slice is not None:
        check_slice(job, state.extents[0], say)
    ordered_by = str(state.header.layout.get("order", "input"))
    for number, extent in enumerate(state.extents, 1):
        if extent.positions is None or read_positions(job.folder, number, extent.positions) is not None:
            continue
        name = job.folder.path(positions_name(number))
        say(f"warning: {name} is gone or altered; {'choosing' if state.is_in_order else 'ordering'} its rows again")
        order = in_order(job, choose_again(job, number, state, say), ordered_by, state)
        if order.extents[0].positions != extent.positions:
            raise OutputError(
                f"{name} is gone or altered, and spec and input now choose other rows or another order: "
                f"{len(order):,} rows, not {extent.num_rows:,}; restore the file, or give the job another "
                "output.path"
            )


_WORDS = {"prefix": "the prefix of their prompts", "longest": "their max_tokens, the longer half first"}


def _key(outline: Outline, ordered_by: str) -> bytes | None:
    if outline.beginning is None:
        return None
    if ordered_by == "prefix":
        return prefix_key(outline.beginning)
    # A row without its own limit may be the longest of all.
    longest = _MOST_TOKENS if outline.max_tokens is None else min(outline.max_tokens, _MOST_TOKENS)
    return (_MOST_TOKENS - longest).to_bytes(4, "big")


# -- auto --------------------------------------------------------------------------------------------------------------


def _decide(job: Job, chosen: RunOrder, say: Say) -> str:
    """Choose the best order from a sample of the rows, and print a line about it."""
    own_lengths = has_own_lengths(job.spec)
    otherwise = ("longest", "by max_tokens, the longer half first") if own_lengths else ("input", "as in the input")
    if (reason := no_cache(job)) is not None:
        say(f"order: {otherwise[1]}, as {reason}")
        return otherwise[0]
    saved, num_rows = saved_share(_runs(job, chosen))
    seen = f"sorting would take {saved:.0%} more of {num_rows:,} rows' prompts from the prefix cache"
    if saved >= LEAST_SAVED:
        say(f"order: by prefix: {seen}")
        return "prefix"
    say(f"order: {otherwise[1]}: {seen}, less than {LEAST_SAVED:.0%}")
    return otherwise[0]


def no_cache(job: Job) -> str | None:
    """The reason why requests never hit vLLM's prefix cache; None if they may."""
    if job.spec.engine.get("enable_prefix_caching") is False:
        return "engine.enable_prefix_caching is false"
    if job.task.reads_prompt_logits:
        return "vLLM computes prompts whole if their logprobs are wanted"
    return None


def has_own_lengths(spec: JobSpec) -> bool:
    """Whether each row has its own limit for the length of its output."""
    return "max_tokens" in spec.sampling.columns


def saved_share(runs: Sequence[Sequence[bytes]]) -> tuple[float, int]:
    """The share of the prompts, 0 to 1, that is cached only if rows are sorted; and the number of rows.

    runs: the beginnings of consecutive rows' prompts. The cache is assumed to remember one run. The true share may be
    larger: a sample of a large input rarely has two rows of a small group with the same prefix.
    """
    keys = [[prefix_key(beginning) for beginning in run] for run in runs]
    total = sum(len(beginning) for run in runs for beginning in run)
    more = shared_when_sorted(key for run in keys for key in run) - sum(map(shared_in_order, keys))
    return max(0.0, more / max(1, total)), sum(map(len, runs))


def _runs(job: Job, chosen: RunOrder) -> list[list[bytes]]:
    """Beginnings of the sampled rows' prompts, by run. A small input is sampled whole."""
    builder = job.prompt_builder()
    runs = []
    for start, stop in sampled_runs(len(chosen)):
        pieces = (job.source.read_rows(rows, builder.columns) for rows in chosen.pieces(_AT_ONCE, start, stop))
        beginnings = (builder.outline(row).beginning for rows in pieces for row in rows)
        runs.append([beginning for beginning in beginnings if beginning is not None])
    return runs


def sampled_runs(num_rows: int) -> list[tuple[int, int]]:
    """Runs of at most RUN_ROWS rows, as (start, stop), evenly spread; together at most SAMPLED_ROWS rows."""
    starts = range(0, num_rows, RUN_ROWS)
    most = SAMPLED_ROWS // RUN_ROWS
    if len(starts) > most:
        starts = [num_rows * i // most for i in range(most)]  # type: ignore[assignment]
    return [(start, min(start + RUN_ROWS, num_rows)) for start in starts]
