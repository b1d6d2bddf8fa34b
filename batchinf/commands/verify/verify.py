"""`batchinf verify`: a sample of a job's rows once more through transformers, and how far what is stored is off.

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
from typing import TYPE_CHECKING, Any

import numpy as np

from batchinf.base.errors import DriftError, UserError, VerificationFailed
from batchinf.base.slices import SOURCE_FOLDER, job_folders
from batchinf.commands.verify.claims import CLAIMS, Claim, RowsClaim
from batchinf.commands.verify.rows import StoredRow, choose_places, read
from batchinf.commands.verify.tallies import RowsTally, Tally, count_claim, count_rows_claim, table_lines
from batchinf.job.choose import max_model_len
from batchinf.job.open import Job, begun_at, check_drift, open_job
from batchinf.manifest.state import State, read_state
from batchinf.prompts.encoder import load_tokenizer
from batchinf.records import Prompt
from batchinf.results import Results
from batchinf.spec.file import SpecFile
from batchinf.spec.job import fingerprint
from batchinf.tasks.columns import prompt_hash
from batchinf.tasks.registry import task_of

if TYPE_CHECKING:
    from batchinf.commands.verify.reference import Reference

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
    """What is asked for. tolerance: None is what suits the job's own dtype."""

    num_rows: int = 64
    seed: int = 0
    dtype: str = "float32"
    device: str = "cpu"
    tolerance: float | None = None


@dataclass(frozen=True, slots=True)
class RowResult:
    """How far one output row is off, at its worst token. place: in the prompt or in the output, from 0; of rows of
    numbers the token after which they are, None where they are of the whole prompt. max_abs_delta: of a vector, ‖Δ‖
    against the reference's length.
    """

    row_index: int
    sample_index: int
    kind: str
    place: int | None
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
    tallies: dict[str, Tally | RowsTally] = field(default_factory=dict)
    worst: list[RowResult] = field(default_factory=list)

    @property
    def is_within(self) -> bool:
        """Whether every value is there and within the tolerance."""
        worst = max((it.worst for it in self.tallies.values()), default=0.0)
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
        claims = CLAIMS[job.spec.task]
        rows = read(
            results, choose_places(results, wanted.num_rows, wanted.seed), claims.columns, claims.rows(job.spec)
        )
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


def _check(job: Job, results: Results) -> None:
    """Raise UserError where there is nothing to compare, or no way to."""
    CLAIMS[job.spec.task].check(job.spec, results.schema)
    if job.spec.model.load_format == "dummy":
        raise UserError("model.load_format is dummy: vLLM's random weights are not those that transformers would have")
    if _mode(job) not in ("raw_logprobs", "raw_logits"):
        raise UserError(f"the job stored {_mode(job)}, which depend on its sampling; only raw ones are verified")


def _mode(job: Job) -> str:
    """vLLM's `logprobs_mode`."""
    logits = job.spec.logits
    own = getattr(job.spec.sampling, "logprobs_mode", "raw_logprobs") if logits is None else f"raw_{logits.values}"
    return str(job.spec.engine.get("logprobs_mode", own))


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
    job: Job,
    state: State,
    results: Results,
    rows: list[StoredRow],
    prompts: dict[int, Prompt],
    wanted: Wanted,
) -> Report:
    reference = _reference(job, state, wanted)
    dtype = str(_said(state, "dtype") or job.spec.model.dtype)
    tolerance = wanted.tolerance if wanted.tolerance is not None else _tolerance(job, dtype)
    report = Report(results.folder, reference.description, dtype, tolerance, len(rows), results.num_rows, wanted.seed)
    task, length = task_of(job.spec), max_model_len(job) or _LONG
    # Rows of one adapter together, as merging it takes its time.
    for row in sorted(rows, key=lambda row: prompts[row.values["row_index"]].adapter or ""):
        prompt = prompts[row.values["row_index"]]
        found = []
        for claim in CLAIMS[job.spec.task].of(row, prompt, task.expand(prompt, length)):
            place, most = _count(report, reference, claim, prompt.adapter, _mode(job) == "raw_logits")
            found.append(RowResult(row.values["row_index"], row.values["sample_index"], claim.kind, place, most))
        if found:
            report.worst.append(max(found, key=lambda it: it.max_abs_delta))
            report.worst = sorted(report.worst, key=lambda it: -it.max_abs_delta)[:_WORST]
    if not report.tallies:
        raise UserError("the rows that were chosen have no tokens to compare; choose more with -n")
    return report


def _reference(job: Job, state: State, wanted: Wanted) -> "Reference":
    from batchinf.commands.verify.reference import (
        HeadReference,
        Reference,  # torch and transformers: seconds
        StatesReference,
    )

    arguments = job.spec, job.model, job.adapters, wanted.dtype, wanted.device
    if job.spec.task in ("embed", "hidden_states"):
        pooling_type = str((_said(state, "pooling") or {}).get("seq_pooling_type") or "")
        return StatesReference(*arguments, pooling_type.rpartition(".")[2].upper())
    return HeadReference(*arguments) if job.task.pooling is not None else Reference(*arguments)


def _count(
    report: Report, reference: "Reference", claim: Claim | RowsClaim, adapter: str | None, are_logits: bool
) -> tuple[int | None, float]:
    """Where a claim is the most off, and by how much."""
    if isinstance(claim, RowsClaim):
        tally = report.tallies.setdefault(claim.kind, RowsTally(is_vector=claim.is_vector))
        assert isinstance(tally, RowsTally)
        place, most = count_rows_claim(tally, claim, reference.rows(claim, adapter, are_logits))
        return None if claim.positions is None else int(claim.positions[place]), most
    tokens = report.tallies.setdefault(claim.kind, Tally())
    assert isinstance(tokens, Tally)
    of_row = reference.scores(claim.token_ids, claim.first, claim.wanted, adapter, are_logits)
    return count_claim(tokens, claim, of_row.values, of_row.best)


def _said(state: State, name: str) -> Any:
    """What the latest engine said of its settings; None where none said it."""
    said = [event.fields["settings"].get(name) for event in state.events if event.fields.get("settings")]
    return next((value for value in reversed(said) if value), None)


def _tolerance(job: Job, dtype: str) -> float:
    spec = job.spec
    is_rough = spec.model.quantization is not None or "quantization_config" in job.model.config
    kind = "bfloat16" if is_rough or dtype not in TOLERANCES else dtype
    if spec.task in ("embed", "hidden_states") or (
        spec.task == "classify" and spec.pooling.use_activation is not False
    ):
        # Against a vector's length float16 rounds by 0.0003.
        return RELATIVE[kind]
    # float16 holds 11 bits: a stored logprob of -16 is off by up to 0.008.
    is_half = spec.output.logprobs_dtype == "float16" or (spec.logits is not None and spec.logits.dtype == "float16")
    return max(TOLERANCES["float16"] if is_half else 0.0, TOLERANCES[kind])


def report_lines(report: Report) -> Iterator[str]:
    """For people. Raises VerificationFailed, last, where a value is beyond the tolerance or missing."""
    yield (
        f"{report.job}: {report.num_rows:,} of {report.num_stored:,} rows (--seed {report.seed}), engine in "
        f"{report.engine_dtype}, against {report.reference}"
    )
    yield from table_lines(report.tallies)
    for number, row in enumerate(report.worst):
        if isinstance(report.tallies[row.kind], Tally):
            where = f"row {row.row_index}, sample {row.sample_index}, {row.kind} token {row.place}"
        else:
            where = f"row {row.row_index}, {row.kind}{'' if row.place is None else f' at token {row.place}'}"
        yield f"{'worst rows: ' if not number else '            '}{where}: {row.max_abs_delta:.2e}"
    if num_nan := sum(tally.num_nan for tally in report.tallies.values()):
        yield f"{num_nan:,} {_what(report)} are missing or NaN"
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
    return f"the stored {_what(report)} are beyond the tolerance of {report.tolerance:g}; see the rows named above"


def _what(report: Report) -> str:
    tallies = [*report.tallies.values()]
    if all(isinstance(tally, Tally) for tally in tallies):
        return "logprobs"
    return "numbers"
