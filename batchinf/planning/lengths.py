"""Token lengths and common beginnings of a job's rows, from a sample, without a full scan of a large input."""

import contextlib
import dataclasses
import math
import os
import pathlib
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pyarrow as pa

from batchinf.base.errors import RowError, UserError
from batchinf.base.storage import Folder
from batchinf.job.choose import choose
from batchinf.job.disk_space import choice_tokens, task_of_length
from batchinf.job.job import Job, max_model_len
from batchinf.job.open import location_of, open_job
from batchinf.job.ordering import prefix_key, shared_in_order
from batchinf.job.sample import RUN_ROWS, sampled_rows
from batchinf.model.cache import BLOCK_TOKENS
from batchinf.planning.images import SampledImages
from batchinf.planning.throughput import Workload
from batchinf.prompts.builder import PromptBuilder
from batchinf.prompts.encoder import load_tokenizer
from batchinf.records import Prompt
from batchinf.source.find import find_files, is_dataset
from batchinf.source.remote import is_url
from batchinf.source.rows import Row, is_scanned_quickly, sample_input
from batchinf.spec.file import SpecFile
from batchinf.spec.input import InputSpec
from batchinf.spec.sampling import SamplingSpec
from batchinf.tasks.base import LIKELY_TOKENS, Task
from batchinf.tasks.registry import task_of

_LONG = 1 << 30
# Of the work that is assumed for a model without a job.
_LIKELY_PROMPT = 1024
_MANY_REQUESTS = 100_000
# About two million tokens. Tokenising a thousand long prompts takes minutes, in which a starting job would do nothing
# else.
_MOST_BYTES = 8 << 20
_MOST_FILES = 1000  # a sample opens each file, before any engine starts
_BLOCK_BYTES = 64  # about 16 tokens of text, a block of vLLM
# Errors of an input that cannot be read. The start reads it again, and says why it cannot.
UNREADABLE = (UserError, OSError, ValueError, LookupError, TypeError, pa.ArrowException)


@dataclass(frozen=True, slots=True)
class Lengths:
    """Token lengths of a sample of rows. If texts are long, some are tokenised, and others are in proportion."""

    num_rows: int
    """Rows that run."""
    is_estimated: bool
    """Whether `num_rows` is an estimate, because the input was not scanned."""
    num_sampled: int
    """Rows of the sample, with error rows."""
    prompts: tuple[int, ...]
    """Tokens of the prompt of each request of the sample, without error rows."""
    outputs: tuple[int, ...]
    """Tokens of the output of each request of the sample, without error rows."""
    requests_per_row: float
    """On average, over all rows."""
    output_bytes: int
    """Estimate for all rows."""
    is_assumed: bool
    """Whether the outputs are a guess, because the spec gives no `max_tokens`."""
    is_by_choice: bool
    """Whether each output is one of the choices of its request, whose tokens are counted in place of `max_tokens`."""
    longest: int
    """The most tokens of a prompt and `max_tokens` together."""
    row_error: RowError | None = None
    """That of the first tokenised row that has one."""
    num_shared: int = 0
    """Tokens with which all tokenised prompts begin."""
    image_notes: tuple[str, ...] = ()
    """How images were counted, for people."""

    @property
    def error(self) -> float:
        """Half the width of the 95 % interval of the mean prompt length, as a share of it; 0 if all rows were read."""
        number = len(self.prompts)
        if number < 2 or self.num_sampled >= self.num_rows:
            return 0.0
        mean = sum(self.prompts) / number
        # Rows are read in runs, and rows of a run may be alike: each run counts once.
        deviation = float(np.std(self.prompts, ddof=1))
        return 1.96 * deviation / math.sqrt(max(1.0, self.num_sampled / RUN_ROWS)) / max(mean, 1e-9)

    @property
    def output_from(self) -> str:
        """Where the tokens of an output come from, in words."""
        if self.is_by_choice:
            return "each output is as long as its longest choice"
        return "the spec has no max_tokens, so this is a guess" if self.is_assumed else "each output has its max_tokens"

    def scaled(self, num_rows: int) -> "Lengths":
        """Those of so many rows, for which these stand."""
        output_bytes = round(self.output_bytes / max(1, self.num_rows) * num_rows)
        return dataclasses.replace(self, num_rows=num_rows, output_bytes=output_bytes)

    def workload(self, job: Job, output_tokens: float | None = None) -> Workload:
        """All requests of the job, on average. output_tokens: of a request; None: each reaches its `max_tokens`."""
        number = max(1, len(self.prompts))
        task = job.task
        longest = max(self.outputs, default=0)
        generates = task.pooling is None
        outputs = sum(self.outputs) / number if generates else 0.0
        return Workload(
            num_requests=max(1, round(self.num_rows * self.requests_per_row)),
            prompt_tokens=sum(self.prompts) / number,
            output_tokens=outputs if output_tokens is None else min(output_tokens, float(longest)),
            longest_output=longest if generates else 0,
            logits=_logits_of(task),
            cached_tokens=self._num_cached(job),
        )

    def _num_cached(self, job: Job) -> int:
        """Of a prompt, the tokens that vLLM's prefix cache has, in whole blocks. A job may leave out the cache."""
        has_cache = job.task.reads_prefix_cache and job.spec.engine.get("enable_prefix_caching") is not False
        return self.num_shared // BLOCK_TOKENS * BLOCK_TOKENS if has_cache and self.num_rows > 1 else 0


def assumed_work(task: Task, context: int, output_tokens: float | None = None) -> Workload:
    """The work without rows: many requests of a usual length. output_tokens: None for `LIKELY_TOKENS`."""
    prompt = min(_LIKELY_PROMPT, max(1, context // 2))
    output = min(LIKELY_TOKENS if output_tokens is None else output_tokens, max(1, context - prompt))
    if task.pooling is not None:
        output = 0
    elif not task.draws_tokens:
        output = 1
    return Workload(
        num_requests=_MANY_REQUESTS,
        prompt_tokens=prompt,
        output_tokens=output,
        longest_output=math.ceil(output),
        logits=_logits_of(task),
        is_assumed=True,
    )


def _logits_of(task: Task) -> Literal["all", "last", "none"]:
    """The tokens of which the head computes logits."""
    return "all" if task.reads_prompt_logits else "last" if task.pooling is None else "none"


@contextlib.contextmanager
def opened(file: SpecFile, *, may_scan: bool = True) -> Iterator[tuple[Job, int | None] | None]:
    """The job over its input and None, or the job over a small copy of a large input and the input's number of rows.

    may_scan: read the whole input if no quick sample of it can be taken. Without it, the result is None for such an
    input, unless the input is small. Nothing is written outside a temporary folder.
    """
    with tempfile.TemporaryDirectory() as scratch:
        copy = pathlib.Path(scratch, "rows")
        copy.mkdir()
        location = location_of(file.spec)
        num_rows = sample_input(location, copy)
        if num_rows is None and not may_scan and not is_scanned_quickly(location):
            yield None
            return
        if num_rows is not None:
            # A share and a limit are applied to the number of rows.
            changes = {"path": os.fspath(copy), "job": None, "sample": None, "limit": None, "order": "input"}
            spec = file.spec.model_copy(update={"input": file.spec.input.model_copy(update=changes)})
            file = dataclasses.replace(file, spec=spec)
        job = open_job(file, pathlib.Path(scratch, "scan"))
        with contextlib.closing(job.source):
            yield job, num_rows


def lengths_of(job: Job, file: SpecFile, num_rows: int | None) -> Lengths:
    """Read a sample of rows. num_rows: see `opened`. file: as the user wrote it. Raises UserError without rows."""
    where = file.spec.input
    is_sample = num_rows is not None
    positions: Sequence[int] = job.rows
    with tempfile.TemporaryDirectory() as scratch:
        if job.spec.input.selects:
            folder = Folder(scratch)
            limit = None if is_sample else where.limit
            positions = choose(job, range(job.source.num_rows), folder, limit=limit, may_be_none=is_sample)
        all_rows = len(positions)
        if num_rows is not None:
            all_rows = round(num_rows * len(positions) / max(1, job.source.num_rows) * (where.sample or 1.0))
            all_rows = min(all_rows, where.limit or all_rows)
        return lengths_of_rows(job, positions, all_rows, is_estimated=is_sample, where=where)


def lengths_of_rows(
    job: Job, positions: Sequence[int], num_rows: int, *, is_estimated: bool, where: InputSpec | None = None
) -> Lengths:
    """Read a sample of at most 1,000 rows at these positions, which stand for `num_rows` rows.

    where: see `SampledImages`.
    """
    builder = job.prompt_builder()
    length = max_model_len(job)
    sample = _Sample.of(job, positions, builder.columns, length)
    images = SampledImages(job, builder, where)
    prompts: list[Prompt] = []
    ratios: list[list[float]] = []
    for rows, of_rows in sample.runs:
        prompts += images.looked_at(builder.build(rows, length))
        ratios += of_rows
    largest = images.looked_at(builder.build(sample.largest, length))
    prompts = images.with_tokens([*prompts, *largest])
    requests = _Requests(job, length or _LONG)
    for prompt, of_prompt in zip(prompts, ratios, strict=False):  # without the largest
        requests.add(prompt, of_prompt)
    for prompt in prompts[len(ratios) :]:
        if prompt.error is None:
            requests.add_largest(prompt)
    return Lengths(
        num_rows=num_rows,
        is_estimated=is_estimated,
        num_sampled=sample.num_rows,
        prompts=tuple(requests.prompts),
        outputs=tuple(requests.outputs),
        requests_per_row=requests.number / max(1, sample.num_rows),
        output_bytes=num_rows * requests.row_bytes(),
        is_assumed=requests.is_assumed,
        is_by_choice=requests.are_choices,
        longest=requests.longest,
        row_error=requests.row_error,
        num_shared=requests.num_shared,
        image_notes=tuple(images.notes),
    )


class _Requests:
    """Adds up the requests of tokenised rows."""

    def __init__(self, job: Job, length: int) -> None:
        """length: the most tokens of a prompt and its output."""
        self._job = job
        self._task = task_of(job.spec.model_copy(update={"sampling": _once(job.spec.sampling)}))
        self._length = length
        self.are_choices = job.task.draws_tokens
        """Whether each output so far is one of its choices."""
        self._built: list[Prompt] = []
        self._shared: Sequence[int] | None = None
        """The ids with which all prompts so far begin."""
        self.prompts: list[int] = []
        self.outputs: list[int] = []
        self.number = 0
        """With all samples of a row."""
        self.longest = 1
        self.row_error: RowError | None = None
        self.is_assumed = job.task.draws_tokens and job.spec.sampling.max_tokens is None

    @property
    def num_shared(self) -> int:
        """Tokens with which all prompts begin; 0 of a single prompt."""
        return len(self._shared) if self._shared is not None and len(self.prompts) > 1 else 0

    def add(self, prompt: Prompt, ratios: Sequence[float]) -> None:
        """ratios: the sizes of the rows for which this one stands."""
        if prompt.error is not None:
            self.row_error = self.row_error or prompt.error
            return
        self._built.append(prompt)
        num_samples = (prompt.sampling or self._job.spec.sampling).n if self._job.task.draws_tokens else 1
        most = choice_tokens(self._job, prompt.sampling)
        for ids, output in self._requests_of(prompt):
            self.are_choices &= most is not None
            self._shared = ids if self._shared is None else self._shared[: _num_equal(self._shared, ids)]
            self.longest = max(self.longest, len(ids) + output)
            self.prompts += [min(self._length, round(len(ids) * ratio)) for ratio in ratios]
            self.outputs += [output if most is None else min(output, most)] * len(ratios)
            self.number += num_samples * len(ratios)

    def add_largest(self, prompt: Prompt) -> None:
        """Only the length of its requests counts: another row stands for it in the means."""
        self.longest = max([self.longest, *(len(ids) + output for ids, output in self._requests_of(prompt))])

    def row_bytes(self) -> int:
        """Estimate for an output row. If all outputs are choices, none is longer than the longest of them."""
        task = self._job.task
        if self.are_choices and self.outputs:
            task = task_of_length(self._job, max(self.outputs))
        return task.estimated_bytes_per_row(self._built if task.sizes_by_prompts else None)

    def _requests_of(self, prompt: Prompt) -> Iterator[tuple[Sequence[int], int]]:
        sampling = None if prompt.sampling is None else _once(prompt.sampling)
        parts = tuple(dataclasses.replace(part, sampling=sampling) for part in prompt.parts)
        row = dataclasses.replace(prompt, sampling=sampling, parts=parts)
        for part, request in self._task.requests(row, self._length):
            if part.error is not None or request.is_shared:  # a shared request runs once, not for each row
                continue
            ids = request.prompt_token_ids
            most = LIKELY_TOKENS if self.is_assumed else request.max_tokens
            yield ids, max(1, min(most, self._length - len(ids)))


@dataclass(frozen=True, slots=True)
class _Sample:
    """Rows to tokenise, some at a time. If the sample has much text, one row stands for several as large."""

    num_rows: int
    """Rows of the sample."""
    runs: Iterable[tuple[list[Row], list[list[float]]]]
    """Rows, and for each of them the sizes of the rows that it stands for, as ratios to its own."""
    largest: list[Row]
    """The largest row, if `runs` do not have all rows."""

    @classmethod
    def of(cls, job: Job, positions: Sequence[int], columns: Sequence[str], length: int | None) -> "_Sample":
        """length: tokens that a prompt has at most. Of a longer text only a piece is tokenised."""
        most_bytes = 8 * (length or _LONG)
        read = job.source.read_rows
        sizes: list[tuple[int, int]] = []  # in bytes, and the position
        groups: list[list[Row]] = []
        num_bytes = 0
        # Images may have thousands of times as many bytes as texts, and have other lengths: they are read later.
        of_images = {column for _, column in job.spec.input.image_columns}
        texts = [column for column in columns if column not in of_images]
        for rows in sampled_rows(job, positions, texts):
            row_bytes = [min(most_bytes, len(repr(row.values).encode(errors="replace"))) for row in rows]
            sizes += zip(row_bytes, (row.row_index for row in rows), strict=True)
            num_bytes += sum(row_bytes)
            groups.append(rows)
            if num_bytes > _MOST_BYTES or of_images:
                groups.clear()
        if num_bytes <= _MOST_BYTES and of_images:
            again = sampled_rows(job, positions, columns, at_once=RUN_ROWS)
            return cls(len(sizes), ((rows, [[1.0]] * len(rows)) for rows in again), [])
        if num_bytes <= _MOST_BYTES:
            return cls(len(sizes), [(rows, [[1.0]] * len(rows)) for rows in groups], [])
        sizes.sort()
        ratios = _ratios(sizes, step=-(-num_bytes // _MOST_BYTES))
        chosen = np.sort(np.array(list(ratios), np.int64))
        parts = (chosen[at : at + RUN_ROWS] for at in range(0, len(chosen), RUN_ROWS))
        runs = ((read(part, columns), [ratios[place] for place in part.tolist()]) for part in parts)
        return cls(len(sizes), runs, read(np.array([sizes[-1][1]], np.int64), columns))


def _ratios(sizes: Sequence[tuple[int, int]], *, step: int) -> dict[int, list[float]]:
    """One row for each `step` rows, as position → the sizes of all these rows, as ratios to its own.

    sizes: (size, position) of each row, ascending.
    """
    ratios: dict[int, list[float]] = {}
    for at in range(0, len(sizes), step):
        alike = sizes[at : at + step]
        middle, place = alike[len(alike) // 2]
        ratios[place] = [size / middle for size, _ in alike]
    return ratios


def _num_equal(first: Sequence[int], other: Sequence[int]) -> int:
    pairs = enumerate(zip(first, other, strict=False))
    return next((place for place, (one, two) in pairs if one != two), min(len(first), len(other)))


def _once(sampling: SamplingSpec) -> SamplingSpec:
    """One request stands for all samples of a row, which may be millions."""
    return sampling.model_copy(update={"n": 1})


# -- common beginnings -------------------------------------------------------------------------------------------------


def shared_share(file: SpecFile) -> float | None:
    """The share of the prompts' text, 0 to 1, that repeats the beginning of an earlier prompt of the sample.

    The share of all rows is higher if they have thousands of different beginnings. None if it is unknown: no quick
    sample can be taken, the input cannot be read, or its rows are put in an order by their prompts.
    """
    location = location_of(file.spec)
    if file.spec.input.order in ("prefix", "auto") or is_url(location.path) or is_dataset(location):
        return None
    texts: list[bytes] = []
    with contextlib.suppress(*UNREADABLE):
        if len(find_files(location)[1]) <= _MOST_FILES:
            with opened(file, may_scan=False) as sample:
                texts = [] if sample is None else _beginnings(sample[0])
    if not texts:
        return None
    # vLLM caches whole blocks.
    whole = [text[: len(text) // _BLOCK_BYTES * _BLOCK_BYTES] for text in texts]
    return shared_in_order([prefix_key(text) for text in whole]) / max(1, sum(map(len, texts)))


def _beginnings(job: Job) -> list[bytes]:
    tokenizer = load_tokenizer(job.model.tokenizer, job.spec.model.trust_remote_code)
    builder = PromptBuilder(job.spec, tokenizer, job.model.vocab_size)
    return [
        beginning
        for rows in sampled_rows(job, job.rows, builder.columns)
        for row in rows
        if (beginning := builder.outline(row).beginning) is not None
    ]
