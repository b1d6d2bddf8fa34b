"""Finds input files of which every row became an error row, for the closing lines of a job."""

import contextlib
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from batchinf.base.errors import OutputError
from batchinf.base.parquet import open_part
from batchinf.base.slices import source_folder
from batchinf.base.storage import Folder
from batchinf.base.text import counted, list_names
from batchinf.manifest.names import part_name
from batchinf.manifest.state import State
from batchinf.source.versions import load_versions

MANY_ROWS = 100
_MOST_PARTS = 1_000  # so that the closing lines are quick: with more parts to look at, no file is named

_Numbers = npt.NDArray[np.int64]


def bad_file_lines(folder: Folder, state: State) -> list[str]:
    """A line that names the files of at least `MANY_ROWS` rows of which none is good; none without such files."""
    with_errors = [shard for shard, part in sorted(state.parts.items()) if part.num_errors]
    if state.counts.num_errors < MANY_ROWS or len(with_errors) > _MOST_PARTS:
        return []
    versions = load_versions(Folder(source_folder(folder)), state.source_fingerprints[-1])
    added = [file for version in versions or () for file in version.added]
    if not added:
        return []
    sizes = np.array([file.stop_row - file.first_row for file in added], np.int64)
    firsts = np.cumsum(sizes) - sizes
    num_bad = np.zeros(len(added), np.int64)
    has_good = np.zeros(len(added), np.bool_)
    for rows, is_bad in _rows_of(folder, with_errors):
        files = np.searchsorted(firsts, rows, "right") - 1
        has_good[files[~is_bad]] = True
        bad_rows = np.unique(rows[is_bad])
        num_bad += np.bincount(np.searchsorted(firsts, bad_rows, "right") - 1, minlength=len(added))
    found = ~has_good & (num_bad >= MANY_ROWS)
    if (found & (num_bad < sizes)).any():  # the job has not all rows of these files, or others of them are good
        others = sorted(state.parts.keys() - set(with_errors))
        if len(others) > _MOST_PARTS:
            found &= num_bad == sizes
        for rows, _ in _rows_of(folder, others[:_MOST_PARTS]):
            found[np.searchsorted(firsts, rows, "right") - 1] = False
    names = [f"{added[file].name} ({counted(int(num_bad[file]), 'row')})" for file in np.flatnonzero(found)]
    if not names:
        return []
    return [f"warning: every row of {list_names(names)} is an error row: is it damaged, or has it other columns?"]


def _rows_of(folder: Folder, shards: list[int]) -> Iterator[tuple[_Numbers, npt.NDArray[np.bool_]]]:
    """The positions of rows in these parts, and which of them are error rows. Unreadable parts are left out."""
    for shard in shards:
        with contextlib.suppress(OutputError), open_part(folder.path(f"parts/{part_name(shard)}")) as part:
            for group in range(part.num_row_groups):
                table = part.read_row_group(group, columns=["row_index", "error_type"])
                yield table["row_index"].to_numpy(), table["error_type"].is_valid().to_numpy(zero_copy_only=False)
