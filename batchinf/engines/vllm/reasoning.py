"""vLLM's reasoning parsers: a model's text → what it thought, and what it answered.

Run with vLLM 0.32.0 and read against 0.26.0, which both have `ReasoningParserManager.get_reasoning_parser`
and `extract_reasoning(text, request)` (before 0.13 it was `extract_reasoning_content`).
"""

from collections.abc import Mapping, Sequence
from typing import Any

from vllm.reasoning import ReasoningParserManager

from batchinf.base.errors import SpecError
from batchinf.base.text import error_message
from batchinf.spec.job import JobSpec

_FIELD = "model.reasoning_parser"
# The end of a prompt in which a chat template has shut the thinking already, as it does with `enable_thinking: false`.
_TAIL_TOKENS = 32


class Reasoner:
    """One parser with one tokenizer. For one thread."""

    def __init__(
        self, name: str, tokenizer: Any, template_kwargs: Mapping[str, Any], plugin: str | None = None
    ) -> None:
        """plugin: a Python file with further parsers. Raises SpecError for a name or a tokenizer that does not do."""
        if plugin:
            ReasoningParserManager.import_reasoning_parser(plugin)
        known = sorted({*ReasoningParserManager.reasoning_parsers, *ReasoningParserManager.lazy_parsers})
        if name not in known:
            raise SpecError(f"{_FIELD}: {unknown_parser(name, known)}")
        kwargs = dict(template_kwargs)
        self._request = _request(kwargs)
        try:
            parser = ReasoningParserManager.get_reasoning_parser(name)
            self._parser = parser(tokenizer, chat_template_kwargs=kwargs)
        except Exception as error:
            reason = error_message(error)
            raise SpecError(f"{_FIELD}: '{name}' does not go with this model's tokenizer: {reason}") from error

    def split(self, text: str, prompt_token_ids: Sequence[int]) -> tuple[str | None, str | None]:
        """What was thought and what was answered; no answer where it ended inside the thinking."""
        reasoning, answer = self._parser.extract_reasoning(text, self._request)
        if answer is None and text and self._parser.is_reasoning_end(list(prompt_token_ids[-_TAIL_TOKENS:])):
            return None, text
        return reasoning, answer


def reasoner_of(spec: JobSpec, tokenizer: Any) -> Reasoner:
    """The reasoner that a spec asks for."""
    plugin = spec.engine.get("reasoning_parser_plugin")
    return Reasoner(spec.model.reasoning_parser or "", tokenizer, spec.input.chat_template_kwargs or {}, plugin)


def unknown_parser(name: str, known: Sequence[str]) -> str:
    """What to say of a name that there is not."""
    return f"got '{name}'; the installed vLLM has {', '.join(known)}"


def _request(template_kwargs: dict[str, Any]) -> Any:
    # What `extract_reasoning` takes beside the text: few parsers look at it.
    try:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    except ImportError:  # where it has another place
        return None
    return ChatCompletionRequest(messages=[], model="", chat_template_kwargs=template_kwargs)
