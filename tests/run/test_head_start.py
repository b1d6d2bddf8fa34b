"""Replicas that start while the input is read: the same rows as ever, and whatever comes between, none is left over."""

import json
import pathlib
import re
import signal
from collections.abc import Iterator
from typing import Any, ClassVar

import psutil
import pytest

import jobs
from batchinf.base.storage import Folder
from batchinf.manifest.commit_log import read_lines
from batchinf.manifest.state import read_beginning, read_state
from batchinf.run.head_start import is_known, takes_long
from batchinf.spec.job import JobSpec

NUM_ROWS = 80
OUTPUT = {"rows_per_shard": 8}


def lines_of(padding: int) -> str:
    rows = [json.loads(line) for line in jobs.PROMPTS.read_text(encoding="utf-8").strip().split("\n")[:NUM_ROWS]]
    return "".join(json.dumps({**row, "padding": "x" * padding}) + "\n" for row in rows)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, pathlib.Path]:
    """The same rows in few bytes, in so many that replicas do not wait for a scan, and in so many that they do not wait
    for a choice.
    """
    folder = tmp_path_factory.mktemp("inputs")
    found = {"plain": 0, "long": 1 << 20, "chosen": 1 << 17}
    for name, padding in found.items():
        (folder / f"{name}.jsonl").write_text(lines_of(padding))
    return {name: folder / f"{name}.jsonl" for name in found}


@pytest.fixture(scope="module")
def plain_rows(inputs: dict[str, pathlib.Path], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The rows of a job without a head start."""
    folder = tmp_path_factory.mktemp("plain")
    jobs.finish(spec_of(folder, inputs["plain"]))
    assert not jobs.events_of(folder / "out", "head_start")
    rows = jobs.rows_of(folder / "out")
    assert len(rows) == NUM_ROWS
    return rows


def spec_of(folder: pathlib.Path, path: pathlib.Path, **sections: Any) -> pathlib.Path:
    where = {"path": str(path), **sections.pop("input", {})}
    return jobs.spec_of(folder, **{"input": where, "output": OUTPUT, **sections})


class Held:
    """A job that stands still, once its input is open if nothing else is said, with its replicas under way."""

    made: ClassVar[list["Held"]] = []

    def __init__(self, spec: pathlib.Path, *arguments: str, point: str = "job.input_open", faults: str = "") -> None:
        self.spec, self.out, self.marker = spec, spec.parent / "out", spec.parent / "held"
        hold = f"{point}=hold {self.marker}"
        self.process = jobs.start("run", spec, *arguments, faults=",".join(filter(None, (hold, faults))))
        jobs.wait_until(lambda: is_held(self.marker) or self.process.poll() is not None, 120)
        assert self.process.poll() is None, self.process.communicate()
        self.made.append(self)
        self.replicas = jobs.replicas_of(self.process.pid)
        self.everyone = jobs.family(self.process.pid)

    def go_on(self) -> tuple[int, str]:
        self.marker.unlink(missing_ok=True)
        code, _, errors = jobs.end(self.process)
        assert "Traceback" not in errors
        return code, errors

    def kill(self) -> None:
        """SIGKILL for the coordinator alone."""
        self.process.kill()
        self.process.communicate(timeout=60)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """A test that fails leaves no process behind either."""
    yield
    for held in Held.made:
        jobs.kill([*held.everyone, *jobs.family(held.process.pid)])
    Held.made.clear()


def is_held(marker: pathlib.Path) -> bool:
    return marker.exists() and bool(marker.read_text())


def log_of(out: pathlib.Path, number: int = 1) -> list[dict[str, Any]]:
    return [fields for _, fields in read_lines(Folder(out), f"manifest/{number:06d}.jsonl")]


def error_line(errors: str) -> str:
    [line] = [line for line in errors.splitlines() if line.startswith("error: ")]
    return line


def check_accounts(out: pathlib.Path) -> None:
    """Each replica that was started is said to have ended, and its device time counts."""
    state = jobs.state_of(out)
    started = [event["incarnation"] for event in jobs.events_of(out, "replica_started")]
    ended = jobs.events_of(out, "replica_ended")
    assert sorted(started) == sorted(event["incarnation"] for event in ended)
    assert not state.running_replicas
    assert state.device_s == pytest.approx(sum(event["device_s"] for event in ended))


# -- which comes first -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["engine", "input"])
def test_the_engine_and_the_input_in_either_order(
    first: str, inputs: dict[str, pathlib.Path], plain_rows: list[dict[str, Any]], tmp_path: pathlib.Path
) -> None:
    spec = spec_of(tmp_path, inputs["long"], parallel={"data_parallel_size": 1})
    engine, reading = tmp_path / "engine", tmp_path / "reading"
    held = Held(spec, faults=f"engine.start=hold {engine},feeder.read=hold {reading}")
    # Neither waits for the other: the input is open, and the engine is about to start.
    jobs.wait_until(lambda: is_held(engine), 60)
    assert len(held.replicas) == 1
    assert not reading.exists()
    for marker in (engine, held.marker) if first == "engine" else (held.marker, engine):
        marker.unlink()
        if marker == held.marker:
            jobs.wait_until(lambda: is_held(reading), 60)
    reading.unlink()
    code, errors = held.go_on()
    assert code == 0, errors
    assert "starting 1 replica(s) while the input is read" in errors
    assert jobs.rows_of(held.out) == plain_rows
    assert {row["attempts"] for row in jobs.table_of(held.out).select(["attempts"]).to_pylist()} == {1}
    assert len(jobs.events_of(held.out, "replica_started")) == len(jobs.events_of(held.out, "ready")) == 1
    check_accounts(held.out)


def test_the_log_has_the_replicas_before_the_header(
    inputs: dict[str, pathlib.Path], plain_rows: list[dict[str, Any]], tmp_path: pathlib.Path
) -> None:
    jobs.finish(spec_of(tmp_path, inputs["long"]))
    assert jobs.rows_of(tmp_path / "out") == plain_rows
    assert [event["replica"] for event in jobs.events_of(tmp_path / "out", "replica_started")] == [0, 1]
    check_accounts(tmp_path / "out")
    lines = log_of(tmp_path / "out")
    assert [line.get("name", line["kind"]) for line in lines[:5]] == [
        *("head_start", "replica_started", "replica_started", "header", "extent")
    ]
    assert lines[0]["job_id"] == lines[3]["job_id"]


def test_a_job_that_has_begun_gets_none(
    inputs: dict[str, pathlib.Path], plain_rows: list[dict[str, Any]], tmp_path: pathlib.Path
) -> None:
    spec, out = spec_of(tmp_path, inputs["long"]), tmp_path / "out"
    assert jobs.run("run", spec, faults="coordinator.after_publish:2=kill").returncode == -9
    assert "while the input is read" not in jobs.finish(spec).stderr
    assert jobs.rows_of(out) == plain_rows
    check_accounts(out)


def test_rows_that_are_chosen_and_ordered(inputs: dict[str, pathlib.Path], tmp_path: pathlib.Path) -> None:
    found = []
    for name in ("plain", "chosen"):
        folder = tmp_path / name
        folder.mkdir()
        done = jobs.finish(spec_of(folder, inputs[name], input={"where": "language != 'en'", "order": "prefix"}))
        assert ("while the input is read" in done.stderr) == (name == "chosen")
        found.append(jobs.rows_of(folder / "out"))
    assert 0 < len(found[0]) < NUM_ROWS
    assert found[0] == found[1]


def test_where_no_row_is_left_to_run(inputs: dict[str, pathlib.Path], tmp_path: pathlib.Path) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    jobs.finish(spec_of(tmp_path / "first", inputs["plain"]))
    exclude = {"exclude": {"job": str(tmp_path / "first" / "out"), "on": "id"}}
    refused = jobs.run("run", spec_of(tmp_path / "second", inputs["chosen"], input=exclude))
    assert refused.returncode == 2
    assert "while the input is read" in refused.stderr
    assert "leaves none of the 80 input rows" in refused.stderr
    assert not (tmp_path / "second" / "out" / "job.yaml").exists()


# -- what comes between ------------------------------------------------------------------------------------------------


@pytest.mark.real_starts
@pytest.mark.parametrize(
    "is_stopped", [False, *jobs.slowly(True)], ids=["replicas that hear it", "replicas that stand still"]
)
def test_a_coordinator_that_is_killed(
    is_stopped: bool, inputs: dict[str, pathlib.Path], plain_rows: list[dict[str, Any]], tmp_path: pathlib.Path
) -> None:
    held = Held(spec_of(tmp_path, inputs["long"]))
    assert "holds no job" in jobs.run("status", held.out).stderr
    if is_stopped:
        for replica in held.replicas:
            replica.suspend()
        jobs.wait_until(lambda: {replica.status() for replica in held.replicas} == {psutil.STATUS_STOPPED})
    held.kill()
    if is_stopped:
        assert {replica.status() for replica in held.replicas} == {psutil.STATUS_STOPPED}
    else:
        assert jobs.are_gone(held.everyone)
    assert read_state(Folder(held.out)) is None
    status = jobs.run("status", held.out)
    assert (status.returncode, "holds no job" in status.stderr) == (2, True)
    before = read_beginning(Folder(held.out))
    groups = {started.identity["pgid"] for started in before.running_replicas}
    assert groups == {replica.pid for replica in held.replicas}
    jobs.finish(held.spec)
    assert jobs.are_gone(held.everyone)
    assert jobs.rows_of(held.out) == plain_rows
    assert jobs.state_of(held.out).header.job_id == before.job_id
    assert len(jobs.events_of(held.out, "replica_started")) == 4
    ended = [event["incarnation"] for event in jobs.events_of(held.out, "replica_ended")]
    assert sorted(ended[:2]) == sorted(started.incarnation for started in before.running_replicas)
    check_accounts(held.out)


@pytest.mark.real_starts
@pytest.mark.parametrize("is_short", [False, *jobs.slowly(True)], ids=["with a head start again", "without one"])
def test_several_lives_that_end_before_the_header(
    is_short: bool, inputs: dict[str, pathlib.Path], plain_rows: list[dict[str, Any]], tmp_path: pathlib.Path
) -> None:
    spec, out = spec_of(tmp_path, inputs["long"]), tmp_path / "out"
    for point in ("head_start.started", "job.input_open", "manifest.mid_line:2", "manifest.mid_line:3"):
        assert jobs.run("run", spec, faults=f"{point}=kill").returncode == -9
        assert read_state(Folder(out)) is None
    begun_as = read_beginning(Folder(out)).job_id
    jobs.finish(spec_of(tmp_path, inputs["plain"]) if is_short else spec)
    assert jobs.rows_of(out) == plain_rows
    assert jobs.state_of(out).header.job_id == begun_as
    check_accounts(out)
    assert jobs.run("check", out, "--deep").returncode == 0


@pytest.mark.parametrize("wrong", ["column", *jobs.slowly("file", "slice")])
def test_what_is_wrong_with_the_input_is_said_as_ever(
    wrong: str, inputs: dict[str, pathlib.Path], tmp_path: pathlib.Path
) -> None:
    said = []
    for name in ("plain", "long"):
        folder = tmp_path / name
        folder.mkdir()
        path, arguments, section = inputs[name], [], {}
        if wrong == "column":
            section = {"input": {"prompt_column": "nothing"}}
        elif wrong == "file":
            path = folder / "broken.parquet"
            path.write_bytes(bytes(100 if name == "plain" else 65 << 20))
        else:
            jobs.finish(spec_of(folder, path), "--slice", "0/2")
            arguments, section = ["--slice", "1/2"], {"sampling": {"max_tokens": 5}}
        spec = spec_of(folder, path, **section)
        if name == "plain":
            done = jobs.run("run", spec, *arguments)
            code, errors = done.returncode, done.stderr
        else:
            code, errors = Held(spec, *arguments, point="head_start.started").go_on()
        assert (code, "while the input is read" in errors) == (2, name == "long")
        said.append(re.sub(r":1:\d+", "", error_line(errors)).replace(name, "NAME"))
        out = folder / "out" if wrong != "slice" else folder / "out" / "slice-1"
        assert read_state(Folder(out)) is None
        assert not read_beginning(Folder(out)).running_replicas
        jobs.finish(spec_of(folder, inputs[name]), *arguments)
    assert said[0] == said[1]


def test_ctrl_c(inputs: dict[str, pathlib.Path], plain_rows: list[dict[str, Any]], tmp_path: pathlib.Path) -> None:
    held = Held(spec_of(tmp_path, inputs["long"]))
    held.process.send_signal(signal.SIGINT)
    code, errors = held.go_on()
    assert code == 75, errors
    assert jobs.are_gone(held.everyone)
    assert [line["name"] for line in log_of(held.out)[-2:]] == ["replica_ended"] * 2
    jobs.finish(held.spec)
    assert jobs.rows_of(held.out) == plain_rows
    check_accounts(held.out)


def test_a_replica_that_dies_meanwhile(
    inputs: dict[str, pathlib.Path], plain_rows: list[dict[str, Any]], tmp_path: pathlib.Path
) -> None:
    held = Held(spec_of(tmp_path, inputs["long"]))
    jobs.kill(held.replicas[:1])
    code, errors = held.go_on()
    assert code == 0, errors
    assert jobs.rows_of(held.out) == plain_rows
    started = [event["replica"] for event in jobs.events_of(held.out, "replica_started")]
    assert sorted(started[:2]) == [0, 1]
    assert "restarting" in errors
    check_accounts(held.out)


def test_an_input_that_no_replica_can_open(inputs: dict[str, pathlib.Path], tmp_path: pathlib.Path) -> None:
    spec = spec_of(tmp_path, inputs["long"], max_restarts=0)
    done = jobs.run("run", spec, faults="replica.open:*=raise 5")
    assert done.returncode == 2
    assert "no replica is left: OSError" in error_line(done.stderr)
    check_accounts(tmp_path / "out")
    jobs.finish(spec)


def test_a_disk_that_is_full_at_the_header(
    inputs: dict[str, pathlib.Path], plain_rows: list[dict[str, Any]], tmp_path: pathlib.Path
) -> None:
    spec, out = spec_of(tmp_path, inputs["long"]), tmp_path / "out"
    # Commits: the head start, the replicas, the header.
    process = jobs.start("run", spec, faults="manifest.before_write:3=raise 28")
    code, _, errors = jobs.end(process)
    assert (code, "no space left" in error_line(errors)) == (2, True)
    assert read_state(Folder(out)) is None
    assert [line["name"] for line in log_of(out)[-2:]] == ["replica_ended"] * 2
    jobs.finish(spec)
    assert jobs.rows_of(out) == plain_rows


def test_a_lock_that_is_lost_meanwhile(inputs: dict[str, pathlib.Path], tmp_path: pathlib.Path) -> None:
    held = Held(spec_of(tmp_path, inputs["long"]))
    lock = json.loads((held.out / "lock").read_text())
    (held.out / "lock").write_text(json.dumps({**lock, "token": "another", "pid": 1, "host": "elsewhere"}))
    before = log_of(held.out)
    code, errors = held.go_on()
    assert (code, "pid 1 on host elsewhere" in error_line(errors)) == (2, True)
    assert jobs.are_gone(held.everyone)
    assert log_of(held.out) == before


# -- when it is made ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "where", "is_long"),
    [
        ("plain", {}, False),
        ("chosen", {}, False),
        ("long", {}, True),
        ("chosen", {"where": "id > 1"}, True),
        ("chosen", {"sample": 0.5}, True),
        ("chosen", {"order": "auto"}, True),
        ("chosen", {"limit": 10}, False),
        ("plain", {"order": "prefix"}, False),
        ("plain", {"path": "no/such/file.jsonl"}, False),
        ("plain", {"path": "s3://bucket/prompts.jsonl"}, True),
        ("plain", {"path": "org/dataset"}, True),
    ],
)
def test_inputs_that_take_long(
    name: str, where: dict[str, Any], is_long: bool, inputs: dict[str, pathlib.Path]
) -> None:
    given = {"path": str(inputs[name]), **where}
    spec = JobSpec.model_validate({"model": "m", "input": given, "output": {"path": "o"}})
    assert takes_long(spec) == is_long


@pytest.mark.parametrize(
    ("parser", "where", "expected"),
    [
        (None, {}, True),
        ("qwen3", {}, False),
        ("qwen3", {"prompt_column": "text"}, True),
        ("qwen3", {"format": "openai"}, True),
        ("qwen3", {"format": "parquet"}, True),
    ],
)
def test_engines_that_wait_for_what_the_input_is(parser: str | None, where: dict[str, Any], expected: bool) -> None:
    model = {"name": "m", "reasoning_parser": parser}
    spec = JobSpec.model_validate({"model": model, "input": {"path": "p", **where}, "output": {"path": "o"}})
    assert is_known(spec) == expected


# -- real vLLM on the CPU ----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_real_engines(inputs: dict[str, pathlib.Path], tmp_path: pathlib.Path) -> None:
    """Without a head start; with one, the engine core in the replica; and with one, the core forked out of it."""
    pytest.importorskip("vllm")
    sections: dict[str, Any] = {
        "sampling": {"temperature": 0.0, "max_tokens": 8, "logprobs": 2},
        "engine": {"max_model_len": 512, "max_num_seqs": 16},
        "parallel": {"data_parallel_size": 1},
        "scripted": None,
    }
    found = []
    for name, is_apart in (("plain", "0"), ("long", "0"), ("long", "1")):
        folder = tmp_path / f"{name}-{is_apart}"
        folder.mkdir()
        done = jobs.finish(spec_of(folder, inputs[name], **sections), VLLM_ENABLE_V1_MULTIPROCESSING=is_apart)
        assert ("while the input is read" in done.stderr) == (name == "long")
        assert len(jobs.events_of(folder / "out", "replica_started")) == 1
        found.append(jobs.rows_of(folder / "out"))
    for rows in found[1:]:
        assert [row["token_ids"] for row in rows] == [row["token_ids"] for row in found[0]]
        for row, expected in zip(rows, found[0], strict=True):
            assert row["logprobs"] == pytest.approx(expected["logprobs"], abs=1e-3)
