"""Reads the completions of results for the writer: decodes tokens, splits off reasoning, checks structured outputs."""

import copy
import functools
import json
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, Protocol

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from batchinf.base.errors import RowError
from batchinf.base.text import clip, counted, one_line
from batchinf.engines.installed import structures_backend
from batchinf.records import Completion, Request, Result
from batchinf.replica.calls import Parser, call_error, finish_reason, with_ids
from batchinf.spec.job import JobSpec
from batchinf.spec.sampling import SamplingSpec

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


class Reasoner(Protocol):
    """vLLM's parser of one model's reasoning. token_ids: of the output. Methods may raise anything."""

    def split(self, request: Request, text: str, token_ids: Sequence[int], /) -> tuple[str | None, str | None]:
        """The reasoning and the answer; either may be None."""

    def num_tokens(self, request: Request, reasoning: str | None, token_ids: Sequence[int], /) -> int | None:
        """The tokens of the reasoning; None if it cannot count them."""


class Answers:
    """Reads the answers in completions by one job's rules. For one thread."""

    def __init__(
        self,
        spec: JobSpec,
        tokenizer: Any,
        detokenizer: "Detokenizer | None",
        *,
        reasoner: Reasoner | None = None,
        call_parser: Parser | None = None,
        matcher: Matcher | None = None,
        job_id: str = "",
    ) -> None:
        """detokenizer: None for tasks without text. reasoner: for a job with a reasoning parser. call_parser: for one
        with a tool parser. matcher: as `Matcher`. job_id: enters the ids of calls.
        """
        self._detokenizer = detokenizer
        self._sampling = spec.sampling
        self._reasoner = reasoner
        self._call_parser = call_parser
        self._job_id = job_id
        self._special: re.Pattern[str] | None = None
        self._special_ids: frozenset[int] = frozenset()
        # Parsers must see special tokens: the marks around reasoning and calls may be among them.
        self._with_marks = spec.sampling.model_copy(update={"skip_special_tokens": False})
        if (reasoner is not None or call_parser is not None) and spec.sampling.skip_special_tokens:
            tokens = _special_tokens(tokenizer)
            self._special_ids = frozenset(tokens)
            longest_first = sorted(tokens.values(), key=len, reverse=True)
            self._special = re.compile("|".join(map(re.escape, longest_first))) if tokens else None
        self._checks = StructureChecks(matcher)

    def read(self, results: Sequence[Result]) -> list[Result]:
        """These results, in order, with the texts of their completions."""
        if self._detokenizer is None:
            return list(results)
        completions = [result.completion for result in results if result.completion is not None]
        plain = [completion for completion in completions if not self._is_parsed(completion)]
        parsed = [completion for completion in completions if self._is_parsed(completion)]
        plain_texts = iter(self._detokenizer.decode(plain, self._sampling))
        parsed_texts = iter(self._detokenizer.decode(parsed, self._with_marks))
        return [
            result
            if (completion := result.completion) is None
            else self._read(result, completion, next(parsed_texts if self._is_parsed(completion) else plain_texts))
            for result in results
        ]

    def _is_parsed(self, completion: Completion) -> bool:
        return self._reasoner is not None or self._has_tools(completion)

    def _has_tools(self, completion: Completion) -> bool:
        return self._call_parser is not None and completion.request.tools is not None

    def _read(self, result: Result, completion: Completion, whole: str) -> Result:
        structure = completion.request.sampling.structured_outputs
        if completion.finish_reason == "error":
            error = RowError("refused", f"vLLM ended the request: {completion.stop_reason}")
            return replace(result, text=whole or None, error=error)
        if self._has_tools(completion):
            return self._read_calls(result, completion, whole)
        if self._reasoner is None and structure is None:
            # Nearly all results are so. `replace` would take 4 µs of each, this takes 1.6 µs.
            return Result(
                prompt=result.prompt,
                request_index=result.request_index,
                num_requests=result.num_requests,
                completion=completion,
                text=whole,
                error=None,
                attempts=result.attempts,
            )
        text: str | None = whole
        reasoning = None
        num_tokens = None
        if self._reasoner is not None:
            try:
                reasoning, text = self._reasoner.split(completion.request, whole, completion.token_ids.tolist())
                num_tokens = self._num_tokens(reasoning, completion)
            except Exception as failure:
                # The parser is vLLM's or a plugin, and may raise anything for a model's text.
                words = one_line(f"{type(failure).__name__}: {failure}", 300)
                error = RowError("reasoning_error", f"the reasoning parser failed: {words}")
                return replace(result, text=whole, error=error)
            reasoning = self._stripped(reasoning, completion)
            text = self._stripped(text, completion)
        breach = None if structure is None else self._checks.error(structure, text, completion)
        return replace(result, text=text, reasoning=reasoning, error=breach, num_reasoning_tokens=num_tokens)

    def _num_tokens(self, reasoning: str | None, completion: Completion) -> int | None:
        """Tokens of the reasoning. Raises what the parser raises."""
        if self._reasoner is None:
            return None
        return self._reasoner.num_tokens(completion.request, reasoning, completion.token_ids.tolist())

    def _read_calls(self, result: Result, completion: Completion, whole: str) -> Result:
        request = completion.request
        parser = self._call_parser
        assert parser is not None
        try:
            text = whole if parser.keeps_special_tokens(request) else self._stripped(whole, completion) or ""
            parsed = parser.read(request, text, completion.token_ids.tolist())
            parsed = with_ids(parsed, request, text, self._job_id)
            num_tokens = self._num_tokens(parsed.reasoning, completion)
        except Exception as failure:
            # As of a reasoning parser.
            words = one_line(f"{type(failure).__name__}: {failure}", 300)
            error = RowError("invalid_tool_call", f"the tool parser failed: {words}")
            return replace(result, text=whole, error=error)
        reasoning = self._stripped(parsed.reasoning, completion)
        result = replace(result, reasoning=reasoning, num_reasoning_tokens=num_tokens)
        breach = call_error(
            completion, parsed, lambda structure, answer: self._checks.error(structure, answer, completion)
        )
        if breach is not None:
            return replace(result, text=self._stripped(parsed.whole, completion), error=breach)
        return replace(
            result,
            completion=replace(completion, finish_reason=finish_reason(completion, parsed)),
            text=self._stripped(parsed.text, completion),
            tool_calls=parsed.calls or None,
        )

    def _stripped(self, text: str | None, completion: Completion) -> str | None:
        if not text or self._special is None or self._special_ids.isdisjoint(completion.token_ids.tolist()):
            return text
        return self._special.sub("", text)


def _special_tokens(tokenizer: Any) -> dict[int, str]:
    """The tokens that are left out of a text, by id."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    tokens = {token_id: str(token.content) for token_id, token in added.items() if token.special}
    tokens |= dict(zip(tokenizer.all_special_ids, map(str, tokenizer.all_special_tokens), strict=True))
    return {token_id: token for token_id, token in tokens.items() if token}


# -- tokens to text ----------------------------------------------------------------------------------------------------

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# Tokens at a prompt's end that are searched for a safe place to begin decoding.
_TAIL_TOKENS = 16
# vLLM's INITIAL_INCREMENTAL_DETOKENIZATION_OFFSET, for tokenizers written in Python.
_SLOW_OFFSET = 5


class Detokenizer:
    """Decodes with one tokenizer of transformers, fast (Rust) or slow (Python)."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._backend: Tokenizer | None = None
        self._anchors: frozenset[int] | None = None
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if isinstance(backend, Tokenizer):
            # A copy: if one tokenizer encodes on another thread meanwhile, it fails with "Already borrowed".
            self._backend = copy.deepcopy(backend)
            self._anchors = _anchors(self._backend) if _decodes_locally(self._backend) else None

    def decode(self, completions: Sequence[Completion], sampling: SamplingSpec) -> list[str]:
        """Text of each completion. Completions that the engine decoded (stop strings) keep their text."""
        left = [completion for completion in completions if completion.text is None]
        pairs = [(completion.request.prompt_token_ids, _text_token_ids(completion, sampling)) for completion in left]
        decoded = iter(self._decode(pairs, sampling.skip_special_tokens))
        return [next(decoded) if completion.text is None else completion.text for completion in completions]

    def _decode(self, pairs: list[tuple[list[int], list[int]]], skip_special: bool) -> list[str]:
        if self._backend is None:
            return [_replay_slow(self._tokenizer, prompt, output, skip_special) for prompt, output in pairs]
        if self._anchors is None:
            return [_replay(self._backend, prompt, output, skip_special) for prompt, output in pairs]
        return self._decode_batch(self._backend, pairs, self._anchors, skip_special)

    def _decode_batch(
        self, backend: Tokenizer, pairs: list[tuple[list[int], list[int]]], anchors: frozenset[int], skip_special: bool
    ) -> list[str]:
        """The text after the context's text, if that equals vLLM's stream; else a replay of the stream.

        With a decoder of `_decodes_locally`, a token's text depends on its neighbours only (a) if it is the first
        token decoded, or (b) if it is a byte of a character. For (a), the context begins with an ordinary token, so no
        output token is the first. For (b), text without U+FFFD has only whole characters; the stream then cuts at
        character ends and holds nothing back. If the context does not end with U+FFFD, the prompt too ends with a whole
        character. Otherwise the stream would return text of the prompt, or start anew.
        """
        contexts = [_context(prompt, anchors) for prompt, _ in pairs]
        before = backend.decode_batch(contexts, skip_special)
        whole = backend.decode_batch(
            [context + output for context, (_, output) in zip(contexts, pairs, strict=True)], skip_special
        )
        texts = []
        for (prompt, output), prefix, text in zip(pairs, before, whole, strict=True):
            is_same = text.startswith(prefix) and not prefix.endswith(_REPLACEMENT)
            is_same = is_same and _REPLACEMENT not in text[len(prefix) :]
            texts.append(text[len(prefix) :] if is_same else _replay(backend, prompt, output, skip_special))
        return texts


def _text_token_ids(completion: Completion, sampling: SamplingSpec) -> list[int]:
    """The output tokens that make text: without the token that stopped it, such as the end-of-sequence token."""
    token_ids: list[int] = completion.token_ids.tolist()
    if completion.finish_reason == "stop" and not sampling.include_stop_str_in_output:
        token_ids.pop()
    return token_ids


def _context(prompt: list[int], anchors: frozenset[int]) -> list[int]:
    """The prompt's end from an ordinary token on; the whole prompt if there is none."""
    tail = prompt[-_TAIL_TOKENS:]
    for index, token_id in enumerate(tail):
        if token_id in anchors:
            return tail[index:]
    return prompt


def _anchors(backend: Tokenizer) -> frozenset[int]:
    """Ids of ordinary tokens: those that are never skipped and are no single byte."""
    added = backend.get_added_tokens_decoder()
    vocabulary = backend.get_vocab(with_added_tokens=False)
    return frozenset(
        token_id
        for token, token_id in vocabulary.items()
        if token_id not in added and token and not (len(token) == 6 and token.startswith("<0x"))
    )


def _decodes_locally(backend: Tokenizer) -> bool:
    """Whether a token's text depends only on being the first and on adjacent bytes: see `_decode_batch`.

    True for the decoders of Llama 3, Qwen and GPT (ByteLevel), of Llama 2, Mistral and Gemma (spaces, bytes, and at
    most one leading space stripped), of T5 (Metaspace) and of BERT (WordPiece).
    """
    decoder = json.loads(backend.to_str())["decoder"]
    if decoder is None or decoder["type"] in ("ByteLevel", "Metaspace", "WordPiece"):
        return decoder is not None
    if decoder["type"] != "Sequence":
        return False
    parts = decoder["decoders"]
    names = [part["type"] for part in parts]
    if names not in (["Replace", "ByteFallback", "Fuse"], ["Replace", "ByteFallback", "Fuse", "Strip"]):
        return False
    puts_spaces = parts[0]["pattern"] == {"String": "▁"} and parts[0]["content"] == " "
    strip = parts[-1] if names[-1] == "Strip" else {"start": 0, "stop": 0}
    return puts_spaces and strip["start"] <= 1 and strip["stop"] == 0


def _replay(backend: Tokenizer, prompt: list[int], output: list[int], skip_special: bool) -> str:
    """The text by vLLM's FastIncrementalDetokenizer, 0.32 and 0.33."""
    stream = DecodeStream(ids=prompt, skip_special_tokens=skip_special)
    pieces = []
    for token_id in output:
        try:
            piece = stream.step(backend, token_id)
        except Exception as error:  # tokenizers raises a bare Exception
            if not str(error).startswith("Invalid prefix encountered"):
                raise
            stream = DecodeStream(skip_special_tokens=skip_special)
            piece = stream.step(backend, token_id)
        pieces.append(piece or "")
    return "".join(pieces)


def _replay_slow(tokenizer: Any, prompt: list[int], output: list[int], skip_special: bool) -> str:
    """The text by vLLM's SlowIncrementalDetokenizer, 0.32 and 0.33, for tokenizers written in Python."""
    added = frozenset(tokenizer.get_added_vocab())
    skipped = frozenset(tokenizer.all_special_tokens if skip_special else ())
    tokens = _tokens(tokenizer, prompt[-_SLOW_OFFSET - 2 :], skip_special)
    read = len(tokens)
    prefix = max(read - _SLOW_OFFSET, 0)
    size = len(tokenizer)
    pieces = []
    for token_id in output:
        tokens += _tokens(tokenizer, [token_id], skip_special) if token_id < size else [""]
        before = _slow_text(tokenizer, tokens[prefix:read], added, skipped)
        text = _slow_text(tokenizer, tokens[prefix:], added, skipped)
        if len(text) > len(before) and not text.endswith(_REPLACEMENT):
            pieces.append(text[len(before) :])
            prefix = read
            read = len(tokens)
    return "".join(pieces)


def _tokens(tokenizer: Any, token_ids: list[int], skip_special: bool) -> list[str]:
    tokens = tokenizer.convert_ids_to_tokens(token_ids, skip_special_tokens=skip_special)
    return ["" if token is None else token for token in tokens]


def _slow_text(tokenizer: Any, tokens: list[str], added: frozenset[str], skipped: frozenset[str]) -> str:
    """The text of tokens. Added tokens are not decoded, and spaces separate them from the rest."""
    if not added:
        return str(tokenizer.convert_tokens_to_string(tokens))
    kept = [token for token in tokens if token not in skipped]
    texts: list[str] = []
    for is_added, group in groupby(kept, added.__contains__):
        run = list(group)
        texts += run if is_added else [tokenizer.convert_tokens_to_string(run)]
    return " ".join(texts)


# -- structured outputs ------------------------------------------------------------------------------------------------


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
            from batchinf.spec.answer_schemas import Schema

            assert isinstance(value, str)
            return functools.partial(_json_error, Schema(value))
        if kind == "structural_tag":
            return _no_error  # only parts of the text are held to it, and a text may end between them
        if kind == "choice":
            return functools.partial(_choice_error, frozenset(value))
        matches = None if self._matcher is None else self._matcher({kind: value})
        return functools.partial(_structure_error, kind, matches)


def _no_error(text: str | None, completion: Completion) -> RowError | None:
    return None


def _is_finished(completion: Completion) -> bool:
    return completion.finish_reason != "length"


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


def answers_of(spec: JobSpec, tokenizer: object, detokenizer: Detokenizer | None, job_id: str = "") -> Answers:
    """The reader of completions. Imports vLLM only for parsers, regexes and grammars.

    The scripted engine ignores regexes and grammars. detokenizer: None for tasks without text.
    """
    reasoner = None
    call_parser = None
    matcher_of = None
    if detokenizer is not None and spec.model.reasoning_parser is not None:
        from batchinf.engines.vllm.structured_output.structures import reasoner_of

        reasoner = reasoner_of(spec, tokenizer)
    if detokenizer is not None and spec.model.tool_parser is not None:
        from batchinf.engines.vllm.structured_output.tools import CallParser

        call_parser = CallParser(spec, tokenizer)
    of_job = spec.sampling.structured_outputs or {}
    has_structure = any(
        kind in of_job or spec.rows_may_set(f"structured_outputs.{kind}") for kind in ("regex", "grammar")
    )
    may_match = has_structure or call_parser is not None
    if detokenizer is not None and spec.scripted is None and may_match:
        from batchinf.engines.vllm.structured_output.structures import matcher

        matcher_of = functools.partial(matcher, backend=structures_backend(spec.engine))
    return Answers(
        spec,
        tokenizer,
        detokenizer,
        reasoner=reasoner,
        call_parser=call_parser,
        matcher=matcher_of,
        job_id=job_id,
    )
