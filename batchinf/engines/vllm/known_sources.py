"""Which pieces of this package run with a vLLM: those that were compared with the files of the methods they rely on.

A piece repeats, wraps or replaces methods of vLLM. It runs if the files of all these methods are, byte by byte, those
of one of the versions that were read. The version's number does not matter. Imports nothing of vLLM.

    python -m batchinf.engines.vllm.known_sources            # the installed vLLM
    python -m batchinf.engines.vllm.known_sources FOLDER...  # folders with an unpacked wheel, such as of a new version

prints which pieces are on, and the digests of files that are not known.
"""

import functools
import hashlib
import importlib.util
import pathlib
import re
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

_VERSIONS = ("0.32.0", "0.33.0")
# Each file with the beginning of its SHA-256 in each of these versions, and the pieces that rely on it. `decode` and
# `masks` run inside the scheduler of `hold`, so they rely on its files too.
_TABLE = """
v1/core/block_pool.py                   6d1e0d89b43e 64d304d2b431 decode
v1/core/kv_cache_coordinator.py         efd719339119 6bf7583c5fd3 decode
v1/core/kv_cache_manager.py             d08315437c6b 39ae1c1564a0 decode
v1/core/single_type_kv_cache_manager.py fe38816a388b 4b8c34ff7598 decode
v1/core/sched/async_scheduler.py        38d296e77e4d e67b0005e481 decode
v1/core/sched/output.py                 2a3454c78ba1 f2d5b52a3869 decode
v1/core/sched/scheduler.py              d9a39870286c d76cc2225755 decode hold masks
v1/core/sched/utils.py                  b6583424b6da b6583424b6da decode
v1/request.py                           dd7c30bf8b08 dd7c30bf8b08 decode
v1/structured_output/__init__.py        cfd425138e30 f8537b746bd7 decode masks
v1/structured_output/backend_guidance.py 5cb7e71ff816 2eeaf1df0f6a masks
v1/structured_output/request.py         ba68fd4c5f43 053066a537c6 masks
v1/engine/__init__.py                   5a525d4fc6e9 733a21948cc1 decode hold join masks
v1/engine/logprobs.py                   148cc1575651 148cc1575651 arrays
v1/engine/output_processor.py           e78c5af6b0db f855e23e61ad decode hold join masks
v1/outputs.py                           40b3aec867bc 58cd064fa441 decode hold join masks rows_v1 rows_v2
config/vllm.py                          573692a80364 892088ef8dc5 kernel whole
v1/attention/backend.py                 981ec1fc4b84 1583b551b899 whole
v1/attention/backends/flash_attn.py     e6637cb5a66c 7991393d7895 kernel whole
v1/cudagraph_dispatcher.py              105c8f6406e7 105c8f6406e7 long
v1/worker/gpu/cudagraph_utils.py        ef2aae2eb3ec 1ff1655db4ca long
v1/worker/gpu/async_utils.py            1797a8abdb46 af54328bad11 rows_v2
v1/worker/gpu/model_runner.py           5240fe8d62d4 9145e2601f9e mask_v2
v1/worker/gpu/sample/logprob.py         ac58bfedaa32 ac58bfedaa32 rows_v2
v1/worker/gpu/sample/prompt_logprob.py  97a0ff853485 97a0ff853485 rows_v2
v1/worker/gpu/sample/sampler.py         620b0ff1bea5 7f9941f9d7d0 rows_v2 mask_v2
v1/worker/gpu/structured_outputs.py     9e212ac51c60 5d38b6e1cf65 mask_v2
v1/worker/gpu_model_runner.py           4cf95efe4ea8 3ba41733f706 rows_v1 mask_v1
v1/sample/sampler.py                    a67286eb78aa 7d3d001b8b6e rows_v1 mask_v1
v1/structured_output/utils.py           4c16c4f5faa2 db9ce1d41ab7 mask_v1
"""
_ABSENT = "absent"


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of this package that relies on files of vLLM."""

    words: str
    """In a sentence: `... are off`."""
    cost: str
    """What an engine loses without it."""
    used_by: str
    """The names of an engine's parts, one of which has the piece: see `pieces_off`."""
    costs_much: bool = False
    """Whether users are told that it is off, in `status` and in the closing lines."""


_SLOW_STEPS = "steps take longer"
_VLLM_SCORES = "vLLM's own code takes them, which is slower or needs more memory"
PIECES = {
    "decode": Piece("the scheduler's short loops for decoding", _SLOW_STEPS, "scheduler", True),
    "masks": Piece("masks of structured outputs in one call", _SLOW_STEPS, "scheduler", True),
    "hold": Piece("outputs in one piece", "each step sends outputs, which is slower", "scheduler", True),
    "join": Piece("joined results of prompts", "they are sent one by one", "scheduler pooling_scheduler"),
    "arrays": Piece("logprobs as arrays", "they come as Python objects, slowly", "front_end", True),
    "kernel": Piece("kernels for the attention of decoding", _SLOW_STEPS, "DecodingWorker", True),
    "long": Piece("steps without a graph for a very long request", "such steps take longer", "DecodingWorker"),
    "whole": Piece("whole graphs for steps of prompts", "they start layer by layer", "PromptWorker", True),
    "rows_v1": Piece("scores of prompts in pieces", _VLLM_SCORES, "RowsExtension_V1"),
    "rows_v2": Piece("kernels and rows for scores", _VLLM_SCORES, "RowsExtension_V2"),
    "mask_v1": Piece("raw scores of structured outputs", "rows that want them are refused", "RowsExtension_V1"),
    "mask_v2": Piece("raw scores of structured outputs", "rows that want them are refused", "RowsExtension_V2"),
}


@dataclass(frozen=True, slots=True)
class File:
    """A file of vLLM that pieces rely on."""

    path: str
    """In vLLM's folder."""
    digests: tuple[str, ...]
    """By version."""
    pieces: tuple[str, ...]

    def digest(self, root: pathlib.Path) -> str:
        """In vLLM's folder `root`; `absent` if there is no such file."""
        return _digest(root / self.path)


def _files() -> Iterator[File]:
    num = len(_VERSIONS)
    for line in _TABLE.strip().splitlines():
        path, *words = line.split()
        yield File(path, tuple(words[:num]), tuple(words[num:]))


FILES = tuple(_files())


@functools.cache
def _digest(path: pathlib.Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12] if path.is_file() else _ABSENT


@functools.cache
def _installed() -> pathlib.Path:
    spec = importlib.util.find_spec("vllm")
    [folder, *_] = spec.submodule_search_locations if spec and spec.submodule_search_locations else [""]
    return pathlib.Path(folder)


def _unknown(piece: str, root: pathlib.Path) -> list[File]:
    """The files of a piece that are not as in the version that has most of them; the newest of such versions."""
    own = [(file, file.digest(root)) for file in FILES if piece in file.pieces]
    places = reversed(range(len(_VERSIONS)))
    return min(([file for file, found in own if found != file.digests[at]] for at in places), key=len)


@functools.cache
def line_if_off(piece: str, root: pathlib.Path | None = None) -> str:
    """Why a piece is off, as one line; "" if it is on. root: vLLM's folder, by default that of the installed one."""
    root = root or _installed()
    unknown = _unknown(piece, root)
    if not unknown:
        return ""
    files = f"vllm/{unknown[0].path}" + (f" (and {len(unknown) - 1} more)" if len(unknown) > 1 else "")
    return (
        f"vLLM {_version(root)}: {PIECES[piece].words} are off, since {files} is not one that they were written for; "
        f"{PIECES[piece].cost}"
    )


def _version(root: pathlib.Path) -> str:
    path = root / "_version.py"
    found = re.search(r"^__version__.*'(.+)'", path.read_text() if path.exists() else "", re.MULTILINE)
    return found[1] if found else "of an unknown version"


@functools.cache
def allowed(piece: str) -> bool:
    """Whether a piece may run with the installed vLLM. Prints once why not."""
    if line := line_if_off(piece):
        print(line, flush=True)
    return not line


def pieces_off(parts: Collection[str]) -> list[str]:
    """The pieces that an engine with these parts would have, but that are off."""
    return [
        name for name, piece in PIECES.items() if not {*parts}.isdisjoint(piece.used_by.split()) and line_if_off(name)
    ]


def main(folders: Sequence[str]) -> None:
    """Print a table: each piece with each vLLM. Below it, the files that turn pieces off."""
    paths = [pathlib.Path(folder) for folder in folders]
    roots = [path / "vllm" if (path / "vllm").is_dir() else path for path in paths] or [_installed()]
    print(f"{'':10}", *(f"{_version(root):10}" for root in roots))
    for piece in PIECES:
        print(f"{piece:10}", *(f"{'off' if line_if_off(piece, root) else 'on':10}" for root in roots))
    for root in roots:
        for file in FILES:
            if off := [piece for piece in file.pieces if file in _unknown(piece, root)]:
                print(f"vLLM {_version(root)}: vllm/{file.path} is {file.digest(root)}, for {', '.join(off)}")


if __name__ == "__main__":
    main(sys.argv[1:])
