"""`--retry`: chooses the rows that run again, with changed sampling, and finds unfinished retries for `epoch`."""

import dataclasses
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from batchinf.base import faults
from batchinf.base.errors import DriftError, OutputError
from batchinf.base.parquet import open_part
from batchinf.job.open import Job, PreparedJob, check_drift
from batchinf.manifest.lines import Header, Retry
from batchinf.manifest.log import Manifest
from batchinf.manifest.names import part_name
from batchinf.manifest.state import State
from batchinf.output.replace import piece_rows
from batchinf.records import Int64Array
from batchinf.schedule.positions import RETRY_FOLDER, Positions, RunOrder, read_positions, write_positions
from batchinf.schedule.predicate import Predicate
from batchinf.schedule.shards import total_shards
from batchinf.spec.sampling import SamplingSpec

_SAMPLING = "sampling."
# A retry cannot change these: they change the output's columns, their meaning or the number of rows.
_FIXED = frozenset(
    f"sampling.{name}" for name in ("n", "logprobs", "prompt_logprobs", "logprob_token_ids", "logprobs_mode")
)
_ROWS_AT_ONCE = 16384


@dataclass(frozen=True, slots=True)
class RetryRequest:
    """The user's request. is_under_way: the unfinished retry is the same one, and it continues."""

    predicate: Predicate
    overrides: dict[str, Any]
    is_under_way: bool


@dataclass(frozen=True, slots=True)
class RetryPhase:
    """The rest of a retry.

    job: with the retry's sampling. num_chosen: int64 [total_shards], rows to run in each shard. chosen: the rows that
    the retry chose.
    """

    retry: Retry
    job: Job
    num_chosen: npt.NDArray[np.int64]
    chosen: Positions


def as_begun(prepared: PreparedJob, header: Header, files: Sequence[str]) -> tuple[PreparedJob, dict[str, Any]]:
    """The job with its original sampling, and the sampling fields that the user has changed for a retry.

    files: see `check_drift`.
    Raises DriftError if something changed that a retry cannot change.
    """
    identity = prepared.identity
    changed = {name for name, value in identity.items() if header.identity.get(name, value) != value}
    overrides = {name: identity[name] for name in sorted(changed - _FIXED) if name.startswith(_SAMPLING)}
    try:
        check_drift(prepared, header, {**identity, **{name: header.identity[name] for name in overrides}}, files)
    except DriftError as error:
        raise DriftError(
            f"{error}\nwith --retry, the fields of sampling may change, except n and those of logprobs"
        ) from None
    spec = prepared.spec.model_copy(update={"sampling": _sampling(header.spec["sampling"])})
    return dataclasses.replace(prepared, spec=spec), overrides


def take_request(job: Job, state: State, text: str | None, overrides: dict[str, Any]) -> RetryRequest | None:
    """The request, or None without a predicate. job: with its original sampling.

    Raises PredicateError if the text is not a predicate, and OutputError if another retry is unfinished.
    """
    if text is None:
        return None
    predicate = Predicate(text, state.header.columns.part_schema)
    last = state.retries[max(state.retries)] if state.retries and not state.is_done else None
    is_same = last is not None and (last.predicate, last.overrides) == (predicate.text, overrides)
    if last is not None and not is_same and _is_unfinished(job, state, last):
        raise OutputError(
            f"{job.folder.root} has an unfinished {last}; finish it first with the command that started it, or with "
            "`run` without --retry and its --set; then start another"
        )
    return RetryRequest(predicate, overrides, is_same)


def begin_retry(job: Job, state: State, manifest: Manifest, request: RetryRequest) -> Retry | None:
    """Choose the rows of a new retry and store the choice; None if no row matches. All other work must be done."""
    number = 1 + max([0, *state.retries, *(part.retry for part in state.parts.values())])
    shards = range(total_shards(state.extents))
    retry = Retry(
        number=number,
        predicate=request.predicate.text,
        overrides=request.overrides,
        num_rows=0,
        num_shards=0,
        positions="",
        stop_row=state.extents[-1].stop_row,
    )
    return _choose(job, state, manifest, request.predicate, retry, shards)


def next_phase(job: Job, state: State, manifest: Manifest) -> RetryPhase | None:
    """The first unfinished retry. All shards must be committed. A shard that lost its part repeats all retries."""
    levels = np.array([state.parts[shard].retry for shard in range(total_shards(state.extents))])
    order = RunOrder(job.folder, state.extents)
    last_rows = np.array([rows.last for rows in order.shards()])
    for number in sorted(state.retries):
        retry = state.retries[number]
        # Rows of later extents do not belong to the retry.
        behind = (last_rows < retry.stop_row) & (levels < number)
        chosen = _chosen_rows(job, number, retry.positions)
        if chosen is None and behind.any():
            # The file is lost. The shards that are behind the retry are unchanged, so the same rows match again.
            predicate = Predicate(retry.predicate, state.header.columns.part_schema)
            _choose(job, state, manifest, predicate, retry, np.flatnonzero(behind).tolist())
            chosen = _chosen_rows(job, number)
        elif chosen is not None and behind.any() and state.event_counts["lost"]:
            # When a lost file was made again, the shards that had finished the retry were left out. If such a shard
            # loses its part later, its rows are chosen here.
            empty = behind & (chosen.counts(order.shards()) == 0)
            if empty.any():
                predicate = Predicate(retry.predicate, state.header.columns.part_schema)
                _choose(job, state, manifest, predicate, retry, np.flatnonzero(empty).tolist(), chosen)
                chosen = _chosen_rows(job, number)
        if chosen is None:
            continue
        num_chosen = np.where(behind, chosen.counts(order.shards()), 0)
        if num_chosen.any():
            return RetryPhase(retry, _with_overrides(job, retry.overrides), num_chosen, chosen)
    return None


def _chosen_rows(job: Job, number: int, digest: str | None = None) -> Positions | None:
    return read_positions(job.folder, number, digest, RETRY_FOLDER)


def _choose(
    job: Job,
    state: State,
    manifest: Manifest,
    predicate: Predicate,
    retry: Retry,
    shards: Iterable[int],
    before: Positions | None = None,
) -> Retry | None:
    """Store the matching rows of these shards, and the rows that were chosen before."""
    found = (rows for shard in shards for rows in _matching(job, shard, predicate))
    known = () if before is None else before.pieces(_ROWS_AT_ONCE)
    first_row, stop_row = state.extents[0].first_row, retry.stop_row
    bits = _bits(itertools.chain(known, found), first_row, stop_row - first_row)
    if not bits.any():
        return None
    own, rows = (job.folder, retry.number), _rows_of(bits, first_row)
    chosen = write_positions(*own, rows, stop_row, where=RETRY_FOLDER, check_lock=manifest.check_lock)
    counts = chosen.counts(RunOrder(job.folder, state.extents).shards())
    num_rows, num_shards = int(counts.sum()), int(np.count_nonzero(counts))
    if retry.positions:  # keep the numbers of the first choice
        num_rows, num_shards = retry.num_rows, retry.num_shards
    retry = dataclasses.replace(retry, num_rows=num_rows, num_shards=num_shards, positions=chosen.digest)
    faults.point("retry.before_line")
    manifest.retry(retry)
    manifest.commit()
    faults.point("retry.after_line")
    state.note_retry(retry)
    return retry


def _bits(found: Iterable[Int64Array], first_row: int, num_rows: int) -> npt.NDArray[np.uint8]:
    """One bit a row from `first_row` on: parts of an ordered job have rows from anywhere, and a row may match twice."""
    bits = np.zeros(-(-num_rows // 8), np.uint8)
    for rows in found:
        offsets = rows - first_row
        np.bitwise_or.at(bits, offsets >> 3, np.left_shift(1, offsets & 7).astype(np.uint8))
    return bits


def _rows_of(bits: npt.NDArray[np.uint8], first_row: int) -> Iterator[Int64Array]:
    for start in range(0, len(bits), _ROWS_AT_ONCE):
        rows = np.flatnonzero(np.unpackbits(bits[start : start + _ROWS_AT_ONCE], bitorder="little"))
        yield rows + (first_row + 8 * start)


def _matching(job: Job, shard: int, predicate: Predicate) -> Iterable[npt.NDArray[np.int64]]:
    with open_part(job.folder.path(f"parts/{part_name(shard)}"), page_checksum_verification=True) as file:
        at_once = min(_ROWS_AT_ONCE, piece_rows(file.metadata, predicate.columns))
        for batch in file.iter_batches(at_once, columns=predicate.columns):
            yield predicate.matches(pa.Table.from_batches([batch]))


def _is_unfinished(job: Job, state: State, retry: Retry) -> bool:
    chosen = _chosen_rows(job, retry.number, retry.positions)
    if chosen is None:
        return True
    counts = chosen.counts(RunOrder(job.folder, state.extents).shards())
    return any(
        counts[shard] and (shard not in state.parts or state.parts[shard].retry < retry.number)
        for shard in range(len(counts))
    )


def _with_overrides(job: Job, overrides: dict[str, Any]) -> Job:
    changed = {name.removeprefix(_SAMPLING): value for name, value in overrides.items()}
    sampling = _sampling({**job.spec.sampling.model_dump(mode="json"), **changed})
    return dataclasses.replace(job, spec=job.spec.model_copy(update={"sampling": sampling}))


def _sampling(fields: dict[str, Any]) -> SamplingSpec:
    return SamplingSpec.model_validate_json(json.dumps(fields))
