"""The start of a job: replicas start while the input is read, the rows are the same, no refusal leaves one."""

import io
import json
import pathlib
import signal
from collections.abc import Iterator
from typing import Any, ClassVar, Self, cast

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fleets import fleet_of

import jobs
from batchinf.base.storage import Folder
from batchinf.coordinator import start
from batchinf.coordinator.display import ProgressDisplay
from batchinf.fleet.local.backend import LocalBackend
from batchinf.manifest.commit_log import read_lines
from batchinf.manifest.events import read_events
from batchinf.manifest.lines import StartedReplica
from batchinf.manifest.state import read_beginning, read_state

NUM_ROWS = 80
OUTPUT = {"rows_per_shard": 8}
ONE = {"data_parallel_size": 1}
ALL_ROWS = jobs.PROMPTS.read_text(encoding="utf-8").strip().split("\n")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("input") / "prompts.jsonl"
    path.write_text("".join(line + "\n" for line in ALL_ROWS[:NUM_ROWS]))
    return path


@pytest.fixture(scope="module")
def plain_rows() -> list[dict[str, Any]]:
    """The rows of an unhurt job. They do not depend on the rows after them."""
    return list(jobs.unhurt()[:NUM_ROWS])


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
    assert not state.of(StartedReplica)
    assert state.device_s == pytest.approx(sum(event["device_s"] for event in ended))


# -- which comes first -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["engine", "input"])
def test_the_engine_and_the_input_in_either_order(
    first: str, prompts: pathlib.Path, plain_rows: list[dict[str, Any]], tmp_path: pathlib.Path
) -> None:
    spec = spec_of(tmp_path, prompts, parallel=ONE)
    engine, reading = tmp_path / "engine", tmp_path / "reading"
    held = Held(spec, faults=f"engine.start=hold {engine},replica.open=hold {reading}")
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
    assert "starting 1 replica while the input is read" in errors
    assert jobs.rows_of(held.out) == plain_rows
    assert {row["attempts"] for row in jobs.table_of(held.out).select(["attempts"]).to_pylist()} == {1}
    assert len(jobs.events_of(held.out, "replica_started")) == len(jobs.events_of(held.out, "ready")) == 1
    check_accounts(held.out)
    lines = log_of(held.out)
    assert [line["kind"] for line in lines[:4]] == ["beginning", "started", "header", "extent"]
    assert lines[0]["job_id"] == lines[2]["job_id"]


def test_a_resume_too_starts_replicas_while_the_input_is_read(
    prompts: pathlib.Path, plain_rows: list[dict[str, Any]], tmp_path: pathlib.Path
) -> None:
    spec, out = spec_of(tmp_path, prompts), tmp_path / "out"
    assert jobs.run("run", spec, faults="coordinator.after_publish:2=kill").returncode == -9
    held = Held(spec)
    assert len(held.replicas) == 2
    code, errors = held.go_on()
    assert code == 0, errors
    assert jobs.rows_of(out) == plain_rows
    check_accounts(out)


@pytest.mark.parametrize("where", ["coordinator.before_drop", *jobs.slowly("coordinator.before_publish")])
def test_a_resume_without_rows_to_run_leaves_no_engine(
    where: str, prompts: pathlib.Path, plain_rows: list[dict[str, Any]], tmp_path: pathlib.Path
) -> None:
    """After the last commit none is started, wherever its part is."""
    spec, out = spec_of(tmp_path, prompts, parallel=ONE, input={"limit": 1}), tmp_path / "out"
    assert jobs.run("run", spec, faults=f"{where}=kill").returncode == -9
    jobs.finish(spec)
    assert len(jobs.events_of(out, "replica_started")) == 1
    assert len(jobs.events_of(out, "ready")) == 1
    assert "was already done" in jobs.finish(spec).stdout
    assert jobs.state_of(out).last_epoch == 2
    assert jobs.rows_of(out) == plain_rows[:1]
    check_accounts(out)


def test_rows_that_are_chosen_and_ordered(
    prompts: pathlib.Path, plain_rows: list[dict[str, Any]], tmp_path: pathlib.Path
) -> None:
    held = Held(spec_of(tmp_path, prompts, input={"where": "language != 'en'", "order": "prefix"}))
    assert len(held.replicas) == 2
    code, errors = held.go_on()
    assert code == 0, errors
    rows = sorted(jobs.rows_of(held.out), key=lambda row: row["row_index"])
    assert rows == [row for row in plain_rows if row["language"] != "en"]


@pytest.mark.slow
def test_a_batch_file_that_only_later_lines_show(tmp_path: pathlib.Path) -> None:
    """Engines start with other arguments for it, so those that started as for plain prompts are ended."""
    path, body = tmp_path / "batch.jsonl", {"model": str(jobs.MODEL), "prompt": "Say something.", "max_tokens": 4}
    requests = [{"custom_id": str(n), "method": "POST", "url": "/v1/completions", "body": body} for n in range(150)]
    rows = [*({"prompt": "Say something."} for _ in range(120)), *requests]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec = spec_of(tmp_path, path, input={"id_column": None}, output={"keep_columns": []}, max_error_rate=1.0)
    jobs.finish(spec)
    rows = jobs.rows_of(tmp_path / "out")
    assert [row["error_type"] for row in rows] == ["unsupported_request"] * 120 + [None] * 150
    names = [event["incarnation"] for event in jobs.events_of(tmp_path / "out", "replica_started")]
    assert names == [f"000001.{number:04d}" for number in range(1, 5)]
    check_accounts(tmp_path / "out")
    # That it is one is known from the first lines, or from the job.
    path.write_text("".join(json.dumps(row) + "\n" for row in requests))
    spec = spec_of(tmp_path, path, input={"id_column": None}, output={"keep_columns": [], "path": f"{tmp_path}/plain"})
    assert jobs.run("run", spec, faults="coordinator.after_publish:2=kill").returncode == -9
    jobs.finish(spec)
    assert len(jobs.events_of(tmp_path / "plain", "replica_started")) == 4
    assert [row["id"] for row in jobs.rows_of(tmp_path / "plain")] == [row["custom_id"] for row in requests]


# -- what is wrong -----------------------------------------------------------------------------------------------------

# What is wrong, the words about it, and whether replicas start before it is found.
WRONG = {
    "no such file": ("does not exist", False),
    "no such column": ("the input has no column 'nothing'", False),
    "no such model": ("model.name", False),
    "another model": ("each of the first 9 lines", False),
    "other settings": ("sampling.max_tokens: the job has 32, now it is 5", False),
    "another input": ("1 file is changed: prompts.jsonl", True),
    "a later file": ("b.parquet cannot be read as parquet", True),
    "no rows left": ("leaves none of the 80 input rows", True),
    "not SQL": ("input.where", False),
    "no such column in SQL": ("there is no column 'langauge'", False),
    "a struct that is none": ("input.where", True),
}


QUICK = ["no such column", "another input", "no rows left"]


@pytest.mark.parametrize("wrong", [*QUICK, *jobs.slowly(*(wrong for wrong in WRONG if wrong not in QUICK))])
def test_what_is_wrong_is_said_and_no_replica_stays(wrong: str, prompts: pathlib.Path, tmp_path: pathlib.Path) -> None:
    words, starts = WRONG[wrong]
    path, section, has_begun = tmp_path / "prompts.jsonl", {}, wrong in ("other settings", "another input")
    path.write_text(prompts.read_text())
    if has_begun:
        killed = jobs.run("run", spec_of(tmp_path, path), faults="coordinator.after_publish:2=kill")
        assert killed.returncode == -9
    match wrong:
        case "no such file":
            path.unlink()
        case "no such column":
            section = {"input": {"prompt_column": "nothing"}}
        case "no such model":
            section = {"model": str(tmp_path / "nothing")}
        case "another model":
            path, body = tmp_path / "batch.jsonl", {"model": "gpt-4o", "prompt": "Hi"}
            request = {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": body}
            path.write_text(f"{json.dumps(request)}\n" * 9)
            section = {"input": {"id_column": None}, "output": {"keep_columns": []}}
        case "other settings":
            section = {"sampling": {"max_tokens": 5}}
        case "another input":
            path.write_text(path.read_text().replace("a", "b"))
        case "a later file":
            path = tmp_path / "input"
            path.mkdir()
            pq.write_table(pa.Table.from_pylist([json.loads(line) for line in ALL_ROWS[:9]]), path / "a.parquet")
            (path / "b.parquet").write_bytes(bytes(100))
        case "no rows left":
            section = {"input": {"where": "language = 'none'"}}
        case "not SQL":
            section = {"input": {"where": "language ="}}
        case "no such column in SQL":
            section = {"input": {"where": "langauge = 'en'"}}
        case "a struct that is none":
            section = {"input": {"where": "language.code = 'en'"}}
    before = len(jobs.events_of(tmp_path / "out", "replica_started")) if has_begun else 0
    if starts:
        held = Held(spec_of(tmp_path, path, **section), point="start.replicas")
        assert len(held.replicas) == 2
        code, errors = held.go_on()
    else:
        done = jobs.run("run", spec_of(tmp_path, path, **section))
        code, errors = done.returncode, done.stderr
    assert code == 2, errors
    assert words in (error_line(errors) if wrong != "other settings" else errors)
    assert ("while the input is read" in errors) == starts
    folder = Folder(tmp_path / "out")
    assert (read_state(folder) is not None) == has_begun
    state = read_state(folder) or read_beginning(folder)
    assert len(jobs.events_of(tmp_path / "out", "replica_started")) - before == (2 if starts else 0)
    if starts or not has_begun:
        assert not state.of(StartedReplica)
    if wrong in ("no such file", "no such model"):
        assert not folder.root.exists()
    (tmp_path / "prompts.jsonl").write_text(prompts.read_text())
    jobs.finish(spec_of(tmp_path, tmp_path / "prompts.jsonl"))
    assert len(jobs.rows_of(folder.root)) == NUM_ROWS
    check_accounts(folder.root)


# -- what comes between ------------------------------------------------------------------------------------------------


@pytest.mark.real_starts
@pytest.mark.parametrize(
    "is_stopped", [False, *jobs.slowly(True)], ids=["replicas that hear it", "replicas that stand still"]
)
def test_a_coordinator_that_is_killed(
    is_stopped: bool, prompts: pathlib.Path, plain_rows: list[dict[str, Any]], tmp_path: pathlib.Path
) -> None:
    held = Held(spec_of(tmp_path, prompts))
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
    groups = {started.identity["pgid"] for started in before.of(StartedReplica)}
    assert groups == {replica.pid for replica in held.replicas}
    jobs.finish(held.spec)
    assert jobs.are_gone(held.everyone)
    assert jobs.rows_of(held.out) == plain_rows
    assert jobs.state_of(held.out).header.job_id == before.job_id
    assert len(jobs.events_of(held.out, "replica_started")) == 4
    ended = [event["incarnation"] for event in jobs.events_of(held.out, "replica_ended")]
    assert sorted(ended[:2]) == sorted(started.incarnation for started in before.of(StartedReplica))
    check_accounts(held.out)


def test_several_lives_that_end_before_the_header(
    prompts: pathlib.Path, plain_rows: list[dict[str, Any]], tmp_path: pathlib.Path
) -> None:
    spec, out = spec_of(tmp_path, prompts), tmp_path / "out"
    for point in ("start.replicas", "job.input_open", "manifest.mid_line:1", "manifest.mid_line:2"):
        assert jobs.run("run", spec, faults=f"{point}=kill").returncode == -9
        assert read_state(Folder(out)) is None
    begun_as = read_beginning(Folder(out)).job_id
    jobs.finish(spec)
    assert jobs.rows_of(out) == plain_rows
    assert jobs.state_of(out).header.job_id == begun_as
    check_accounts(out)
    assert jobs.run("check", out, "--deep").returncode == 0


def test_ctrl_c(prompts: pathlib.Path, plain_rows: list[dict[str, Any]], tmp_path: pathlib.Path) -> None:
    held = Held(spec_of(tmp_path, prompts))
    held.process.send_signal(signal.SIGINT)
    code, errors = held.go_on()
    assert code == 75, errors
    assert jobs.are_gone(held.everyone)
    assert [line["kind"] for line in log_of(held.out)[-2:]] == ["ended"] * 2
    jobs.finish(held.spec)
    assert jobs.rows_of(held.out) == plain_rows
    check_accounts(held.out)


def test_a_replica_that_dies_meanwhile(
    prompts: pathlib.Path, plain_rows: list[dict[str, Any]], tmp_path: pathlib.Path
) -> None:
    held = Held(spec_of(tmp_path, prompts))
    jobs.kill(held.replicas[:1])
    code, errors = held.go_on()
    assert code == 0, errors
    assert jobs.rows_of(held.out) == plain_rows
    started = [event["replica"] for event in jobs.events_of(held.out, "replica_started")]
    assert sorted(started[:2]) == [0, 1]
    assert "restarting" in errors
    check_accounts(held.out)


def test_an_input_that_no_replica_can_open(prompts: pathlib.Path, tmp_path: pathlib.Path) -> None:
    spec = spec_of(tmp_path, prompts, max_restarts=0)
    done = jobs.run("run", spec, faults="replica.open:*=raise 5")
    assert done.returncode == 2
    assert "no replica is left: OSError" in error_line(done.stderr)
    assert "run the same command again, with --fresh if that changes what decides" in error_line(done.stderr)
    check_accounts(tmp_path / "out")
    jobs.finish(spec)


def test_a_disk_that_is_full_at_the_header(
    prompts: pathlib.Path, plain_rows: list[dict[str, Any]], tmp_path: pathlib.Path
) -> None:
    spec, out = spec_of(tmp_path, prompts), tmp_path / "out"
    # Commits after the first, with which the log is created: the replicas, the header.
    process = jobs.start("run", spec, faults="manifest.before_write:2=raise 28")
    code, _, errors = jobs.end(process)
    assert (code, "no space left" in error_line(errors)) == (2, True)
    assert read_state(Folder(out)) is None
    assert [line["kind"] for line in log_of(out)[-2:]] == ["ended"] * 2
    jobs.finish(spec)
    assert jobs.rows_of(out) == plain_rows


def test_a_lock_that_is_lost_meanwhile(prompts: pathlib.Path, tmp_path: pathlib.Path) -> None:
    held = Held(spec_of(tmp_path, prompts))
    lock = json.loads((held.out / "lock").read_text())
    (held.out / "lock").write_text(json.dumps({**lock, "token": "another", "pid": 1, "host": "elsewhere"}))
    before = log_of(held.out)
    code, errors = held.go_on()
    assert (code, "pid 1 on host elsewhere" in error_line(errors)) == (2, True)
    assert jobs.are_gone(held.everyone)
    assert log_of(held.out) == before


class Check:
    """In the place of vLLM's look at a structure: it is done at the fourth question."""

    num_asked = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    @property
    def is_done(self) -> bool:
        self.num_asked += 1
        return self.num_asked == 4

    def lines(self) -> list[str]:
        return ["structured outputs: choice, compiled by xgrammar"]


def test_the_progress_is_shown_while_vllm_looks_at_a_structure(tmp_path: pathlib.Path) -> None:
    stream, check, launch = io.StringIO(), cast(Any, Check()), cast(Any, None)
    start._await([check], fleet_of(LocalBackend(), [], launch, tmp_path), 12, ProgressDisplay(stream))
    first, second, last = stream.getvalue().splitlines()
    assert (first, last) == (start.CHECKING, "structured outputs: choice, compiled by xgrammar")
    assert second.startswith("starting: 0/12")


# -- real vLLM on the CPU ----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_real_engines(prompts: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """With the engine core in the replica, and with the core forked out of it."""
    pytest.importorskip("vllm")
    sections: dict[str, Any] = {
        "sampling": {"temperature": 0.0, "max_tokens": 8, "logprobs": 2},
        "engine": {"max_model_len": 512, "max_num_seqs": 16},
        "parallel": ONE,
        "scripted": None,
    }
    found = []
    for is_apart in ("0", "1"):
        folder = tmp_path / is_apart
        folder.mkdir()
        jobs.finish(spec_of(folder, prompts, **sections), VLLM_ENABLE_V1_MULTIPROCESSING=is_apart)
        assert len(jobs.events_of(folder / "out", "replica_started")) == 1
        found.append(jobs.rows_of(folder / "out"))
    assert [row["token_ids"] for row in found[1]] == [row["token_ids"] for row in found[0]]
    for row, expected in zip(found[1], found[0], strict=True):
        assert row["logprobs"] == pytest.approx(expected["logprobs"], abs=1e-3)


@pytest.mark.parametrize("content", ["", "\n\n"])
def test_an_input_that_is_there_without_rows_is_no_error(content: str, tmp_path: pathlib.Path) -> None:
    """One of the files of a pipeline may be empty. Once it has rows, the same command runs them."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text(content)
    spec = jobs.spec_of(tmp_path, input={"path": str(rows), "id_column": None}, output={"keep_columns": []})
    for arguments in ((), (), ("--slice", "0/2"), ("--extend",)):
        done = jobs.finish(spec, *arguments)
        assert done.stdout.startswith(f"done: {rows} has no rows, so nothing ran, and {tmp_path / 'out'}")
        assert len(done.stdout.splitlines()) == 1
    assert jobs.run("head", tmp_path / "out").returncode == 2
    rows.unlink()
    gone = jobs.run("run", spec)
    assert (gone.returncode, "does not exist" in gone.stderr) == (2, True)
    rows.write_text('{"prompt": "Once"}\n')
    jobs.finish(spec)
    assert len(jobs.rows_of(tmp_path / "out")) == 1
    # What a job has done is not gone because its input is.
    rows.write_text(content)
    drifted = jobs.run("run", spec)
    assert drifted.returncode == 2
    assert len(jobs.rows_of(tmp_path / "out")) == 1


def test_files_without_rows_beside_others_are_named(tmp_path: pathlib.Path) -> None:
    (tmp_path / "in").mkdir()
    for name, content in (("a", ""), ("b", '{"prompt": "Once"}\n'), ("c", "\n")):
        (tmp_path / "in" / f"{name}.jsonl").write_text(content)
    spec = jobs.spec_of(tmp_path, input={"path": str(tmp_path / "in"), "id_column": None}, output={"keep_columns": []})
    said = "note: 2 input files without rows: a.jsonl, c.jsonl"
    assert said in jobs.run("validate", spec).stdout.splitlines()
    assert said in jobs.finish(spec).stderr.splitlines()
    assert len(jobs.rows_of(tmp_path / "out")) == 1


def test_engines_start_again_if_only_a_later_row_shows_that_the_input_is_a_batch_file(tmp_path: pathlib.Path) -> None:
    request = {"method": "POST", "url": "/v1/completions"}
    lines: list[dict[str, Any]] = [{"custom_id": str(row), **request, "prompt": "Once"} for row in range(400)]
    lines.append(
        {"custom_id": "last", **request, "body": {"model": str(jobs.MODEL), "prompt": "Once", "max_tokens": 2}}
    )
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    where = {"input": {"path": str(path)}, "output": {"path": str(tmp_path / "out")}}
    (tmp_path / "job.yaml").write_text(
        json.dumps({"model": str(jobs.MODEL), **where, "scripted": {}, "parallel": ONE, "max_error_rate": 1.0})
    )
    jobs.finish(tmp_path / "job.yaml")
    rows = jobs.rows_of(tmp_path / "out")
    assert [row["id"] for row in rows if row["error_type"] is None] == ["last"]
    starts = [event.fields for event in read_events(Folder(tmp_path / "out")) if event.name == "replica_started"]
    assert [each["incarnation"] for each in starts] == ["000001.0001", "000001.0002"]
