"""Loads the images of prompts and lets the engine make tokens of them, just before their requests are queued.

The feeder uses it, so that the engine's thread does none of it. Decoded images and tensors are large: only a few rows
are made ahead, and the queue counts their bytes.
"""

import contextlib
import os
import pathlib
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from batchinf.base.errors import DriftError, RowError, RowFailed
from batchinf.base.parquet import open_part
from batchinf.base.paths import is_http, shown_url
from batchinf.base.storage import Folder
from batchinf.base.text import clip
from batchinf.output.open_lease import KnownImages, OpenLease
from batchinf.prompts.images import RenderedPrompt, read_images, shared_ids, with_rendered
from batchinf.prompts.media import ImageLoader
from batchinf.records import Prompt
from batchinf.spec.images import ImageSettings
from batchinf.tasks.columns import IMAGE_DIGESTS, prompt_hash

# `Engine.render`.
Render = Callable[[list[int], Sequence[Any]], RenderedPrompt]

# Rows that are made ahead, one on each thread: half as many as cores. At 12 megapixels, a decoded image has 36 MB.
_LEAST_AHEAD = 4
_MOST_AHEAD = 16
# Tensors of images in the engine, as vLLM may keep them in two processes. More requests wait outside.
IMAGE_BYTES = 4 << 30

_TAKE = "put the old one back, or take the new one: run the job again with --set input.images.on_changed=take"
_ONE_IMAGE = "its results would be of two images; put the old one back, or start a new job with another output.path"

# A prompt with the tokens of its images, and its tensors; or with the error why it has none.
_Made = tuple[Prompt, RenderedPrompt | None]


class ImagePrompts:
    """Prompts with placeholders → prompts with the tokens of their images. For one thread."""

    def __init__(
        self,
        settings: ImageSettings,
        *,
        base_folder: str | None,
        cache_folder: Folder | None = None,
        fails_row: bool = False,
    ) -> None:
        """base_folder, cache_folder: see `ImageLoader`. fails_row: an image that has changed fails only its row."""
        self._fails_row = fails_row
        self._max_per_row = settings.max_per_row
        self._loader = ImageLoader(settings, base_folder=base_folder, cache_folder=cache_folder)
        self._rows_ahead = max(_LEAST_AHEAD, min(_MOST_AHEAD, len(os.sched_getaffinity(0)) // 2))
        self._threads = ThreadPoolExecutor(self._rows_ahead, thread_name_prefix="images")
        self._next: deque[Prompt] = deque()
        self._making: dict[int, Future[_Made]] = {}

    def expect(self, prompts: Iterable[Prompt]) -> None:
        """Make these prompts ahead of `made`, from the first call of that on. They are of one lease."""
        for making in self._making.values():
            making.cancel()
        self._making.clear()
        self._next = deque(prompt for prompt in prompts if prompt.image_sources and prompt.error is None)

    def stop(self) -> None:
        """Make nothing more ahead."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def made(self, prompt: Prompt, render: Render, known: Mapping[int, KnownImages]) -> _Made:
        """See `_Made`. known: the images of rows of the lease that have results already.

        Raises DriftError if an image has changed.
        """
        while self._next and len(self._making) < self._rows_ahead:
            following = self._next.popleft()
            with contextlib.suppress(RuntimeError):  # stopped meanwhile
                self._making[following.row_index] = self._threads.submit(self._make, following, render, known)
        making = self._making.pop(prompt.row_index, None)
        with contextlib.suppress(CancelledError):
            if making is not None:
                return making.result()
        return self._make(prompt, render, known)

    def _make(self, prompt: Prompt, render: Render, known: Mapping[int, KnownImages]) -> _Made:
        try:
            loaded = read_images(prompt.image_sources, self._max_per_row, self._loader.load)
        except RowFailed as failed:
            return _failed(prompt, failed.error), None
        digests = tuple(image.digest for image in loaded)
        if (change := _change(prompt, digests, known.get(prompt.row_index))) is not None:
            if self._fails_row:
                return _failed(prompt, RowError("image_changed", change)), None
            raise DriftError(f"row {prompt.row_index}: {change}: {known[prompt.row_index].way_out}")
        shapes = tuple((image.format, image.width, image.height) for image in loaded)
        unrendered_hash = prompt_hash(np.array(prompt.token_ids, np.int32), digests)
        prompt = replace(prompt, image_sources=(), image_digests=digests, image_shapes=shapes,
                         unrendered_hash=unrendered_hash)  # fmt: skip
        shared = shared_ids(prompt)
        try:
            rendered = render(shared, [image.image for image in loaded])
        except RowFailed as failed:
            return _failed(prompt, failed.error), None
        return with_rendered(prompt, len(shared), rendered), rendered


def _change(prompt: Prompt, digests: Sequence[str], known: KnownImages | None) -> str | None:
    """Which image of a row has changed, for people; None if none has."""
    if known is None or list(known.digests) == list(digests):
        return None
    places = [place for place, (new, old) in enumerate(zip(digests, known.digests, strict=False)) if new != old]
    which = f"image {places[0] + 1}" if places else "the list of images"
    source = prompt.image_sources[places[0]] if places else None
    is_named = isinstance(source, str) and not source.startswith("data:")
    named = f" ('{clip(shown_url(str(source)) if is_http(str(source)) else str(source), 200)}')" if is_named else ""
    return f"{which}{named} has changed since the job ran the row"


def known_images(
    opened: OpenLease, part: pathlib.Path | None, given: Collection[int] = frozenset()
) -> dict[int, KnownImages]:
    """The images of the rows of a lease that have results without an error, by row.

    part: the part that a retry replaces, if an image may not change with it. given: rows that the retry takes from
    another file; they may name other images.
    """
    columns = ["row_index", "error_type", IMAGE_DIGESTS]
    tables: list[tuple[pa.Table, str, Collection[int]]] = []
    if part is not None:
        with open_part(os.fspath(part)) as file:
            tables.append((file.read(columns=columns), _TAKE, given))
    tables += [(segment.table().select(columns), _ONE_IMAGE, ()) for segment in opened.segments]
    known: dict[int, KnownImages] = {}
    for table, way_out, other_rows in tables:
        for row in table.to_pylist():
            number = row["row_index"]
            is_good = row["error_type"] is None and row[IMAGE_DIGESTS] is not None
            if is_good and number in opened.rows and number not in other_rows:
                known[number] = KnownImages(row[IMAGE_DIGESTS], way_out)
    for segment in opened.segments:
        segment.close()
    return known


def _failed(prompt: Prompt, error: RowError) -> Prompt:
    return replace(prompt, image_sources=(), token_ids=[], scoring=None, unrendered_hash=None, error=error)
