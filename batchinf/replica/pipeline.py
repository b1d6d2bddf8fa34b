"""What stands around an engine: the feeder and the writer with what they need, opened while the engine starts."""

import functools
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from batchinf.base.storage import Folder
from batchinf.engines.protocol import Engine, EngineInfo
from batchinf.job.input_job import image_folder
from batchinf.job.job import carried_fields
from batchinf.manifest.columns import Columns
from batchinf.manifest.lines import Retry
from batchinf.manifest.names import part_name, retry_of
from batchinf.output.journal import Journal
from batchinf.output.open_lease import OpenLease
from batchinf.output.parts import write_part
from batchinf.output.replace import write_replacement
from batchinf.prompts.url_cache import IMAGES_FOLDER
from batchinf.records import Lease, Part, Result
from batchinf.replica.answers import Detokenizer, answers_of
from batchinf.replica.byte_queue import ByteQueue
from batchinf.replica.feeder import Feeder, PendingRequest
from batchinf.replica.images import ImagePrompts, known_images
from batchinf.replica.in_flight import InFlightRecord
from batchinf.replica.messages import Event
from batchinf.replica.worker import Worker, window
from batchinf.replica.writer import Writer
from batchinf.schedule.positions import RETRY_FOLDER, RunOrder, ShardRows, stored_positions
from batchinf.source.rows import Source
from batchinf.spec.job import RULES_OF_ATTEMPTS
from batchinf.tasks.base import Task

# Bounds of the queue before the engine and of the queue before the writer.
_READY_BYTES = 64 << 20
_FINISHED_BYTES = 96 << 20


@dataclass(kw_only=True, eq=False)
class Pipeline:
    """What the feeder and the writer around an engine need, opened before the engine is up."""

    task: Task
    source: Source
    tokenizer: object
    folder: Folder
    incarnation: str
    metadata: Mapping[str, str]
    """For each part's Parquet metadata, beside the engine's versions."""
    emit: Callable[[Event], None]
    order: RunOrder | None = None
    """None: rows run in the order of their positions."""
    begun_at: str | None = None
    may_store: Callable[[], object] = lambda: None
    """Waits until results may be durable."""
    columns: Columns | None = None
    """Those of the job's files; None: all that the task has."""
    given_rows: Callable[[int, int], frozenset[int]] = lambda start, stop: frozenset()
    """The rows from a first to a last position (exclusive) that this retry takes from another file."""
    retry: Retry | None = None
    """Whose rows these are; None: those of the first run."""
    has_forked: threading.Event | None = None
    """No thread may work before it is set, see `fork_event`. None: the process is not forked."""

    def __post_init__(self) -> None:
        self._spec = self.task.spec
        self._carried = carried_fields(self._spec, self.source)
        self._columns = self.columns or Columns.of_new_job(self.task, self._carried)
        # It refers to no pipeline: in a process that goes on for a retry, a cycle would keep this one's open files.
        before = functools.partial(_before_segment, self.may_store, self.source)
        self._journal = Journal(self.folder, self.incarnation, self._columns.journal_schema, before)
        self._retry = retry_of(self.incarnation)
        images = self._spec.input.images
        self._stops_at_changed_images = bool(self._retry) and images is not None and images.on_changed == "stop"
        self._chosen = stored_positions(self.folder, self._retry, where=RETRY_FOLDER) if self._retry else None
        self._detokenizer: Future[Detokenizer | None] = Future()
        threading.Thread(target=self._prepare, name="prepare", daemon=True).start()

    def _prepare(self) -> None:
        """Make the detokenizer beside the engine's start: it takes 1 s for a large vocabulary."""
        if self.has_forked is not None:
            self.has_forked.wait()
        try:
            self._detokenizer.set_result(Detokenizer(self.tokenizer) if self.task.makes_text else None)
        except BaseException as error:
            self._detokenizer.set_exception(error)
        # Arrow imports pandas with the first array that it makes of NumPy's: 0.3 s for which the first part would wait.
        pa.array(np.empty(0, np.int32))

    def complete(self, engine: Engine, in_flight: InFlightRecord) -> Worker:
        """The worker of an engine that is up."""
        info = engine.info
        ready: ByteQueue[PendingRequest] = ByteQueue(_num_ready(info.max_num_seqs), _READY_BYTES)
        finished: ByteQueue[tuple[OpenLease, Result]] = ByteQueue(1 << 30, _FINISHED_BYTES)
        writer = Writer(
            finished=finished,
            task=self.task,
            answers=answers_of(
                self._spec, self.tokenizer, self._detokenizer.result(), self.metadata.get("batchinf.job_id", "")
            ),
            write_part=self._write_by(info),
            emit=self.emit,
            checkpoint_interval_s=self._spec.checkpoint_interval_s,
            is_mirrored=self._spec.output.is_bucket,
        )
        feeder = Feeder(
            source=self.source,
            task=self.task,
            open_lease=self._open_lease,
            ready=ready,
            finished=finished,
            emit=self.emit,
            track=writer.track,
            prompts=functools.partial(self.task.prompt_builder, self.tokenizer, info.vocab_size, self.begun_at),
            max_model_len=info.max_model_len,
            render=engine.render,
            images=self._image_prompts(),
            attempt=self.retry.attempt if self.retry is not None and self._spec.rules >= RULES_OF_ATTEMPTS else 0,
        )
        return Worker(
            engine=engine,
            ready=ready,
            finished=finished,
            feeder=feeder,
            writer=writer,
            in_flight=in_flight,
            counts_output=self.task.draws_tokens,
        )

    def _image_prompts(self) -> ImagePrompts | None:
        where = self._spec.input
        if where.images is None:
            return None
        # A retry fetches images again, so that it notices those that have changed.
        cache = Folder(self.folder.path(f"{IMAGES_FOLDER}/{self._retry}"))
        fails_row = self.retry is not None and self.retry.is_automatic
        return ImagePrompts(where.images, base_folder=image_folder(where), cache_folder=cache, fails_row=fails_row)

    def _open_lease(self, lease: Lease) -> OpenLease:
        rows = ShardRows(lease.start, lease.stop) if self.order is None else self.order.of(lease)
        chosen = None if self._chosen is None else self._chosen.chosen(rows)
        opened = OpenLease(lease, self.task, self._journal, chosen=chosen, rows=rows)
        opened.recover()
        if self._spec.input.has_images:
            part = self.folder.path(f"parts/{part_name(lease.index)}") if self._stops_at_changed_images else None
            given = self.given_rows(rows.first, rows.last + 1) if part is not None else frozenset[int]()
            opened.known_images = known_images(opened, part, given)
        return opened

    def _write_by(self, info: EngineInfo) -> Callable[[OpenLease], Part]:
        versions = {f"batchinf.version.{name}": text for name, text in info.versions.items()}
        write_file = write_replacement if self._retry else write_part
        metadata = {**self.metadata, **versions, "batchinf.device": info.device}

        def write(shard: OpenLease) -> Part:
            self.may_store()
            return write_file(shard, self.source, carried=self._carried, columns=self._columns, metadata=metadata)

        return write


def _before_segment(may_store: Callable[[], object], source: Source) -> None:
    # The writer waits here. Its queue fills up, and admission waits.
    may_store()
    source.keep_digests()


def _num_ready(max_num_seqs: int) -> int:
    """Requests that wait before a full engine."""
    return max(16, window(max_num_seqs) // 2)
