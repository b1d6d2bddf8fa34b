"""Jobs in a notebook: a cell runs a job, is interrupted, and the next cells go on in the same kernel."""

import importlib.util
import os
import pathlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

import nbformat
import psutil
import pytest
from nbclient import NotebookClient

import jobs

pytestmark = pytest.mark.slow


# The tests' server forks the replicas of the kernel's jobs.
FORK = f"""
import sys; sys.path.append({str(jobs.ROOT / "tests")!r})
import os, subprocess, fork_server
subprocess.Popen = fork_server.forking(fork_server.address_for(os.environ))
"""


class Notebook:
    """A notebook with a live kernel."""

    def __init__(self, client: NotebookClient) -> None:
        self._client = client
        assert self.run(FORK) == ""
        self.pid = int(self.run("import os, batchinf; print(os.getpid())"))

    def run(self, source: str) -> str:
        """Run a cell and return what it shows; an exception as `NAME: message`."""
        cell = nbformat.v4.new_code_cell(source)
        self._client.nb.cells.append(cell)
        self._client.execute_cell(cell, len(self._client.nb.cells) - 1)
        return "".join(map(_text, cell.outputs))


def _text(output: Any) -> str:
    if output.output_type == "error":
        return f"{output.ename}: {output.evalue}"
    return str(output.text if output.output_type == "stream" else output.data["text/plain"])


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    folder = tmp_path_factory.mktemp("kernel")
    client = NotebookClient(nbformat.v4.new_notebook(), timeout=240, allow_errors=True, kernel_name="python3")
    environment = {**jobs.quick_start(), **jobs.fork_server().variable(), "IPYTHONDIR": str(folder / "ipython")}
    with client.setup_kernel(cwd=str(folder), env={**jobs.inherited(), **environment}):
        yield Notebook(client)


@pytest.fixture
def notebook(kernel: Notebook, tmp_path: pathlib.Path) -> Notebook:
    """In the test's folder."""
    kernel.run(f"os.chdir({str(tmp_path)!r})")
    return kernel


@pytest.mark.skipif(importlib.util.find_spec("ipywidgets") is not None, reason="ipywidgets shows a widget")
def test_without_widgets_one_line_is_rewritten(notebook: Notebook, tmp_path: pathlib.Path) -> None:
    path = jobs.spec_of(tmp_path, scripted={"step_s": 0.02})
    shown = notebook.run(f"import batchinf; batchinf.run({str(path)!r})")
    assert "TqdmWarning" not in shown
    # What a notebook shows: each part of a line replaces what stands before it.
    lines = [line.rstrip("\r").rpartition("\r")[2].strip() for line in shown.split("\n")]
    assert [line for line in lines if line.startswith(("starting:", "running:", "ending:"))] == []
    [last] = [line for line in lines if line.startswith("done: 100%|")]
    num_rows = len(jobs.unhurt())
    assert f"{num_rows:,} output rows" in last or f"{num_rows:,}/{num_rows:,}" in last
    assert shown.count("\rrunning: ") > 1


@pytest.mark.parametrize("call", ["batchinf.run(spec)", "import asyncio; await asyncio.sleep(0); batchinf.run(spec)"])
def test_an_interrupted_cell_stops_its_job_and_the_next_one_goes_on(
    call: str, notebook: Notebook, tmp_path: pathlib.Path
) -> None:
    path = jobs.spec_of(tmp_path, scripted={"step_s": 0.2, "max_num_seqs": 2}, input={"limit": 60}, drain_timeout_s=0.5)
    notebook.run(f"import json; spec = json.load(open({str(path)!r}))")

    def interrupt() -> None:
        jobs.wait_until(lambda: jobs.snapshot_of(tmp_path / "out").get("state") == "running")
        os.kill(notebook.pid, signal.SIGINT)  # as the button of the notebook does

    thread = threading.Thread(target=interrupt)
    thread.start()
    shown = notebook.run(call)
    thread.join()
    assert "Interrupted: stopped on SIGINT" in shown
    assert not jobs.replicas_of(notebook.pid)
    assert "stopped" in notebook.run("batchinf.status('out').jobs[0].activity")
    shown = notebook.run("spec['scripted']['step_s'] = 0.0; results = batchinf.run(spec); results")
    assert "done: 60 output rows, 0 of them errors" in shown
    assert notebook.run("print(len(results.table(['text'])))").strip() == "60"
    shown = notebook.run(
        "seen = []; batchinf.run(spec, fresh=True, quiet=True, progress=lambda now: seen.append(now.state)); seen[-1]"
    )
    assert shown == "'done'"
    assert psutil.pid_exists(notebook.pid)
