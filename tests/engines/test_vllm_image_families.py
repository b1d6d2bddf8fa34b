"""The ten rows of `test_vllm_images.py` with models whose processors need torchvision, beside transformers.

Each family is a pytest of its own, because transformers looks for torchvision once.
"""

import os
import pathlib
import subprocess
import sys

import pytest
from vision_families import PLACEHOLDERS, torchvision_for_cpu

import jobs

TEST = "tests/engines/test_vllm_images.py::test_ten_rows_equal_transformers"


@pytest.fixture(scope="module")
def torchvision(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder from which it can be imported."""
    try:
        return torchvision_for_cpu(tmp_path_factory.mktemp("torchvision"))
    except (subprocess.CalledProcessError, KeyError) as error:
        pytest.skip(f"no torchvision beside this PyTorch: {error}")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("family", PLACEHOLDERS)
def test_ten_rows_equal_transformers(family: str, torchvision: pathlib.Path, tmp_path: pathlib.Path) -> None:
    path = os.pathsep.join([str(torchvision), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "TEST_VISION_MODEL": str(tmp_path / "model")}
    environment["TEST_VISION_PLACEHOLDER"] = PLACEHOLDERS[family]
    for command in (
        [sys.executable, "tests/vision_families.py", family, str(tmp_path / "model")],
        [sys.executable, "-m", "pytest", TEST, "-p", "no:xdist", "--basetemp", str(tmp_path / "inner")],
    ):
        ended = subprocess.run(command, cwd=jobs.ROOT, env=environment, capture_output=True, text=True)
        assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-2000:]
