"""The scripted engine: deterministic outputs without a model, for tests and dry runs. Vectors come from the task."""

import functools
import hashlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from batchinf.base import faults
from batchinf.base.errors import RowFailed
from batchinf.engines.protocol import EngineInfo, EngineStats
from batchinf.prompts.images import RenderedPrompt
from batchinf.records import Completion, FloatArray, IntArray, Request, TokenLogprobs
from batchinf.spec.job import ScriptedSpec
from batchinf.tasks.base import Task
from batchinf.version import __version__

_MOST_CHOICES = 4096


class ScriptedEngine:
    """Outputs depend only on prompt, seed and sampling, so any two runs agree, whatever their batches.

    choices: token ids of the texts of which each output is one, whatever its structure. encode: text to token ids, for
    outputs that are one of the choices of their structure.
    """

    output_room = 1  # tokens that must fit after a prompt

    def __init__(
        self,
        script: ScriptedSpec,
        vocab_size: int,
        eos_token_id: int,
        choices: Sequence[Sequence[int]] = (),
        *,
        encode: Callable[[str], Sequence[int]] | None = None,
    ) -> None:
        faults.point("engine.start")
        time.sleep(script.start_s)
        self._script = script
        self._eos_token_id = eos_token_id
        self._choices = choices
        self._encode = None if encode is None else functools.lru_cache(_MOST_CHOICES)(encode)
        self._waiting: deque[Request] = deque()
        self._running: dict[int, list[Completion]] = {}
        self._begun: list[Request] = []
        self._num_running = 0
        self._step = 0
        self._draws = _Draws(vocab_size)
        self.info = EngineInfo(
            max_model_len=script.max_model_len,
            max_num_seqs=script.max_num_seqs,
            vocab_size=vocab_size,
            device=script.device,
            versions={"batchinf": __version__, "engine": "scripted"},
        )

    def warm_up(self, request: Request) -> None:
        """See `Engine.warm_up`."""

    def add(self, request: Request) -> None:
        if len(request.prompt_token_ids) + self.output_room > self._script.max_model_len:
            raise RowFailed("prompt_too_long", f"got {len(request.prompt_token_ids)} tokens")
        if request.sampling.min_tokens > request.max_tokens:
            message = f"min_tokens is {request.sampling.min_tokens}, but only {request.max_tokens} tokens fit"
            raise RowFailed("invalid_sampling", message)
        self._waiting.append(request)

    def render(self, token_ids: list[int], images: Sequence[Any]) -> RenderedPrompt:
        """See `Engine.render`. An image is one token more, at the end, which depends on its pixels."""
        digests = [hashlib.blake2b(image.tobytes(), digest_size=8).digest() for image in images]
        seen = [int.from_bytes(digest, "little") % self.info.vocab_size for digest in digests]
        positions = np.arange(len(token_ids), len(token_ids) + len(seen), dtype=np.int32)
        num_bytes = sum(len(image.tobytes()) for image in images)
        return RenderedPrompt([*token_ids, *seen], positions, num_bytes, for_ids=lambda _: None)

    def step(self) -> list[Completion]:
        """See `Engine.step`. A request of m tokens finishes m steps after it was admitted."""
        faults.point("engine.step")
        if self._script.step_s:
            time.sleep(self._script.step_s)
        self._begun = []
        while self._waiting and self._num_running < self._script.max_num_seqs:
            faults.point("engine.prompt", self._waiting[0].row_index)
            completion = self.complete(self._waiting.popleft())
            self._begun.append(completion.request)
            self._running.setdefault(self._step + max(1, len(completion.token_ids)), []).append(completion)
            self._num_running += 1
        self._step += 1
        finished = self._running.pop(self._step, [])
        for completion in finished:
            faults.point("engine.output", completion.request.row_index)
        self._num_running -= len(finished)
        return finished

    def complete(self, request: Request) -> Completion:
        """The answer to a request."""
        prompt = np.asarray(request.prompt_token_ids, np.int32)
        seed = str(request.seed or 0)[-16:].encode()
        person = _person(request.adapter)
        digest = hashlib.blake2b(prompt.tobytes(), digest_size=16, salt=seed, person=person).digest()
        first = int.from_bytes(digest[:8], "little")
        second = int.from_bytes(digest[8:], "little")
        token_ids, stops = self._output(request, first, second)
        chosen = request.logprob_token_ids
        logprobs = self._draws.logprobs(second, token_ids, len(chosen) if chosen else request.sampling.logprobs)
        if chosen and logprobs is not None:
            logprobs.token_ids[:, 1:] = chosen
        prompt_logprobs = self._draws.logprobs(second, prompt[1:], request.sampling.prompt_logprobs)
        return Completion(
            request=request,
            token_ids=token_ids,
            finish_reason="stop" if stops else "length",
            cumulative_logprob=None if logprobs is None else float(logprobs.logprobs[:, 0].sum(dtype=np.float64)),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            values=None if request.rows is None else self._draws.rows(first, len(token_ids), request),
        )

    def _output(self, request: Request, first: int, second: int) -> tuple[IntArray, bool]:
        """The tokens, and whether they end by themselves. first, second: numbers drawn for the request."""
        if choices := self._choices_of(request):
            whole = [*choices[first % len(choices)], self._eos_token_id]
            return np.array(whole[: request.max_tokens], np.int32), len(whole) <= request.max_tokens
        length = request.max_tokens
        if self._script.vary_lengths:
            least = min(max(1, request.sampling.min_tokens), length)
            length = least + first % (length - least + 1)
        token_ids = self._draws.token_ids(second, length)
        stops = length < request.max_tokens
        if stops:
            token_ids[-1] = self._eos_token_id
        return token_ids, stops

    def _choices_of(self, request: Request) -> Sequence[Sequence[int]]:
        texts = (request.sampling.structured_outputs or {}).get("choice")
        if self._choices or not texts or self._encode is None:
            return self._choices
        return [self._encode(text) for text in texts]

    def begun(self) -> list[Request]:
        return self._begun

    def num_unfinished(self) -> int:
        return len(self._waiting) + self._num_running

    def stats(self) -> EngineStats:
        return EngineStats(num_running=self._num_running, num_waiting=len(self._waiting))

    def close(self) -> None:
        """See `Engine.close`."""


@functools.cache
def _person(adapter: str | None) -> bytes:
    """blake2b's `person` for an adapter: each adapter gives other answers."""
    return b"" if adapter is None else hashlib.blake2b(adapter.encode(), digest_size=16).digest()


_DRAWN_TOKENS = 1 << 16
_DRAWN_LOGPROBS = 1 << 20


@functools.cache
class _Draws:
    """Random arrays, drawn once in a process. A read, circular from a hashed offset, takes 3 µs; drawing takes 60."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        random = np.random.default_rng(0)
        self._token_ids = random.integers(0, vocab_size, _DRAWN_TOKENS, dtype=np.int32)
        self._ranks = random.integers(1, 50, _DRAWN_TOKENS, dtype=np.int32)
        self._top: dict[int, tuple[IntArray, FloatArray]] = {}

    def token_ids(self, key: int, num_tokens: int) -> IntArray:
        """int32 [num_tokens]. Shifted in the vocabulary by the key, so that two keys rarely give the same tokens."""
        token_ids: IntArray = (_circle(self._token_ids, key, num_tokens) + key % self._vocab_size) % self._vocab_size
        return token_ids

    def logprobs(self, key: int, token_ids: IntArray, k: int | None) -> TokenLogprobs | None:
        """These tokens with k others each; logprobs fall from rank to rank."""
        if k is None:
            return None
        if k not in self._top:
            self._top[k] = self._draw_top(k)
        top, logprobs = (_circle(drawn, key, len(token_ids)) for drawn in self._top[k])
        top[:, 0] = token_ids
        return TokenLogprobs(top, logprobs, _circle(self._ranks, key, len(token_ids)))

    def rows(self, key: int, num_tokens: int, request: Request) -> npt.NDArray[Any]:
        """Logits for each position that a request asks for, of its chosen tokens or of the vocabulary."""
        rows = request.rows
        assert rows is not None
        positions = range(num_tokens) if rows.positions is None else rows.positions
        logits = _circle(self._logits, key, rows.width if rows.token_ids is None else max(rows.token_ids) + 1)
        columns = logits if rows.token_ids is None else logits[np.array(rows.token_ids)]
        values: npt.NDArray[Any] = columns + np.array(positions, np.float32)[:, None] / 8
        return rows.own_columns(values.astype(rows.dtype))

    @functools.cached_property
    def _logits(self) -> FloatArray:
        return np.random.default_rng(2).standard_normal(_DRAWN_LOGPROBS, dtype=np.float32)

    def _draw_top(self, k: int) -> tuple[IntArray, FloatArray]:
        random = np.random.default_rng(k)
        shape = (max(16, _DRAWN_LOGPROBS // (k + 1)), k + 1)
        logprobs = np.negative(random.random(shape, dtype=np.float32))
        return random.integers(0, self._vocab_size, shape, dtype=np.int32), np.cumsum(logprobs, axis=1)


def _circle(drawn: npt.NDArray[Any], key: int, num_items: int) -> npt.NDArray[Any]:
    """A copy of `num_items` consecutive items, wrapping around at the end."""
    start = (key >> 24) % len(drawn)
    if start + num_items <= len(drawn):
        return drawn[start : start + num_items].copy()
    return drawn.take(np.arange(start, start + num_items), axis=0, mode="wrap")


class ScriptedPooling(ScriptedEngine):
    """Stands for vLLM's pooling runner: each prompt takes one step, and the task makes its values."""

    output_room = 0

    def __init__(self, task: Task, script: ScriptedSpec, vocab_size: int) -> None:
        super().__init__(script, vocab_size, 0)
        self._task = task
        self._drawn = np.random.default_rng(0).standard_normal(1 << 16, np.float32)

    def complete(self, request: Request) -> Completion:
        digest = hashlib.blake2b(np.asarray(request.prompt_token_ids, np.int32).tobytes(), digest_size=8).digest()
        start = int.from_bytes(digest, "little") % len(self._drawn)

        def draw(num_values: int) -> FloatArray:
            return self._drawn.take(np.arange(start, start + num_values), mode="wrap")

        return Completion(request, np.zeros(0, np.int32), "stop", values=self._task.scripted_values(request, draw))
