"""Opens parts of an output: damage in one of them is an error that names the file. All readers of parts use it."""

import contextlib
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from batchinf.base.errors import OutputError
from batchinf.base.parquet import ParquetFile
from batchinf.base.text import one_line


@contextlib.contextmanager
def open_part(path: str | os.PathLike[str], **options: Any) -> Iterator[ParquetFile]:
    """A part, for the block that reads it. options: of `ParquetFile`. Raises OutputError if it is damaged or missing.

    Besides Arrow's own errors, pyarrow raises UnicodeDecodeError for names in a footer, and EOFError.
    """
    try:
        with ParquetFile(pathlib.Path(path), **options) as file:
            yield file
    except MemoryError:  # also Arrow's: the file may be whole
        raise
    except (pa.ArrowException, OSError, ValueError, EOFError) as error:
        raise OutputError(
            f"{os.fspath(path)} cannot be read: {one_line(error, 300)}; `batchinf check --deep --repair` moves damaged "
            "parts aside, and the next run makes them again"
        ) from error
