"""What a job has taken in of its input: runs of rows of files, in generations, each recorded once and for ever.

A row's position in the source is its place in this sequence, so that files and rows that come later move none. A
record lies in the cache under the fingerprint of all that it and those before it say; it counts once the manifest
names that.
"""

import json
from collections.abc import Sequence
from dataclasses import astuple, dataclass

import xxhash

from batchinf import faults
from batchinf.input_files import Format
from batchinf.source_cache import read_record, write_record
from batchinf.storage import Folder

FOLDER = "generations"


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of a file's rows.

    file: its number in the job, from 0, the same in each generation that took rows of it. hash, num_bytes: of its
    content then, which has `stop_row` rows.
    """

    file: int
    name: str
    hash: str
    num_bytes: int
    first_row: int
    stop_row: int


@dataclass(frozen=True, slots=True)
class Generation:
    """What was taken in at once. before: the fingerprint of the generation before, None for the first.

    schema: the settled columns of all that was taken in so far, as `schema_text`.
    """

    before: str | None
    format: Format
    schema: str
    segments: tuple[Segment, ...]

    @property
    def fingerprint(self) -> str:
        """Of the content of this generation and all before it; not of where or what the files were."""
        if self.before is None:
            what: list[object] = [self.format, [(segment.hash, segment.stop_row) for segment in self.segments]]
        else:
            runs = [(segment.file, segment.hash, segment.first_row, segment.stop_row) for segment in self.segments]
            what = [self.before, self.format, runs]
        return xxhash.xxh3_128_hexdigest(json.dumps(what).encode())

    @property
    def num_rows(self) -> int:
        """Rows that were taken in then."""
        return sum(segment.stop_row - segment.first_row for segment in self.segments)


def save_generation(cache: Folder, generation: Generation) -> None:
    """Record a generation, unless it is recorded."""
    name = _name(generation.fingerprint)
    if read_record(cache, name):
        return
    content = {
        "before": generation.before,
        "format": generation.format,
        "schema": generation.schema,
        "segments": [astuple(segment) for segment in generation.segments],
    }
    cache.make(FOLDER)
    faults.point("generations.before_record")
    write_record(cache, name, json.loads(json.dumps(content)))
    faults.point("generations.after_record")


def load_generations(cache: Folder, fingerprint: str) -> list[Generation] | None:
    """The generation of this fingerprint and all before it, the first one first; None if a record is not whole."""
    found: list[Generation] = []
    wanted: str | None = fingerprint
    while wanted is not None:
        record = read_record(cache, _name(wanted))
        try:
            segments = tuple(Segment(*segment) for segment in record["segments"])
            found.append(Generation(record["before"], record["format"], record["schema"], segments))
        except (KeyError, TypeError):
            return None
        if found[-1].fingerprint != wanted:
            return None
        wanted = found[-1].before
    return found[::-1]


def record_path(cache: Folder, fingerprint: str) -> str:
    """Where a record lies."""
    return str(cache.path(_name(fingerprint)))


def latest_segments(generations: Sequence[Generation]) -> list[Segment]:
    """Each file's last segment, which says what its content was, by the files' numbers."""
    latest = {segment.file: segment for generation in generations for segment in generation.segments}
    return [latest[file] for file in range(len(latest))]


def _name(fingerprint: str) -> str:
    return f"{FOLDER}/{fingerprint}.json"
