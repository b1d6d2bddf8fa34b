"""Twelve defects that a fault hunt found. Each test asserts the right behaviour and fails until its defect is mended.

A setup that fails raises `SetupError`, which no mark expects: such a test fails in earnest, mended or not.
"""

import contextlib
import ctypes
import datetime
import json
import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import batchinf
import jobs
from batchinf.base.errors import UserError

ONE_REPLICA = {"data_parallel_size": 1}
# Fewer are not cut into several shards.
FEW = 7
Done = subprocess.CompletedProcess[str]


class SetupError(Exception):
    """What a test needs did not come about."""


def spec_over(folder: pathlib.Path, path: pathlib.Path, **sections: Any) -> pathlib.Path:
    """A spec for one quick replica over an input; sections merged over that."""
    quick: dict[str, Any] = {
        "input": {"path": str(path), **sections.pop("input", {})},
        "sampling": {"logprobs": None, "max_tokens": 6},
        "output": {"keep_columns": [], "rows_per_shard": 10, **sections.pop("output", {})},
        "parallel": ONE_REPLICA,
        "scripted": {"step_s": 0.0},
        "max_error_rate": 1.0,
    }
    return jobs.spec_of(folder, **{**quick, **sections})


def write_lines(path: pathlib.Path, rows: Sequence[dict[str, Any]]) -> pathlib.Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_parquet(path: pathlib.Path, rows: Sequence[dict[str, Any]]) -> pathlib.Path:
    """Rows of equal lengths make files of equal sizes and footers."""
    pq.write_table(pa.Table.from_pylist(rows), path, compression="none", use_dictionary=False, write_statistics=False)
    return path


def numbered(num_rows: int, first: int = 0) -> list[dict[str, Any]]:
    """Rows whose ids and prompts have the same length each."""
    return [{"id": f"row-{n:04d}", "prompt": f"Say {n:04d}."} for n in range(first, first + num_rows)]


def finished(spec: pathlib.Path, *arguments: str) -> Done:
    """Run a job that has to end well for the test to mean anything."""
    done = jobs.run("run", spec, *arguments)
    if done.returncode != 0:
        raise SetupError(done.stderr)
    return done


def killed(spec: pathlib.Path, where: str) -> None:
    """Run a job that dies at a fault point."""
    done = jobs.run("run", spec, faults=f"{where}=kill")
    if done.returncode != -9:
        raise SetupError(done.stderr)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The folder of a finished job's output folder; two of its rows have one id."""
    folder = tmp_path_factory.mktemp("done")
    rows = numbered(FEW)
    rows[3]["id"] = rows[1]["id"]
    finished(spec_over(folder, write_lines(folder / "prompts.jsonl", rows)))
    return folder


@pytest.fixture(scope="module")
def sliced(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The folder of the output folder of a job in two slices, both done."""
    folder = tmp_path_factory.mktemp("sliced")
    spec = spec_over(folder, write_lines(folder / "prompts.jsonl", numbered(20)))
    for index in range(2):
        finished(spec, "--slice", f"{index}/2")
    return folder


def copy_of(folder: pathlib.Path, copy: pathlib.Path) -> pathlib.Path:
    """Copy such a folder; the spec of the copy."""
    shutil.copytree(folder, copy, dirs_exist_ok=True)
    return spec_over(copy, copy / "prompts.jsonl")


@contextlib.contextmanager
def held(spec: pathlib.Path, where: str, *arguments: str, may_end: bool = False) -> Iterator[Callable[[], Done]]:
    """A job that stands still at a fault point; gives the function that lets it go on and waits for its end.

    may_end: it may also end before it comes there.
    """
    marker = spec.parent / f"held at {where}"
    process = jobs.start("run", spec, *arguments, faults=f"{where}=hold {marker}")

    def go_on() -> Done:
        marker.unlink(missing_ok=True)
        code, output, errors = jobs.end(process)
        return subprocess.CompletedProcess(process.args, code, output, errors)

    try:
        jobs.wait_until(lambda: (marker.exists() and marker.read_text()) or process.poll() is not None)
        if process.poll() is not None and not may_end:
            raise SetupError(process.communicate())
        yield go_on
    finally:
        marker.unlink(missing_ok=True)
        jobs.kill(jobs.family(process.pid))


def assert_refused(done: Done, *words: str) -> None:
    """Exit code 2 and one clear line, which has these words."""
    assert done.returncode == 2, (done.stdout, done.stderr)
    assert "Traceback" not in done.stderr
    [line] = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    for word in words:
        assert word in line


def rows_in(out: pathlib.Path) -> list[dict[str, Any]]:
    """The output rows as `batchinf.open` gives them; a refusal to open them fails the test."""
    try:
        rows: list[dict[str, Any]] = batchinf.open(out).table().drop_columns(["attempts"]).to_pylist()
    except (OSError, UserError) as error:
        raise AssertionError(f"cannot be read: {error}") from error
    return rows


# -- 1 and 2: an input that changes ------------------------------------------------------------------------------------


def test_a_parquet_file_shuffled_between_kill_and_resume_is_noticed(tmp_path: pathlib.Path) -> None:
    rows, path = numbered(200), tmp_path / "prompts.parquet"
    write_parquet(path, rows)
    size, spec = path.stat().st_size, spec_over(tmp_path, path, output={"rows_per_shard": 20})
    killed(spec, "coordinator.after_publish:4")
    write_parquet(path, rows[::-1])
    if path.stat().st_size != size:
        raise SetupError("the file has another size")
    assert_refused(jobs.run("run", spec), path.name)


def test_a_parquet_file_shuffled_after_it_was_cut_is_noticed(tmp_path: pathlib.Path) -> None:
    """The first slice dies when the rows of all slices are chosen; other bytes would give these places other rows."""
    rows = numbered(FEW)
    path = write_parquet(tmp_path / "prompts.parquet", rows)
    spec = spec_over(tmp_path, path, input={"where": f"id < '{rows[FEW // 2]['id']}'"})
    cut = jobs.run("run", spec, "--slice", "0/2", faults="cut.after_record=kill")
    if cut.returncode != -9:
        raise SetupError(cut.stderr)
    write_parquet(path, rows[::-1])
    assert_refused(jobs.run("run", spec, "--slice", "0/2"), "prompts.parquet is not the input")


def test_a_line_edited_in_place_while_the_job_runs_is_noticed(tmp_path: pathlib.Path) -> None:
    path = write_lines(tmp_path / "prompts.jsonl", numbered(FEW))
    # The row's prompt is read by then; its id is read when the part is written.
    with held(spec_over(tmp_path, path), "engine.output.0") as go_on:
        with path.open("r+") as file:
            file.write(json.dumps({"id": "new-0000", "prompt": "Say more."}) + "\n")
        done = go_on()
    assert_refused(done, path.name)
    assert not list((tmp_path / "out" / "parts").iterdir())


def test_a_file_replaced_before_it_is_opened_is_noticed(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "prompts"
    write_lines(folder / "a.jsonl", numbered(20))
    path = write_lines(folder / "b.jsonl", numbered(20, first=20))
    with held(spec_over(tmp_path, folder, output={"rows_per_shard": 20}), "feeder.begin") as go_on:
        write_lines(tmp_path / "other.jsonl", numbered(20, first=9000)).replace(path)
        done = go_on()
    assert_refused(done, path.name)
    ids = {row["id"] for part in (tmp_path / "out" / "parts").iterdir() for row in pq.read_table(part).to_pylist()}
    assert ids <= {row["id"] for row in numbered(20)}


def test_a_parquet_file_shuffled_while_the_job_runs_is_noticed(tmp_path: pathlib.Path) -> None:
    path = write_parquet(tmp_path / "prompts.parquet", numbered(FEW))
    # The prompts are read by then; the ids are read for the first time when the part is written.
    with held(spec_over(tmp_path, path), "engine.output.0") as go_on:
        write_parquet(path, numbered(FEW)[::-1])
        done = go_on()
    assert_refused(done, path.name)
    assert not list((tmp_path / "out" / "parts").iterdir())
    write_parquet(path, numbered(FEW))
    finished(tmp_path / "job.yaml")
    assert [row["id"] for row in rows_in(tmp_path / "out")] == [row["id"] for row in numbered(FEW)]


def test_an_input_that_is_touched_or_grows_while_the_job_runs(tmp_path: pathlib.Path) -> None:
    path = write_lines(tmp_path / "prompts.jsonl", numbered(FEW))
    with held(spec_over(tmp_path, path), "engine.output.0") as go_on:
        with path.open("a") as file:
            file.write(json.dumps({"id": "new-0000", "prompt": "Say more."}) + "\n")
        done = go_on()
    assert done.returncode == 0, done.stderr
    assert [row["id"] for row in rows_in(tmp_path / "out")] == [row["id"] for row in numbered(FEW)]


@pytest.mark.slow
@pytest.mark.parametrize("order", ["input", "prefix"])
def test_a_restored_backup_is_the_same_input(order: str, tmp_path: pathlib.Path) -> None:
    path = write_parquet(tmp_path / "prompts.parquet", numbered(200))
    spec = spec_over(tmp_path, path, input={"order": order}, output={"rows_per_shard": 20})
    killed(spec, "coordinator.after_publish:4")
    shutil.copyfile(path, tmp_path / "backup")
    (tmp_path / "backup").replace(path)
    finished(spec)
    assert sorted(row["id"] for row in rows_in(tmp_path / "out")) == [row["id"] for row in numbered(200)]


# -- 3: columns that differ in case alone ------------------------------------------------------------------------------


def test_where_tells_columns_apart_that_differ_in_case(tmp_path: pathlib.Path) -> None:
    rows = [{**row, "Lang": ["en", "de"][n % 2], "lang": ["de", "en"][n % 2]} for n, row in enumerate(numbered(20))]
    path = write_lines(tmp_path / "prompts.jsonl", rows)
    finished(spec_over(tmp_path, path, input={"where": "lang = 'en'"}))
    assert [row["id"] for row in rows_in(tmp_path / "out")] == [row["id"] for row in rows if row["lang"] == "en"]


def test_a_kept_column_that_differs_from_an_output_column_in_case_is_refused(tmp_path: pathlib.Path) -> None:
    path = write_lines(tmp_path / "prompts.jsonl", [{**row, "Error_Type": "old"} for row in numbered(20)])
    spec = spec_over(tmp_path, path, output={"keep_columns": ["Error_Type"]})
    assert_refused(jobs.run("run", spec), "got Error_Type beside the output's column error_type")


# -- 4: values where types meet ----------------------------------------------------------------------------------------


def assert_kept(spec: pathlib.Path, name: str, values: Sequence[Any], same: Callable[[Any, Any], bool]) -> None:
    """Each value of a column is stored as it is, or its row is an error, or the job is refused by the column's name."""
    done = jobs.run("run", spec)
    if done.returncode == 2:
        assert_refused(done, "'reading'")
        return
    if done.returncode != 0:
        raise SetupError(done.stderr)
    for row, value in zip(jobs.table_of(spec.parent / "out").to_pylist(), values, strict=True):
        assert row["error_type"] is not None or same(row[name], value), (row[name], value)


def same_number(stored: Any, value: int | float) -> bool:
    """Whether they are equal exactly; a number may be stored as its text too."""
    return stored is not None and Fraction(stored) == Fraction(value)


def parquet_files(folder: pathlib.Path, **arrays: pa.Array) -> pathlib.Path:
    """A folder of files, each with one of these arrays as its column `reading`."""
    folder.mkdir()
    for name, array in arrays.items():
        prompts = [f"Say {name} {n}." for n in range(len(array))]
        pq.write_table(pa.table({"prompt": prompts, "reading": array}), folder / f"{name}.parquet")
    return folder


WIDE = [2**53, 2**53 + 1]


def test_uint64_beside_int64_keeps_its_values(tmp_path: pathlib.Path) -> None:
    arrays = {"a": pa.array([2**64 - 1, 7], pa.uint64()), "b": pa.array([-1], pa.int64())}
    path = parquet_files(tmp_path / "prompts", **arrays)
    spec = spec_over(tmp_path, path, input={"id_column": "reading"})
    assert_kept(spec, "id", [2**64 - 1, 7, -1], same_number)


def test_exclude_tells_uint64_from_int64(tmp_path: pathlib.Path) -> None:
    for name, array in (("first", pa.array([-1, 7], pa.int64())), ("second", pa.array([2**64 - 1, 7], pa.uint64()))):
        (tmp_path / name).mkdir()
        path = parquet_files(tmp_path / name / "prompts", a=array)
        exclude = {"exclude": {"job": str(tmp_path / "first" / "out"), "on": "id"}} if name == "second" else {}
        done = jobs.run("run", spec_over(tmp_path / name, path, input={"id_column": "reading", **exclude}))
        assert done.returncode == 0, done.stderr
    assert [row["id"] for row in rows_in(tmp_path / "second" / "out")] == [2**64 - 1]


def test_timestamps_beyond_nanoseconds_keep_their_values(tmp_path: pathlib.Path) -> None:
    times = [datetime.datetime(1000, 1, 2, 3, 4, 5), datetime.datetime(3000, 1, 2), datetime.datetime(2000, 1, 2)]
    arrays = {"a": pa.array(times[:2], pa.timestamp("us")), "b": pa.array(times[2:], pa.timestamp("ns"))}
    path = parquet_files(tmp_path / "prompts", **arrays)
    spec = spec_over(tmp_path, path, input={"id_column": None}, output={"keep_columns": ["reading"]})
    assert_kept(spec, "reading", times, lambda stored, value: stored == value)


def test_wide_integers_beside_floats_of_another_file_keep_their_values(tmp_path: pathlib.Path) -> None:
    path = parquet_files(tmp_path / "prompts", a=pa.array(WIDE), b=pa.array([0.5]))
    spec = spec_over(tmp_path, path, input={"id_column": None}, output={"keep_columns": ["reading"]})
    assert_kept(spec, "reading", [*WIDE, 0.5], same_number)


def test_wide_integers_beside_floats_of_other_lines_keep_their_values(tmp_path: pathlib.Path) -> None:
    values = [*WIDE, 0.5]
    path = write_lines(tmp_path / "prompts.jsonl", [{"prompt": f"Say {x}.", "reading": x} for x in values])
    spec = spec_over(tmp_path, path, input={"id_column": None}, output={"keep_columns": ["reading"]})
    assert_kept(spec, "reading", values, same_number)


def test_ids_that_are_no_unicode_are_error_rows(tmp_path: pathlib.Path) -> None:
    """Both would be stored as `?`."""
    rows = [{"id": text, "prompt": "Say it."} for text in ("\ud800", "\ud801", "good")]
    finished(spec_over(tmp_path, write_lines(tmp_path / "prompts.jsonl", rows)))
    after = rows_in(tmp_path / "out")
    assert [row["error_type"] for row in after] == ["unstorable_value", "unstorable_value", None]
    assert "'\\ud801' has a lone surrogate" in after[1]["error_message"]
    assert all(row["text"] for row in after)


# -- 5 to 8: where a job lies ------------------------------------------------------------------------------------------


def test_a_slice_begun_anew_is_read_once(sliced: pathlib.Path, tmp_path: pathlib.Path) -> None:
    finished(copy_of(sliced, tmp_path), "--slice", "1/2", "--fresh")
    parts = sorted((tmp_path / "out").glob("slice-*/parts/*.parquet"))
    assert [row["row_index"] for part in parts for row in pq.read_table(part).to_pylist()] == list(range(20))


@pytest.mark.parametrize("command", ["run", "validate"])
def test_an_output_folder_inside_the_input_folder_is_refused(command: str, tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "prompts"
    folder.mkdir()
    pq.write_table(pa.Table.from_pylist(numbered(20)), folder / "a.parquet")
    spec = spec_over(tmp_path, folder, output={"path": str(folder / "out")})
    assert_refused(jobs.run(command, spec), "output.path", str(folder / "out"))


def assert_one_of_them(out: pathlib.Path, whole: Done, first_half: Done) -> None:
    """One of the two is done and the other is refused, and readers find the rows of the one that is done."""
    assert sorted((whole.returncode, first_half.returncode)) == [0, 2], (whole.stderr, first_half.stderr)
    expected = numbered(20 if whole.returncode == 0 else 10)
    assert [row["id"] for row in rows_in(out)] == [row["id"] for row in expected]


def test_a_slice_that_begins_while_the_whole_job_opens_its_input(tmp_path: pathlib.Path) -> None:
    spec = spec_over(tmp_path, write_lines(tmp_path / "prompts.jsonl", numbered(20)))
    with held(spec, "job.input_open", may_end=True) as go_on:
        first_half = jobs.run("run", spec, "--slice", "0/2")
        whole = go_on()
    assert_one_of_them(tmp_path / "out", whole, first_half)


@pytest.mark.parametrize("first", ["the slice", "the whole job"])
def test_the_later_of_two_that_begin_is_refused_and_leaves_nothing(first: str, tmp_path: pathlib.Path) -> None:
    spec = spec_over(tmp_path, write_lines(tmp_path / "prompts.jsonl", numbered(20)))
    # Both have passed all checks. The whole job has written its record, and has not put it in place.
    slice_begins, whole_begins = "cut.before_record", "storage.create.before_fsync:3"
    with held(spec, slice_begins, "--slice", "0/2") as slice_goes_on, held(spec, whole_begins) as whole_goes_on:
        if first == "the slice":
            first_half, whole = slice_goes_on(), whole_goes_on()
        else:
            whole, first_half = whole_goes_on(), slice_goes_on()
    assert (whole if first == "the whole job" else first_half).returncode == 0
    assert_one_of_them(tmp_path / "out", whole, first_half)


def test_fresh_leaves_the_old_job_where_the_new_one_cannot_begin(done: pathlib.Path, tmp_path: pathlib.Path) -> None:
    ended = jobs.run("run", copy_of(done, tmp_path), "--fresh", "--set", "input.prompt_column=nothing")
    if ended.returncode != 2 or "nothing" not in ended.stderr:
        raise SetupError(ended.stderr)
    assert rows_in(tmp_path / "out") == rows_in(done / "out")


def test_fresh_begins_a_job_in_slices_anew(sliced: pathlib.Path, tmp_path: pathlib.Path) -> None:
    spec, out = copy_of(sliced, tmp_path), tmp_path / "out"
    before = {path.read_bytes() for path in out.glob("slice-*/parts/*.parquet")}
    done = jobs.run("run", spec, "--fresh", "--set", "sampling.max_tokens=3")
    assert done.returncode == 0, done.stderr
    rows = rows_in(out)
    assert [row["row_index"] for row in rows] == list(range(20))
    assert max(row["num_output_tokens"] for row in rows) <= 3
    assert before <= {path.read_bytes() for path in tmp_path.rglob("*.parquet")}


# -- 9 and 10: files that go while they are in use ---------------------------------------------------------------------


class Opens:
    """Says whether a file has been opened, whichever file has that name by now (inotify(7))."""

    def __init__(self, path: pathlib.Path) -> None:
        self._name = os.fsencode(path.name)
        libc = ctypes.CDLL(None, use_errno=True)
        self._descriptor = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        in_open = 0x20
        if self._descriptor < 0 or libc.inotify_add_watch(self._descriptor, os.fsencode(path.parent), in_open) < 0:
            raise SetupError(os.strerror(ctypes.get_errno()))

    def seen(self) -> bool:
        """Whether it was opened since the last call."""
        try:
            return self._name in os.read(self._descriptor, 1 << 16)
        except BlockingIOError:
            return False

    def close(self) -> None:
        os.close(self._descriptor)


@contextlib.contextmanager
def replaced_once_opened(part: pathlib.Path, others: Sequence[bytes]) -> Iterator[list[int]]:
    """Put these files in turn in the part's place, each as soon as a call that has opened it returns.

    Gives a list that grows with each of them.
    """
    opens, swaps = Opens(part), list[int]()
    spare = part.parents[1] / "spare.parquet"

    def look(*_: object) -> None:
        if opens.seen():
            swaps.append(len(swaps))
            spare.write_bytes(others[len(swaps) % len(others)])
            spare.replace(part)

    sys.setprofile(look)
    try:
        yield swaps
    finally:
        sys.setprofile(None)
        opens.close()


def test_a_part_replaced_while_it_is_read(done: pathlib.Path, tmp_path: pathlib.Path) -> None:
    spec = copy_of(done, tmp_path)
    [part] = (tmp_path / "out" / "parts").iterdir()
    versions, tables = [part.read_bytes()], [pq.read_table(part)]
    finished(spec, "--retry", "true", "--set", "sampling.max_tokens=60")
    versions.append(part.read_bytes())
    tables.append(pq.read_table(part))
    results = batchinf.open(tmp_path / "out")
    with replaced_once_opened(part, versions) as swaps:
        try:
            found = results.table()
        except (OSError, pa.ArrowException) as error:
            raise AssertionError(f"cannot be read: {error}") from error
    if not swaps:
        raise SetupError("nothing was opened")
    assert found in tables


def test_a_manifest_deleted_under_a_running_job_is_noticed(tmp_path: pathlib.Path) -> None:
    spec = spec_over(tmp_path, write_lines(tmp_path / "prompts.jsonl", numbered(20)))
    with held(spec, "coordinator.before_publish:2") as go_on:
        shutil.rmtree(tmp_path / "out" / "manifest")
        done = go_on()
    assert_refused(done, "manifest")


# -- 11 and 12: what is not checked ------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["run", "validate"])
def test_stop_token_ids_outside_the_vocabulary_are_refused(command: str, tmp_path: pathlib.Path) -> None:
    path = write_lines(tmp_path / "prompts.jsonl", numbered(5))
    spec = spec_over(tmp_path, path, sampling={"logprobs": None, "max_tokens": 6, "stop_token_ids": [5, 999_999]})
    assert_refused(jobs.run(command, spec), "sampling.stop_token_ids", "999999")


def test_diff_refuses_ids_that_are_repeated(done: pathlib.Path) -> None:
    assert_refused(jobs.run("diff", done / "out", done / "out", "--on", "id"), numbered(FEW)[1]["id"])
