"""Prompts with images for vLLM: its arguments, and what its processor makes of images.

Tested with vLLM 0.32.0.
"""

import os
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from vllm.platforms import current_platform
from vllm.tokenizers.hf import ThreadSafeHFTokenizerMixin

from batchinf.base.errors import EngineStartError, RowFailed
from batchinf.base.text import counted, describe_error, shorten
from batchinf.prompts.images import RenderedPrompt
from batchinf.spec.job import JobSpec

KIND = "image"
# Threads at most that render at one time. Resizing and arithmetic release the interpreter lock; the rest does not. More
# cores are for other replicas, and for the threads that decode.
_MOST_THREADS = 4
_CORES_FOR_EACH = 4
# Their processors run a kernel of numba, which ends the process if two threads are in it.
_ONE_AT_A_TIME = ("kimi_k25",)


def image_arguments(spec: JobSpec) -> dict[str, Any]:
    """EngineArgs of a job with images.

    vLLM's cache of processed images is off: it gives no data for an image that it has seen, so that a row whose first
    request was dropped could not run.
    """
    assert spec.input.images is not None
    limits = {KIND: spec.input.images.max_per_row, "video": 0, "audio": 0}
    return {"limit_mm_per_prompt": limits, "mm_processor_cache_gb": 0}


class Rendering:
    """Token ids and images → the engine's own form of a prompt. Threads may share it.

    They share vLLM's renderer, as those of `renderer_num_workers` do for pooling models: without its cache it changes
    nothing but a count, which has a lock. Its tokenizer gives each thread a copy, if it is of transformers.
    """

    def __init__(self, engine: Any) -> None:
        """Raises EngineStartError if the engine's model takes no images."""
        if getattr(getattr(engine, "renderer", None), "mm_processor", None) is None:
            raise EngineStartError("the job has images, but vLLM runs this model without them: give another model")
        self._renderer = engine.renderer
        model_type = engine.vllm_config.model_config.hf_config.model_type
        tokenizer = engine.renderer.tokenizer
        is_safe = isinstance(tokenizer, ThreadSafeHFTokenizerMixin) and model_type not in _ONE_AT_A_TIME
        self._threads = threading.BoundedSemaphore(_num_threads() if is_safe else 1)
        if not current_platform.is_cpu():
            # Around each prompt, vLLM sets the number of PyTorch's threads for the whole process and sets it back. Each
            # change makes new threads, and two prompts at one time undo each other's.
            torch.set_num_threads(1)

    def render(self, token_ids: list[int], images: Sequence[Any]) -> RenderedPrompt:
        """See `Engine.render`."""
        prompt = {"prompt_token_ids": token_ids, "multi_modal_data": {KIND: list(images)}}
        with self._threads:
            return _checked(_rendered(self._renderer, prompt), len(images))


def _num_threads() -> int:
    """That may render at one time, by the cores of this host."""
    return max(1, min(_MOST_THREADS, len(os.sched_getaffinity(0)) // _CORES_FOR_EACH))


def _rendered(renderer: Any, prompt: dict[str, Any]) -> Any:
    """What vLLM makes of a prompt with images. Raises RowFailed."""
    try:
        [made] = renderer.render_cmpl([prompt])
    except Exception as error:  # processors raise errors of all types, AssertionError too
        words = shorten(describe_error(error), 300)
        raise RowFailed("image_refused", f"the model's processor refused the images: {words}") from None
    return made


def _checked(made: Any, num_images: int) -> RenderedPrompt:
    """The prompt with all tokens of its images. Raises RowFailed if it has not one place for each image.

    made: by vLLM's renderer.
    """
    places = made["mm_placeholders"].get(KIND, ())
    expanded: list[int] = list(made["prompt_token_ids"])
    ids = np.array(expanded, np.int64)
    is_in_place = np.zeros(len(ids), np.bool_)
    is_image = np.zeros(len(ids), np.bool_)
    for place in places:
        span = slice(place.offset, place.offset + place.length)
        is_in_place[span] = True
        is_image[span] = True if place.is_embed is None else np.asarray(place.is_embed, np.bool_)
    # vLLM leaves a spare placeholder as a plain token, and expands one that is expanded already once more.
    is_spare = np.isin(ids, np.unique(ids[is_image])) & ~is_in_place
    if len(places) != num_images or is_spare.any():
        spare = f", and {counted(int(is_spare.sum()), 'token')} of images outside of them" if is_spare.any() else ""
        got = f"{counted(len(places), 'place')} for {counted(num_images, 'image')}{spare}"
        raise RowFailed("image_placeholder", f"the prompt has {got}; expected one for each image")

    def for_ids(longer: list[int]) -> dict[str, Any]:
        return {**made, "prompt_token_ids": longer}

    positions = np.flatnonzero(is_image).astype(np.int32)
    return RenderedPrompt(expanded, positions, _num_bytes(made["mm_kwargs"].get(KIND, ())), for_ids)


def _num_bytes(items: Sequence[Any]) -> int:
    """The bytes of the tensors of images."""
    return sum(_nbytes(field.data) for item in items if item is not None for field in item.values())


def _nbytes(data: Any) -> int:
    return sum(map(_nbytes, data)) if isinstance(data, list | tuple) else int(getattr(data, "nbytes", 0))
