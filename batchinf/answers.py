"""A completion's text as the output has it: decoded, its reasoning split off, and held against the asked-for structure.

A structure is kept by the engine token by token, so that only an output which was cut short can miss it. What needs
vLLM (its reasoning parsers, its grammars) is handed in.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from batchinf.detokenizer import Detokenizer
from batchinf.errors import RowError
from batchinf.records import Completion
from batchinf.spec import JobSpec

# Text and the prompt's token ids → what was thought, and the answer; either may be None.
Split = Callable[[str, Sequence[int]], tuple[str | None, str | None]]
# Whether a text is whole by the grammar or regex.
Matches = Callable[[str], bool]
# A structure → that; None where it cannot be told.
Matcher = Callable[[dict[str, Any]], Matches | None]

_SHOWN_CHARS = 60
_MOST_JUDGES = 256


@dataclass(frozen=True, slots=True)
class Answer:
    """What is stored of a completion's text. The text stays beside an error; None is none at all."""

    text: str | None
    reasoning: str | None = None
    error: RowError | None = None


class NoAnswers:
    """For tasks that are not after a text."""

    def read(self, completions: Sequence[Completion]) -> list[Answer]:
        """See `Answers.read`."""
        return [Answer(None)] * len(completions)


class Answers:
    """Completions → answers, by one job's rules. For one thread."""

    def __init__(
        self,
        spec: JobSpec,
        tokenizer: Any,
        detokenizer: Detokenizer,
        split: Split | None = None,
        matcher: Matcher | None = None,
    ) -> None:
        """split: for a job with a reasoning parser. matcher: for regex and grammar; None judges by the end alone."""
        self._detokenizer = detokenizer
        self._sampling = spec.sampling
        self._split = split
        self._special: re.Pattern[str] | None = None
        self._special_ids: frozenset[int] = frozenset()
        if split is not None and spec.sampling.skip_special_tokens:
            # The parser must see them: the marks around what was thought may be among them.
            self._sampling = spec.sampling.model_copy(update={"skip_special_tokens": False})
            tokens = _special_tokens(tokenizer)
            self._special_ids = frozenset(tokens)
            longest_first = sorted(tokens.values(), key=len, reverse=True)
            self._special = re.compile("|".join(map(re.escape, longest_first))) if tokens else None
        self._matcher = matcher
        self._judges: dict[str, Judge] = {}

    def read(self, completions: Sequence[Completion]) -> list[Answer]:
        """One answer for each completion, in order."""
        texts = self._detokenizer.decode(completions, self._sampling)
        return [self._read(completion, text) for completion, text in zip(completions, texts, strict=True)]

    def _read(self, completion: Completion, whole: str) -> Answer:
        structure = completion.request.sampling.structured_outputs
        if self._split is None and structure is None:
            return Answer(whole)
        text: str | None = whole
        reasoning = None
        if self._split is not None:
            try:
                reasoning, text = self._split(whole, completion.request.prompt_token_ids)
            except Exception as error:
                # The parser is vLLM's, or a plugin, and the text a model's.
                words = " ".join(f"{type(error).__name__}: {error}".split())[:300]
                return Answer(whole, None, RowError("reasoning_error", f"the reasoning parser failed: {words}"))
            reasoning, text = self._stripped(reasoning, completion), self._stripped(text, completion)
        return Answer(text, reasoning, None if structure is None else self._judge(structure)(text, completion))

    def _judge(self, structure: dict[str, Any]) -> "Judge":
        """Made once for each structure; rows of a batch file may have their own."""
        key = json.dumps(structure)
        if key not in self._judges:
            if len(self._judges) >= _MOST_JUDGES:
                self._judges.clear()
            self._judges[key] = _judge(structure, self._matcher)
        return self._judges[key]

    def _stripped(self, text: str | None, completion: Completion) -> str | None:
        if not text or self._special is None or self._special_ids.isdisjoint(completion.token_ids.tolist()):
            return text
        return self._special.sub("", text)


def _special_tokens(tokenizer: Any) -> dict[int, str]:
    """Those that are left out of a text, by id."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    tokens = {token_id: str(token.content) for token_id, token in added.items() if token.special}
    tokens |= dict(zip(tokenizer.all_special_ids, map(str, tokenizer.all_special_tokens), strict=True))
    return {token_id: token for token_id, token in tokens.items() if token}


# -- structures ------------------------------------------------------------------------------------------------------

Judge = Callable[[str | None, Completion], RowError | None]


def _judge(structure: dict[str, Any], matcher: Matcher | None) -> Judge:
    """What holds a text against a structure."""
    [(kind, value)] = structure.items()
    if kind == "json":
        return _json_error
    if kind == "choice":
        choices = frozenset(value)
        return lambda text, completion: _choice_error(choices, text, completion)
    matches = None if matcher is None else matcher(structure)
    return lambda text, completion: _structure_error(kind, matches, text, completion)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


# Numbers are not made of digits that nobody looks at; nor would Python read one of more than 4,300.
_JSON = json.JSONDecoder(parse_int=len, parse_float=len, parse_constant=_no_constant)


def _json_error(text: str | None, completion: Completion) -> RowError | None:
    if text is None:
        return _nothing("invalid_json", completion)
    try:
        _JSON.decode(text)
    except (ValueError, RecursionError) as error:
        words = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        return RowError("invalid_json", f"the text does not parse as JSON{_end(completion)}: {words}")
    return None


def _choice_error(choices: frozenset[str], text: str | None, completion: Completion) -> RowError | None:
    if text is None:
        return _nothing("invalid_choice", completion)
    # A tokenizer may put a space before the first word of an output.
    if text in choices or text.strip() in choices:
        return None
    shown = text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}…"
    return RowError("invalid_choice", f"the text is none of the choices{_end(completion)}: got '{shown}'")


def _structure_error(kind: str, matches: Matches | None, text: str | None, completion: Completion) -> RowError | None:
    if text is None:
        return _nothing("invalid_structure", completion)
    if completion.finish_reason == "stop" and completion.stop_reason is None:
        return None  # the end-of-sequence token, which the engine lets through where the structure is whole
    by_end = completion.finish_reason == "stop"
    is_whole = by_end if matches is None else matches(text) or matches(text.strip())
    return None if is_whole else RowError("invalid_structure", f"the text does not match the {kind}{_end(completion)}")


def _nothing(error_type: str, completion: Completion) -> RowError:
    return RowError(error_type, f"no text came after the reasoning{_end(completion)}")


def _end(completion: Completion) -> str:
    stop = "" if completion.stop_reason is None else f", stop_reason {completion.stop_reason}"
    return f" (finish_reason {completion.finish_reason}{stop})"
