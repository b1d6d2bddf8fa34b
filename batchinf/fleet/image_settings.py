"""Settings of engines with images that the spec leaves open, chosen by the job's rows."""

from collections.abc import Callable
from typing import Any

from batchinf.base.errors import ModelError
from batchinf.model.identity import Model
from batchinf.model.image_tokens import ImageSize, image_tokens
from batchinf.model.memory import Fit
from batchinf.planning.image_rows import ImagesOfRows
from batchinf.spec.job import JobSpec

# No model that vLLM runs makes more tokens of an image: one for each 14 × 14 pixels.
_LEAST_PIXELS = 196


def with_most_images(spec: JobSpec, rows: ImagesOfRows, say: Callable[[str], None]) -> JobSpec:
    """The spec with the most images that a row of the input has as `max_per_row`, if the user gave none.

    vLLM measures the memory of a step with as many images in each sequence.
    """
    images = spec.input.images
    if images is None or rows.most_per_row is None or "max_per_row" in images.model_fields_set:
        return spec
    most = max(1, rows.most_per_row)
    if most >= images.max_per_row:
        return spec
    say(f"input.images.max_per_row {most}, and not {images.max_per_row}: no row of the input has more images")
    where = spec.input.model_copy(update={"images": images.model_copy(update={"max_per_row": most})})
    return spec.model_copy(update={"input": where})


def step_for_images(spec: JobSpec, model: Model, fit: Fit, rows: ImagesOfRows) -> dict[str, tuple[Any, str]]:
    """`max_num_batched_tokens` with its reason, if an image of the rows has more tokens than a step has by default.

    Some models cannot compute a part of an image: vLLM would not start, or never run the row.
    """
    name = "max_num_batched_tokens"
    usual = fit.limits[name]
    if fit.device_bytes is None or name in spec.engine or rows.largest is None:
        return {}
    if rows.largest[0] * rows.largest[1] < usual * _LEAST_PIXELS:
        return {}
    number = _tokens_of(rows.largest, spec, model)
    return {name: (number, "the largest image of a sample has so many tokens")} if number > usual else {}


def _tokens_of(size: ImageSize, spec: JobSpec, model: Model) -> int:
    """The tokens of an image; 0 if they cannot be counted."""
    try:
        found = image_tokens(model, [size], spec.engine, trust_remote_code=spec.model.trust_remote_code)
    except ModelError:
        return 0
    return found.get(size, 0)
