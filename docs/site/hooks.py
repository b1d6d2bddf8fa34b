"""Hooks of mkdocs: pages outside docs/, pages made from the code, links to files of the repository."""

import os
import pathlib
import re
from collections.abc import Iterator
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = pathlib.Path(__file__).parents[2]
HOME = "README.md"
HISTORY = ("benchmarks/history/vllm-0.26.md", "benchmarks/history/processor.md")
OUTSIDE = (
    HOME,
    "AGENTS.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "benchmarks/README.md",
    "benchmarks/RESULTS.md",
    *HISTORY,
)
LINK = re.compile(r"(\]\(|src=\"|srcset=\")([^)#:\s\"]+)(?=[)#\"])")
# Commands and checks of tests/pages.py.
HIDDEN = re.compile(r"^<!-- (?:run|check)\n.*?^-->\n|^<!-- (?:exits \d+|\w+ engine) -->\n", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages outside docs/, the generated pages, and the files that pages link to."""
    for name in OUTSIDE:
        files.append(File.generated(config, _uri(name), abs_src_path=str(ROOT / name)))
    files.append(File.generated(config, "reference/command-line.md", content=_command_line()))
    for file in list(files.documentation_pages()):
        for target in _targets(_source(file), file.content_string):
            uri = _uri(target)
            if files.get_file_from_path(uri) is None and (ROOT / target).is_file():
                files.append(File.generated(config, uri, abs_src_path=str(ROOT / target)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Make links that hold in the repository hold on the site."""
    source = _source(page.file)
    if page.is_homepage:
        page.meta["hide"] = ["navigation"]

    def link(match: re.Match[str]) -> str:
        target = _resolved(source, match[2])
        if not (ROOT / target).is_file():
            return match[0]
        return match[1] + os.path.relpath(_uri(target), os.path.dirname(page.file.src_uri) or ".")

    return LINK.sub(link, HIDDEN.sub("", markdown))


def on_post_build(config: MkDocsConfig) -> None:
    """Let the links of llms.txt lead to pages of the site."""
    listed = pathlib.Path(config.site_dir) / "llms.txt"
    listed.write_text(listed.read_text(encoding="utf-8").replace(".md)", ".html)"), encoding="utf-8")


def _source(file: File) -> str:
    """A page's path in the repository."""
    uri = HOME if file.src_uri == "index.md" else file.src_uri
    return uri if uri in OUTSIDE else f"docs/{uri}"


def _uri(path: str) -> str:
    """The place on the site of a file of the repository."""
    return "index.md" if path == HOME else path.removeprefix("docs/")


def _resolved(source: str, target: str) -> str:
    return os.path.normpath(os.path.join(os.path.dirname(source), target))


def _targets(source: str, text: str) -> Iterator[str]:
    for match in LINK.finditer(text):
        yield _resolved(source, match[2])


def _command_line() -> str:
    """All commands and options, from the command line itself."""
    import typer.cli
    import typer.main

    from batchinf.cli import app

    group: Any = typer.main.get_command(app)
    text = typer.cli.get_docs_for_click(
        obj=group, ctx=group.context_class(group, info_name="batchinf"), name="batchinf"
    )
    # The list of commands is cut off in the middle of its sentences, and the page has them all.
    text = re.sub(r"\*\*Commands\*\*:\n\n(?:\* .*\n)+", "", text)
    text = re.sub(r"^Example: (.*)$", r"**Example**:\n\n```bash\n\1\n```", text, flags=re.MULTILINE)
    text = text.replace("```console\n$ ", "```text\n")
    return text.replace(
        "# `batchinf`\n", "# Command line\n\nAll commands and their options, as `--help` shows them.\n", 1
    )
