"""Mirrors the work folder of a job into its bucket while the job runs, and restores it on an empty machine.

The coordinator owns the one `Mirror` of a run; a job in a folder has none. Replicas know nothing of it. Objects:

    commits/000000042                 see `manifest.chain`
    parts/part-000042.parquet         created before their commit; only a retry replaces it, by compare-and-swap
    journal/000003-1f2e3d4c-000001    new segments in one object: names and sizes, then their bytes; see `SegmentPiece`
    selection/000001.positions-1f2e…  the rows that the job runs, with the digest of the file
    retry/000001.positions-1f2e…      the same of retries
    source/versions/1f2e….json        where the rows of the input are, for `--extend`
    telemetry/000003.jsonl            of the reports, one file for each start
    events.jsonl                      for people
    lock, status.json, job.yaml       see `manifest.bucket_lock`; the last writer of the others wins
"""

import contextlib
import math
import pathlib
import queue
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import starmap

from batchinf.base import faults
from batchinf.base.bucket import Bucket, together
from batchinf.base.errors import OutputError
from batchinf.base.process import on_thread
from batchinf.base.storage import Folder, file_digest
from batchinf.base.text import counted, size_text
from batchinf.manifest.bucket_lock import BucketLock
from batchinf.manifest.chain import Chain
from batchinf.manifest.events import EVENTS_FILE
from batchinf.manifest.lock import TAKEOVER_AFTER_S, LockLost
from batchinf.manifest.names import (
    TELEMETRY_FOLDER,
    parse_part_name,
    part_name,
    published_file,
    staged_file,
    staging_name,
)
from batchinf.manifest.state import State, read_beginning, read_state
from batchinf.output.bundles import SegmentPiece, Unsent, bundled, unbundled, whole_segments
from batchinf.output.checkpoints import next_upload_at
from batchinf.output.journal import num_results, place_of
from batchinf.output.restore import fetch_selection, restore_events
from batchinf.prompts.url_cache import IMAGES_FOLDER
from batchinf.records import Part
from batchinf.schedule.positions import RETRY_FOLDER, RUN_FOLDER

_NUM_UPLOADS = 4
_BUNDLE_BYTES = 64 << 20
_BUNDLE_S = 5.0  # that a slow link needs for a bundle
_NUM_BUNDLES = 16  # that are read at a time, if they are small
_MOST_WAITING_BYTES = 1 << 30
_MOST_WAITING_S = 120.0  # that a slow link needs for what waits
_QUIET_S = 600.0  # between two warnings that the store is slow
# After this time without an answer another process may hold the job: a new row might be run twice.
_ABSENT_S = TAKEOVER_AFTER_S
_STATUS_EVERY_S = 30.0
_TELEMETRY_EVERY_S = 300.0
_LOOK_S = 0.2
_LAST_PATIENCE_S = 5.0
_LAST_S = 1.0  # that there is in any case
_VERSIONS = "source/versions"


class Mirror:
    """The bucket of a running job. Hold the work folder's own lock while it is in use."""

    def __init__(
        self, bucket: Bucket, folder: Folder, source: Folder, *, interval_s: float, say: Callable[[str], None]
    ) -> None:
        """interval_s: between two bundles of the journal. source: where the job keeps the results of its scan."""
        self.url = bucket.url
        self.chain = Chain(bucket)
        self.chain.before = self._send_records
        self.lock = BucketLock(bucket)
        self.judge: Callable[[str, int], Part | None] = lambda name, shard: None
        """The record of a file of the folder if it is the whole part of a shard; set when the job is known."""
        self._bucket = bucket
        self._folder = folder
        self._source = source
        self._say = say
        self._interval_s = interval_s
        self._queue: queue.SimpleQueue[Part] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[Part, Part]] = queue.SimpleQueue()
        self.waiting: dict[int, Part] = {}
        """By shard, the parts that are not uploaded or not committed yet."""
        self._error: OutputError | None = None
        self._is_closed = threading.Event()
        self._owner: threading.Thread | None = None
        self._threads: list[threading.Thread] = []
        self._sending = threading.Lock()
        self._sent: set[str] = set()
        """Names of segments and of records that the bucket has."""
        self._num_sent: dict[str, int] = {}
        """By segment, the bytes of it that the bucket has."""
        self._num_unsent_bytes = 0
        """Of segments that are to be sent, at the last look."""
        self._bundles: dict[str, set[tuple[int, int]]] = {}
        """The shards of each bundle in the bucket, with the retry of the segment."""
        self._dropped: dict[int, int] = {}
        """By shard, the last retry whose segments are no longer needed; 0: the first run's."""
        self._etags: dict[int, str] = {}
        """Of the committed parts that are in the folder, by shard."""
        self._num_bundles = 0
        self._end_by: Callable[[], float] = lambda: math.inf
        self._token = uuid.uuid4().hex[:8]
        self._was_held_back = False
        self._is_said = False
        """Whether the last line said that no new rows begin."""
        self._says_slow_at = 0.0

    # -- restoring -----------------------------------------------------------------------------------------------------

    def restore(self) -> None:
        """Make the folder's manifest and selection those of the bucket, which count. The folder may be empty."""
        self._restore(on_thread(partial(self._bucket.sizes, "parts")))

    def _restore(self, listing: "Future[dict[str, int]]") -> None:
        """listing: of the parts. Requests that do not depend on each other run together: each may take 0.3 s."""
        before = _job_id(self._folder)
        if not self.chain.read() and self.chain.commits:
            return
        self.chain.restore(self._folder)
        if _job_id(self._folder) != before:
            for name in ("staging", "journal", IMAGES_FOLDER, RUN_FOLDER, RETRY_FOLDER):
                shutil.rmtree(self._folder.path(name), ignore_errors=True)
            self._folder.delete(EVENTS_FILE)
        if not self.chain.commits and listing.result():
            raise OutputError(
                f"{self.url} holds parts of a job without its manifest: give the new job another output.path, or "
                "delete the parts"
            )
        state = read_state(self._folder)
        if state is not None:
            # Segments that this folder has of parts that the bucket has are not sent, also if nothing runs.
            self._dropped = {shard: part.retry for shard, part in state.parts.items()}
            versions = on_thread(self._restore_versions)
            self._sent.update(fetch_selection(self._bucket, self._folder, state))
            versions.result()

    def take_over(self) -> int:
        """Restore all that a start needs, with the lock held. Returns the last epoch."""
        listing = on_thread(partial(self._bucket.sizes, "parts"))
        bundles = on_thread(partial(self._bucket.sizes, "journal"))
        events = on_thread(partial(self._bucket.get, EVENTS_FILE))
        self._restore(listing)
        state = read_state(self._folder)
        self._folder.make("staging", "journal", "parts")
        # Parts are in the bucket alone. A reader must not find others here.
        shutil.rmtree(self._folder.path("parts"))
        self._folder.make("parts")
        committed = {} if state is None else state.parts
        shards = map(parse_part_name, listing.result())
        # Uploaded, but not committed: the recovery commits them like staged parts.
        _finish(partial(self._stage, shard) for shard in shards if shard is not None and shard not in committed)
        self._restore_journal(bundles.result())
        restore_events(self._folder, events.result())
        return self.chain.last_epoch

    def _stage(self, shard: int) -> tuple[str, str, str] | None:
        """Download the part of a shard into `staging/`: its name there, its digest, and the ETag; None without one."""
        path = self._folder.path(f"staging/.tmp-{uuid.uuid4().hex}")
        etag = self._bucket.download(f"parts/{part_name(shard)}", path)
        if etag is None:
            return None
        digest = file_digest(path)
        name = f"staging/{staging_name(shard, digest)}"
        path.replace(self._folder.path(name))
        return name, digest, etag

    def has_leftovers(self) -> bool:
        """Whether killed processes left results or the lock of a finished job. False while a process may hold it."""
        is_left = self.lock.is_left()
        return is_left is not None and (is_left or bool(self._bucket.sizes("journal")))

    def changed_parts(self, state: State) -> list[int]:
        """The committed shards whose part is missing in the bucket or has another size."""
        if not state.parts:
            return []
        sizes = self._bucket.sizes("parts")
        lost = [shard for shard, part in sorted(state.parts.items()) if sizes.get(part_name(shard)) != part.num_bytes]
        for shard in lost:
            self._dropped.pop(shard, None)
        return lost

    def say_fetch(self, parts: Sequence[Part]) -> None:
        """Say how much is about to be fetched."""
        if parts := [part for part in parts if part.shard not in self._etags]:
            size = size_text(sum(part.num_bytes for part in parts))
            self._say(f"fetching {counted(len(parts), 'part')}, {size}, from {self.url}")

    def fetch_part(self, part: Part) -> Part:
        """As `find_part`, but raises OutputError if neither of them is there."""
        if (found := self.find_part(part)) is None:
            raise OutputError(
                f"{self.url}/{published_file(part)} is not the committed part: delete it, and run the same command "
                "again, which makes it again"
            )
        return found

    def find_part(self, part: Part) -> Part | None:
        """Download a committed part into the folder, unless it is there.

        Returns it, or its replacement: a process that was killed has uploaded that, and has not committed it. None if
        neither of them is there.
        """
        if part.shard in self._etags:
            return part
        self._folder.make("staging", "parts")  # a job that was done already has not made them
        if (there := self._stage(part.shard)) is None:
            return None
        staged, digest, etag = there
        found = part if digest == part.digest else self.judge(staged, part.shard)
        if found is None:
            self._folder.delete(staged)
        else:
            self._folder.publish(staged, published_file(part), durable=False)
            self._etags[part.shard] = etag
        return found

    def forget_part(self, shard: int) -> None:
        """Delete the folder's copy of a part."""
        self._etags.pop(shard, None)
        self._folder.delete(f"parts/{part_name(shard)}")

    def fetch_some(self, parts: Sequence[Part], most_bytes: int) -> None:
        """Download committed parts for the closing lines, up to this many bytes."""
        for part in parts:
            most_bytes -= part.num_bytes
            if most_bytes >= 0:
                self.fetch_part(part)

    def _restore_versions(self) -> None:
        names = self._bucket.sizes(_VERSIONS)
        self._sent.update(f"{_VERSIONS}/{name}" for name in names)
        absent = [name for name in names if not self._source.exists(f"versions/{name}")]
        self._source.make("versions")
        _finish(
            partial(self._bucket.download, f"{_VERSIONS}/{name}", self._source.path(f"versions/{name}"))
            for name in absent
        )

    def _restore_journal(self, bundles: Mapping[str, int]) -> None:
        """bundles: the bytes of each by its name."""
        largest = max(bundles.values(), default=0)
        gets = (partial(self._bucket.get, f"journal/{name}") for name in bundles)
        at_once = min(_NUM_BUNDLES, max(1, _BUNDLE_BYTES // max(1, largest)))

        def read() -> Iterator[SegmentPiece]:
            for name, found in zip(bundles, together(gets, at_once), strict=True):
                if found is not None:
                    pieces = [*unbundled(found.data)]
                    self._note_bundle(name, pieces)
                    yield from pieces

        for name, data in whole_segments(read()):
            self._sent.add(name)
            if self._is_needed(name) and not self._folder.exists(f"journal/{name}"):
                self._folder.write_atomic(f"journal/{name}", data, durable=False)

    def _note_bundle(self, name: str, pieces: Iterable[SegmentPiece]) -> None:
        self._bundles[name] = {place for piece in pieces if (place := place_of(piece.segment)) is not None}

    def _is_needed(self, segment: str) -> bool:
        """Whether the bucket needs it. A part that waits for its upload replaces the segments of its shard."""
        place = place_of(segment)
        return place is not None and place[0] not in self.waiting and not self._is_dropped(*place)

    def _is_dropped(self, shard: int, retry: int) -> bool:
        return shard in self._dropped and retry <= self._dropped[shard]

    # -- while the job runs --------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the threads that upload. Warnings come from the calling thread alone."""
        self._owner = threading.current_thread()
        self._bucket.on_failure = self._note_failure
        works = [self._upload_parts] * _NUM_UPLOADS + [self._keep_sending]
        self._threads = [threading.Thread(target=work, name="mirror", daemon=True) for work in works]
        for thread in self._threads:
            thread.start()

    def until(self, end_by: Callable[[], float]) -> None:
        """From now on, wait for the store only until this time, which may change; monotonic, in seconds."""
        self._end_by = end_by
        self._bucket.is_stopped = lambda: time.monotonic() > end_by()

    def exchange(self, parts: Sequence[Part]) -> list[tuple[Part, Part]]:
        """Begin to upload staged parts, and return those that have been uploaded since: they can be committed.

        With each comes the part that the bucket has, which an earlier process may have uploaded. Raises StoreError if
        the store takes no part.
        """
        for part in parts:
            self.waiting[part.shard] = part
            self._queue.put(part)
        if self._error is not None:
            raise self._error
        uploaded = []
        while True:
            try:
                uploaded.append(self._done.get_nowait())
            except queue.Empty:
                return uploaded

    def put_part(self, part: Part) -> Part:
        """Upload a staged part. Returns the part that is there now, which an earlier process may have uploaded.

        A whole part of the job is never replaced: it may be committed by now. Anything else cannot have been committed.
        The part of a retry replaces the one from which it was made, and nothing else.
        """
        name = published_file(part)
        etag = self._etags.get(part.shard) if part.retry else None
        while True:
            self._refuse_if_lost()
            faults.point("mirror.before_part")
            etag = self._bucket.upload(name, self._folder.path(staged_file(part)), etag)
            faults.point("mirror.after_part")
            if etag is None:
                return part
            if (theirs := self._stage(part.shard)) is not None:
                staged, digest, etag = theirs
                whole = part if digest == part.digest else self.judge(staged, part.shard)
                if digest != part.digest:
                    self._folder.delete(staged)
                if whole is not None:
                    return whole
                if part.retry:
                    raise OutputError(
                        f"{self.url}/{name} is neither the committed part nor that of retry {part.retry}: another "
                        "process has changed it; run the same command again"
                    )

    def note_committed(self, parts: Sequence[Part]) -> None:
        """The segments of which these parts have the results are no longer needed."""
        for part in parts:
            self._dropped[part.shard] = part.retry
            self.waiting.pop(part.shard, None)
            self.forget_part(part.shard)

    @property
    def has_news(self) -> bool:
        """Whether `exchange` returns parts, or raises."""
        return self._error is not None or not self._done.empty()

    @property
    def is_busy(self) -> bool:
        """Whether parts wait for their upload or their commit."""
        return bool(self.waiting) and self._error is None

    def held_back(self, say: Callable[[str], None]) -> bool:
        """Whether no new rows should begin, because the store is slow or absent. Says so when it begins and ends."""
        since = self._bucket.failing_since
        absent_s = 0.0 if since is None else time.monotonic() - since
        num_bytes = sum(part.num_bytes for part in [*self.waiting.values()]) + self._num_unsent_bytes
        most_bytes = self._most_waiting_bytes / (2 if self._was_held_back else 1)
        is_held_back = absent_s > _ABSENT_S or num_bytes > most_bytes
        if is_held_back != self._was_held_back:
            self._was_held_back = is_held_back
            parts = counted(len(self.waiting), "part")
            waiting = f"{parts} and results in the journal, {size_text(num_bytes)}, wait for it"
            if absent_s > _ABSENT_S:
                self._is_said = True
                say(f"warning: {self.url} has not answered for {absent_s:.0f} s ({self._bucket.failure}); {waiting}; "
                    "no new rows begin until it does")  # fmt: skip
            elif is_held_back and time.monotonic() >= self._says_slow_at:
                self._is_said = True
                self._says_slow_at = time.monotonic() + _QUIET_S
                say(f"warning: {self.url} is slower than the engines: {waiting}; no new rows begin until it has half "
                    f"of that (said at most once in {_QUIET_S / 60:.0f} min)")  # fmt: skip
            elif not is_held_back and self._is_said:
                self._is_said = False
                say(f"{self.url} answers again: new rows begin")
        return is_held_back

    @property
    def _most_waiting_bytes(self) -> int:
        """How much may wait for the store: the disk of the node and the time of the link are bounded."""
        if self._bucket.bytes_per_s is None:
            return _MOST_WAITING_BYTES
        # The speed is that of one request, and the parts are sent beside the journal.
        num_requests = 1 + min(_NUM_UPLOADS, len(self.waiting))
        return min(_MOST_WAITING_BYTES, num_requests * self._bucket.bytes_in(_MOST_WAITING_S))

    def _note_failure(self) -> None:
        """A commit waits for the store, and the coordinator with it: say so meanwhile."""
        if threading.current_thread() is self._owner:
            self.held_back(self._say)

    def kept_line(self, state: State) -> str:
        """What the bucket has when the run ends early, and what only this host has. state: what is committed."""
        kept = {**state.parts, **self.waiting}
        num_here = num_results(self._folder, kept) - num_results(self._folder, kept, self._sent)
        num_sent = num_results(self._folder, state.parts, self._sent)
        has = f"  {self.url} has {counted(len(state.parts), 'part')} and {counted(num_sent, 'request')} of the journal"
        here = [counted(len(self.waiting), "finished part")] if self.waiting else []
        if num_here:
            here.append(f"{counted(num_here, 'request')} of the journal")
        if not here:
            return has
        return (
            f"{has}; only {self._folder.root} on this host has {' and '.join(here)}: the same command sends them from "
            "here, and on another host their rows run again"
        )

    def flush(self) -> None:
        """Upload the segments that are not in the bucket yet. Passes over a store that does not answer."""
        with contextlib.suppress(OutputError, OSError):
            while self._send_some():
                pass

    def finish(self) -> None:
        """Delete the journal of a job that is done, and upload all that only informs, before the lock is freed."""
        informing = on_thread(self._put_last)
        self.flush()
        informing.result()

    def _put_last(self) -> None:
        """Upload what only informs, unless the bucket has it as it is now."""
        names = ("status.json", "job.yaml", self._telemetry, EVENTS_FILE)
        self._put(
            *(name for name in names if self._folder.exists(name) and _mark(self._folder.path(name)) not in self._sent)
        )

    def close(self) -> None:
        """End the threads. Upload the segments and the status that the bucket lacks, in a few seconds at most."""
        self._is_closed.set()
        now = time.monotonic()
        end_by = max(now + _LAST_S, min(now + _LAST_PATIENCE_S, self._end_by()))
        self.until(lambda: end_by)
        for thread in self._threads:
            thread.join(max(0.0, end_by + 2 * _LOOK_S - time.monotonic()))
        self.finish()

    @property
    def _telemetry(self) -> str:
        return f"{TELEMETRY_FOLDER}/{self.chain.epoch:06d}.jsonl"

    # -- threads -------------------------------------------------------------------------------------------------------

    def _upload_parts(self) -> None:
        while not self._is_closed.is_set():
            try:
                part = self._queue.get(timeout=_LOOK_S)
            except queue.Empty:
                continue
            try:
                self._done.put((part, self.put_part(part)))
            except OutputError as error:
                self._error = self._error or error
            except Exception as error:
                self._error = self._error or OutputError(f"cannot upload {staged_file(part)}: {error}")

    def _keep_sending(self) -> None:
        next_look = next_upload_at(time.monotonic(), self._interval_s)
        next_status = 0.0
        next_telemetry = time.monotonic() + _TELEMETRY_EVERY_S
        is_behind = False
        while not self._is_closed.wait(min(_LOOK_S, self._interval_s / 10)) and not self.chain.is_lost:
            with contextlib.suppress(OutputError, OSError):
                if time.monotonic() >= next_status:
                    next_status = time.monotonic() + _STATUS_EVERY_S
                    self._put("status.json")
                if time.monotonic() >= next_telemetry:
                    next_telemetry = time.monotonic() + _TELEMETRY_EVERY_S
                    self._put(self._telemetry, EVENTS_FILE)
                if is_behind or time.monotonic() >= next_look:
                    next_look = next_upload_at(time.monotonic(), self._interval_s)
                    is_behind = False  # after an error, at the next look
                    is_behind = self._send_some()

    def _put(self, *names: str) -> None:
        """Copy files that only inform."""
        _finish(partial(self._put_file, name) for name in names)

    def _put_file(self, name: str) -> None:
        with contextlib.suppress(OutputError, OSError):
            self._refuse_if_lost()
            mark = _mark(self._folder.path(name))
            self._bucket.put(name, self._folder.read(name), _LAST_PATIENCE_S)
            self._sent.add(mark)

    def _send_some(self) -> bool:
        """Store the oldest new segments, and delete the bundles of which none is needed. Whether more are to be sent.

        A bundle has as many bytes as the link takes in some seconds.
        """
        with self._sending:
            unsent = self._unsent()
            self._num_unsent_bytes = sum(each.num_left for each in unsent)
            most_bytes = min(_BUNDLE_BYTES, max(1, self._bucket.bytes_in(_BUNDLE_S)))
            pieces: list[SegmentPiece] = []
            for each in unsent:
                if most_bytes <= 0:
                    break
                with contextlib.suppress(FileNotFoundError):  # its results are in a part by now
                    pieces.append(each.read(self._folder, most_bytes))
                    most_bytes -= len(pieces[-1].data)
            if pieces:
                self._send(pieces)
                self._num_unsent_bytes -= sum(len(piece.data) for piece in pieces)
            dropped = [name for name, places in self._bundles.items() if all(starmap(self._is_dropped, places))]
            _finish(partial(self._delete_bundle, bundle) for bundle in dropped)
            return bool(pieces) and self._num_unsent_bytes > 0

    def _unsent(self) -> list[Unsent]:
        """The segments that are to be sent, the oldest first."""
        unsent = []
        for name in self._folder.list("journal"):
            if name in self._sent or not self._is_needed(name):
                continue
            with contextlib.suppress(FileNotFoundError):
                status = self._folder.path(f"journal/{name}").stat()
                unsent.append(Unsent(status.st_mtime_ns, name, status.st_size, self._num_sent.get(name, 0)))
        return sorted(unsent)

    def _delete_bundle(self, bundle: str) -> None:
        self._refuse_if_lost()
        faults.point("mirror.before_delete")
        self._bucket.delete([f"journal/{bundle}"])
        del self._bundles[bundle]

    def _send(self, pieces: Sequence[SegmentPiece]) -> None:
        self._refuse_if_lost()
        self._num_bundles += 1
        bundle = f"{self.chain.epoch:06d}-{self._token}-{self._num_bundles:06d}"
        # Before the request: it may come through although it has failed.
        self._note_bundle(bundle, pieces)
        faults.point("mirror.before_bundle")
        self._bucket.put_new(
            f"journal/{bundle}", bundled(pieces), lambda: any(self._is_needed(piece.segment) for piece in pieces)
        )
        faults.point("mirror.after_bundle")
        for piece in pieces:
            self._num_sent[piece.segment] = piece.first + len(piece.data)
            if piece.first + len(piece.data) == piece.num_bytes:
                self._sent.add(piece.segment)

    def _send_records(self) -> None:
        """Store the files of chosen rows and the versions of the input, before a commit names one."""
        files = [f"{where}/{name}" for where in (RUN_FOLDER, RETRY_FOLDER) for name in self._folder.list(where)]
        chosen = [partial(self._send_chosen, name) for name in files if name.endswith(".positions")]
        _finish([*chosen, *(partial(self._send_version, name) for name in self._source.list("versions"))])

    def _send_chosen(self, name: str) -> None:
        path = self._folder.path(name)
        if (mark := _mark(path)) in self._sent:
            return
        named = f"{name}-{file_digest(path)}"
        if named not in self._sent:
            self._bucket.upload(named, path)
            self._sent.add(named)
        self._sent.add(mark)

    def _send_version(self, name: str) -> None:
        named = f"{_VERSIONS}/{name}"
        if named not in self._sent:
            self._bucket.put_new(named, self._source.read(f"versions/{name}"))
            self._sent.add(named)

    def _refuse_if_lost(self) -> None:
        if self.chain.is_lost:
            raise LockLost(f"{self.url} is no longer held by this process")
        self.lock.check()


def _finish(calls: Iterable[Callable[[], object]]) -> None:
    """Do all of this, several at a time. Raises the first error."""
    for _ in together(calls):
        pass


def _job_id(folder: Folder) -> str | None:
    with contextlib.suppress(OutputError):
        return read_beginning(folder).job_id
    return None


def _mark(path: pathlib.Path) -> str:
    """Tells a file from those that had its name before."""
    status = path.stat()
    return f"{path.name} {status.st_ino} {status.st_mtime_ns} {status.st_size}"
