"""Whole jobs on a file system like NFS: no locks, stale handles, names that are seen late, close() that fails.

`like_nfs.c` is preloaded into every process of the job. It changes what the C library says of the output folder.
"""

import errno
import functools
import pathlib
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from fork_server import ForkServer

import jobs

LATE_MS = 300
ONE_REPLICA = {"parallel": {"data_parallel_size": 1}}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler (cc)")
    library = tmp_path_factory.mktemp("library") / "like_nfs.so"
    source = jobs.ROOT / "tests" / "like_nfs.c"
    command = [compiler, "-shared", "-fPIC", "-O2", "-Wall", "-Werror", "-o", library, source, "-ldl"]
    subprocess.run(command, check=True)
    return library


@pytest.fixture(scope="module")
def server(library: pathlib.Path) -> Iterator[ForkServer]:
    """Forks the processes of jobs, for the library is loaded when a process starts."""
    with jobs.own_server(LD_PRELOAD=str(library)) as server:
        yield server


def on_nfs(library: pathlib.Path, folder: pathlib.Path, **more: object) -> dict[str, str]:
    """Environment of processes for which a folder is on NFS."""
    given = {"LD_PRELOAD": library, "LIKE_NFS": folder, "LIKE_NFS_LATE_MS": LATE_MS, **more}
    return {name: str(value) for name, value in given.items()}


def finish(spec: pathlib.Path, **environment: str) -> None:
    """Finish a job. Its rows are those of an unhurt run, and nothing is left behind."""
    out = spec.parent / "out"
    # A process that is forked looks at once for what the last one, as if on another host, has just made.
    time.sleep(LATE_MS / 1000)
    done = jobs.run("run", spec, **environment)
    assert done.returncode == 0, done.stderr
    assert jobs.rows_of(out) == list(jobs.unhurt())
    assert not [*out.rglob(".nfs*"), *out.rglob(".tmp-*"), *out.glob("lock*")]
    time.sleep(LATE_MS / 1000)
    checked = jobs.run("check", out, "--deep", **environment)
    assert checked.returncode == 0, checked.stdout
    assert "0 wrong, 0 notes" in checked.stdout


@pytest.mark.parametrize("is_forked", [False, *jobs.slowly(True)])
def test_the_layer_does_what_nfs_does(
    is_forked: bool, library: pathlib.Path, tmp_path: pathlib.Path, request: pytest.FixtureRequest
) -> None:
    code = f"""
import errno, fcntl, os, pathlib, subprocess, sys, time
folder = pathlib.Path({str(tmp_path)!r})
def number(call, *given):
    try:
        call(*given)
    except OSError as error:
        return errno.errorcode[error.errno]
held = open(folder / "a", "w+b")
print(number(fcntl.flock, held, fcntl.LOCK_EX), number(fcntl.lockf, held, fcntl.LOCK_EX))
os.unlink(folder / "a")
print([name[:4] for name in os.listdir(folder)])
held.close()
print(os.listdir(folder))
(folder / "b").write_text("x")
descriptor = os.open(folder / "b", os.O_RDONLY)
plain = {{**os.environ, "LIKE_NFS": ""}}
subprocess.run(["sh", "-c", f"rm {{folder}}/b; echo y > {{folder}}/c"], env=plain)
print(number(os.read, descriptor, 1), number(os.stat, folder / "c"), os.listdir(folder))
time.sleep({LATE_MS / 1000 + 0.05})
print((folder / "c").read_text().strip(), os.listdir(folder))
"""
    start: Any = subprocess.Popen
    if is_forked:
        server = request.getfixturevalue("server")
        start = functools.partial(server.start, server)
    own = {**jobs.inherited(), **jobs.quick_start(), **on_nfs(library, tmp_path)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    said, errors = start([sys.executable, "-P", "-c", code], env=own, **pipes).communicate(timeout=60)
    assert said.splitlines() == ["ENOLCK ENOLCK", "['.nfs']", "[]", "ESTALE ENOENT []", "y ['c']"], errors


@pytest.mark.slow
@pytest.mark.fewer_rows
@pytest.mark.usefixtures("server")
@pytest.mark.parametrize(
    "faults",
    [
        "coordinator.after_publish:5=kill",
        *jobs.slowly("", "journal.before_rename:3=kill", "parts.after_rename:2=kill", "manifest.mid_line:4=kill"),
    ],
)
def test_killed_and_resumed(faults: str, library: pathlib.Path, tmp_path: pathlib.Path) -> None:
    environment = on_nfs(library, tmp_path / "out")
    (tmp_path / "out").mkdir()
    spec = jobs.spec_of(tmp_path, **(ONE_REPLICA if faults else {}))
    if faults:
        once = tmp_path / "once"
        once.mkdir()
        first = jobs.run("run", spec, faults=faults, BATCHINF_FAULTS_ONCE=str(once), **environment)
        assert first.returncode in (0, -9), first.stderr
    finish(spec, **environment)


@pytest.mark.fewer_rows
@pytest.mark.slow
@pytest.mark.usefixtures("server")
@pytest.mark.parametrize("number", [1, 6, 15])
def test_a_close_that_finds_no_room(number: int, library: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """The server may say only when a file is closed that its bytes have no room: the file does not count."""
    environment = on_nfs(library, tmp_path / "out")
    (tmp_path / "out").mkdir()
    spec = jobs.spec_of(tmp_path, **ONE_REPLICA)
    failed = jobs.run("run", spec, **environment, LIKE_NFS_CLOSE=f"{errno.EDQUOT} {number}")
    if failed.returncode != 0:
        assert failed.returncode == 2 and "Traceback" not in failed.stderr, failed.stderr
        [line] = [line for line in failed.stderr.splitlines() if line.startswith("error: ")]
        assert "disk quota exceeded" in line
    finish(spec, **environment)
