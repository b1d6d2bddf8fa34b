"""The shape of the package: imports, docstrings, length of files. The contracts stand in `pyproject.toml`."""

import ast
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import batchinf

PACKAGE = Path(batchinf.__file__).parent
PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"
MAX_LINES = 600

HELP = """
import sys
from batchinf import cli
sys.argv = ["batchinf", "--help"]
try:
    cli.main()
except SystemExit as end:
    assert not end.code, end.code
heavy = {"torch", "transformers", "vllm"} & sys.modules.keys()
assert not heavy, f"--help imports {sorted(heavy)}"
"""


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    """What `make lint` asks of the imports, of the package in another folder."""
    command = [Path(sys.executable).with_name("lint-imports"), "--config", PYPROJECT, "--no-cache", "--no-logo"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


# A module, a line that is wrong there, and what lint-imports says of it.
WRONG = [
    ("base/text.py", "from batchinf.spec.job import JobSpec", "batchinf.base.text -> batchinf.spec.job"),
    ("spec/job.py", "def f():\n    from batchinf.cli import main", "batchinf.spec.job -> batchinf.cli"),
    ("fleet/fleet.py", "import vllm", "batchinf.fleet.fleet -> vllm"),
    ("replica/worker.py", "from vllm.sampling_params import SamplingParams", "batchinf.replica.worker -> vllm"),
]


def copied(folder: Path) -> Path:
    shutil.copytree(PACKAGE, folder / "batchinf", ignore=shutil.ignore_patterns("__pycache__"))
    return folder / "batchinf"


def test_wrong_imports_fail(tmp_path: Path) -> None:
    package = copied(tmp_path)
    for module, line, _ in WRONG:
        with (package / module).open("a", encoding="utf-8") as file:
            file.write(f"\n\n{line}\n")
    done = lint_imports(tmp_path)
    assert done.returncode != 0
    one_way, _, one_package = done.stdout.partition("Illegal imports of protected package vllm:")
    assert [said for _, _, said in WRONG[:2] if said not in one_way] == []
    assert [said for _, _, said in WRONG[2:] if said not in one_package] == []


def test_a_module_outside_the_layers_fails(tmp_path: Path) -> None:
    (copied(tmp_path) / "helpers.py").touch()
    done = lint_imports(tmp_path)
    assert done.returncode != 0
    assert "Packages import one way" in done.stdout and "helpers" in done.stdout + done.stderr


def test_imports_are_as_the_contracts_say() -> None:
    done = lint_imports(PYPROJECT.parent)
    assert done.returncode == 0, done.stdout


def test_each_file_says_what_it_owns_and_is_short() -> None:
    texts = {str(path.relative_to(PACKAGE)): path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}
    assert [name for name, text in texts.items() if text.count("\n") > MAX_LINES] == []
    assert [name for name, text in texts.items() if not ast.get_docstring(ast.parse(text))] == []


def test_version_is_the_same_in_both_places() -> None:
    project = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]
    assert project["version"] == batchinf.__version__


def test_help_imports_nothing_heavy() -> None:
    run = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert "Usage" in run.stdout
