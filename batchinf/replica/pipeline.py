"""What is around an engine: the feeder, the writer, and the queues between them, the engine and the disk.

All but the writer is there before the engine, so that prompts are read and tokenised while it starts.
"""

import functools
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future

from batchinf.base.storage import Folder
from batchinf.engines.protocol import Engine
from batchinf.manifest.lines import retry_of
from batchinf.output.journal import Journal
from batchinf.output.parts import OpenShard, write_part
from batchinf.output.replace import write_replacement
from batchinf.prompts.builder import PromptBuilder
from batchinf.records import EngineInfo, Part, Shard
from batchinf.replica.byte_queue import ByteQueue
from batchinf.replica.early_start import UNFORKED, EngineLimits, after_first_fork, guard_forks
from batchinf.replica.feeder import FailedRow, Feeder, PendingRequest
from batchinf.replica.messages import Event
from batchinf.replica.text import Answers, Detokenizer, NoAnswers
from batchinf.replica.worker import InFlightRecord, Worker, window
from batchinf.replica.writer import WIDE, Finished, Writer
from batchinf.schedule.selection import RunOrder, ShardRows, chosen_rows
from batchinf.source.rows import Source
from batchinf.spec.job import JobSpec
from batchinf.tasks.base import Task

# A row that fails before it reaches the engine, with its message.
_FAILED_ROW_BYTES = 1 << 10
# Prompts that wait for the engine, and results that wait for the disk.
_READY_BYTES = 64 << 20
_FINISHED_BYTES = 96 << 20


class Front:
    """What is around an engine that may come later."""

    def __init__(
        self,
        task: Task,
        source: Source,
        tokenizer: object,
        folder: Folder,
        incarnation: str,
        metadata: Mapping[str, str],
        emit: Callable[[Event], None],
        order: RunOrder | None = None,
        begun_at: str | None = None,
    ) -> None:
        """order: None where places are positions."""
        self._spec, self._task, self._source, self._tokenizer = task.spec, task, source, tokenizer
        self._folder, self._incarnation, self._metadata, self._emit = folder, incarnation, metadata, emit
        self._order, self._begun_at = order, begun_at
        self._journal = Journal(folder, incarnation, task.result_schema)
        self._retry = retry_of(incarnation)
        self._selection = chosen_rows(folder, self._retry) if self._retry else None
        self._ready: ByteQueue[PendingRequest] = ByteQueue(1, _READY_BYTES)
        self._finished: ByteQueue[Finished | FailedRow] = ByteQueue(1 << 30, _FINISHED_BYTES)
        self.feeder = Feeder(source, task, self._open_shard, self._ready, self._fail, emit)
        self._is_made = threading.Lock()
        self._detokenizer: Future[Detokenizer | None] = Future()

    def start_early(self, limits: EngineLimits, *, after_fork: bool = False) -> None:
        """Let the feeder make as many requests, by these limits, as fill the engine and the queue before it.

        after_fork: not before this process has been forked.
        """
        guard_forks()
        self._ready.resize(window(limits.max_num_seqs) + _num_ready(limits.max_num_seqs))
        self.feeder.expect(self._prompts_by(limits.vocab_size), limits.max_model_len)
        start = threading.Thread(target=self._start, name="start", daemon=True).start
        if after_fork:
            after_first_fork(start)
        else:
            start()

    def _start(self) -> None:
        """Start the feeder. Before it, not beside it: what takes a second with a large vocabulary."""
        self._make_detokenizer()
        self.feeder.start_once()

    def _make_detokenizer(self) -> None:
        if not self._is_made.acquire(blocking=False):
            return
        try:
            with UNFORKED:
                self._detokenizer.set_result(Detokenizer(self._tokenizer) if self._task.makes_text else None)
        except BaseException as error:
            self._detokenizer.set_exception(error)

    def complete(self, engine: Engine, expected: EngineLimits | None, in_flight: InFlightRecord) -> Worker:
        """The worker. expected: the limits by which the feeder has started; where they are others, it starts anew."""
        info = engine.info
        self._ready.resize(_num_ready(info.max_num_seqs))
        prompts = self._prompts_by(info.vocab_size)
        if expected is None:
            self.feeder.expect(prompts, info.max_model_len)
        elif (expected.max_model_len, expected.vocab_size) != (info.max_model_len, info.vocab_size):
            self.feeder.settle(prompts, info.max_model_len)
        self._make_detokenizer()  # unless the feeder was started early
        answers = answers_of(self._spec, self._tokenizer, self._detokenizer.result())
        room = WIDE if self._task.has_wide_results else None
        write, interval_s = self._write_by(info), self._spec.checkpoint_interval_s
        writer = Writer(self._finished, self._task, answers, write, self._emit, interval_s, room)
        return Worker(engine, self._ready, self._finished, self.feeder, writer, in_flight)

    def _prompts_by(self, vocab_size: int) -> Callable[[], PromptBuilder]:
        return functools.partial(self._task.prompt_builder, self._tokenizer, vocab_size, self._begun_at)

    def _open_shard(self, shard: Shard) -> OpenShard:
        rows = ShardRows(shard.start, shard.stop) if self._order is None else self._order.of(shard)
        chosen = None if self._selection is None else self._selection.chosen(rows)
        opened = OpenShard(shard, self._task, self._journal, chosen, rows)
        opened.recover()
        return opened

    def _fail(self, row: FailedRow) -> None:
        self._finished.put(row, _FAILED_ROW_BYTES * len(row.results))

    def _write_by(self, info: EngineInfo) -> Callable[[OpenShard], Part]:
        versions = {f"batchinf.version.{name}": text for name, text in info.versions.items()}
        stored = {**self._metadata, **versions, "batchinf.device": info.device}
        write_file = write_replacement if self._retry else write_part
        id_column, keep_columns = self._spec.input.id_column, tuple(self._spec.output.keep_columns)

        def write(shard: OpenShard) -> Part:
            return write_file(self._folder, shard, self._source, id_column, keep_columns, stored, self._incarnation)

        return write


def _num_ready(max_num_seqs: int) -> int:
    """Requests that wait for an engine that is full."""
    return max(16, window(max_num_seqs) // 2)


def answers_of(spec: JobSpec, tokenizer: object, detokenizer: Detokenizer | None) -> Answers | NoAnswers:
    """How completions are read; vLLM is imported for what only it knows. The scripted engine obeys no structure.

    detokenizer: None where no text comes out.
    """
    if detokenizer is None:
        return NoAnswers()
    split, matcher_of = None, None
    if spec.model.reasoning_parser is not None:
        from batchinf.engines.vllm.reasoning import reasoner_of

        split = reasoner_of(spec, tokenizer).split
    if spec.scripted is None and (spec.sampling.structured_outputs or {}).keys() & {"regex", "grammar"}:
        from batchinf.engines.vllm.structures import matcher

        matcher_of = matcher
    return Answers(spec, tokenizer, detokenizer, split, matcher_of)
