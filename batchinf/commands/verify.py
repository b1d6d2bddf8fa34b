"""`batchinf verify`: runs a sample of a job's rows through transformers and compares the stored values."""

import contextlib
import pathlib
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from batchinf.base.errors import DriftError, UserError
from batchinf.base.parquet import open_part
from batchinf.base.slices import SOURCE_FOLDER, job_folders
from batchinf.job.drift import check_drift
from batchinf.job.job import Job, begun_at, max_model_len
from batchinf.job.open import open_job
from batchinf.manifest.state import State, read_state
from batchinf.prompts.encoder import load_tokenizer
from batchinf.records import Prompt
from batchinf.results import Results
from batchinf.spec.file import SpecFile
from batchinf.spec.job import fingerprint
from batchinf.tasks.columns import prompt_hash
from batchinf.tasks.compare import delta
from batchinf.tasks.registry import task_of
from batchinf.tasks.stored import ReferenceWanted, StoredLogprobs, StoredRow, StoredVectors
from batchinf.tasks.verification import Verification

if TYPE_CHECKING:
    from batchinf.tasks.reference import Reference


# Ranks of a position's likeliest tokens are compared for at most this many tokens.
_MOST_RANKED = 64
# Ranks over a whole vocabulary are compared at this many positions of a row: one takes 20 ms for 128,256 tokens.
_RANKED_ROWS = 16


@dataclass(slots=True, kw_only=True)
class _Deviations:
    """num_values: stored numbers, including num_nan that are NaN. num_agreeing: those of num_ranked positions whose
    highest number is also the reference's. sum_correlation: sum of num_correlated rank correlations (Spearman).
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
        """Add the rank correlation of each row of the two [n, k], if it is defined."""
        found = spearman(stored, expected)
        found = found[~np.isnan(found)]
        self.num_correlated += len(found)
        self.sum_correlation += float(found.sum())


@dataclass(slots=True, kw_only=True)
class LogprobDeviations(_Deviations):
    """Deviations of one kind of logprobs (`output`, `prompt`, `scored`), over all rows.

    They concern the tokens of the sequence; only max_abs_delta_top concerns the k other tokens of a position. A
    correlation is over the top k of one position, or over the tokens of one row if fewer than two are stored.
    """

    max_abs_delta_top: float = 0.0

    @property
    def worst(self) -> float:
        """The number that must be within the tolerance."""
        return max(self.max_abs_delta, self.max_abs_delta_top)


@dataclass(slots=True, kw_only=True)
class VectorDeviations(_Deviations):
    """Deviations of one column of vectors, over all rows.

    max_relative: the largest ‖Δ‖ / ‖reference‖; with has_direction it must be within the tolerance. min_cosine: with
    has_direction. Other vectors have correlations: over a position's numbers, or over a row's positions with one number
    each.
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
    """Add a row's logprobs. values: the reference's, for `stored.tokens`. best: the reference's likeliest tokens.

    Returns the place of the worst token in its prompt or output, from 0, and its deviation, which is infinite if a
    value is missing.
    """
    own = stored.values.astype(np.float64)
    is_nan = np.isnan(own)
    found = np.abs(delta(own, values))
    found[is_nan] = np.inf
    to.num_positions += len(own)
    to.num_values += own.size
    to.num_nan += int(is_nan.sum())
    known = found[:, 0][~is_nan[:, 0]]
    to.max_abs_delta = max(to.max_abs_delta, float(known.max(initial=0.0)))
    to.sum_abs_delta += float(known.sum())
    if own.shape[1] > 1:
        known_top = found[:, 1:][~is_nan[:, 1:]]
        to.max_abs_delta_top = max(to.max_abs_delta_top, float(known_top.max(initial=0.0)))
        to.num_ranked += len(own)
        to.num_agreeing += int((stored.tokens[:, 1] == best).sum())
    if own.shape[1] > 2:
        to.correlate(own[:, 1 : _MOST_RANKED + 1], values[:, 1 : _MOST_RANKED + 1])
    else:
        to.correlate(own[None, :, 0], values[None, :, 0])
    worst = found.max(axis=1)
    place = int(worst.argmax())
    return place + (stored.first if stored.kind == "prompt" else 0), float(worst[place])


def add_vectors(
    to: VectorDeviations, stored: StoredVectors, pieces: Iterable[npt.NDArray[np.float32]]
) -> tuple[int, float]:
    """Add a row's vectors. pieces: the reference's vectors [n, width] in order, in several pieces.

    Returns the index of the worst vector and its deviation, which is infinite if a number is NaN.
    """
    step = max(1, -(-len(stored.values) // _RANKED_ROWS))
    start, found, singles = 0, np.zeros(0), []
    for expected in pieces:
        own = stored.values[start : start + len(expected)]
        found = np.concatenate([found, _add(to, own, expected.astype(np.float64))])
        if not to.has_direction and own.shape[1] > 1:
            best = np.take_along_axis(own, expected.argmax(axis=1)[:, None], axis=1)[:, 0]
            to.num_ranked += len(own)
            # Rounding may make several numbers equal. All of them then count as the highest.
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
    """[n]: the deviation of each row."""
    is_nan = np.isnan(stored)
    with np.errstate(invalid="ignore", over="ignore"):
        found = np.abs(stored.astype(np.float64) - expected)
        # Both may be -inf. A number that the stored type cannot hold is stored as infinity.
        found[np.isinf(stored) & (stored == expected.astype(stored.dtype))] = 0.0
    found[is_nan] = np.inf
    known = found[~is_nan]
    to.num_positions += len(stored)
    to.num_values += stored.size
    to.num_nan += int(is_nan.sum())
    to.max_abs_delta = max(to.max_abs_delta, float(known.max(initial=0.0)))
    to.sum_abs_delta += float(known.sum())
    if not to.has_direction:
        worst: npt.NDArray[np.float64] = found.max(axis=1)
        return worst
    values = stored.astype(np.float64)
    norms, lengths = np.linalg.norm(values, axis=1), np.linalg.norm(expected, axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        cosines = (values * expected).sum(axis=1) / (norms * lengths)
        relative: npt.NDArray[np.float64] = np.linalg.norm(found, axis=1) / lengths
    # Two zero vectors are equal. Any other NaN counts as an infinite deviation.
    relative[(norms == 0) & (lengths == 0)] = 0.0
    relative[np.isnan(relative)] = np.inf
    to.max_relative = max(to.max_relative, float(relative.max(initial=0.0)))
    to.min_cosine = min(to.min_cosine, float(cosines[~np.isnan(cosines)].min(initial=1.0)))
    return relative


def spearman(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """[n]: Spearman's rank correlation of each row of a and b [n, k]. Equal values share their mean rank.

    NaN for fewer than two values, if all values are equal, or if one is NaN.
    """
    x, y = (ranks(np.asarray(values, np.float64)) for values in (a, b))
    x, y = x - x.mean(axis=1, keepdims=True), y - y.mean(axis=1, keepdims=True)
    with np.errstate(invalid="ignore", divide="ignore"):
        correlation: npt.NDArray[np.float64] = (x * y).sum(axis=1) / np.sqrt((x * x).sum(axis=1) * (y * y).sum(axis=1))
    correlation[np.isnan(a).any(axis=1) | np.isnan(b).any(axis=1)] = np.nan
    return correlation


def ranks(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The rank of each value in its row, from 1. Equal values share their mean rank."""
    result = np.empty(values.shape)
    for row, own in zip(values, result, strict=True):
        _, inverse, counts = np.unique(row, return_inverse=True, return_counts=True)
        own[:] = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    return result


# Tolerance for |Δ logprob| by the engine's dtype. In float32 only the order of additions differs (1e-5 on a small
# model). bfloat16 has 8 bits: rounding changes a logit of 16 to 32 by up to 0.06, and one token in thousands by several
# times that.
TOLERANCES = {"float32": 1e-3, "float16": 0.1, "bfloat16": 0.75}
# Tolerance for a vector's deviation relative to its length, and for probabilities. Many rounding errors cancel there.
RELATIVE = {"float32": 1e-3, "float16": 0.02, "bfloat16": 0.1}
_WORST = 5
_LONG = 1 << 30


@dataclass(frozen=True, slots=True)
class Wanted:
    """The user's options. dtype, device: of the reference. tolerance: None: that of the engine's dtype."""

    num_rows: int = 64
    seed: int = 0
    dtype: str = "float32"
    device: str = "cpu"
    tolerance: float | None = None


@dataclass(frozen=True, slots=True)
class RowDeviation:
    """The deviation of one output row at its worst token.

    kind: of logprobs, or a column of vectors. place: of the token in the prompt or output, from 0; None: a vector of
    the whole prompt. max_abs_delta: for a vector with a direction, ‖Δ‖ / ‖reference‖.
    """

    row_index: int
    sample_index: int
    kind: str
    place: int | None
    max_abs_delta: float


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The report of `verify`. num_rows: compared output rows, of `num_stored`. verdict: `within` if no value is missing
    or beyond the tolerance. deviations: by kind of logprobs, or by column of vectors. worst: the rows with the largest
    deviations.
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
        """Whether no value is missing or beyond the tolerance."""
        return self.verdict == "within"


def verify_job(file: SpecFile, wanted: Wanted) -> VerifyReport:
    """Compare a sample of the job's rows. Raises UserError if they cannot be compared."""
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
    """The job as it began, with all slices as one job. Raises DriftError if it has changed."""
    folders = [found.folder for found in job_folders(file.spec.output.path) if found.folder.exists("manifest")]
    state = next(state for folder in folders if (state := read_state(folder)) is not None)
    own = pathlib.Path(file.spec.output.path, SOURCE_FOLDER)
    cache = own if own.is_dir() else pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
    job = open_job(file, cache, state, "leave")
    stack.enter_context(contextlib.closing(job.source))
    identity = {name: value for name, value in state.header.identity.items() if name != "slice"}
    check_drift(job, replace(state.header, identity=identity, fingerprint=fingerprint(identity)))
    return job, state


def _check(job: Job, verification: Verification, results: Results) -> None:
    """Raise UserError if the job has nothing that can be compared."""
    verification.check(results.schema)
    if job.spec.model.load_format == "dummy":
        raise UserError(
            "model.load_format is dummy: transformers would draw other random weights than vLLM, so nothing can be "
            "verified"
        )
    if _mode(job) not in ("raw_logprobs", "raw_logits"):
        raise UserError(
            f"the job stored {_mode(job)}, which depend on its sampling; only raw logprobs and logits can be verified. "
            "To verify the model, give run and verify: --set sampling.logprobs_mode=raw_logprobs --set input.limit=64 "
            "--set output.path=NEW"
        )


def _mode(job: Job) -> str:
    return str(job.spec.engine.get("logprobs_mode", job.task.logprobs_mode))


def choose_places(results: Results, num_rows: int, seed: int) -> list[int]:
    """Ascending places of `num_rows` random output rows without an error. Each row draws a number; the lowest win."""
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
    """The rows at these places, with those of the columns that are stored. Reads only row groups with such rows.

    vector_columns: the columns that `StoredRow.numbers` reads later.
    """
    names = set(results.schema.names)
    wanted = [name for name in ("row_index", "sample_index", "prompt_hash", *columns) if name in names]
    found: list[StoredRow] = []
    start, left = 0, list(places)
    for path in results.parts:
        with open_part(path) as part:
            for group in range(part.num_row_groups):
                stop = start + part.metadata.row_group(group).num_rows
                here = [place - start for place in left if place < stop]
                if here:
                    rows = part.read_row_group(group, wanted).take(here).to_pylist()
                    found += [
                        StoredRow(
                            values={"sample_index": 0, **row},
                            columns=vector_columns,
                            part=path,
                            group=group,
                            place=place,
                        )
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
            f"row {row['row_index']} has other prompt tokens now than in the run{why}: the template, the tokenizer or "
            "the input has changed; restore it"
        )


def _compare(
    job: Job, state: State, results: Results, rows: list[StoredRow], prompts: dict[int, Prompt], wanted: Wanted
) -> VerifyReport:
    verification = job.task.verification(job.spec)
    reference = verification.reference(_reference_wanted(job, state, wanted))
    dtype = str(_said(state, "dtype") or job.spec.model.dtype)
    tolerance = wanted.tolerance if wanted.tolerance is not None else _tolerance(job, state, verification, dtype)
    deviations: dict[str, LogprobDeviations | VectorDeviations] = {}
    worst: list[RowDeviation] = []
    task, length = task_of(job.spec), max_model_len(job) or _LONG
    # Rows of one adapter together, because merging an adapter takes long.
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
        raise UserError("the drawn rows have no tokens to compare; draw more rows with -n")
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
    return ReferenceWanted(
        model=job.model,
        adapters=job.adapters,
        dtype=wanted.dtype,
        device=wanted.device,
        pooling_type=pooling_type,
    )


def _add_row(
    deviations: dict[str, LogprobDeviations | VectorDeviations],
    reference: "Reference",
    stored: StoredLogprobs | StoredVectors,
    adapter: str | None,
    are_logits: bool,
) -> tuple[int | None, float]:
    """The place of a row's largest deviation, and the deviation."""
    if isinstance(stored, StoredVectors):
        vectors = deviations.setdefault(stored.kind, VectorDeviations(has_direction=stored.has_direction))
        assert isinstance(vectors, VectorDeviations)
        place, most = add_vectors(vectors, stored, reference.vectors(stored, adapter, are_logits))
        return None if stored.positions is None else int(stored.positions[place]), most
    logprobs = deviations.setdefault(stored.kind, LogprobDeviations())
    assert isinstance(logprobs, LogprobDeviations)
    scores = reference.scores(stored, adapter, are_logits)
    return add_logprobs(logprobs, stored, scores.values, scores.best)


def _said(state: State, name: str) -> Any:
    """A setting as the latest engine reported it; None if none did."""
    said = [event.fields["settings"].get(name) for event in state.events if event.fields.get("settings")]
    return next((value for value in reversed(said) if value), None)


def _tolerance(job: Job, state: State, verification: Verification, dtype: str) -> float:
    is_rough = job.spec.model.quantization is not None or "quantization_config" in job.model.config
    kind = "bfloat16" if is_rough or dtype not in TOLERANCES else dtype
    devices = {event.fields["device"] for event in state.events if "device" in event.fields}
    if kind == "float32" and devices - {"cpu"}:
        kind = "float16"  # on GPUs, vLLM's attention multiplies float32 as TF32, which has the 11 bits of float16
    if verification.is_relative:
        # float16 needs no larger tolerance: it changes a vector by 0.0003 of its length.
        return RELATIVE[kind]
    # float16 has 11 bits: rounding changes a stored logprob of -16 by up to 0.008.
    return max(TOLERANCES["float16"] if verification.is_half else 0.0, TOLERANCES[kind])
