"""The answers of completions, for the writer: splits off reasoning, and checks the texts of structured outputs."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from batchinf.base.errors import RowError
from batchinf.base.text import one_line
from batchinf.records import Completion
from batchinf.replica.detokenizer import Detokenizer
from batchinf.replica.structure_checks import Matcher, StructureChecks
from batchinf.spec.job import JobSpec

Split = Callable[[str, Sequence[int], Sequence[int]], tuple[str | None, str | None]]


@dataclass(frozen=True, slots=True)
class Answer:
    """The stored text of a completion; None if there is no text. Text is kept beside an error."""

    text: str | None
    reasoning: str | None = None
    error: RowError | None = None


class NoAnswers:
    """For tasks without text."""

    def read(self, completions: Sequence[Completion]) -> list[Answer]:
        """See `Answers.read`."""
        return [Answer(None)] * len(completions)


class Answers:
    """Turns completions into answers by one job's rules. For one thread."""

    def __init__(
        self,
        spec: JobSpec,
        tokenizer: Any,
        detokenizer: Detokenizer,
        *,
        split: Split | None = None,
        matcher: Matcher | None = None,
    ) -> None:
        """split: for a job with a reasoning parser. matcher: see `StructureChecks`."""
        self._detokenizer = detokenizer
        self._sampling = spec.sampling
        self._split = split
        self._special: re.Pattern[str] | None = None
        self._special_ids: frozenset[int] = frozenset()
        if split is not None and spec.sampling.skip_special_tokens:
            # The parser must see special tokens: the marks around the reasoning may be among them.
            self._sampling = spec.sampling.model_copy(update={"skip_special_tokens": False})
            tokens = _special_tokens(tokenizer)
            self._special_ids = frozenset(tokens)
            longest_first = sorted(tokens.values(), key=len, reverse=True)
            self._special = re.compile("|".join(map(re.escape, longest_first))) if tokens else None
        self._checks = StructureChecks(matcher)

    def read(self, completions: Sequence[Completion]) -> list[Answer]:
        """One answer for each completion, in order."""
        texts = self._detokenizer.decode(completions, self._sampling)
        return [self._read(completion, text) for completion, text in zip(completions, texts, strict=True)]

    def _read(self, completion: Completion, whole: str) -> Answer:
        structure = completion.request.sampling.structured_outputs
        if completion.finish_reason == "error":
            return Answer(None, None, RowError("refused", f"vLLM ended the request: {completion.stop_reason}"))
        if self._split is None and structure is None:
            return Answer(whole)
        text: str | None = whole
        reasoning = None
        if self._split is not None:
            try:
                reasoning, text = self._split(whole, completion.request.prompt_token_ids, completion.token_ids.tolist())
            except Exception as failure:
                # The parser is vLLM's or a plugin, and may raise anything for a model's text.
                words = one_line(f"{type(failure).__name__}: {failure}", 300)
                return Answer(whole, None, RowError("reasoning_error", f"the reasoning parser failed: {words}"))
            reasoning = self._stripped(reasoning, completion)
            text = self._stripped(text, completion)
        error = None if structure is None else self._checks.error(structure, text, completion)
        return Answer(text, reasoning, error)

    def _stripped(self, text: str | None, completion: Completion) -> str | None:
        if not text or self._special is None or self._special_ids.isdisjoint(completion.token_ids.tolist()):
            return text
        return self._special.sub("", text)


def _special_tokens(tokenizer: Any) -> dict[int, str]:
    """The tokens that are left out of a text, by id."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    tokens = {token_id: str(token.content) for token_id, token in added.items() if token.special}
    tokens |= dict(zip(tokenizer.all_special_ids, map(str, tokenizer.all_special_tokens), strict=True))
    return {token_id: token for token_id, token in tokens.items() if token}
