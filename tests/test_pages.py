"""Every command and every snippet of the README and of the documents is run, as `pages.py` says."""

import contextlib
import importlib.util
import os
import pathlib
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator

import pytest
import typer.main
from fork_server import ForkServer, address_for
from pages import Block, blocks_of, check_spec, environment, lay_out, run_quickstart

import jobs
from batchinf.cli import app
from batchinf.engines.installed import engine_argument_names

PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "AGENTS.md",
    *sorted(str(path.relative_to(jobs.ROOT)) for path in jobs.ROOT.glob("docs/**/*.md")),
]
# Blocks that are not run: page and first line, and the reason.
NOT_RUN = {
    ("README.md", "make quickstart "): "installs everything; starts these tests",
    ("CONTRIBUTING.md", "make install"): "installs everything",
    ("CONTRIBUTING.md", "python tests/pages.py"): "the test itself",
    ("CONTRIBUTING.md", ".venv/bin/python benchmarks/run.py top20"): "reads benchmarks/ of a checkout with a .venv",
    ("docs/cluster.md", "pip install 'batchinf[ray]'"): "starts Ray on this host: tests/fleet/test_ray.py does it",
    ("docs/cluster.md", "ray job submit"): "needs the dashboard of Ray",
    ("docs/cluster.md", "ray start --head --port=6400"): "starts Ray on this host: tests/fleet/test_ray.py does it",
    ("docs/commands.md", "batchinf tune"): "minutes of trials; tests/tuning/test_tune.py runs them",
    ("docs/commands.md", "batchinf export out/quickstart --to hf -o out/answers"): "uploads to the hub",
    ("docs/install.md", "python3 -m venv connected"): "downloads all; tests/test_install.py checks the options",
    ("docs/install.md", "python3 -m venv venv"): "installs everything; tests/test_install.py checks the options",
    ("docs/install.md", "hf download ORG/MODEL"): "downloads a model; tests/test_install.py checks the options",
    ("docs/install.md", "cp -r /shared/models/MODEL"): "a model of the reader's",
    ("docs/install.md", "apptainer build"): "needs Apptainer",
    ("docs/install.md", "python -m pip wheel"): "changes the environment; tests/test_install.py makes a wheel",
    ("docs/install.md", "python -m pip list"): "changes the environment; tests/test_install.py checks the options",
    ("docs/install.md", "python -m pip install"): "changes the environment; tests/test_install.py checks the options",
    ("docs/slurm.md", "batchinf slurm jobs/quickstart.yaml"): "needs Slurm: tests/test_slurm.py and `make test-slurm`",
    ("docs/tutorial.md", "make install"): "installs everything",
}  # fmt: skip
KNOWN = {"bash", "python", "yaml", "text", "json", "jsonl", "csv", "jinja", "mermaid"}


def skipped(page: str) -> Iterator[Block]:
    for block in blocks_of(page):
        if any(page == name and block.first_line.startswith(first) for name, first in NOT_RUN):
            yield block


def has_steps(page: str) -> bool:
    """Whether anything of a page is run."""
    left_out = {block.line for block in skipped(page)}
    return any(block.language in ("bash", "python") and block.line not in left_out for block in blocks_of(page))


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Variables with which commands start fast: a server forks them. They share one cache of the hub."""
    folder = tmp_path_factory.mktemp("hub")
    lay_out(folder)
    variables = {**jobs.quick_start(), "HF_HOME": str(folder / ".hf"), "HF_HUB_OFFLINE": "1"}
    variables["PYTHONPATH"] += f"{os.pathsep}{jobs.ROOT / 'tests'}"  # for the module `pages`
    own = {**jobs.inherited(), **variables}
    with contextlib.ExitStack() as closing:
        server = closing.enter_context(contextlib.closing(ForkServer(own)))
        variables |= server.variable()
        if importlib.util.find_spec("vllm") is not None:
            # Engines of pages read no cache of the hub: their model is a folder.
            variables |= jobs.fork_server(has_vllm=True).variable("VLLM_FORKED_BY", own)
        yield variables


@pytest.fixture(scope="module")
def page_server(tmp_path_factory: pytest.TempPathFactory, quick: dict[str, str]) -> Iterator[ForkServer]:
    """Forks the processes of pages, whose snippets make tables of pandas."""
    with contextlib.closing(
        ForkServer(environment(tmp_path_factory.mktemp("server"), quick, jobs.inherited()))
    ) as server:
        yield server


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory, quick: dict[str, str]) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("quickstart")
    lay_out(folder)
    return run_quickstart(folder, environment(folder, quick, jobs.inherited()))


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if has_steps(page)])
def test_the_commands_and_snippets_of_a_page_run(
    page: str, tmp_path: pathlib.Path, quickstart: pathlib.Path, quick: dict[str, str], page_server: ForkServer
) -> None:
    lay_out(tmp_path, quickstart)
    command = [sys.executable, "-P", "-m", "pages", page, *(block.first_line for block in skipped(page))]
    own = environment(tmp_path, quick, jobs.inherited())
    assert page_server.can_fork(own) and address_for(own)
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = page_server.start(page_server, command, cwd=tmp_path, env=own, start_new_session=True, **both)
    said, _ = process.communicate()
    assert process.returncode == 0, said


@pytest.mark.parametrize("page", PAGES)
def test_every_block_has_a_language_that_says_whether_it_runs(page: str) -> None:
    blocks = blocks_of(page)
    fences = re.findall(r"^ *```", (jobs.ROOT / page).read_text(encoding="utf-8"), re.MULTILINE)
    hidden = [block for block in blocks if block.is_hidden]
    assert len(fences) == 2 * (len(blocks) - len(hidden))
    assert [f"{page}:{block.line}" for block in blocks if block.language not in KNOWN] == []


def test_every_exception_is_a_block() -> None:
    found = {(page, first) for page, first in NOT_RUN if any(b.first_line.startswith(first) for b in blocks_of(page))}
    assert found == set(NOT_RUN)


@pytest.mark.parametrize("page", [page for page in PAGES if any(block.language == "yaml" for block in blocks_of(page))])
def test_every_spec_of_a_page_is_right(page: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sample_data").symlink_to(jobs.ROOT / "sample_data")
    monkeypatch.chdir(tmp_path)
    for block in blocks_of(page):
        if block.language == "yaml":
            check_spec(block.text)


def commands_of(page: str) -> Iterator[str]:
    """Commands of batchinf in the prose and in the blocks of a page, one line each."""
    text = (jobs.ROOT / page).read_text(encoding="utf-8")
    for block in blocks_of(page):
        if block.language == "bash":
            yield from re.findall(r"^(batchinf .*)$", block.text, re.MULTILINE)
    prose = re.sub(r"^ *```.*?^ *```$", "", text, flags=re.MULTILINE | re.DOTALL)
    for span in re.findall(r"(?<!`)`(batchinf [^`]*)`(?!`)", prose):
        yield " ".join(span.split())


@pytest.mark.parametrize("page", PAGES)
def test_every_command_that_is_named_exists_with_its_options(page: str) -> None:
    commands = typer.main.get_group(app).commands
    for line in commands_of(page):
        words = shlex.split(re.split(r" [|>#]", line)[0], comments=True)[1:]
        if words[0] in ("COMMAND", "--version", "--install-completion"):
            continue
        assert words[0] in commands, line
        known = {option for parameter in commands[words[0]].params for option in parameter.opts} | {"--help"}
        if commands[words[0]].context_settings.get("allow_extra_args"):  # it checks them itself
            known |= {f"--{name.replace('_', '-')}" for name in engine_argument_names() or ()}
        assert {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)} <= known, line
