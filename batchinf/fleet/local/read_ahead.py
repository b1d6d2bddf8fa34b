"""Reads a model's weights into the page cache of this host, so that all of its replicas load them from there."""

import contextlib
import os
import pathlib
import threading
from collections.abc import Sequence

import psutil

from batchinf.model import files as model_files
from batchinf.model.identity import Model

# If the first byte of a block is in memory, the whole block is assumed to be: another process has just read it.
_BLOCK_BYTES = 2 << 20
# Share of the free memory. Reading more would push the first files out of the page cache again.
_MOST = 0.5


def read_ahead(model: Model, load_format: str) -> threading.Thread | None:
    """Begin to read a local model's weights into the page cache, so that all replicas of the host load them from there.

    Returns None if there is nothing to read or too little free memory. Nothing waits for the thread.
    """
    folder = pathlib.Path(model.path)
    if load_format == "dummy" or not folder.is_dir():
        return None
    paths = [path for name in model_files.weight_files(folder, load_format) if (path := folder / name).is_file()]
    num_bytes = sum(path.stat().st_size for path in paths)
    if not 0 < num_bytes < psutil.virtual_memory().available * _MOST:
        return None
    thread = threading.Thread(target=_read, args=(paths,), name="read_ahead", daemon=True)
    thread.start()
    return thread


def _read(paths: Sequence[pathlib.Path]) -> None:
    block = memoryview(bytearray(_BLOCK_BYTES))
    for path in paths:
        # Errors are ignored: the engine reports them when it loads the file.
        with contextlib.suppress(OSError), path.open("rb", buffering=0) as file:
            for offset in range(0, path.stat().st_size, _BLOCK_BYTES):
                if not _is_cached(file.fileno(), offset):
                    os.preadv(file.fileno(), [block], offset)


def _is_cached(descriptor: int, offset: int) -> bool:
    """Whether the byte at `offset` is in memory; False if the file system cannot tell."""
    try:
        return os.preadv(descriptor, [bytearray(1)], offset, os.RWF_NOWAIT) == 1
    except OSError:  # EAGAIN: not in memory; EOPNOTSUPP
        return False
