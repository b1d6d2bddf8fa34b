"""A small copy of a large input, so that `plan` and the choice of degrees need not wait for the scan."""

import os
import pathlib
from dataclasses import dataclass

from batchinf.source.files import InputLocation
from batchinf.source.find import find_files, is_dataset
from batchinf.source.remote import is_url

# A scan of less takes about as long as a sample.
_MANY_BYTES = 64 << 20
_RUNS = 128


@dataclass(frozen=True, slots=True)
class InputSample:
    """A small copy of an input."""

    path: str
    """Of the folder with the copy, an input of the same format."""
    num_rows: int
    """Of the whole input, about."""


def is_scanned_quickly(input: InputLocation) -> bool:
    """Whether the input is so small and so near that its scan takes about as long as a sample."""
    if is_url(input.path) or is_dataset(input):
        return False
    return sum(file.stamp()[0] for file in find_files(input)[1]) < _MANY_BYTES


def sample_input(input: InputLocation, folder: pathlib.Path) -> InputSample | None:
    """Copy rows from all parts of an input into `folder`; None if the input is small, or has to be scanned.

    Raises InputError if there is nothing to read.
    """
    if is_url(input.path) or is_dataset(input) or is_scanned_quickly(input):
        return None
    format, files = find_files(input)
    sizes = [file.stamp()[0] for file in files]
    num_rows = 0.0
    for number, (file, size) in enumerate(zip(files, sizes, strict=True)):
        runs = max(1, round(_RUNS * size / sum(sizes)))
        rows_of_file = format.sample(file, runs, number, folder / f"{number:06}{format.endings[0]}")
        if rows_of_file is None:
            return None
        num_rows += rows_of_file
    return InputSample(os.fspath(folder), round(num_rows))
