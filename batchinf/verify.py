"""`batchinf verify`: a sample of a job's rows once more through transformers, and how far the stored logprobs are off.

Rows are chosen by a seed among those without an error, their prompts rendered again from the input and held against the
stored `prompt_hash`; the reference then reads prompt and stored output, so that it says of the same tokens. One row at
a time is in memory.
"""

import contextlib
import json
import math
import pathlib
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq

from batchinf.choose import max_model_len
from batchinf.claims import CLAIMS, Claim
from batchinf.errors import DriftError, UserError, VerificationFailed
from batchinf.job import Job, begun_at, check_drift, open_job
from batchinf.job_state import State, read_state
from batchinf.prompt import load_tokenizer
from batchinf.records import Prompt
from batchinf.results import Results
from batchinf.score_prompts import prompt_builder
from batchinf.slices import SOURCE_FOLDER, job_folders
from batchinf.spec import fingerprint
from batchinf.spec_file import SpecFile
from batchinf.tasks import get_task
from batchinf.tasks.columns import prompt_hash

# The most that |Δ logprob| may be, by the type that the engine computed in. In float32 only the order of additions
# differs (1e-5 on a small model); bfloat16 keeps 8 bits, so that a logit of 16 to 32 is off by up to 0.06 by its own
# rounding, and one token in thousands by several times that.
TOLERANCES = {"float32": 1e-3, "float16": 0.1, "bfloat16": 0.75}
# Ranks are compared over at most so many of a position's tokens.
_MOST_RANKED = 64
_WORST = 5
_LONG = 1 << 30


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is asked for. tolerance: None is what suits the job's own dtype."""

    num_rows: int = 64
    seed: int = 0
    dtype: str = "float32"
    device: str = "cpu"
    tolerance: float | None = None


@dataclass(slots=True)
class Tally:
    """What is counted of one kind of claim (`output`, `prompt`), over all rows.

    num_values: the tokens themselves and the top k beside them. num_agreeing: positions whose likeliest token is the
    reference's. correlations: Spearman's, of one position's top k each or, where fewer than two are stored, of one
    row's tokens each.
    """

    num_positions: int = 0
    num_values: int = 0
    num_nan: int = 0
    max_abs_delta: float = 0.0
    sum_abs_delta: float = 0.0
    max_abs_delta_top: float = 0.0
    num_ranked: int = 0
    num_agreeing: int = 0
    num_correlated: int = 0
    sum_correlation: float = 0.0


@dataclass(frozen=True, slots=True)
class RowResult:
    """How far one output row is off, at its worst token. place: in the prompt or in the output, from 0."""

    row_index: int
    sample_index: int
    kind: str
    place: int
    max_abs_delta: float


@dataclass(slots=True)
class Report:
    """What was found. num_rows: output rows that were compared, of `num_stored`."""

    job: str
    reference: str
    engine_dtype: str
    tolerance: float
    num_rows: int
    num_stored: int
    seed: int
    tallies: dict[str, Tally] = field(default_factory=dict)
    worst: list[RowResult] = field(default_factory=list)

    @property
    def is_within(self) -> bool:
        """Whether every value is there and within the tolerance."""
        worst = max((max(it.max_abs_delta, it.max_abs_delta_top) for it in self.tallies.values()), default=0.0)
        return worst <= self.tolerance and not any(it.num_nan for it in self.tallies.values())


def verify(file: SpecFile, wanted: Wanted) -> Report:
    """Compare a sample of the job's rows. Raises UserError, in one line, where that cannot be done."""
    if wanted.dtype not in TOLERANCES:
        raise UserError(f"--dtype: got '{wanted.dtype}'; must be {', '.join(TOLERANCES)}")
    results = Results(file.spec.output.path)
    if results.spec.get("scripted") is not None:
        raise UserError("the job was run by the scripted engine: there is no model to verify")
    if file.spec.task not in CLAIMS:
        raise UserError(f"task {file.spec.task} cannot be verified; {', '.join(CLAIMS)} can")
    with contextlib.ExitStack() as stack:
        job, state = _open(file, stack)
        _check(job, results)
        chosen = _choose(results, wanted)
        rows = _read(results, chosen, CLAIMS[job.spec.task].columns)
        prompts = _prompts(job, state, sorted({row["row_index"] for row in rows}))
    for row in rows:
        _check_prompt(prompts[row["row_index"]], row)
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


def _check(job: Job, results: Results) -> None:
    """Raise UserError where there is nothing to compare, or no way to."""
    CLAIMS[job.spec.task].check(job.spec, results.schema)
    if job.spec.model.load_format == "dummy":
        raise UserError("model.load_format is dummy: vLLM's random weights are not those that transformers would have")
    if _mode(job) not in ("raw_logprobs", "raw_logits"):
        raise UserError(f"the job stored {_mode(job)}, which depend on its sampling; only raw ones are verified")


def _mode(job: Job) -> str:
    """vLLM's `logprobs_mode`."""
    own = getattr(job.spec.sampling, "logprobs_mode", "raw_logprobs")
    return str(job.spec.engine.get("logprobs_mode", own))


def _choose(results: Results, wanted: Wanted) -> list[int]:
    """The places of the chosen output rows among all, ascending: those with the lowest of random numbers."""
    random = np.random.default_rng(wanted.seed)
    places, keys = np.zeros(0, np.int64), np.zeros(0)
    start = 0
    for batch in results.batches(["error_type"], 65536):
        is_good = np.asarray(batch.column(0).is_null())
        places = np.concatenate([places, start + np.flatnonzero(is_good)])
        keys = np.concatenate([keys, random.random(len(is_good))[is_good]])
        lowest = np.argsort(keys, kind="stable")[: wanted.num_rows]
        places, keys, start = places[lowest], keys[lowest], start + len(is_good)
    if not len(places):
        raise UserError(f"{results.folder} has no row without an error yet; run the job first")
    return sorted(int(place) for place in places)


def _read(results: Results, places: Sequence[int], columns: Sequence[str]) -> list[dict[str, Any]]:
    """The rows at these places, with what claims are made of; only row groups that hold one are read."""
    names = set(results.schema.names)
    wanted = [name for name in ("row_index", "sample_index", "prompt_hash", *columns) if name in names]
    rows, start, left = [], 0, list(places)
    for path in results.parts:
        with pq.ParquetFile(path) as part:
            for group in range(part.num_row_groups):
                stop = start + part.metadata.row_group(group).num_rows
                here = [place - start for place in left if place < stop]
                if here:
                    rows += part.read_row_group(group, wanted).take(here).to_pylist()
                    left = left[len(here) :]
                start = stop
    return [{"sample_index": 0, **row} for row in rows]


def _prompts(job: Job, state: State, positions: Sequence[int]) -> dict[int, Prompt]:
    tokenizer = load_tokenizer(job.model.tokenizer, job.spec.model.trust_remote_code)
    builder = prompt_builder(job.spec, tokenizer, job.model.vocab_size, begun_at(job, state.header))
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
    job: Job,
    state: State,
    results: Results,
    rows: list[dict[str, Any]],
    prompts: dict[int, Prompt],
    wanted: Wanted,
) -> Report:
    from batchinf.reference import Reference  # torch and transformers: seconds

    reference = Reference(job.model, job.adapters, wanted.dtype, wanted.device, job.spec.model.trust_remote_code)
    dtype = _engine_dtype(job, state)
    tolerance = wanted.tolerance if wanted.tolerance is not None else _tolerance(job, dtype)
    report = Report(results.folder, reference.description, dtype, tolerance, len(rows), results.num_rows, wanted.seed)
    task, length = get_task(job.spec), max_model_len(job) or _LONG
    # Rows of one adapter together, as merging it takes its time.
    for row in sorted(rows, key=lambda row: prompts[row["row_index"]].adapter or ""):
        prompt = prompts[row["row_index"]]
        found = []
        for claim in CLAIMS[job.spec.task].of(row, prompt, task.expand(prompt, length)):
            of_row = reference.scores(
                claim.token_ids, claim.first, claim.wanted, prompt.adapter, _mode(job) == "raw_logits"
            )
            tally = report.tallies.setdefault(claim.kind, Tally())
            place, most = count(tally, claim, of_row.values, of_row.best)
            found.append(RowResult(row["row_index"], row["sample_index"], claim.kind, place, most))
        if found:
            report.worst.append(max(found, key=lambda it: it.max_abs_delta))
            report.worst = sorted(report.worst, key=lambda it: -it.max_abs_delta)[:_WORST]
    if not report.tallies:
        raise UserError("the rows that were chosen have no tokens to compare; choose more with -n")
    return report


def count(
    tally: Tally, claim: Claim, values: npt.NDArray[np.float32], best: npt.NDArray[np.int64]
) -> tuple[int, float]:
    """Add a claim to its tally, given the reference's values of `claim.wanted` and its likeliest tokens.

    Returns the place of the worst token in its prompt or output, from 0, and how far off its row is: infinitely where
    a value is missing.
    """
    stored = claim.values.astype(np.float64)
    is_nan = np.isnan(stored)
    with np.errstate(invalid="ignore"):
        delta = np.abs(stored - values)
    delta[stored == values] = 0.0  # both may be -inf
    delta[is_nan] = np.inf
    tally.num_positions += len(stored)
    tally.num_values += stored.size
    tally.num_nan += int(is_nan.sum())
    known = delta[:, 0][~is_nan[:, 0]]
    tally.max_abs_delta = max(tally.max_abs_delta, float(known.max(initial=0.0)))
    tally.sum_abs_delta += float(known.sum())
    if stored.shape[1] > 1:
        known_top = delta[:, 1:][~is_nan[:, 1:]]
        tally.max_abs_delta_top = max(tally.max_abs_delta_top, float(known_top.max(initial=0.0)))
    if claim.has_top and stored.shape[1] > 1:
        tally.num_ranked += len(stored)
        tally.num_agreeing += int((claim.wanted[:, 1] == best).sum())
    if stored.shape[1] > 2:
        found = spearman(stored[:, 1 : _MOST_RANKED + 1], values[:, 1 : _MOST_RANKED + 1])
    else:
        found = spearman(stored[None, :, 0], values[None, :, 0])
    found = found[~np.isnan(found)]
    tally.num_correlated += len(found)
    tally.sum_correlation += float(found.sum())
    worst = delta.max(axis=1)
    place = int(worst.argmax())
    return place + (claim.first if claim.kind == "prompt" else 0), float(worst[place])


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


def _engine_dtype(job: Job, state: State) -> str:
    """What the engine computed in, as it said itself."""
    said = [event.fields["settings"].get("dtype") for event in state.events if event.fields.get("settings")]
    return str(next((dtype for dtype in reversed(said) if dtype), job.spec.model.dtype))


def _tolerance(job: Job, dtype: str) -> float:
    # float16 holds 11 bits: a stored logprob of -16 is off by up to 0.008.
    stored = TOLERANCES["float16"] if job.spec.output.logprobs_dtype == "float16" else 0.0
    is_rough = job.spec.model.quantization is not None or "quantization_config" in job.model.config
    return max(stored, TOLERANCES["bfloat16"] if is_rough else TOLERANCES.get(dtype, TOLERANCES["bfloat16"]))


def report_lines(report: Report) -> Iterator[str]:
    """For people. Raises VerificationFailed, last, where a value is beyond the tolerance or missing."""
    yield (
        f"{report.job}: {report.num_rows:,} of {report.num_stored:,} rows (--seed {report.seed}), engine in "
        f"{report.engine_dtype}, against {report.reference}"
    )
    head = ("tokens of", "positions", "max |Δ|", "mean |Δ|", "max |Δ| of top k", "top-1 agreement", "rank correlation")
    yield _table_line(head)
    for kind, tally in report.tallies.items():
        yield _table_line((
            kind, f"{tally.num_positions:,}", f"{tally.max_abs_delta:.2e}",
            f"{tally.sum_abs_delta / max(1, tally.num_positions):.2e}",
            f"{tally.max_abs_delta_top:.2e}" if tally.num_values > tally.num_positions else "-",
            f"{tally.num_agreeing / tally.num_ranked:.2%}" if tally.num_ranked else "-",
            f"{tally.sum_correlation / tally.num_correlated:.5f}" if tally.num_correlated else "-",
        ))  # fmt: skip
    for number, row in enumerate(report.worst):
        where = f"row {row.row_index}, sample {row.sample_index}, {row.kind} token {row.place}"
        yield f"{'worst rows: ' if not number else '            '}{where}: {row.max_abs_delta:.2e}"
    if num_nan := sum(tally.num_nan for tally in report.tallies.values()):
        yield f"{num_nan:,} logprobs are missing or NaN"
    if not report.is_within:
        raise VerificationFailed(_verdict(report))
    yield _verdict(report)


def report_json(report: Report) -> str:
    """One line for machines. `verdict` is `within` or `beyond`."""
    values = asdict(report) | {"verdict": "within" if report.is_within else "beyond"}
    return json.dumps(_finite(values))


def _finite(value: Any) -> Any:
    """JSON knows no infinity: it is null."""
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _verdict(report: Report) -> str:
    if report.is_within:
        return f"within the tolerance of {report.tolerance:g}"
    return f"the stored logprobs are beyond the tolerance of {report.tolerance:g}; see the rows named above"


def _table_line(cells: Sequence[str]) -> str:
    widths = (9, 10, 9, 9, 16, 16, 16)
    return "  ".join([cells[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(cells[1:], widths[1:], strict=True))])
