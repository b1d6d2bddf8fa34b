"""Holds the texts of structured outputs against the structures of their rows, for the writer's thread."""

import functools
import json
import sys
import time
from collections.abc import Callable
from typing import Any

from batchinf.base.errors import RowError
from batchinf.base.text import clip, counted
from batchinf.records import Completion

# Whether a text matches the whole grammar or regex.
Matches = Callable[[str], bool]
# A structure → its `Matches`; None if a text cannot be checked.
Matcher = Callable[[dict[str, Any]], Matches | None]
Check = Callable[[str | None, Completion], RowError | None]

VIOLATED = "structure_violated"
_SHOWN_CHARS = 60
_MOST_CHECKS = 256
# A check is pure Python: 0.2 ms for 25 values. By default, the engine's thread would wait 5 ms for Python's lock each
# time that it needs it during the checks of a batch. So threads switch more often, and the checks pause.
_SWITCH_S = 0.0002
_WORK_S = 0.0002
_PAUSE_S = 0.00005


class StructureChecks:
    """Finds the error of a text that is not what its row's structure asks for. For one thread.

    The engine should make only texts that fit. But its backends leave out keywords that they do not have, some without
    a word. So each finished text is checked whole. A text that was cut off at `max_tokens` need only parse.
    """

    def __init__(self, matcher: Matcher | None) -> None:
        """matcher: for regex and grammar; None: check only how the text ended."""
        self._matcher = matcher
        # Rows of a batch file may each have their own structure.
        self._check = functools.lru_cache(_MOST_CHECKS)(self._make)
        self._paused_at = time.perf_counter()

    def error(self, structure: dict[str, Any], text: str | None, completion: Completion) -> RowError | None:
        """The error of a text; None if it fits. text: None if nothing came after the reasoning."""
        if time.perf_counter() - self._paused_at > _WORK_S:
            sys.setswitchinterval(_SWITCH_S)
            time.sleep(_PAUSE_S)
            self._paused_at = time.perf_counter()
        [(kind, value)] = structure.items()
        return self._check(kind, value if isinstance(value, str) else tuple(value))(text, completion)

    def _make(self, kind: str, value: str | tuple[str, ...]) -> Check:
        if kind == "json":
            assert isinstance(value, str)
            return _json_check(value)
        if kind == "choice":
            return functools.partial(_choice_error, frozenset(value))
        matches = None if self._matcher is None else self._matcher({kind: value})
        return functools.partial(_structure_error, kind, matches)


def _is_finished(completion: Completion) -> bool:
    return completion.finish_reason != "length"


def _json_check(schema: str) -> Check:
    from batchinf.spec.answer_schemas import Schema

    return functools.partial(_json_error, Schema(schema))


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


# Numbers are only checked, not converted: Python refuses integers of more than 4,300 digits.
_JSON = json.JSONDecoder(parse_int=len, parse_float=len, parse_constant=_no_constant)


def _json_error(schema: Any, text: str | None, completion: Completion) -> RowError | None:
    from batchinf.spec.answer_schemas import UncheckableError, read_json

    if text is None:
        return _nothing("invalid_json", completion)
    try:
        if not _is_finished(completion):
            _JSON.decode(text)
            return None
        value = read_json(text)
    except UncheckableError as error:
        return RowError(VIOLATED, f"the text cannot be held against the schema{_end(completion)}: {error}")
    except (ValueError, RecursionError) as error:
        words = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        return RowError("invalid_json", f"the text does not parse as JSON{_end(completion)}: {words}")
    try:
        breach = schema.breach(value)
    except RecursionError:
        breach = "nested too deeply to be checked"
    return None if breach is None else RowError(VIOLATED, f"the text breaks the schema{_end(completion)}: {breach}")


def _choice_error(choices: frozenset[str], text: str | None, completion: Completion) -> RowError | None:
    if text is None:
        return _nothing("invalid_choice", completion)
    # A tokenizer may put a space before the first word of an output.
    if text in choices or text.strip() in choices:
        return None
    error_type = VIOLATED if _is_finished(completion) else "invalid_choice"
    got = clip(text, _SHOWN_CHARS)
    return RowError(error_type, f"the text is none of the choices{_end(completion)}: got '{got}'")


def _structure_error(kind: str, matches: Matches | None, text: str | None, completion: Completion) -> RowError | None:
    if text is None:
        return _nothing("invalid_structure", completion)
    # Without a matcher: the engine allows the end-of-sequence token only once the structure is complete.
    by_end = completion.finish_reason == "stop"
    is_whole = by_end if matches is None else matches(text) or matches(text.strip())
    error_type = VIOLATED if _is_finished(completion) else "invalid_structure"
    return None if is_whole else RowError(error_type, f"the text does not match the {kind}{_end(completion)}")


def _nothing(error_type: str, completion: Completion) -> RowError:
    return RowError(error_type, f"no text came after the reasoning{_end(completion)}")


def _end(completion: Completion) -> str:
    stop = "" if completion.stop_reason is None else f", stop_reason {completion.stop_reason}"
    # The remedy is more tokens, which the finish reason alone does not say.
    cut = (
        f": cut off after {counted(len(completion.token_ids), 'token')}" if completion.finish_reason == "length" else ""
    )
    return f" (finish_reason {completion.finish_reason}{stop}{cut})"
