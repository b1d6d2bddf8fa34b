"""How many tokens a model makes of an image of some size, by the image processor of transformers, as vLLM counts them.

`image_tokens` asks a process of its own, so that its caller imports neither torch nor transformers. The answers are
kept in the user's cache. No image is loaded.
"""

import hashlib
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from batchinf.base.errors import ModelError
from batchinf.base.text import one_line, shorten
from batchinf.model.answers import answer_of, kept_file, print_answer
from batchinf.model.files import CONFIG_FILES, PROCESSOR_FILES, TOKENIZER_FILES
from batchinf.model.model import Model

_VERSION = 1  # of the kept answers
_WHAT = "the tokens of images could not be counted"

# Width and height in pixels.
ImageSize = tuple[int, int]


def image_tokens(
    model: Model, sizes: Sequence[ImageSize], engine: Mapping[str, Any], *, trust_remote_code: bool = False
) -> dict[ImageSize, int]:
    """The tokens of images of these sizes, without sizes that the processor refuses. Raises ModelError.

    engine: engine arguments.
    """
    distinct = sorted(set(sizes))
    question = {
        "model": model.folder or model.tokenizer,
        "tokenizer": model.tokenizer,
        "files": _digest(pathlib.Path(model.folder), pathlib.Path(model.tokenizer)),
        "sizes": distinct,
        "options": engine.get("mm_processor_kwargs") or {},
        "trust_remote_code": trust_remote_code,
    }
    kept = None if trust_remote_code else kept_file("image-tokens", _VERSION, question)

    def decoded(answer: Mapping[str, Any]) -> dict[ImageSize, int]:
        numbers = zip(distinct, answer["tokens"], strict=True)
        return {size: number for size, number in numbers if number is not None}

    try:
        return answer_of(__name__, question, decoded, kept=kept, what=_WHAT)
    except ModelError:
        folder = pathlib.Path(model.folder)
        if any((folder / name).is_file() for name in PROCESSOR_FILES):
            raise
        # transformers would say that it cannot connect to the hub
        raise ModelError(f"'{model.name}' has no {PROCESSOR_FILES[0]}; copy it there") from None


def _digest(*folders: pathlib.Path) -> str:
    """Of all files that decide the tokens of an image."""
    patterns = (*PROCESSOR_FILES, *CONFIG_FILES, *TOKENIZER_FILES)
    paths = sorted({path for folder in folders for pattern in patterns for path in folder.glob(pattern)})
    digest = hashlib.sha256()
    for path in paths:
        digest.update(f"{path.name} {path.stat().st_size} ".encode() + path.read_bytes())
    return digest.hexdigest()


# -- in a process of its own -------------------------------------------------------------------------------------------


def _counted(question: Mapping[str, Any]) -> list[int | None]:
    """The tokens of each size; None if the processor refuses it. Raises what transformers raises."""
    import transformers

    transformers.logging.set_verbosity_error()
    options = {**question["options"], "trust_remote_code": question["trust_remote_code"]}
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(question["tokenizer"])
        processor = transformers.AutoProcessor.from_pretrained(question["model"], tokenizer=tokenizer, **options)
    except Exception:  # those of Qwen-VL also make a processor of videos, which needs torchvision
        processor = transformers.AutoImageProcessor.from_pretrained(question["model"], **options)
        if not hasattr(processor, "merge_size"):
            raise
    count = _by_patches if hasattr(processor, "merge_size") else _by_processor
    numbers: list[int | None] = []
    errors: list[Exception] = []
    for width, height in question["sizes"]:
        try:
            numbers.append(count(processor, (height, width), question["options"]))
        except Exception as error:  # such as a picture that is too narrow for the model
            errors.append(error)
            numbers.append(None)
    if errors and len(errors) == len(numbers):
        raise errors[0]
    return numbers


def _by_processor(processor: Any, size: tuple[int, int], options: Mapping[str, Any]) -> int:
    return int(processor._get_num_multimodal_tokens(image_sizes=[size], **options)["num_image_tokens"][0])


def _by_patches(processor: Any, size: tuple[int, int], options: Mapping[str, Any]) -> int:
    """By an image processor that merges squares of patches to tokens."""
    return int(processor.get_number_of_image_patches(*size, dict(options)) // processor.merge_size**2)


def _answer(question: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return {"tokens": _counted(question)}
    except Exception as error:  # transformers raises what its processors raise
        words = shorten(one_line(f"{type(error).__name__}: {error}"), 300)
        raise ModelError(f"{_WHAT}: the model's image processor raised {words}") from error


if __name__ == "__main__":
    print_answer(_answer)
