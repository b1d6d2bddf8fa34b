"""Kills, stops and resumes jobs at random, and compares their output with that of uninterrupted jobs.

    python tests/soak.py --minutes 30 [--seed N] [--folder KEPT]

Jobs of different shapes run one after another on the scripted engine. In each epoch of a job one fault strikes at a
random moment: kill -9 of the coordinator, of a replica (or two, or one twice in a row) or of all processes; or a stop
signal to the coordinator or the whole process tree. The next epoch has another number of replicas, checkpoint interval,
batch size and speed. A finished job must have the rows of an uninterrupted one, and must leave nothing behind: no
process, half-written file, segment or socket. The first difference ends the soak with exit 1 and keeps the folder. A
seed repeats the choices, but not the exact moments.
"""

import argparse
import contextlib
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import psutil
import pyarrow as pa
import xxhash

import jobs
from batchinf.manifest.names import part_name
from batchinf.records import Part

# The parts of a spec that determine the rows. Each shape has its own uninterrupted run to compare with.
SHAPES: tuple[dict[str, Any], ...] = (
    {},
    {"sampling": {"logprobs": 20, "max_tokens": 48}, "output": {"include_prompt": True}},
    {"sampling": {"n": 3, "temperature": 0.8, "seed": 7, "logprobs": None}},
    {
        "sampling": {"n": 5, "temperature": 1.0, "prompt_logprobs": 1},
        "output": {"keep_columns": ["language", "category"]},
    },
    {"sampling": {"logprobs": 2}, "output": {"logprobs_dtype": "float16", "include_token_ids": False}},
)
ROWS_PER_SHARD = ("auto", 5, 20, 60, 1000)
NUM_REPLICAS = (1, 2, 2, 3, 4)
INTERVALS_S = (0.05, 0.2, 1.0, 10.0)
MAX_NUM_SEQS = (2, 8, 32)
# Slow steps, so that little is done before a fault and a job has many epochs.
STEPS_S = (0.2, 0.1, 0.03)
DRAINS_S = (0.0, 0.3, 2.0)

KILLS = {"coordinator": 6, "replica": 6, "replica twice": 2, "two replicas": 2, "everything": 6}
STOPS = {"SIGTERM": 1, "SIGINT": 1, "SIGINT twice": 1, "SIGTERM to all": 1, "SIGHUP": 1}
MOMENTS = ("opening", "opening", "starting", "starting", "working", "working", "working")


class Difference(Exception):
    """Something that must not happen."""


@dataclass
class Figures:
    """Counts of the soak so far."""

    strikes: Counter[str] = field(default_factory=Counter)
    jobs: int = 0
    rows: int = 0
    lives: int = 0
    replicas_started: int = 0

    @property
    def num_kills(self) -> int:
        """Number of SIGKILLs: one for each strike, two for `replica twice`."""
        return sum(self.strikes[name] for name in KILLS) + self.strikes["replica twice"]

    def line(self) -> str:
        stops = sum(self.strikes[name] for name in STOPS)
        return (
            f"{self.jobs} jobs, {self.rows:,} rows, {self.num_kills} kills, {stops} stops, "
            f"{self.lives} coordinators ({self.lives - self.jobs} resumes), {self.replicas_started} replicas started"
        )


def main() -> None:
    """Soak; exit 1 at the first difference."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--folder", type=pathlib.Path, default=None)
    args = parser.parse_args()
    seed = random.SystemRandom().randrange(2**32) if args.seed is None else args.seed
    folder = args.folder or pathlib.Path(tempfile.mkdtemp(prefix="soak-"))
    folder.mkdir(parents=True, exist_ok=True)
    print(f"seed {seed}, {args.minutes:g} minutes, in {folder}", flush=True)
    soak = Soak(random.Random(seed), folder, time.monotonic() + 60 * args.minutes)
    started = time.monotonic()
    try:
        soak.run()
    except (Difference, AssertionError) as error:
        print(f"DIFFERENCE: {error}\nseed {seed}, folder {folder}\nuntil then: {soak.figures.line()}", flush=True)
        sys.exit(1)
    finally:
        soak.end_all()
    shutil.rmtree(folder)
    by_kind = ", ".join(f"{name} {count}" for name, count in soak.figures.strikes.most_common())
    print(f"seed {seed}, {(time.monotonic() - started) / 60:.1f} minutes: {soak.figures.line()}\nstruck: {by_kind}")
    print("rows lost 0, doubled 0, altered 0; no process, half-written file, segment, lock or socket left behind")


class Soak:
    """Runs the jobs of one soak, one after another."""

    def __init__(self, chance: random.Random, folder: pathlib.Path, deadline: float) -> None:
        self.figures = Figures()
        self._chance = chance
        self._folder = folder
        self._deadline = deadline
        self._unhurt: dict[str, pa.Table] = {}
        # The current job:
        self._everyone: list[psutil.Process] = []
        self._parts: dict[int, Part] = {}
        self._temp = folder / "tmp"

    @property
    def _is_over(self) -> bool:
        return time.monotonic() >= self._deadline

    def run(self) -> None:
        """Run jobs until the time is over. The last one still runs to its end."""
        while not self._is_over:
            self._run_job()
            print(self.figures.line(), flush=True)

    def end_all(self) -> None:
        """Kill all processes that still run."""
        jobs.kill([process for process in self._everyone if process.is_running()])

    def _run_job(self) -> None:
        folder = self._folder / f"job-{self.figures.jobs}"
        folder.mkdir()
        self._temp.mkdir(exist_ok=True)
        shape, rows_per_shard = self._chance.choice(SHAPES), self._chance.choice(ROWS_PER_SHARD)
        expected = self._expected(shape)
        output = {**shape.get("output", {}), "path": str(folder / "out"), "rows_per_shard": rows_per_shard}
        # The soak kills replicas more often than the default of max_restarts allows.
        spec = jobs.spec_of(folder, **{**shape, "output": output}, max_restarts=1000)
        print(f"job {self.figures.jobs}: {json.dumps(shape)}, {rows_per_shard} rows a shard", flush=True)
        self._everyone, self._parts = [], {}
        while not self._live(spec, folder / "out"):
            self._check_parts(folder / "out")
        self._check_parts(folder / "out")
        self._check_rows(folder / "out", expected)
        self._check_left(folder / "out")
        self.figures.jobs += 1
        self.figures.rows += expected.num_rows
        shutil.rmtree(folder)

    def _expected(self, shape: dict[str, Any]) -> pa.Table:
        key = json.dumps(shape, sort_keys=True)
        if key not in self._unhurt:
            folder = self._folder / "unhurt"
            folder.mkdir()
            output = {**shape.get("output", {}), "path": str(folder / "out")}
            jobs.finish(jobs.spec_of(folder, **{**shape, "output": output}, scripted={"step_s": 0.0}))
            self._unhurt[key] = jobs.table_of(folder / "out").drop_columns(["attempts"])
            shutil.rmtree(folder)
        return self._unhurt[key]

    # -- one epoch of a job ----------------------------------------------------------------------------------------

    def _live(self, spec: pathlib.Path, out: pathlib.Path) -> bool:
        """Start a coordinator and strike until it has ended. Returns whether the job is done."""
        settings, is_last = self._settings(), self._is_over
        process = jobs.start("run", spec, *settings, TMPDIR=str(self._temp))
        self.figures.lives += 1
        self._know(process)
        try:
            while process.poll() is None and not self._is_over:
                self._strike(process, out)
            self._know(process)
            if process.poll() is None and not is_last:
                # It is too slow to wait for. The next epoch may be faster.
                jobs.kill(jobs.family(process.pid))
                self.figures.strikes["everything"] += 1
            _, errors = process.communicate(timeout=300)
        except subprocess.TimeoutExpired:
            raise Difference(f"{settings}: the job does not end") from None
        if not jobs.are_gone(self._everyone):
            raise Difference(f"these processes live on: {[p for p in self._everyone if p.is_running()]}")
        if process.returncode not in (0, 75, -9) or "Traceback" in errors:
            raise Difference(f"{settings}: exit code {process.returncode}\n{errors}")
        return process.returncode == 0

    def _settings(self) -> list[str]:
        """Settings that may change from epoch to epoch; after the deadline, at full speed."""
        pick = self._chance.choice
        chosen = {
            "parallel.data_parallel_size": pick(NUM_REPLICAS),
            "checkpoint_interval_s": pick(INTERVALS_S),
            "scripted.max_num_seqs": pick(MAX_NUM_SEQS),
            "scripted.step_s": pick(STEPS_S),
            "drain_timeout_s": pick(DRAINS_S),
        }
        if self._is_over:
            chosen["scripted.step_s"] = 0.0
        return [word for name, value in chosen.items() for word in ("--set", f"{name}={value}")]

    def _strike(self, process: "subprocess.Popen[str]", out: pathlib.Path) -> None:
        """Strike once, at a random moment. The coordinator survives the death of a replica."""
        kinds = KILLS | STOPS
        [kind] = self._chance.choices(list(kinds), list(kinds.values()))
        moment, delay_s = self._chance.choice(MOMENTS), self._chance.uniform(0.0, 1.0)
        if kind.startswith(("replica", "two")):
            moment = "working"
        # A stop signal needs a running Python with its handler. A kill may come earlier.
        is_at_once = kind in KILLS and moment == "opening"
        if not (is_at_once or self._wait(process, out, moment)) or self._sleep(process, delay_s):
            return
        self._know(process)
        done = self._kill(kind, process, out) if kind in KILLS else self._stop(kind, process, moment)
        if done:
            self.figures.strikes[kind] += 1
            print(f"  {kind}, {moment} + {delay_s:.2f} s", flush=True)
            self._know(process)

    def _kill(self, kind: str, process: "subprocess.Popen[str]", out: pathlib.Path) -> bool:
        everyone, replicas = jobs.family(process.pid), jobs.replicas_of(process.pid)
        if kind == "coordinator":
            jobs.kill(everyone[-1:])
        elif kind == "everything":
            jobs.kill(self._chance.sample(everyone, len(everyone)))
        elif not replicas or (kind == "two replicas" and len(replicas) < 2) or has_trial(out):
            return False
        elif kind == "two replicas":
            jobs.kill(self._chance.sample(replicas, 2))
        else:
            jobs.kill([self._chance.choice(replicas)])
        if kind not in ("coordinator", "everything"):
            return kind != "replica twice" or self._kill_again(process, out, replicas)
        process.wait(60)
        return True

    def _kill_again(self, process: "subprocess.Popen[str]", out: pathlib.Path, before: list[psutil.Process]) -> bool:
        """Kill the replica that replaces a killed one, soon after it has begun to work."""
        new = lambda: [p for p in jobs.replicas_of(process.pid) if p not in before]  # noqa: E731
        while not new():
            if self._sleep(process, 0.05):
                return False
        replica = new()[0]
        self._know(process)
        if self._sleep(process, self._chance.uniform(0.0, 4.0)) or not replica.is_running():
            return False
        jobs.kill([replica])
        return True

    def _stop(self, kind: str, process: "subprocess.Popen[str]", moment: str) -> bool:
        number = signal.Signals[kind.split()[0]]
        everyone = jobs.family(process.pid) if kind.endswith("to all") else jobs.family(process.pid)[-1:]
        for member in everyone:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.send_signal(number)
        if kind.endswith("twice") and not self._sleep(process, self._chance.uniform(0.0, 1.0)):
            process.send_signal(number)
        process.wait(60)
        return True

    def _wait(self, process: "subprocess.Popen[str]", out: pathlib.Path, moment: str) -> bool:
        """Wait until an epoch opens the job, starts replicas or works. False if it ends before."""
        while not self._has_come_to(moment, process, out):
            if self._is_over or self._sleep(process, 0.02):
                return False
        return process.poll() is None

    def _has_come_to(self, moment: str, process: "subprocess.Popen[str]", out: pathlib.Path) -> bool:
        if process.poll() is not None:
            return True
        if moment == "opening":
            return is_held_by(process.pid, out)
        if moment == "starting":
            return bool(jobs.replicas_of(process.pid))
        snapshot = jobs.snapshot_of(out)
        if snapshot.get("state") != "running" or not any(replica["in_flight"] for replica in snapshot["replicas"]):
            return False
        with contextlib.suppress(psutil.NoSuchProcess):
            return bool(snapshot["updated_at"] > psutil.Process(process.pid).create_time())
        return True

    def _sleep(self, process: "subprocess.Popen[str]", seconds: float) -> bool:
        """Sleep. Returns whether the process has ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
        return process.poll() is not None

    def _know(self, process: "subprocess.Popen[str]") -> None:
        """Remember all processes, to check later that they end."""
        self._everyone = [p for p in self._everyone if p.is_running()]
        self._everyone += [p for p in jobs.family(process.pid) if p not in self._everyone]

    # -- checks --------------------------------------------------------------------------------------------------------

    def _check_parts(self, out: pathlib.Path) -> None:
        """Check that a part in the manifest never changes."""
        if not (out / "manifest").is_dir() or not any((out / "manifest").iterdir()):
            return
        state = jobs.read_state(jobs.Folder(out))  # None if the job was killed before it had begun
        parts = state.parts if state is not None else {}
        for shard, part in parts.items():
            if self._parts.setdefault(shard, part) != part:
                raise Difference(f"part {shard} was {self._parts[shard]} and is now {part}")
        if forgotten := self._parts.keys() - parts.keys():
            raise Difference(f"the manifest has forgotten parts {sorted(forgotten)}")
        for shard, part in parts.items():
            data = (out / "parts" / part_name(shard)).read_bytes()
            if xxhash.xxh3_128_hexdigest(data) != part.digest:
                raise Difference(f"the file of part {shard} is not the one that the manifest names")

    def _check_rows(self, out: pathlib.Path, expected: pa.Table) -> None:
        table = jobs.table_of(out).drop_columns(["attempts"])
        got, wanted = keys_of(table), keys_of(expected)
        lost, doubled = wanted - got, got - wanted
        altered = 0
        if not lost and not doubled and not table.equals(expected):
            altered = sum(a != b for a, b in zip(table.to_pylist(), expected.to_pylist(), strict=True)) or -1
        if lost or doubled or altered:
            raise Difference(f"rows lost {lost.total()}, doubled {doubled.total()}, altered {altered}")

    def _check_left(self, out: pathlib.Path) -> None:
        state = jobs.state_of(out)
        if not state.is_done or state.running_replicas:
            raise Difference(f"the manifest does not say that all is done and ended: {state.running_replicas}")
        self.figures.replicas_started += state.event_counts["replica_started"]
        left = [
            *out.rglob(".tmp-*"), *(out / "staging").iterdir(), *(out / "journal").iterdir(), *out.glob("lock*"),
            *self._temp.iterdir(),
        ]  # fmt: skip
        if left:
            raise Difference(f"left behind: {[str(path) for path in left]}")
        if jobs.snapshot_of(out)["state"] != "done":
            raise Difference(f"status.json says {jobs.snapshot_of(out)['state']}")


def keys_of(table: pa.Table) -> Counter[tuple[int, int]]:
    """How often each (row_index, sample_index) occurs."""
    return Counter(zip(table["row_index"].to_pylist(), table["sample_index"].to_pylist(), strict=True))


def has_trial(out: pathlib.Path) -> bool:
    """Whether suspects run apart, because a replica has died twice with them in its engine.

    The soak must then not kill a replica, because further deaths count against the suspects.
    """
    state = jobs.read_state(jobs.Folder(out))
    kept = state.kept.values() if state is not None else ()
    return any(event.fields.get("accused") for event in kept)


def is_held_by(pid: int, out: pathlib.Path) -> bool:
    """Whether this process holds the job's lock."""
    with contextlib.suppress(OSError, ValueError):
        return bool(json.loads((out / "lock").read_text()).get("pid") == pid)
    return False


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
