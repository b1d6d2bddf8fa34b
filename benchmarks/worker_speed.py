"""Output tokens a second from the scripted engine to Parquet in one worker, on one core.

    python benchmarks/worker_speed.py --rows 20000 --logprobs 20

It measures all of a replica except its engine and its channel: rows are read, tokenised and admitted; completions with
the adapter's exact types are decoded, encoded, journalled and written as parts with fsync. The scripted engine uses the
same core. Its time is measured separately, and the rate is printed with and without it. A step sleeps for 1 ms, as a
real engine waits for its device; without that, a busy loop would take the core from the other threads. At 1,024
sequences this allows a million tokens a second.
"""

import argparse
import contextlib
import os
import pathlib
import shutil
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import pyarrow as pa
from shapes import make_model, make_prompts

from batchinf.base.storage import Folder
from batchinf.coordinator.run import FOLDERS
from batchinf.engines.scripted import ScriptedEngine
from batchinf.job.open import open_job_input
from batchinf.prompts.encoder import load_tokenizer
from batchinf.records import Completion, Lease, Part, Request
from batchinf.replica.in_flight import RECORD_BYTES, InFlightRecord
from batchinf.replica.messages import Assign, Event, LeaseDone
from batchinf.replica.pipeline import Pipeline
from batchinf.replica.worker import Worker
from batchinf.schedule.shards import Extent, choose_rows_per_shard, shard_at, total_shards
from batchinf.spec.job import JobSpec
from batchinf.tasks.registry import task_of


class TimedEngine(ScriptedEngine):
    """Counts the processor time of its completions."""

    complete_s = 0.0

    def complete(self, request: Request) -> Completion:
        """See `ScriptedEngine.complete`."""
        started = time.thread_time()
        completion = super().complete(request)
        self.complete_s += time.thread_time() - started
        return completion


@dataclass(slots=True)
class Watch:
    """Times a worker from its start to its last part, then stops it."""

    num_parts: int
    worker: Worker | None = None
    parts: list[Part] = field(default_factory=list)
    wall_s: float = 0.0
    cpu_s: float = 0.0
    threads: dict[str, float] = field(default_factory=dict)

    def run(self, worker: Worker) -> None:
        self.worker, self.threads = worker, thread_times()
        self.wall_s, self.cpu_s = time.monotonic(), time.process_time()
        worker.run()

    def hear(self, event: Event) -> None:
        """See `Writer`."""
        if not isinstance(event, LeaseDone) or event.part is None:
            return
        self.parts.append(event.part)
        if len(self.parts) == self.num_parts:
            self.wall_s = time.monotonic() - self.wall_s
            self.cpu_s = time.process_time() - self.cpu_s
            before = self.threads
            self.threads = {name: now - before.get(name, 0.0) for name, now in thread_times().items()}
            assert self.worker is not None
            self.worker.stop(60.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--logprobs", type=int, default=20)
    parser.add_argument("--max-num-seqs", type=int, default=1024)
    parser.add_argument("--step-s", type=float, default=0.001)
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("out/worker_speed"))
    args = parser.parse_args()
    os.environ |= {"RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    shutil.rmtree(args.out, ignore_errors=True)
    model = make_model(args.shape, args.out / "model")
    prompts = make_prompts(args.out / "prompts.parquet", args.shape, args.rows, args.prompt_tokens)
    spec = JobSpec.model_validate(
        {
            "model": str(model),
            "input": {"path": str(prompts), "prompt_column": "prompt", "id_column": "id"},
            "sampling": {"temperature": 0.0, "max_tokens": args.output_tokens, "logprobs": args.logprobs, "n": 1},
            "output": {"path": str(args.out / "job")},
            "scripted": {"max_num_seqs": args.max_num_seqs, "step_s": args.step_s, "vary_lengths": False},
        }
    )
    engine, watch = run(spec, str(model))
    report(watch, engine.complete_s)


def run(spec: JobSpec, model: str, choices: Sequence[Sequence[int]] = ()) -> tuple[TimedEngine, Watch]:
    """Work through all rows as a replica does. choices: token ids of the texts that the engine makes."""
    folder = Folder(spec.output.path)
    folder.make(*FOLDERS)
    tokenizer = load_tokenizer(model, False)
    source = open_job_input(spec, folder.path("source"), (), "refuse")
    assert spec.scripted is not None
    engine = TimedEngine(spec.scripted, len(tokenizer), tokenizer.eos_token_id, choices)
    rows_per_shard = choose_rows_per_shard(source.num_rows, 1, task_of(spec).estimated_bytes_per_row())
    extents = (Extent(0, source.num_rows, rows_per_shard, 0, 0, source.num_rows),)
    shards = [shard_at(extents, index) for index in range(total_shards(extents))]
    leases = tuple(Lease(shard.index, shard.start, shard.stop) for shard in shards)
    watch = Watch(len(leases))
    front = Pipeline(
        task=task_of(spec),
        source=source,
        tokenizer=tokenizer,
        folder=folder,
        incarnation="000001.0001",
        metadata={},
        emit=watch.hear,
    )
    worker = front.complete(engine, InFlightRecord(bytearray(RECORD_BYTES[0])))
    worker.feeder.assign(Assign(leases))
    watch.run(worker)
    return engine, watch


def thread_times() -> dict[str, float]:
    """Processor seconds of this process so far, by name of the thread; threads that are not Python's are summed."""
    names = {thread.native_id: thread.name.partition("_")[0] for thread in threading.enumerate()}
    times: dict[str, float] = {}
    for task in pathlib.Path("/proc/self/task").iterdir():
        name = names.get(int(task.name), "libraries")
        with contextlib.suppress(FileNotFoundError):  # a thread that has just ended
            times[name] = times.get(name, 0.0) + int((task / "schedstat").read_text().split()[0]) / 1e9
    return times


def report(watch: Watch, engine_s: float) -> None:
    tokens = sum(part.num_output_tokens for part in watch.parts)
    num_bytes = sum(part.num_bytes for part in watch.parts)
    rows = sum(part.num_rows for part in watch.parts)
    print(f"{rows:,} rows, {tokens:,} output tokens, {len(watch.parts)} parts, {num_bytes / tokens:.1f} bytes a token")
    print(f"{tokens / watch.wall_s:,.0f} output tokens/s by the clock ({watch.wall_s:.2f} s)")
    print(f"{tokens / watch.cpu_s:,.0f} output tokens/s of processor time ({watch.cpu_s:.2f} s)")
    own_s = watch.cpu_s - engine_s
    print(f"{tokens / own_s:,.0f} without the scripted engine's own {engine_s:.2f} s")
    for name, seconds in sorted(watch.threads.items(), key=lambda item: -item[1]):
        print(f"  thread {name}: {seconds:.2f} s")


if __name__ == "__main__":
    main()
