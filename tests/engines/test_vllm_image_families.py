"""The ten rows of `test_vllm_images.py` with models whose processors need torchvision, beside transformers.

Each family is a pytest of its own, because transformers looks for torchvision once. A server that has imported
transformers and vLLM beside torchvision forks them: the imports are most of a new process's time.
"""

import os
import pathlib
import subprocess
from collections.abc import Iterator

import pytest
from fork_server import ForkServer
from vision_families import PLACEHOLDERS, torchvision_for_cpu

import jobs

TEST = "tests/engines/test_vllm_images.py::test_ten_rows_equal_transformers"

# The server has imported a plugin of pytest, as a library.
OPTIONS = ["-p", "no:xdist", "-W", "ignore:Module already imported"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    """Its processes can import torchvision."""
    pytest.importorskip("vllm")
    try:
        folder = torchvision_for_cpu(tmp_path_factory.mktemp("torchvision"))
    except (subprocess.CalledProcessError, KeyError) as error:
        pytest.skip(f"no torchvision beside this PyTorch: {error}")
    quick = jobs.quick_start()
    path = os.pathsep.join([str(folder), quick["PYTHONPATH"]])
    server = ForkServer({**jobs.environment, **quick, "PYTHONPATH": path}, has_vllm=True)
    yield server
    server.close()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("family", PLACEHOLDERS)
def test_ten_rows_equal_transformers(family: str, server: ForkServer, tmp_path: pathlib.Path) -> None:
    environment = {
        "PYTHONPATH": server.environment["PYTHONPATH"],
        "TEST_VISION_MODEL": str(tmp_path / "model"),
        "TEST_VISION_PLACEHOLDER": PLACEHOLDERS[family],
    }
    for command, folder in (
        (["vision_families", family, str(tmp_path / "model")], jobs.ROOT / "tests"),
        (["pytest", TEST, *OPTIONS, "--basetemp", str(tmp_path / "inner")], jobs.ROOT),
    ):
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = jobs.start_module(server, command, folder, environment, **pipes)
        out, errors = process.communicate()
        assert process.returncode == 0, out[-4000:] + errors[-2000:]
