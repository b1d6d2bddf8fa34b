"""The shape of the package: which module may import which, where vLLM may be imported, how long a file may be."""

import ast
import subprocess
import sys
import tomllib
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import batchinf

PACKAGE = Path(batchinf.__file__).parent
PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"
MAX_LINES = 400

# A module imports only from those before it. A new module is put here, in its place. A subpackage's modules share one
# place, and must be free of cycles among themselves.
ORDER = """
    errors faults stop_signals storage slices spec_fields spec_input spec_sampling spec_score spec_pooling
    spec_logits spec spec_docs spec_values adapter spans records messages retry_log part_names part_line accuracy
    second_bos predicate model_files hub model pooling lora batch_limits memory out_of_memory engine_settings
    input_files remote_files source_cache column_types arrow_damage reader arrow_file csv_file line_file
    parquet_probe parquet_file saved_dataset hf_dataset first_pass generations intake source row_hash words
    openai_batch sandbox templates chat_templates chat encoder vocabulary row_positions row_sampling row_adapter
    batch_prompts prompt scoring score_prompts output_size detokenizer answers tasks.* devices placement shards
    shard_rows selection permutation run_order engine scripted_pooling vllm_reasoning vllm_structures
    vllm_logprobs vllm_scheduler vllm_worker vllm_arguments vllm_lora vllm_engine vllm_layers vllm_pooling journal
    non_finite open_shard parts replace byte_queue flight forks limits feeder writer worker commit_log lock
    manifest_lines job_state manifest proof salvage quarantine spec_file prompt_checks status channel job
    structures exclude choose prefixes ordering room failures front replica backends.* replica_log member fleet
    launcher telemetry read_ahead trials assignment platforms progress coordinator recovery head_start forecast remarks
    retry extend epoch fresh look
    results joined changes text_changes score_changes vector_changes diff check stored_rows claims tallies
    reference reference_vectors verify token_lengths shown_rows score_rows validation cli __main__
""".split()
VLLM_ADAPTERS = {
    "vllm_arguments", "vllm_engine", "vllm_layers", "vllm_logprobs", "vllm_lora", "vllm_pooling", "vllm_reasoning",
    "vllm_scheduler", "vllm_structures", "vllm_worker",
}  # fmt: skip

HELP = """
import runpy, sys
sys.argv = ["batchinf", "--help"]
try:
    runpy.run_module("batchinf", run_name="__main__")
except SystemExit as end:
    assert not end.code, end.code
heavy = {"torch", "transformers", "vllm"} & sys.modules.keys()
assert not heavy, f"--help imports {sorted(heavy)}"
"""


def module_name(path: Path, package: Path) -> str:
    """The dotted name below the package: `tasks.generate`; `tasks` for its `__init__`; '' for the package's own."""
    parts = path.relative_to(package).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_names(path: Path, package: Path) -> set[str]:
    """Every absolute name that a file imports, at its top or inside a function; `from a import b` gives `a.b`."""
    names = set()
    folder = (package.name, *path.relative_to(package).parts[:-1])
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Import():
                names |= {alias.name for alias in node.names}
            case ast.ImportFrom():
                above = folder[: len(folder) - node.level + 1] if node.level else ()
                origin = ".".join([*above, *([node.module] if node.module else [])])
                names |= {f"{origin}.{alias.name}" for alias in node.names}
            case ast.Call(
                func=ast.Name(id="import_module" | "__import__") | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                names.add(name)
    return names


def read_package(package: Path) -> dict[str, set[str]]:
    return {module_name(path, package): imported_names(path, package) for path in sorted(package.rglob("*.py"))}


def arrows(imports: dict[str, set[str]], package: str) -> dict[str, set[str]]:
    """For each module the modules of the package that it imports, each by the longest name that is a module."""
    found: dict[str, set[str]] = {}
    for module, names in imports.items():
        inside = {name for name in names if f"{name}.".startswith(f"{package}.")} - {f"{package}.__version__"}
        own = [name.removeprefix(package).removeprefix(".") for name in inside]
        found[module] = {next(name for name in candidates(target) if name in imports) for target in own}
    return found


def candidates(name: str) -> list[str]:
    """A dotted name and those above it, down to '', the package itself."""
    parts = name.split(".")
    return [".".join(parts[:length]) for length in range(len(parts), 0, -1)] + [""]


def place(module: str) -> int | None:
    """Where in the order a module stands; the package's own `__init__` stands last."""
    if not module:
        return len(ORDER)
    group = f"{module.split('.')[0]}.*"
    return next((number for number, name in enumerate(ORDER) if name in (module, group)), None)


def violations(package: Path) -> list[str]:
    """What a package's imports do against the rules, one line each."""
    imports = read_package(package)
    lines = [f"{module} has no place in the order" for module in imports if place(module) is None]
    lines += [
        f"{module} imports vllm"
        for module, names in imports.items()
        if module not in VLLM_ADAPTERS and any(name.split(".")[0] == "vllm" for name in names)
    ]
    graph = arrows(imports, package.name)
    for module, targets in graph.items():
        here = place(module)
        there = {target: place(target) for target in targets}
        lines += [
            f"{module} imports {target or package.name}, which comes after it"
            for target, where in there.items()
            if here is not None and where is not None and where > here
        ]
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        lines.append("a cycle: " + " <- ".join(name or package.name for name in error.args[1]))
    return sorted(lines)


def test_imports_point_one_way() -> None:
    assert violations(PACKAGE) == []


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"spec": "import batchinf.errors", "errors": ""}, []),
        ({"tasks/__init__": "from . import generate", "tasks/generate": "from ..spec import JobSpec", "spec": ""}, []),
        ({"vllm_engine": "def start():\n    from vllm import LLMEngine"}, []),
        ({"spec": "import vllmish"}, []),
        ({"errors": "from batchinf import spec", "spec": ""}, ["errors imports spec, which comes after it"]),
        ({"spec": "def f():\n    from .cli import main", "cli": ""}, ["spec imports cli, which comes after it"]),
        ({"spec": "from batchinf import __version__"}, []),
        ({"spec": "from batchinf import run"}, ["spec imports batchinf, which comes after it"]),
        ({"helpers": ""}, ["helpers has no place in the order"]),
        ({"engine": "import vllm.logprobs"}, ["engine imports vllm"]),
        ({"engine": "import importlib\nimportlib.import_module('vllm')"}, ["engine imports vllm"]),
        (
            {"tasks/score": "from batchinf.tasks import generate", "tasks/generate": "import batchinf.tasks.score"},
            ["a cycle: tasks.generate <- tasks.score <- tasks.generate"],
        ),
    ],
)
def test_a_broken_rule_is_found(files: dict[str, str], expected: list[str], tmp_path: Path) -> None:
    for name, text in {"__init__": "", **files}.items():
        path = tmp_path / "batchinf" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    for folder in {path.parent for path in (tmp_path / "batchinf").rglob("*.py")}:
        (folder / "__init__.py").touch()
    assert violations(tmp_path / "batchinf") == expected


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_file_says_what_it_owns_and_is_short(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    num_lines = text.count("\n")
    assert ast.get_docstring(ast.parse(text)), "no module docstring"
    assert num_lines <= MAX_LINES


def test_version_is_the_same_in_both_places() -> None:
    project = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]
    assert project["version"] == batchinf.__version__


def test_help_imports_nothing_heavy() -> None:
    run = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert "Usage" in run.stdout
