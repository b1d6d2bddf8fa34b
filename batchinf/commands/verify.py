"""`batchinf verify`: computes a sample of a job's rows again with transformers in float32, and compares the numbers."""

import pathlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from batchinf.base.errors import DriftError, UserError, VerificationFailed
from batchinf.base.parquet import open_part
from batchinf.base.ragged import to_matrix, to_ragged
from batchinf.base.text import short_count
from batchinf.commands.reference import Reference
from batchinf.job.begun import open_begun
from batchinf.job.drift import check_drift
from batchinf.job.job import Job, max_model_len
from batchinf.manifest.lines import Platform
from batchinf.manifest.state import State
from batchinf.records import Int64Array, Prompt, Request, Span
from batchinf.results import Results
from batchinf.spec.file import SpecFile
from batchinf.spec.job import fingerprint
from batchinf.tasks.base import Task
from batchinf.tasks.columns import leaf_of, prompt_hash

# Tolerance for |Δ logprob| by the engine's dtype. In float32 only the order of additions differs (1e-5 on a small
# model). bfloat16 has 8 bits: rounding changes a logit of 16 to 32 by up to 0.06, and one token in thousands by several
# times that.
TOLERANCES = {"float32": 1e-3, "float16": 0.1, "bfloat16": 0.75}
# Tolerance for an embedding's deviation relative to its length. Many rounding errors cancel there.
RELATIVE = {"float32": 1e-3, "float16": 0.02, "bfloat16": 0.1}
_KEYS = ("row_index", "sample_index", "prompt_hash")
_TOKENS = ("logprobs", "top_token_ids", "top_logprobs")
_VECTORS = ("logits", "embedding", "embeddings")
_COLUMNS = (*_VECTORS, "positions", "value_token_ids", "token_ids",
            *(f"{prefix}{name}" for prefix in ("", "prompt_", "choice_") for name in _TOKENS))  # fmt: skip
_TITLES = ("positions", "numbers", "max |Δ|", "mean |Δ|", "top-1", "min cosine")

Numbers = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredNumbers:
    """Stored numbers of an output row that belong to one sequence of tokens."""

    kind: str
    """`output`, `prompt`, `scored`, or the output column."""
    token_ids: list[int]
    """The sequence."""
    positions: Int64Array | None
    """[n]: the tokens after which the model gives the numbers; None: it is one embedding of the sequence."""
    places: Int64Array
    """[n]: where the numbers are in the prompt, the output or the column, from 0."""
    tokens: Numbers | None = None
    """[n, k]: the tokens whose numbers they are; None: the first k of the vocabulary."""
    values: Numbers
    """[n, k], NaN where nothing is stored."""


@dataclass(slots=True)
class Deviations:
    """How far the stored numbers of one kind are from the reference's. Of an embedding: ‖Δ‖ / ‖reference‖."""

    num_positions: int = 0
    num_values: int = 0
    num_missing: int = 0
    """Numbers that are null or NaN."""
    max_abs_delta: float = 0.0
    """Infinite if a number is missing, or is an infinity in only one of the two."""
    sum_abs_delta: float = 0.0
    """Of the deviations that are finite, `num_summed` of them."""
    num_summed: int = 0
    num_agreeing: int | None = None
    """Positions whose highest number is the reference's, too; None where a position has one number."""
    min_cosine: float | None = None
    """Of embeddings."""
    worst: tuple[int, int, int] | None = None
    """row_index and sample_index of the largest deviation, and its place in the prompt, the output or the column."""

    def add(self, row: tuple[int, int], stored: StoredNumbers, expected: Numbers, start: int) -> None:
        """Add the positions of a row from `start` on. row: row_index and sample_index. expected: [n, k]."""
        own = stored.values[start : start + len(expected)]
        values = own.astype(np.float64)
        if values.shape != expected.shape:
            raise UserError(
                f"the job's rows have {values.shape[1]:,} numbers each, transformers' {expected.shape[1]:,}: they "
                "cannot be verified"
            )
        with np.errstate(invalid="ignore", over="ignore"):
            deltas = np.abs(values - expected)
            # Both may be -inf. A number that the stored type cannot hold is stored as infinity.
            deltas[np.isinf(own) & (own == expected.astype(own.dtype))] = 0.0
        deltas[np.isnan(deltas)] = np.inf
        self.num_positions += len(values)
        self.num_values += values.size
        self.num_missing += int(np.isnan(values).sum())
        if stored.positions is None:
            length = max(1e-30, float(np.linalg.norm(expected)))
            cosine = float((values * expected).sum() / max(1e-30, float(np.linalg.norm(values)) * length))
            self.min_cosine = min(1.0 if self.min_cosine is None else self.min_cosine, cosine)
            deltas = np.linalg.norm(deltas, axis=1, keepdims=True) / length
        elif values.shape[1] > 1:
            best = np.take_along_axis(values, expected.argmax(axis=1)[:, None], axis=1)[:, 0]
            # Rounding may make several numbers equal. All of them then count as the highest.
            self.num_agreeing = (self.num_agreeing or 0) + int((best == np.nanmax(values, axis=1)).sum())
        is_finite = np.isfinite(deltas)
        self.sum_abs_delta += float(deltas[is_finite].sum())
        self.num_summed += int(is_finite.sum())
        of_positions = deltas.max(axis=1)
        place = int(of_positions.argmax())
        if self.worst is None or of_positions[place] > self.max_abs_delta:
            self.max_abs_delta = float(of_positions[place])
            self.worst = (*row, int(stored.places[start + place]))

    def line(self, kind: str) -> str:
        """The line of the table."""
        mean = self.sum_abs_delta / max(1, self.num_summed)
        numbers = (f"{self.num_positions:,}", short_count(self.num_values), f"{self.max_abs_delta:.2e}", f"{mean:.2e}")
        share = "-" if self.num_agreeing is None else f"{self.num_agreeing / self.num_positions:.2%}"
        cosine = "-" if self.min_cosine is None else f"{self.min_cosine:.7f}"
        return _table_line(kind, (*numbers, share, cosine))


def _table_line(title: str, cells: Sequence[str]) -> str:
    widths = (max(9, len(name)) for name in _TITLES)
    return title.ljust(11) + "".join(f" {text:>{width}}" for text, width in zip(cells, widths, strict=True))


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
    deviations: dict[str, Deviations]
    """By kind of logprobs, or by column."""

    def lines(self) -> Iterator[str]:
        """The verdict, a table, and the worst row of each kind."""
        yield f"verdict: {self.verdict} the tolerance of {self.tolerance:g}"
        yield (
            f"{self.job}: {self.num_rows:,} of {self.num_stored:,} rows (--seed {self.seed}), engine in "
            f"{self.engine_dtype}, against {self.reference}"
        )
        yield _table_line("numbers of", _TITLES)
        for kind, found in self.deviations.items():
            yield found.line(kind)
        for kind, found in self.deviations.items():
            if found.worst is not None:
                row, sample, place = found.worst
                yield f"worst of {kind}: row {row}, sample {sample}, place {place}: {found.max_abs_delta:.2e}"
        if num_missing := sum(found.num_missing for found in self.deviations.values()):
            yield f"{num_missing:,} numbers are missing or NaN"

    def raise_if_beyond(self) -> None:
        """Raise VerificationFailed if a number is beyond the tolerance or missing."""
        if self.verdict == "beyond":
            raise VerificationFailed(
                f"the stored numbers are beyond the tolerance of {self.tolerance:g}; see the rows named above"
            )


def verify_job(
    file: SpecFile, *, num_rows: int = 64, seed: int = 0, device: str = "cpu", tolerance: float | None = None
) -> VerifyReport:
    """Compare a sample of the job's rows. Raises UserError if they cannot be compared.

    device: of the reference. tolerance: None means that of the engine's dtype.
    """
    results = Results(file.spec.output.path)
    if results.spec.get("scripted") is not None:
        raise UserError("the job was run by the scripted engine: there is no model to verify")
    with open_begun(file, results.root) as (job, state):
        _check(job, state, results)
        rows = sampled_rows(results, num_rows, seed)
        prompts = _prompts(job, state, [row.keys for row in rows])
    reference = Reference(job.task, job.model, device, job.adapters)
    pooling_type = str((_reported(state, "pooling") or {}).get("seq_pooling_type") or "").rpartition(".")[2].upper()
    deviations: dict[str, Deviations] = {}
    # Rows of one adapter together, because merging an adapter takes long.
    for row in sorted(rows, key=lambda row: prompts[row.keys["row_index"]].adapter or ""):
        key = (row.keys["row_index"], row.keys.get("sample_index", 0))
        prompt = prompts[key[0]]
        requests = [request for _, request in job.task.requests(prompt, max_model_len(job) or 1 << 30)]
        reference.merge(prompt.adapter)
        for stored in stored_numbers(job.task, row.read(results), prompt, requests[key[1] :]):
            found = deviations.setdefault(stored.kind, Deviations())
            start = 0
            for expected in expected_numbers(job.task, reference, stored, pooling_type):
                found.add(key, stored, expected, start)
                start += len(expected)
    if not deviations:
        raise UserError("the drawn rows have no numbers to compare; draw more rows with -n")
    engine_dtype = str(_reported(state, "dtype") or job.spec.model.dtype)
    tolerance = _tolerance(job, state, results, engine_dtype) if tolerance is None else tolerance
    is_within = all(found.max_abs_delta <= tolerance for found in deviations.values())
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
    )


def expected_numbers(task: Task, reference: Reference, stored: StoredNumbers, pooling_type: str) -> Iterator[Numbers]:
    """The reference's numbers for `stored.values`, in pieces [n, k]. pooling_type: as the engine reported it."""
    if stored.positions is None:
        pooling = task.pooling
        is_cut = (pooling is not None and pooling.dimensions is not None) or task.spec.rows_may_set("dimensions")
        yield reference.embedding(stored.token_ids, pooling_type, stored.values.shape[1] if is_cut else None)
        return
    are_logprobs = _mode(task) == "raw_logprobs"
    width = stored.values.shape[1]
    for rows in reference.logits(stored.token_ids, stored.positions, stored.tokens, are_logprobs=are_logprobs):
        yield rows[:, :width]


def _mode(task: Task) -> str:
    return str(task.spec.engine.get("logprobs_mode", task.logprobs_mode))


def _check(job: Job, state: State, results: Results) -> None:
    """Raise UserError if the job has changed, or has nothing that can be compared."""
    identity = {name: value for name, value in state.header.identity.items() if name != "slice"}
    check_drift(job, replace(state.header, identity=identity, fingerprint=fingerprint(identity)))
    reason = "a job with images cannot be verified" if job.spec.input.has_images else job.task.why_unverified(job.model)
    if reason is not None:
        raise UserError(
            f"{reason}; run the job a second time with --set model.dtype=float32 --set output.path=NEW, and compare "
            "the two with batchinf diff"
        )
    if job.spec.model.load_format == "dummy":
        raise UserError("model.load_format is dummy: transformers would draw other random weights than vLLM, so "
                        "nothing can be verified")  # fmt: skip
    if _mode(job.task) not in ("raw_logprobs", "raw_logits"):
        raise UserError(
            f"the job stored {_mode(job.task)}, which depend on its sampling; only raw logprobs and logits can be "
            "verified. To verify the model, give run and verify: --set sampling.logprobs_mode=raw_logprobs --set "
            "input.limit=64 --set output.path=NEW"
        )
    names = {*results.own_schema.names}
    needed = {*_VECTORS, "prompt_logprobs", "choice_logprobs", *(["logprobs"] if "token_ids" in names else [])}
    if not names & needed:
        raise UserError(
            "the job stored no logprobs of tokens to verify; run one with sampling.logprobs or "
            "sampling.prompt_logprobs, and with output.include_token_ids and include_token_logprobs, the defaults"
        )


def _reported(state: State, name: str) -> Any:
    """A setting as the latest engine reported it; None if none did."""
    values = [platform.settings.get(name) for platform in state.of(Platform)]
    return next((value for value in reversed(values) if value), None)


def _tolerance(job: Job, state: State, results: Results, dtype: str) -> float:
    is_rough = job.spec.model.quantization is not None or "quantization_config" in job.model.config
    kind = "bfloat16" if is_rough or dtype not in TOLERANCES else dtype
    devices = {platform.device for platform in state.of(Platform)}
    if kind == "float32" and devices - {"cpu"}:
        kind = "float16"  # on GPUs, vLLM's attention multiplies float32 as TF32, which has the 11 bits of float16
    if job.task.pooling is not None:
        return RELATIVE[kind]
    # float16 has 11 bits: rounding changes a stored logprob of -16 by up to 0.008.
    is_half = any(leaf_of(field)[1] == pa.float16() for field in results.own_schema)
    return max(TOLERANCES["float16"] if is_half else 0.0, TOLERANCES[kind])


class _Row(NamedTuple):
    """An output row: its keys, and its place in a row group of a part."""

    keys: dict[str, Any]
    part: pathlib.Path
    group: int
    place: int

    def read(self, results: Results) -> pa.Table:
        """A table of this row alone, with its columns of numbers."""
        names = [name for name in _COLUMNS if name in results.own_schema.names]
        with open_part(self.part) as part:
            return part.read_row_group(self.group, names).slice(self.place, 1)


def sampled_rows(results: Results, num_rows: int, seed: int) -> list[_Row]:
    """Random output rows without an error. Each row draws a number, and the lowest win."""
    random = np.random.default_rng(seed)
    keys = [name for name in _KEYS if name in results.own_schema.names]
    lowest: list[tuple[float, _Row]] = []
    for path in results.parts:
        with open_part(path) as part:
            for group in range(part.num_row_groups):
                table = part.read_row_group(group, [*keys, "error_type"])
                draws = np.where(table["error_type"].is_null(), random.random(table.num_rows), np.inf)
                for place in np.argsort(draws)[:num_rows].tolist():
                    [values] = table.select(keys).slice(place, 1).to_pylist()
                    lowest.append((float(draws[place]), _Row(values, path, group, place)))
        lowest = sorted(lowest, key=lambda item: item[0])[:num_rows]
    rows = [row for draw, row in lowest if draw < np.inf]
    if not rows:
        raise UserError(f"{results.folder} has no row without an error yet; run the job first")
    return sorted(rows, key=lambda row: row.keys["row_index"])


def _prompts(job: Job, state: State, rows: Sequence[Mapping[str, Any]]) -> dict[int, Prompt]:
    """The prompts of the input rows by their positions. Raises DriftError if one is not that of the run."""
    builder = job.prompt_builder(state)
    positions = np.asarray(sorted({row["row_index"] for row in rows}), np.int64)
    built = builder.build(job.source.read_rows(positions, builder.columns), max_model_len(job))
    prompts = {prompt.row_index: prompt for prompt in built}
    for row in rows:
        part = prompts[row["row_index"]].part_of(row.get("sample_index", 0))
        if prompt_hash(np.asarray(part.token_ids, np.int32), ()) != row["prompt_hash"]:
            why = f" ({part.error.error_message})" if part.error is not None else ""
            raise DriftError(f"row {row['row_index']} has other prompt tokens now than in the run{why}: the template, "
                             "the tokenizer or the input has changed; restore it")  # fmt: skip
    return prompts


def stored_numbers(task: Task, row: pa.Table, prompt: Prompt, requests: Sequence[Request]) -> Iterator[StoredNumbers]:
    """The numbers of an output row. Raises UserError if the row is damaged.

    row: a table of this row, with its columns of numbers. requests: those of the row, from that of its sample on.
    """
    vectors = {field.name: row[field.name].combine_chunks() for field in row.schema if _is_vectors(field)}
    [cells] = row.drop_columns([*vectors]).to_pylist()
    ids = requests[0].prompt_token_ids
    if task.vocabulary_rows is not None:  # the last output token has no numbers after it
        sequence = [*ids, *(cells.get("token_ids") or ())[:-1]]
        chosen = task.vocabulary_rows.token_ids
        yield from _logits(vectors, cells["positions"], sequence, chosen=chosen, row_index=prompt.row_index)
    elif vectors:  # an embedding, or one for each input of a line of a batch file
        [(kind, column)] = vectors.items()
        rows = to_matrix(column) if pa.types.is_fixed_size_list(column.type) else to_ragged(column)[0]
        for place, (request, values) in enumerate(zip(requests, rows, strict=True)):
            yield StoredNumbers(kind=kind, token_ids=request.prompt_token_ids, positions=None,
                                places=np.array([place]), values=values[None])  # fmt: skip
    elif prompt.scoring is not None:
        spans = prompt.scoring.spans
        for span, own in zip(spans, _of_spans(cells, spans), strict=True):
            yield _logprobs("scored", own, span.token_ids, len(span.token_ids) - len(own["logprobs"]))
    else:
        if cells.get("prompt_logprobs") is not None and len(ids) > 1:  # the first token has no logprob
            yield _logprobs("prompt", {name: cells.get(f"prompt_{name}") for name in _TOKENS}, ids, 1)
        if cells.get("logprobs") is not None and cells.get("token_ids"):
            yield _logprobs("output", cells, [*ids, *cells["token_ids"]], len(ids))


def _is_vectors(field: pa.Field) -> bool:
    """Whether a column has vectors: of a row, of its positions, or of the inputs of a line."""
    return field.name in _VECTORS or (
        pa.types.is_list(field.type) and pa.types.is_fixed_size_list(field.type.value_type)
    )


def _logits(
    vectors: Mapping[str, pa.Array],
    places: Sequence[int],
    token_ids: list[int],
    *,
    chosen: tuple[int, ...] | None,
    row_index: int,
) -> Iterator[StoredNumbers]:
    """Logits or logprobs over the vocabulary, over the chosen tokens of the job, or over those of the row."""
    arrays = {name: to_ragged(column)[0] for name, column in vectors.items()}
    tokens = arrays.pop("value_token_ids", chosen)
    [(kind, values)] = arrays.items()
    positions = np.asarray(places, np.int64)
    if len(positions) != len(values) or ((positions < 0) | (positions >= len(token_ids))).any():
        raise UserError(f"row {row_index} has {len(values)} rows of {kind} at the positions "
                        f"{', '.join(map(str, positions[:8]))} of {len(token_ids)} tokens: its part is damaged; see "
                        "batchinf check --deep")  # fmt: skip
    tokens = None if tokens is None else np.broadcast_to(np.asarray(tokens), values.shape)
    if len(positions):
        yield StoredNumbers(kind=kind, token_ids=token_ids, positions=positions, places=positions, tokens=tokens,
                            values=values)  # fmt: skip


def _of_spans(cells: Mapping[str, Any], spans: Sequence[Span]) -> Iterator[dict[str, Any]]:
    """The columns of logprobs of each choice, or of each window of a text, which stand one after the other."""
    if "choice_logprobs" in cells:
        columns = {name: cells.get(f"choice_{name}") for name in _TOKENS}
        for place in range(len(spans)):
            yield {name: None if values is None else values[place] for name, values in columns.items()}
        return
    # With `store: all` the first token is stored, too; it has no logprob.
    has_all = len(spans) == 1 and len(cells["logprobs"]) == len(spans[0].token_ids)
    start = int(has_all)
    for span in spans:
        stop = start + len(span.token_ids) - (1 if has_all else span.start)
        yield {name: cells[name][start:stop] for name in _TOKENS if cells.get(name) is not None}
        start = stop


def _logprobs(kind: str, cells: Mapping[str, Any], sequence: list[int], first: int) -> StoredNumbers:
    """The last logprobs of `cells`. sequence: ends with the last of their tokens. first: index of the first of them."""
    last = slice(first - len(sequence), None)
    positions = np.arange(first, len(sequence))
    tokens = [[own] for own in sequence[last]]
    values = [[value] for value in cells["logprobs"][last]]
    if (top := cells.get("top_logprobs")) is not None:
        k = max(len(row or ()) for row in top[last])
        pairs = zip(cells["top_token_ids"][last], sequence[last], strict=True)
        tokens = [[own, *(ids or [own] * k)] for ids, own in pairs]
        values = [[*own, *(row or [None] * k)] for own, row in zip(values, top[last], strict=True)]
    return StoredNumbers(
        kind=kind,
        token_ids=sequence,
        positions=positions - 1,
        places=positions if kind == "prompt" else positions - first,
        tokens=np.asarray(tokens, np.int64),
        values=np.array(values, np.float32),  # None becomes NaN
    )
