"""Running whole jobs in tests: the command line as users start it, faults as they happen, rows as readers see them."""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq

ROOT = pathlib.Path(__file__).resolve().parents[1]
MODEL = ROOT / "sample_data" / "tiny-llama"
PROMPTS = ROOT / "sample_data" / "prompts.jsonl"


def spec_of(folder: pathlib.Path, **sections: Any) -> pathlib.Path:
    """Write a spec for the scripted engine, sections merged over a small default, and give its path."""
    spec: dict[str, Any] = {
        "model": str(MODEL),
        "input": {"path": str(PROMPTS), "id_column": "id"},
        "sampling": {"temperature": 0.0, "max_tokens": 32, "logprobs": 2},
        "parallel": {"data_parallel_size": 2},
        "output": {"path": str(folder / "out"), "keep_columns": ["language"]},
        "checkpoint_interval_s": 0.2,
        "scripted": {"max_num_seqs": 8, "step_s": 0.001},
    }
    for name, section in sections.items():
        if section is None:
            spec.pop(name, None)
        elif isinstance(section, dict) and isinstance(spec.get(name), dict):
            spec[name] = {**spec[name], **section}
        else:
            spec[name] = section
    path = folder / "job.yaml"
    path.write_text(json.dumps(spec))
    return path


def start(*arguments: str | pathlib.Path, faults: str = "", **environment: str) -> "subprocess.Popen[str]":
    """Start `batchinf` with these arguments, in a session of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "batchinf", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        start_new_session=True,
        env={**os.environ, "BATCHINF_FAULTS": faults, "PYTHONPATH": str(ROOT), **environment},
    )


def run(*arguments: str | pathlib.Path, **options: str) -> "subprocess.CompletedProcess[str]":
    """Run `batchinf` to its end."""
    process = start(*arguments, **options)
    out, err = process.communicate(timeout=240)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def finish(path: pathlib.Path, **options: str) -> "subprocess.CompletedProcess[str]":
    """Run a job that must end well."""
    done = run("run", path, **options)
    assert done.returncode == 0, done.stderr
    return done


def table_of(out: pathlib.Path) -> pa.Table:
    """All parts in the order of their names, as any reader sees them."""
    paths = sorted((out / "parts").glob("*.parquet"))
    return pa.concat_tables([pq.read_table(path) for path in paths])


def rows_of(out: pathlib.Path) -> list[dict[str, Any]]:
    """All rows without `attempts`, which says how often a row was tried."""
    return table_of(out).drop_columns(["attempts"]).to_pylist()


def family(pid: int) -> list[psutil.Process]:
    """A process and all that it started, the root last."""
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        return [*root.children(recursive=True), root]
    return []


def replicas_of(pid: int) -> list[psutil.Process]:
    """The replicas of a coordinator."""
    return [p for p in family(pid)[:-1] if "batchinf.replica" in _command(p)]


def _command(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.Error):
        return process.cmdline()
    return []


def kill(processes: list[psutil.Process]) -> None:
    """SIGKILL them all."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)


def wait_until(condition: Any, wait_s: float = 60.0) -> None:
    """Wait for a condition to hold."""
    deadline = time.monotonic() + wait_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


def are_gone(processes: list[psutil.Process], wait_s: float = 15.0) -> bool:
    """Whether none of these processes is alive any more, after a moment."""
    _, alive = psutil.wait_procs(processes, timeout=wait_s)
    return not [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
