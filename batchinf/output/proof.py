"""Checks whether a file in `parts/` is the committed part: by size and footer for a resume, by each byte for `check`.

Size and footer (job, shard, and numbers of rows, errors and tokens) reveal a part that is missing, cut, swapped or
another job's. That takes about 20 µs a part, because no data is read.
"""

import functools
import os
import pathlib
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from batchinf.base.errors import OutputError
from batchinf.base.parquet import ParquetFile, absolute
from batchinf.base.storage import Folder, file_digest, reason
from batchinf.base.text import list_names
from batchinf.manifest.lines import BASIC_COUNTS
from batchinf.manifest.names import part_name, published_file, staged_file
from batchinf.manifest.state import State
from batchinf.output.parts import RETRY_KEY, shard_entries
from batchinf.records import Part, Shard
from batchinf.schedule.positions import RunOrder, ShardRows
from batchinf.schedule.shards import shard_at

_MAGIC = b"PAR1"
# Footers of narrow tables with few row groups have 5 KB. Larger ones need a second read.
_END_BYTES = 16 << 10
_KEY_ROWS = 1 << 16
# Reads wait for disks and servers, so several run at once.
NUM_THREADS = 4
_CHUNK = 512


class _NotPartError(ValueError):
    """A file is not a complete Parquet file."""


def changed_parts(folder: Folder, state: State) -> list[int]:
    """The committed shards whose part is missing, has another size, or is a different part by its footer.

    Raises OutputError if a part cannot be read, if all parts belong to another job, or if the stored selection is
    missing.
    """
    sizes = folder.sizes("parts")
    order = RunOrder(folder, state.extents)
    order.check()

    # Reads no data. Only `check --deep` finds a flipped bit in it.
    def changed(shards: Sequence[int]) -> list[int]:
        return [shard for shard in shards if not is_committed(shard)]

    def is_committed(shard: int) -> bool:
        name = part_name(shard)
        line = state.parts[shard]
        place = shard_at(state.extents, shard)
        if sizes.get(name) != line.num_bytes:
            return False
        path = folder.path(f"parts/{name}")
        expected = expected_entries(state.header.job_id, place, order.first_row(place), line)
        try:
            return _footer_flaw(path, expected, None) is None
        except FileNotFoundError:
            return False
        except OSError as error:
            raise OutputError(
                f"cannot read {path}: {reason(error)}; correct the cause and run the same command again"
            ) from error

    shards = sorted(state.parts)
    chunks = [shards[start : start + _CHUNK] for start in range(0, len(shards), _CHUNK)]
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        lost = [shard for chunk in pool.map(changed, chunks) for shard in chunk]
    if len(lost) == len(shards):
        _refuse_foreign(folder, state, [shard for shard in lost if part_name(shard) in sizes])
    return lost


def _refuse_foreign(folder: Folder, state: State, shards: Sequence[int]) -> None:
    """Raise OutputError if the parts are another job's: a new run would overwrite them."""
    owner = other_owner(folder, state, shards)
    if owner:
        raise OutputError(
            f"{folder.path('manifest')} belongs to job {state.header.job_id}, but the parts beside it belong to job "
            f"{owner}: restore the right manifest, or move the parts away so that all rows run again"
        )


def other_owner(folder: Folder, state: State, shards: Sequence[int]) -> str | None:
    """The id of the other job, if these shards' parts belong to other jobs only."""
    owners = {owner for shard in shards if (owner := job_of(folder, f"parts/{part_name(shard)}"))}
    return None if state.header.job_id in owners else min(owners, default=None)


def job_of(folder: Folder, name: str) -> str | None:
    """The job id in a part's footer; None if the file is no part."""
    try:
        return _stated(read_footer(folder.path(name)), "batchinf.job_id")
    except (_NotPartError, OSError):
        return None


def is_newer(folder: Folder, shard: int, state: State) -> bool:
    """Whether the file of a shard in `parts/` is a part of the job that the manifest does not know yet.

    It has no line, or it has been through a later retry than its line says. So the manifest is older than the part.
    """
    try:
        footer = read_footer(folder.path(f"parts/{part_name(shard)}"))
    except (_NotPartError, OSError):
        return False
    if (_stated(footer, "batchinf.job_id"), _stated(footer, "batchinf.shard")) != (state.header.job_id, str(shard)):
        return False
    line = state.parts.get(shard)
    return line is None or int(_stated(footer, RETRY_KEY) or 0) > line.retry


def expected_entries(job_id: str, shard: Shard, first_row: int, line: Part) -> dict[str, str | None]:
    """The expected entries in the footer of the part that `line` names; None: it must not be there."""
    counts = {f"batchinf.{name}": str(getattr(line, name)) for name in BASIC_COUNTS}
    retry = str(line.retry) if line.retry else None
    return {"batchinf.job_id": job_id, **shard_entries(shard, first_row), **counts, RETRY_KEY: retry}


# -- the footer as bytes: parsing it takes 160 µs, ten times as long ---------------------------------------------------


def read_footer(path: pathlib.Path) -> bytes:
    """A Parquet file's footer (Thrift, without length and magic). Raises OSError, or ValueError without a footer."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        size = os.fstat(descriptor).st_size
        end = os.pread(descriptor, _END_BYTES, max(0, size - _END_BYTES))
        num_bytes = int.from_bytes(end[-8:-4], "little")
        if end[-4:] != _MAGIC or num_bytes + 12 > size:
            raise _NotPartError("it has no footer and may be cut short")
        if num_bytes + 8 > len(end):
            end = os.pread(descriptor, num_bytes + 8, size - num_bytes - 8)
        return end[-num_bytes - 8 : -8]
    finally:
        os.close(descriptor)


def _encoded(name: str, value: str) -> bytes:
    """A metadata entry in Thrift's compact protocol: two strings with their lengths, then a zero."""
    content = value.encode()
    return b"%b%c%b\x00" % (_encoded_key(name), len(content), content)


@functools.cache
def _encoded_key(name: str) -> bytes:
    key = name.encode()
    return b"\x18%c%b\x18" % (len(key), key)


def _stated(footer: bytes, name: str) -> str | None:
    # The last match: the metadata comes after the statistics, which depend on the data.
    values = re.findall(rb"\x18.%b\x18.([0-9A-Za-z]*)\x00" % re.escape(name.encode()), footer, re.DOTALL)
    return values[-1].decode() if values else None


# -- the reason why a part is wrong ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Flaw:
    """What is wrong with a part."""

    what: str
    is_seen_by_run: bool
    """Whether `run` notices it, too, and runs the shard again."""


@dataclass(frozen=True, slots=True)
class PartsOfJob:
    """What the parts of a job must be."""

    folder: Folder
    job_id: str
    order: RunOrder
    num_samples: int | None
    """Output rows for each row of the source; None: rows have their own number."""
    schema: pa.Schema

    def flaw(self, shard: Shard, line: Part, *, is_deep: bool) -> Flaw | None:
        """What is wrong with the part of a shard, or None. line: of the manifest.

        is_deep: check each byte, the columns, and the keys of all rows, in bounded memory. A part whose coordinator was
        killed may still stand in `staging/`.
        """
        staged = staged_file(line)
        path = self.folder.path(staged if self.folder.exists(staged) else published_file(line))
        rows = self.order.of(shard)
        try:
            size = path.stat().st_size
            size_flaw = f"has {size:,} bytes, but {line.num_bytes:,} were written" if size != line.num_bytes else None
            if what := _footer_flaw(path, expected_entries(self.job_id, shard, rows.first, line), size_flaw):
                return Flaw(what, is_seen_by_run=True)
            what = _number_flaw(path, line, shard.num_rows, self.num_samples)
            if is_deep and what is None:
                is_written = file_digest(path) == line.digest
                what = None if is_written else "is altered: its bytes are not those that were written"
                what = what or self._schema_flaw(path) or _key_flaw(path, rows, self.num_samples)
            return Flaw(what, is_seen_by_run=False) if what else None
        except FileNotFoundError:
            return Flaw("is missing", is_seen_by_run=True)
        except OSError as error:
            return Flaw(f"cannot be read: {reason(error)}", is_seen_by_run=False)
        except (pa.ArrowException, ValueError) as error:
            return Flaw(f"is altered: {str(error).partition(chr(10))[0]}", is_seen_by_run=False)

    def _schema_flaw(self, path: pathlib.Path) -> str | None:
        schema = pq.read_schema(absolute(path)).remove_metadata()
        if schema.equals(self.schema):
            return None
        was = {field.name: field.type for field in self.schema}
        now = {field.name: field.type for field in schema}
        names = [name for name in was | now if was.get(name) != now.get(name)]
        what = f"it differs in {list_names(names)}" if names else "their order differs"
        return f"does not have the columns with which the job began: {what}"


def _footer_flaw(path: pathlib.Path, entries: Mapping[str, str | None], size_flaw: str | None) -> str | None:
    """What is wrong with a part by its footer, or else its size. Raises OSError."""
    try:
        footer = read_footer(path)
    except _NotPartError as error:
        return size_flaw or f"is altered: {error}"
    for name, value in entries.items():
        if (_encoded_key(name) in footer) if value is None else (_encoded(name, value) not in footer):
            return _entry_flaw(name.removeprefix("batchinf."), _stated(footer, name), value, size_flaw)
    return size_flaw


def _number_flaw(path: pathlib.Path, line: Part, num_inputs: int, num_samples: int | None) -> str | None:
    if num_samples is None and line.num_rows < num_inputs:
        return f"has {line.num_rows:,} rows, but must have at least {num_inputs:,}"
    expected = line.num_rows if num_samples is None else num_inputs * num_samples
    for num_rows in (line.num_rows, pq.read_metadata(absolute(path)).num_rows):
        if num_rows != expected:
            return f"has {num_rows:,} rows, but must have {expected:,}"
    return None


def _entry_flaw(name: str, stated: str | None, expected: str | None, size_flaw: str | None) -> str:
    if stated is None:
        return size_flaw or "is altered: its footer does not say which part it is"
    if name == "job_id":
        return f"is a part of another job, {stated}"
    if name == "shard":
        return f"is the part of shard {stated} under another part's name"
    return f"is not the committed file: its footer has {name} {stated}, its manifest line {expected or 'none'}"


def _key_flaw(path: pathlib.Path, shard: ShardRows, num_samples: int | None) -> str | None:
    """Check that the file has each (row_index, sample_index) of the shard once and in order."""
    positions = shard.positions()
    place = -1  # of the last row in the shard
    sample = (num_samples or 1) - 1  # the last one of that row
    with ParquetFile(path) as file:
        names = [name for name in ("row_index", "sample_index") if name in file.schema_arrow.names]
        for batch in file.iter_batches(_KEY_ROWS, columns=names):
            keys = {name: batch.column(name).to_numpy() for name in names}
            rows = keys["row_index"]
            samples = keys.get("sample_index", np.zeros(len(rows), np.int32))
            places, expected = _expected_keys(samples, place, sample, num_samples)
            row = positions[np.minimum(places, len(shard) - 1)]
            is_right = (rows == row) & (samples == expected) & (places >= 0) & (places < len(shard))
            if not is_right.all():
                i = int(is_right.argmin())
                if places[i] >= len(shard):
                    return f"has row {rows[i]}, sample {samples[i]} after its last row"
                return f"has row {rows[i]}, sample {samples[i]} in the place of row {row[i]}, sample {expected[i]}"
            place = int(places[-1])
            sample = int(expected[-1])
    if place + 1 == len(shard) and (num_samples is None or sample == num_samples - 1):
        return None
    return f"ends with row {positions[place]}, sample {sample}, but must have all {len(shard):,} rows"


def _expected_keys(
    samples: npt.NDArray[np.int32], place: int, sample: int, num_samples: int | None
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The place of each output row's input row, and its sample, after the last ones of the rows before.

    num_samples: of each row; None: a row begins with each sample 0.
    """
    if num_samples is not None:
        numbers = place * num_samples + sample + 1 + np.arange(len(samples))
        return numbers // num_samples, numbers % num_samples
    is_first = samples == 0
    places = place + np.cumsum(is_first)
    numbers = np.arange(len(samples))
    # The last sample 0 before each row, or the row that the rows before have begun.
    firsts = np.maximum.accumulate(np.where(is_first, numbers, -1 - sample))
    return places, numbers - firsts
