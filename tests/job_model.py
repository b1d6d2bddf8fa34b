"""A model of the job: commands, kills and other faults in random order, and after each the rows that must be there.

    python tests/job_model.py --kills 10000 --seed 1 [--minutes M] [--real] [--folder KEPT]

A hypothesis state machine runs, extends, retries, repairs and begins a tiny job anew on the scripted engine, retries it
with repaired rows, gives its output to a second job, and strikes while it does so. The fast form strikes at a step of a
forked child (tests/crashes.py). The real form kills real processes at random times. The rows that must be there come
from one unhurt run for each shape of job; row n of the input is always row n of the output. Parts are read with
pyarrow, and the manifest as plain JSON.

The first difference ends the run with exit 1 and keeps the folder. A seed repeats the choices, not the threads' order.
"""

import argparse
import contextlib
import functools
import hashlib
import json
import math
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import HealthCheck, Phase, Verbosity, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from crashes import SIGNALS, Ended, Strike, Warm
from pictures import VISION, data_url, png

import jobs
from batchinf.base.slices import FILES_RECORD

NUM_ROWS, MOST_ROWS = 18, 36  # at the start, and with all that comes later
DISK_FAULTS = ("ENOSPC", "EIO", "EROFS")
KILLS = ("everything", "power cut", "replica", "engine", "coordinator")
RETRY = {"sampling.max_tokens": 7}
PREDICATES = ("errors", "true", "row_index % 3 = 0", "id < 'row-09'")
PHOTOS = [data_url(png(np.full((8, 8 + n, 3), 40 * n))) for n in range(4)]
LOOK = [{"role": "user", "content": [{"type": "text", "text": "{{ prompt }}"}, {"type": "image", "column": "photo"}]}]
# Shapes of jobs: what is merged over the spec, the kind of file, and the number of slices.
SHAPES: dict[str, tuple[dict[str, Any], str, int]] = {
    "plain": ({"parallel": {"data_parallel_size": 2}}, ".jsonl", 0),
    # By rules 2, rows that run again keep their seeds, so that a sampled row has few variants.
    "samples": ({"sampling": {"n": 2, "temperature": 0.8, "seed": 7}, "rules": 2}, ".csv", 0),
    "mixed": ({"sampling": {"columns": {"n": "samples"}, "temperature": 0.8}, "rules": 2}, ".jsonl", 0),
    "parquet": ({"output": {"rows_per_shard": 4}, "sampling": {"logprobs": 1}}, ".parquet", 0),
    "ordered": ({"input": {"order": "prefix", "where": "language <> 'fr'"}}, ".jsonl", 0),
    "slices": ({}, ".jsonl", 2),
    "pictures": (
        {"model": str(VISION), "input": {"messages": LOOK}, "sampling": {"n": 2, "temperature": 0.8}, "rules": 2},
        ".jsonl",
        0,
    ),
    "killer": ({"parallel": {"data_parallel_size": 2}}, ".jsonl", 0),
    "tried": ({"retry": {"attempts": 2, "where": "row_index % 3 = 0", "set": RETRY}}, ".jsonl", 0),
}
KILLERS = {"killer": 4}  # of a shape, the row that ends any engine
# Files of the output without which a job may be refused; the error says which one to put back or to delete.
NEEDED = ("manifest", "cut.json", "files.json", "source", "selection", "retry", "repairs")
Row = dict[str, Any]
Key = tuple[int, int]
# How a row of the output may have come about: with the sampling of a retry, and from a repaired row of the input.
Variant = tuple[bool, bool]
PLAIN: Variant = (False, False)
TRIED: Variant = (True, False)  # of the rows that the shape `tried` runs again by itself
VARIANTS: tuple[Variant, ...] = (PLAIN, (True, False), (False, True), (True, True))


class Difference(Exception):
    """Something that must not happen."""


class DifferenceAtOnce(BaseException):
    """The same, for a program: hypothesis does not try to repeat it."""


@dataclass
class Figures:
    """Counts over all machines of a run."""

    strikes: Counter[str] = field(default_factory=Counter)
    commands: Counter[str] = field(default_factory=Counter)
    changes: Counter[str] = field(default_factory=Counter)
    steps: set[str] = field(default_factory=set)
    rows: int = 0
    cpu_s: float = 0.0

    @property
    def num_kills(self) -> int:
        return sum(self.strikes[name] for name in KILLS)

    def lines(self) -> list[str]:
        named = lambda counts: ", ".join(f"{name} {count:,}" for name, count in counts.most_common())  # noqa: E731
        return [
            f"{self.num_kills:,} kills, {self.rows:,} rows compared, {self.cpu_s:.0f} s of processor time in commands",
            f"struck: {named(self.strikes)}; at {len(self.steps):,} different steps",
            f"commands: {named(self.commands)}",
            f"files changed: {named(self.changes)}",
        ]


def all_rows() -> list[Row]:
    """The input's rows, of which some have no valid prompt."""
    prompts = ["" if n % 13 == 5 else f"Say {n * 7 % 31}." + " More." * (n % 4) for n in range(MOST_ROWS)]
    return [
        {
            "id": f"row-{n:02d}",
            "prompt": prompt,
            "language": ("en", "de", "fr")[n % 3],
            "samples": 1 + n * 5 % 4,
            "photo": "gone.png" if n % 7 == 3 else PHOTOS[n % 4],
        }
        for n, prompt in enumerate(prompts)
    ]


def repaired_rows(rows: Iterable[Row]) -> list[Row]:
    """These rows as a repair has them: none has an error."""
    return [{**row, "prompt": f"Mended {row['id']}."} for row in rows]


def content_of(rows: Sequence[Row], kind: str) -> bytes:
    """A file of the input."""
    if kind == ".parquet":
        sink = pa.BufferOutputStream()
        # Pages of equal size for rows of equal lengths.
        pq.write_table(pa.Table.from_pylist(list(rows)), sink, compression="none", use_dictionary=False)
        return sink.getvalue().to_pybytes()
    if kind == ".csv":
        return "".join(["id,prompt,language\n", *(f"{r['id']},{r['prompt']},{r['language']}\n" for r in rows)]).encode()
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


class Runner(Protocol):
    """Runs commands, and strikes them."""

    kinds: Sequence[str]

    def run(
        self, folder: pathlib.Path, arguments: Sequence[str], strike: Strike | None, killer: int | None = None
    ) -> Ended:
        """Run `batchinf`. folder: everything that it writes is below it. killer: the row that ends any engine."""

    def close(self) -> None: ...


class Fast:
    """Forked children of a warm process, struck at a step."""

    kinds = (
        *["everything"] * 5, *["power cut"] * 5, "replica", "engine", *SIGNALS, *DISK_FAULTS, "clock",
    )  # fmt: skip
    # A whole run of the smallest job has more; if it has fewer, the strike does not come.
    NUM_STEPS = 360

    def __init__(self) -> None:
        self._warm = Warm({**jobs.environment, **jobs.quick_start()})

    def run(
        self, folder: pathlib.Path, arguments: Sequence[str], strike: Strike | None, killer: int | None = None
    ) -> Ended:
        return self._warm.run(folder, arguments, strike, killer)

    def close(self) -> None:
        self._warm.close()


class Real:
    """Real processes, struck at a time: `at` is in 1/200 s."""

    kinds = (*["everything"] * 3, *["coordinator"] * 3, *["replica"] * 2, *SIGNALS, "SIGHUP", "SIGTERM to all")
    NUM_STEPS = 600

    def run(
        self, folder: pathlib.Path, arguments: Sequence[str], strike: Strike | None, killer: int | None = None
    ) -> Ended:
        faults = "" if killer is None else f"engine.output.{killer}:*=kill SIGKILL"
        process = jobs.start(*arguments, faults=faults, is_unhurt=strike is None, TMPDIR=str(folder))
        everyone, step = jobs.family(process.pid), ""
        if strike is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(strike.at / 200)
            step = self._hit(process, strike)
            everyone += [one for one in jobs.family(process.pid) if one not in everyone]
        try:
            output, errors = process.communicate(timeout=120)
        except subprocess.TimeoutExpired:
            jobs.kill(jobs.family(process.pid))
            raise Difference(f"{arguments} does not end") from None
        if not jobs.are_gone(everyone):
            raise Difference(f"{arguments}: these processes live on: {everyone}")
        return Ended(process.returncode, errors, output, 0, step, 0.0)

    def _hit(self, process: "subprocess.Popen[str]", strike: Strike) -> str:
        chance, everyone = random.Random(strike.seed), jobs.family(process.pid)
        if process.poll() is not None or not everyone:
            return ""
        match strike.kind:
            case "everything":
                jobs.kill(chance.sample(everyone, len(everyone)))
            case "coordinator":
                jobs.kill(everyone[-1:])
            case "replica":
                replicas = jobs.replicas_of(process.pid)
                jobs.kill(chance.sample(replicas, min(1, len(replicas))))
                return strike.kind if replicas else ""
            case name:
                # Before that, the signal would end Python itself.
                jobs.wait_until(lambda: process.poll() is not None or catches_stops(process.pid))
                for member in jobs.family(process.pid) if name.endswith(" to all") else everyone[-1:]:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        member.send_signal(signal.Signals[name.split()[0]])
        return strike.kind

    def close(self) -> None:
        pass


def catches_stops(pid: int) -> bool:
    """Whether a process has a handler for SIGTERM."""
    with contextlib.suppress(OSError):
        status = pathlib.Path(f"/proc/{pid}/status").read_text()
        caught = int(status.split("SigCgt:")[1].split()[0], 16)
        return bool(caught >> (signal.SIGTERM - 1) & 1)
    return False


@functools.cache
def unhurt(runner: Runner, shape: str, variant: Variant) -> dict[Key, Row]:
    """The rows of a run that nothing hurts, over all of the input."""
    is_retried, is_repaired = variant
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        more, kind, _ = SHAPES[shape]
        (folder / "jobs").mkdir()
        path = folder / f"rows{kind}"
        path.write_bytes(content_of(repaired_rows(all_rows()) if is_repaired else all_rows(), kind))
        more = {name: section for name, section in more.items() if name != "retry"}
        spec = spec_of(folder, folder / "jobs" / "out", path, more)
        overrides = [f"{name}={value}" for name, value in RETRY.items()] if is_retried else []
        words = [f"--set={override}" for override in overrides]
        ended = runner.run(folder, ["run", str(spec), *words], None, KILLERS.get(shape))
        if ended.code != 0:
            raise Difference(ended.errors)
        rows = rows_in([folder / "jobs" / "out"])
        check_deaths(folder / "jobs" / "out", KILLERS.get(shape))
    return {(row["row_index"], row["sample_index"]): row for row in rows}


def check_deaths(out: pathlib.Path, killer: int | None) -> None:
    """A row that kills is found in at most log2(rows in the engine) + 3 deaths, and nothing else dies."""
    events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    deaths = [event for event in events if event["name"] == "death"]
    most = 0 if killer is None else math.floor(math.log2(max(death["num_rows"] for death in deaths))) + 3
    if len(deaths) > most:
        raise Difference(f"an unhurt run has {len(deaths)} deaths, and at most {most} are allowed")


def spec_of(folder: pathlib.Path, out: pathlib.Path, path: pathlib.Path, more: dict[str, Any]) -> pathlib.Path:
    """A spec for a job with tiny parts and journal segments."""
    base: dict[str, Any] = {
        "input": {"path": str(path)},
        "output": {"path": str(out), "rows_per_shard": 5},
        "sampling": {"max_tokens": 4, "logprobs": None},
        "parallel": {"data_parallel_size": 1},
        "checkpoint_interval_s": 0.05,
        "scripted": {"max_num_seqs": 4, "step_s": 0.002},
        "max_error_rate": 1.0,
        "max_restarts": 1000,
        "drain_timeout_s": 0.5,
    }
    for name, section in more.items():
        base[name] = {**base.get(name, {}), **section} if isinstance(section, dict) else section
    return jobs.spec_of(folder, **base)


def rows_in(folders: Iterable[pathlib.Path]) -> list[Row]:
    """All rows of `parts/*.parquet`, as readers take them, without `attempts`."""
    rows: list[Row] = []
    for folder in folders:
        for path in sorted((folder / "parts").glob("*.parquet")):
            try:
                rows += part_rows(path.read_bytes())
            except (OSError, pa.ArrowException) as error:
                raise Difference(f"{path} cannot be read: {error}") from error
    return rows


@functools.lru_cache(256)
def part_rows(content: bytes) -> tuple[Row, ...]:
    """The rows of a part without `attempts`. Most parts are read again after each command."""
    table = pq.read_table(pa.BufferReader(content), use_threads=False)
    rows = table.drop_columns(["attempts"]).to_pylist()
    for row in rows:
        if row["error_type"] == "engine_death":  # the rest is the cause of the last death, which a strike may be
            row["error_message"] = row["error_message"].partition(":")[0]
    return tuple(rows)


def lines_of(folder: pathlib.Path) -> list[dict[str, Any]]:
    """The whole lines of a manifest, as plain JSON."""
    lines = []
    for log in sorted((folder / "manifest").glob("*.jsonl")):
        for line in log.read_bytes().split(b"\n"):
            with contextlib.suppress(ValueError):
                lines.append(json.loads(line))
    return lines


def strikes(kinds: Sequence[str], num_steps: int) -> st.SearchStrategy[Strike]:
    return st.builds(
        Strike,
        st.sampled_from(kinds),
        # A resume has few steps left, and one of the later ones would not come.
        st.one_of(st.integers(1, num_steps // 4), st.integers(1, num_steps)),
        st.integers(0, 2**16),
        st.booleans(),
        st.sampled_from([-4e8, -7200.0, -1.0, 60.0, 86400.0, 1e9]),
    )


# Hypothesis begins with the simplest example, which strikes at the first step again and again.
working = precondition(lambda self: not self.is_idle)


class JobModel(RuleBasedStateMachine):
    """One job, from its first run on. Subclasses name the runner."""

    runner: ClassVar[Any] = None
    make_runner: ClassVar[type] = Fast
    figures: ClassVar[Figures] = Figures()
    base: ClassVar[pathlib.Path | None] = None
    log: ClassVar[Any] = None
    failure: ClassVar[type[BaseException]] = Difference

    def __init__(self) -> None:
        super().__init__()
        machine = type(self)
        if machine.runner is None:
            machine.runner = self.make_runner()
        self._has_failed = False

    @classmethod
    def close_runner(cls) -> None:
        """End the runner's processes."""
        if cls.runner is not None:
            cls.runner.close()

    @initialize(shape=st.sampled_from(sorted(SHAPES)), number=st.integers(0, 2**32))
    def begin(self, shape: str, number: int) -> None:
        self.is_idle = number == 0
        if self.is_idle:
            return
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="model-", dir=self.base))
        self.out = self.folder / "jobs" / "out"
        self.input = self.folder / "input"
        for path in (self.input, self.out.parent):
            path.mkdir()
        self.shape = shape
        more, self.kind, self.num_slices = SHAPES[shape]
        self.spec = spec_of(self.folder, self.out, self.input, more)
        self.num_files = 2
        self.on_disk = NUM_ROWS  # rows in the input
        # Numbers of rows of which one is what the job has taken in.
        self.totals = {NUM_ROWS}
        half = NUM_ROWS // 2
        self._write("a", all_rows()[:half])
        self._write("b", all_rows()[half:NUM_ROWS])
        # Of rows that a retry may have changed: which variants they may be. Other rows are plain.
        self.variants: dict[int, set[Variant]] = {}
        self.num_chains = 0
        self.kept: set[Key] = set()
        self.asides: list[tuple[pathlib.Path, str]] = []
        self.num_deaths = 0
        self.is_done = self.is_damaged = self.has_failing_disk = self.has_lost_digests = False
        self._say(f"shape {shape} in {self.folder}")

    def _say(self, line: str) -> None:
        if JobModel.log is not None:
            print(line, file=JobModel.log, flush=True)

    def _write(self, name: str, rows: Sequence[Row]) -> None:
        (self.input / f"{name}{self.kind}").write_bytes(content_of(rows, self.kind))

    # -- commands ------------------------------------------------------------------------------------------------------

    def _command(
        self, *arguments: str, strike: Strike | None = None, may_refuse: bool = False, killer: int | None = None
    ) -> Ended:
        """Run a command, check how it ends, and compare the rows. may_refuse: it may be an error of the user."""
        if strike is not None and strike.kind in ("replica", "engine") and self.num_deaths:
            # Rows that are in the engine at two deaths are suspects, and further deaths would count against them.
            strike = None
        self._say(f"  {' '.join(arguments)} {'' if strike is None else strike}")
        ended = self.runner.run(self.folder, arguments, strike, killer)
        self._say(f"    {ended.code} {ended.step} {ended.errors.strip().splitlines()[-1:]}")
        figures = self.figures
        figures.commands[
            next((a for a in arguments if a.startswith("--") and a not in ("--set", "--slice")), arguments[0])
        ] += 1
        figures.cpu_s += ended.cpu_s
        kind = strike.kind if strike is not None and ended.step else ""
        self.has_failing_disk = kind in DISK_FAULTS
        if kind:
            figures.strikes[kind] += 1
            figures.steps.add(ended.step)
            self.num_deaths += kind in ("replica", "engine")
        allowed = {0}
        if kind in ("everything", "power cut", "coordinator"):
            # A real process may have ended just before its kill.
            allowed = {-signal.SIGKILL, 0} if self.make_runner is Real else {-signal.SIGKILL}
        elif kind.startswith("SIG"):
            # Only `run` stops in an orderly way.
            allowed = {0, 75} if arguments[0] == "run" else {0, 130, -signal.Signals[kind.split()[0]]}
        elif kind in DISK_FAULTS:
            allowed = {0, 2}
        if may_refuse:
            allowed |= {2}
        # A replica's thread that is struck while it answers the coordinator says so.
        errors = re.sub(r"Traceback \(most recent call last\):\n(?:  .*\n)+(?:\w+\.)*Gone\n", "", ended.errors)
        if ended.code not in allowed or "Traceback" in errors:
            self._fail(f"{arguments} with {strike} at {ended.step!r} ends with {ended.code}:\n{errors}")
        if ended.code == 2 and len(re.findall("^error: ", errors, re.MULTILINE)) != 1:
            self._fail(f"{arguments} with {strike} at {ended.step!r} is not refused in one line:\n{errors}")
        return ended

    def _fail(self, what: str) -> None:
        self._has_failed = True
        self._say(f"DIFFERENCE: {what}")
        raise self.failure(f"{what}\nshape {self.shape}, folder {self.folder}")

    def _slices(self) -> list[list[str]]:
        return [["--slice", f"{n}/{self.num_slices}"] for n in range(self.num_slices)] or [[]]

    def _folders(self) -> list[pathlib.Path]:
        return [self.out / f"slice-{n}" for n in range(self.num_slices)] or [self.out]

    def _has_begun(self, folder: pathlib.Path) -> bool:
        return any(line.get("kind") == "header" for line in lines_of(folder))

    def _run(self, *arguments: str, strike: Strike | None = None, may_refuse: bool = False) -> Ended:
        """`run` for the whole job or each slice, with the strike in one of them."""
        before = self._num_begun()
        if "--extend" in arguments:
            self.totals |= {self.on_disk}
        struck = 0 if strike is None else strike.seed % max(1, self.num_slices)
        has_failing_disk = False
        for number, words in enumerate(self._slices()):
            ended = self._command(
                "run", str(self.spec), *words, *arguments,
                strike=strike if number == struck else None, may_refuse=may_refuse, killer=KILLERS.get(self.shape),
            )  # fmt: skip
            has_failing_disk |= self.has_failing_disk
            if ended.code != 0:
                break
        self.has_failing_disk = has_failing_disk
        if before == 0:
            self.totals = {self.on_disk}
        self._observe()
        if ended.code == 0:
            self._check_done()
        else:
            self.is_done = False
        return ended

    def _num_begun(self) -> int:
        return sum(self._has_begun(folder) for folder in self._folders())

    @property
    def _is_grown(self) -> bool:
        """Whether the input surely has rows that the job has not taken in."""
        return self.on_disk not in self.totals and self._num_begun() > 0

    def _may_refuse(self) -> bool:
        return self.totals != {self.on_disk} and self._num_begun() > 0

    @precondition(lambda self: not self.is_done)
    @working
    @rule(data=st.data())
    def run(self, data: st.DataObject) -> None:
        for strike in data.draw(self._bursts()):
            ended = self._run(strike=strike, may_refuse=self._may_refuse())
            if ended.code == 2 and not ended.step and self._may_refuse():
                self.totals -= {self.on_disk}
            if ended.code == 0:
                break

    def _bursts(self) -> st.SearchStrategy[list[Strike]]:
        return st.lists(strikes(self.runner.kinds, self.runner.NUM_STEPS), min_size=2, max_size=10)

    def _strike(self, data: st.DataObject) -> Strike | None:
        return data.draw(st.one_of(strikes(self.runner.kinds, self.runner.NUM_STEPS), st.none()))

    @precondition(lambda self: not self.is_done)
    @working
    @rule()
    def resume(self) -> None:
        """Finish what there is; an input that has grown is taken in."""
        ended = self._run(*(["--extend"] if self._may_refuse() else []))
        if ended.code == 0:
            self.totals &= {self.on_disk}
            self._check_done()
        else:
            self._fail(f"a resume ends with {ended.code}: {ended.errors}")

    @precondition(lambda self: self.on_disk + 3 <= MOST_ROWS and not self.num_slices)
    @working
    @rule(data=st.data(), is_appended=st.booleans(), num_rows=st.integers(1, 6))
    def grow(self, data: st.DataObject, is_appended: bool, num_rows: int) -> None:
        """Add rows to the input: without --extend they are named, and with it they are taken in, once."""
        if self._may_refuse():
            return
        stop = min(MOST_ROWS, self.on_disk + num_rows)
        rows = all_rows()[self.on_disk : stop]
        if is_appended and self.kind != ".parquet":
            content = content_of(rows, self.kind)
            with self._last_file().open("ab") as file:
                file.write(content.split(b"\n", 1)[1] if self.kind == ".csv" else content)
            self.figures.changes["appended"] += 1
        else:
            self.num_files += 1
            self._write(chr(ord("a") + self.num_files - 1), rows)
            self.figures.changes["new file"] += 1
        self.on_disk = stop
        if self._is_grown:
            ended = self._run(strike=None, may_refuse=True)
            if ended.code != 2:
                self._fail(f"rows that came were not refused: {ended.code}")
        for strike in data.draw(self._bursts()):
            if self._run("--extend", strike=strike).code == 0:
                self.totals = {self.on_disk}
                break

    def _last_file(self) -> pathlib.Path:
        return self.input / f"{chr(ord('a') + self.num_files - 1)}{self.kind}"

    @precondition(lambda self: self.is_done and not self._may_refuse() and self.shape != "tried")
    @working
    @rule(data=st.data(), predicate=st.sampled_from(PREDICATES), has_sampling=st.booleans())
    def retry(self, data: st.DataObject, predicate: str, has_sampling: bool) -> None:
        """Run chosen rows again. Until the job is done, each of them may be the old or the new one."""
        self._retry(data, predicate, has_sampling, is_repaired=set())

    @precondition(
        lambda self: self.is_done and not self._may_refuse() and not self.num_slices and self.shape != "tried"
    )
    @working
    @rule(data=st.data(), predicate=st.sampled_from(PREDICATES), has_sampling=st.booleans(), is_whole=st.booleans())
    def retry_with_repaired_rows(self, data: st.DataObject, predicate: str, has_sampling: bool, is_whole: bool) -> None:
        """As `retry`, with a file that has all or half of the chosen rows, which is deleted after the first start."""
        chosen = sorted(self._chosen(predicate))
        is_repaired = chosen if is_whole else chosen[::2]
        if not is_repaired:
            return
        path = self.folder / f"repaired{self.kind}"
        rows = repaired_rows(row for number, row in enumerate(all_rows()) if number in is_repaired)
        path.write_bytes(content_of(rows, self.kind))
        self._retry(data, predicate, has_sampling, set(is_repaired), "--input", str(path))

    def _retry(
        self, data: st.DataObject, predicate: str, has_sampling: bool, is_repaired: set[int], *words: str
    ) -> None:
        """is_repaired: the rows that come from a file."""
        later = {}
        for row in self._chosen(predicate):
            before = self.variants.get(row, {PLAIN})
            later[row] = {(has_sampling, row in is_repaired or was_repaired) for _, was_repaired in before}
            self.variants[row] = before | later[row]
        if has_sampling:
            words = (*words, "--set", *(f"{name}={value}" for name, value in RETRY.items()))
        for strike in data.draw(self._bursts()):
            if self._run("--retry", predicate, *words, strike=strike).code == 0:
                self.variants |= later
                self._check_done()
                break

    @precondition(lambda self: self.is_done and not self._may_refuse())
    @working
    @rule(data=st.data(), grows=st.booleans())
    def chain(self, data: st.DataObject, grows: bool) -> None:
        """Give the output to a second job, and compare its rows with those of another one that nothing hurts."""
        self.num_chains += 1
        spec, out = self._chained("chain")
        self._strike_chain(data, spec, out)
        if grows and self.on_disk + 2 <= MOST_ROWS and not self.num_slices:
            self.num_files += 1
            self._write(chr(ord("a") + self.num_files - 1), all_rows()[self.on_disk : self.on_disk + 2])
            self.on_disk += 2
            if self._run("--extend").code != 0:
                self._fail("an extension that nothing hurts does not end")
            self._strike_chain(data, spec, out, "--extend")
        shutil.rmtree(out)

    def _chained(self, name: str) -> tuple[pathlib.Path, pathlib.Path]:
        """The spec and the folder of a job over the output."""
        folder = self.folder / f"{name}-{self.num_chains}"
        folder.mkdir()
        spec = json.loads(self.spec.read_text())
        spec |= {
            "input": {"job": str(self.out), "id_column": "id", "prompt_column": "text"},
            "output": {"path": str(folder / "out"), "rows_per_shard": 5, "keep_columns": {"text": "first"}},
            "sampling": {"temperature": 0.0, "max_tokens": 4},
            "retry": None,
        }
        path = folder / "job.yaml"
        path.write_text(json.dumps(spec))
        return path, folder / "out"

    def _strike_chain(self, data: st.DataObject, spec: pathlib.Path, out: pathlib.Path, *words: str) -> None:
        unhurt_spec, unhurt_out = self._chained(f"unhurt{len(words)}")
        if self.runner.run(self.folder, ["run", str(unhurt_spec)], None).code != 0:
            self._fail("a second job that nothing hurts does not end")
        expected = rows_in([unhurt_out])
        if len(expected) != len(rows_in(self._folders())):
            self._fail(f"the second job has {len(expected)} rows")
        few = st.lists(strikes(self.runner.kinds, self.runner.NUM_STEPS), min_size=1, max_size=4)
        for strike in [*data.draw(few), None]:
            ended = self._command("run", str(spec), *words, strike=strike)
            rows = rows_in([out])
            if other := [row for row in rows if row not in expected]:
                self._fail(f"rows of the second job are altered: {other}")
            if ended.code == 0:
                break
        if rows != expected:
            self._fail(f"the second job has {len(rows)} rows, not {len(expected)}, or in another order")
        self.figures.changes["second jobs compared"] += 1
        self.num_deaths = 0

    def _chosen(self, predicate: str) -> set[int]:
        plain = {key[0]: row for key, row in self._expected(PLAIN).items()}
        # A row may be of several variants only if it is the same in them.
        rows = {n: self._first_of(n, next(iter(self.variants.get(n, {PLAIN})))) for n in plain}
        tests = {
            "errors": lambda n, row: row["error_type"] is not None,
            "true": lambda n, row: True,
            "row_index % 3 = 0": lambda n, row: n % 3 == 0,
            "id < 'row-09'": lambda n, row: row["id"] < "row-09",
        }
        return {n for n, row in rows.items() if tests[predicate](n, row)}

    @working
    @rule(data=st.data())
    def fresh(self, data: st.DataObject) -> None:
        """Begin anew. The old job is whole under its new name, or still in its place."""
        if not any(folder.exists() for folder in self._folders()):
            return
        for strike in data.draw(
            st.lists(strikes(self.runner.kinds, self.runner.NUM_STEPS // 2), min_size=1, max_size=3)
        ):
            before, names = self._digest(self.out), self._moved()
            had_job = self._num_begun() > 0
            words = ["run", str(self.spec), "--fresh"]
            if self.num_slices:
                words += ["--slice", "0/2"] if strike.seed % 2 else []
                if not strike.seed % 2:
                    continue  # a whole job in place of slices is another job
                before = self._digest(self.out / "slice-0")
            ended = self._command(*words, strike=strike, killer=KILLERS.get(self.shape))
            moved = [path for path in self._moved() if path not in names]
            if len(moved) > 1:
                self._fail(f"--fresh made {moved}")
            if moved:
                if self._digest(moved[0]) != before:
                    self._fail(f"the old job in {moved[0]} is not what it was: {before}, {self._digest(moved[0])}")
                self.asides.append((moved[0], before))
                self._forget()
            elif ended.code == 0 and had_job and (self.out / "parts").exists() and self.kept:
                self._fail("--fresh has moved nothing")
            self._observe()
            if ended.code == 0 and not self.num_slices:
                self.totals = {self.on_disk}
                self._check_done()
                return

    def _moved(self) -> list[pathlib.Path]:
        if self.num_slices:
            return sorted(self.out.glob("old-slice-*"))
        return sorted(self.out.parent.glob("out.*"))

    def _forget(self) -> None:
        """The job in the folder is a new one."""
        if self.num_slices:
            self.kept = {key for key in self.kept if key[0] >= self.on_disk // 2}
        else:
            self.kept = set()
            self.totals = {self.on_disk}
        first = self.on_disk // 2 if self.num_slices else self.on_disk
        self.variants = {row: variants for row, variants in self.variants.items() if row >= first}
        self.num_deaths, self.is_done = 0, False

    def _digest(self, folder: pathlib.Path) -> str:
        """A digest of a job's parts, by name."""
        paths = sorted((folder / "parts").glob("*.parquet")) + sorted(folder.glob("slice-*/parts/*.parquet"))
        content = [(str(path.relative_to(folder)), hashlib.md5(path.read_bytes()).hexdigest()) for path in paths]
        return json.dumps(content)

    @precondition(lambda self: self._num_begun() > 0)
    @working
    @rule(data=st.data(), is_deep=st.booleans())
    def repair(self, data: st.DataObject, is_deep: bool) -> None:
        strike = self._strike(data)
        words = ["--deep"] if is_deep else []
        ended = self._command("check", str(self.out), "--repair", *words, strike=strike, may_refuse=True)
        if ended.code == 2 and (strike is None or not ended.step) and self.is_done and not self.num_slices:
            self._fail(f"a whole job is refused: {ended.errors}{ended.output}")
        self._observe()

    # -- changes of files ----------------------------------------------------------------------------------------------

    @precondition(lambda self: self._num_begun() == max(1, self.num_slices) and not self._may_refuse())
    @working
    @rule(
        data=st.data(),
        how=st.sampled_from(["edited", "shuffled", "truncated", "replaced", "deleted", "swapped", "touched"]),
        is_first=st.booleans(),
        is_meanwhile=st.booleans(),
    )
    def change_input(self, data: st.DataObject, how: str, is_first: bool, is_meanwhile: bool) -> None:
        """Change a file of the input, before a run or in it. It is refused, or all of it was read before."""
        if how in ("edited", "shuffled") and (self.has_lost_digests or not self._has_digests()):
            return  # of a Parquet file without them only the footer is compared, as docs/reliability.md says
        path = self.input / f"{'a' if is_first else 'b'}{self.kind}"
        content, stamp = path.read_bytes(), path.stat()
        changed = self._changed(content, how)
        strike = None
        if is_meanwhile and self.make_runner is Fast and how in ("edited", "shuffled", "truncated"):
            at = data.draw(st.integers(1, self.runner.NUM_STEPS))
            strike = Strike("edit", at, edits={str(path): changed.hex()})
        elif how == "deleted":
            path.unlink()
        elif how == "replaced":
            path.with_name(".other").write_bytes(changed)
            path.with_name(".other").replace(path)
        elif how == "touched":
            os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns + 10**9))
        elif how == "swapped":
            other = self.input / f"{'b' if is_first else 'a'}{self.kind}"
            os.rename(path, path.with_name(".between"))
            os.rename(other, path)
            os.rename(path.with_name(".between"), other)
        else:
            path.write_bytes(changed)
        self.figures.changes[f"input {how}"] += 1
        is_same = how in ("touched", "swapped")  # files are known by content
        ended = self._run(strike=strike, may_refuse=not is_same)
        if ended.code == 0 and not is_same and strike is None:
            self._fail(f"an input that was {how} is not noticed")
        if ended.code == 2 and path.name not in ended.errors and str(self.input) not in ended.errors:
            self._fail(f"the error does not name {path}: {ended.errors}")
        if how == "swapped":
            os.rename(path, path.with_name(".between"))
            os.rename(other, path)
            os.rename(path.with_name(".between"), other)
        else:
            path.write_bytes(content)
        self._run()

    def _has_digests(self) -> bool:
        """Whether the digests of Parquet files are durable, as they are before a row is stored. Other kinds: always."""
        stored = [path for name in ("parts", "journal") for path in self.out.rglob(f"{name}/*")]
        return self.kind != ".parquet" or bool(stored)

    def _changed(self, content: bytes, how: str) -> bytes:
        rows = pq.read_table(pa.BufferReader(content)).to_pylist() if self.kind == ".parquet" else None
        if how == "truncated":
            return content[: len(content) // 2]
        if how == "shuffled":
            if rows is not None:
                return content_of(rows[::-1], self.kind)
            lines = content.splitlines(keepends=True)
            start = self.kind == ".csv"
            return b"".join([*lines[:start], *lines[start:][::-1]])
        if rows is not None:
            return content_of([{**row, "prompt": row["prompt"].replace("Say", "Sag")} for row in rows], self.kind)
        return content.replace(b"Say", b"Sag")

    @precondition(lambda self: self._num_begun() == max(1, self.num_slices) and not self._may_refuse())
    @working
    @rule(
        chosen=st.integers(0, 10**6),
        how=st.sampled_from(["torn", "flipped", "deleted"]),
        place=st.integers(0, 10**6),
        data=st.data(),
    )
    def damage_output(self, chosen: int, how: str, place: int, data: st.DataObject) -> None:
        """Damage one file of the output. After a repair, the next run has all rows again."""
        files = sorted(path for path in self.out.rglob("*") if path.is_file() and path.stat().st_size)
        files = [path for path in files if path.parent.name not in ("logs", "damaged") and "old-" not in str(path)]
        if not files:
            return
        path = files[chosen % len(files)]
        group = path.relative_to(self._folder_of(path)).parts[0]
        if group == "lock" or (group.startswith(".tmp-") and group.endswith("-lock")):  # its other name, for a moment
            return  # its holder may live elsewhere: a run waits 60 s for it, and one with no rows left leaves it
        if group == "manifest" and (self.variants or how == "deleted"):
            return  # what a retry or an extension has chosen is in the manifest alone
        content = path.read_bytes()
        self._hurt(path, content, how, place)
        self.figures.changes[f"{group} {how}"] += 1
        self._say(f"  {path} {how}")
        self.is_damaged = True
        self.has_lost_digests |= group == "source" and self.kind == ".parquet"
        if group == "parts":
            self.kept = set()
        if group == "manifest":
            self.kept = set()
            self.totals |= {NUM_ROWS, *range(NUM_ROWS, self.on_disk + 1)} if self.on_disk > NUM_ROWS else set()
        try:
            self._mend(data, path, group, content)
        except (Difference, DifferenceAtOnce) as error:
            self._fail(f"{path} {how} at {place % len(content)} of {len(content)}: {error}")

    def _folder_of(self, path: pathlib.Path) -> pathlib.Path:
        return next((folder for folder in self._folders() if folder in path.parents), self.out)

    def _hurt(self, path: pathlib.Path, content: bytes, how: str, place: int) -> None:
        at = place % len(content)
        if how == "deleted":
            path.unlink()
        elif how == "torn":
            os.truncate(path, at)
        else:
            with path.open("r+b") as file:
                file.seek(at)
                file.write(bytes([content[at] ^ (1 << place % 8)]))

    def _mend(self, data: st.DataObject, path: pathlib.Path, group: str, content: bytes) -> None:
        """Finish the job with what it has left, or with the file as it was if an error asks for that."""
        folder = self._folder_of(path)
        if group in ("parts", "manifest"):
            for strike in data.draw(st.lists(strikes(self.runner.kinds, self.runner.NUM_STEPS // 4), max_size=2)):
                self._command("check", str(folder), "--deep", "--repair", strike=strike, may_refuse=True)
            self._command("check", str(folder), "--deep", "--repair", may_refuse=True)
        extend = ["--extend"] if self.on_disk > NUM_ROWS and not self.num_slices else []
        is_needed = group in NEEDED
        for strike in [*data.draw(self._bursts()), None]:
            ended = self._run(*extend, strike=strike, may_refuse=is_needed)
            if ended.code == 0:
                break
            if ended.code == 2 and "--repair` takes such parts in" in ended.errors:
                self._command("check", str(folder), "--repair", may_refuse=True)
                continue
            if ended.code == 2 and not ended.step:
                if str(path) not in ended.errors and path.parent.name not in ended.errors:
                    self._fail(f"the refusal does not name {path}: {ended.errors}")
                path.write_bytes(content)
                is_needed = False
        if ended.code == 2:
            ended = self._run(*extend)
        if is_needed and group in (FILES_RECORD, "repairs"):  # no run has read it yet; a later one would be refused
            path.write_bytes(content)
        self.totals = {self.on_disk}
        self._check_done()

    @precondition(lambda self: self.is_idle)
    @rule()
    def wait(self) -> None:
        """Do nothing."""

    # -- comparisons ---------------------------------------------------------------------------------------------------

    def _expected(self, variant: Variant, total: int | None = None) -> dict[Key, Row]:
        total = self.on_disk if total is None else total
        return {key: row for key, row in unhurt(self.runner, self.shape, variant).items() if key[0] < total}

    def _possible(self) -> set[Variant]:
        """The variants that rows may be of. Each takes an unhurt run of its own."""
        of_attempts = {TRIED} if self.shape == "tried" else set()
        return set(VARIANTS) if self.is_damaged else {PLAIN, *of_attempts}.union(*self.variants.values())

    def _variants_of(self, number: int) -> set[Variant]:
        """What a row of the input may be now, in a job that is not damaged."""
        return {PLAIN, TRIED} if self._is_tried(number) else self.variants.get(number, {PLAIN})

    def _is_tried(self, number: int) -> bool:
        return self.shape == "tried" and number % 3 == 0

    def _first_of(self, number: int, variant: Variant) -> Row:
        """The first output row of a row of the input."""
        return unhurt(self.runner, self.shape, variant)[number, 0]

    def _observe(self) -> dict[Key, Row]:
        """Compare all rows that readers find now. None is altered or doubled, and no committed one has gone."""
        try:
            rows = rows_in(self._folders())
        except Difference as error:
            self._fail(str(error))
        keys = Counter((row["row_index"], row["sample_index"]) for row in rows)
        if doubled := [key for key, count in keys.items() if count > 1]:
            self._fail(f"rows doubled: {doubled}")
        expected = {variant: self._expected(variant) for variant in self._possible()}
        for row in rows:
            key = row["row_index"], row["sample_index"]
            # A part that was lost runs as at first, and then again as its retries say.
            variants = VARIANTS if self.is_damaged else self._variants_of(key[0])
            if not any(row == expected[variant].get(key) for variant in variants):
                self._fail(f"row {key} is altered: {row}, not {[expected[variant].get(key) for variant in variants]}")
        self.figures.rows += len(rows)
        found = {(row["row_index"], row["sample_index"]): row for row in rows}
        if lost := self.kept - found.keys():
            self._fail(f"committed rows are lost: {sorted(lost)}")
        self.kept = self._committed(found)
        return found

    def _committed(self, found: dict[Key, Row]) -> set[Key]:
        """The keys of rows in parts that the manifest names. Those that are only staged are no output yet."""
        kept: set[Key] = set()
        for folder in self._folders():
            named: dict[int, str] = {}
            for line in lines_of(folder):
                if line.get("kind") == "part":
                    named[line["shard"]] = line["digest"]
                elif line.get("kind") == "lost":
                    for shard in line["shards"]:
                        named.pop(shard, None)
            for shard, digest in named.items():
                path = folder / "parts" / f"part-{shard:06d}.parquet"
                if not path.exists():
                    if (folder / "staging" / f"{shard:06d}-{digest}.parquet").exists():
                        continue
                    if self.is_damaged:
                        continue  # a repair moved it aside, and no run has noticed yet
                    self._fail(f"{path}, which the manifest names, is gone")
                kept |= {(row["row_index"], row["sample_index"]) for row in part_rows(path.read_bytes())}
        return kept

    def _check_done(self) -> None:
        """Compare a finished job: all rows, and nothing left behind."""
        self.is_damaged = False
        found = self._observe()
        now: dict[int, dict[Key, Row]] = {}
        for key, row in found.items():
            now.setdefault(key[0], {})[key] = row
        wanted = {total: {row for row, _ in self._expected(PLAIN, total)} for total in self.totals}
        totals = {total for total, numbers in wanted.items() if numbers == now.keys()}
        if not totals:
            lost = set.intersection(*wanted.values()) - now.keys()
            self._fail(f"rows lost: {sorted(lost)}; got {len(now)}, not {[len(rows) for rows in wanted.values()]}")
        self.totals = totals
        by_row: dict[Variant, dict[int, dict[Key, Row]]] = {variant: {} for variant in self._possible()}
        for variant, rows in by_row.items():
            for key, row in self._expected(variant).items():
                rows.setdefault(key[0], {})[key] = row
        for number, rows in now.items():
            allowed = {TRIED} if self._is_tried(number) else self._variants_of(number)
            same = {variant for variant in allowed if by_row[variant].get(number) == rows}
            if not same:
                self._fail(f"row {number} has samples of several variants, or not all: {rows}")
            if number in self.variants:
                self.variants[number] = same
        self.num_deaths, self.is_done = 0, True
        self.figures.changes["jobs done with a row that kills"] += self.shape in KILLERS
        # A disk that failed while a finished job was tidied up leaves that to the next run; there is always one.
        for folder in [] if self.has_failing_disk else self._folders():
            left = [
                *folder.rglob(".tmp-*"), *folder.glob("staging/*"), *folder.glob("journal/*"),
                *folder.glob("lock*"),
            ]  # fmt: skip
            if left:
                self._fail(f"left behind: {left}")

    def teardown(self) -> None:
        """Finish the job without a strike, compare it and the jobs that were moved aside, and delete all."""
        if hasattr(self, "folder") and not self._has_failed:
            self.resume()
            for path, digest in self.asides:
                if self._digest(path) != digest:
                    self._fail(f"the job in {path} has changed")
            shutil.rmtree(self.folder)


def main() -> None:
    """Run machines until enough kills are done; exit 1 at the first difference."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--minutes", type=float, default=None)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--real", action="store_true", help="real processes, killed at random times")
    parser.add_argument("--folder", type=pathlib.Path, default=None)
    args = parser.parse_args()
    base = args.folder or pathlib.Path(tempfile.mkdtemp(prefix="job-model-"))
    base.mkdir(parents=True, exist_ok=True)
    tempfile.tempdir = str(base)
    machine: Any = type(
        "Machine", (JobModel,), {"make_runner": Real if args.real else Fast, "failure": DifferenceAtOnce}
    )
    JobModel.base = base
    figures, began, last = JobModel.figures, time.monotonic(), 0.0
    # The first example of a batch is idle, and the second is a job.
    options = settings(
        max_examples=2, stateful_step_count=30, deadline=None, database=None, derandomize=False, print_blob=False,
        phases=[Phase.generate], suppress_health_check=list(HealthCheck), verbosity=Verbosity.quiet,
    )  # fmt: skip
    print(f"seed {args.seed}, {args.kills:,} kills, in {base}", flush=True)
    number, failure = 0, None
    while figures.num_kills < args.kills and (args.minutes is None or time.monotonic() - began < 60 * args.minutes):
        number += 1
        with (base / "steps.log").open("w") as JobModel.log:
            try:
                run_state_machine_as_test(seed(f"{args.seed} {number}")(machine), settings=options)
            except BaseException as error:
                failure = error
                traceback.print_exc(file=JobModel.log)
        if failure is not None:
            break
        if time.monotonic() - last > 60:
            last = time.monotonic()
            print(f"{(last - began) / 60:.1f} min, {number} jobs: {figures.lines()[0]}", flush=True)
    minutes = (time.monotonic() - began) / 60
    print(f"seed {args.seed}: {number} jobs in {minutes:.1f} minutes", *figures.lines(), sep="\n")
    machine.close_runner()
    if failure is not None:
        print(f"DIFFERENCE in batch {number}: {failure!r}\nkept: {base}, steps.log has the steps", flush=True)
        sys.exit(1)
    print("rows lost 0, doubled 0, altered 0", flush=True)
    shutil.rmtree(base)


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    jobs.environment = dict(os.environ)
    main()
