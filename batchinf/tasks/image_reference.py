"""The images of a prompt as transformers prepares them, without an engine. `verify` and `inspect` use it.

Tested with transformers 5.19.
"""

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from batchinf.base.errors import UserError
from batchinf.base.text import counted, error_message
from batchinf.model.identity import Model
from batchinf.prompts.chat import ChatTemplate
from batchinf.prompts.encoder import load_tokenizer
from batchinf.records import RenderedPrompt
from batchinf.spec.job import JobSpec


class ReferenceProcessor:
    """The processor of a model, which makes the tokens and the tensors of images."""

    def __init__(self, spec: JobSpec, model: Model, begun_at: str | None) -> None:
        """spec: resolved. begun_at: see `ChatTemplate`. Raises UserError if transformers cannot load the processor."""
        import transformers

        tokenizer = load_tokenizer(model.tokenizer, spec.model.trust_remote_code)
        try:
            self._processor: Any = transformers.AutoProcessor.from_pretrained(
                model.path,
                revision=None if os.path.isdir(model.path) else model.commit,
                trust_remote_code=spec.model.trust_remote_code,
                tokenizer=tokenizer,
            )
        except Exception as error:  # the model's own code may raise anything
            reason = error_message(error, 300)
            raise UserError(f"transformers cannot load the image processor of '{model.name}': {reason}") from error
        mark = ChatTemplate(spec.input, tokenizer, begun_at).image_mark()
        ids: list[int] = tokenizer(mark, add_special_tokens=False, verbose=False)["input_ids"]
        added = set(tokenizer.get_added_vocab().values())
        places = [place for place, token_id in enumerate(ids) if token_id in added]
        if not places:  # such a job cannot run either
            raise UserError(f"the chat template of '{model.name}' shows an image by no token of its own")
        # White space around the placeholder may be part of the tokens of a text.
        self._ids_of_mark = ids[places[0] : places[-1] + 1]
        self._mark = str(tokenizer.decode(self._ids_of_mark))
        self._options = spec.engine.get("mm_processor_kwargs") or {}

    def render(self, token_ids: list[int], images: Sequence[Any]) -> RenderedPrompt:
        """See `Engine.render`. `for_ids` gives the arguments of the model besides the ids. Raises UserError."""
        if not images:
            return RenderedPrompt(token_ids, np.zeros(0, np.int32), 0, lambda _: {})
        together = self._inputs(images)
        alone = [together] if len(images) == 1 else [self._inputs([image]) for image in images]
        pieces = [{name: row[0].tolist() for name, row in _of_tokens(inputs).items()} for inputs in alone]
        if [token_id for piece in pieces for token_id in piece["input_ids"]] != together["input_ids"][0].tolist():
            raise UserError("a row has several images, and the tokens of one depend on the others: only jobs with one "
                            "image a row can be made again for this model")  # fmt: skip
        return self._joined(token_ids, pieces, together)

    def _inputs(self, images: Sequence[Any]) -> dict[str, Any]:
        """The processor's tensors for these images, and for a text with nothing but their places."""
        text = self._mark * len(images)
        options = {"return_tensors": "pt", "add_special_tokens": False, **self._options}
        try:
            return dict(self._processor(text=[text], images=[list(images)], **options))
        except Exception as error:  # processors raise errors of all types
            raise UserError(f"transformers' processor refused the images: {error_message(error, 300)}") from error

    def _joined(
        self, token_ids: list[int], pieces: Sequence[dict[str, list[int]]], together: dict[str, Any]
    ) -> RenderedPrompt:
        """The prompt with each image's tokens in its place.

        pieces: by the name of a value that the model wants for each token, such as `input_ids`, its values for an
        image. together: the tensors of all images.
        """
        import torch

        places = _places_of(self._ids_of_mark, token_ids)
        if len(places) != len(pieces):
            raise UserError(f"the prompt has {counted(len(places), 'place')} for {counted(len(pieces), 'image')}")
        of_tokens: dict[str, list[int]] = {name: [] for name in pieces[0]}
        stop = 0
        for place, piece in zip(places, pieces, strict=True):
            for name, values in of_tokens.items():
                values += token_ids[stop:place] if name == "input_ids" else [0] * (place - stop)
                values += piece[name]
            stop = place + len(self._ids_of_mark)
        ids = of_tokens.pop("input_ids") + token_ids[stop:]
        tensors = {name: value for name, value in together.items() if name not in (*_TEXT, *of_tokens)}

        def for_ids(longer: list[int]) -> dict[str, Any]:
            filled = {name: [*values, *[0] * len(longer)][: len(longer)] for name, values in of_tokens.items()}
            return tensors | {name: torch.tensor([values]) for name, values in filled.items()}

        is_image = np.array(ids) == self._image_id
        num_bytes = sum(int(tensor.nbytes) for tensor in tensors.values())
        return RenderedPrompt(ids, np.flatnonzero(is_image).astype(np.int32), num_bytes, for_ids)

    @property
    def _image_id(self) -> int:
        """The id of the tokens in whose places the model sees images."""
        token_id = getattr(self._processor, "image_token_id", None)
        if not isinstance(token_id, int):
            raise UserError("transformers' processor does not say which token stands for images")
        return token_id


# What a processor makes of the text.
_TEXT = ("input_ids", "attention_mask")


def _of_tokens(inputs: dict[str, Any]) -> dict[str, Any]:
    """The ids, and the other tensors that have a value for each token, such as `mm_token_type_ids`."""
    shape = inputs["input_ids"].shape
    return {
        name: tensor
        for name, tensor in inputs.items()
        if name != "attention_mask" and getattr(tensor, "shape", None) == shape
    }


def _places_of(part: list[int], token_ids: list[int]) -> list[int]:
    """Where these ids begin in others."""
    size = len(part)
    return [place for place in range(len(token_ids) - size + 1) if token_ids[place : place + size] == part]
