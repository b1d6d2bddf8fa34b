"""`batchinf verify`: runs a sample of a job's rows through transformers and compares the stored values."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from batchinf.base.errors import DriftError, UserError, VerificationFailed
from batchinf.base.parquet import open_part
from batchinf.job.begun import open_begun
from batchinf.job.drift import check_drift
from batchinf.job.input_job import image_folder
from batchinf.job.job import Job, begun_at, max_model_len
from batchinf.manifest.state import State
from batchinf.output.open_lease import KnownImages
from batchinf.records import Prompt
from batchinf.replica.images import ImagePrompts
from batchinf.results import Results
from batchinf.spec.file import SpecFile
from batchinf.spec.job import fingerprint
from batchinf.tasks.columns import IMAGE_DIGESTS, prompt_hash
from batchinf.tasks.deviations import LogprobDeviations, VectorDeviations, table_lines
from batchinf.tasks.image_reference import ReferenceProcessor
from batchinf.tasks.verification import (
    ModelInputs,
    ReferenceWanted,
    StoredLogprobs,
    StoredRow,
    StoredVectors,
    Verification,
)

if TYPE_CHECKING:
    from batchinf.tasks.reference import Reference

# Tolerance for |Δ logprob| by the engine's dtype. In float32 only the order of additions differs (1e-5 on a small
# model). bfloat16 has 8 bits: rounding changes a logit of 16 to 32 by up to 0.06, and one token in thousands by several
# times that.
TOLERANCES = {"float32": 1e-3, "float16": 0.1, "bfloat16": 0.75}
# Tolerance for a vector's deviation relative to its length, and for probabilities. Many rounding errors cancel there.
RELATIVE = {"float32": 1e-3, "float16": 0.02, "bfloat16": 0.1}
_WORST = 5
_LONG = 1 << 30

_Deviations = dict[str, LogprobDeviations | VectorDeviations]
"""By kind of logprobs, or by column of vectors."""
_Prompts = dict[int, tuple[Prompt, ModelInputs | None]]
"""By position of the row, with what the reference needs of its images."""


@dataclass(frozen=True, slots=True)
class RowDeviation:
    """The deviation of one output row at its worst token."""

    row_index: int
    sample_index: int
    kind: str
    """Of logprobs, or a column of vectors."""
    place: int | None
    """Of the token in the prompt or output, from 0; None: a vector of the whole prompt."""
    max_abs_delta: float
    """For a vector with a direction, ‖Δ‖ / ‖reference‖."""


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The report of `verify`."""

    job: str
    reference: str
    engine_dtype: str
    tolerance: float
    num_rows: int
    """Compared output rows, of `num_stored`."""
    num_stored: int
    seed: int
    verdict: Literal["within", "beyond"]
    """`within` if no value is missing or beyond the tolerance."""
    deviations: _Deviations
    """By kind of logprobs, or by column of vectors."""
    worst: tuple[RowDeviation, ...]
    """The rows with the largest deviations."""

    @property
    def is_within(self) -> bool:
        return self.verdict == "within"

    @property
    def _what(self) -> str:
        are_logprobs = all(isinstance(kind, LogprobDeviations) for kind in self.deviations.values())
        return "logprobs" if are_logprobs else "numbers"

    def lines(self) -> Iterator[str]:
        """The verdict, a table, and the worst rows. `raise_if_beyond` ends the command if the verdict is bad."""
        yield f"verdict: {self.verdict} the tolerance of {self.tolerance:g}"
        yield (
            f"{self.job}: {self.num_rows:,} of {self.num_stored:,} rows (--seed {self.seed}), engine in "
            f"{self.engine_dtype}, against {self.reference}"
        )
        yield from table_lines(self.deviations)
        for number, row in enumerate(self.worst):
            if isinstance(self.deviations[row.kind], LogprobDeviations):
                where = f"row {row.row_index}, sample {row.sample_index}, {row.kind} token {row.place}"
            else:
                where = f"row {row.row_index}, {row.kind}{'' if row.place is None else f' at token {row.place}'}"
            yield f"{'worst rows: ' if not number else '            '}{where}: {row.max_abs_delta:.2e}"
        if num_nan := sum(deviations.num_nan for deviations in self.deviations.values()):
            yield f"{num_nan:,} {self._what} are missing or NaN"

    def raise_if_beyond(self) -> None:
        """Raise VerificationFailed if a number is beyond the tolerance or missing."""
        if not self.is_within:
            raise VerificationFailed(
                f"the stored {self._what} are beyond the tolerance of {self.tolerance:g}; see the rows named above"
            )


def verify_job(
    file: SpecFile,
    *,
    num_rows: int = 64,
    seed: int = 0,
    dtype: str = "float32",
    device: str = "cpu",
    tolerance: float | None = None,
) -> VerifyReport:
    """Compare a sample of the job's rows. Raises UserError if they cannot be compared.

    dtype, device: of the reference. tolerance: None means that of the engine's dtype.
    """
    if dtype not in TOLERANCES:
        raise UserError(f"--dtype: got '{dtype}'; must be {', '.join(TOLERANCES)}")
    results = Results(file.spec.output.path)
    if results.spec.get("scripted") is not None:
        raise UserError("the job was run by the scripted engine: there is no model to verify")
    with open_begun(file, results.root) as (job, state):
        _check_drift(job, state)
        if job.task.verification is None:
            raise UserError(f"task {job.task.name} cannot be verified")
        verification = job.task.verification(job.spec)
        _check(job, verification, results)
        places = choose_places(results, num_rows, seed)
        rows = read_rows(results, places, verification)
        prompts = _prompts(job, state, rows)
    for row in rows:
        prompt, _ = prompts[row.values["row_index"]]
        _check_prompt(prompt.part_of(row.values["sample_index"]), row.values)
    reference = _reference(job, state, verification, dtype=dtype, device=device)
    deviations, worst = _compared(job, rows, prompts, verification=verification, reference=reference)
    engine_dtype = str(_reported(state, "dtype") or job.spec.model.dtype)
    if tolerance is None:
        tolerance = _tolerance(job, state, verification, engine_dtype)
    is_within = all(kind.worst <= tolerance and not kind.num_nan for kind in deviations.values())
    return VerifyReport(
        job=results.folder,
        reference=reference.description,
        engine_dtype=engine_dtype,
        tolerance=tolerance,
        num_rows=len(rows),
        num_stored=results.num_rows,
        seed=seed,
        verdict="within" if is_within else "beyond",
        deviations=deviations,
        worst=tuple(sorted(worst, key=_furthest)[:_WORST]),
    )


def _reference(job: Job, state: State, verification: Verification, *, dtype: str, device: str) -> "Reference":
    """The model in transformers, with what the engine reported of its own."""
    pooling_type = str((_reported(state, "pooling") or {}).get("seq_pooling_type") or "")
    wanted = ReferenceWanted(
        model=job.model,
        adapters=job.adapters,
        dtype=dtype,
        device=device,
        are_logits=_mode(job) == "raw_logits",
        pooling_type=pooling_type.rpartition(".")[2].upper(),
    )
    return verification.reference(wanted)


def _compared(
    job: Job, rows: Sequence[StoredRow], prompts: _Prompts, *, verification: Verification, reference: "Reference"
) -> tuple[_Deviations, list[RowDeviation]]:
    """The deviations of all rows, and each row's largest. Raises UserError if there is nothing to compare."""
    length = max_model_len(job) or _LONG
    deviations: _Deviations = {}
    worst: list[RowDeviation] = []
    # Rows of one adapter together, because merging an adapter takes long.
    for row in sorted(rows, key=lambda row: prompts[row.values["row_index"]][0].adapter or ""):
        prompt, inputs = prompts[row.values["row_index"]]
        of_row = [
            RowDeviation(
                row_index=row.values["row_index"],
                sample_index=row.values["sample_index"],
                kind=stored.kind,
                **_add(deviations, replace(stored, rendered=inputs), reference, adapter=prompt.adapter),
            )
            for stored in verification.stored(row, prompt, [each for _, each in job.task.requests(prompt, length)])
        ]
        worst += sorted(of_row, key=_furthest)[:1]
    if not deviations:
        raise UserError("the drawn rows have no tokens to compare; draw more rows with -n")
    return deviations, worst


def _check_drift(job: Job, state: State) -> None:
    """Raise DriftError if the job, with all slices as one job, has changed."""
    identity = {name: value for name, value in state.header.identity.items() if name != "slice"}
    check_drift(job, replace(state.header, identity=identity, fingerprint=fingerprint(identity)))


def _check(job: Job, verification: Verification, results: Results) -> None:
    """Raise UserError if the job has nothing that can be compared."""
    verification.check(results.own_schema)
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
    places = np.zeros(0, np.int64)
    keys = np.zeros(0)
    start = 0
    for batch in results.batches(["error_type"], 65536):
        is_good = np.asarray(batch.column(0).is_null())
        places = np.concatenate([places, start + np.flatnonzero(is_good)])
        keys = np.concatenate([keys, random.random(len(is_good))[is_good]])
        lowest = np.argsort(keys, kind="stable")[:num_rows]
        places = places[lowest]
        keys = keys[lowest]
        start += len(is_good)
    if not len(places):
        raise UserError(f"{results.folder} has no row without an error yet; run the job first")
    return sorted(int(place) for place in places)


def read_rows(results: Results, places: Sequence[int], verification: Verification) -> list[StoredRow]:
    """The rows at these ascending places, with the small columns. Reads only row groups with such rows."""
    names = ("row_index", "sample_index", "prompt_hash", IMAGE_DIGESTS, *verification.columns)
    columns = [name for name in names if name in results.own_schema.names]
    rows: list[StoredRow] = []
    start = 0
    for path in results.parts:
        with open_part(path) as part:
            for group in range(part.num_row_groups):
                stop = start + part.metadata.row_group(group).num_rows
                here = [place - start for place in places if start <= place < stop]
                if here:
                    values = part.read_row_group(group, columns).take(here).to_pylist()
                    rows += [
                        StoredRow(
                            values={"sample_index": 0, **row},
                            columns=verification.vector_columns,
                            part=path,
                            group=group,
                            place=place,
                        )
                        for row, place in zip(values, here, strict=True)
                    ]
                start = stop
    return rows


def _prompts(job: Job, state: State, rows: Sequence[StoredRow]) -> _Prompts:
    """The prompts of these rows by their positions, each with what the reference needs of its images."""
    builder = job.prompt_builder(state)
    positions = sorted({row.values["row_index"] for row in rows})
    built = builder.build(job.source.read_rows(np.asarray(positions, np.int64), builder.columns), max_model_len(job))
    if job.spec.input.images is None:
        return {prompt.row_index: (prompt, None) for prompt in built}
    # Digests that changed stop here, with the name of the image.
    known = {
        row.values["row_index"]: KnownImages(row.values[IMAGE_DIGESTS], "put the old one back, to compare with it")
        for row in rows
    }
    render = ReferenceProcessor(job.spec, job.model, begun_at(job, state)).render
    images = ImagePrompts(job.spec.input.images, base_folder=image_folder(job.spec.input))
    images.expect(built)
    prompts: _Prompts = {}
    for prompt in built:
        rendered = None
        if prompt.image_sources:
            prompt, rendered = images.made(prompt, render, known)
            if prompt.error is not None:
                message = prompt.error.error_message
                raise DriftError(f"row {prompt.row_index}: {message}; put back the image with which the job ran")
        prompts[prompt.row_index] = prompt, None if rendered is None else rendered.for_ids
    images.stop()
    return prompts


def _check_prompt(prompt: Prompt, row: dict[str, Any]) -> None:
    if prompt_hash(np.asarray(prompt.token_ids, np.int32), prompt.image_digests or ()) != row["prompt_hash"]:
        why = f" ({prompt.error.error_message})" if prompt.error is not None else ""
        raise DriftError(
            f"row {row['row_index']} has other prompt tokens now than in the run{why}: the template, the tokenizer or "
            "the input has changed; restore it"
        )


def _furthest(row: RowDeviation) -> float:
    """The order of rows, the largest deviation first."""
    return -row.max_abs_delta


def _add(
    deviations: _Deviations,
    stored: StoredLogprobs | StoredVectors,
    reference: "Reference",
    *,
    adapter: str | None,
) -> dict[str, Any]:
    """Add the deviations of a row's numbers from the reference. Returns the place of the largest, and the largest."""
    place: int | None
    if isinstance(stored, StoredVectors):
        vectors = deviations.setdefault(stored.kind, VectorDeviations(has_direction=stored.has_direction))
        assert isinstance(vectors, VectorDeviations)
        index, deviation = vectors.add(stored, reference.vectors(stored, adapter))
        place = None if stored.positions is None else int(stored.positions[index])
    else:
        logprobs = deviations.setdefault(stored.kind, LogprobDeviations())
        assert isinstance(logprobs, LogprobDeviations)
        scores = reference.scores(stored, adapter)
        place, deviation = logprobs.add(stored, scores.values, scores.best)
    return {"place": place, "max_abs_delta": deviation}


def _reported(state: State, name: str) -> Any:
    """A setting as the latest engine reported it; None if none did."""
    values = [event.fields["settings"].get(name) for event in state.events if event.fields.get("settings")]
    return next((value for value in reversed(values) if value), None)


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
