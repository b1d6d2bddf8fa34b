"""`batchinf verify`: runs a sample of a job's rows through transformers and compares the stored numbers.

Rows are chosen by a seed among those without an error. Their prompts are rendered again from the input and must have
the stored `prompt_hash`. The reference then reads prompt and stored output. One row at a time is in memory.
"""

import contextlib
import pathlib
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow.parquet as pq

from batchinf.base.errors import DriftError, UserError
from batchinf.base.slices import SOURCE_FOLDER, job_folders
from batchinf.commands.deviations import LogprobDeviations, VectorDeviations, add_logprobs, add_vectors
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
from batchinf.tasks.verification import ReferenceWanted, StoredLogprobs, StoredRow, StoredVectors, Verification

if TYPE_CHECKING:
    from batchinf.tasks.reference import Reference

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
    results: Results, places: Sequence[int], columns: Sequence[str], vector_columns: tuple[str, ...] = ()
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
            place, most = _add(deviations, reference, stored, prompt.adapter, _mode(job) == "raw_logits")
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


def _add(
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
