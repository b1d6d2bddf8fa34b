"""The pipeline around one engine: the feeder, the writer and their queues. `Incarnation` makes it.

All but the writer is made before the engine is up, so that prompts are tokenised while it starts.
"""

import functools
import threading
from collections.abc import Callable, Mapping, Sized
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from batchinf.base.storage import Folder
from batchinf.engines.protocol import Engine
from batchinf.job.job import carried_columns
from batchinf.manifest.columns import Columns
from batchinf.manifest.names import retry_of
from batchinf.output.journal import Journal
from batchinf.output.open_lease import OpenLease
from batchinf.output.parts import PartTarget, write_part
from batchinf.output.replace import write_replacement
from batchinf.prompts.builder import PromptBuilder
from batchinf.records import EngineInfo, Lease, Part
from batchinf.replica.answers import Answers, NoAnswers
from batchinf.replica.detokenizer import Detokenizer
from batchinf.replica.feeder import ByteQueue, FailedRow, Feeder, PendingRequest
from batchinf.replica.messages import Event
from batchinf.replica.worker import InFlightRecord, Worker, window
from batchinf.replica.writer import WIDE, Finished, Writer
from batchinf.schedule.positions import RETRY_FOLDER, RunOrder, ShardRows, stored_positions
from batchinf.source.rows import Source
from batchinf.spec.job import JobSpec
from batchinf.tasks.base import Task

# vLLM's default on devices of 70 GiB and more; on others it is 256.
_LIKELY_SEQS = 1024
# A row that fails before it reaches the engine, with its message.
_FAILED_ROW_BYTES = 1 << 10
# Bounds of the queue before the engine and of the queue before the writer.
_READY_BYTES = 64 << 20
_FINISHED_BYTES = 96 << 20


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """The limits of an engine that the pipeline has to know."""

    max_model_len: int
    vocab_size: int
    max_num_seqs: int
    """A likely value if the spec has none. No output depends on it."""


def expected_limits(
    spec: JobSpec, max_model_len: int | None, vocab_size: int | None, tokenizer: Sized
) -> EngineLimits | None:
    """The limits that the engine will probably have; None if they cannot be known before it starts.

    max_model_len, vocab_size: from the model's config.
    """
    if spec.scripted is not None:
        return EngineLimits(scripted_length(spec), len(tokenizer), spec.scripted.max_num_seqs)
    length = spec.engine.get("max_model_len", max_model_len)
    if not isinstance(length, int) or length <= 0 or vocab_size is None:  # -1: vLLM fits it to the memory
        return None
    max_num_seqs = spec.engine.get("max_num_seqs")
    if not isinstance(max_num_seqs, int) or max_num_seqs <= 0:
        max_num_seqs = _LIKELY_SEQS
    return EngineLimits(length, vocab_size, max_num_seqs)


def scripted_length(spec: JobSpec) -> int:
    """The `max_model_len` of a scripted engine."""
    length = spec.length_limit(None)
    assert length is not None, "the scripted engine has a length of its own"
    return length


class Pipeline:
    """The feeder, the queues and the decoder around an engine, made before the engine is up."""

    def __init__(
        self,
        *,
        task: Task,
        source: Source,
        tokenizer: object,
        folder: Folder,
        incarnation: str,
        metadata: Mapping[str, str],
        emit: Callable[[Event], None],
        order: RunOrder | None = None,
        begun_at: str | None = None,
        may_store: Callable[[], object] = lambda: None,
        columns: Columns | None = None,
    ) -> None:
        """order: None if rows run in the order of their positions. may_store: waits until results may be durable.

        columns: those of the job's files; None: all that the task has.
        """
        self._spec = task.spec
        self._task = task
        self._source = source
        self._tokenizer = tokenizer
        self._folder = folder
        self._incarnation = incarnation
        self._metadata = metadata
        self._emit = emit
        self._order = order
        self._begun_at = begun_at
        self._may_store = may_store
        carried = [source.schema.field(name) for name in carried_columns(task.spec)]
        self._columns = columns or Columns.of_new_job(task, carried)
        self._journal = Journal(folder, incarnation, self._columns.journal_schema, self._before_segment)
        self._retry = retry_of(incarnation)
        self._chosen = stored_positions(folder, self._retry, where=RETRY_FOLDER) if self._retry else None
        self._ready: ByteQueue[PendingRequest] = ByteQueue(1, _READY_BYTES)
        self._finished: ByteQueue[Finished | FailedRow] = ByteQueue(1 << 30, _FINISHED_BYTES)
        self.feeder = Feeder(
            source=source, task=task, open_lease=self._open_lease, ready=self._ready, fail=self._fail, emit=emit
        )
        self._detokenizer_claim = threading.Lock()
        self._detokenizer: Future[Detokenizer | None] = Future()

    def start_early(
        self, limits: EngineLimits, after_fork: Callable[[Callable[[], object]], object] = lambda start: start()
    ) -> None:
        """Let the feeder make as many requests, by these limits, as fill the engine and the queue before it.

        after_fork: calls its argument once threads may run.
        """
        self._ready.resize(window(limits.max_num_seqs) + _num_ready(limits.max_num_seqs))
        self.feeder.expect(self._prompts_by(limits.vocab_size), limits.max_model_len)
        after_fork(threading.Thread(target=self._start, name="start", daemon=True).start)

    def _start(self) -> None:
        """Make the detokenizer, which takes 1 s for a large vocabulary, and then start the feeder."""
        self._make_detokenizer()
        self.feeder.start_once()
        # Arrow imports pandas with the first array that it makes of NumPy's: 0.3 s for which the first part would wait.
        pa.array(np.empty(0, np.int32))

    def _make_detokenizer(self) -> None:
        if not self._detokenizer_claim.acquire(blocking=False):
            return
        try:
            self._detokenizer.set_result(Detokenizer(self._tokenizer) if self._task.makes_text else None)
        except BaseException as error:
            self._detokenizer.set_exception(error)

    def complete(self, engine: Engine, expected: EngineLimits | None, in_flight: InFlightRecord) -> Worker:
        """The worker. expected: the limits that the feeder has used; if the engine's differ, it starts anew."""
        info = engine.info
        self._ready.resize(_num_ready(info.max_num_seqs))
        prompts = self._prompts_by(info.vocab_size)
        if expected is None:
            self.feeder.expect(prompts, info.max_model_len)
        elif (expected.max_model_len, expected.vocab_size) != (info.max_model_len, info.vocab_size):
            self.feeder.settle(prompts, info.max_model_len)
        self._make_detokenizer()  # does nothing if the feeder was started early
        writer = Writer(
            finished=self._finished,
            task=self._task,
            answers=answers_of(self._spec, self._tokenizer, self._detokenizer.result()),
            write_part=self._write_by(info),
            emit=self._emit,
            checkpoint_interval_s=self._spec.checkpoint_interval_s,
            room=WIDE if self._task.has_wide_results else None,
        )
        return Worker(
            engine=engine,
            ready=self._ready,
            finished=self._finished,
            feeder=self.feeder,
            writer=writer,
            in_flight=in_flight,
            counts_output=self._task.draws_tokens,
        )

    def _prompts_by(self, vocab_size: int) -> Callable[[], PromptBuilder]:
        return functools.partial(self._task.prompt_builder, self._tokenizer, vocab_size, self._begun_at)

    def _open_lease(self, lease: Lease) -> OpenLease:
        rows = ShardRows(lease.start, lease.stop) if self._order is None else self._order.of(lease)
        chosen = None if self._chosen is None else self._chosen.chosen(rows)
        opened = OpenLease(lease, self._task, self._journal, chosen=chosen, rows=rows)
        opened.recover()
        return opened

    def _fail(self, row: FailedRow) -> None:
        self._finished.put(row, _FAILED_ROW_BYTES * len(row.results))

    def _before_segment(self) -> None:
        # The writer waits here. Its queue fills up, and admission waits.
        self._may_store()
        self._source.keep_digests()

    def _write_by(self, info: EngineInfo) -> Callable[[OpenLease], Part]:
        versions = {f"batchinf.version.{name}": text for name, text in info.versions.items()}
        write_file = write_replacement if self._retry else write_part
        target = PartTarget(
            folder=self._folder,
            source=self._source,
            carried=tuple(carried_columns(self._spec)),
            columns=self._columns,
            metadata={**self._metadata, **versions, "batchinf.device": info.device},
            incarnation=self._incarnation,
        )

        def write(shard: OpenLease) -> Part:
            self._may_store()
            return write_file(target, shard)

        return write


def _num_ready(max_num_seqs: int) -> int:
    """Requests that wait before a full engine."""
    return max(16, window(max_num_seqs) // 2)


def answers_of(spec: JobSpec, tokenizer: object, detokenizer: Detokenizer | None) -> Answers | NoAnswers:
    """The reader of completions. Imports vLLM only for reasoning parsers, regexes and grammars.

    The scripted engine ignores regexes and grammars. detokenizer: None for tasks without text.
    """
    if detokenizer is None:
        return NoAnswers()
    split = None
    matcher_of = None
    if spec.model.reasoning_parser is not None:
        from batchinf.engines.vllm.structures import reasoner_of

        split = reasoner_of(spec, tokenizer).split
    if spec.scripted is None and (spec.sampling.structured_outputs or {}).keys() & {"regex", "grammar"}:
        from batchinf.engines.vllm.arguments import structures_backend
        from batchinf.engines.vllm.structures import matcher

        matcher_of = functools.partial(matcher, backend=structures_backend(spec.engine))
    return Answers(spec, tokenizer, detokenizer, split=split, matcher=matcher_of)
