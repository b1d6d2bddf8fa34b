"""Answers of modules that import torch or transformers: in a process of their own, and kept in the user's cache.

`parameters` and `image_tokens` use it, so that commands without an engine import neither.
"""

import contextlib
import hashlib
import importlib.metadata
import json
import pathlib
import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from batchinf.base.errors import ModelError
from batchinf.base.paths import user_cache
from batchinf.base.process import NoAnswerError, Question
from batchinf.model import files as model_files

T = TypeVar("T")

_WAIT_S = 300.0
# Without devices, torch never makes a CUDA context.
_ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}


def kept_file(name: str, version: int, question: Mapping[str, Any]) -> pathlib.Path:
    """The file of the user's cache for the answer to this question. name: of the folder."""
    versions = f"{version} {importlib.metadata.version('transformers')}"
    key = hashlib.sha256(f"{versions} {json.dumps(question, sort_keys=True)}".encode()).hexdigest()
    return user_cache(name) / f"{key}.json"


def answer_of(
    module: str,
    question: Mapping[str, Any],
    decoded: Callable[[Mapping[str, Any]], T],
    *,
    kept: pathlib.Path | None,
    what: str,
) -> T:
    """The module's answer, a JSON object, as `decoded` reads it. Raises ModelError if it has `error`, or without one.

    kept: the file of the cache; None: the answer is not kept. what: what fails without the answer, in words.
    """
    if kept is not None and kept.is_file():
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            return decoded(json.loads(kept.read_text()))
    try:
        with Question(module, question, _WAIT_S, _ENVIRONMENT) as running:
            answer = running.answer()
    except NoAnswerError as error:
        raise ModelError(f"{what}: {error}") from None
    if "error" in answer:
        raise ModelError(answer["error"])
    if kept is not None:
        with contextlib.suppress(OSError):
            model_files.write_cached(kept, json.dumps(answer).encode())
    return decoded(answer)


def print_answer(answer: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> None:
    """In the other process: print the answer to the question on stdin, or the ModelError that `answer` raises."""
    try:
        words = answer(json.load(sys.stdin))
    except ModelError as error:
        words = {"error": str(error)}
    print(json.dumps(words))
