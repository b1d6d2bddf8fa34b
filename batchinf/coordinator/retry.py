"""`--retry` and the section `retry`: choose the rows that run again, and find unfinished retries for `run`."""

import dataclasses
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic import ValidationError

from batchinf.base import faults
from batchinf.base.errors import DriftError, OutputError, SpecError
from batchinf.base.parquet import open_part
from batchinf.coordinator.repair import RepairFile, take_rows
from batchinf.job.choose import Say
from batchinf.job.drift import check_drift
from batchinf.job.job import Job, PreparedJob, carried_fields
from batchinf.manifest.columns import Columns
from batchinf.manifest.lines import Header, Retry
from batchinf.manifest.log import Manifest
from batchinf.manifest.names import part_name
from batchinf.manifest.state import State
from batchinf.output.mirror import Mirror
from batchinf.output.replace import piece_rows
from batchinf.records import BoolArray, Int64Array, Part
from batchinf.schedule.positions import RETRY_FOLDER, Positions, RowBits, RunOrder, read_positions, write_positions
from batchinf.schedule.predicate import ERRORS_WORD, Predicate
from batchinf.schedule.shards import total_shards
from batchinf.spec.retry import FIXED_SAMPLING, SAMPLING, SAMPLING_COLUMNS
from batchinf.spec.sampling import SamplingSpec

_ROWS_AT_ONCE = 16384


@dataclass(frozen=True, slots=True)
class UnfinishedRetry:
    """The rest of a retry."""

    retry: Retry
    job: Job
    """The job with the retry's sampling."""
    num_chosen: npt.NDArray[np.int64]
    """int64 [total_shards]: rows to run in each shard."""
    chosen: Positions
    """The rows that the retry chose."""


def as_begun(prepared: PreparedJob, header: Header, files: Sequence[str]) -> PreparedJob:
    """The job with its original sampling. The sampling fields that the user has changed become its `overrides`.

    files: see `check_drift`. Raises DriftError if something changed that a retry cannot change.
    """
    identity = prepared.identity
    changed = {name for name, value in identity.items() if header.identity.get(name, value) != value}
    fixed = FIXED_SAMPLING | {
        name for name in (SAMPLING_COLUMNS,) if _samples_of(identity) != _samples_of(header.identity)
    }
    overrides = {name: identity[name] for name in sorted(changed - fixed) if name.startswith(SAMPLING)}
    try:
        check_drift(prepared, header, {**identity, **{name: header.identity[name] for name in overrides}}, files)
    except DriftError as error:
        raise DriftError(
            f"{error}\nwith --retry, the fields of sampling may change, except n and those of logprobs; any other "
            "change needs a new job with another output.path"
        ) from None
    spec = prepared.spec.model_copy(update={"sampling": _sampling(header.spec["sampling"])})
    return dataclasses.replace(prepared, spec=spec, overrides=overrides)


def _samples_of(identity: Mapping[str, Any]) -> object:
    """The column with the number of samples of each row, which a retry cannot change."""
    return (identity.get(SAMPLING_COLUMNS) or {}).get("n")


def new_retry(
    job: Job, state: State, text: str | None, overrides: Mapping[str, Any], *, given: RepairFile | None = None
) -> Predicate | None:
    """The predicate of a retry to begin; None if none is asked for, or if it is the unfinished one, which continues.

    job: with its original sampling. given: the file from which it takes rows. Raises PredicateError if the text is not
    a predicate, and OutputError if another retry is unfinished.
    """
    if text is None:
        return None
    predicate = Predicate(text, state.header.columns.part_schema)
    last = state.retries[max(state.retries)] if state.retries and not state.is_done else None
    if last is not None and last.is_automatic:  # the run finishes it, and then all attempts, before it begins this one
        return predicate
    wanted = (predicate.text, overrides, given and given.content)
    if last is not None and (last.predicate, last.overrides, last.repair and last.repair.content) == wanted:
        return None
    if last is not None and _is_unfinished(job, state, last):
        raise OutputError(
            f"{job.folder.root} has an unfinished {last}; finish it first with the command that started it, or with "
            "`run` without --retry, --input and its --set; then start another"
        )
    return predicate


def begin_retry(
    job: Job,
    state: State,
    manifest: Manifest,
    predicate: Predicate,
    *,
    overrides: Mapping[str, Any],
    attempt: int | None = None,
    given: RepairFile | None = None,
    say: Say = lambda line: None,
    mirror: Mirror | None = None,
) -> Retry | None:
    """Choose the rows of a new retry and store the choice; None if no row matches. All other work must be done.

    attempt: of the section `retry`; None: by hand. given: the file from which it takes rows. mirror: of a job in a
    bucket, from which the parts are fetched. Raises InputError if rows of the file do not fit.
    """
    by_hand = 0 if given is not None else 1 + max([0, *(retry.attempt for retry in state.retries.values())])
    retry = Retry(
        number=1 + max([0, *state.retries, *(part.retry for part in state.parts.values())]),
        predicate=predicate.text,
        overrides=dict(overrides),
        num_rows=0,
        num_shards=0,
        positions="",
        stop_row=state.extents[-1].stop_row,
        attempt=by_hand if attempt is None else attempt,
        is_automatic=attempt is not None,
    )
    shards = np.flatnonzero(_first_rows(RunOrder(job.folder, state.extents)) >= _first_row(state, retry)).tolist()
    return _choose(job, state, manifest, retry, predicate=predicate, shards=shards, mirror=mirror, given=given, say=say)


def next_retry(job: Job, state: State, manifest: Manifest, mirror: Mirror | None = None) -> UnfinishedRetry | None:
    """The first unfinished retry. All shards must be committed. A shard that lost its part repeats all retries.

    mirror: of a job in a bucket; the parts that the retry replaces are then fetched.
    """
    levels = np.array([state.parts[shard].retry for shard in range(total_shards(state.extents))])
    order = RunOrder(job.folder, state.extents)
    first_rows = _first_rows(order)
    last_rows = np.array([rows.last for rows in order.shards()])
    for number in sorted(state.retries):
        retry = state.retries[number]
        # Rows of later extents do not belong to the retry, nor those that have had the attempt before.
        behind = (first_rows >= _first_row(state, retry)) & (last_rows < retry.stop_row) & (levels < number)
        chosen = _chosen_rows(job, number, retry.positions)
        missing = _not_chosen(state, order, chosen, behind)
        if missing.any():
            predicate = Predicate(retry.predicate, state.header.columns.part_schema)
            shards = np.flatnonzero(missing).tolist()
            _choose(job, state, manifest, retry, predicate=predicate, shards=shards, before=chosen, mirror=mirror)
            chosen = _chosen_rows(job, number)
        num_chosen = np.where(behind, 0 if chosen is None else chosen.counts(order.shards()), 0)
        if chosen is not None and num_chosen.any():
            if mirror is not None and _fetch(mirror, state, manifest, np.flatnonzero(num_chosen).tolist()):
                return next_retry(job, state, manifest, mirror)
            return UnfinishedRetry(retry, _with_overrides(job, retry.overrides), num_chosen, chosen)
    return None


def covered(state: State, attempt: int, before: int | None = None) -> int:
    """The first row that has not had this attempt. before: as it was before the retry of this number."""
    had = (
        retry.stop_row
        for retry in state.retries.values()
        if retry.attempt >= attempt and (before is None or retry.number < before)
    )
    return max(had, default=state.extents[0].first_row)


def _first_row(state: State, retry: Retry) -> int:
    """The first row that belongs to a retry."""
    return covered(state, retry.attempt, retry.number) if retry.attempt else state.extents[0].first_row


def _first_rows(order: RunOrder) -> Int64Array:
    return np.array([rows.first for rows in order.shards()], np.int64)


def _not_chosen(state: State, order: RunOrder, chosen: Positions | None, behind: BoolArray) -> BoolArray:
    """The shards behind the retry whose rows its file does not have."""
    if chosen is None:
        # The file is lost. The shards that are behind the retry are unchanged, so the same rows match again.
        return behind
    if not behind.any() or not state.has_lost:
        return np.zeros_like(behind)
    # When a lost file was made again, the shards that had finished the retry were left out. If such a shard has lost
    # its part since, its rows are chosen again.
    has_none: BoolArray = chosen.counts(order.shards()) == 0
    return behind & has_none


def _chosen_rows(job: Job, number: int, digest: str | None = None) -> Positions | None:
    return read_positions(job.folder, number, digest, RETRY_FOLDER)


def _choose(
    job: Job,
    state: State,
    manifest: Manifest,
    retry: Retry,
    *,
    predicate: Predicate,
    shards: Sequence[int],
    before: Positions | None = None,
    mirror: Mirror | None = None,
    given: RepairFile | None = None,
    say: Say = lambda line: None,
) -> Retry | None:
    """Store the matching rows of these shards, and the rows that were chosen before.

    given: the file from which a new retry takes rows.
    """
    parts = [state.parts[shard] for shard in shards]
    if mirror is not None:
        mirror.say_fetch(parts)
    matching = (rows for part in parts for rows in _matching(job, part, predicate, mirror))
    known = () if before is None else before.pieces(_ROWS_AT_ONCE)
    first_row = state.extents[0].first_row
    rows = RowBits(first_row, retry.stop_row, itertools.chain(known, matching))
    if given is not None:
        repair = take_rows(job, state, manifest, given, number=retry.number, chosen=rows, say=say)
        retry = dataclasses.replace(retry, repair=repair)
    if not rows:
        return None
    chosen = write_positions(
        job.folder,
        retry.number,
        rows.pieces(),
        retry.stop_row,
        where=RETRY_FOLDER,
        check_lock=manifest.check_lock,
    )
    if not retry.positions:  # a later choice keeps the numbers of the first one
        counts = chosen.counts(RunOrder(job.folder, state.extents).shards())
        retry = dataclasses.replace(retry, num_rows=int(counts.sum()), num_shards=int(np.count_nonzero(counts)))
    retry = dataclasses.replace(retry, positions=chosen.digest)
    faults.point("retry.before_line")
    manifest.record(retry)
    manifest.commit()
    faults.point("retry.after_line")
    state.note_retry(retry)
    return retry


def _matching(job: Job, part: Part, predicate: Predicate, mirror: Mirror | None) -> Iterator[Int64Array]:
    if predicate.text.strip() == ERRORS_WORD and not part.num_errors:
        return
    if mirror is not None:
        mirror.fetch_part(part)
    has_any = False
    with open_part(job.folder.path(f"parts/{part_name(part.shard)}"), page_checksum_verification=True) as file:
        at_once = min(_ROWS_AT_ONCE, piece_rows(file.metadata, predicate.columns))
        for batch in file.iter_batches(at_once, columns=predicate.columns):
            rows = predicate.matches(pa.Table.from_batches([batch]))
            has_any = has_any or len(rows) > 0
            yield rows
    if mirror is not None and not has_any:
        mirror.forget_part(part.shard)


def count_mended(job: Job, state: State, manifest: Manifest, mirror: Mirror | None = None) -> None:
    """Record of each finished attempt how many of its rows the predicate no longer matches."""
    order = RunOrder(job.folder, state.extents)
    for retry in [retry for retry in state.retries.values() if retry.attempt and retry.num_mended is None]:
        if (chosen := _chosen_rows(job, retry.number, retry.positions)) is None:
            continue
        predicate = Predicate(retry.predicate, state.header.columns.part_schema)
        num_left = 0
        for shard, rows in enumerate(order.shards()):
            is_chosen = chosen.chosen(rows)
            if is_chosen.any():
                matching = [rows.locals(piece) for piece in _matching(job, state.parts[shard], predicate, mirror)]
                num_left += int(is_chosen[np.unique(np.concatenate([*matching, np.zeros(0, np.int64)]))].sum())
        faults.point("retry.before_count")
        counted_retry = dataclasses.replace(retry, num_mended=retry.num_rows - num_left)
        manifest.record(counted_retry)
        manifest.commit()
        state.note_retry(counted_retry)


def _fetch(mirror: Mirror, state: State, manifest: Manifest, shards: Sequence[int]) -> bool:
    """Fetch the parts of these shards, and commit replacements that the bucket has already. Whether there were any."""
    parts = [state.parts[shard] for shard in shards]
    mirror.say_fetch(parts)
    replacements = [found for part in parts if (found := mirror.fetch_part(part)) is not part]
    for part in replacements:
        manifest.part(part)
        state.note(part)
    manifest.commit()
    mirror.note_committed(replacements)
    return bool(replacements)


def _is_unfinished(job: Job, state: State, retry: Retry) -> bool:
    chosen = _chosen_rows(job, retry.number, retry.positions)
    if chosen is None:
        return True
    counts = chosen.counts(RunOrder(job.folder, state.extents).shards())
    return any(
        counts[shard] and (shard not in state.parts or state.parts[shard].retry < retry.number)
        for shard in range(len(counts))
    )


def _with_overrides(job: Job, overrides: Mapping[str, Any]) -> Job:
    changed = {name.removeprefix(SAMPLING): value for name, value in overrides.items()}
    sampling = _sampling({**job.spec.sampling.model_dump(mode="json"), **changed})
    # The fields of its section `retry` need not fit this sampling.
    return dataclasses.replace(job, spec=job.spec.model_copy(update={"sampling": sampling, "retry": None}))


def check_retry(job: Job, state: State | None) -> Iterator[str]:
    """Check the section `retry` of the spec, and yield a line if it may mend little. Raises UserError."""
    if job.spec.retry is None:
        return
    retry_predicate(job, state)
    repeats = job.spec.sampling.temperature == 0 and "temperature" not in job.spec.sampling.columns
    if not retry_overrides(job) and (repeats or not job.task.draws_tokens):
        yield (
            "warning: retry has no `set`, and the job has no temperature above 0: rows that run again give the same "
            "results; only failed images and engines may be mended"
        )


def retry_predicate(job: Job, state: State | None) -> Predicate | None:
    """Which rows the section `retry` runs again; None without it. Raises PredicateError."""
    if job.spec.retry is None:
        return None
    if state is None:
        columns = Columns.of_new_job(job.task, carried_fields(job.spec, job.source))
    else:
        columns = state.header.columns
    return Predicate(job.spec.retry.where, columns.part_schema, option="retry.where")


def retry_overrides(job: Job) -> dict[str, Any]:
    """The fields of sampling that the section `retry` changes, as a retry by hand with `--set` has them."""
    assert job.spec.retry is not None
    before = job.spec.sampling.model_dump(mode="json")
    try:
        now = job.spec.retry.sampling_of(job.spec.sampling).model_dump(mode="json")
    except ValidationError as error:  # the job began with other sampling than the spec has now
        raise SpecError(f"retry.set: {error.errors()[0]['msg']}") from None
    return {f"{SAMPLING}{name}": value for name, value in now.items() if value != before[name]}


def _sampling(fields: dict[str, Any]) -> SamplingSpec:
    return SamplingSpec.model_validate_json(json.dumps(fields))
