"""Which of vLLM's parsers reads a model's tool calls: `model.tool_parser: auto`."""

import pathlib

from batchinf.base.errors import SpecError
from batchinf.model.identity import Model
from batchinf.prompts.chat import own_templates
from batchinf.spec.job import ModelSpec

_HERMES = ("<tool_call>", "hermes")
_QWEN_CODER = ("<function=", "qwen3_coder")
# By `model_type`: marks of the model's chat template, each with the parser of the calls that have it. The first mark
# that the template has counts: one type of model may have several forms of calls.
_PARSERS: dict[str, tuple[tuple[str, str], ...]] = {
    "qwen2": (_HERMES,),
    "qwen2_moe": (_HERMES,),
    "qwen3": (_QWEN_CODER, _HERMES),
    "qwen3_moe": (_QWEN_CODER, _HERMES),
    "qwen3_next": (_QWEN_CODER, _HERMES),
    "qwen3_5": (_QWEN_CODER,),
    "qwen3_5_moe": (_QWEN_CODER,),
    "llama": (_HERMES, ('"parameters": dictionary of argument name', "llama3_json")),
    "mistral": (("[TOOL_CALLS]", "mistral"),),
    "glm4_moe": (("<arg_key>", "glm45"),),
    "gpt_oss": (("<|channel|>", "openai"),),
    "granite": (("<|tool_call|>", "granite"),),
    "granitemoehybrid": (("<tool_call>", "granite4"),),
    "kimi_k2": (("<|tool_calls_section_begin|>", "kimi_k2"),),
    "minimax_m2": (("<minimax:tool_call>", "minimax_m2"),),
    "seed_oss": (("<seed:tool_call>", "seed_oss"),),
}
_AUTO = "auto"


def with_tool_parser(spec: ModelSpec, model: Model, chat_template: str | None) -> ModelSpec:
    """The section with the parser's name in place of `auto`. chat_template: see `input.chat_template`.

    Raises SpecError for a model whose parser is not known.
    """
    if spec.tool_parser != _AUTO:
        return spec
    kind = str(model.config.get("model_type"))
    templates = own_templates(pathlib.Path(model.tokenizer))
    template = templates.get(chat_template or "default", chat_template or "")
    for mark, parser in _PARSERS.get(kind, ()):
        if mark in template:
            return spec.model_copy(update={"tool_parser": parser})
    if kind in _PARSERS:
        marks = " or ".join(mark for mark, _ in _PARSERS[kind])
        why = f"whose chat template has no {marks}"
    else:
        why = f"of type {kind}"
    known = ", ".join(sorted(_PARSERS))
    raise SpecError(
        f"model.tool_parser: got auto, but the parser of '{model.name}', {why}, is not known; give vLLM's name of it. "
        f"Types of models with a known one: {known}"
    )
