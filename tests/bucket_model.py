"""The model of a job in a bucket: real processes that are killed anywhere, on a store that fails in many requests.

    python tests/bucket_model.py --kills 1000 --seed 1

A job goes through `run`, `--extend` and `--retry`, or runs in two slices. At random steps its process is killed, is
paused while another one takes the job over, or is asked to stop. Its work folder is deleted at random. In half of the
jobs a quarter of all requests to the store fail. Greedy answers of the scripted engine depend on the prompt alone, and
a retry here changes no setting. So at any moment each row that a reader finds must be that of an unhurt job.

What a reader finds by the glob of the parts is compared with the commits after each strike. All committed parts must be
there. Any other part must be one that is uploaded before its commit: the commit that comes later must have its bytes.
After half of the strikes, the next start is killed as soon as it has recovered. There is no other part then.
"""

import argparse
import functools
import json
import pathlib
import random
import shutil
import signal
import tempfile
import uuid
from collections import Counter
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import stores

import jobs

NUM_ROWS = 60
NUM_MORE = 15
_MOST_STRIKES = 8  # of one command
RETRY = ("--retry", "row_index % 7 = 3")
# With the highest passage at which a process is struck.
STEPS = {
    "cut.before_record": 1, "cut.after_record": 1, "chain.before_commit": 12, "chain.after_commit": 12,
    "manifest.mid_line": 12, "mirror.before_part": 10, "mirror.after_part": 10, "mirror.before_bundle": 3,
    "mirror.after_bundle": 3, "mirror.before_delete": 2, "coordinator.before_drop": 8, "start.replicas": 1,
}  # fmt: skip
EXTEND_STEPS = {"input_version.after_record": 1, "extend.before_line": 1, "extend.after_line": 1}
RETRY_STEPS = {
    "retry.before_line": 1, "retry.after_line": 1, "mirror.before_part": 5, "mirror.after_part": 5,
}  # fmt: skip
Rows = list[dict[str, Any]]


class Broken(AssertionError):
    """The job has lost, doubled or altered a row, or a command has failed."""


class World:
    """One job, its store, and what an unhurt job makes of the same input."""

    def __init__(self, seed: int, folder: pathlib.Path, store: stores.Proxy) -> None:
        self.chance = random.Random(seed)
        self.url = f"s3://{stores.BUCKET}/model-{uuid.uuid4().hex[:12]}"
        self.counts: Counter[str] = Counter()
        self.looks: Counter[str] = Counter()
        self._folder = folder
        self._store = store
        self._work = 0
        self._committed: set[str] = set()
        self._early: dict[str, str] = {}
        """Digests of parts that were there before their commit, by name."""
        (folder / "data").mkdir()
        write(folder / "data" / "a.jsonl", 0, NUM_ROWS)
        self._store.fault = stores.often(0.25, seed) if self.chance.random() < 0.5 else lambda method, path: ""

    def run(self) -> None:
        """Take the job to its end."""
        if self.chance.random() < 0.25:
            for index in self.chance.sample(range(2), 2):
                self._stage(("--slice", f"{index}/2"), STEPS, f"{self.url}/slice-{index}")
            found = [row for index in range(2) for row in stores.rows(f"{self.url}/slice-{index}")]
            expect(found == expected(NUM_ROWS), "the slices are not the job")
            return
        self._stage((), STEPS, self.url)
        expect(stores.rows(self.url) == expected(NUM_ROWS), "the job is not whole")
        write(self._folder / "data" / "b.jsonl", NUM_ROWS, NUM_MORE)
        self._stage(("--extend",), {**STEPS, **EXTEND_STEPS}, self.url)
        expect(stores.rows(self.url) == expected(NUM_ROWS + NUM_MORE), "the extended job is not whole")
        self._stage(RETRY, {**STEPS, **RETRY_STEPS}, self.url)
        expect(stores.rows(self.url) == expected(NUM_ROWS + NUM_MORE), "the retried job is not whole")

    def _stage(self, options: tuple[str, ...], steps: dict[str, int], own: str) -> None:
        """Run one command to its end, however often it is struck."""
        self._committed = stores.committed(own)
        self._early = {}
        for _ in range(_MOST_STRIKES):
            if self._strike(options, steps, own):
                break
            is_exact = self._look(own)
            self.looks["exactly the commits" if is_exact else "a part or a replacement waits for its commit"] += 1
            if self.chance.random() < 0.5:
                self._recover(options, own)
        done = jobs.run("run", self._spec(), *options, **self._store.environment)
        expect(done.returncode == 0, f"{options}: {done.stderr}")
        self._look(own)
        digests = stores.digests(own)
        commits = stores.commits_of_parts(own)
        expect(digests == {name: line["digest"] for name, line in commits.items()}, "the parts are not the commits'")
        self._note_early({name: digests[name] for name in self._early})
        left = stores.names(own, "journal")
        expect(not left, f"segments are left: {left}; the last run said: {done.stderr}")
        expect(stores.read(own, "lock") == b"free", "the lock is left")
        cache = {"XDG_CACHE_HOME": str(self._folder / "cache")}
        checked = jobs.run("check", self.url, "--deep", **self._store.environment, **cache)
        is_cut = checked.returncode == 2 and "/slice-" in own and "has not begun" in checked.stdout
        expect(checked.returncode == 0 or is_cut, f"check: {checked.stdout} {checked.stderr}")

    def _strike(self, options: tuple[str, ...], steps: dict[str, int], own: str) -> bool:
        """Start the command and strike it. Whether it came to its end."""
        step = self.chance.choice([*steps])
        # Early passages, because a process that goes on has fewer left.
        point = f"{step}:{min(self.chance.randint(1, steps[step]) for _ in range(2))}"
        way = self.chance.choice(("kill", "kill", "kill", "pause", "stop"))
        marker = self._folder / "held"
        action = "kill" if way == "kill" else f"hold {marker}"
        process = jobs.start("run", self._spec(), *options, faults=f"{point}={action}", **self._store.environment)
        if way != "kill":
            jobs.wait_until(lambda: marker.exists() or process.poll() is not None, 300)
        struck = marker.exists()
        if way == "pause" and marker.exists():
            self._take_over(options, own)
        if way == "stop" and marker.exists():
            process.send_signal(signal.SIGTERM)
        marker.unlink(missing_ok=True)
        _, errors = process.communicate(timeout=600)
        code = process.returncode
        struck = struck or code == -signal.SIGKILL
        if struck:
            self.counts[f"{way} at {step}"] += 1
        allowed = {"kill": (0, -9), "pause": (0, 2), "stop": (0, 75)}[way]
        expect(code in allowed, f"{way} at {point}: exit {code}: {errors}")
        if code == 2:
            words = ("is no longer held", "is being run", "another process", "run the same command again")
            expect(any(word in errors for word in words), errors)
        if self.chance.random() < 0.5:
            shutil.rmtree(self._folder / f"work-{self._work}", ignore_errors=True)
        return code == 0

    def _take_over(self, options: tuple[str, ...], own: str) -> None:
        """Finish the job in another work folder, as a process of another host would after a minute without a beat."""
        if "lock" in stores.names(own):
            with stores.file_system().open_output_stream(f"{own.removeprefix('s3://')}/lock") as file:
                file.write(b"free")
        self._work += 1
        other = jobs.run("run", self._spec(), *options, **self._store.environment)
        # On one host, the paused process may still hold the lock again by a beat.
        expect(other.returncode in (0, 2), other.stderr)
        self._work += self.chance.choice((-1, 0))

    def _spec(self) -> pathlib.Path:
        folder = self._folder / f"spec-{self._work}"
        folder.mkdir(exist_ok=True)
        quick = spec_fields(self._folder / "data")
        quick["output"] = {**quick["output"], "work_dir": str(self._folder / f"work-{self._work}")}
        return stores.spec_of(folder, self.url, **quick)

    def _recover(self, options: tuple[str, ...], own: str) -> None:
        """Start the command, and kill it when it has recovered: the parts are then exactly those of the commits."""
        faults = "start.recovered:1=kill"
        process = jobs.start("run", self._spec(), *options, faults=faults, **self._store.environment)
        _, errors = process.communicate(timeout=600)
        expect(process.returncode in (0, -signal.SIGKILL), f"recovery: exit {process.returncode}: {errors}")
        expect(self._look(own), "after a recovery, a part or a replacement waits for its commit")
        self.looks["after a recovery: exactly the commits"] += 1

    def _look(self, own: str) -> bool:
        """Read as DuckDB's users do, by a pattern of the parts' names, and compare it with the commits.

        Returns whether the parts are exactly those of the commits.
        """
        # A process that was killed may have sent requests that the store has not applied yet.
        jobs.wait_until(lambda: not self._store.num_open)
        commits = stores.commits_of_parts(own)
        expect(self._committed <= commits.keys(), "a commit is gone")
        self._committed = {*commits}
        digests = stores.digests(own)
        expect(commits.keys() <= digests.keys(), "a committed part is gone")
        replaced = {name for name, line in commits.items() if digests[name] != line["digest"]}
        made_from = {name: self._replaces(own, name) for name in replaced}
        expect(all(made_from[name] == commits[name]["digest"] for name in replaced), "a part has other bytes")
        sizes = {name: len(stores.read(own, f"parts/{name}")) for name in replaced}
        # The retry finds the others when it fetches the parts that it replaces.
        waiting = {name for name in replaced if sizes[name] != commits[name]["num_bytes"]}
        self._note_early({name: digest for name, digest in digests.items() if name not in commits})
        rows = stores.rows_by_duckdb(own) if digests else []
        num_early = len(digests) - len(commits)
        num_committed = sum(line["num_rows"] for line in commits.values())
        expect(len(rows) > num_committed if num_early else len(rows) == num_committed, "not the rows of the commits")
        places = [row["row_index"] for row in rows]
        expect(len({*places}) == len(places), "a row is there twice")
        whole = {row["row_index"]: row for row in expected(NUM_ROWS + NUM_MORE)}
        expect(all(row == whole[row["row_index"]] for row in rows), "a row is altered")
        return not num_early and not waiting

    def _replaces(self, own: str, name: str) -> str:
        """The digest of the part from which a retry made this one, by its footer."""
        footer = pq.read_metadata(pa.BufferReader(stores.read(own, f"parts/{name}")))
        return footer.metadata.get(b"batchinf.replaces", b"").decode()

    def _note_early(self, digests: dict[str, str]) -> None:
        """Parts before their commit: they stay as they are until then."""
        changed = [name for name, digest in digests.items() if self._early.setdefault(name, digest) != digest]
        expect(not changed, f"{changed}: changed before the commit")


def expect(is_right: bool, what: str) -> None:
    if not is_right:
        raise Broken(what)


def write(path: pathlib.Path, first: int, num_rows: int) -> None:
    rows = ({"id": number, "prompt": f"prompt {number}", "language": "en"} for number in range(first, first + num_rows))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def spec_fields(data: pathlib.Path) -> dict[str, Any]:
    return {
        "input": {"path": str(data)},
        "sampling": {"max_tokens": 8},
        "parallel": {"data_parallel_size": 1},
        "output": {"rows_per_shard": 7},
        "scripted": {"max_num_seqs": 8, "step_s": 0.002},
        "checkpoint_interval_s": 0.1,
    }


@functools.cache
def expected(num_rows: int) -> Rows:
    """The rows of an unhurt job in a folder."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        (folder / "data").mkdir()
        write(folder / "data" / "a.jsonl", 0, num_rows)
        jobs.finish(jobs.spec_of(folder, **spec_fields(folder / "data")))
        return jobs.rows_of(folder / "out")


def run_model(num_strikes: int, seed: int, say: Callable[[str], None] = lambda line: None) -> Counter[str]:
    """Strike jobs, each with a seed of its own, until there are so many strikes. Raises Broken with the seed."""
    counts: Counter[str] = Counter()
    looks: Counter[str] = Counter()
    while counts.total() < num_strikes:
        with tempfile.TemporaryDirectory() as name, stores.proxy() as store:
            world = World(seed, pathlib.Path(name), store)
            try:
                world.run()
            except Exception as error:
                raise Broken(f"seed {seed}, {world.url}: {error}") from error
            counts += world.counts
            looks += world.looks
        say(f"seed {seed}: {counts.total()} of {num_strikes} strikes; readers found {dict(looks)}")
        seed += 1
    return counts


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    jobs.may_fork = True
    counts = run_model(given.kills, given.seed, lambda line: print(line, flush=True))
    for name, num in sorted(counts.items()):
        print(f"{num:6} {name}")


if __name__ == "__main__":
    main()
