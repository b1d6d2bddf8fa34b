"""Drives one engine: the pipeline of feeder, engine and writer, and the record of the rows in the engine.

Requests enter without a barrier between leases, so that the engine stays full. The record is memory of the backend and
outlives the replica: if the engine or the replica dies, the rows in it are suspected. An entry takes less than a
microsecond and no disk access.
"""

import functools
import struct
import threading
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from mmap import mmap

import numpy as np
import pyarrow as pa

from batchinf.base import faults
from batchinf.base.errors import EngineDeadError, RowFailed
from batchinf.base.storage import Folder
from batchinf.engines.installed import structures_backend
from batchinf.engines.protocol import Engine
from batchinf.job.input_job import image_folder
from batchinf.job.job import carried_fields
from batchinf.manifest.columns import Columns
from batchinf.manifest.names import part_name, retry_of
from batchinf.output.journal import Journal
from batchinf.output.open_lease import OpenLease
from batchinf.output.parts import PartTarget, write_part
from batchinf.output.replace import write_replacement
from batchinf.prompts.url_cache import IMAGES_FOLDER
from batchinf.records import Completion, EngineInfo, Lease, Part, Request
from batchinf.replica.answers import Answers, Detokenizer
from batchinf.replica.calls import Calls
from batchinf.replica.feeder import ByteQueue, FailedRow, Feeder, PendingRequest, error_result
from batchinf.replica.images import IMAGE_BYTES, ImagePrompts, known_images
from batchinf.replica.messages import Event, InFlightRequest, Progress
from batchinf.replica.writer import USUAL, WIDE, Finished, Writer
from batchinf.schedule.positions import RETRY_FOLDER, RunOrder, ShardRows, stored_positions
from batchinf.source.rows import Source
from batchinf.spec.job import JobSpec
from batchinf.tasks.base import Task

# row_index, then 0 for a free slot or 2 * (order of entering) + (1 once a token came out).
_SLOT = struct.Struct("<qq")

# Sizes of the record, in bytes. The first has far more slots than any engine's window. The second is for hosts that
# limit the size of files, which also limits shared memory. Requests without a slot are not recorded.
RECORD_BYTES = ((1 << 16) * _SLOT.size, (1 << 12) * _SLOT.size)


class InFlightRecord:
    """One replica's requests in flight. The engine thread writes it; the backend reads it when the replica ends."""

    def __init__(self, memory: bytearray | mmap) -> None:
        """memory: zeros, or what an earlier record wrote. One of RECORD_BYTES long."""
        self._memory = memory
        self._free = list(range(len(memory) // _SLOT.size - 1, -1, -1))
        self._num_entered = 0

    def enter(self, row_index: int) -> int:
        """Record a request that goes into the engine. Returns its slot, or -1 if none is free."""
        if not self._free:
            return -1
        slot = self._free.pop()
        self._num_entered += 1
        _SLOT.pack_into(self._memory, slot * _SLOT.size, row_index, 2 * self._num_entered)
        return slot

    def note_output(self, slot: int) -> None:
        """Record the request's first token."""
        if slot >= 0:
            row_index, state = _SLOT.unpack_from(self._memory, slot * _SLOT.size)
            _SLOT.pack_into(self._memory, slot * _SLOT.size, row_index, state | 1)

    def leave(self, slot: int) -> None:
        """Free the slot of a request that has left the engine."""
        if slot >= 0:
            _SLOT.pack_into(self._memory, slot * _SLOT.size, 0, 0)
            self._free.append(slot)

    def requests(self) -> Sequence[InFlightRequest]:
        """All requests in the engine, in the order in which they were added. Takes 0.1 ms, also while it is written."""
        slots = np.frombuffer(self._memory, "<i8").reshape(-1, 2)
        used = slots[slots[:, 1] != 0]
        return [InFlightRequest(row, bool(state & 1)) for row, state in used[np.argsort(used[:, 1])].tolist()]


class TokenCount:
    """Tokens that an engine has run and generated, while their requests are unfinished too.

    A finished request counts with the tokens that it has. Tokens of unfinished requests are estimated: a step gives a
    token to each running request, in a pipeline only to those of one stage. So at each step, each unfinished request
    counts the same share of a token: the share of the unfinished requests that run, divided by the number of stages.
    """

    def __init__(self, *, counts_output: bool, pipeline_parallel_size: int = 1) -> None:
        self._counts_output = counts_output
        self._num_stages = pipeline_parallel_size
        # The tokens of a request that began with the first step, now and when each request began.
        self._tokens_of_all = 0.0
        self._at_first: dict[tuple[int, int], float] = {}
        self._sum_at_first = 0.0
        self._num_prompt_tokens = self._num_finished_tokens = 0
        self.latest = (0, 0)  # prompt and output tokens; other threads read it

    def step(self, begun: Sequence[Request], finished: Sequence[Completion], num_running: int) -> None:
        """Count a step. begun: unfinished requests whose first token came. num_running: as the engine says."""
        for completion in finished:
            first = self._at_first.pop(completion.request.key, None)
            self._sum_at_first -= first or 0.0
            self._num_prompt_tokens += len(completion.request.prompt_token_ids) if first is None else 0
            self._num_finished_tokens += len(completion.token_ids)
        if self._at_first:
            self._tokens_of_all += min(1.0, num_running / len(self._at_first)) / self._num_stages
        for request in begun:
            self._num_prompt_tokens += len(request.prompt_token_ids)
            self._at_first[request.key] = self._tokens_of_all - 1
            self._sum_at_first += self._tokens_of_all - 1
        num_unfinished_tokens = round(len(self._at_first) * self._tokens_of_all - self._sum_at_first)
        num_output_tokens = self._num_finished_tokens + num_unfinished_tokens if self._counts_output else 0
        self.latest = self._num_prompt_tokens, num_output_tokens


# Requests kept in the engine for each that it can run at once. 1.2 was measured best.
WINDOW = 1.2
_IDLE_S = 0.05
# Results of shared requests that are kept. Each has a few tokens.
_MOST_SHARED = 10_000


@dataclass(kw_only=True, eq=False)
class Worker:
    """Drives an engine until it is stopped. `run` blocks; everything else may be called from other threads."""

    engine: Engine
    ready: ByteQueue[PendingRequest]
    finished: ByteQueue[Finished | FailedRow]
    feeder: Feeder
    writer: Writer
    in_flight: InFlightRecord
    """Where to note which rows are in the engine."""
    counts_output: bool = True
    """What the engine generates is of use."""

    def __post_init__(self) -> None:
        info = self.engine.info
        self._slots: dict[tuple[int, int], int] = {}
        self._window = window(info.max_num_seqs)
        self._pending: dict[tuple[int, int], PendingRequest] = {}
        self._deadline: float | None = None
        self._steps = 0
        self._tokens = TokenCount(
            counts_output=self.counts_output,
            pipeline_parallel_size=info.settings.get("pipeline_parallel_size", 1),
        )
        # Seconds of all finished steps, and when the running one began: one value, as another thread reads it.
        self._busy: tuple[float, float | None] = (0.0, None)
        self._image_bytes = 0  # of the requests in the engine
        self._num_finished = 0
        self._shared: dict[Hashable, Completion] = {}
        self._stalled_by_disk_s = 0.0
        self._stalled_since: float | None = None

    def stop(self, drain_s: float) -> None:
        """Journal, admit nothing more, finish running requests for at most `drain_s` seconds, and let `run` return."""
        deadline = time.monotonic() + drain_s
        self._deadline = deadline if self._deadline is None else min(self._deadline, deadline)
        self.writer.tick_soon()
        self.feeder.stop()

    def progress(self) -> Progress:
        totals = self.writer.totals
        num_prompt_tokens, num_output_tokens = self._tokens.latest
        busy_s, began = self._busy
        return Progress(
            num_rows=totals.num_rows,
            errors=dict(totals.errors),
            num_prompt_tokens=num_prompt_tokens,
            num_output_tokens=num_output_tokens,
            steps=self._steps,
            in_flight=len(self._pending),
            stalled_by_disk_s=round(self._stalled_by_disk_s, 3),
            engine=self.engine.stats(),
            num_waiting=len(self.ready),
            num_answered=totals.num_answered,
            busy_s=round(busy_s + (0.0 if began is None else time.monotonic() - began), 3),
            num_unstored=max(0, self._num_finished - totals.num_requests),
            num_inputs=round(totals.num_inputs, 6) if self.writer.task.rows_vary else None,
        )

    def run(self) -> None:
        """Work until stopped. Raises EngineDeadError, after finished requests are stored."""
        self.feeder.start()
        self.writer.start()
        try:
            while not self._is_over():
                self._turn()
        except EngineDeadError:
            if self._deadline is None:
                raise
            # A signal to the whole process tree has ended the engine too. Nothing is left to drain.
        finally:
            self.feeder.stop()
            self.writer.finish()
        self._raise_from_threads()

    def _is_over(self) -> bool:
        if self._deadline is None:
            return False
        return time.monotonic() >= self._deadline or self.engine.num_unfinished() == 0

    def _turn(self) -> None:
        self._raise_from_threads()
        if self._deadline is None:
            self._admit()
        if self.engine.num_unfinished():
            busy_s, _ = self._busy
            began = time.monotonic()
            self._busy = busy_s, began
            finished = self.engine.step()
            self._busy = busy_s + time.monotonic() - began, None
            self._store(finished)
            self._steps += 1
            # An engine may report a first token late, when the request has finished already.
            begun = [request for request in self.engine.begun() if request.key in self._pending]
            for request in begun:
                self.in_flight.note_output(self._slots[request.key])
            self._tokens.step(begun, finished, self.engine.stats().num_running)

    def _admit(self) -> None:
        num_unfinished = self.engine.num_unfinished()
        if self.finished.is_full:
            self._note_stall(num_unfinished < self._window)
            if not num_unfinished:
                self.finished.wait_until_room(_IDLE_S)
            return
        self._note_stall(False)
        idle_s = 0.0 if num_unfinished else _IDLE_S
        # The feeder sleeps while the engine is filled. When it was awake, it held the interpreter so often that the
        # engine ran 13 of 1,229 requests alone for half a second.
        room = max(0, self._window - num_unfinished) if self._image_bytes < IMAGE_BYTES else 0
        for pending in self.ready.take(room, idle_s, max_bytes=IMAGE_BYTES - self._image_bytes, shuts=True):
            self._add(pending)
        self.ready.open()

    def _note_stall(self, is_stalled: bool) -> None:
        """Count the time in which the engine has room, but admission waits for the disk."""
        now = time.monotonic()
        if self._stalled_since is not None:
            self._stalled_by_disk_s += now - self._stalled_since
        self._stalled_since = now if is_stalled else None

    def _add(self, pending: PendingRequest) -> None:
        request = pending.request
        known = self._shared.get(_shared_key(request)) if request.is_shared and pending.probe is None else None
        if known is not None:
            completion = replace(known, request=request)
            self._num_finished += 1
            self.finished.offer_all([(Finished(pending, completion), num_bytes(completion))])
            return
        # Recorded first, because `add` may kill the engine.
        self._slots[request.key] = self.in_flight.enter(request.row_index)
        try:
            self.engine.add(request)
        except RowFailed as refusal:
            self.in_flight.leave(self._slots.pop(request.key))
            if pending.probe is not None:
                pending.probe.set()
                return
            result = error_result(
                pending.prompt,
                request.request_index,
                pending.num_requests,
                refusal.error,
                attempts=pending.lease.lease.attempts,
            )
            self.finished.offer_all([(FailedRow(pending.lease, (result,)), 0)])
            return
        self._image_bytes += pending.image_bytes
        if request.rendered is not None:  # the engine has the tensors now
            pending = replace(pending, request=replace(request, rendered=None))
        self._pending[request.key] = pending

    def _store(self, completions: Sequence[Completion]) -> None:
        if not completions:
            return
        faults.point("worker.store")
        items = []
        for completion in completions:
            key = completion.request.key
            pending = self._pending.pop(key)
            self._image_bytes -= pending.image_bytes
            self.in_flight.leave(self._slots.pop(key))
            if pending.probe is None:
                items.append((Finished(pending, completion), num_bytes(completion)))
                if completion.request.is_shared and len(self._shared) < _MOST_SHARED:
                    self._shared[_shared_key(completion.request)] = completion
            else:
                pending.probe.set()
        self._num_finished += len(items)
        self.finished.offer_all(items)

    def _raise_from_threads(self) -> None:
        error = self.feeder.error or self.writer.error
        if error is not None:
            raise error


def _shared_key(request: Request) -> Hashable:
    """Equal for requests with equal results."""
    return tuple(request.prompt_token_ids), request.logprob_token_ids, request.adapter


def window(max_num_seqs: int) -> int:
    """Requests to keep in an engine."""
    return max(2, round(WINDOW * max_num_seqs))


def num_bytes(completion: Completion) -> int:
    """Memory of a completion, precise enough to bound a queue."""
    total = 200 + completion.token_ids.nbytes + (0 if completion.values is None else completion.values.nbytes)
    for logprobs in (completion.logprobs, completion.prompt_logprobs):
        if logprobs is not None:
            total += logprobs.token_ids.nbytes + logprobs.logprobs.nbytes + logprobs.ranks.nbytes
    return total


# -- the pipeline around the engine ------------------------------------------------------------------------------------

# A row that fails before it reaches the engine, with its message.
_FAILED_ROW_BYTES = 1 << 10
# Bounds of the queue before the engine and of the queue before the writer.
_READY_BYTES = 64 << 20
_FINISHED_BYTES = 96 << 20


def scripted_length(spec: JobSpec) -> int:
    """The `max_model_len` of a scripted engine."""
    length = spec.length_limit(None)
    assert length is not None, "the scripted engine has a length of its own"
    return length


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

    def __post_init__(self) -> None:
        self._spec = self.task.spec
        self._carried = carried_fields(self._spec, self.source)
        self._columns = self.columns or Columns.of_new_job(self.task, self._carried)
        self._journal = Journal(self.folder, self.incarnation, self._columns.journal_schema, self._before_segment)
        self._retry = retry_of(self.incarnation)
        images = self._spec.input.images
        self._stops_at_changed_images = bool(self._retry) and images is not None and images.on_changed == "stop"
        self._chosen = stored_positions(self.folder, self._retry, where=RETRY_FOLDER) if self._retry else None
        self._detokenizer_claim = threading.Lock()
        self._detokenizer: Future[Detokenizer | None] = Future()

    def prepare(self) -> None:
        """Make the detokenizer, which takes 1 s for a large vocabulary, on a thread beside the engine's start."""
        threading.Thread(target=self._prepare, name="prepare", daemon=True).start()

    def _prepare(self) -> None:
        self._make_detokenizer()
        # Arrow imports pandas with the first array that it makes of NumPy's: 0.3 s for which the first part would wait.
        pa.array(np.empty(0, np.int32))

    def _make_detokenizer(self) -> None:
        if not self._detokenizer_claim.acquire(blocking=False):
            return
        try:
            self._detokenizer.set_result(Detokenizer(self.tokenizer) if self.task.makes_text else None)
        except BaseException as error:
            self._detokenizer.set_exception(error)

    def complete(self, engine: Engine, in_flight: InFlightRecord) -> Worker:
        """The worker of an engine that is up."""
        info = engine.info
        ready: ByteQueue[PendingRequest] = ByteQueue(_num_ready(info.max_num_seqs), _READY_BYTES)
        finished: ByteQueue[Finished | FailedRow] = ByteQueue(1 << 30, _FINISHED_BYTES)
        self._make_detokenizer()  # does nothing if a thread has begun
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
            room=WIDE if self.task.has_wide_results else USUAL,
        )
        feeder = Feeder(
            source=self.source,
            task=self.task,
            open_lease=self._open_lease,
            ready=ready,
            fail=lambda row: finished.put_all([(row, _FAILED_ROW_BYTES * len(row.results))]),
            emit=self.emit,
            track=writer.track,
            prompts=functools.partial(self.task.prompt_builder, self.tokenizer, info.vocab_size, self.begun_at),
            max_model_len=info.max_model_len,
            render=engine.render,
            images=self._image_prompts(),
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
        return ImagePrompts(where.images, base_folder=image_folder(where), cache_folder=cache)

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

    def _before_segment(self) -> None:
        # The writer waits here. Its queue fills up, and admission waits.
        self.may_store()
        self.source.keep_digests()

    def _write_by(self, info: EngineInfo) -> Callable[[OpenLease], Part]:
        versions = {f"batchinf.version.{name}": text for name, text in info.versions.items()}
        write_file = write_replacement if self._retry else write_part
        target = PartTarget(
            folder=self.folder,
            source=self.source,
            carried=tuple(self._carried),
            columns=self._columns,
            metadata={**self.metadata, **versions, "batchinf.device": info.device},
            incarnation=self.incarnation,
        )

        def write(shard: OpenLease) -> Part:
            self.may_store()
            return write_file(target, shard)

        return write


def _num_ready(max_num_seqs: int) -> int:
    """Requests that wait before a full engine."""
    return max(16, window(max_num_seqs) // 2)


def answers_of(spec: JobSpec, tokenizer: object, detokenizer: Detokenizer | None, job_id: str = "") -> Answers:
    """The reader of completions. Imports vLLM only for parsers, regexes and grammars.

    The scripted engine ignores regexes and grammars. detokenizer: None for tasks without text.
    """
    reasoner = None
    calls = None
    matcher_of = None
    if detokenizer is not None and spec.model.reasoning_parser is not None:
        from batchinf.engines.vllm.structured_output.structures import reasoner_of

        reasoner = reasoner_of(spec, tokenizer)
    if detokenizer is not None and spec.model.tool_parser is not None:
        from batchinf.engines.vllm.structured_output.tools import CallParser

        calls = Calls(CallParser(spec, tokenizer), job_id)
    of_job = spec.sampling.structured_outputs or {}
    has_structure = any(
        kind in of_job or spec.rows_may_set(f"structured_outputs.{kind}") for kind in ("regex", "grammar")
    )
    may_match = has_structure or calls is not None
    if detokenizer is not None and spec.scripted is None and may_match:
        from batchinf.engines.vllm.structured_output.structures import matcher

        matcher_of = functools.partial(matcher, backend=structures_backend(spec.engine))
    return Answers(spec, tokenizer, detokenizer, reasoner=reasoner, calls=calls, matcher=matcher_of)
