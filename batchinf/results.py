"""Reads a job's output as Arrow tables, numpy arrays or a Hugging Face dataset: `batchinf.open`.

    results = batchinf.open("out/my-job")
    logprobs = results.ragged("logprobs")     # logprobs[i]: of output row i
    means = logprobs.mean()                   # one number for each row, without a Python loop
    words = results.tokens()                  # the texts of the output tokens, in the same shape
    dataset = results.dataset()               # a datasets.Dataset, memory-mapped
    for rows in results.arrays("row_index", "logits"):  # of task logits, in bounded memory
        rows["logits"][0]                     # [num_positions, vocab_size]

It reads only committed parts, so it also works while the job runs. Rows come in the order of the input, in whatever
order they ran. Only `batches` and `arrays` return them part by part.
"""

import datetime
import functools
import glob
import hashlib
import itertools
import os
import pathlib
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from batchinf.base.errors import DriftError, OutputError
from batchinf.base.parquet import ParquetFile, absolute, joined_schema, open_part
from batchinf.base.ragged import Ragged, join_ragged, to_matrix, to_ragged
from batchinf.base.text import counted
from batchinf.base.votes import PassAtK, Vote, majority, pass_at_k
from batchinf.manifest.look import Look
from batchinf.manifest.versions import stored_spec
from batchinf.model.model import resolve
from batchinf.prompts.encoder import load_tokenizer, token_texts
from batchinf.records import PartCounts
from batchinf.spec.file import SpecFile, list_of

if TYPE_CHECKING:
    from datasets import Dataset

_LAST_EXACT = 1 << 53  # float64 rounds integers beyond it


class Results:
    """The committed output of a job, or of all its slices."""

    def __init__(self, out: str | os.PathLike[str]) -> None:
        """out: the job's output folder, or its URL in a bucket. Raises OutputError if there is no job in it."""
        look = Look(out)
        self.folder = look.out
        self.root = look.root
        """The folder of this host with the job's files; of a job in a bucket, a copy without parts."""
        jobs = look.jobs()
        begun = [(job, state) for job, state in jobs if state is not None]
        if not begun:
            raise look.nothing()
        states = [state for _, state in begun]
        self.spec: dict[str, Any] = states[0].header.spec
        self.identity: dict[str, Any] = states[0].header.identity
        self.job_id: str = states[0].header.job_id
        self._input_folder = states[0].header.input_folder
        self.begun_at = datetime.datetime.fromisoformat(states[0].header.created_at)
        # Fingerprints of the input at the beginning and after each `--extend`.
        self.taken: tuple[str, ...] = tuple(dict.fromkeys(states[0].source_fingerprints))
        # Rows of the input, as far as the job has taken it in. Among them it chose those that it runs.
        self.num_input_rows = max((extent.stop_row for state in states for extent in state.extents), default=0)
        self.is_in_order = all(state.is_in_order for state in states)
        self.counts = PartCounts.sum(state.counts for state in states)
        self.num_rows = self.counts.num_rows
        digests = [state.parts[shard].digest for state in states for shard in sorted(state.parts)]
        self.digest = hashlib.sha256("".join(digests).encode()).hexdigest()[:32]
        """Of all parts: a retry and new rows change it."""
        # Of the run that ended the job; None for slices, whose runs are several.
        self.speed = states[0].speed if len(jobs) == 1 else None
        self.is_done = all(state.is_done for state in states) and len(states) == len(jobs)
        parts = look.parts(begun)
        # A program may change its folder, where a relative path could be that of another job.
        self.parts: Sequence[pathlib.Path] = parts if look.is_bucket else [pathlib.Path(absolute(it)) for it in parts]

    def __len__(self) -> int:
        return self.num_rows

    def __repr__(self) -> str:
        stands = "done" if self.is_done else "not done"
        counts = f"{counted(self.num_rows, 'row')}, {counted(self.counts.num_errors, 'error')}"
        columns = f"; columns {', '.join(joined_schema(self.parts[:1]).names)}" if self.parts else ""
        return f"<Results of {self.folder}: {counts}, {stands}{columns}>"

    @property
    def schema(self) -> pa.Schema:
        """The columns. Raises OutputError if nothing is committed yet."""
        if not self.parts:
            raise OutputError(
                f"{self.folder}: no part is written yet; until one is, `batchinf head` shows the finished rows. "
                "Look again later, or run the job again if it has stopped"
            )
        return self._schema

    @functools.cached_property
    def _schema(self) -> pa.Schema:
        return joined_schema(self.parts)

    @property
    def own_schema(self) -> pa.Schema:
        """The columns without those that `output.keep_columns` copied, whose names may be those of other tasks."""
        kept = {*self.spec.get("output", {}).get("keep_columns", {}).values()}  # absent in jobs of older versions
        return pa.schema([field for field in self.schema if field.name not in kept])

    def facts(self) -> dict[str, str]:
        """What made the first part, by its footer: `model`, `device`, `version.vllm` and others."""
        with open_part(self.parts[0]) as file:
            stored = file.metadata.metadata or {}
        prefix = "batchinf."
        names = {key.decode(): value.decode() for key, value in stored.items()}
        return {name.removeprefix(prefix): value for name, value in names.items() if name.startswith(prefix)}

    def num_bytes(self, columns: Sequence[str] | None = None) -> int:
        """Size of columns before compression, from the parts' footers. A repeated value may be counted once."""
        names = {*self._names(columns)}
        total = 0
        for path in self.parts:
            with open_part(path) as file:
                groups = [file.metadata.row_group(number) for number in range(file.num_row_groups)]
            for group in groups:
                leaves = [group.column(number) for number in range(group.num_columns)]
                total += sum(it.total_uncompressed_size for it in leaves if it.path_in_schema.split(".")[0] in names)
        return total

    def batches(self, columns: Sequence[str] | None = None, num_rows: int = 4096) -> Iterator[pa.RecordBatch]:
        """All rows, at most `num_rows` at a time, in bounded memory.

        Rows come in the order of the input. With an `input.order` in the spec only the rows within a part do.
        """
        if num_rows < 1:
            raise OutputError(f"num_rows: got {num_rows}; must be at least 1")
        names = self._names(columns)
        for path in self.parts:
            # With pre_buffer, Parquet would read all wanted columns of a part at once.
            with open_part(path, pre_buffer=False, buffer_size=1 << 20) as file:
                for batch in file.iter_batches(num_rows, columns=_of_part(file, names)):
                    yield _filled(batch, names, self._schema)

    def table(self, columns: Sequence[str] | None = None) -> pa.Table:
        """All rows in order, in memory. Name the columns that you need: columns of tokens are large."""
        names = self._names(columns)
        table = pa.concat_tables([_read_part(path, names, self._schema) for path in self.parts])
        return table if (places := self._places()) is None else table.take(pa.array(places))

    def array(self, column: str) -> npt.NDArray[Any]:
        """A column without lists, [num_rows]. Nulls become NaN, or None if the values are not numbers.

        Integers beyond 2**53, such as `prompt_hash`, are Python objects if some are null: a NaN would round the others.
        A column of vectors, such as `embedding`, becomes [num_rows, width]. Each vector is copied once. So do `logits`
        and `hidden_states` with one vector for each row; rows that failed are NaN.
        """
        type = self._type(column)
        if pa.types.is_list(type) and pa.types.is_fixed_size_list(type.value_type):
            return _one_each(self.ragged(column), column)
        if pa.types.is_fixed_size_list(type):
            pieces = [to_matrix(batch.column(0)) for batch in self.batches([column])]
            values: npt.NDArray[Any] = np.concatenate(pieces or [to_matrix(pa.array([], type))])
            return values if (places := self._places()) is None else values[places]
        if pa.types.is_nested(type):
            raise OutputError(f"column {column!r} holds {type}: read it with {_read_with(type)}")
        return _plain(self.table([column]).column(0))

    def ragged(self, column: str) -> Ragged:
        """A column of lists, such as `logprobs`, `token_ids` or `top_logprobs`, as values and offsets.

        Raises OutputError for lists of lists with several lengths, such as the tokens of choices.
        """
        type = self._type(column)
        if not pa.types.is_list(type):
            raise OutputError(f"column {column!r} holds {type}, no lists: read it with {_read_with(type)}")
        try:
            # In pieces: Arrow's lists have 32-bit offsets, which may not be enough for all rows.
            pieces = (batch.column(0) for batch in self.batches([column]))
            lists = join_ragged(itertools.chain([pa.array([], type)], pieces))
        except OutputError as error:
            raise OutputError(f"column {column!r}: {error}") from None
        return lists if (places := self._places()) is None else lists.take(places)

    def tokens(self, column: str = "token_ids") -> Ragged:
        """The texts of a column of token ids, such as `token_ids`, `prompt_token_ids` or `top_token_ids`.

        The shape is that of `ragged(column)`: `tokens(...)[i]` has the texts of row i. The job's own tokenizer decodes
        each id by itself; an id that holds a part of a character has its name in the vocabulary. Raises OutputError for
        a column without token ids; see also `tokenizer`.
        """
        if column in self.schema.names and not column.endswith("token_ids"):
            raise OutputError(f"column {column!r} has no token ids: give one whose name ends with token_ids")
        tokens = self.ragged(column)
        ids, places = np.unique(tokens.values, return_inverse=True)
        # An id of -1 stands for null.
        known = [int(token_id) for token_id in ids if token_id >= 0]
        texts = [""] * (len(ids) - len(known)) + token_texts(self.tokenizer(), known)
        values = tokens.values.astype(object)
        if texts:
            values = np.array(texts, np.object_)[places.reshape(tokens.values.shape)]
        return Ragged(values, tokens.offsets, tokens.is_null)

    def tokenizer(self) -> Any:
        """The job's own transformers tokenizer, at the commit that the job began with.

        Raises ModelError if it is not here, and DriftError if the model's folder has other content now.
        """
        from batchinf.job.begun import from_here  # with what runs jobs, which other readers do not need

        spec = from_here(SpecFile(stored_spec(self.spec), {}, self.folder), self._input_folder, self.root).spec.model
        has_images = self.spec["input"].get("images") is not None  # absent in jobs of older versions
        model = resolve(spec, str(self.identity["model"]), has_images=has_images)
        if model.fingerprint != self.identity["model"]:
            raise DriftError(
                f"the model in {model.path} is not the one that the job began with; restore that one to decode its "
                "tokens"
            )
        return load_tokenizer(model.tokenizer, spec.trust_remote_code)

    def arrays(self, *columns: str, num_rows: int = 64) -> Iterator[dict[str, "Ragged | npt.NDArray[Any]"]]:
        """Columns by name, at most `num_rows` rows at a time, for output that does not fit in memory, such as logits.

        Columns of lists come as in `ragged`, others as in `array`. For lists of vectors with one width, such as those
        of task `logits`, `values` is [num_positions, width] and is not copied.
        """
        readers = [_reader(self._type(column)) for column in columns]
        for batch in self.batches(columns, num_rows):
            yield {name: read(values) for name, values, read in zip(columns, batch.columns, readers, strict=True)}

    def majority(self, answers: "Sequence[Hashable] | str" = "text") -> list[Vote]:
        """The answer that most samples of each input row have, for `sampling.n` above 1. In the order of the input.

        answers: the answer of each output row, such as a number taken from its text, with None for none; or the name of
        a column, whose values are compared as they are. An error row has none, whatever it keeps. If several have equal
        votes, the first one wins. Warns if no input row has more than one sample.
        """
        values = self.table([answers]).column(0).to_pylist() if isinstance(answers, str) else answers
        votes = majority(self.array("row_index"), self._of_good_rows(values, None))
        if votes and all(vote.num_samples == 1 for vote in votes):
            warnings.warn(f"majority: each vote is of one sample; {self._where_samples_are()}", stacklevel=2)
        return votes

    def pass_at_k(self, is_right: Sequence[bool], k: int = 1) -> PassAtK:
        """pass@k: the probability that at least one of k samples of a row is right, and its standard error.

        is_right: whether each output row is right, in the order of `table`. An error row is a sample that is not right.
        The estimate is the unbiased one of Chen et al. 2021. Raises OutputError if a row has fewer than k samples.
        """
        right = self._of_good_rows(is_right, False)
        return pass_at_k(self.array("row_index"), right, k, self._where_samples_are())

    def _of_good_rows(self, values: Sequence[Any], otherwise: Any) -> Sequence[Any]:
        """The values with `otherwise` at error rows, which may keep a text. Those of another length are as they are."""
        if isinstance(values, pa.Array | pa.ChunkedArray):
            values = values.to_pylist()  # Arrow's null is no None
        errors = self.table(["error_type"]).column(0).is_valid().to_pylist()
        if len(values) != len(errors) or not any(errors):
            return values
        return [otherwise if is_error else value for value, is_error in zip(values, errors, strict=True)]

    def _where_samples_are(self) -> str:
        """The end of a message about input rows with too few samples."""
        job = self.spec["input"].get("job")  # absent in jobs of older versions
        if job is not None:
            return (
                f"each output row of the job in {job} is an input row of this job. If the samples are in {job}, merge "
                "the values into its table and call this method of its results: docs/how-to/votes.md"
            )
        if "sample_index" in self.schema.names:
            return "sampling.n says how many a row has"
        return "only task generate has several samples of a row, by sampling.n"

    def dataset(self) -> "Dataset":
        """All rows as a Hugging Face dataset, which keeps an Arrow copy in its cache and maps it into memory."""
        from datasets import Dataset, Features

        features = Features.from_arrow_schema(self.schema)
        dataset = Dataset.from_parquet([glob.escape(absolute(path)) for path in self.parts], features=features)
        return dataset if (places := self._places()) is None else dataset.select(places)

    def _places(self) -> npt.NDArray[np.int64] | None:
        """For each row in order, its place among the rows of all parts; None if the parts are in order."""
        if self.is_in_order or not self.parts:
            return None
        rows = np.concatenate([batch.column(0).to_numpy() for batch in self.batches(["row_index"])])
        # A stable sort keeps the samples of a row in their order.
        return np.argsort(rows, kind="stable")

    def _names(self, columns: Sequence[str] | None) -> list[str]:
        schema = self.schema
        columns = None if columns is None else list_of(columns)
        for name in columns or ():
            if name not in schema.names:
                raise OutputError(f"{self.folder} has no column {name!r}; it has {', '.join(schema.names)}")
        return schema.names if columns is None else columns

    def _type(self, column: str) -> pa.DataType:
        [name] = self._names([column])
        return self.schema.field(name).type


def _reader(type: pa.DataType) -> "Callable[[pa.Array], Ragged | npt.NDArray[Any]]":
    if pa.types.is_list(type):
        return to_ragged
    return to_matrix if pa.types.is_fixed_size_list(type) else _plain


def _read_with(type: pa.DataType) -> str:
    """The calls that read a column of this type."""
    if pa.types.is_list(type) and pa.types.is_list(type.value_type):
        return "table(), or with ragged() if all its inner lists have one length"
    if pa.types.is_list(type):
        return "ragged()"
    return "table()" if pa.types.is_nested(type) and not pa.types.is_fixed_size_list(type) else "array()"


def _read_part(path: pathlib.Path, columns: Sequence[str], schema: pa.Schema) -> pa.Table:
    # One descriptor: a retry may put another file in the part's place between two.
    with open_part(path) as file:
        return _filled(file.read(columns=_of_part(file, columns)), columns, schema)


def _of_part(file: ParquetFile, columns: Sequence[str]) -> list[str]:
    return [name for name in columns if name in file.schema_arrow.names]


_Read = TypeVar("_Read", pa.Table, pa.RecordBatch)


def _filled(read: _Read, columns: Sequence[str], schema: pa.Schema) -> _Read:
    """What was read of a part, with nulls in the columns that the part does not have."""
    names = read.schema.names
    if names == list(columns):
        return read
    types = {name: schema.field(name).type for name in columns}
    arrays = [read.column(name) if name in names else pa.nulls(read.num_rows, types[name]) for name in columns]
    return read.from_arrays(arrays, schema=pa.schema(types))


def open(out: str | os.PathLike[str]) -> Results:
    """The output of a job, while the job runs or after. out: its folder, or its URL in a bucket.

    Raises OutputError without a job.
    """
    return Results(out)


def _plain(column: pa.Array | pa.ChunkedArray) -> npt.NDArray[Any]:
    if pa.types.is_integer(column.type) and column.null_count:
        ends = [end for end in pc.min_max(column).as_py().values() if end is not None]
        if any(abs(end) > _LAST_EXACT for end in ends):
            return np.array(column.to_pylist(), np.object_)
    return np.asarray(
        column.to_numpy() if isinstance(column, pa.ChunkedArray) else column.to_numpy(zero_copy_only=False)
    )


def _one_each(lists: Ragged, column: str) -> npt.NDArray[Any]:
    """[num_lists, width]: the vector of each list; NaN where the list is null. Raises OutputError."""
    if len(lists) and lists.lengths.max() > 1:
        raise OutputError(f"column {column!r} has rows with several vectors: read it with ragged()")
    if len(lists.values) == len(lists):
        return lists.values
    vectors = np.full((len(lists), lists.values.shape[1]), np.nan, lists.values.dtype)
    vectors[lists.lengths == 1] = lists.values
    return vectors
