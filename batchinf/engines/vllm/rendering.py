"""Makes tensors of images with vLLM's processor, in this process or in several others.

One thread takes 5 ms for an image of 640 × 480 pixels and 180 for one of 12 megapixels (Idefics3), so that a GPU would
wait for it. `engine.py` uses it.

Tested with vLLM 0.32.0.
"""

import contextlib
import functools
import multiprocessing
import os
import pickle
import threading
import time
import uuid
from collections import deque
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from batchinf.base.errors import RequestRefused, RowError
from batchinf.base.text import describe_error, one_line, shorten
from batchinf.engines.vllm.images import KIND, checked
from batchinf.records import RenderedPrompt

# If `input.images.processes` is null: processes are started once the images of a prompt take this long, and get a
# quarter of the cores. A process needs 10 s to start and 0.7 GB, and the replica still copies the pixels: 50 ms for 12
# megapixels.
_SLOW_S = 0.05
_NUM_MEASURED = 4
_CORES_A_PROCESS = 4
_MOST_PROCESSES = 8
# Deaths of processes that had the same images. A death ends the whole pool; its images are then tried one at a time.
_MOST_DEATHS = 3


def processes_for(latest_s: Sequence[float], num_cores: int) -> int:
    """How many processes to start; 0: none. latest_s: seconds that this process took for the latest prompts."""
    if len(latest_s) < _NUM_MEASURED or min(latest_s) < _SLOW_S:
        return 0
    number = min(_MOST_PROCESSES, num_cores // _CORES_A_PROCESS)
    return number if number > 1 else 0


class Rendering:
    """Token ids and images → the engine's own form of a prompt. Threads may share it."""

    def __init__(self, engine: Any, processes: int | None) -> None:
        """processes: see `ImageSettings.processes`."""
        self._renderer = engine.renderer
        self._config = engine.vllm_config
        self._lock = threading.Lock()  # vLLM's renderer is for one thread
        self._alone = threading.Lock()
        self._is_automatic = processes is None
        self._num_processes = processes or 0
        self._has_rendered = False
        self._latest_s: deque[float] = deque(maxlen=_NUM_MEASURED)
        self._pickled = b""
        self._pool: ProcessPoolExecutor | None = None
        self._first: Future[None] | None = None
        if processes:
            self._start()

    def render(self, token_ids: list[int], images: Sequence[Any]) -> RenderedPrompt:
        """See `Engine.render`."""
        prompt: dict[str, Any] = {"prompt_token_ids": token_ids, "multi_modal_data": {KIND: list(images)}}
        if not self._config.cache_config.enable_prefix_caching:
            # vLLM's own names count from 0 in each process, and it takes images of one name for the same.
            prompt["multi_modal_uuids"] = {KIND: [uuid.uuid4().hex for _ in images]}
        made = self._elsewhere(prompt) if self._is_ready() else self._here(prompt)
        if isinstance(made, RowError):
            raise RequestRefused(made)
        return checked(made, len(images))

    def stop(self) -> None:
        """Let the processes end once they have nothing to do."""
        with self._lock:
            pool, self._pool, self._first = self._pool, None, None
            self._is_automatic = False
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)

    def _here(self, prompt: dict[str, Any]) -> Any:
        with self._lock:
            began = time.monotonic()
            made = _rendered(self._renderer, prompt)
            if self._has_rendered and self._is_automatic:  # the first call takes seconds
                self._latest_s.append(time.monotonic() - began)
                self._num_processes = processes_for(self._latest_s, len(os.sched_getaffinity(0)))
                if self._num_processes:
                    self._is_automatic = False
                    self._start()
            self._has_rendered = True
        return made

    def _start(self) -> None:
        try:
            self._pickled = pickle.dumps(self._config)
        except Exception as error:
            self._say_off(error)
            return
        self._pool = self._new_pool()
        self._first = self._pool.submit(_get_ready, self._pickled)

    def _new_pool(self) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(
            self._num_processes, multiprocessing.get_context("spawn"), initializer=_end_with_parent
        )

    def _is_ready(self) -> bool:
        """Whether a process can render. Until then, and if none can, this process does."""
        first = self._first
        if first is None or not first.done():
            return False
        if (error := first.exception()) is not None:
            self._first = self._pool = None
            self._say_off(error)
        return error is None

    def _say_off(self, error: BaseException) -> None:
        words = one_line(describe_error(error), 300)
        print(
            f"images are made ready in the replica itself, because no process could start for it: {words}", flush=True
        )

    def _elsewhere(self, prompt: dict[str, Any]) -> Any:
        for number in range(_MOST_DEATHS):
            pool = self._pool
            if pool is None:  # stopped meanwhile
                return self._here(prompt)
            try:
                with self._alone if number else contextlib.nullcontext():
                    answer = pool.submit(_render, self._pickled, prompt).result()
            except (BrokenProcessPool, CancelledError):
                self._replace(pool)
                continue
            return pickle.loads(answer) if isinstance(answer, bytes) else answer
        return RowError("image_refused", f"{_MOST_DEATHS} processes died while they made tensors of the images")

    def _replace(self, broken: ProcessPoolExecutor) -> None:
        with self._lock:
            if self._pool is broken:
                self._pool = self._new_pool()


def _rendered(renderer: Any, prompt: dict[str, Any]) -> Any:
    """vLLM's form of the prompt, or why there is none."""
    try:
        [made] = renderer.render_cmpl([prompt])
    except Exception as error:  # processors raise errors of all types, AssertionError too
        words = shorten(describe_error(error), 300)
        return RowError("image_refused", f"the model's processor refused the images: {words}")
    return made


# -- in a process of its own -------------------------------------------------------------------------------------------


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)  # it may have been killed

    threading.Thread(target=wait, daemon=True).start()


@functools.lru_cache(1)
def _renderer_of(config: bytes) -> Any:
    """The renderer of a pickled VllmConfig. It needs no GPU."""
    from vllm.renderers import renderer_from_config

    return renderer_from_config(pickle.loads(config))


def _get_ready(config: bytes) -> None:
    _renderer_of(config)


def _render(config: bytes, prompt: dict[str, Any]) -> bytes | RowError:
    """A `RowError`, or the pickled prompt. Pickled here, a tensor is bytes, and takes no open file in the replica."""
    made = _rendered(_renderer_of(config), prompt)
    return made if isinstance(made, RowError) else pickle.dumps(made, protocol=5)
