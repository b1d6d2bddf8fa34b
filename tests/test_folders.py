"""Output folders that an earlier version began: this one reads them, and goes on with them.

The archives in `folders/` were made by `folders/make.py`. Here replicas run in threads, so that a test can put a later
version of a task in the place of the present one.
"""

import importlib.util
import io
import json
import pathlib
import sys
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import batchinf
import jobs
from batchinf.base.errors import OutputError, SpecError
from batchinf.base.slices import read_cut, write_cut
from batchinf.base.stop_signals import interruptible
from batchinf.base.storage import Folder
from batchinf.commands.check import check_job
from batchinf.commands.diff import diff_jobs
from batchinf.commands.head import read_head
from batchinf.commands.whole_row import read_whole_row
from batchinf.coordinator.display import ProgressDisplay
from batchinf.coordinator.run import run_job
from batchinf.job.open import open_job_input, prepare_job
from batchinf.job.repaired import repaired
from batchinf.manifest.commit_log import Fields, encode_commits, whole_lines
from batchinf.manifest.state import list_logs
from batchinf.replica import incarnation
from batchinf.report.page import write_report
from batchinf.source.cache import FileEntry, schema_text
from batchinf.source.formats.lines import JsonLines
from batchinf.source.rows import Source
from batchinf.spec.file import read_spec
from batchinf.spec.job import RULES, fingerprint
from batchinf.tasks import registry
from batchinf.tasks.base import Task

HERE = pathlib.Path(__file__).parent
sys.path.append(str(HERE / "fleet"))

from in_process import InProcessBackend  # noqa: E402

_spec = importlib.util.spec_from_file_location("make_folders", HERE / "folders" / "make.py")
assert _spec is not None and _spec.loader is not None
folders = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(folders)

SOME_TASKS = ("generate", "score", "hidden_states")
EACH_TASK = [*SOME_TASKS, *jobs.slowly(*sorted(folders.TASKS.keys() - set(SOME_TASKS)))]
OUT = "out"


@pytest.fixture(autouse=True)
def inputs_are_closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Close what the replicas opened: elsewhere their process ends."""
    sources = []

    def noted(open: Callable[..., Source]) -> Callable[..., Source]:
        def opened(*given: Any) -> Source:
            sources.append(open(*given))
            return sources[-1]

        return opened

    for open in (open_job_input, repaired):
        monkeypatch.setattr(incarnation, open.__name__, noted(open))
    yield
    for source in sources:
        source.close()


@pytest.fixture
def unpacked(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], pathlib.Path]:
    """Unpacks an archive and makes its folder the current one, because its paths are relative."""

    def unpack(name: str) -> pathlib.Path:
        folder = tmp_path / name
        folders.unpack(name, folder)
        monkeypatch.chdir(folder)
        return folder / OUT

    return unpack


def go_on(
    retry: str | None = None, *settings: str, extends: bool = False, fresh: bool = False, input: str | None = None
) -> str:
    """Run the job of the current folder to its end. Returns what it said."""
    said = io.StringIO()
    file = read_spec("job.yaml", settings)
    with interruptible():
        run_job(file, InProcessBackend(), ProgressDisplay(said), retry, extends=extends, fresh=fresh, input=input)
    return said.getvalue()


def stored_in(out: pathlib.Path) -> dict[pathlib.Path, bytes]:
    """The parts and the manifest of a job."""
    return {path: path.read_bytes() for name in ("parts", "manifest") for path in (out / name).iterdir()}


def rows_of(out: pathlib.Path) -> list[dict[str, Any]]:
    return sorted(jobs.rows_of(out), key=lambda row: (row["row_index"], row.get("sample_index", 0)))


def assert_whole(out: pathlib.Path) -> None:
    """Every part is as it should be, and all have the columns with which the job began."""
    report = check_job(str(out), is_deep=True, repair=False)
    assert [job.findings for job in report.jobs] == [()], [*report.lines()]
    schema = jobs.state_of(out).header.columns.part_schema
    assert {str(pq.read_schema(path).remove_metadata()) for path in (out / "parts").iterdir()} == {str(schema)}


def rewrite(out: pathlib.Path, change: Callable[[Fields], Fields]) -> None:
    """Write the manifest's lines with changes."""
    for _, name in list_logs(Folder(out)):
        lines = [change(line) for line in whole_lines(Folder(out), name)]
        (out / name).write_bytes(encode_commits([[line] for line in lines]))


# -- the rules of a job ---------------------------------------------------------------------------------------------


def test_a_job_keeps_the_rules_with_which_it_began(unpacked: Callable[[str], pathlib.Path]) -> None:
    out = unpacked("generate-killed")
    rewrite(out, lambda line: {**line, "spec": {**line["spec"], "rules": 2}} if "spec" in line else line)
    assert prepare_job(read_spec("job.yaml"), jobs.state_of(out)).spec.rules == 2
    assert prepare_job(read_spec("job.yaml")).spec.rules == RULES == 3


OLD_RULES = "the job began with rules 1, which only batchinf of commit ce7877c3 and before has: use it"


@pytest.mark.parametrize("task", ["generate", "score"])
def test_a_prompt_of_older_rules_is_shown_if_it_comes_out_the_same(
    unpacked: Callable[[str], pathlib.Path], task: str
) -> None:
    out = unpacked(f"format-2/{task}-finished")
    assert "rules" not in jobs.state_of(out).header.spec
    pieces = read_whole_row(OUT, "row-007").prompt
    assert pieces is not None and "7 foxes" in "".join(piece.text for piece in pieces)

    def otherwise(line: Fields) -> Fields:
        """The job as if its rules had given each prompt a further sign."""
        if "spec" not in line:
            return line
        spec = line["spec"]
        return {**line, "spec": {**spec, "input": {**spec["input"], "prompt_template": "{{ prompt }}!"}}}

    rewrite(out, otherwise)
    row = read_whole_row(OUT, "row-007")
    assert row.prompt is None
    assert row.prompt_note == f"it is not known, because now it comes out otherwise than in the run; {OLD_RULES}"


def test_an_input_that_has_other_rows_by_older_rules(
    unpacked: Callable[[str], pathlib.Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    unpacked("format-2/generate-finished")
    scan = JsonLines.scan

    def without_a_row(self: JsonLines, *given: Any) -> FileEntry:
        entry = scan(self, *given)
        return replace(entry, num_rows=entry.num_rows - 1)

    monkeypatch.setattr(JsonLines, "scan", without_a_row)
    monkeypatch.setattr(JsonLines, "key", "jsonl by later rules")
    row = read_whole_row(OUT, "row-007")
    assert row.prompt is None and row.prompt_note.endswith(OLD_RULES)
    assert read_head(OUT, 3).rows


def test_a_slice_does_not_begin_beside_those_of_older_rules(tmp_path: pathlib.Path) -> None:
    spec = jobs.spec_of(tmp_path)
    jobs.finish(spec, "--slice", "0/2")
    cut = read_cut(str(tmp_path / "out"))
    assert cut is not None and cut.rules == RULES
    (tmp_path / "out" / "cut.json").unlink()
    write_cut(str(tmp_path / "out"), replace(cut, rules=1), None)
    refused = jobs.run("run", spec, "--slice", "1/2")
    assert refused.returncode == 2
    assert f"{tmp_path / 'out'}: {OLD_RULES} for the slices that have not begun" in refused.stderr
    assert "already done" in jobs.finish(spec, "--slice", "0/2").stdout
    with pytest.raises(SpecError, match="rules: got 1; must be a whole number, at least 2"):
        read_spec(spec, ["rules=1"])


# -- the format before ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", EACH_TASK)
def test_a_finished_job_of_the_format_before_is_read(unpacked: Callable[[str], pathlib.Path], task: str) -> None:
    out = unpacked(f"format-2/{task}-finished")
    before = stored_in(out)
    assert_whole(out)
    assert {*batchinf.open(OUT).table()["row_index"].to_pylist()} == {*range(folders.NUM_ROWS)}
    assert len(read_head(OUT, 3).rows) == 3
    go_on()  # nothing is left to run
    assert stored_in(out) == before
    assert write_report(OUT).stat().st_size > 1000


@pytest.mark.parametrize("state", ["killed", "retrying"])
def test_an_unfinished_job_of_the_format_before_names_the_commit(
    unpacked: Callable[[str], pathlib.Path], state: str
) -> None:
    out = unpacked(f"format-2/generate-{state}")
    before = stored_in(out)
    with pytest.raises(
        OutputError, match=r"format version 2, .* finish it with batchinf of commit ce7877c3"
    ) as refused:
        go_on()
    assert "\n" not in str(refused.value)
    assert stored_in(out) == before
    assert read_head(OUT, 3).rows


def test_no_row_of_a_finished_job_of_the_format_before_runs_again(unpacked: Callable[[str], pathlib.Path]) -> None:
    out = unpacked("format-2/generate-finished")
    before = stored_in(out)
    words = "run its rows in a new job with input.exclude.job, or use batchinf of commit ce7877c3"
    with pytest.raises(OutputError, match=words):
        go_on(folders.RETRY)
    assert stored_in(out) == before
    folders.write_rows(out.parent, 60)
    with pytest.raises(OutputError, match=words):
        go_on(extends=True)
    assert stored_in(out) == before
    # The way out: a new job with the rows that the old one does not have.
    spec = json.loads((out.parent / "job.yaml").read_text())
    spec["input"]["exclude"] = {"job": OUT, "on": "id"}
    spec["output"]["path"] = "new"
    (out.parent / "job.yaml").write_text(json.dumps(spec))
    go_on()
    assert {row["row_index"] for row in rows_of(out.parent / "new")} == {*range(48, 60)}


# -- the present version -----------------------------------------------------------------------------------------------


def test_each_task_has_its_folders() -> None:
    assert {*folders.TASKS} == {*registry.TASKS}
    names = {f"{task}-{state}.tar.gz" for task in registry.TASKS for state in folders.STATES}
    assert {path.name for path in (HERE / "folders").glob("*.tar.gz")} == names


@pytest.mark.parametrize("task", EACH_TASK)
def test_a_finished_job_is_read(unpacked: Callable[[str], pathlib.Path], task: str) -> None:
    out = unpacked(f"{task}-finished")
    assert_whole(out)
    results = batchinf.open(OUT)
    assert results.table().schema == jobs.state_of(out).header.columns.part_schema
    assert {*results.table()["row_index"].to_pylist()} == {*range(folders.NUM_ROWS)}
    totals = batchinf.status(OUT).totals
    assert totals is not None and totals.num_rows_committed == results.num_rows
    assert len(read_head(OUT, 3).rows) == 3
    assert diff_jobs(OUT, OUT).changes.num_changed == 0
    assert write_report(OUT).stat().st_size > 1000


@pytest.mark.parametrize("task", EACH_TASK)
def test_a_killed_job_goes_on(unpacked: Callable[[str], pathlib.Path], task: str) -> None:
    expected = rows_of(unpacked(f"{task}-finished"))
    out = unpacked(f"{task}-killed")
    assert read_head(OUT, 40).rows
    assert write_report(OUT).stat().st_size > 1000
    said = go_on()
    assert "finished and kept in the journal" in said
    assert "damaged" not in said and "altered" not in said
    assert rows_of(out) == expected
    assert_whole(out)


@pytest.mark.parametrize("task", EACH_TASK)
def test_a_finished_job_is_retried_and_extended(unpacked: Callable[[str], pathlib.Path], task: str) -> None:
    out = unpacked(f"{task}-finished")
    expected = rows_of(out)
    assert f"retry 1 ({folders.RETRY}): 24 input rows" in go_on(folders.RETRY)
    assert rows_of(out) == expected
    attempts = jobs.table_of(out).select(["row_index", "attempts"]).to_pylist()
    assert all(row["attempts"] == 2 - row["row_index"] % 2 for row in attempts)
    folders.write_rows(out.parent, 60)
    assert "extended: 12 more input rows" in go_on(extends=True)
    rows = rows_of(out)
    assert rows[: len(expected)] == expected
    assert {row["row_index"] for row in rows} == {*range(60)}
    assert_whole(out)


@pytest.mark.parametrize("task", EACH_TASK)
def test_a_killed_retry_goes_on(unpacked: Callable[[str], pathlib.Path], task: str) -> None:
    expected = rows_of(unpacked(f"{task}-finished"))
    out = unpacked(f"{task}-retrying")
    said = go_on()
    assert f"retry 1 ({folders.RETRY})" in said
    assert "damaged" not in said and "altered" not in said
    assert rows_of(out) == expected
    assert_whole(out)


def test_a_finished_job_is_repaired(unpacked: Callable[[str], pathlib.Path]) -> None:
    out = unpacked("generate-finished")
    before = rows_of(out)
    row = json.loads((out.parent / "rows.jsonl").read_text().splitlines()[3])
    (out.parent / "fixed.jsonl").write_text(json.dumps({**row, "prompt": "Twice"}))
    go_on("row_index in (3, 4)", input="fixed.jsonl")
    after = rows_of(out)
    assert {row["row_index"] for row, old in zip(after, before, strict=True) if row != old} == {3}
    assert all(row["num_prompt_tokens"] < 5 for row in after if row["row_index"] == 3)
    assert_whole(out)


# -- a version with other columns --------------------------------------------------------------------------------------


def with_column(base: type[Task], name: str) -> type[Task]:
    """A later version of a task: its results and its output have one more column."""

    class Later(base):  # type: ignore[misc, valid-type]
        def result_fields(self) -> list[tuple[str, pa.DataType]]:
            return [*super().result_fields(), (name, pa.float32())]

        def encode(self, results: Any) -> pa.RecordBatch:
            batch = base(self.spec).encode(results)
            arrays = dict(zip(batch.schema.names, batch.columns, strict=True))
            arrays[name] = pa.array([0.5] * len(results), pa.float32())
            schema = self.result_schema
            return pa.RecordBatch.from_arrays([arrays[column] for column in schema.names], schema=schema)

        def reduce(self, columns: Any, results: pa.Table) -> pa.Table:
            results.column(name)  # code of a later version relies on its column
            return super().reduce(columns, results)

    return Later


def with_first_column(base: type[Task], change: Callable[[str, pa.DataType], list[tuple[str, pa.DataType]]]) -> Any:
    """A later version of a task whose first column is another one."""

    class Changed(base):  # type: ignore[misc, valid-type]
        def result_fields(self) -> list[tuple[str, pa.DataType]]:
            first, *others = super().result_fields()
            return [*change(*first), *others]

    return Changed


@pytest.fixture
def put(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, type[Task]], None]:
    """Puts another version of a task in the place of the present one."""

    def put(task: str, version: type[Task]) -> None:
        monkeypatch.setitem(registry.TASKS, task, version)

    return put


# `language` is a column of the input, which the job keeps.
@pytest.mark.parametrize(
    ("task", "column"), [*((task, "confidence") for task in SOME_TASKS), (SOME_TASKS[0], "language")]
)
def test_a_later_column_does_not_come_into_a_job(
    unpacked: Callable[[str], pathlib.Path], put: Callable[[str, type[Task]], None], task: str, column: str
) -> None:
    finished = unpacked(f"{task}-finished")
    expected = rows_of(finished)
    put(task, with_column(registry.TASKS[task], column))
    line = f"column {column} is of a later version; this job goes on without it"
    assert go_on(folders.RETRY).count(line) == 1
    assert rows_of(finished) == expected
    assert_whole(finished)

    killed = unpacked(f"{task}-killed")
    assert len(read_head(OUT, 40).rows) > 12, "rows of the journal, too"
    said = go_on()
    assert said.count(line) == 1 and "finished and kept in the journal" in said
    assert "damaged" not in said
    assert rows_of(killed) == expected
    folders.write_rows(killed.parent, 60)
    assert "extended: 12 more input rows" in go_on(extends=True)
    assert_whole(killed)

    retrying = unpacked(f"{task}-retrying")
    assert "damaged" not in go_on()
    assert rows_of(retrying) == expected
    assert_whole(retrying)


def test_a_new_job_has_the_later_column(
    unpacked: Callable[[str], pathlib.Path], put: Callable[[str, type[Task]], None]
) -> None:
    out = unpacked("generate-finished")
    put("generate", with_column(registry.TASKS["generate"], "confidence"))
    assert "later version" not in go_on(fresh=True)
    assert "confidence" in batchinf.open(OUT).schema.names
    assert "confidence" not in batchinf.open(f"{OUT}.1").schema.names
    assert_whole(out)


@pytest.mark.parametrize("state", ["finished", "killed", "retrying"])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda name, type: [], "of type .*, and this version does not have it"),
        (lambda name, type: [(name, pa.list_(type))], "of type .*, and this version writes list<"),
    ],
    ids=["gone", "other type"],
)
@pytest.mark.parametrize("task", ["score", "embed"])
def test_a_column_that_is_gone_or_of_another_type_is_refused(
    unpacked: Callable[[str], pathlib.Path],
    put: Callable[[str, type[Task]], None],
    task: str,
    change: Any,
    words: str,
    state: str,
) -> None:
    out = unpacked(f"{task}-{state}")
    put(task, with_first_column(registry.TASKS[task], change))
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    with pytest.raises(OutputError, match=words) as refused:
        go_on(folders.RETRY if state == "finished" else None)
    assert "continue it with batchinf 0.1.0, which began it, or start a new job with --fresh" in str(refused.value)
    assert "\n" not in str(refused.value)
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    if state == "finished":  # nothing is left to run, so nothing is refused
        go_on()
    assert batchinf.open(OUT).table().num_rows == batchinf.open(OUT).num_rows


def test_a_part_with_other_columns_is_found(unpacked: Callable[[str], pathlib.Path]) -> None:
    out = unpacked("generate-finished")
    schema = jobs.state_of(out).header.columns.part_schema
    narrow = schema_text(schema.remove(schema.get_field_index("stop_reason")))

    def change(line: Fields) -> Fields:
        return line if line["kind"] != "header" else {**line, "columns": {**line["columns"], "part": narrow}}

    rewrite(out, change)
    assert check_job(OUT, is_deep=False, repair=False).is_whole
    report = check_job(OUT, is_deep=True, repair=False)
    assert report.jobs[0].num_wrong == 13
    words = "does not have the columns with which the job began: it differs in stop_reason"
    assert words in "\n".join(report.lines())


# -- a version with other formats --------------------------------------------------------------------------------------


def test_an_older_format_is_refused_and_begun_anew(unpacked: Callable[[str], pathlib.Path]) -> None:
    out = unpacked("generate-killed")
    rewrite(out, lambda line: {**line, "format_version": 1} if line["kind"] == "header" else line)
    words = f"{OUT} was written by an older batchinf, 0.1.0, in format version 1; this one reads versions 2 to 3: use"
    for command in (go_on, lambda: batchinf.open(OUT), lambda: batchinf.status(OUT), lambda: read_head(OUT, 3)):
        with pytest.raises(OutputError, match=words) as refused:
            command()
        assert "\n" not in str(refused.value)
    assert "moved the old job from" in go_on(fresh=True)
    assert_whole(out)


def test_a_count_of_a_later_version_is_0_in_older_parts(unpacked: Callable[[str], pathlib.Path]) -> None:
    out = unpacked("generate-killed")
    assert len(jobs.state_of(out).parts) >= 2
    rewrite(out, lambda line: {name: value for name, value in line.items() if name != "num_nan_rows"})
    assert "altered" not in go_on()
    assert_whole(out)


def test_a_field_of_the_spec_that_came_later_changes_nothing_at_its_default(
    unpacked: Callable[[str], pathlib.Path],
) -> None:
    out = unpacked("generate-finished")

    def without_field(line: Fields) -> Fields:
        if line["kind"] != "header":
            return line
        identity = {name: value for name, value in line["identity"].items() if name != "output.include_prompt"}
        spec = {**line["spec"], "output": {**line["spec"]["output"]}}
        del spec["output"]["include_prompt"]
        return {**line, "identity": identity, "fingerprint": fingerprint(identity), "spec": spec}

    rewrite(out, without_field)
    with pytest.raises(batchinf.DriftError, match=r"output\.include_prompt: the job has nothing, now it is true"):
        go_on(folders.RETRY, "output.include_prompt=true")
    go_on(folders.RETRY)
    assert_whole(out)


def test_a_field_of_the_spec_that_is_gone_is_refused_in_a_line(unpacked: Callable[[str], pathlib.Path]) -> None:
    out = unpacked("generate-killed")

    def with_field(line: Fields) -> Fields:
        if line["kind"] != "header":
            return line
        return {**line, "identity": {**line["identity"], "colour": "red"}, "spec": {**line["spec"], "colour": "red"}}

    rewrite(out, with_field)
    words = (
        r"the stored spec has colour that this version of batchinf does not read .*; continue it with batchinf 0.1.0"
    )
    with pytest.raises(OutputError, match=words) as refused:
        go_on()
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("archive", sorted((HERE / "folders").glob("*.tar.gz")), ids=lambda path: path.name)
def test_nothing_in_an_archive_is_of_one_machine(archive: pathlib.Path) -> None:
    with tarfile.open(archive) as tar:
        files = {member.name: tar.extractfile(member) for member in tar if member.isfile()}
        for name, file in files.items():
            assert file is not None
            content = file.read()
            assert not any(word in content for word in (b"/tmp", b"/home", str(jobs.ROOT).encode())), name
