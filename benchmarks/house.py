"""Measure how the package is arranged: sizes, seams, duplicates, and the modules that one row passes.

    python benchmarks/house.py                      # this checkout
    python benchmarks/house.py --root ../other      # another one, such as an earlier commit in a worktree
    python benchmarks/house.py --no-trace           # without running a job

For the trace, one row of the quickstart runs on the scripted engine. A module is listed if the replica calls one of its
functions after it has read the row and before the coordinator publishes its part. The coordinator's loop is left out,
because it also runs without rows.
"""

import argparse
import ast
import collections
import os
import pathlib
import subprocess
import sys
import tempfile

TASKS = frozenset("generate score logits embed classify reward hidden_states".split())
SECTIONS = frozenset("score logits pooling".split())
FORMATS = frozenset("jsonl csv parquet arrow text huggingface saved_dataset openai".split())
ENDINGS = frozenset(".jsonl .ndjson .json .csv .tsv .parquet .arrow .feather .ipc .txt".split())
MIN_LINES = 6

# Runs in each process of the job and records the functions of the package that are called.
TRACER = """
import os, pathlib, sys, threading, time

package = os.environ["HOUSE_PACKAGE"]
file = os.open(pathlib.Path(os.environ["HOUSE_OUT"], str(os.getpid())), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
written = set()

def caller(frame):
    return frame.f_back.f_code.co_filename.removeprefix(package).lstrip("/")

def profile(frame, event, _):
    code = frame.f_code
    if event != "call" or not code.co_filename.startswith(package) or code.co_name.startswith("<"):
        return
    name, now = code.co_filename.removeprefix(package).lstrip("/"), time.time()
    mark = "-"
    if code.co_name in ("read", "read_rows") and name.startswith("source") and not caller(frame).startswith("source"):
        mark = "read"  # of a row; within `source` other things are read, such as the columns of a part
        written.clear()  # what ran a moment before is to be seen again after it
    elif code.co_name == "publish_new":
        mark = "publish"
    # A line for each hundredth of a second in which a function of the module is called: a process may be killed.
    if mark != "-" or (name, int(now * 100)) not in written:
        written.add((name, int(now * 100)))
        os.write(file, f"{name} {mark} {now!r}\\n".encode())

threading.setprofile(profile)
sys.setprofile(profile)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--root", type=pathlib.Path, default=pathlib.Path(__file__).resolve().parents[1])
    parser.add_argument("--no-trace", action="store_true")
    parser.add_argument("--verbose", action="store_true", help="list what is counted")
    args = parser.parse_args()
    package = args.root.resolve() / "batchinf"
    files = sorted(path for path in package.rglob("*.py") if "__pycache__" not in path.parts)
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in files}
    folders = collections.Counter(path.parent for path in files if path.name != "__init__.py")
    largest, num_largest = folders.most_common(1)[0]
    passed = [] if args.no_trace else passed_modules(args.root.resolve(), package)
    found = {
        "packages": len({path.parent for path in files} - {package}),
        "modules with code": sum(_has_code(tree) for tree in trees.values()),
        "lines": sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files),
        "largest folder": f"{num_largest} modules in {largest.relative_to(package.parent)}",
        "longest file, lines": max(len(path.read_text(encoding="utf-8").splitlines()) for path in files),
        "reads of the task outside tasks/": task_reads(package, trees),
        "names of input formats outside their files": format_names(package, trees),
        "public names in more than one module": public_names(trees),
        f"repeated runs of {MIN_LINES} lines": repeated_lines(files),
    }
    if passed:
        found["modules that one row passes"] = passed
    for name, value in found.items():
        print(f"{name:45} {len(value) if isinstance(value, list) else value}")
        if args.verbose and isinstance(value, list):
            print(*(f"    {line}" for line in value), sep="\n")


def _has_code(tree: ast.Module) -> bool:
    return any(not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)) for node in tree.body)


def task_reads(package: pathlib.Path, trees: dict[pathlib.Path, ast.Module]) -> list[str]:
    """Places outside `tasks/` that test the name of a job's task or read a task's section of the spec."""
    lines = []
    for path, tree in trees.items():
        if path.relative_to(package).parts[0] == "tasks":
            continue
        for node in ast.walk(tree):
            if not isinstance(node, ast.expr):
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
                lines.append(f"{path.relative_to(package)}:{node.lineno} {ast.unparse(node)}")
    return lines


def _ends_with_spec(node: ast.expr) -> bool:
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    return name in ("spec", "_spec")


def format_names(package: pathlib.Path, trees: dict[pathlib.Path, ast.Module]) -> list[str]:
    """Places outside `source/formats/` that compare with the name or ending of an input format."""
    lines = []
    for path, tree in trees.items():
        if "formats" in path.parts or path.stem in ("csv_file", "line_file", "arrow_file", "parquet_file"):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Compare | ast.Dict | ast.MatchValue | ast.Call):
                items = [item for item in ast.iter_child_nodes(node) if isinstance(item, ast.Constant)]
                if isinstance(node, ast.Compare):
                    items += [item for item in ast.walk(node) if isinstance(item, ast.Constant)]
                names = {item.value for item in items if isinstance(item.value, str)} & (FORMATS | ENDINGS)
                if names and not (isinstance(node, ast.Call) and not names & ENDINGS):
                    lines.append(f"{path.relative_to(package)}:{node.lineno} {sorted(names)}")
    return sorted(set(lines))


def public_names(trees: dict[pathlib.Path, ast.Module]) -> list[str]:
    """Public names of classes and functions that several modules define at their top level."""
    places = collections.defaultdict(list)
    for path, tree in trees.items():
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(path.stem)
    return [f"{name}: {', '.join(found)}" for name, found in sorted(places.items()) if len(found) > 1]


def repeated_lines(files: list[pathlib.Path]) -> list[str]:
    """Sequences of lines, without imports and blank lines, that occur in two places."""
    places: dict[tuple[str, ...], str] = {}
    found = []
    for path in files:
        numbered = [
            (number, line.strip())
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
            if line.strip() and not line.startswith(("import ", "from "))
        ]
        skip_to = 0
        for start in range(len(numbered) - MIN_LINES + 1):
            run = tuple(line for _, line in numbered[start : start + MIN_LINES])
            if start < skip_to or sum(len(line) for line in run) < 80:
                continue
            here = f"{path.name}:{numbered[start][0]}"
            if run in places:
                found.append(f"{here} = {places[run]}")
                skip_to = start + MIN_LINES
            else:
                places[run] = here
    return found


def passed_modules(root: pathlib.Path, package: pathlib.Path) -> list[str]:
    """Modules with a function that ran between the reading of one row and its publication."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        (folder / "hook").mkdir()
        (folder / "calls").mkdir()
        (folder / "hook" / "sitecustomize.py").write_text(TRACER)
        sets = {
            "scripted": "{}",
            "input.limit": "1",
            "parallel.data_parallel_size": "1",
            "output.path": str(folder / "out"),
        }
        options = [word for field, value in sets.items() for word in ("--set", f"{field}={value}")]
        subprocess.run(
            [sys.executable, "-m", "batchinf", "run", "jobs/quickstart.yaml", *options],
            cwd=root,
            check=True,
            capture_output=True,
            env={
                **os.environ,
                "PYTHONPATH": f"{folder / 'hook'}{os.pathsep}{root}",
                "HOUSE_PACKAGE": str(package),
                "HOUSE_OUT": str(folder / "calls"),
            },
        )
        processes = [[line.split() for line in path.read_text().splitlines()] for path in (folder / "calls").iterdir()]
    calls = [[(name, mark, float(when)) for name, mark, when in lines] for lines in processes]
    end = max(when for own in calls for _, mark, when in own if mark == "publish")
    # The coordinator, which publishes, reads rows too, for checks and estimates.
    others = [own for own in calls if all(mark != "publish" for _, mark, _ in own)]
    begin, own = max(
        (max([when for _, mark, when in own if mark == "read" and when < end], default=0.0), own) for own in others
    )
    return sorted({name for name, _, when in own if begin <= when <= end})


if __name__ == "__main__":
    main()
