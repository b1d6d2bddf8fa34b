"""Kill processes of a job on real GPUs, and report how the job ends and how much device memory stays in use.

    python benchmarks/kills.py --out results --replicas 2

One job loses an engine core, then a replica's own process, then the coordinator. The same command finishes it. After
each kill the script checks the old processes and the memory in use. It prints a table and writes kills.json. It runs
without a GPU with the tiny shape; an engine core is then part of its replica.
"""

import argparse
import json
import pathlib
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pynvml
from shapes import make_model, make_prompts

_WAIT_S = 240.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--shape", default="llama-3.2-1b")
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--replicas", type=int, default=2)
    args = parser.parse_args()
    shutil.rmtree(args.out, ignore_errors=True)
    args.out.mkdir(parents=True)
    found = Kills(args.out, args.shape, args.rows, args.replicas).run()
    (args.out / "kills.json").write_text(json.dumps(found, indent=1))
    for line in found["steps"]:
        print(f"| {line['what']} | {line['exit_code']} | {line['left']} | {line['memory_mib']} |")
    print(json.dumps(found["rows"]))
    if not found["is_good"]:
        sys.exit("rows are lost, doubled or errors, or something is left behind")


class Kills:
    """One job with three kills."""

    def __init__(self, folder: pathlib.Path, shape: str, num_rows: int, replicas: int) -> None:
        self._folder = folder
        self._job = folder / "job"
        self._num_rows = num_rows
        self._replicas = replicas
        self._ever: dict[int, psutil.Process] = {}
        self._steps: list[dict[str, Any]] = []
        self._life = 0
        spec = {
            "model": {"name": str(make_model(shape, folder / "model")), "load_format": "dummy"},
            "input": {
                "path": str(make_prompts(folder / "prompts.parquet", shape, num_rows, 128)),
                "prompt_column": "prompt",
                "id_column": "id",
            },
            "sampling": {"temperature": 0.0, "max_tokens": 128, "ignore_eos": True, "logprobs": 1},
            "parallel": {"data_parallel_size": replicas},
            "engine": {"max_model_len": 1024, "enable_prefix_caching": False},
            "output": {"path": str(self._job)},
        }
        self._spec = folder / "job.yaml"
        self._spec.write_text(json.dumps(spec))

    def run(self) -> dict[str, Any]:
        """Run the job with all kills. Returns the figures."""
        started = time.monotonic()
        process = self._start()
        self._wait("all at work", lambda: self._are_at_work(process, 0))
        self._hurt(process, "an engine core", engine_core(self._replicas_of(process)[0]))
        self._wait("all at work again", lambda: self._are_at_work(process, 1))
        # The oldest one has not been killed yet.
        self._hurt(process, "a replica's own process", self._replicas_of(process)[0])
        self._wait("all at work again", lambda: self._are_at_work(process, 2))
        self._hurt(process, "the coordinator", psutil.Process(process.pid))
        process.wait(60)
        self._note("after the coordinator's death", process.returncode)
        process = self._start()
        process.wait(_WAIT_S * 2)
        self._note("after the same command again", process.returncode)
        rows = self._rows()
        is_good = (
            rows == {"rows": self._num_rows, "distinct": self._num_rows, "errors": 0}
            and process.returncode == 0
            and all(step["left"] == 0 and not any(step["memory_mib"]) for step in self._steps)
        )
        return {
            "seconds": round(time.monotonic() - started, 1),
            "steps": self._steps,
            "rows": rows,
            "is_good": is_good,
            "deaths": [event for event in self._events() if event["name"] in ("replica_ended", "death")],
        }

    def _start(self) -> "subprocess.Popen[bytes]":
        self._life += 1
        with (self._folder / f"job-{self._life}.log").open("wb") as log:
            return subprocess.Popen([sys.executable, "-m", "batchinf", "run", str(self._spec)], stdout=log, stderr=log)

    def _wait(self, what: str, is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _WAIT_S
        while not is_so():
            if time.monotonic() > deadline:
                raise SystemExit(f"waited in vain for: {what}; {self._status()}")
            time.sleep(0.5)
        time.sleep(5.0)

    def _status(self) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads((self._job / "status.json").read_text())
        except (OSError, ValueError):
            return {}
        return found

    def _are_at_work(self, process: "subprocess.Popen[bytes]", num_deaths: int) -> bool:
        if process.poll() is not None:
            raise SystemExit(f"the job ended too early, with {process.returncode}; give it more --rows")
        for one in psutil.Process(process.pid).children(recursive=True):
            self._ever[one.pid] = one
        names = [event["name"] for event in self._events()]
        is_up = names.count("replica_ended") == num_deaths and names.count("ready") == num_deaths + self._replicas
        return is_up and all(replica["in_flight"] for replica in self._status().get("replicas", []))

    def _events(self) -> list[dict[str, Any]]:
        lines = [json.loads(line) for log in sorted((self._job / "manifest").glob("*.jsonl")) for line in log.open()]
        return [line for line in lines if line["kind"] in ("event", "counted_event")]

    def _replicas_of(self, process: "subprocess.Popen[bytes]") -> list[psutil.Process]:
        """The oldest first."""
        own = [one for one in psutil.Process(process.pid).children() if "batchinf.fleet.local.process" in one.cmdline()]
        return sorted(own, key=lambda one: one.create_time())

    def _hurt(self, process: "subprocess.Popen[bytes]", what: str, victim: psutil.Process) -> None:
        print(
            f"{time.strftime('%H:%M:%S')} kill -9 {what}: pid {victim.pid}, {self._status().get('num_rows_done')} rows"
        )
        sys.stdout.flush()
        victim.send_signal(signal.SIGKILL)

    def _note(self, what: str, exit_code: int) -> None:
        _, alive = psutil.wait_procs(list(self._ever.values()), timeout=30)
        left = [one for one in alive if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
        self._steps.append({"what": what, "exit_code": exit_code, "left": len(left), "memory_mib": memory_mib()})

    def _rows(self) -> dict[str, int]:
        paths = sorted((self._job / "parts").glob("*.parquet"))
        table = pa.concat_tables([pq.read_table(path, columns=["row_index", "error_type"]) for path in paths])
        errors = table.num_rows - table["error_type"].null_count
        return {"rows": table.num_rows, "distinct": pc.count_distinct(table["row_index"]).as_py(), "errors": errors}


def engine_core(replica: psutil.Process) -> psutil.Process:
    """A replica's engine core: the child with the most memory, or the replica itself if it has no child."""
    children = replica.children()
    return max(children, key=lambda one: one.memory_info().rss, default=replica)


def memory_mib() -> list[int]:
    """Memory in use on each device, in MiB, without the driver's own. Empty without devices."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    held = [
        sum(p.usedGpuMemory or 0 for p in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)) for handle in handles
    ]
    used = [pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2).used for handle in handles]
    return [max(of_processes, total) >> 20 for of_processes, total in zip(held, used, strict=True)]


if __name__ == "__main__":
    main()
