"""Reads the tool calls of completions for `answers`: their ids, and the errors of calls that cannot be parsed."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from batchinf.base.errors import RowError
from batchinf.base.text import clip, counted
from batchinf.engines.protocol import ParsedAnswer
from batchinf.records import Completion, Request, ToolCall

INVALID = "invalid_tool_call"
# The length of ids in the chat templates of Mistral, which take no other ids.
_SHORT_ID = 9


class Parser(Protocol):
    """vLLM's parser of one model's calls."""

    def keeps_special_tokens(self, request: Request, /) -> bool:
        """Whether it reads texts with their special tokens."""

    def read(self, request: Request, text: str, token_ids: Sequence[int], /) -> ParsedAnswer:
        """The reasoning, the calls and the text beside them. May raise anything."""


def with_ids(parsed: ParsedAnswer, request: Request, text: str, job_id: str) -> ParsedAnswer:
    """The parsed text with ids for its calls, and with the first call alone if the request takes one."""
    assert request.tools is not None
    calls = parsed.calls if request.tools.are_parallel else parsed.calls[:1]
    keys = (f"{job_id},{request.row_index},{request.request_index},{number}" for number in range(len(calls)))
    named = [replace(call, id=_id(call.id, text, key)) for call, key in zip(calls, keys, strict=True)]
    return replace(parsed, calls=tuple(named))


def _id(given: str, text: str, key: str) -> str:
    """The id that the model has written; otherwise one that a resumed job gives again, by this key."""
    if given and given in text:
        return given
    digest = hashlib.blake2b(key.encode(), digest_size=12).hexdigest()
    return digest[:_SHORT_ID] if len(given) == _SHORT_ID else f"call_{digest}"


def finish_reason(completion: Completion, parsed: ParsedAnswer) -> str:
    """As vLLM's server sets it: `tool_calls`, except for a tool that the request named."""
    tools = completion.request.tools
    has_called = tools is not None and tools.choice != "named" and bool(parsed.calls)
    return "tool_calls" if has_called else completion.finish_reason


def call_error(
    completion: Completion,
    parsed: ParsedAnswer,
    breach: Callable[[dict[str, Any], str | None], RowError | None],
) -> RowError | None:
    """Why the calls of an answer cannot be used; None if they can. breach: of a structure in the text."""
    tools = completion.request.tools
    structure = completion.request.sampling.structured_outputs
    assert tools is not None
    end = _end(completion)
    if parsed.problem is not None:
        return RowError(INVALID, f"the tool parser failed{end}: {parsed.problem}")
    if structure is not None and (error := breach(structure, parsed.whole)) is not None:
        is_own = tools.choice == "auto" and "structural_tag" not in structure
        return error if is_own else RowError(INVALID, error.error_message)
    if tools.choice != "auto" and not parsed.calls:
        return RowError(INVALID, f"the text has no call, though tool_choice is {tools.name or tools.choice}{end}")
    if parsed.calls and completion.finish_reason == "length":
        return RowError(INVALID, f"the text ended before its calls did{end}; raise max_tokens")
    return next(filter(None, map(_objection, parsed.calls)), None)


def _objection(call: ToolCall) -> RowError | None:
    try:
        arguments = json.loads(call.arguments)
        f"{call.id}{call.name}{call.arguments}".encode()
    except UnicodeEncodeError:
        return RowError(INVALID, f"the call of {clip(call.name)} has a lone surrogate, which is no valid Unicode")
    except (ValueError, RecursionError) as error:
        return RowError(INVALID, f"the arguments of {clip(call.name)} are not JSON: {error}")
    if isinstance(arguments, dict):
        return None
    return RowError(INVALID, f"the arguments of {clip(call.name)} are no JSON mapping: {clip(call.arguments)}")


def _end(completion: Completion) -> str:
    if completion.finish_reason != "length":
        return ""
    return f" (cut off after {counted(len(completion.token_ids), 'token')})"
