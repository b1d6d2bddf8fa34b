"""What a crash costs: finished requests that are lost by kill -9 of all processes, at the default checkpoint interval.

    python benchmarks/loss.py [--kills 10] [--step-s 0.01] [--replicas 2]

All processes of a job on the scripted engine are killed at random moments, and the job is resumed. Each process notes
the completions of its engine with the time in its own file, before anything else sees them. A completion is lost if it
is noted, but is in no committed or adoptable part and in no whole segment. The notes of later epochs show that exactly
the lost ones run again.
"""

import argparse
import json
import os
import pathlib
import random
import shutil
import signal
import struct
import subprocess
import sys
import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import psutil

from batchinf.base.storage import Folder
from batchinf.manifest.names import parse_part_name, parse_staging_name
from batchinf.manifest.state import State, read_state
from batchinf.output.journal import Journal, list_shards
from batchinf.output.parts import verify_part
from batchinf.schedule.shards import shard_at
from batchinf.spec.job import JobSpec
from batchinf.tasks.registry import task_of

ROOT = pathlib.Path(__file__).parents[1]
MODEL = ROOT / "sample_data" / "tiny-llama"
# Python imports this module when a process with its folder on the path starts.
NOTES = """
import os, struct, time
from batchinf.engines.scripted import ScriptedEngine

step, files = ScriptedEngine.step, {}

def noted(self):
    completions = step(self)
    if completions:
        pid = os.getpid()
        if pid not in files:
            files[pid] = os.open(os.path.join(os.environ["NOTES"], str(pid)), os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        now = time.monotonic()
        os.write(files[pid], b"".join(struct.pack("<dq", now, c.request.row_index) for c in completions))
    return completions

ScriptedEngine.step = noted
"""
NOTE = np.dtype([("at", "<f8"), ("row", "<i8")])
assert struct.calcsize("<dq") == NOTE.itemsize


@dataclass(frozen=True, slots=True)
class Loss:
    """One kill. lost: rows. oldest_s: seconds from the end of the oldest of them to the kill."""

    worked_s: float
    num_finished: int
    lost: npt.NDArray[np.int64]
    oldest_s: float

    def line(self) -> str:
        rate = self.num_finished / self.worked_s
        lost = len(self.lost)
        return f"| {self.worked_s:.1f} | {rate:,.0f} | {lost:,} | {lost / rate:.1f} | {self.oldest_s:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--step-s", type=float, default=0.01)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("out/loss"))
    args = parser.parse_args()
    chance = random.Random(args.seed)
    spec = make(args.out, args.rows, args.replicas, args.step_s)
    losses: list[Loss] = []
    notes: list[npt.NDArray[np.void]] = []
    print("| worked, s | finished requests a second | lost requests | as seconds of work | oldest, s |")
    print("| --- | --- | --- | --- | --- |")
    for life in range(args.kills):
        loss, noted = one_life(args.out.resolve(), spec, life, chance.uniform(12.0, 32.0))
        check_rerun(losses, notes, noted)
        losses.append(loss)
        notes.append(noted)
        print(loss.line(), flush=True)
    lost = np.array([len(loss.lost) for loss in losses])
    oldest = np.array([loss.oldest_s for loss in losses])
    print(f"lost at most {lost.max():,}, on average {lost.mean():,.0f} of the finished requests")
    print(f"the oldest of them had finished at most {oldest.max():.2f} s, on average {oldest.mean():.2f} s, before")


def make(out: pathlib.Path, num_rows: int, num_replicas: int, step_s: float) -> pathlib.Path:
    """Write input, spec and the module that notes completions."""
    shutil.rmtree(out, ignore_errors=True)
    (out / "hook").mkdir(parents=True)
    (out / "hook" / "sitecustomize.py").write_text(NOTES)
    with (out / "rows.jsonl").open("w") as file:
        file.writelines(f'{{"id": {index}, "prompt": "Say {index}."}}\n' for index in range(num_rows))
    spec = {
        "model": str(MODEL),
        "input": {"path": str(out.resolve() / "rows.jsonl"), "id_column": "id"},
        "sampling": {"temperature": 0.0, "max_tokens": 32, "logprobs": 2},
        "parallel": {"data_parallel_size": num_replicas},
        "output": {"path": str(out.resolve() / "job")},
        "scripted": {"max_num_seqs": 256, "step_s": step_s},
    }
    path = out / "job.yaml"
    path.write_text(json.dumps(spec))
    return path


def one_life(out: pathlib.Path, spec: pathlib.Path, life: int, work_s: float) -> tuple[Loss, npt.NDArray[np.void]]:
    """Run the job for `work_s` seconds after its first finished request, and kill it. Returns loss and notes."""
    folder = out / f"notes-{life}"
    folder.mkdir()
    path = os.pathsep.join([str(out / "hook"), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": path, "NOTES": str(folder)}
    with (out / "run.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "batchinf", "run", str(spec)], env=environment, stdout=log, stderr=log
        )
    while not any(folder.iterdir()):
        if process.poll() is not None:
            sys.exit((out / "run.log").read_text()[-2000:])
        time.sleep(0.01)
    time.sleep(work_s)
    if process.poll() is not None:
        sys.exit("the job is done before it could be killed: give it more --rows")
    everyone = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    killed_at = time.monotonic()
    for member in everyone:
        member.send_signal(signal.SIGKILL)
    process.wait()
    psutil.wait_procs(everyone, timeout=10)
    files = [np.frombuffer(f.read_bytes()[: f.stat().st_size // 16 * 16], NOTE) for f in folder.iterdir()]
    noted = np.concatenate(files)
    is_lost = ~np.isin(noted["row"], stored(Folder(out / "job")))
    oldest_s = float(killed_at - noted["at"][is_lost].min()) if is_lost.any() else 0.0
    return Loss(killed_at - float(noted["at"].min()), len(noted), noted["row"][is_lost], oldest_s), noted


def stored(folder: Folder) -> npt.NDArray[np.int64]:
    """Rows that the next epoch will not run again: those in committed or adoptable parts and in whole segments."""
    state = read_state(folder)
    assert state is not None
    rows = [np.arange(*bounds) for bounds in whole_shards(folder, state)]
    journal = Journal(folder, "look", task_of(JobSpec.model_validate(state.header.spec)).result_schema)
    for shard in list_shards(folder):
        for segment in journal.recover(shard).segments:
            rows.append(segment.keys()[0].copy())
            segment.close()
    return np.concatenate([np.zeros(0, np.int64), *rows])


def whole_shards(folder: Folder, state: State) -> list[tuple[int, int]]:
    """First and last row (exclusive) of each shard whose part is committed or adoptable."""
    found = {shard: shard_at(state.extents, shard) for shard in state.parts}
    for where, parse in (("parts", parse_part_name), ("staging", parse_staging_name)):
        for name in folder.list(where):
            index = parse(name)
            if index is not None and index not in found:
                shard = shard_at(state.extents, index)
                if verify_part(folder, f"{where}/{name}", shard, state.header.fingerprint):
                    found[index] = shard
    return [(shard.start, shard.stop) for shard in found.values()]


def check_rerun(losses: list[Loss], notes: list[npt.NDArray[np.void]], noted: npt.NDArray[np.void]) -> None:
    """Check that rows that ran twice were lost by the earlier epoch."""
    for loss, before in zip(losses, notes, strict=True):
        again = np.intersect1d(before["row"], noted["row"])
        if not np.isin(again, loss.lost).all():
            sys.exit("rows are run again that were stored")


if __name__ == "__main__":
    main()
