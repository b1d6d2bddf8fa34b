"""Measure how the package is arranged: sizes, interfaces and duplicates.

python benchmarks/house.py                      # this checkout
python benchmarks/house.py --compare ../other   # beside another one, such as an earlier commit in a worktree
python benchmarks/house.py --budget             # fail if a package has more code lines than pyproject.toml allows
"""

import argparse
import ast
import collections
import io
import pathlib
import statistics
import sys
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


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--root", type=pathlib.Path, default=pathlib.Path(__file__).resolve().parents[1])
    parser.add_argument("--compare", type=pathlib.Path, metavar="OTHER_ROOT", help="a second tree, in a second column")
    parser.add_argument("--verbose", action="store_true", help="list the items that are counted")
    parser.add_argument("--budget", action="store_true", help="hold the code lines of each package against its budget")
    args = parser.parse_args()
    if args.budget:
        sys.exit("\n".join(over_budget(House.read(args.root.resolve()))) or 0)
    roots = [root.resolve() for root in (args.root, args.compare) if root is not None]
    columns = [measure(House.read(root)) for root in roots]
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


def measure(house: House) -> dict[str, Measure]:
    return {
        **sizes(house),
        **functions(house),
        **assignments_and_calls(house),
        "reads of the task outside tasks/": task_reads(house),
        "names of input formats outside their files": format_names(house),
        "public names in more than one module": public_names(house),
        f"repeated runs of {MIN_LINES} lines": repeated_lines(house),
    }


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


if __name__ == "__main__":
    main()
