"""Runs the commands and the snippets of a page of the documents: `python tests/pages.py docs/python.md`.

CONTRIBUTING.md says how a page marks its blocks. `test_pages.py` runs all pages.
"""

import contextlib
import functools
import io
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fork_server import address_for, forking

ROOT = pathlib.Path(__file__).resolve().parents[1]
MODEL = ROOT / "sample_data" / "tiny-llama"
# Ids of the hub that pages use. A cache of the hub has the sample model under each of them.
HUB_MODELS = ("Qwen/Qwen3-8B", "meta-llama/Llama-3.1-8B-Instruct")

_BLOCK = re.compile(
    r"^(?P<indent>[ ]*)```(?P<language>\w*)(?:[ ]title=\"(?P<title>[^\"]+)\")?\n(?P<text>.*?)^(?P=indent)```$"
    r"|^<!--[ ](?P<kind>run|check)\n(?P<hidden>.*?)^-->$"
    r"|^<!--[ ](?:exits[ ](?P<exits>\d+)|(?P<engine>real|scripted)[ ]engine)[ ]-->$",
    re.MULTILINE | re.DOTALL | re.VERBOSE,
)
# Fields of every job, unless a page asks for the real engine.
SCRIPTED = ("scripted={}", "parallel.data_parallel_size=1")
# A fragment of a spec is merged over this.
_LEAST = {"model": "sample_data/tiny-llama", "input": {"path": "rows.jsonl"}, "output": {"path": "out/rows"}}


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block, or a comment that is run.

    line: in the page, of the block's first line. title: the file that the block is written to. exit_code: of the last
    command. is_real: whether its jobs run vLLM, not the scripted engine.
    """

    line: int
    language: str
    text: str
    title: str | None = None
    exit_code: int = 0
    is_real: bool = False
    is_hidden: bool = False

    @property
    def first_line(self) -> str:
        return self.text.partition("\n")[0]


def blocks_of(page: str | pathlib.Path) -> list[Block]:
    """All blocks of a page in their order. page: relative to the root."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found, exit_code, is_real = [], 0, False
    for match in _BLOCK.finditer(text):
        if match["exits"] is not None:
            exit_code = int(match["exits"])
        elif match["engine"] is not None:
            is_real = match["engine"] == "real"
        else:
            line = text.count("\n", 0, match.start()) + 2
            language = {"run": "bash", "check": "python", None: match["language"]}[match["kind"]]
            content = textwrap.dedent(match["text"] or match["hidden"])
            found.append(Block(line, language, content, match["title"], exit_code, is_real, match["kind"] is not None))
            exit_code = 0
    return found


def check_spec(text: str) -> None:
    """Raise SpecError unless a text is a spec, or fields of one. Files that it names are made where they are absent."""
    import batchinf.tasks.registry  # noqa: F401  # it adds the tasks to the spec
    from batchinf.spec.file import read_spec
    from batchinf.spec.yaml_text import YamlReader

    for name in re.findall(r"\{file: ([\w./-]+)\}", text):
        if not os.path.exists(name):
            pathlib.Path(name).write_text("{{ prompt }}", encoding="utf-8")
    spec = _merged(_LEAST, YamlReader(lambda mark: f"line {mark.line + 1}").read(text))
    if "job" in spec["input"]:
        del spec["input"]["path"]
    read_spec(spec)


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    both = {
        name: _merged(below[name], value) if isinstance(value, dict) and isinstance(below.get(name), dict) else value
        for name, value in above.items()
    }
    return {**below, **both}


def lay_out(folder: pathlib.Path, quickstart: pathlib.Path | None = None) -> None:
    """Put into a folder what a page finds there: sample data and jobs, models of the hub, the commands.

    quickstart: the output of the sample job, which is copied too.
    """
    for name in ("sample_data", "docs", "benchmarks"):
        (folder / name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / "jobs", folder / "jobs")
    commit = "0" * 40
    for name in HUB_MODELS:
        cache = folder / ".hf" / "hub" / f"models--{name.replace('/', '--')}"
        (cache / "refs").mkdir(parents=True)
        (cache / "refs" / "main").write_text(commit)
        shutil.copytree(MODEL, cache / "snapshots" / commit)
    (folder / ".bin").mkdir()
    for name, lines in {
        "python": f'exec {sys.executable} "$@"',
        "batchinf": '[[ "$ENGINE" = scripted && "$1" =~ ^(run|validate)$ ]] && set -- "$@" --set '
        f"{' --set '.join(SCRIPTED)}\n"
        f'unset QUICK_WITH_PANDAS\nexec {sys.executable} -S {ROOT / "tests" / "forked.py"} "$@"',
    }.items():
        path = folder / ".bin" / name
        path.write_text(f"#!/bin/bash\n{lines}\n")
        path.chmod(0o755)
    if quickstart is not None:
        shutil.copytree(quickstart, folder / "out" / "quickstart")


def environment(
    folder: pathlib.Path, quick: Mapping[str, str], inherited: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """The environment of a page. quick: variables that make commands start faster."""
    return {
        **inherited,
        "PYTHONPATH": str(ROOT),
        "QUICK_WITH_PANDAS": "1",  # the snippets of a page make tables of pandas
        "PATH": f"{folder / '.bin'}{os.pathsep}{inherited['PATH']}",
        "HF_HOME": str(folder / ".hf"),
        "HF_HUB_OFFLINE": "1",
        **quick,
    }


def run_quickstart(folder: pathlib.Path, environment: Mapping[str, str]) -> pathlib.Path:
    """Run the sample job in a folder that `lay_out` has filled, and return its output folder."""
    command = ["batchinf", "run", "jobs/quickstart.yaml"]
    subprocess.run(command, cwd=folder, env={**environment, "ENGINE": "scripted"}, capture_output=True, check=True)
    return folder / "out" / "quickstart"


def run_page(page: str, skipped: frozenset[str] = frozenset()) -> None:
    """Run a page's blocks in the current folder. skipped: first lines of blocks that are not run."""
    if (address := address_for(os.environ)) is not None:
        subprocess.Popen = forking(address)  # type: ignore[misc]
    _script_jobs()
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks_of(page):
        os.environ["ENGINE"] = "vllm" if block.is_real else "scripted"
        if block.title is not None:
            path = pathlib.Path(block.title)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text, encoding="utf-8")
        elif block.first_line in skipped:
            continue
        elif block.language == "python":
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(compile("\n" * (block.line - 1) + block.text, page, "exec"), names)
            names["printed"] = out.getvalue()
        elif block.language == "bash":
            names["printed"] = _run_bash(page, block)


def _run_bash(page: str, block: Block) -> str:
    """What the commands print. Ends the program with a report if they fail."""
    done = subprocess.run(["bash", "-euo", "pipefail", "-c", block.text], capture_output=True, text=True)
    if done.returncode != block.exit_code:
        sys.exit(f"{page}:{block.line}: exit code {done.returncode}\n{block.text}\n{done.stdout}\n{done.stderr}")
    return done.stdout


def _script_jobs() -> None:
    """Give jobs of `batchinf.run` and `batchinf.validate` the scripted engine, as `overrides` would."""
    import batchinf

    def scripted(call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def called(spec: Any, *, overrides: Any = (), **options: Any) -> Any:
            if os.environ["ENGINE"] == "scripted":
                fields = {"scripted": {}, "parallel.data_parallel_size": 1}
                overrides = {**overrides, **fields} if isinstance(overrides, Mapping) else [*overrides, *SCRIPTED]
            return call(spec, overrides=overrides, **options)

        return called

    batchinf.run, batchinf.validate = scripted(batchinf.run), scripted(batchinf.validate)


def main(page: str, *skipped: str) -> None:
    page = os.path.relpath(ROOT / page, ROOT) if not os.path.isabs(page) else os.path.relpath(page, ROOT)
    if "QUICK_WITH_PANDAS" in os.environ:  # of test_pages.py, which has made the folder
        run_page(page, frozenset(skipped))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        lay_out(folder)
        own = environment(folder, {})
        run_quickstart(folder, own)
        command = [sys.executable, __file__, page, *skipped]
        sys.exit(subprocess.run(command, cwd=folder, env=own).returncode)


if __name__ == "__main__":
    main(*sys.argv[1:])
