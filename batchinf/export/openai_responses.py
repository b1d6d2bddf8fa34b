"""Answers to `/v1/responses` in OpenAI's form, for the export as a batch file."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from batchinf.spec.sampling import SamplingSpec

Row = Mapping[str, Any]

# What an answer says of fields that the request left out, as in vLLM's server.
_DEFAULTS: dict[str, Any] = {
    "instructions": None,
    "metadata": None,
    "parallel_tool_calls": True,
    "tools": [],
    "max_tool_calls": None,
    "reasoning": None,
    "text": None,
    "truncation": "disabled",
    "user": None,
    "service_tier": "auto",
    "background": False,
    "previous_response_id": None,
    "prompt": None,
}


def response_of(
    name: str,
    row: Row,
    form: Row,
    *,
    logprobs: Sequence[dict[str, Any]] | None,
    sampling: SamplingSpec,
    created: int,
    model: str,
) -> dict[str, Any]:
    """The answer to one request. name: makes its ids. form: see `Prompt.request`. sampling: the job's."""
    request = form.get("request", {})
    is_cut = row["finish_reason"] == "length"
    of_job = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "max_output_tokens": sampling.max_tokens,
        "tool_choice": "auto" if request.get("tools") else "none",
    }
    return {
        "id": f"resp_{name}",
        "object": "response",
        "created_at": created,
        "model": model,
        "status": "incomplete" if is_cut else "completed",
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "output": list(_items(name, row, form, logprobs)),
        **_DEFAULTS,
        **of_job,
        **request,
        "usage": _usage(row),
    }


def _items(name: str, row: Row, form: Row, logprobs: Sequence[dict[str, Any]] | None) -> Iterator[dict[str, Any]]:
    if row.get("reasoning") and form.get("include_reasoning", True):
        thoughts = [{"type": "reasoning_text", "text": row["reasoning"]}]
        yield {"id": f"rs_{name}", "type": "reasoning", "summary": [], "content": thoughts, "status": None}
    if row["text"]:
        text = {"type": "output_text", "text": row["text"], "annotations": [], "logprobs": _with_bytes(logprobs)}
        yield {
            "id": f"msg_{name}",
            "type": "message",
            "role": "assistant",
            # If it is sent back as it is, the model continues it.
            "status": "incomplete" if row["finish_reason"] == "length" else "completed",
            "content": [text],
        }
    for number, call in enumerate(row.get("tool_calls") or ()):
        yield {
            "id": f"fc_{name}-{number}",
            "type": "function_call",
            "status": "completed",
            "call_id": call["id"],
            "name": call["name"],
            "arguments": call["arguments"],
        }


def _with_bytes(logprobs: Sequence[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Tokens with bytes in any case, as this form has them: of a part of a character, those of its name."""
    if logprobs is None:
        return None
    tokens = []
    for token in logprobs:
        both = [token, *token["top_logprobs"]]
        own, *top = [{**it, "bytes": [*it["token"].encode()] if it["bytes"] is None else it["bytes"]} for it in both]
        tokens.append({**own, "top_logprobs": top})
    return tokens


def num_reasoning_tokens(samples: Sequence[Row]) -> int | None:
    """Tokens of the reasoning of a request's answers; None if the job has not counted those of one with a reasoning."""
    numbers = [row.get("num_reasoning_tokens", None if row.get("reasoning") else 0) for row in samples]
    return None if None in numbers else sum(numbers)


def _usage(row: Row) -> dict[str, Any] | None:
    """Tokens from caches are not counted, but the form has a number for them.

    The form also needs the number of tokens of the reasoning: without it, there is no usage.
    """
    if (number := num_reasoning_tokens([row])) is None:
        return None
    return {
        "input_tokens": row["num_prompt_tokens"],
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": row["num_output_tokens"],
        "output_tokens_details": {"reasoning_tokens": number},
        "total_tokens": row["num_prompt_tokens"] + row["num_output_tokens"],
    }
