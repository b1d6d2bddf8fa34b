"""The kernels are compiled for an H100 by the Triton of the lock. No GPU is needed.

Triton is not in the virtual environment of the tests, because vLLM for CPUs runs other code beside it. Here it has a
folder of its own, which only the process that compiles can import.
"""

import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys

import pytest

import jobs

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(
        sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"),
        reason="Triton has packages for Linux on x86-64 and aarch64 alone",
    ),
]

KERNELS = jobs.ROOT / "batchinf" / "engines" / "vllm" / "kernels"


@pytest.fixture(scope="session")
def triton() -> pathlib.Path:
    """A folder with the Triton of the lock, installed once for all runs."""
    version = re.search(r"^triton==(\S+)", (jobs.ROOT / "requirements-cuda.lock").read_text(), re.MULTILINE)
    assert version is not None
    name = f"triton-{version[1]}-{sys.implementation.cache_tag}-{platform.machine()}"
    folder = jobs.ROOT / "build" / name
    if not folder.exists():
        partial = folder.with_name(f"{name}.{os.getpid()}")
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "install", "--quiet"]
        subprocess.run([*pip, "--no-deps", "--target", partial, f"triton=={version[1]}"], check=True)
        partial.rename(folder)
    return folder


def compiled(kernels: pathlib.Path, triton: pathlib.Path, cache: pathlib.Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, jobs.ROOT / "tests" / "compile_kernels.py", kernels], capture_output=True, text=True,
        env={**jobs.inherited(), "PYTHONPATH": str(triton), "TRITON_CACHE_DIR": str(cache)},
    )  # fmt: skip


def test_each_kernel_is_compiled(triton: pathlib.Path, tmp_path: pathlib.Path) -> None:
    done = compiled(KERNELS, triton, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    sizes = [int(line.split()[-2]) for line in done.stdout.splitlines()]
    assert len(sizes) == 54 and min(sizes) > 10_000


@pytest.mark.parametrize(("module", "old", "new"), [
    ("attention.py", "tl.dot(q, tl.trans(k))", "tl.dot(q, k)"),
    ("attention.py", "tokens = tl.arange(0, TILE)", "tokens = tl.arange(0, TILE - 1)"),
    ("attention.py", "lengths,\n    scale,", "lengths: torch.Tensor,\n    scale,"),
    ("scores.py", "for start in range(0, vocab_size, BLOCK):", "for start in reversed(range(0, vocab_size, BLOCK)):"),
    ("scores.py", "tl.where(likeliest < vocab_size, likeliest, 0)", "likeliest if likeliest < vocab_size else None"),
])  # fmt: skip
def test_a_kernel_that_the_compiler_refuses_is_found(
    module: str, old: str, new: str, triton: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    source = (KERNELS / module).read_text()
    assert source.count(old) == 1
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / module).write_text(source.replace(old, new))
    done = compiled(tmp_path / "kernels", triton, tmp_path)
    assert done.returncode == 1
    assert "CompilationError" in done.stderr or "NameError" in done.stderr, done.stderr[-3000:]


def test_a_new_kernel_needs_to_be_listed(triton: pathlib.Path, tmp_path: pathlib.Path) -> None:
    shutil.copy(KERNELS / "scores.py", tmp_path)
    with (tmp_path / "scores.py").open("a") as file:
        file.write("\n\n@triton.jit\ndef another_kernel(out):\n    pass\n")
    done = compiled(tmp_path, triton, tmp_path)
    assert done.returncode == 1 and "another_kernel" in done.stderr
