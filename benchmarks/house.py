"""Measure how the package is arranged: sizes, complexity, duplicates, and the modules that a spec and a row pass.

    python benchmarks/house.py                      # this checkout
    python benchmarks/house.py --compare ../other   # beside another one, such as an earlier commit in a worktree
    python benchmarks/house.py --no-trace           # without running a job
    python benchmarks/house.py --budget             # fail if a package has more code lines than pyproject.toml allows

The quickstart job runs on the scripted engine for two traces:

- **The way of a spec**: from `batchinf.run` to the start of the first replica. A module is on it if one of its
  functions is called with the spec, or with an object that has the spec in a field. An entry is a place in another
  module from which such a function is called.
- **The way of a row**: the job runs with 256 and with 2,560 rows, which make one part each. A module is on the way if
  the replica calls its functions more often with more rows: at least once more for each further 256 rows, which are
  read together. So modules count that see rows one by one or many at once. What happens once a process or once a part
  does not count, and neither does the replica's thread that listens to the coordinator: it looks for messages also
  without rows.
"""

import argparse
import ast
import collections
import io
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import tokenize
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass

TASKS = frozenset("generate score logits embed classify reward hidden_states".split())
SECTIONS = frozenset("score logits pooling".split())
FORMATS = frozenset("jsonl csv parquet arrow text huggingface saved_dataset openai".split())
ENDINGS = frozenset(".jsonl .ndjson .json .csv .tsv .parquet .arrow .feather .ipc .txt".split())
MIN_LINES = 6
MAX_POSITIONAL = 4

Measure = int | str | list[str]
"""A list is shown by its length; `--verbose` shows its items."""

# Two numbers of input rows. Each makes one part, and the feeder reads 256 rows at once.
FEW_ROWS = 256
MANY_ROWS = 2560
ROWS_AT_ONCE = 256

# Runs in each process of the job and counts the calls of functions by module, in a file with a number for each module.
ROW_TRACER = """
import mmap, os, pathlib, sys, threading

package = os.environ["HOUSE_PACKAGE"]
modules = os.environ["HOUSE_MODULES"].split(os.pathsep)
places = {os.path.join(package, module): place for place, module in enumerate(modules)}
with open(pathlib.Path(os.environ["HOUSE_OUT"], str(os.getpid())), "w+b") as file:
    file.truncate(8 * len(modules))
    counts = memoryview(mmap.mmap(file.fileno(), 0)).cast("Q")  # stays in the file if the process is killed

def profile(frame, event, _):
    code = frame.f_code
    if event == "call" and (place := places.get(code.co_filename)) is not None and not code.co_name.startswith("<"):
        counts[place] += 1

def profile_thread(*_):
    # The thread that listens to the coordinator looks for messages a few times a second.
    sys.setprofile(None if threading.current_thread().name == "control" else profile)

threading.setprofile(profile_thread)
sys.setprofile(profile)
"""

# Calls `batchinf.api.run`, records the functions that receive the spec, and ends when the first replica is started.
SPEC_TRACER = """
import dataclasses, json, os, sys, threading

import batchinf.api
from batchinf.spec.job import JobSpec

package = os.environ["HOUSE_PACKAGE"]
entries = []
entry_of = {}  # by the id of a frame that may be alive: its code and its entry

class SpecPath(str):
    pass

def carries(value, depth=0):
    if isinstance(value, (JobSpec, SpecPath)):
        return True
    if depth == 2 or not type(value).__module__.startswith("batchinf."):
        return False
    if dataclasses.is_dataclass(value):
        values = [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    else:
        values = list(getattr(value, "__dict__", {}).values())
    return any(carries(item, depth + 1) for item in values)

def place(frame):
    return frame.f_code.co_filename.removeprefix(package).lstrip("/")

def profile(frame, event, _):
    code = frame.f_code
    if event != "call" or not code.co_filename.startswith(package) or code.co_name.startswith("<"):
        return
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    arguments = frame.f_locals
    if not any(carries(arguments.get(name)) for name in names):
        return
    caller = frame.f_back
    while caller is not None and not caller.f_code.co_filename.startswith(package):
        caller = caller.f_back
    entry = [place(frame), place(caller) if caller else "", caller.f_lineno if caller else 0, False]
    entries.append(entry)
    entry_of[id(frame)] = code, entry
    while caller is not None:
        above_code, above = entry_of.get(id(caller), (None, None))
        if above_code is caller.f_code and above[0] != entry[0]:
            above[3] = True  # it hands the spec on
        caller = caller.f_back

def end_at_replica(event, arguments):
    if event == "subprocess.Popen" and any(str(word).startswith("batchinf.fleet.") for word in arguments[1]):
        threading.setprofile(None)
        sys.setprofile(None)
        with open(os.environ["HOUSE_OUT"], "w") as file:
            json.dump(entries, file)
        os._exit(0)

sys.addaudithook(end_at_replica)
threading.setprofile(profile)
sys.setprofile(profile)
batchinf.api.run(SpecPath("jobs/quickstart.yaml"), overrides=json.loads(os.environ["HOUSE_SETTINGS"]), quiet=True)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--root", type=pathlib.Path, default=pathlib.Path(__file__).resolve().parents[1])
    parser.add_argument("--compare", type=pathlib.Path, metavar="OTHER_ROOT", help="a second tree, in a second column")
    parser.add_argument("--no-trace", action="store_true")
    parser.add_argument("--radon", help="path of radon, if it is not a module of this Python")
    parser.add_argument("--verbose", action="store_true", help="list the items that are counted")
    parser.add_argument("--budget", action="store_true", help="hold the code lines of each package against its budget")
    args = parser.parse_args()
    if args.budget:
        sys.exit("\n".join(over_budget(House.read(args.root.resolve()))) or 0)
    roots = [root.resolve() for root in (args.root, args.compare) if root is not None]
    columns = [measure(House.read(root), radon=args.radon, traces=not args.no_trace) for root in roots]
    print(f"{'':47}", *(f"{root.name:>24}" for root in roots))
    for name in columns[0]:
        values = [column.get(name, "") for column in columns]
        print(f"{name:47}", *(f"{len(value) if isinstance(value, list) else value:>24}" for value in values))
        for root, value in zip(roots, values, strict=True):
            if args.verbose and isinstance(value, list):
                print(*(f"    {root.name if len(roots) > 1 else ''} {item}" for item in value), sep="\n")


@dataclass(frozen=True, slots=True)
class House:
    """The package in one checkout."""

    root: pathlib.Path
    texts: dict[pathlib.Path, str]
    """The modules by path, relative to the package."""
    trees: dict[pathlib.Path, ast.Module]

    @property
    def package(self) -> pathlib.Path:
        return self.root / "batchinf"

    @classmethod
    def read(cls, root: pathlib.Path) -> "House":
        package = root / "batchinf"
        texts = {
            path.relative_to(package): path.read_text(encoding="utf-8")
            for path in sorted(package.rglob("*.py"))
            if "__pycache__" not in path.parts
        }
        return cls(root, texts, {path: ast.parse(text) for path, text in texts.items()})

    def nodes(self) -> Iterator[tuple[pathlib.Path, ast.AST]]:
        for path, tree in self.trees.items():
            for node in ast.walk(tree):
                yield path, node


def measure(house: House, *, radon: str | None, traces: bool) -> dict[str, Measure]:
    measures: dict[str, Measure] = {
        **sizes(house),
        **functions(house),
        "functions of radon grade C or worse": complex_functions(house, radon),
        **assignments_and_calls(house),
        "reads of the task outside tasks/": task_reads(house),
        "names of input formats outside their files": format_names(house),
        "public names in more than one module": public_names(house),
        f"repeated runs of {MIN_LINES} lines": repeated_lines(house),
    }
    return {**measures, **spec_way(house), "modules on the way of a row": row_way(house)} if traces else measures


def sizes(house: House) -> dict[str, Measure]:
    num_lines = {path: len(text.splitlines()) for path, text in house.texts.items()}
    folders = collections.Counter(path.parent for path in house.texts if path.name != "__init__.py")
    largest, num_largest = folders.most_common(1)[0]
    return {
        "packages": len({path.parent for path in house.texts} - {pathlib.Path()}),
        "modules": len(house.texts),
        "modules with code": sum(_has_code(tree) for tree in house.trees.values()),
        "lines": sum(num_lines.values()),
        "lines without documentation of fields": sum(num_lines.values()) - field_documentation(house),
        "classes": sum(isinstance(node, ast.ClassDef) for _, node in house.nodes()),
        "largest folder, modules": f"{num_largest}, {largest}",
        "longest file, lines": max(num_lines.values()),
    }


def over_budget(house: House) -> list[str]:
    """A line for each package with more code lines than `[tool.house.code-lines]` in pyproject.toml allows.

    It has another one for each package without a budget, and for each budget without a package.
    """
    budgets: dict[str, int] = tomllib.loads((house.root / "pyproject.toml").read_text())["tool"]["house"]["code-lines"]
    found = code_lines(house)
    return [
        *(
            f"batchinf/{name} has {found[name]:,} code lines; its budget in pyproject.toml is {budget:,}: remove some, "
            "or raise the budget and say why in the commit"
            for name, budget in budgets.items()
            if found[name] > budget
        ),
        *(
            f"batchinf/{name} has {found[name]:,} code lines and no budget; give it one in pyproject.toml"
            for name in found.keys() - budgets.keys()
        ),
        *(f"batchinf/{name} has a budget in pyproject.toml and no code" for name in budgets.keys() - found.keys()),
    ]


def code_lines(house: House) -> collections.Counter[str]:
    """Lines with code, by package: without blank lines, comments, docstrings and imports. The package itself is `.`."""
    lines = collections.Counter[str]()
    for path, text in house.texts.items():
        lines[path.parts[0] if len(path.parts) > 1 else "."] += _num_code_lines(text, house.trees[path])
    return lines


_NO_CODE = frozenset({
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER,
    tokenize.ENCODING,
})  # fmt: skip


def _num_code_lines(text: str, tree: ast.Module) -> int:
    lines = set[int]()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom) or (isinstance(node, ast.stmt) and _is_text(node)):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def _has_code(tree: ast.Module) -> bool:
    return any(not _is_text(node) for node in tree.body)


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def field_documentation(house: House) -> int:
    """The number of lines of texts that stand directly under a field of a class."""
    return sum(
        (text.end_lineno or text.lineno) - text.lineno + 1
        for _, node in house.nodes()
        if isinstance(node, ast.ClassDef)
        for field, text in zip(node.body, node.body[1:], strict=False)
        if isinstance(field, ast.AnnAssign) and _is_text(text)
    )


def functions(house: House) -> dict[str, Measure]:
    num_lines = {
        f"{path}:{node.name}": (node.end_lineno or node.lineno) - node.lineno + 1
        for path, node in house.nodes()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    longest = max(num_lines, key=lambda name: num_lines[name])
    return {
        "longest function, lines": f"{num_lines[longest]}, {longest.partition(':')[2]}",
        "median function, lines": str(statistics.median(num_lines.values())),
    }


def complex_functions(house: House, radon: str | None) -> Measure:
    command = [radon] if radon else [sys.executable, "-m", "radon"]
    result = subprocess.run([*command, "cc", "-j", "-n", "C", str(house.package)], capture_output=True, text=True)
    if result.returncode:
        return "radon is not installed"
    return [
        f"{pathlib.Path(path).relative_to(house.package)}:{block['lineno']} {block['name']} {block['complexity']}"
        for path, blocks in json.loads(result.stdout).items()
        for block in blocks
        if block["type"] != "class"
    ]


def assignments_and_calls(house: House) -> dict[str, Measure]:
    assignments = [(path, node) for path, node in house.nodes() if isinstance(node, ast.Assign | ast.AnnAssign)]
    packed = [
        f"{path}:{node.lineno} {ast.unparse(node)}"
        for path, node in assignments
        if isinstance(node, ast.Assign) and all(isinstance(side, ast.Tuple) for side in (node.targets[0], node.value))
    ]
    positional = [
        f"{path}:{node.lineno} {ast.unparse(node.func)}"
        for path, node in house.nodes()
        if isinstance(node, ast.Call)
        and len(node.args) > MAX_POSITIONAL
        and not any(isinstance(argument, ast.Starred) for argument in node.args)
    ]
    return {
        "tuple-packed assignments": packed,
        "share of all assignments": f"{len(packed) / len(assignments):.1%}",
        f"calls with more than {MAX_POSITIONAL} positional arguments": positional,
    }


def task_reads(house: House) -> list[str]:
    """Places outside `tasks/` that test the name of a job's task or read a task's section of the spec."""
    lines = []
    for path, node in house.nodes():
        if path.parts[0] == "tasks" or not isinstance(node, ast.expr):
            continue
        is_read = isinstance(node, ast.Attribute) and (
            node.attr in ("is_pooling", "generates", "reads_prompts")
            or (node.attr in SECTIONS | {"task"} and _ends_with_spec(node.value))
        )
        is_name = isinstance(node, ast.Compare) and any(
            isinstance(item, ast.Constant) and item.value in TASKS
            for side in (node.left, *node.comparators)
            for item in ast.walk(side)
        )
        if is_read or is_name:
            lines.append(f"{path}:{node.lineno} {ast.unparse(node)}")
    return lines


def _ends_with_spec(node: ast.expr) -> bool:
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    return name in ("spec", "_spec")


def format_names(house: House) -> list[str]:
    """Places outside `source/formats/` that compare with the name or ending of an input format."""
    lines = set()
    for path, node in house.nodes():
        if "formats" in path.parts or not isinstance(node, ast.Compare | ast.Dict | ast.MatchValue | ast.Call):
            continue
        items = ast.walk(node) if isinstance(node, ast.Compare) else ast.iter_child_nodes(node)
        texts = {item.value for item in items if isinstance(item, ast.Constant) and isinstance(item.value, str)}
        names = texts & (ENDINGS if isinstance(node, ast.Call) else FORMATS | ENDINGS)
        if names:
            lines.add(f"{path}:{node.lineno} {sorted(texts & (FORMATS | ENDINGS))}")
    return sorted(lines)


def public_names(house: House) -> list[str]:
    """Public names of classes and functions that several modules define at their top level."""
    modules = collections.defaultdict(list)
    for path, tree in house.trees.items():
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                modules[node.name].append(path.stem)
    return [f"{name}: {', '.join(stems)}" for name, stems in sorted(modules.items()) if len(stems) > 1]


def repeated_lines(house: House) -> list[str]:
    """Sequences of lines, without imports and blank lines, that occur in two places."""
    places: dict[tuple[str, ...], str] = {}
    repeated = []
    for path, text in house.texts.items():
        numbered = [
            (number, line.strip())
            for number, line in enumerate(text.splitlines(), 1)
            if line.strip() and not line.startswith(("import ", "from "))
        ]
        skip_to = 0
        for start in range(len(numbered) - MIN_LINES + 1):
            run = tuple(line for _, line in numbered[start : start + MIN_LINES])
            if start < skip_to or sum(len(line) for line in run) < 80:
                continue
            here = f"{path.name}:{numbered[start][0]}"
            if run in places:
                repeated.append(f"{here} = {places[run]}")
                skip_to = start + MIN_LINES
            else:
                places[run] = here
    return repeated


def quickstart_settings(folder: pathlib.Path) -> dict[str, object]:
    """One row of the quickstart, on one replica of the scripted engine."""
    return {
        "scripted": {},
        "input.limit": 1,
        "parallel.data_parallel_size": 1,
        "output.path": str(folder / "out"),
    }


def run_traced(house: House, command: list[str], path: pathlib.Path, **variables: str) -> None:
    """Run Python in the checkout. path: a folder that comes first on Python's path."""
    environment = {
        "PYTHONPATH": f"{path}{os.pathsep}{house.root}",
        "HOUSE_PACKAGE": str(house.package),
        **variables,
    }
    command = [sys.executable, *command]
    subprocess.run(command, cwd=house.root, check=True, capture_output=True, env={**os.environ, **environment})


def spec_way(house: House) -> dict[str, Measure]:
    """Modules that the spec passes before the first replica is started, and the places from which they are entered."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        out = folder / "entries.json"
        settings = json.dumps(quickstart_settings(folder))
        run_traced(house, ["-c", SPEC_TRACER], folder, HOUSE_OUT=str(out), HOUSE_SETTINGS=settings)
        calls = json.loads(out.read_text())
    from_others = [call for call in calls if call[1] not in ("", call[0])]
    entries = {(module, caller, line) for module, caller, line, _ in from_others}
    # A module that only answers about the spec is a leaf of the way.
    handing_on = {(module, caller, line) for module, caller, line, hands_on in from_others if hands_on}
    by_module = collections.Counter(module for module, _, _ in handing_on)
    most_entered, num_entries = by_module.most_common(1)[0]
    return {
        "modules on the way of a spec": sorted({module for module, *_ in calls}),
        "entries into them from other modules": sorted(
            f"{module} from {caller}:{line}" for module, caller, line in entries
        ),
        "those after which the module hands the spec on": sorted(
            f"{module} from {caller}:{line}" for module, caller, line in handing_on
        ),
        "most of them into one module": f"{num_entries}, {most_entered}",
    }


def row_way(house: House) -> list[str]:
    """Modules of the replica whose number of calls grows with the number of rows."""
    few = calls_in_replica(house, FEW_ROWS)
    many = calls_in_replica(house, MANY_ROWS)
    least = (MANY_ROWS - FEW_ROWS) // ROWS_AT_ONCE
    return sorted(module for module in many if many[module] - few[module] >= least)


def calls_in_replica(house: House, num_rows: int) -> collections.Counter[str]:
    """The calls of functions by module, in the replica of a job over so many rows."""
    modules = [path.as_posix() for path in house.texts]
    calls: collections.Counter[str] = collections.Counter()
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        (folder / "hook").mkdir()
        (folder / "calls").mkdir()
        (folder / "hook" / "sitecustomize.py").write_text(ROW_TRACER)
        rows = ({"id": f"row-{number}", "prompt": f"The number is {number}."} for number in range(num_rows))
        (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        fields = quickstart_settings(folder) | {
            "input.path": str(folder / "rows.jsonl"),
            "input.limit": None,
            "sampling.max_tokens": 8,
            "output.rows_per_shard": MANY_ROWS,
            "checkpoint_interval_s": 3600,
        }
        settings = [f"--set={field}={json.dumps(value)}" for field, value in fields.items()]
        command = ["-m", "batchinf", "run", "jobs/quickstart.yaml", *settings]
        variables = {"HOUSE_OUT": str(folder / "calls"), "HOUSE_MODULES": os.pathsep.join(modules)}
        run_traced(house, command, folder / "hook", **variables)
        for path in (folder / "calls").iterdir():
            counts = collections.Counter(dict(zip(modules, memoryview(path.read_bytes()).cast("Q"), strict=True)))
            # The coordinator's process reads rows too, for checks and estimates.
            if not any(counts[module] for module in modules if module.startswith("coordinator/")):
                calls.update(counts)
    return calls


if __name__ == "__main__":
    main()
