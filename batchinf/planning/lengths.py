"""Token lengths of a job's rows, from a sample of its input, without a full scan of a large one."""

import contextlib
import dataclasses
import math
import pathlib
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from batchinf.base.errors import RowError
from batchinf.base.storage import Folder
from batchinf.job.choose import choose
from batchinf.job.open import Job, location_of, max_model_len, open_job
from batchinf.job.sample import RUN_ROWS, sample_rows
from batchinf.model.cache import BLOCK_TOKENS
from batchinf.planning.throughput import Workload
from batchinf.prompts.encoder import load_tokenizer
from batchinf.records import Prompt
from batchinf.source.rows import Row
from batchinf.source.sample import is_scanned_quickly, sample_input
from batchinf.spec.file import SpecFile
from batchinf.spec.sampling import SamplingSpec
from batchinf.tasks.base import LIKELY_TOKENS
from batchinf.tasks.registry import task_of

_LONG = 1 << 30
# About two million tokens. Tokenising a thousand long prompts takes minutes, in which a starting job would do nothing
# else.
_MOST_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Lengths:
    """Token lengths of a sample of rows.

    num_rows: rows that run. is_estimated: num_rows is an estimate, because the input was not scanned. num_sampled: rows
    of the sample, with error rows. prompts, outputs: tokens of each request of the sample, without error rows. If its
    texts are long, some rows are tokenised, and the others have lengths in proportion. requests_per_row: on average,
    over all rows. output_bytes: estimated, of all rows. is_assumed: the spec gives no `max_tokens`. longest: the most
    tokens of a prompt and its output together. row_error: of the first tokenised row that has one. num_shared: tokens
    with which all tokenised prompts begin.
    """

    num_rows: int
    is_estimated: bool
    num_sampled: int
    prompts: tuple[int, ...]
    outputs: tuple[int, ...]
    requests_per_row: float
    output_bytes: int
    is_assumed: bool
    longest: int
    row_error: RowError | None = None
    num_shared: int = 0

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

    def workload(self, job: Job, output_tokens: float | None = None) -> Workload:
        """All requests of the job, on average. output_tokens: of a request; None: each reaches its `max_tokens`."""
        number = max(1, len(self.prompts))
        task, longest = job.task, max(self.outputs, default=0)
        generates = task.pooling is None
        outputs = sum(self.outputs) / number if generates else 0.0
        return Workload(
            max(1, round(self.num_rows * self.requests_per_row)),
            sum(self.prompts) / number,
            outputs if output_tokens is None else min(output_tokens, float(longest)),
            longest if generates else 0,
            "all" if task.reads_prompt_logits else "last" if generates else "none",
            self._num_cached(job),
        )

    def _num_cached(self, job: Job) -> int:
        """Of a prompt, the tokens that vLLM's prefix cache has, in whole blocks. A job may leave out the cache."""
        engine, shared = job.spec.engine, self.num_shared // BLOCK_TOKENS * BLOCK_TOKENS
        has_cache = job.task.reads_prefix_cache and engine.get("enable_prefix_caching") is not False
        return shared if has_cache and self.num_rows > 1 else 0


@contextlib.contextmanager
def opened(file: SpecFile, *, may_scan: bool = True) -> Iterator[tuple[Job, int | None] | None]:
    """The job over its input and None, or the job over a small copy of a large input and the input's number of rows.

    may_scan: read the whole input if no quick sample of it can be taken. Without it, the result is None for such an
    input, unless the input is small. Nothing is written outside a temporary folder.
    """
    with tempfile.TemporaryDirectory() as scratch:
        copy, number = pathlib.Path(scratch, "rows"), None
        copy.mkdir()
        location = location_of(file.spec)
        found = sample_input(location, copy)
        if found is None and not may_scan and not is_scanned_quickly(location):
            yield None
            return
        if found is not None:
            # A share and a limit are applied to the number of rows.
            changes = {"path": found.path, "sample": None, "limit": None, "order": "input"}
            spec = file.spec.model_copy(update={"input": file.spec.input.model_copy(update=changes)})
            file, number = dataclasses.replace(file, spec=spec), found.num_rows
        job = open_job(file, pathlib.Path(scratch, "scan"))
        with contextlib.closing(job.source):
            yield job, number


def lengths_of(job: Job, file: SpecFile, num_rows: int | None) -> Lengths:
    """Read a sample of rows and make their requests. num_rows: see `opened`. file: with the spec as the user wrote it.

    Raises UserError if no row is chosen.
    """
    given = file.spec.input
    positions: Sequence[int] = job.rows
    with tempfile.TemporaryDirectory() as scratch:
        if job.spec.input.selects:
            folder, limit = Folder(scratch), None if num_rows is not None else given.limit
            rows, is_sample = range(job.source.num_rows), num_rows is not None
            positions = choose(job, file, rows, limit, folder, may_be_none=is_sample).order(folder)
        all_rows = len(positions)
        if num_rows is not None:
            all_rows = round(num_rows * len(positions) / max(1, job.source.num_rows) * (given.sample or 1.0))
            all_rows = min(all_rows, given.limit or all_rows)
        return lengths_of_rows(job, positions, all_rows, is_estimated=num_rows is not None)


def lengths_of_rows(job: Job, positions: Sequence[int], num_rows: int, *, is_estimated: bool) -> Lengths:
    """Read a sample of at most 1,000 of the rows at these positions.

    num_rows: the number of rows that the positions stand for.
    """
    sampling = job.spec.sampling
    task = task_of(job.spec.model_copy(update={"sampling": _once(sampling)}))
    tokenizer = load_tokenizer(job.model.tokenizer, job.spec.model.trust_remote_code)
    builder, length = job.task.prompt_builder(tokenizer, job.model.vocab_size), max_model_len(job)
    sample = _Sample.of(job, positions, builder.columns, length)
    prompts: list[int] = []
    outputs: list[int] = []
    built: list[Prompt] = []
    first: Sequence[int] = ()
    num_shared, longest = 0, 1
    row_error: RowError | None = None
    is_assumed = job.task.draws_tokens and sampling.max_tokens is None

    def requests_of(prompt: Prompt) -> Iterator[tuple[Sequence[int], int]]:
        own_sampling = None if prompt.sampling is None else _once(prompt.sampling)
        for request in task.expand(dataclasses.replace(prompt, sampling=own_sampling), length or _LONG):
            ids, most = request.prompt_token_ids, LIKELY_TOKENS if is_assumed else request.max_tokens
            yield ids, max(1, min(most, (length or _LONG) - len(ids)))

    for rows, shares in sample.runs:
        for prompt, ratios in zip(builder.build(rows, length), shares, strict=True):
            if prompt.error is not None:
                row_error = row_error or prompt.error
                continue
            built.append(prompt)
            for ids, output in requests_of(prompt):
                if not prompts:
                    first, num_shared = ids, len(ids)
                num_shared, longest = _num_equal(first[:num_shared], ids), max(longest, len(ids) + output)
                prompts += [min(length or _LONG, round(len(ids) * ratio)) for ratio in ratios]
                outputs += [output] * len(ratios)
    for prompt in builder.build(sample.largest, length):
        if prompt.error is None:
            longest = max(longest, *(len(ids) + output for ids, output in requests_of(prompt)))
    per_row = len(prompts) / max(1, sample.num_rows) * (sampling.n if job.task.draws_tokens else 1)
    row_bytes = job.task.estimated_bytes_per_row(built if job.task.sizes_by_prompts else None)
    return Lengths(
        num_rows=num_rows,
        is_estimated=is_estimated,
        num_sampled=sample.num_rows,
        prompts=tuple(prompts),
        outputs=tuple(outputs),
        requests_per_row=per_row,
        output_bytes=num_rows * row_bytes,
        is_assumed=is_assumed,
        longest=longest,
        row_error=row_error,
        num_shared=num_shared if len(prompts) > 1 else 0,
    )


@dataclass(frozen=True, slots=True)
class _Sample:
    """Rows to tokenise, some at a time: all of the sample. If they have much text, one row stands for several as large.

    num_rows: of the sample. runs: rows, and for each of them the sizes of the rows that it stands for, as ratios to its
    own. largest: the largest row, if `runs` do not have all rows.
    """

    num_rows: int
    runs: Iterable[tuple[list[Row], list[list[float]]]]
    largest: list[Row]

    @classmethod
    def of(cls, job: Job, positions: Sequence[int], columns: Sequence[str], length: int | None) -> "_Sample":
        """length: tokens that a prompt has at most. Of a longer text only a piece is tokenised."""
        most, read = 8 * (length or _LONG), job.source.read_rows
        sizes: list[tuple[int, int]] = []  # in bytes, and the position
        groups: list[list[Row]] = []
        num_bytes = 0
        for group in sample_rows(positions, 0):
            places = np.sort(np.asarray(group, np.int64))
            rows = read(places, columns)
            own = [min(most, len(repr(row.values).encode(errors="replace"))) for row in rows]
            sizes += zip(own, places.tolist(), strict=True)
            num_bytes += sum(own)
            groups.append(rows)
            if num_bytes > _MOST_BYTES:
                groups.clear()
        if num_bytes <= _MOST_BYTES:
            return cls(len(sizes), [(rows, [[1.0]] * len(rows)) for rows in groups], [])
        sizes.sort()
        step = -(-num_bytes // _MOST_BYTES)
        ratios: dict[int, list[float]] = {}
        for at in range(0, len(sizes), step):
            alike = sizes[at : at + step]
            middle, place = alike[len(alike) // 2]
            ratios[place] = [size / middle for size, _ in alike]
        chosen = np.sort(np.array(list(ratios), np.int64))
        parts = (chosen[at : at + RUN_ROWS] for at in range(0, len(chosen), RUN_ROWS))
        runs = ((read(part, columns), [ratios[place] for place in part.tolist()]) for part in parts)
        return cls(len(sizes), runs, read(np.array([sizes[-1][1]], np.int64), columns))


def _num_equal(first: Sequence[int], other: Sequence[int]) -> int:
    """With how many equal ids both begin."""
    pairs = enumerate(zip(first, other, strict=False))
    return next((place for place, (one, two) in pairs if one != two), min(len(first), len(other)))


def _once(sampling: SamplingSpec) -> SamplingSpec:
    """One request stands for all samples of a row, which may be millions."""
    return sampling.model_copy(update={"n": 1})
