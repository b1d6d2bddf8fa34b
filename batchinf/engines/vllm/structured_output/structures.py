"""Structured outputs and reasoning parsers: finds the ones that vLLM would refuse, and reads finished texts like vLLM.

What it compiles serves these checks alone. For the requests, vLLM compiles each structure in its engine process.

As a program, `python -m batchinf.engines.vllm.structured_output.structures` reads a spec and a tokenizer's path as JSON
and prints the problems. It runs in its own process because vLLM takes 0.5 GB and changes environment variables. Run
with vLLM 0.32.0.
"""

import copy
import functools
import importlib
import json
import re
import sys
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from vllm import SamplingParams

import batchinf.tasks.registry  # noqa: F401  # it adds the tasks to the spec, for `main`
from batchinf.base.errors import BatchinfError, SpecError
from batchinf.base.text import error_message, one_line
from batchinf.engines.installed import importing, structures_backend
from batchinf.engines.vllm.arguments import GUIDANCE, for_backend
from batchinf.engines.vllm.structured_output import guidance
from batchinf.engines.vllm.structured_output.guidance import relaxed
from batchinf.prompts.encoder import load_tokenizer
from batchinf.records import Request
from batchinf.spec.job import JobSpec
from batchinf.spec.sampling import SamplingSpec

_MOST_CHARS = 300
_BACKENDS = "vllm.v1.structured_output.backend_"
# The function that compiles a structure, by backend. All take SamplingParams.
_COMPILE = {
    "xgrammar": "validate_xgrammar_grammar",
    "guidance": "validate_guidance_grammar",
    "outlines": "validate_structured_output_request_outlines",
    "lm-format-enforcer": "validate_structured_output_request_lm_format_enforcer",
}


def compiled_by(structure: dict[str, Any], backend: str) -> str:
    """Compile the structure; returns the backend that vLLM would use. Raises ValueError with each backend's reason.

    backend: from vLLM's `structured_outputs_config`. `auto` tries xgrammar first, then guidance, or outlines if the
    schema has features that guidance does not support.
    """
    wanted = ["xgrammar", _second_choice(structure)] if backend == "auto" else [backend]
    reasons = []
    for name in wanted:
        try:
            _compile(structure, name)
        except Exception as error:
            # Each library has its own exceptions.
            reasons.append(f"{name}: {_words(error)}")
        else:
            return name
    raise ValueError("; ".join(reasons))


def _compile(structure: dict[str, Any], backend: str) -> None:
    if backend not in _COMPILE:
        raise ValueError(f"no such backend; must be auto, {', '.join(_COMPILE)}")
    module = _BACKENDS + backend.replace("-", "_")
    structure = for_backend(structure, backend)
    with importing("sampling.structured_outputs"):
        from vllm.sampling_params import StructuredOutputsParams
    validate = getattr(importlib.import_module(module), _COMPILE[backend])
    validate(SamplingParams(structured_outputs=StructuredOutputsParams(**structure)))


def _second_choice(structure: dict[str, Any]) -> str:
    from vllm.v1.structured_output.backend_guidance import has_guidance_unsupported_json_features

    schema = structure.get("json")
    return "outlines" if schema and has_guidance_unsupported_json_features(json.loads(schema)) else "guidance"


def _words(error: Exception) -> str:
    said = [str(each) for each in (error, error.__cause__) if each is not None]
    text = said[0] if len(said) == 1 or said[1] in said[0] else ": ".join(said)
    text = re.sub(r"\[[\d:]+\] \S+:\d+: ", "", text)  # the place in xgrammar's source that raised it
    return one_line(text, _MOST_CHARS)


def matcher(structure: dict[str, Any], backend: str) -> Callable[[str], bool] | None:
    """A function that says whether a text matches a whole regex, grammar or structural tag; None if none can be made.

    It is the backend's own: Python's `re` has another dialect. outlines and lm-format-enforcer have none, but their
    regexes are those of guidance. A call takes 4 to 70 µs for a short text.
    """
    [(kind, text)] = structure.items()
    try:
        if backend not in ("auto", "xgrammar"):
            return guidance.matcher(kind, text)
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
    if "structural_tag" in structure:
        return xgrammar.Grammar.from_structural_tag(structure["structural_tag"])
    from vllm.v1.structured_output.utils import grammar_is_likely_lark

    text = structure["grammar"]
    return xgrammar.Grammar.from_lark(text) if grammar_is_likely_lark(text) else xgrammar.Grammar.from_ebnf(text)


def check_once() -> None:
    """Make vLLM check each structure only at its first request.

    A check takes 0.5 to 3 ms on the thread that feeds the engine: vLLM converts a schema, or a regex in a new thread.
    """
    check = getattr(SamplingParams, "_validate_structured_outputs", None)
    if check is None or getattr(check, "is_once", False):
        return
    checked: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()  # by id

    def once(params: Any, *arguments: Any, **named: Any) -> None:
        structure = params.structured_outputs
        if structure is not None and checked.get(id(structure)) is structure:
            return
        check(params, *arguments, **named)
        if structure is not None:
            checked[id(structure)] = structure

    once.is_once = True  # type: ignore[attr-defined]
    SamplingParams._validate_structured_outputs = once


def tell_parser(engine: Any, variables: Mapping[str, Any] | None) -> Callable[[str | None], None]:
    """Make vLLM's core build its reasoning parser with variables of the chat template, as its server does.

    Some parsers look for thinking only if `thinking` or `enable_thinking` is set. variables: the job's. Returns a
    function that gets the `Request.template_kwargs` of the next request. Needs vLLM 0.32.
    """
    next_one: dict[str, Any] = {}

    def tell(own: str | None) -> None:
        next_one["chat_template_kwargs"] = with_own(variables, own)

    processor = getattr(engine, "input_processor", None)
    make = getattr(processor, "process_inputs", None)
    if make is None:
        print("this vLLM may not give its reasoning parser the variables of the chat template", flush=True)
        return tell

    def made(*arguments: Any, **named: Any) -> Any:
        request = make(*arguments, **named)
        if hasattr(request, "reasoning_parser_kwargs") and next_one.get("chat_template_kwargs"):
            request.reasoning_parser_kwargs = dict(next_one)
        return request

    processor.process_inputs = made  # type: ignore[union-attr]
    return tell


def with_own(variables: Mapping[str, Any] | None, own: str | None) -> dict[str, Any]:
    """The variables of a row's chat template. variables: the job's. own: see `Request.template_kwargs`."""
    return {**(variables or {}), **json.loads(own or "{}")}


def _answer(spec: JobSpec, tokenizer_path: str) -> dict[str, Any]:
    """What `main` prints.

    problems: why vLLM would refuse the spec, as [field, message] each. backend: of the structure. left_out: keywords of
    a schema that the backend does not enforce, as far as it says so.
    """
    problems = _parser_problems(spec, tokenizer_path)
    backend = ""
    keywords: tuple[str, ...] = ()
    structure = spec.sampling.structured_outputs
    if structure is not None:
        [kind] = structure
        try:
            backend = compiled_by(structure, structures_backend(spec.engine))
            if backend == GUIDANCE and kind == "json":
                keywords = relaxed(structure["json"])[1]
        except ValueError as error:
            problems.insert(0, [f"sampling.structured_outputs.{kind}", f"cannot be compiled: {error}"])
    return {"problems": problems, "backend": backend, "left_out": keywords}


def _parser_problems(spec: JobSpec, tokenizer_path: str) -> list[list[str]]:
    """Why the parsers do not go with the tokenizer, as [field, message] each."""
    from batchinf.engines.vllm.structured_output.tools import CallParser

    problems = []
    for name, make in ((spec.model.reasoning_parser, reasoner_of), (spec.model.tool_parser, CallParser)):
        try:
            if name is not None:
                make(spec, load_tokenizer(tokenizer_path, spec.model.trust_remote_code))
        except BatchinfError as error:
            field, _, message = str(error).partition(": ")
            problems.append([field, message])
    return problems


def main() -> None:
    """Read from standard input, write the answer as the last line of standard output."""
    asked = json.load(sys.stdin)
    print("\n" + json.dumps(_answer(JobSpec.model_validate_json(asked["spec"]), asked["tokenizer"])))


_FIELD = "model.reasoning_parser"
# Tokens at a prompt's end that may hold the end of the thinking. A chat template closes it in the prompt with
# `enable_thinking: false`.
TAIL_TOKENS = 32
_MOST_PARSERS = 64
_GPT_OSS = "openai_gptoss"
_HARMONY_MARK = "<|message|>"
_HARMONY_TRIAL = "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b<|return|>"


class VllmReasoner:
    """One reasoning parser with one tokenizer. Not thread-safe. Implements `replica.answers.Reasoner`."""

    def __init__(
        self, name: str, tokenizer: Any, template_kwargs: Mapping[str, Any], plugin: str | None = None
    ) -> None:
        """template_kwargs: the job's variables of the chat template. plugin: a Python file with more parsers.

        Raises SpecError for an unknown name or an unsuitable tokenizer.
        """
        with importing(_FIELD):
            from vllm.reasoning import ReasoningParserManager
        if plugin:
            ReasoningParserManager.import_reasoning_parser(plugin)
        check_known(_FIELD, name, {*ReasoningParserManager.reasoning_parsers, *ReasoningParserManager.lazy_parsers})
        self._template_kwargs = dict(template_kwargs)
        self._made = functools.lru_cache(_MOST_PARSERS)(self._make)
        try:
            # A copy: a tokenizer that encodes on another thread meanwhile fails with "Already borrowed".
            self._tokenizer = copy.deepcopy(tokenizer)
            self._class = ReasoningParserManager.get_reasoning_parser(name)
            # Makes vLLM's whole parser for gpt-oss, whose reasoning parser only finds where the structure begins. Each
            # parser keeps the state of one text.
            self._whole = None
            if name == _GPT_OSS:
                from vllm.parser.harmony import HarmonyParser

                harmony = type("Harmony", (HarmonyParser,), {"reasoning_parser_cls": self._class})
                self._whole = functools.partial(harmony, tokenizer)
            self._vocabulary = tokenizer.get_vocab()
            self._try(tokenizer)
        except Exception as error:
            reason = error_message(error)
            raise SpecError(f"{_FIELD}: '{name}' does not go with this model's tokenizer: {reason}") from error

    def _try(self, tokenizer: Any) -> None:
        """Split a trial text. Raises what the parser raises, and ValueError for a tokenizer without its marks."""
        parser, _ = self._made(None)
        start, end = (getattr(parser, f"reasoning_{place}_str", None) or "" for place in ("start", "end"))
        # Parsers of vLLM's parser engine look for the mark's token, and do not say that there is none.
        if end and not getattr(parser, "reasoning_end_token_ids", True) and end not in self._vocabulary:
            raise ValueError(f"the tokenizer has no token {end}, with which the reasoning ends")
        trial = f"{start}a{end}b" if self._whole is None else _HARMONY_TRIAL
        token_ids = tokenizer(trial, add_special_tokens=False)["input_ids"]
        found = self.split(Request(0, 0, [], SamplingSpec()), trial, token_ids)
        if self._whole is not None and found != ("a", "b"):
            raise ValueError(f"it splits the trial text {trial} into {found}; it needs the tokens of gpt-oss")

    def _make(self, own: str | None) -> tuple[Any, Any]:
        """The parser for a row's variables, and the request that it gets. own: see `Request.template_kwargs`."""
        variables = with_own(self._template_kwargs, own)
        return self._class(self._tokenizer, chat_template_kwargs=variables), _request(variables)

    def split(self, request: Request, text: str, token_ids: Sequence[int]) -> tuple[str | None, str | None]:
        """The reasoning and the answer. The answer is None if the text ended inside the reasoning.

        token_ids: of the output.
        """
        if self._whole is not None:
            # With a structure, the engine lets the model write no marks, and all of the text is the answer.
            if self._vocabulary.get(_HARMONY_MARK) not in token_ids:
                return None, text
            reasoning, answer, _ = self._whole().parse("", _request({}), model_output_token_ids=token_ids)
            return reasoning, answer
        parser, given = self._made(request.template_kwargs)
        reasoning, answer = parser.extract_reasoning(text, given)
        if answer is None and text and parser.is_reasoning_end(list(request.prompt_token_ids[-TAIL_TOKENS:])):
            return None, text
        return reasoning, answer

    def num_tokens(self, request: Request, reasoning: str | None, token_ids: Sequence[int]) -> int | None:
        """The tokens of the reasoning of an output, without its marks. None: the parser cannot count them.

        Some of vLLM's parsers count between two marks, so a mark that begins the reasoning in the prompt is put before
        the output. Parsers that do not count say 0. That of gpt-oss also counts the tokens of calls.
        """
        if self._whole is not None:
            return int(self._whole().count_reasoning_tokens([*token_ids]))
        if not reasoning:
            return 0
        parser, _ = self._made(request.template_kwargs)
        number: int = parser.count_reasoning_tokens([*token_ids])
        mark = self._vocabulary.get(getattr(parser, "reasoning_start_str", None) or "")
        if not number and mark is not None:
            number = parser.count_reasoning_tokens([mark, *token_ids])
        return number or None


def reasoner_of(spec: JobSpec, tokenizer: Any) -> VllmReasoner:
    """The parser of a spec's reasoning."""
    plugin = spec.engine.get("reasoning_parser_plugin")
    return VllmReasoner(spec.model.reasoning_parser or "", tokenizer, spec.input.chat_template_kwargs or {}, plugin)


def check_known(field: str, name: str, known: Collection[str]) -> None:
    """Raise SpecError for the name of a parser that vLLM does not have."""
    if name not in known:
        raise SpecError(f"{field}: got '{name}'; the installed vLLM has {', '.join(sorted(known))}")


def _request(template_kwargs: dict[str, Any]) -> Any:
    # The second argument of `extract_reasoning`. Few parsers use it.
    try:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    except ImportError:  # other versions may have it in another module
        return None
    return ChatCompletionRequest(messages=[], model="", chat_template_kwargs=template_kwargs)


if __name__ == "__main__":
    main()
