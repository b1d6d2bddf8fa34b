"""The recipes of CONTRIBUTING.md: each is carried out on a copy of the package by its smallest example, and works.

The four that change a job share a copy and its job.
"""

import bz2
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time
from typing import Any

import pyarrow.parquet as pq
import pytest

import jobs

RECIPES = (jobs.ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


class Copy:
    """A copy of the package, in which recipes are carried out."""

    def __init__(self, folder: pathlib.Path, heading: str) -> None:
        self.folder = folder
        # With the compiled modules, so that only what a recipe changes is compiled.
        shutil.copytree(jobs.ROOT / "batchinf", folder / "batchinf")
        self.begin(heading)
        quick = jobs.ROOT / "tests" / "quick"
        path = {"PYTHONPATH": f"{quick}{os.pathsep}{folder}"}
        self.environment = {**os.environ, **jobs.quick_start(), **path}

    def begin(self, heading: str) -> None:
        """What is replaced from now on is of this recipe."""
        [self._recipe] = re.findall(rf"^## {heading}\n(.*?)(?=^## )", RECIPES, re.MULTILINE | re.DOTALL)

    def replace(self, path: str, old: str, new: str) -> None:
        """Change text of a file that the recipe names."""
        names = (path, path.replace("generate", "<task>"))
        assert any(f"`{name}`" in self._recipe for name in names), f"the recipe does not name {path}"
        file = self.folder / path
        text = file.read_text(encoding="utf-8")
        assert text.count(old) == 1, f"{path}: {old!r} is there {text.count(old)} times"
        file.write_text(text.replace(old, new), encoding="utf-8")

    def batchinf(self, *arguments: str | pathlib.Path) -> "subprocess.CompletedProcess[str]":
        return self.python("-m", "batchinf", *arguments)

    def python(self, *arguments: str | pathlib.Path) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, *map(str, arguments)]
        return subprocess.run(
            command, cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=200
        )

    def rows(self) -> list[dict[str, Any]]:
        """The output rows of the copy's job."""
        rows: list[dict[str, Any]] = []
        for path in sorted((self.folder / "out" / "parts").iterdir()):
            rows += pq.read_table(path).to_pylist()
        return rows

    def spec(self, **sections: Any) -> pathlib.Path:
        small = {"input": {"limit": 3}, "parallel": {"data_parallel_size": 1}}
        return jobs.spec_of(self.folder, **{**small, **sections})


def test_an_error_that_ends_a_command(tmp_path: pathlib.Path) -> None:
    copy = Copy(tmp_path, "Add an error")
    copy.replace(
        "batchinf/base/errors.py",
        "class ErrorRateExceeded",
        '''\
class QuotaError(UserError):
    """The user's quota is used up."""

    exit_code = 4


class ErrorRateExceeded''',
    )
    copy.replace(
        "batchinf/api.py",
        "    check_caches()\n",
        """\
    from batchinf.base.errors import QuotaError

    raise QuotaError("got a quota of 0 rows; must be at least 1: ask for more")
""",
    )
    done = copy.batchinf("validate", copy.spec())
    assert done.returncode == 4
    assert done.stderr == "error: got a quota of 0 rows; must be at least 1: ask for more\n"


ROWS = ("Hello", "France", "Once", "a", "b", "c", "d", "e")


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> tuple[Copy, "subprocess.CompletedProcess[str]"]:
    """A copy in which the four recipes that change a job are carried out, and a job that it has run."""
    folder = tmp_path_factory.mktemp("recipes")
    copy = Copy(folder, "Add an error")
    add_error_type(copy)
    copy.begin("Add a message between coordinator and replica")
    add_messages(copy)
    copy.begin("Add an output column")
    add_column(copy)
    copy.begin("Add a count of a part")
    add_count(copy)
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in ROWS))
    input = {"path": str(rows), "id_column": None, "prompt_template": "say {{ prompt }}", "limit": len(ROWS)}
    done = copy.batchinf("run", copy.spec(input=input, output={"keep_columns": []}, max_error_rate=1.0))
    assert done.returncode == 0, done.stderr
    return copy, done


def add_error_type(copy: Copy) -> None:
    copy.replace(
        "batchinf/prompts/renderer.py",
        '    check_unicode(text, "the prompt")\n',
        """\
    check_unicode(text, "the prompt")
    if "France" in text:
        raise RowFailed("forbidden_word", "the prompt has the word France; leave it out")
""",
    )


def add_messages(copy: Copy) -> None:
    path = "batchinf/replica/messages.py"
    copy.replace(
        path,
        "Command = ",
        '''\
@dataclass(frozen=True, slots=True)
class Greet:
    """To a replica: greet somebody."""

    name: str


@dataclass(frozen=True, slots=True)
class Greeting:
    """From a replica: the answer to `Greet`."""

    text: str


Command = Greet | ''',
    )
    copy.replace(path, "\nEvent = ", "\nEvent = Greeting | ")
    path = "batchinf/replica/incarnation.py"
    copy.replace(
        path, "from batchinf.replica.messages import (", "from batchinf.replica.messages import (Greet, Greeting,"
    )
    copy.replace(
        path,
        "                case MayStore():\n",
        """\
                case Greet(name):
                    self._port.send(Greeting(f"hello {name}"))
                case MayStore():
""",
    )
    path = "batchinf/coordinator/coordinator.py"
    copy.replace(path, "from batchinf.replica.messages import (", "from batchinf.replica.messages import (Greet,")
    copy.replace(
        path,
        "        self._assignment.note_ready()\n",
        """\
        self.fleet.send(replica, Greet("world"))
        self._assignment.note_ready()
""",
    )
    path = "batchinf/fleet/replica.py"
    copy.replace(path, "from batchinf.replica.messages import (", "from batchinf.replica.messages import (Greeting,")
    copy.replace(
        path,
        "            case Stopped():\n",
        """\
            case Greeting(text):
                print(text)
            case Stopped():
""",
    )


def add_column(copy: Copy) -> None:
    path = "batchinf/tasks/generate/task.py"
    copy.replace(
        path,
        '            ("finish_reason", pa.string()),\n',
        """\
            ("num_words", pa.int32()),
            ("finish_reason", pa.string()),
""",
    )
    copy.replace(
        path,
        '        "stop_reason": strings(stops),\n',
        """\
        "stop_reason": strings(stops),
        "num_words": pa.array([len((result.text or "").split()) for result in results], pa.int32()),
""",
    )


def add_count(copy: Copy) -> None:
    copy.replace(
        "batchinf/records.py",
        '    """Rows with an infinity among the model\'s numbers."""\n',
        '''\
    """Rows with an infinity among the model's numbers."""
    num_long: Count = 0
    """Rows with 10 tokens or more."""
''',
    )
    copy.replace(
        "batchinf/output/counts.py",
        "        num_inf_rows=num_inf_rows,\n",
        """\
        num_inf_rows=num_inf_rows,
        num_long=pc.sum(pc.greater_equal(num_output_tokens, 10)).as_py(),
""",
    )


@pytest.mark.slow
def test_an_error_type_of_rows(job: tuple[Copy, "subprocess.CompletedProcess[str]"]) -> None:
    found = job[0].rows()
    assert [row["error_type"] for row in found] == ["forbidden_word" if row == "France" else None for row in ROWS]
    assert found[1]["error_message"] == "the prompt has the word France; leave it out"


def test_a_message_in_each_direction(job: tuple[Copy, "subprocess.CompletedProcess[str]"]) -> None:
    assert job[1].stdout.startswith("hello world\n")


def test_an_output_column(job: tuple[Copy, "subprocess.CompletedProcess[str]"]) -> None:
    found = [row for row in job[0].rows() if row["error_type"] is None]
    assert [row["num_words"] for row in found] == [len(row["text"].split()) for row in found]


def test_a_count_of_a_part(job: tuple[Copy, "subprocess.CompletedProcess[str]"]) -> None:
    copy, _ = job
    # The manifest, the footers of the parts, and the check that compares both.
    lines = "".join(path.read_text() for path in (copy.folder / "out" / "manifest").iterdir())
    num_long = sum((row["num_output_tokens"] or 0) >= 10 for row in copy.rows())
    assert sum(json.loads(line).get("num_long", 0) for line in lines.splitlines()) == num_long > 0
    checked = copy.batchinf("check", copy.folder / "out", "--deep")
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.slow  # it imports vLLM
def test_an_export_format(job: tuple[Copy, "subprocess.CompletedProcess[str]"]) -> None:
    copy, _ = job
    copy.begin("Add an export format")
    (copy.folder / "batchinf/export/count.py").write_text(
        """\
from batchinf.export.base import Format


class CountExport(Format):
    name = "count"
    suffix = ".count"
    num_rows = 0

    def write(self, batch):
        self.num_rows += batch.num_rows

    def close(self):
        self.stream.write(b"%d rows" % self.num_rows)
"""
    )
    registry = "batchinf/commands/export.py"
    old = "from batchinf.export.huggingface"
    copy.replace(registry, old, f"from batchinf.export.count import CountExport\n{old}")
    copy.replace(
        registry, "HuggingFaceExport, OpenAIBatchExport)", "HuggingFaceExport, OpenAIBatchExport, CountExport)"
    )
    copy.replace("batchinf/cli/outputs.py", "hf or openai-batch;", "hf, openai-batch or count;")
    done = copy.batchinf("export", "out", "-o", "rows.count")
    assert done.returncode == 0, done.stderr
    assert (copy.folder / "rows.count").read_text() == f"{len(ROWS)} rows"


@pytest.mark.slow
def test_a_figure_of_the_engine(tmp_path: pathlib.Path) -> None:
    copy = Copy(tmp_path, "Add a figure of the engine")
    copy.replace(
        "batchinf/engines/protocol.py",
        "    prefix_cache_hits: int = 0\n",
        """\
    prefix_cache_hits: int = 0
    num_steps: int = 0
    num_skipped: int = 0
""",
    )
    copy.replace(
        "batchinf/engines/vllm/engine.py",
        "            num_preemptions=last.num_preemptions + ",
        """\
            num_steps=last.num_steps + 1,
            num_skipped=num_skipped,
            num_preemptions=last.num_preemptions + """,
    )
    copy.replace(
        "batchinf/fleet/status.py",
        "    num_preemptions: int\n",
        """\
    num_preemptions: int
    num_steps: int
    num_skipped: int
""",
    )
    done = copy.python(
        "-c",
        """
import pathlib
from vllm.v1.metrics.stats import SchedulerStats
from batchinf.base.storage import Folder
from batchinf.engines.vllm.engine import _Stats
from batchinf.fleet.status import ReplicaLook, Telemetry, read_looks
from batchinf.replica.messages import Progress
stats = _Stats()
for num_skipped in (3, 2):
    stats.record(SchedulerStats(num_skipped_waiting_reqs=num_skipped))
progress = Progress(0, {}, 0, 0, 0, 0, 0.0, stats.latest)
folder = Folder(pathlib.Path("out"))
Telemetry(folder, 1, tuple).look([ReplicaLook.of(0, "000001.0001", "running", progress)])
[sample] = read_looks(folder)
print(*(sample["replicas"][0][name] for name in ("num_steps", "num_skipped", "num_waiting")))
""",
    )
    assert done.stdout.splitlines()[-1:] == ["2 2 2"], done.stderr


def test_a_compression_of_input_files(tmp_path: pathlib.Path) -> None:
    copy = Copy(tmp_path, "Add a compression of input files")
    copy.replace("batchinf/source/files.py", "COMPRESSIONS = {", 'COMPRESSIONS = {".bz2": (b"BZh", "bz2"), ')
    rows = tmp_path / "rows.jsonl.bz2"
    rows.write_bytes(bz2.compress(b'{"prompt": "a"}\n{"prompt": "b"}\n'))
    done = copy.python(
        "-c",
        f"""
import pathlib
from batchinf.source.files import InputLocation
from batchinf.source.rows import open_source
source = open_source(InputLocation({str(rows)!r}), pathlib.Path("scratch"))
print([row.values for row in source.read(0, 2)])
""",
    )
    assert done.stdout == "[{'prompt': 'a'}, {'prompt': 'b'}]\n", done.stderr


def test_a_gpu(tmp_path: pathlib.Path) -> None:
    copy = Copy(tmp_path, "Add a GPU")
    line = '("x100", "X100", 200_000, 9000, (3000, 3000, 6000), (10, 0), 900, "its data sheet", "PyTorch")'
    copy.replace("batchinf/planning/gpus.py", '    ("b200", ', f'    {line},\n    ("b200", ')
    planned = copy.batchinf("plan", jobs.MODEL, "--gpu", "x100", "--context", "512")
    assert planned.returncode == 0, planned.stderr
    assert "x100" in planned.stdout
    like = copy.python("-c", "from batchinf.planning.gpus import gpu_like; print(gpu_like('NVIDIA X100', 1).name)")
    assert like.stdout == "x100\n", like.stderr


@pytest.mark.slow
@pytest.mark.real_starts
def test_a_signal_that_stops_a_job(tmp_path: pathlib.Path) -> None:
    copy = Copy(tmp_path, "Add a signal or another reason to stop a job")
    copy.replace("batchinf/base/stop_signals.py", "STOP_SIGNALS = (", "STOP_SIGNALS = (signal.SIGUSR2, ")
    spec = copy.spec(input={"limit": 100}, scripted={"step_s": 0.2})
    command = [sys.executable, "-m", "batchinf", "run", str(spec)]
    with subprocess.Popen(command, cwd=tmp_path, env=copy.environment, stderr=subprocess.PIPE, text=True) as process:
        until = time.monotonic() + 100
        while not list(tmp_path.glob("out/journal/*")) and process.poll() is None and time.monotonic() < until:
            time.sleep(0.05)
        process.send_signal(signal.SIGUSR2)
        _, errors = process.communicate(timeout=100)
    assert process.returncode == 75, errors
    assert "SIGUSR2" in errors
