"""`batchinf verify`: runs a sample of a job's rows through transformers, and measures how far stored values deviate."""

import contextlib
import pathlib
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq

from batchinf.base.errors import DriftError, UserError
from batchinf.base.slices import SOURCE_FOLDER, job_folders
from batchinf.job.choose import max_model_len
from batchinf.job.open import Job, begun_at, check_drift, open_job
from batchinf.manifest.state import State, read_state
from batchinf.prompts.encoder import load_tokenizer
from batchinf.records import Prompt
from batchinf.results import Results
from batchinf.spec.file import SpecFile
from batchinf.spec.job import fingerprint
from batchinf.tasks.base import prompt_hash
from batchinf.tasks.compare import ReferenceWanted, StoredLogprobs, StoredRow, StoredVectors, Verification
from batchinf.tasks.registry import task_of

if TYPE_CHECKING:
    from batchinf.tasks.reference import Reference


# Ranks are compared over at most so many of a position's tokens, where these are the likeliest,
_MOST_RANKED = 64
# and, over whole rows of a vocabulary, at so many positions of a row, evenly spaced: 20 ms each for 128,256.
_RANKED_ROWS = 16


@dataclass(slots=True, kw_only=True)
class _Deviations:
    """num_values: numbers that were stored, of which num_nan are none. num_agreeing: of num_ranked positions, those
    whose highest number is the reference's. sum_correlation: of num_correlated of Spearman's.
    """

    num_positions: int = 0
    num_values: int = 0
    num_nan: int = 0
    max_abs_delta: float = 0.0
    sum_abs_delta: float = 0.0
    num_ranked: int = 0
    num_agreeing: int = 0
    num_correlated: int = 0
    sum_correlation: float = 0.0

    def correlate(self, stored: npt.NDArray[Any], expected: npt.NDArray[Any]) -> None:
        """Count Spearman's of each row of the two [n, k], where there is one."""
        found = spearman(stored, expected)
        found = found[~np.isnan(found)]
        self.num_correlated += len(found)
        self.sum_correlation += float(found.sum())


@dataclass(slots=True, kw_only=True)
class LogprobDeviations(_Deviations):
    """Deviations of one kind of logprobs (`output`, `prompt`, `scored`), over all rows.

    Of the tokens themselves but for max_abs_delta_top, which is of the top k beside them. Correlations are of one
    position's top k each or, where fewer than two are stored, of one row's tokens each.
    """

    max_abs_delta_top: float = 0.0

    @property
    def worst(self) -> float:
        """The number that must be within the tolerance."""
        return max(self.max_abs_delta, self.max_abs_delta_top)


@dataclass(slots=True, kw_only=True)
class VectorDeviations(_Deviations):
    """Deviations of one column of vectors, over all rows.

    With has_direction: max_relative, the largest ‖Δ‖ / ‖reference‖, which must be within the tolerance, and min_cosine.
    For others correlations are over a position's numbers or, where it has but one, over a row's positions.
    """

    has_direction: bool = False
    max_relative: float = 0.0
    min_cosine: float = 1.0

    @property
    def worst(self) -> float:
        """The number that must be within the tolerance."""
        return self.max_relative if self.has_direction else self.max_abs_delta


def add_logprobs(
    to: LogprobDeviations, stored: StoredLogprobs, values: npt.NDArray[np.float32], best: npt.NDArray[np.int64]
) -> tuple[int, float]:
    """Add a row's logprobs, given the reference's values of `stored.wanted` and its likeliest tokens.

    Returns the place of the worst token in its prompt or output, from 0, and how far off it is: infinitely where a
    value is missing.
    """
    own = stored.values.astype(np.float64)
    is_nan = np.isnan(own)
    with np.errstate(invalid="ignore"):
        delta = np.abs(own - values)
    delta[own == values] = 0.0  # both may be -inf
    delta[is_nan] = np.inf
    to.num_positions += len(own)
    to.num_values += own.size
    to.num_nan += int(is_nan.sum())
    known = delta[:, 0][~is_nan[:, 0]]
    to.max_abs_delta = max(to.max_abs_delta, float(known.max(initial=0.0)))
    to.sum_abs_delta += float(known.sum())
    if own.shape[1] > 1:
        known_top = delta[:, 1:][~is_nan[:, 1:]]
        to.max_abs_delta_top = max(to.max_abs_delta_top, float(known_top.max(initial=0.0)))
    if stored.has_top and own.shape[1] > 1:
        to.num_ranked += len(own)
        to.num_agreeing += int((stored.wanted[:, 1] == best).sum())
    if own.shape[1] > 2:
        to.correlate(own[:, 1 : _MOST_RANKED + 1], values[:, 1 : _MOST_RANKED + 1])
    else:
        to.correlate(own[None, :, 0], values[None, :, 0])
    worst = delta.max(axis=1)
    place = int(worst.argmax())
    return place + (stored.first if stored.kind == "prompt" else 0), float(worst[place])


def add_vectors(
    to: VectorDeviations, stored: StoredVectors, pieces: Iterable[npt.NDArray[np.float32]]
) -> tuple[int, float]:
    """Add a row's vectors. pieces: the reference's [n, width] in their order, some at a time.

    Returns which of the vectors is the worst, from 0, and how far off it is: infinitely where a number is NaN.
    """
    step = max(1, -(-len(stored.values) // _RANKED_ROWS))
    start, found, singles = 0, np.zeros(0), []
    for expected in pieces:
        own = stored.values[start : start + len(expected)]
        found = np.concatenate([found, _add(to, own, expected.astype(np.float64))])
        if not to.has_direction and own.shape[1] > 1:
            best = np.take_along_axis(own, expected.argmax(axis=1)[:, None], axis=1)[:, 0]
            to.num_ranked += len(own)
            # The highest of several that rounding has made equal is all of them.
            to.num_agreeing += int((best == own.max(axis=1)).sum())
            places = slice(-start % step, None, step)
            to.correlate(own[places], expected[places])
        elif not to.has_direction:
            singles.append(expected[:, 0])
        start += len(expected)
    if singles:
        to.correlate(stored.values[None, :, 0], np.concatenate(singles)[None])
    place = int(found.argmax())
    return place, float(found[place])


def _add(to: VectorDeviations, stored: npt.NDArray[Any], expected: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """[n]: how far off each row is."""
    is_nan = np.isnan(stored)
    with np.errstate(invalid="ignore", over="ignore"):
        delta = np.abs(stored.astype(np.float64) - expected)
        # Both may be -inf; and what the stored type cannot hold is stored as infinity.
        delta[np.isinf(stored) & (stored == expected.astype(stored.dtype))] = 0.0
    delta[is_nan] = np.inf
    known = delta[~is_nan]
    to.num_positions += len(stored)
    to.num_values += stored.size
    to.num_nan += int(is_nan.sum())
    to.max_abs_delta = max(to.max_abs_delta, float(known.max(initial=0.0)))
    to.sum_abs_delta += float(known.sum())
    if not to.has_direction:
        worst: npt.NDArray[np.float64] = delta.max(axis=1)
        return worst
    values = stored.astype(np.float64)
    norms, lengths = np.linalg.norm(values, axis=1), np.linalg.norm(expected, axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        cosines = (values * expected).sum(axis=1) / (norms * lengths)
        relative: npt.NDArray[np.float64] = np.linalg.norm(delta, axis=1) / lengths
    # Two vectors of nothing but zeros are the same; what else is no number is off without end.
    relative[(norms == 0) & (lengths == 0)] = 0.0
    relative[np.isnan(relative)] = np.inf
    to.max_relative = max(to.max_relative, float(relative.max(initial=0.0)))
    to.min_cosine = min(to.min_cosine, float(cosines[~np.isnan(cosines)].min(initial=1.0)))
    return relative


def spearman(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """[n]: Spearman's rank correlation of each row of a and b [n, k], equal values sharing their mean rank.

    NaN where fewer than two values are there, where all are equal, or where one is NaN.
    """
    x, y = (ranks(np.asarray(values, np.float64)) for values in (a, b))
    x, y = x - x.mean(axis=1, keepdims=True), y - y.mean(axis=1, keepdims=True)
    with np.errstate(invalid="ignore", divide="ignore"):
        correlation: npt.NDArray[np.float64] = (x * y).sum(axis=1) / np.sqrt((x * x).sum(axis=1) * (y * y).sum(axis=1))
    correlation[np.isnan(a).any(axis=1) | np.isnan(b).any(axis=1)] = np.nan
    return correlation


def ranks(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The rank of each value in its row, from 1; equal ones share their mean rank."""
    result = np.empty(values.shape)
    for row, own in zip(values, result, strict=True):
        _, inverse, counts = np.unique(row, return_inverse=True, return_counts=True)
        own[:] = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    return result


# The most that |Δ logprob| may be, by the type that the engine computed in. In float32 only the order of additions
# differs (1e-5 on a small model); bfloat16 keeps 8 bits, so that a logit of 16 to 32 is off by up to 0.06 by its own
# rounding, and one token in thousands by several times that.
TOLERANCES = {"float32": 1e-3, "float16": 0.1, "bfloat16": 0.75}
# The most that a vector may be off, against its length, and a probability: many roundings make up for each other there.
RELATIVE = {"float32": 1e-3, "float16": 0.02, "bfloat16": 0.1}
_WORST = 5
_LONG = 1 << 30


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is asked for. dtype, device: of the reference. tolerance: None is what suits the job's own dtype."""

    num_rows: int = 64
    seed: int = 0
    dtype: str = "float32"
    device: str = "cpu"
    tolerance: float | None = None


@dataclass(frozen=True, slots=True)
class RowDeviation:
    """How far one output row is off, at its worst token.

    kind: of logprobs, or a column of vectors. place: in the prompt or in the output, from 0; of vectors the token
    behind which they are, None where they are of the whole prompt. max_abs_delta: of a vector with a direction, ‖Δ‖
    against the reference's length.
    """

    row_index: int
    sample_index: int
    kind: str
    place: int | None
    max_abs_delta: float


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What was found. num_rows: output rows that were compared, of `num_stored`. verdict: `within` if every value is
    there and within the tolerance. deviations: by kind of logprobs, or by column of vectors. worst: the rows that are
    furthest off.
    """

    job: str
    reference: str
    engine_dtype: str
    tolerance: float
    num_rows: int
    num_stored: int
    seed: int
    verdict: Literal["within", "beyond"]
    deviations: dict[str, LogprobDeviations | VectorDeviations]
    worst: tuple[RowDeviation, ...]

    @property
    def is_within(self) -> bool:
        """Whether every value is there and within the tolerance."""
        return self.verdict == "within"


def verify(file: SpecFile, wanted: Wanted) -> VerifyReport:
    """Compare a sample of the job's rows. Raises UserError, in one line, where that cannot be done."""
    if wanted.dtype not in TOLERANCES:
        raise UserError(f"--dtype: got '{wanted.dtype}'; must be {', '.join(TOLERANCES)}")
    results = Results(file.spec.output.path)
    if results.spec.get("scripted") is not None:
        raise UserError("the job was run by the scripted engine: there is no model to verify")
    with contextlib.ExitStack() as stack:
        job, state = _open(file, stack)
        verification = job.task.verification(job.spec)
        _check(job, verification, results)
        places = choose_places(results, wanted.num_rows, wanted.seed)
        rows = read_rows(results, places, verification.columns, verification.vector_columns)
        prompts = _prompts(job, state, sorted({row.values["row_index"] for row in rows}))
    for row in rows:
        _check_prompt(prompts[row.values["row_index"]], row.values)
    return _compare(job, state, results, rows, prompts, wanted)


def _open(file: SpecFile, stack: contextlib.ExitStack) -> tuple[Job, State]:
    """The job as it was begun; its slices, if it has any, as one. Raises DriftError where it is another by now."""
    folders = [found.folder for found in job_folders(file.spec.output.path) if found.folder.exists("manifest")]
    state = next(state for folder in folders if (state := read_state(folder)) is not None)
    own = pathlib.Path(file.spec.output.path, SOURCE_FOLDER)
    cache = own if own.is_dir() else pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
    job = open_job(file, cache, state)
    stack.enter_context(contextlib.closing(job.source))
    identity = {name: value for name, value in state.header.identity.items() if name != "slice"}
    check_drift(job, replace(state.header, identity=identity, fingerprint=fingerprint(identity)))
    return job, state


def _check(job: Job, verification: Verification, results: Results) -> None:
    """Raise UserError where there is nothing to compare, or no way to."""
    verification.check(results.schema)
    if job.spec.model.load_format == "dummy":
        raise UserError("model.load_format is dummy: vLLM's random weights are not those that transformers would have")
    if _mode(job) not in ("raw_logprobs", "raw_logits"):
        raise UserError(f"the job stored {_mode(job)}, which depend on its sampling; only raw ones are verified")


def _mode(job: Job) -> str:
    """vLLM's `logprobs_mode`."""
    return str(job.spec.engine.get("logprobs_mode", job.task.logprobs_mode))


def choose_places(results: Results, num_rows: int, seed: int) -> list[int]:
    """The places of `num_rows` output rows without an error among all, ascending: those with the lowest of random
    numbers.
    """
    random = np.random.default_rng(seed)
    places, keys = np.zeros(0, np.int64), np.zeros(0)
    start = 0
    for batch in results.batches(["error_type"], 65536):
        is_good = np.asarray(batch.column(0).is_null())
        places = np.concatenate([places, start + np.flatnonzero(is_good)])
        keys = np.concatenate([keys, random.random(len(is_good))[is_good]])
        lowest = np.argsort(keys, kind="stable")[:num_rows]
        places, keys, start = places[lowest], keys[lowest], start + len(is_good)
    if not len(places):
        raise UserError(f"{results.folder} has no row without an error yet; run the job first")
    return sorted(int(place) for place in places)


def read_rows(
    results: Results, places: Sequence[int], columns: Sequence[str], vector_columns: tuple[str, ...]
) -> list[StoredRow]:
    """The rows at these places, with these columns where they are stored; only row groups that hold one are read.

    vector_columns: those that `StoredRow.numbers` reads when it is called.
    """
    names = set(results.schema.names)
    wanted = [name for name in ("row_index", "sample_index", "prompt_hash", *columns) if name in names]
    found: list[StoredRow] = []
    start, left = 0, list(places)
    for path in results.parts:
        with pq.ParquetFile(path) as part:
            for group in range(part.num_row_groups):
                stop = start + part.metadata.row_group(group).num_rows
                here = [place - start for place in left if place < stop]
                if here:
                    rows = part.read_row_group(group, wanted).take(here).to_pylist()
                    found += [
                        StoredRow({"sample_index": 0, **row}, vector_columns, path, group, place)
                        for row, place in zip(rows, here, strict=True)
                    ]
                    left = left[len(here) :]
                start = stop
    return found


def _prompts(job: Job, state: State, positions: Sequence[int]) -> dict[int, Prompt]:
    tokenizer = load_tokenizer(job.model.tokenizer, job.spec.model.trust_remote_code)
    builder = job.task.prompt_builder(tokenizer, job.model.vocab_size, begun_at(job, state.header))
    read = job.source.read_rows(np.asarray(positions, np.int64), builder.columns)
    return {prompt.row_index: prompt for prompt in builder.build(read, max_model_len(job))}


def _check_prompt(prompt: Prompt, row: dict[str, Any]) -> None:
    if prompt_hash(np.asarray(prompt.token_ids, np.int32)) != row["prompt_hash"]:
        why = f" ({prompt.error.error_message})" if prompt.error is not None else ""
        raise DriftError(
            f"row {row['row_index']} has other prompt tokens than when it was run{why}: the template, the tokenizer or "
            "the input is another by now; put it back as it was"
        )


def _compare(
    job: Job, state: State, results: Results, rows: list[StoredRow], prompts: dict[int, Prompt], wanted: Wanted
) -> VerifyReport:
    verification = job.task.verification(job.spec)
    reference = verification.reference(_reference_wanted(job, state, wanted))
    dtype = str(_said(state, "dtype") or job.spec.model.dtype)
    tolerance = wanted.tolerance if wanted.tolerance is not None else _tolerance(job, verification, dtype)
    deviations: dict[str, LogprobDeviations | VectorDeviations] = {}
    worst: list[RowDeviation] = []
    task, length = task_of(job.spec), max_model_len(job) or _LONG
    # Rows of one adapter together, as merging it takes its time.
    for row in sorted(rows, key=lambda row: prompts[row.values["row_index"]].adapter or ""):
        prompt = prompts[row.values["row_index"]]
        found = []
        for stored in verification.stored(row, prompt, task.expand(prompt, length)):
            place, most = _add_row(deviations, reference, stored, prompt.adapter, _mode(job) == "raw_logits")
            found.append(RowDeviation(row.values["row_index"], row.values["sample_index"], stored.kind, place, most))
        if found:
            worst.append(max(found, key=lambda it: it.max_abs_delta))
            worst = sorted(worst, key=lambda it: -it.max_abs_delta)[:_WORST]
    if not deviations:
        raise UserError("the rows that were chosen have no tokens to compare; choose more with -n")
    is_within = all(it.worst <= tolerance and not it.num_nan for it in deviations.values())
    return VerifyReport(
        job=results.folder,
        reference=reference.description,
        engine_dtype=dtype,
        tolerance=tolerance,
        num_rows=len(rows),
        num_stored=results.num_rows,
        seed=wanted.seed,
        verdict="within" if is_within else "beyond",
        deviations=deviations,
        worst=tuple(worst),
    )


def _reference_wanted(job: Job, state: State, wanted: Wanted) -> ReferenceWanted:
    pooling_type = str((_said(state, "pooling") or {}).get("seq_pooling_type") or "")
    pooling_type = pooling_type.rpartition(".")[2].upper()
    return ReferenceWanted(job.model, job.adapters, wanted.dtype, wanted.device, pooling_type)


def _add_row(
    deviations: dict[str, LogprobDeviations | VectorDeviations],
    reference: "Reference",
    stored: StoredLogprobs | StoredVectors,
    adapter: str | None,
    are_logits: bool,
) -> tuple[int | None, float]:
    """Where a row's numbers are the most off, and by how much."""
    if isinstance(stored, StoredVectors):
        vectors = deviations.setdefault(stored.kind, VectorDeviations(has_direction=stored.has_direction))
        assert isinstance(vectors, VectorDeviations)
        place, most = add_vectors(vectors, stored, reference.vectors(stored, adapter, are_logits))
        return None if stored.positions is None else int(stored.positions[place]), most
    logprobs = deviations.setdefault(stored.kind, LogprobDeviations())
    assert isinstance(logprobs, LogprobDeviations)
    scores = reference.scores(stored.token_ids, stored.first, stored.wanted, adapter, are_logits)
    return add_logprobs(logprobs, stored, scores.values, scores.best)


def _said(state: State, name: str) -> Any:
    """What the latest engine said of its settings; None where none said it."""
    said = [event.fields["settings"].get(name) for event in state.events if event.fields.get("settings")]
    return next((value for value in reversed(said) if value), None)


def _tolerance(job: Job, verification: Verification, dtype: str) -> float:
    is_rough = job.spec.model.quantization is not None or "quantization_config" in job.model.config
    kind = "bfloat16" if is_rough or dtype not in TOLERANCES else dtype
    if verification.is_relative:
        # Against a vector's length float16 rounds by 0.0003.
        return RELATIVE[kind]
    # float16 holds 11 bits: a stored logprob of -16 is off by up to 0.008.
    return max(TOLERANCES["float16"] if verification.is_half else 0.0, TOLERANCES[kind])
