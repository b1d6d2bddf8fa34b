"""Tool calls as vLLM's server has them: the structure that forces them, and their parsing from finished texts.

The engine takes the structures, and the writer reads the calls. Run with vLLM 0.32.0; 0.33.0 has the same
names.
"""

import contextlib
import copy
import functools
import json
import logging
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import batchinf.tasks.registry  # noqa: F401  # it adds the tasks to the spec
from batchinf.base.errors import SpecError
from batchinf.base.text import error_message, one_line
from batchinf.engines.installed import importing, structures_backend
from batchinf.engines.protocol import ParsedAnswer
from batchinf.engines.vllm.arguments import GUIDANCE
from batchinf.engines.vllm.structured_output.structures import TAIL_TOKENS, check_known, with_own
from batchinf.records import Request, ToolCall, Tools
from batchinf.spec.answer_schemas import objection
from batchinf.spec.job import JobSpec

FIELD = "model.tool_parser"
_GPT_OSS = "openai"  # vLLM's name of the parser for gpt-oss, whose texts have a format of their own
_MOST_REQUESTS = 1024
_MOST_CHARS = 300
# Kinds of structures under vLLM's names.
_KINDS = ("json", "regex", "choice", "grammar", "structural_tag")
_TAG = "structural_tag"
_LOGGERS = ("vllm.tool_parsers", "vllm.parser")


class CallParser:
    """One tool parser with one tokenizer, and the reasoning parser if the job has one. Not thread-safe."""

    def __init__(self, spec: JobSpec, tokenizer: Any) -> None:
        """Raises SpecError for an unknown name or an unsuitable tokenizer."""
        with importing(FIELD):
            from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
            from vllm.parser import ParserManager
            from vllm.tokenizers.hf import get_cached_tokenizer
            from vllm.tool_parsers import ToolParserManager
        name = spec.model.tool_parser or ""
        check_known(FIELD, name, {*ToolParserManager.tool_parsers, *ToolParserManager.lazy_parsers})
        if name == _GPT_OSS and spec.model.reasoning_parser is None:
            what = f"got {name} without model.reasoning_parser: it would drop the reasoning"
            raise SpecError(f"{FIELD}: {what}; add model.reasoning_parser: openai_gptoss")
        # A copy: a tokenizer that encodes on another thread meanwhile fails with "Already borrowed". Cached, because
        # the parser of each text reads the vocabulary.
        self._tokenizer = get_cached_tokenizer(copy.deepcopy(tokenizer))
        self._backend = structures_backend(spec.engine)
        self._template_kwargs = dict(spec.input.chat_template_kwargs or {})
        self._request_class = ChatCompletionRequest
        self._adjusted = functools.lru_cache(_MOST_REQUESTS)(self._adjust)
        self._structure = functools.lru_cache(_MOST_REQUESTS)(self._make_structure)
        self._is_gpt_oss = name == _GPT_OSS
        compose = functools.partial(
            ParserManager.get_parser, tool_parser_name=name, enable_auto_tools=True, is_harmony=self._is_gpt_oss
        )
        try:
            self._whole: Any = _apart(compose(reasoning_parser_name=spec.model.reasoning_parser))
            # For texts whose thinking the prompt has closed.
            self._only_calls: Any = _apart(compose(reasoning_parser_name=None))
            self._made(self._whole, [])
        except Exception as error:
            # The parser's own, of any type.
            reason = error_message(error)
            raise SpecError(f"{FIELD}: '{name}' does not go with this model's tokenizer: {reason}") from error
        self._errors = _errors()

    def _made(self, parser: Any, tools: Sequence[Any], own: str | None = None) -> Any:
        """A new parser of vLLM's: each keeps the state of one text. own: see `Request.template_kwargs`."""
        variables = with_own(self._template_kwargs, own)
        return parser(self._tokenizer, list(tools), chat_template_kwargs=variables, model_config=None)

    def _adjust(self, tools: Tools, structure: str | None, template_kwargs: str | None) -> Any:
        """vLLM's request for these tools, as its server changes it. structure: the text's own, as JSON text.

        Raises what vLLM raises.
        """
        functions = json.loads(tools.functions)
        choice: Any = tools.choice
        if tools.choice == "named":
            choice = {"type": "function", "function": {"name": tools.name}}
        request = self._request_class(
            messages=[],
            model="",
            tools=functions,
            tool_choice=choice,
            parallel_tool_calls=tools.are_parallel,
            chat_template_kwargs=with_own(self._template_kwargs, template_kwargs),
            structured_outputs=None if structure is None else json.loads(structure),
        )
        return self._made(self._whole, request.tools, template_kwargs).adjust_request(request)

    def structure(
        self, tools: Tools, own: dict[str, Any] | None, template_kwargs: str | None = None
    ) -> dict[str, Any] | None:
        """The structure for texts that may call these tools; None if they are free. own: the text's own structure.

        Raises ValueError if vLLM refuses the tools, or if the job's backend cannot force calls.
        """
        return self._structure(tools, None if own is None else json.dumps(own), template_kwargs)

    def _make_structure(self, tools: Tools, own: str | None, template_kwargs: str | None) -> dict[str, Any] | None:
        try:
            request = self._adjusted(tools, own, template_kwargs)
        except Exception as error:
            # Pydantic's, vLLM's and xgrammar's own.
            raise ValueError(f"vLLM refuses the tools: {one_line(error_message(error), _MOST_CHARS)}") from error
        found = _structure_in(request)
        if own is not None and found == json.loads(own):
            return found
        if found is not None and "json" in found and (problem := objection(found["json"])) is not None:
            raise ValueError(f"the parameters are no JSON schema that texts can be checked against: {problem}")
        if found is not None and _TAG in found and self._backend == GUIDANCE:
            raise ValueError(
                "the backend guidance cannot hold a text to this parser's calls; set "
                "engine.structured_outputs_config: {backend: xgrammar}"
            )
        return found

    def keeps_special_tokens(self, request: Request) -> bool:
        """Whether the parser reads the text with its special tokens."""
        return not self._asked(request).skip_special_tokens

    def _asked(self, request: Request) -> Any:
        assert request.tools is not None
        return self._adjusted(request.tools, None, request.template_kwargs)

    def read(self, asked: Request, text: str, token_ids: Sequence[int]) -> ParsedAnswer:
        """The reasoning, the calls and the text beside them. token_ids: of the output. Raises what the parser raises.

        Parsers log most of their own exceptions and return the text as if it had no call; the answer then has the line
        as its problem.
        """
        tools = self._asked(asked).tools
        own = asked.template_kwargs
        parser = self._made(self._whole, tools, own)
        with self._errors.heard() as lines:
            answer = self._parsed(parser, asked, text, token_ids)
            tail = list(asked.prompt_token_ids[-TAIL_TOKENS:])
            is_closed = not self._is_gpt_oss and parser.is_reasoning_end(tail)  # its prompts never close the thinking
            if answer.text is None and not answer.calls and text and is_closed:
                parser = self._made(self._only_calls, tools, own)
                answer = self._parsed(parser, asked, text, token_ids)
        mark = next((mark for mark in _marks(parser) if mark in (answer.whole or "")), None)
        if mark is not None and not answer.calls:
            lines.append(f"it found no call in the text, which has a {mark}")
        return replace(answer, problem=one_line("; ".join(lines), _MOST_CHARS) or None)

    def _parsed(self, parser: Any, asked: Request, text: str, token_ids: Sequence[int]) -> ParsedAnswer:
        request = self._asked(asked)
        if hasattr(parser, "set_prompt_token_ids"):  # from 0.32 on
            parser.set_prompt_token_ids(list(asked.prompt_token_ids))
        whole: str | None = text
        # That of gpt-oss only knows where the reasoning ends; its marks stay in the whole text.
        if hasattr(parser, "extract_reasoning") and parser.reasoning_parser is not None and not self._is_gpt_oss:
            again = self._made(self._whole, request.tools, asked.template_kwargs)
            _, whole = again.extract_reasoning(text, request)
        reasoning, content, calls = parser.parse(
            text, request, enable_auto_tools=True, model_output_token_ids=list(token_ids)
        )
        found = tuple(ToolCall(call.id or "", call.name, call.arguments) for call in calls or ())
        if found:
            content = content or None
        elif not whole:  # some parsers make null of an empty text
            content = whole
        return ParsedAnswer(reasoning=reasoning, text=content, calls=found, whole=whole)


def _apart(parser: Any) -> Any:
    """A class with the parts of a composed parser. vLLM puts those of gpt-oss on a class that all of them share."""
    names = ("reasoning_parser_cls", "tool_parser_cls", "tool_strict_level")
    return type(parser.__name__, (parser,), {name: getattr(parser, name) for name in names if hasattr(parser, name)})


def _structure_in(request: Any) -> dict[str, Any] | None:
    """The structure that a request of vLLM's asks for, by its kind."""
    extract = getattr(request, "extract_structured_outputs", None)  # from 0.32 on
    params = request.structured_outputs if extract is None else extract()
    if params is None:
        return None
    if getattr(params, "json_object", None):
        return {"json": json.dumps({"type": "object"})}
    for kind in _KINDS:
        value = getattr(params, kind, None)
        if value is not None:
            return {kind: json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else value}
    return None


def _marks(parser: Any) -> Iterator[str]:
    """The marks that begin a call, as far as the parser says so. Parsers of vLLM's parser engine drop cut-off calls."""
    tool_parser = getattr(parser, "tool_parser", None)
    config = getattr(getattr(tool_parser, "_parser_engine", None), "parser_engine_config", None)
    for name, mark in (getattr(config, "terminals", None) or {}).items():
        if name.startswith("TOOL") and name.endswith(("_START", "_CALLS", "_TOKEN")):
            yield from (mark,) if isinstance(mark, str) else mark


class _Errors(logging.Handler):
    """Hears the errors that vLLM's parsers only log, in the thread that parses. Other lines go to vLLM's log."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self._heard = threading.local()
        for name in _LOGGERS:
            logger = logging.getLogger(name)
            logger.addHandler(self)
            logger.propagate = False
            # Errors must come here even if vLLM's log is to have none.
            if logger.getEffectiveLevel() > logging.ERROR:
                logger.setLevel(logging.ERROR)

    def emit(self, record: logging.LogRecord) -> None:
        heard: list[str] | None = getattr(self._heard, "lines", None)
        if heard is None or record.levelno < logging.ERROR:
            logging.getLogger("vllm").handle(record)
            return
        error = record.exc_info[1] if record.exc_info else None
        heard.append(record.getMessage() if error is None else f"{type(error).__name__}: {error}")

    @contextlib.contextmanager
    def heard(self) -> Iterator[list[str]]:
        """A list of the errors that parsers log in this block."""
        lines: list[str] = []
        self._heard.lines = lines
        try:
            yield lines
        finally:
            self._heard.lines = None


# One for the process: each handler gets all lines.
_errors = functools.cache(_Errors)
