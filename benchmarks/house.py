"""Measure the sizes of the package, hold its code lines against their budget, and write its map.

python benchmarks/house.py                      # this checkout
python benchmarks/house.py --compare ../other   # beside another one, such as an earlier commit in a worktree
python benchmarks/house.py --budget             # fail if a package has more code lines than pyproject.toml allows
python benchmarks/house.py --map                # batchinf/README.md, which `make format` writes and `make lint` checks
"""

import argparse
import ast
import collections
import io
import pathlib
import sys
import tokenize
import tomllib
from dataclasses import dataclass


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--root", type=pathlib.Path, default=pathlib.Path(__file__).resolve().parents[1])
    parser.add_argument("--compare", type=pathlib.Path, metavar="OTHER_ROOT", help="a second tree, in a second column")
    parser.add_argument("--budget", action="store_true", help="hold the code lines of each package against its budget")
    parser.add_argument("--map", action="store_true", help="print each module with the first words of its docstring")
    args = parser.parse_args()
    if args.map or args.budget:
        house = House.read(args.root.resolve())
        if args.map:
            print("\n".join(map_of(house)))
        sys.exit("\n".join(over_budget(house) if args.budget else ()) or 0)
    roots = [root.resolve() for root in (args.root, args.compare) if root is not None]
    columns = [sizes(House.read(root)) for root in roots]
    print(f"{'':47}", *(f"{root.name:>24}" for root in roots))
    for name in columns[0]:
        print(f"{name:47}", *(f"{column[name]:>24}" for column in columns))


@dataclass(frozen=True, slots=True)
class House:
    """The package in one checkout."""

    root: pathlib.Path
    texts: dict[pathlib.Path, str]
    """The modules by path, relative to the package."""
    trees: dict[pathlib.Path, ast.Module]

    @classmethod
    def read(cls, root: pathlib.Path) -> "House":
        package = root / "batchinf"
        texts = {
            path.relative_to(package): path.read_text(encoding="utf-8")
            for path in sorted(package.rglob("*.py"))
            if "__pycache__" not in path.parts
        }
        return cls(root, texts, {path: ast.parse(text) for path, text in texts.items()})


def sizes(house: House) -> dict[str, int | str]:
    num_lines = {path: len(text.splitlines()) for path, text in house.texts.items()}
    folders = collections.Counter(path.parent for path in house.texts if path.name != "__init__.py")
    largest, num_largest = folders.most_common(1)[0]
    return {
        "packages": len({path.parent for path in house.texts} - {pathlib.Path()}),
        "modules": len(house.texts),
        "modules with code": sum(_has_code(tree) for tree in house.trees.values()),
        "lines": sum(num_lines.values()),
        "code lines": sum(code_lines(house).values()),
        "classes": sum(isinstance(node, ast.ClassDef) for tree in house.trees.values() for node in ast.walk(tree)),
        "largest folder, modules": f"{num_largest}, {largest}",
        "longest file, lines": max(num_lines.values()),
    }


def map_of(house: House) -> list[str]:
    """The lines of batchinf/README.md: each folder and each module, with the first paragraph of its docstring."""
    lines = ["# The modules of batchinf", "", "Written by `make format` from the docstrings of the modules."]
    for folder in sorted({path.parent for path in house.texts}):
        lines += [
            "",
            f"## {pathlib.Path('batchinf') / folder}",
            "",
            _first_words(house.trees[folder / "__init__.py"]),
            "",
        ]
        modules = [path for path in house.texts if path.parent == folder and path.name != "__init__.py"]
        lines += [f"- `{path.name}`: {_first_words(house.trees[path])}" for path in modules]
    return lines


def _first_words(tree: ast.Module) -> str:
    return " ".join((ast.get_docstring(tree) or "").partition("\n\n")[0].split())


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


if __name__ == "__main__":
    main()
