"""Reads weights into this host's page cache while the input is read and replicas start."""

import contextlib
import os
import pathlib
import threading
from collections.abc import Sequence

import psutil

from batchinf.model import files as model_files
from batchinf.model.identity import Model

# A block whose first byte is in memory is taken to be there: another process has just read it.
_BLOCK_BYTES = 2 << 20
# Of the memory that is free: what is read beyond it would only push out what was read before.
_MOST = 0.5


def read_ahead(model: Model, load_format: str) -> threading.Thread | None:
    """Begin to read what is not in memory yet of the weights of a model in a folder here; None where none are read.

    Nothing waits for the thread, nor depends on it.
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
        # What cannot be read is said by who needs it.
        with contextlib.suppress(OSError), path.open("rb", buffering=0) as file:
            for offset in range(0, path.stat().st_size, _BLOCK_BYTES):
                if not _is_cached(file.fileno(), offset):
                    os.preadv(file.fileno(), [block], offset)


def _is_cached(descriptor: int, offset: int) -> bool:
    """Whether the byte at `offset` is in memory; False where the file system cannot tell."""
    try:
        return os.preadv(descriptor, [bytearray(1)], offset, os.RWF_NOWAIT) == 1
    except OSError:  # EAGAIN: it would have to be read; EOPNOTSUPP
        return False
