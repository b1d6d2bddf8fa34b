"""The beginning and the end of a process of this package: imports without a search for garbage, an end without freeing.

Imports make hundreds of thousands of objects that are never garbage. Python looks through them again and again while
they are made, and once more when the process ends.
"""

import atexit
import contextlib
import gc
import os
import sys
from collections.abc import Iterator
from typing import NoReturn

_USUAL = gc.get_threshold()
_RARE = 50_000


def search_rarely() -> None:
    """Look for garbage after 50,000 new objects, not 700: for commands that import and end soon."""
    gc.set_threshold(_RARE, *_USUAL[1:])


def search_as_usual() -> None:
    """Look for garbage as Python does, but not in what there is now."""
    gc.freeze()
    gc.set_threshold(*_USUAL)


@contextlib.contextmanager
def without_search() -> Iterator[None]:
    """Look for no garbage in this block. vLLM's import then takes 5.4 s of processor time, else 7.0.

    `time python -c "import gc; gc.disable(); import batchinf.engines.vllm.engine"`, with and without `gc.disable()`.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def leave(code: int) -> NoReturn:
    """End this process as Python does, but leave its objects to the kernel: freeing those of vLLM takes 4 s."""
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
