"""Pieces that rely on vLLM's methods: on with the files that were read, and off where a file differs."""

import importlib.util
import json
import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from conftest import MODEL

import jobs

pytest.importorskip("vllm")

from batchinf.engines.vllm import known_sources
from batchinf.engines.vllm.known_sources import FILES, PIECES, allowed, line_if_off

if TYPE_CHECKING:
    from batchinf.engines.vllm.engine import VllmEngine

VLLM = pathlib.Path(importlib.util.find_spec("vllm").origin or "").parent  # type: ignore[union-attr]
SCHEDULE = "v1/core/sched/scheduler.py", "        num_scheduled_tokens: dict[str, int] = {}\n"
BUILD = "v1/attention/backends/flash_attn.py", "        num_reqs = common_attn_metadata.num_reqs\n"
DISPATCH = "v1/cudagraph_dispatcher.py", "        effective_num_active_loras = "
SCORES = "v1/worker/gpu/sample/logprob.py", "    assert num_logprobs >= 0\n"
RESULTS = "v1/engine/__init__.py", "class EngineCoreOutput("
OF_SCHEDULE = "vllm/v1/core/sched/scheduler.py"


def copy_of(folder: pathlib.Path) -> pathlib.Path:
    """The modules that pieces rely on, as files of a vLLM 0.32.9."""
    root = folder / "vllm"
    for file in FILES:
        (root / file.path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(VLLM / file.path, root / file.path)
    (root / "_version.py").write_text("__version__ = version = '0.32.9'\n")
    return root


def change(root: pathlib.Path, path: str, before: str, after: str) -> None:
    text = (root / path).read_text()
    assert before in text
    (root / path).write_text(text.replace(before, after, 1))


def off(root: pathlib.Path) -> set[str]:
    return {piece for piece in PIECES if line_if_off(piece, root)}


def forget() -> None:
    """Let the files be read again."""
    for cached in (line_if_off, allowed, known_sources._digest):
        cached.cache_clear()


@pytest.fixture
def other_vllm(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[pathlib.Path]:
    """A copy that counts as the installed vLLM."""
    root = copy_of(tmp_path)
    monkeypatch.setattr(known_sources, "_installed", lambda: root)
    forget()
    yield root
    forget()


def test_every_piece_is_on_with_the_installed_version() -> None:
    assert [line for piece in PIECES if (line := line_if_off(piece))] == []


def test_every_piece_relies_on_files_of_the_installed_version() -> None:
    assert {piece for file in FILES for piece in file.pieces} == PIECES.keys()
    assert [file.path for file in FILES if file.digest(VLLM) == "absent"] == []


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        (SCHEDULE, {"decode", "hold", "masks"}),
        (RESULTS, {"decode", "hold", "join", "masks"}),
        (BUILD, {"kernel", "whole"}),
        (DISPATCH, {"long"}),
        (SCORES, {"rows_v2"}),
    ],
)
def test_a_changed_file_turns_off_the_pieces_that_rely_on_it(
    tmp_path: pathlib.Path, place: tuple[str, str], expected: set[str]
) -> None:
    root = copy_of(tmp_path)
    path, line = place
    indent = line[: len(line) - len(line.lstrip())]
    change(root, path, line, f"{indent}changed = True\n{line}")
    assert off(root) == expected


def test_another_version_with_the_same_files_has_all_pieces(tmp_path: pathlib.Path) -> None:
    assert off(copy_of(tmp_path)) == set()


def test_a_file_that_is_gone_turns_off_what_relies_on_it(tmp_path: pathlib.Path) -> None:
    root = copy_of(tmp_path)
    (root / "v1/core/sched/utils.py").unlink()
    assert off(root) == {"decode"}


def test_a_mixture_of_versions_was_not_compared(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All files are known, one of them from another version than the others."""
    path = "v1/core/block_pool.py"
    [file] = [each for each in FILES if each.path == path]
    root, read = copy_of(tmp_path), known_sources._digest
    other = next(digest for digest in file.digests if digest != file.digest(root))
    monkeypatch.setattr(known_sources, "_digest", lambda found: other if found == root / path else read(found))
    assert off(root) == {"decode"}


def test_the_log_has_one_line(other_vllm: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, line = SCHEDULE
    change(other_vllm, path, line, f"        changed = True\n{line}")
    assert [allowed("decode"), allowed("decode"), allowed("join")] == [False, False, True]
    assert capsys.readouterr().out == (
        f"vLLM 0.32.9: the scheduler's short loops for decoding are off, since {OF_SCHEDULE} is not one that they were "
        "written for; steps take longer\n"
    )


def test_the_schedulers_leave_all_requests_to_vllm(other_vllm: pathlib.Path) -> None:
    from batchinf.engines.vllm.scheduling.joined import JoiningMixin
    from batchinf.engines.vllm.scheduling.scheduler import HoldingMixin, scheduler
    from benchmarks.scheduler_steps import arguments

    given = arguments(num_blocks=300, max_num_seqs=8, is_async=True, is_caching=False)
    assert scheduler(**given)._changes is not None
    forget()
    path = "v1/core/block_pool.py"
    change(other_vllm, path, "class BlockPool", "changed = True\n\n\nclass BlockPool")
    made = scheduler(**given)
    assert (isinstance(made, HoldingMixin), made._changes) == (True, None)
    forget()
    path, line = SCHEDULE
    change(other_vllm, path, line, f"        changed = True\n{line}")
    made = scheduler(**given)
    assert not isinstance(made, HoldingMixin)
    assert isinstance(made, JoiningMixin)  # its files are known
    assert made.schedule(throttle_prefills=False).total_num_scheduled_tokens == 0


def test_an_engine_names_what_it_does_without(other_vllm: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine has some pieces. Those of others are not named, and on a CPU no kernel is."""
    from batchinf.engines.vllm import engine
    from batchinf.engines.vllm.arguments import SCHEDULER, WORKER
    from batchinf.engines.vllm.scheduling.pooling_scheduler import POOLING_SCHEDULER
    from batchinf.spec.job import WHOLE_STEPS

    for file in FILES:
        (other_vllm / file.path).unlink()
    generating = {"scheduler_cls": SCHEDULER, "worker_cls": "x.DecodingWorker", "worker_extension_cls": WORKER}
    reading = {"scheduler_cls": POOLING_SCHEDULER, "worker_cls": "x.PromptWorker"}

    def named(arguments: dict[str, Any], is_v2: bool = True) -> set[str]:
        return {*known_sources.pieces_off(engine.parts_of(arguments, is_v2))}

    plain = {"decode", "masks", "hold", "join", "arrays", "rows_v2", "mask_v2"}
    assert named(generating) == plain
    assert named(generating, is_v2=False) == plain - {"rows_v2", "mask_v2"} | {"rows_v1", "mask_v1"}
    monkeypatch.setattr(engine.current_platform, "is_cuda", lambda: True)
    monkeypatch.setattr(type(engine.current_platform), "is_device_capability", lambda *_: False)
    assert named(generating) == plain
    monkeypatch.setattr(type(engine.current_platform), "is_device_capability", lambda *_: True)
    assert named(generating) == plain | {"kernel", "long"}
    assert named(reading) == {"join", "arrays"}
    whole = {**reading, "additional_config": {WHOLE_STEPS: True}}
    assert named(whole) == {"join", "arrays", "whole"}
    assert named({"scheduler_cls": "their.Scheduler"}) == {"arrays"}


def test_the_info_of_an_engine(vllm_engine: "VllmEngine") -> None:
    assert (vllm_engine.info.settings["not_used"], vllm_engine.info.settings["slower"]) == ([], [])


PROGRAM = """
import json, sys
import vllm
from batchinf.engines.vllm.engine import VllmEngine
from batchinf.records import Request
from batchinf.spec.job import JobSpec
from batchinf.spec.sampling import SamplingSpec
from batchinf.tasks.registry import task_of

model = sys.argv[1]
sampling = SamplingSpec(temperature=0, logprobs=2, ignore_eos=True)
spec = JobSpec(model={"name": model}, input={"path": "x"}, output={"path": "y"}, engine={"max_model_len": 64},
               sampling=sampling)
engine = VllmEngine(task_of(spec), model, model)
engine.add(Request(0, 0, [5, 6, 7], sampling, max_tokens=8))
while engine.num_unfinished():
    completions = engine.step()
settings = engine.info.settings
engine.close()
print("\\n" + json.dumps([vllm.__file__, settings["not_used"], settings["slower"], len(completions[0].token_ids)]))
"""


@pytest.mark.slow
def test_a_real_engine_of_a_version_with_another_scheduler(tmp_path: pathlib.Path) -> None:
    """All files of the installed vLLM, of which one has another statement."""
    root = tmp_path / "vllm"
    shutil.copytree(VLLM, root, copy_function=lambda source, to: pathlib.Path(to).symlink_to(source))
    path, line = SCHEDULE
    text = (root / path).read_text()
    (root / path).unlink()
    (root / path).write_text(text.replace(line, f"        changed = True\n{line}", 1))
    quick = {**jobs.quick_start(), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # as in replicas
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(MODEL)], capture_output=True, text=True, check=False,
        env={**jobs.inherited(), **quick, "PYTHONPATH": f"{tmp_path}{os.pathsep}{quick['PYTHONPATH']}"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    *log, answer = done.stdout.strip().splitlines()
    file, not_used, slower, num_tokens = json.loads(answer)
    assert (file, num_tokens) == (str(root / "__init__.py"), 8)
    assert not_used == ["decode", "masks", "hold"]
    assert [f"since {OF_SCHEDULE} is not one that they were written for" in line for line in slower] == [True] * 3
    assert {*slower} <= {*log}


def test_the_program_shows_each_version(tmp_path: pathlib.Path) -> None:
    root = copy_of(tmp_path)
    path, line = SCHEDULE
    change(root, path, line, f"        changed = True\n{line}")
    command = [sys.executable, known_sources.__file__, str(VLLM), str(tmp_path)]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    rows = {line.split()[0]: line.split()[1:] for line in shown[1 : len(PIECES) + 1]}
    assert rows == {piece: ["on", "off" if piece in ("decode", "masks", "hold") else "on"] for piece in PIECES}
    [last] = shown[len(PIECES) + 1 :]
    assert last.startswith(f"vLLM 0.32.9: {OF_SCHEDULE} is ")
    assert last.endswith(", for decode, hold, masks")
