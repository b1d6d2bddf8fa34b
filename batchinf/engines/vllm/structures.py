"""Structured outputs and reasoning parsers: what vLLM would refuse of them, and how it reads a finished text.

As a program, `python -m batchinf.engines.vllm.structures` reads a spec and a tokenizer's path as JSON and prints what
vLLM would refuse. It is a process of its own because vLLM takes 0.5 GB and writes into the environment. Run with vLLM
0.32.0; what it imports is in 0.26.0 too.
"""

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vllm import SamplingParams

import batchinf.tasks.registry  # noqa: F401  # it adds the tasks to the spec, for `main`
from batchinf.base.errors import BatchinfError, SpecError
from batchinf.base.text import error_message, one_line
from batchinf.engines.installed import importing
from batchinf.engines.vllm.names import optional
from batchinf.prompts.encoder import load_tokenizer
from batchinf.spec.job import JobSpec

_MOST_CHARS = 300
_MOST_CHECKED = 1024
_BACKENDS = "vllm.v1.structured_output.backend_"
# What compiles, by backend; all take SamplingParams.
_COMPILE = {
    "xgrammar": "validate_xgrammar_grammar",
    "guidance": "validate_guidance_grammar",
    "outlines": "validate_structured_output_request_outlines",
    "lm-format-enforcer": "validate_structured_output_request_lm_format_enforcer",
}


def compiled_by(structure: dict[str, Any], backend: str) -> str:
    """The backend that vLLM would take, once it has compiled the structure. Raises ValueError with all their reasons.

    backend: of vLLM's `structured_outputs_config`; `auto` is xgrammar, then guidance for what that cannot do, or
    outlines for schemas with features that guidance has not either.
    """
    wanted = ["xgrammar", _second_choice(structure)] if backend == "auto" else [backend]
    reasons = []
    for name in wanted:
        try:
            _compile(structure, name)
        except Exception as error:
            # Each library has exceptions of its own.
            reasons.append(f"{name}: {_words(error)}")
        else:
            return name
    raise ValueError("; ".join(reasons))


def _compile(structure: dict[str, Any], backend: str) -> None:
    if backend not in _COMPILE:
        raise ValueError(f"no such backend; must be auto, {', '.join(_COMPILE)}")
    module = _BACKENDS + backend.replace("-", "_")
    if (validate := optional(module, _COMPILE[backend], "structures are first compiled by the engine")) is not None:
        with importing("sampling.structured_outputs"):
            from vllm.sampling_params import StructuredOutputsParams
        validate(SamplingParams(structured_outputs=StructuredOutputsParams(**structure)))


def _second_choice(structure: dict[str, Any]) -> str:
    schema = structure.get("json")
    cost = "guidance is tried where outlines might be needed"
    is_beyond = optional(f"{_BACKENDS}guidance", "has_guidance_unsupported_json_features", cost, lambda _: False)
    return "outlines" if schema and is_beyond(json.loads(schema)) else "guidance"


def _words(error: Exception) -> str:
    said = [str(each) for each in (error, error.__cause__) if each is not None]
    text = said[0] if len(said) == 1 or said[1] in said[0] else ": ".join(said)
    text = re.sub(r"\[[\d:]+\] \S+:\d+: ", "", text)  # where xgrammar's own source raised it
    return one_line(text, _MOST_CHARS)


def matcher(structure: dict[str, Any]) -> Callable[[str], bool] | None:
    """Whether a text is whole by a regex or a grammar; None where xgrammar has no say.

    About 4 µs for a short text. Python's `re` has another dialect, and may take for ever over a text that was cut.
    """
    try:
        import xgrammar

        compiler = xgrammar.GrammarCompiler(xgrammar.TokenizerInfo([]), cache_enabled=False)
        compiled = compiler.compile_grammar(_grammar(structure))
    except Exception:
        return None

    def is_whole(text: str) -> bool:
        state = xgrammar.GrammarMatcher(compiled, terminate_without_stop_token=True)
        return bool(state.accept_string(text) and state.is_terminated())

    return is_whole


def _grammar(structure: dict[str, Any]) -> Any:
    import xgrammar

    if "regex" in structure:
        return xgrammar.Grammar.from_regex(structure["regex"])
    from vllm.v1.structured_output.utils import grammar_is_likely_lark

    text = structure["grammar"]
    return xgrammar.Grammar.from_lark(text) if grammar_is_likely_lark(text) else xgrammar.Grammar.from_ebnf(text)


def check_once() -> None:
    """Have vLLM check each structure at its first request, not at every one.

    On the thread that feeds the engine that is 0.5 to 3 ms a request: a schema is converted, a regex in a new thread.
    """
    check = getattr(SamplingParams, "_validate_structured_outputs", None)
    if check is None or getattr(check, "is_once", False):
        return
    checked: dict[int, Any] = {}

    def once(params: Any, *arguments: Any, **named: Any) -> None:
        structure = params.structured_outputs
        if structure is not None and checked.get(id(structure)) is structure:
            return
        check(params, *arguments, **named)
        if len(checked) >= _MOST_CHECKED:
            checked.clear()
        checked[id(structure)] = structure  # held, so that no other takes its id

    once.is_once = True  # type: ignore[attr-defined]
    SamplingParams._validate_structured_outputs = once


def tell_parser(engine: Any, template_kwargs: dict[str, Any]) -> None:
    """Have vLLM's core build its reasoning parser with these too, as its server does; from 0.32 on it can.

    Some parsers look for a thought only where `thinking` or `enable_thinking` says that there is one.
    """
    processor = getattr(engine, "input_processor", None)
    make = getattr(processor, "process_inputs", None)
    if make is None:
        return

    def made(*arguments: Any, **named: Any) -> Any:
        request = make(*arguments, **named)
        if hasattr(request, "reasoning_parser_kwargs"):
            request.reasoning_parser_kwargs = {"chat_template_kwargs": template_kwargs}
        return request

    processor.process_inputs = made  # type: ignore[union-attr]


def structure_problems(spec: JobSpec, tokenizer_path: str) -> tuple[list[list[str]], str]:
    """What vLLM would refuse, as [field, message] each; and the backend that compiled the structure."""
    found, backend = [], ""
    structure = spec.sampling.structured_outputs
    if structure is not None:
        [kind] = structure
        config = spec.engine.get("structured_outputs_config") or {}
        try:
            backend = compiled_by(structure, config.get("backend", "auto"))
        except ValueError as error:
            found.append([f"sampling.structured_outputs.{kind}", f"cannot be compiled: {error}"])
    if spec.model.reasoning_parser is not None:
        try:
            reasoner_of(spec, load_tokenizer(tokenizer_path, spec.model.trust_remote_code))
        except BatchinfError as error:
            field, _, message = str(error).partition(": ")
            found.append([field, message])
    return found, backend


def main() -> None:
    """Read from standard input, write the answer as the last line of standard output."""
    asked = json.load(sys.stdin)
    found, backend = structure_problems(JobSpec.model_validate_json(asked["spec"]), asked["tokenizer"])
    print("\n" + json.dumps({"problems": found, "backend": backend}))


_FIELD = "model.reasoning_parser"
# The end of a prompt in which a chat template has shut the thinking already, as it does with `enable_thinking: false`.
_TAIL_TOKENS = 32


class Reasoner:
    """One parser with one tokenizer. For one thread."""

    def __init__(
        self, name: str, tokenizer: Any, template_kwargs: Mapping[str, Any], plugin: str | None = None
    ) -> None:
        """plugin: a Python file with further parsers. Raises SpecError for a name or a tokenizer that does not do."""
        with importing(_FIELD):
            from vllm.reasoning import ReasoningParserManager
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


if __name__ == "__main__":
    main()
