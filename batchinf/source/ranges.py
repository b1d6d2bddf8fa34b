"""Parquet files in an object store of which only some ranges are read, each of them once, into the cache.

The cache has a sparse file with the size and the footer of the object, and a file for each range that was fetched. So
all that reads footers reads a local file. The coordinator fetches what the replicas will read.
"""

import bisect
import contextlib
import functools
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq
import xxhash

from batchinf.base.bucket import Bucket, Object, StoreError
from batchinf.base.errors import InputError
from batchinf.base.parquet import absolute
from batchinf.base.paths import split_bucket_url
from batchinf.base.storage import Folder
from batchinf.source.digests import DigestedFile, changed
from batchinf.source.files import InputFile, grouped

FOLDER = "ranges"
"""In the cache, with a folder for each content of a file."""
END_BYTES = 64 << 10
"""Read at first from the end of a file. Most footers are smaller."""
WHOLE_BYTES = 1 << 20
"""A smaller object is copied whole, in one request."""
_REQUEST_BYTES = 8 << 20  # ranges that follow each other are one request up to this size
_NUM_REQUESTS_AT_ONCE = 16
_BYTES_AT_ONCE = 64 << 20
_DIGEST_BYTES = 8
Span = tuple[int, int]  # first byte of a range, and the one after the last


@dataclass(frozen=True, slots=True)
class RangedFile(InputFile):
    """An object of which the cache has some ranges. `path` is the sparse file with its footer."""

    url: str
    """Of the object."""
    etag: str
    """Of the object whose ranges these are."""
    cache: Folder = field(compare=False)
    """In which the ranges are kept."""

    def reader(self) -> "RangeReader":
        """See `InputFile`."""
        return RangeReader(self)

    def stops(self) -> npt.NDArray[np.int64]:
        """The row after the last one of each row group, int64."""
        metadata = pq.read_metadata(absolute(self.path))
        return np.cumsum([metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)])

    def missing(self, groups: Iterable[int], columns: Sequence[str]) -> list[Span]:
        """The ranges with these columns of these row groups that the cache does not have."""
        metadata = pq.read_metadata(absolute(self.path))
        present = self.cache.sizes(self._folder)
        return [
            span
            for span in chunk_spans(metadata, groups, columns)
            if present.get(_name(span)) != span[1] - span[0] + _DIGEST_BYTES
        ]

    def fetch(self, spans: Iterable[Span]) -> None:
        """Fetch ranges. Raises DriftError if the object has changed since its footer was read."""
        self.cache.make(self._folder)
        requests_of_all = _joined(sorted(spans))
        for requests in grouped(requests_of_all, _num_bytes, _BYTES_AT_ONCE, _NUM_REQUESTS_AT_ONCE):
            read = _read(self.url, [(request[0][0], request[-1][1]) for request in requests])
            for request, found in zip(requests, read, strict=True):
                if found is None or found.etag != self.etag:
                    raise changed(self.name)
                first = request[0][0]
                for start, stop in request:
                    piece = found.data[start - first : stop - first]
                    name = f"{self._folder}/{_name((start, stop))}"
                    self.cache.write_atomic(name, piece + _digest(piece), durable=False)

    def read_span(self, span: Span) -> bytes:
        """The bytes of a range. Fetches it if the cache does not have it, or if its file is damaged."""
        for _ in range(2):
            with contextlib.suppress(FileNotFoundError):
                stored = self.cache.read(f"{self._folder}/{_name(span)}")
                if stored[-_DIGEST_BYTES:] == _digest(stored[:-_DIGEST_BYTES]):
                    return stored[:-_DIGEST_BYTES]
            self.fetch([span])
        raise InputError(f"{self.cache.path(self._folder)} lost data that was just written to it; check this disk")

    @property
    def _folder(self) -> str:
        return f"{FOLDER}/{xxhash.xxh3_64_hexdigest(f'{self.url} {self.etag}'.encode())}"


class RangeReader(DigestedFile):
    """The bytes of a ranged file, for pyarrow and for digests."""

    def __init__(self, file: RangedFile) -> None:
        super().__init__(file.path)
        self._ranged = file
        self._size = os.fstat(self.fileno()).st_size
        self._spans = sorted(chunk_spans(pq.read_metadata(absolute(file.path))))
        self._firsts = [first for first, _ in self._spans]
        footer_bytes = int.from_bytes(os.pread(self.fileno(), 4, self._size - 8), "little")
        self._footer = self._size - 8 - footer_bytes
        self._held: tuple[Span, bytes] | None = None

    def _bytes(self, num_bytes: int | None) -> bytes:
        start = self.tell()
        stop = self._size if num_bytes is None or num_bytes < 0 else min(self._size, start + num_bytes)
        data = b"".join(self._pieces(start, stop))
        self.seek(stop)
        return data

    def _pieces(self, start: int, stop: int) -> Iterator[bytes]:
        while start < stop:
            if start >= self._footer:
                yield os.pread(self.fileno(), stop - start, start)
                return
            number = bisect.bisect_right(self._firsts, start) - 1
            if number >= 0 and start < self._spans[number][1]:
                span = self._spans[number]
            else:  # between column chunks
                span = start, min([stop, self._footer, *self._firsts[number + 1 : number + 2]])
            end = min(stop, span[1])
            yield self._read_span(span)[start - span[0] : end - span[0]]
            start = end

    def _read_span(self, span: Span) -> bytes:
        # A chunk that is decoded page by page is read in many pieces.
        if self._held is None or self._held[0] != span:
            self._held = span, self._ranged.read_span(span)
        return self._held[1]


def chunk_spans(
    metadata: pq.FileMetaData, groups: Iterable[int] | None = None, columns: Sequence[str] | None = None
) -> list[Span]:
    """Where the column chunks are: of these columns of these row groups; None: of all."""
    spans = []
    for group in range(metadata.num_row_groups) if groups is None else groups:
        row_group = metadata.row_group(group)
        for chunk in map(row_group.column, range(row_group.num_columns)):
            path = chunk.path_in_schema
            if columns is None or path in columns or path.partition(".")[0] in columns:
                first = min(filter(None, [chunk.dictionary_page_offset, chunk.data_page_offset]))
                spans.append((first, first + chunk.total_compressed_size))
    return spans


def footer_of(file: InputFile) -> Object | None:
    """The end of a Parquet file in a store, from its footer on; None if it is small, is no Parquet file or is changing.

    In these cases the whole file is copied, and the scan of the copy finds the errors.
    """
    size = file.stamp()[0]
    if size < WHOLE_BYTES or split_bucket_url(file.path) is None:
        return None
    [end] = _read(file.path, [(size - END_BYTES, size)])
    if end is None or len(end.data) != END_BYTES or end.data[-4:] != b"PAR1":
        return None
    num_bytes = 8 + int.from_bytes(end.data[-8:-4], "little")
    if num_bytes > END_BYTES:
        [longer] = _read(file.path, [(size - num_bytes, size)]) if num_bytes < size else [None]
        end = longer if longer is not None and longer.etag == end.etag else None
    return None if end is None else Object(end.data[-num_bytes:], end.etag)


def _read(url: str, ranges: Sequence[Span]) -> Iterator[Object | None]:
    """Ranges of an object, all at a time; None if it is gone. Raises InputError if the store does not give them."""
    place = split_bucket_url(url)
    assert place is not None, url
    root, name = place
    try:
        yield from _bucket(root).get_ranges(name, ranges)
    except StoreError as error:
        raise InputError(f"cannot read the input: {error}") from error


@functools.cache
def _bucket(root: str) -> Bucket:
    return Bucket(root)


def _joined(spans: Sequence[Span]) -> Iterator[list[Span]]:
    """Runs of ranges that follow each other."""
    run: list[Span] = []
    for span in spans:
        if run and (span[0] != run[-1][1] or span[1] - run[0][0] > _REQUEST_BYTES):
            yield run
            run = []
        run.append(span)
    if run:
        yield run


def _num_bytes(request: Sequence[Span]) -> int:
    return request[-1][1] - request[0][0]


def _name(span: Span) -> str:
    return f"{span[0]}-{span[1]}"


def _digest(data: bytes) -> bytes:
    return xxhash.xxh3_64_digest(data)
