"""Prompt lengths in tokens, and the errors of rows, from a sample of rows. `validate` and `run` show them."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from batchinf.base.text import ErrorGroup, most_frequent, one_line, short_count, without_numbers
from batchinf.records import Prompt

_MOST_ERROR_CHARS = 400  # the advice is at the end of a message


@dataclass(frozen=True, slots=True)
class PromptLengths:
    """Prompt lengths in tokens, from a sample of `num_sampled` of the `num_rows` rows that run."""

    num_rows: int
    num_sampled: int
    max_model_len: int | None
    """None: unknown."""
    p50: int | None
    """Of prompts without an error; None without any, as are `p95` and `longest`."""
    p95: int | None
    longest: int | None
    num_tokens: int
    """Of all rows, estimated from the sample."""
    num_tight: int
    """Rows whose prompt leaves no room for `max_tokens`."""
    num_truncated: int
    """Prompts that were cut to fit."""
    errors: tuple[ErrorGroup, ...]
    """Of the sample, the most frequent first."""

    def lines(self) -> Iterator[str]:
        """The lengths after an empty line, and the errors and cuts of rows."""
        yield ""
        is_all = self.num_sampled == self.num_rows
        which = f"all {self.num_rows:,}" if is_all else f"{self.num_sampled:,} of {self.num_rows:,}"
        if self.longest is not None:
            yield f"prompt lengths in tokens ({which} rows):"
            yield (
                f"  p50 {self.p50:,} · p95 {self.p95:,} · max {self.longest:,} · "
                f"{'' if is_all else 'about '}{short_count(self.num_tokens)} prompt tokens in all"
            )
        if self.num_tight:
            verb = "leaves" if self.num_tight == 1 else "leave"
            yield (
                f"  {self.num_tight:,} of them {verb} less than max_tokens below max_model_len {self.max_model_len:,}"
            )
        if self.num_truncated:
            verb = "is" if self.num_truncated == 1 else "are"
            yield f"  {self.num_truncated:,} of them {verb} cut to fit (prompt_truncated)"
        yield from self.error_lines()

    def error_lines(self) -> Iterator[str]:
        """The rows of the sample that will be error rows, by their reasons. `run` prints these lines, too."""
        if not self.errors:
            return
        which = "rows" if self.num_sampled == self.num_rows else "sampled rows"
        yield f"  {self._num_errors:,} of {self.num_sampled:,} {which} will be error rows:"
        shown, rest = most_frequent(self.errors)
        for error in shown:
            words = one_line(
                f"{error.num_rows:,} {error.error_type}, first row {error.first_row:,}: {error.first_message}"
            )
            yield f"    {words if len(words) <= _MOST_ERROR_CHARS else words[: _MOST_ERROR_CHARS - 1] + '…'}"
        yield from (f"    {line}" for line in rest)

    def error_rate_warning(self, allowed: float) -> Iterator[str]:
        """A warning if more rows of the sample than `max_error_rate` will be error rows."""
        rate = self._num_errors / max(1, self.num_sampled)
        if allowed < rate < 1:
            yield (
                f"warning: {rate:.1%} errors are more than max_error_rate {allowed:.1%}, so that `run` stores all "
                "rows and then exits with 3; a higher max_error_rate allows this"
            )

    @property
    def _num_errors(self) -> int:
        return sum(error.num_rows for error in self.errors)


@dataclass(slots=True)
class LengthCounts:
    """Counts the prompts of a sample."""

    num_rows: int
    """Rows that run."""
    room: int | None
    """The most tokens of prompt and output together; None: unknown."""
    max_tokens: int | None
    lengths: list[int] = field(default_factory=list)
    """Of prompts without an error."""
    errors: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Rows by type and reason."""
    firsts: dict[tuple[str, str], ErrorGroup] = field(default_factory=dict)
    """The first of each."""
    num_truncated: int = 0
    num_tight: int = 0
    num_wrong_answers: int = 0
    """Rows whose answer is no choice."""
    first_wrong_answer: str = ""
    num_joined: int = 0
    """Rows of which a scored text has a token in common with its context."""
    first_joined: str = ""

    def add(self, prompt: Prompt) -> None:
        if (error := prompt.error) is not None:
            key = error.error_type, without_numbers(error.error_message)
            self.errors[key] += 1
            self.firsts.setdefault(key, ErrorGroup(error.error_type, 0, prompt.row_index, error.error_message))
            return
        if prompt.scoring is not None and prompt.scoring.answer_error is not None:
            self.num_wrong_answers += 1
            first = f"Row {prompt.row_index}: {prompt.scoring.answer_error}"
            self.first_wrong_answer = self.first_wrong_answer or first
        if prompt.scoring is not None and prompt.scoring.joined is not None:
            self.num_joined += 1
            self.first_joined = self.first_joined or f"Row {prompt.row_index}: {prompt.scoring.joined}"
        length = len(prompt.token_ids)
        self.lengths.append(length)
        self.num_truncated += prompt.is_truncated
        max_tokens = self.max_tokens if prompt.sampling is None else prompt.sampling.max_tokens
        self.num_tight += max_tokens is not None and self.room is not None and length + max_tokens > self.room

    def scoring_warnings(self) -> Iterator[str]:
        """Warnings of rows whose answers are no choices, and of rows whose scored texts are not scored as a whole."""
        if self.num_wrong_answers:
            yield (
                f"warning: {self.num_wrong_answers:,} of {len(self.lengths):,} sampled rows have values in "
                "input.answer_column that are no choices; `run` scores them, and their answer is null. "
                f"{self.first_wrong_answer}"
            )
        if self.num_joined:
            yield (
                f"warning: in {self.num_joined:,} of {len(self.lengths):,} sampled rows a token joins the end of the "
                "context and the beginning of the scored text, which is not scored; a space in score.target_delimiter "
                f"may part them. {self.first_joined}"
            )

    def summary(self) -> PromptLengths:
        lengths = sorted(self.lengths)
        num_sampled = len(lengths) + self.errors.total()
        errors = (replace(self.firsts[key], num_rows=number) for key, number in self.errors.most_common())
        return PromptLengths(
            num_rows=self.num_rows,
            num_sampled=num_sampled,
            max_model_len=self.room,
            p50=lengths[len(lengths) // 2] if lengths else None,
            p95=lengths[len(lengths) * 95 // 100] if lengths else None,
            longest=lengths[-1] if lengths else None,
            num_tokens=sum(lengths) * self.num_rows // max(1, num_sampled),
            num_tight=self.num_tight,
            num_truncated=self.num_truncated,
            errors=tuple(errors),
        )
