"""Rows of an OpenAI batch file → texts or token ids: a conversation through the chat template, or a prompt as it is."""

import json
from dataclasses import dataclass
from typing import Any

from batchinf.chat import ChatTemplate, read_messages
from batchinf.errors import RowError
from batchinf.openai_batch import COLUMNS, BatchReader, BatchRequest
from batchinf.source import Row
from batchinf.spec import JobSpec


@dataclass(frozen=True, slots=True)
class BatchPrompt:
    """What a row comes to: its text or its ids, one of them None. is_chat: the text has its special tokens already.

    sampling: values of fields in place of the job's.
    """

    text: str | None
    token_ids: list[int] | None
    is_chat: bool
    sampling: dict[str, Any]


class BatchPrompts:
    """For the rows of one job."""

    columns = COLUMNS

    def __init__(self, spec: JobSpec, tokenizer: Any, begun_at: str | None) -> None:
        """begun_at: see `ChatTemplate`. A tokenizer without a chat template will do for rows that need none."""
        self._reader = BatchReader(spec)
        self._system_prompt = spec.input.system_prompt
        self._chat: ChatTemplate | None = None
        try:
            self._chat = ChatTemplate(spec.input, tokenizer, begun_at)
        except ValueError:
            # transformers' word for having none; it is each conversation's error.
            self._chat = None

    def read(self, row: Row) -> BatchPrompt | RowError:
        """The prompt of a row and its sampling, or why there is none."""
        if row.error is not None:
            return RowError("unreadable", row.error)
        values = dict(row.values)
        body = values.get("body")
        if isinstance(body, str):
            # A column of mixed types is kept as JSON.
            try:
                values["body"] = json.loads(body)
            except (ValueError, RecursionError):
                return RowError("unsupported_request", "body: got text that is not JSON; must be a mapping")
        request = self._reader.read(values)
        if isinstance(request, RowError):
            return request
        if request.messages is None:
            return BatchPrompt(request.text, request.token_ids, False, request.sampling)
        text = self._render(request)
        return text if isinstance(text, RowError) else BatchPrompt(text, None, True, request.sampling)

    def _render(self, request: BatchRequest) -> str | RowError:
        messages = read_messages(request.messages, "body.messages")
        if isinstance(messages, RowError):
            return messages
        if self._system_prompt is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self._system_prompt}, *messages]
        if self._chat is None:
            return RowError("template_error", "the model has no chat template; give one as input.chat_template")
        options = dict(request.chat)
        options |= options.pop("chat_template_kwargs", {})
        if options.get("continue_final_message") and "add_generation_prompt" not in options:
            options["add_generation_prompt"] = False
        return self._chat.render(messages, **options)
