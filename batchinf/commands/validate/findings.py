"""The findings of `batchinf validate` and its report, with their lines. `commands.validate` makes them."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from batchinf.commands.validate.shown_rows import ShownRow
from batchinf.model.lora import Adapter
from batchinf.planning.prompt_lengths import PromptLengths
from batchinf.prompts.row_sampling import setting

_COLUMNS = 80


@dataclass(frozen=True, slots=True)
class SpecFound:
    """The spec is valid."""

    path: str

    def lines(self) -> Iterator[str]:
        yield f"spec {self.path}: good"


@dataclass(frozen=True, slots=True)
class ModelFound:
    """The model is complete."""

    name: str
    architectures: tuple[str, ...]
    commit: str | None
    """The commit on the hub; None for a folder."""
    path: str
    fingerprint: str
    adapters: tuple[Adapter, ...]

    def lines(self) -> Iterator[str]:
        yield f"model {self.name}: {', '.join(self.architectures or ('of unknown architecture',))}; weights whole"
        where = f"commit {self.commit}" if self.commit else self.path
        yield f"  {where}, content {self.fingerprint}"
        for adapter in self.adapters:
            yield f"  LoRA adapter {adapter.name}: rank {adapter.rank}, content {adapter.fingerprint}"


@dataclass(frozen=True, slots=True)
class InputFound:
    """The input can be read."""

    path: str
    num_rows: int
    fingerprint: str
    columns: dict[str, str]
    """Arrow types by name."""

    def lines(self) -> Iterator[str]:
        yield f"input {self.path}: {self.num_rows:,} rows, content {self.fingerprint}"
        yield "columns: " + ", ".join(f"{name} {type}" for name, type in self.columns.items())


@dataclass(frozen=True, slots=True)
class RowsChosen:
    """Number of rows that `where`, `sample`, `exclude` and `limit` choose."""

    chosen_by: str
    """These fields, in words."""
    num_rows: int
    num_input_rows: int

    def lines(self) -> Iterator[str]:
        yield f"chosen by {self.chosen_by}: {self.num_rows:,} of {self.num_input_rows:,} input rows"


@dataclass(frozen=True, slots=True)
class Setting:
    """A field of sampling."""

    name: str
    value: Any
    origin: str
    """The source of its value: `spec`, `generation_config` or `default`."""

    def __str__(self) -> str:
        return setting(self.name, self.value)


@dataclass(frozen=True, slots=True)
class TaskFound:
    """The task, and what it stores of each row."""

    name: str
    stores: str
    """In words; empty if the sampling says enough."""
    sampling: tuple[Setting, ...] | None
    """None if the task makes no text."""
    row_sampling: dict[str, str]
    """Field → the column with each row's own value."""

    def lines(self) -> Iterator[str]:
        """Sampling: first fields that are not vLLM's default, with their origin, then the others."""
        if self.stores:
            yield self.stores
        if self.sampling is not None:
            set_fields = [f"{field} ({field.origin})" for field in self.sampling if field.origin != "default"]
            yield from _wrapped("sampling: ", set_fields or ["nothing is given"])
            defaults = [str(field) for field in self.sampling if field.origin == "default"]
            yield from _wrapped("  by default ", defaults)
        if self.row_sampling:
            columns = ", ".join(f"{field} in '{column}'" for field, column in self.row_sampling.items())
            yield f"each row's own sampling: {columns}; null is the job's"


def _wrapped(first: str, words: Sequence[str]) -> Iterator[str]:
    """Words with commas between them, in lines of 80 columns. No word is split."""
    line = first
    for number, word in enumerate(words):
        end = "," if number < len(words) - 1 else ""
        if len(line) + len(word) + len(end) > _COLUMNS and line.strip():
            yield line.rstrip()
            line = "  "
        line += f"{word}{end} "
    if words:
        yield line.rstrip()


@dataclass(frozen=True, slots=True)
class Remark:
    """A line about a setting that is probably a mistake (`warning`), or about structured outputs (`structure`)."""

    kind: Literal["warning", "structure"]
    text: str

    def lines(self) -> Iterator[str]:
        yield self.text


@dataclass(frozen=True, slots=True)
class RowsDrawn:
    """The following rows were drawn with this seed."""

    seed: int

    def lines(self) -> Iterator[str]:
        yield from ("", f"rows drawn with --seed {self.seed}:")


@dataclass(frozen=True, slots=True)
class OutputFound:
    """What the output folder holds."""

    folder: str
    """Its URL, if it is in a bucket."""
    holds: Literal["nothing", "slices", "done job", "unfinished job"] = "nothing"
    num_slices: int | None = None
    """Slices of a job in slices."""
    num_parts: int = 0
    """Committed parts."""
    drift: str | None = None
    """Why `run` would refuse to resume the job there."""
    warning: str | None = None
    """Why the disk may be too small, or where the user may not write."""
    others_note: str | None = None
    """Which other files a new job would find there."""

    def lines(self) -> Iterator[str]:
        yield ""
        words = {
            "slices": f"a job in {self.num_slices} slices",
            "nothing": "a new job",
            "done job": "the job there is done",
            "unfinished job": f"a job with {self.num_parts:,} parts to go on with",
        }
        yield f"output {self.folder}: {words[self.holds]}"
        if self.others_note is not None:
            yield self.others_note
        if self.drift is not None:
            yield f"warning: {self.drift}"
        if self.warning is not None:
            yield self.warning


ValidateFinding = (
    SpecFound | ModelFound | InputFound | RowsChosen | TaskFound | Remark | PromptLengths | RowsDrawn | ShownRow
    | OutputFound
)  # fmt: skip


@dataclass(frozen=True, slots=True, repr=False)
class ValidateReport:
    """All findings. `print`, and a notebook, show their lines."""

    spec: SpecFound
    model: ModelFound
    input: InputFound
    chosen: RowsChosen | None
    """None if all rows run."""
    task: TaskFound
    remarks: tuple[Remark, ...]
    prompt_lengths: PromptLengths
    seed: int | None
    """The seed of rows that were drawn at random."""
    rows: tuple[ShownRow, ...]
    output: OutputFound

    @classmethod
    def of(cls, findings: Iterable[ValidateFinding]) -> "ValidateReport":
        """The report of all findings of `validate`."""
        by_type: dict[type, list[Any]] = {}
        for finding in findings:
            by_type.setdefault(type(finding), []).append(finding)
        [drawn] = by_type.get(RowsDrawn, [None])
        [chosen] = by_type.get(RowsChosen, [None])
        return cls(
            spec=by_type[SpecFound][0],
            model=by_type[ModelFound][0],
            input=by_type[InputFound][0],
            chosen=chosen,
            task=by_type[TaskFound][0],
            remarks=tuple(by_type.get(Remark, ())),
            prompt_lengths=by_type[PromptLengths][0],
            seed=None if drawn is None else drawn.seed,
            rows=tuple(by_type.get(ShownRow, ())),
            output=by_type[OutputFound][0],
        )

    def lines(self) -> Iterator[str]:
        """The lines of all findings, in the order in which `validate` makes them."""
        chosen = () if self.chosen is None else (self.chosen,)
        first = (self.spec, self.model, self.input, *chosen, self.task, *self.remarks, self.prompt_lengths)
        drawn = () if self.seed is None else (RowsDrawn(self.seed),)
        for finding in (*first, *drawn, *self.rows, self.output):
            yield from finding.lines()

    def __repr__(self) -> str:
        return "\n".join(self.lines())
