"""The tokens of images in prompts that no engine has made ready, for `plan`, `validate` and the choice of degrees.

No image is decoded: headers give the sizes, and the model's image processor gives the tokens of each size.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from batchinf.base.errors import ModelError, RowError, RowFailed
from batchinf.base.text import counted
from batchinf.job.input_job import image_folder
from batchinf.job.job import Job, max_model_len
from batchinf.model.image_tokens import ImageSize, image_tokens
from batchinf.prompts.builder import PromptBuilder
from batchinf.prompts.images import RenderedPrompt, read_images, shared_ids, with_rendered
from batchinf.prompts.media import ImageLoader
from batchinf.records import Prompt
from batchinf.spec.input import InputSpec

_UNKNOWN: ImageSize = (0, 0)  # of images of URLs, which are not fetched
_ASSUMED: ImageSize = (1024, 768)


class SampledImages:
    """Counts the tokens of images for prompts of a sample: `looked_at` for each, then `with_tokens` once for all.

    Prompts without images stay as they are.
    """

    def __init__(self, job: Job, builder: PromptBuilder, where: InputSpec | None = None) -> None:
        """where: the input as the user wrote it, if the job's own is a copy of some of its rows."""
        self._job = job
        self._image_id = builder.image_id
        settings = job.spec.input.images
        self._loader: ImageLoader | None = None
        if settings is not None:
            self._max_per_row = settings.max_per_row
            self._loader = ImageLoader(settings, base_folder=image_folder(where or job.spec.input))
        self._tokens: dict[ImageSize, int | None] = {}
        """By size; None: the processor refuses it."""
        self._is_unknown = False
        self.notes: list[str] = []
        """How images were counted, for people."""

    def looked_at(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """The prompts with the sizes of their images in place of the images, which may be many megabytes."""
        return [self._looked_at(prompt) if prompt.image_sources else prompt for prompt in prompts]

    def _looked_at(self, prompt: Prompt) -> Prompt:
        assert self._loader is not None
        try:
            sizes = read_images(prompt.image_sources, self._max_per_row, self._loader.size_of)
        except RowFailed as failed:
            return _failed(prompt, failed.error)
        shapes = tuple(("", *(size or _UNKNOWN)) for size in sizes)
        return replace(prompt, image_sources=(), image_shapes=shapes)

    def with_tokens(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """The prompts with all tokens of their images. If these cannot be counted, each image keeps one placeholder.

        The ids of these tokens are negative, and differ between images.
        """
        sizes = [size for prompt in prompts for size in _sizes_of(prompt)]
        if not self._ask(sizes):
            return list(prompts)
        ids = itertools.count(-1, -1)
        return [self._expanded(prompt, ids) if prompt.image_shapes else prompt for prompt in prompts]

    def _ask(self, sizes: Sequence[ImageSize]) -> bool:
        """Whether the tokens of these images are known. The first call is about the sample, and makes the notes."""
        missing = set(sizes) - self._tokens.keys()
        if not missing or self._is_unknown:
            return bool(sizes) and not self._is_unknown
        is_first = not self._tokens
        asked = [*(missing - {_UNKNOWN}), _ASSUMED]
        spec = self._job.spec
        try:
            known = image_tokens(self._job.model, asked, spec.engine, trust_remote_code=spec.model.trust_remote_code)
        except ModelError as error:
            self.notes.append(f"warning: each image counts as one token, far too few: {error}")
            self._is_unknown = True
            return False
        self._tokens |= {size: known.get(size) for size in asked}
        numbers = [number for size in sizes if (number := known.get(size)) is not None]
        if is_first:
            # Without any other image, those of URLs have the assumed size.
            of_urls = round(sum(numbers) / len(numbers)) if numbers else known.get(_ASSUMED, 1)
            self._tokens[_UNKNOWN] = of_urls
            self.notes += _notes(numbers, sizes.count(_UNKNOWN), of_urls)
        return True

    def _expanded(self, prompt: Prompt, new_ids: Iterator[int]) -> Prompt:
        sizes = _sizes_of(prompt)
        numbers = [self._tokens[size] or 0 for size in sizes]
        if not all(numbers):
            refused = sizes[numbers.index(0)]
            words = f"the model's image processor refuses an image of {refused[0]:,} × {refused[1]:,} pixels"
            return _failed(prompt, RowError("image_refused", words))
        shared = shared_ids(prompt)
        places = [place for place, token_id in enumerate(shared) if token_id == self._image_id]
        if len(places) != len(sizes):  # the tokenizer does not tell where images are: before the text, then
            places = [0] * len(sizes)
        ids: list[int] = []
        before = 0
        for place, number in zip(places, numbers, strict=True):
            # A placeholder is one of the tokens.
            ids += [*shared[before : place + 1], *[next(new_ids)] * (number - 1)]
            before = place + 1
        ids += shared[before:]
        return self._that_fits(with_rendered(prompt, len(shared), _rendered(ids)), sum(numbers))

    def _that_fits(self, prompt: Prompt, num_of_images: int) -> Prompt:
        """The prompt, or its error if it is too long with its images."""
        most = max_model_len(self._job)
        spans = () if prompt.scoring is None else prompt.scoring.spans
        longest = max([len(span.token_ids) for span in spans] or [len(prompt.token_ids)])
        room = self._job.task.output_room
        if most is None or longest + room <= most:
            return prompt
        got = f"got {longest:,} tokens, {num_of_images:,} of them of images"
        return _failed(prompt, RowError("prompt_too_long", f"{got}; at most {most - room:,} fit max_model_len={most}"))


def _sizes_of(prompt: Prompt) -> list[ImageSize]:
    return [(width, height) for _, width, height in prompt.image_shapes]


def _failed(prompt: Prompt, error: RowError) -> Prompt:
    return replace(prompt, image_sources=(), image_shapes=(), token_ids=[], scoring=None, error=error)


def _rendered(ids: list[int]) -> RenderedPrompt:
    return RenderedPrompt(ids, np.zeros(0, np.int32), 0, lambda longer: longer)


def _notes(numbers: Sequence[int], num_urls: int, assumed: int) -> Iterator[str]:
    """numbers: tokens of the images whose sizes are known. num_urls: images that are not fetched."""
    if numbers:
        least = min(numbers)
        most = max(numbers)
        on_average = f"{least:,} to {most:,}, on average {sum(numbers) / len(numbers):,.0f},"
        each = f"{most:,}" if least == most else on_average
        which = f"{counted(len(numbers), 'image')} of the sample"
        yield f"note: images count as {each} tokens each, by the headers of {which}"
    if num_urls:
        how = "the mean of the others" if numbers else f"as if it had {_ASSUMED[0]:,} × {_ASSUMED[1]:,} pixels"
        which = f"images of URLs ({num_urls:,} in the sample) are not fetched here"
        yield f"note: {which}: each counts as {assumed:,} tokens, {how}"
