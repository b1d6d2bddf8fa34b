"""What the documents name is there."""

import ast
import functools
import pathlib
import re

import pytest

import jobs

DOCS = sorted(
    [*(jobs.ROOT / "docs").rglob("*.md"), *(jobs.ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "AGENTS"))]
)
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")
ANCHOR = re.compile(r"\]\(([^)#:]*)#([^)]*)\)")


@functools.cache
def functions_of(path: pathlib.Path) -> tuple[ast.FunctionDef, ...]:
    """A file's test functions."""
    body = ast.parse(path.read_text(encoding="utf-8")).body if path.is_file() else []
    return tuple(node for node in body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"))


def names_of(path: pathlib.Path) -> set[str]:
    return {function.name for function in functions_of(path)}


@pytest.mark.parametrize("document", DOCS, ids=lambda path: path.name)
def test_every_test_that_is_named_exists(document: pathlib.Path) -> None:
    named = TEST.findall(document.read_text(encoding="utf-8"))
    absent = [f"{file}::{test}" for file, test in named if test not in names_of(jobs.ROOT / file)]
    assert absent == []
    assert document.name != "reliability.md" or len(set(named)) > 50


@pytest.mark.parametrize("document", DOCS, ids=lambda path: path.name)
def test_every_link_leads_somewhere(document: pathlib.Path) -> None:
    targets = LINK.findall(document.read_text(encoding="utf-8"))
    assert [target for target in targets if not (document.parent / target).exists()] == []


def test_the_list_for_language_models_has_every_page() -> None:
    folder = jobs.ROOT / "docs"
    listed = LINK.findall((folder / "llms.txt").read_text(encoding="utf-8"))
    assert sorted(listed) == sorted(str(page.relative_to(folder)) for page in folder.rglob("*.md"))


def test_the_changelog_is_in_the_form_of_keep_a_changelog() -> None:
    text = (jobs.ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    versions = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert versions[0] == "Unreleased" and all(re.match(r"\d+\.\d+\.\d+", version) for version in versions[1:])
    kinds = re.findall(r"^### (.*)$", text.split("\n## ")[1], re.MULTILINE)
    assert set(kinds) <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    assert len(kinds) == len(set(kinds))


def anchors_of(path: pathlib.Path) -> set[str]:
    """Those of a file's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCS, ids=lambda path: path.name)
def test_every_link_to_a_heading_finds_it(document: pathlib.Path) -> None:
    links = ANCHOR.findall(document.read_text(encoding="utf-8"))
    files = {file: document.parent / file if file else document for file, _ in links}
    assert [anchor for file, anchor in links if anchor not in anchors_of(files[file])] == []


@pytest.mark.parametrize("document", DOCS, ids=lambda path: path.name)
def test_no_character_was_decoded_wrongly(document: pathlib.Path) -> None:
    """UTF-8 that is read as Latin-1 has control characters: Δ becomes Î and U+0094."""
    assert re.findall("\\S*[\x80-\x9f]\\S*", document.read_text(encoding="utf-8")) == []


def slow_tests_of(path: pathlib.Path) -> set[str]:
    """Names of a file's test functions that are marked slow, each by itself or all at once."""
    if re.search(r"^pytestmark = .*pytest\.mark\.slow\b", path.read_text(encoding="utf-8"), re.MULTILINE):
        return names_of(path)
    return {
        function.name
        for function in functions_of(path)
        if any(ast.unparse(mark) == "pytest.mark.slow" for mark in function.decorator_list)
    }


def test_what_make_test_leaves_to_make_test_slow_is_named_so() -> None:
    text = (jobs.ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    named = set(re.findall(r"(\*slow\* )?`(tests/[\w/]+\.py)::(\w+)`", text))
    slow = {(file, test) for _, file, test in named if test in slow_tests_of(jobs.ROOT / file)}
    assert {(file, test) for mark, file, test in named if mark} == slow


def test_every_row_of_faults_has_its_test() -> None:
    text = (jobs.ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    faults = text.partition("## Faults and promises")[2].partition("## What a crash costs")[0]
    rows = [
        line for line in faults.splitlines() if line.startswith("|") and not line.startswith(("| fault |", "| --- |"))
    ]
    assert len(rows) > 40
    assert [row for row in rows if not (TEST.search(row) or "`make soak`" in row or "to come:" in row)] == []


# Messages of other programs that pages explain: ZeroMQ's, of sockets.
OF_OTHERS = {"vLLM could not start: ZMQError: Cannot assign requested address"}


def texts_of_the_code() -> list[str]:
    """All texts in the package, with … for values that are put into them."""

    def text_of(node: ast.AST) -> str:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return node.value
        if isinstance(node, ast.JoinedStr):
            return "".join(map(text_of, node.values))
        return "…"

    files = [ast.parse(path.read_text(encoding="utf-8")) for path in (jobs.ROOT / "batchinf").rglob("*.py")]
    return [
        text_of(node) for file in files for node in ast.walk(file) if isinstance(node, ast.Constant | ast.JoinedStr)
    ]


def messages_of(document: str) -> list[str]:
    """The first cells of the tables of messages."""
    rows = re.findall(
        r"^\| `(.*?)`[^|`]* \|", (jobs.ROOT / "docs" / document).read_text(encoding="utf-8"), re.MULTILINE
    )
    assert rows
    return rows


def test_every_message_is_one_of_the_code() -> None:
    texts = texts_of_the_code()
    messages = set(messages_of("troubleshooting.md") + messages_of("cluster.md")) - OF_OTHERS
    assert len(messages) > 50
    assert [message for message in messages if not any(has_pieces(text, message) for text in texts)] == []


def has_pieces(text: str, message: str) -> bool:
    """Whether a message's pieces between the … stand in a text, in their order."""
    place = 0
    for piece in message.split("…"):
        found = text.find(piece.strip(), place)
        if found < 0:
            return False
        place = found + len(piece.strip())
    return True
