"""A job in slices: which rows each has, and that together they are the rows of the job in one piece."""

import contextlib
import dataclasses
import json
import pathlib
import shutil
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import jobs
from batchinf.base.errors import OutputError, SpecError
from batchinf.base.slices import CUT_VERSION, Cut, Slice, job_folders, read_cut, read_files, write_cut
from batchinf.base.storage import Folder, encode_record
from batchinf.commands.head import read_head

# Sampled, so that a seed that is not the whole job's shows.
SAMPLING = {"n": 2, "temperature": 0.8, "max_tokens": 12}
ONE = {"data_parallel_size": 1}


def error_of(spec: pathlib.Path, *arguments: str) -> str:
    refused = jobs.run("run", spec, *arguments)
    assert refused.returncode == 2, refused.stderr
    assert "Traceback" not in refused.stderr
    [line] = [line for line in refused.stderr.splitlines() if line.startswith("error: ")]
    return line


def rows_in(paths: list[pathlib.Path]) -> list[dict[str, Any]]:
    return pa.concat_tables([pq.read_table(path) for path in paths]).drop_columns(["attempts"]).to_pylist()


@pytest.mark.parametrize("num_rows", [1, 2, 7, 8, 100, 657])
@pytest.mark.parametrize("num_slices", [1, 2, 3, 8, 99, 1000])
def test_slices_are_runs_of_rows_that_make_up_the_whole(num_slices: int, num_rows: int) -> None:
    slices = [Slice(index, num_slices) for index in range(num_slices)]
    assert [row for slice_ in slices for row in slice_.rows(num_rows)] == list(range(num_rows))
    lengths = {len(slice_.rows(num_rows)) for slice_ in slices}
    assert max(lengths) - min(lengths) <= 1
    names = [slice_.name for slice_ in slices]
    assert names == sorted(names)
    assert [Slice.parse(str(slice_)) for slice_ in slices] == slices


@pytest.mark.parametrize(
    "text", ["", "3", "3/3", "-1/3", "1/0", "0/0", "a/b", "1/3/5", " 1/3", "1/3\n", "٣/٤", "1/1000000"]
)
def test_a_wrong_slice_is_refused(text: str) -> None:
    with pytest.raises(SpecError, match="must be i/N"):
        Slice.parse(text)


@pytest.fixture(scope="module")
def sliced(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Three of four slices run at once; then the last one is killed at work and goes on."""
    folder = tmp_path_factory.mktemp("sliced")
    spec, out = jobs.spec_of(folder, sampling=SAMPLING, parallel=ONE, output={"rows_per_shard": 13}), folder / "out"
    assert "slice" not in jobs.run("status", out).stdout
    processes = [jobs.start("run", spec, "--slice", f"{index}/4") for index in (3, 0, 2)]
    for process in processes:
        code, output, errors = jobs.end(process)
        assert code == 0, errors
    seen = {"spec": spec, "out": out, "closing": output, "status": jobs.run("status", out).stdout}
    seen["head"] = list(read_head(str(out), 10_000).rows)
    killed = jobs.run("run", spec, "--slice", "1/4", faults="coordinator.after_publish:4=kill")
    assert killed.returncode == -9
    seen["rows at kill"] = jobs.state_of(out / "slice-1").counts.num_rows
    seen["status after kill"] = jobs.run("status", out).stdout
    seen["head after kill"] = list(read_head(str(out), 10_000).rows)
    seen["head of a slice"] = list(read_head(str(out / "slice-1"), 10_000).rows)
    jobs.finish(spec, "--slice", "1/4")
    seen["again"] = jobs.finish(spec, "--slice", "1/4").stdout
    return seen


def test_the_slices_together_are_the_whole_job(sliced: dict[str, Any]) -> None:
    whole = list(jobs.unhurt(json.dumps(SAMPLING)))
    assert rows_in(sorted(sliced["out"].glob("slice-*/parts/*.parquet"))) == whole
    num_rows = len(whole) // 2
    for index in range(4):
        mine = {row["row_index"] for row in jobs.rows_of(sliced["out"] / f"slice-{index}")}
        assert mine == set(range(index * num_rows // 4, (index + 1) * num_rows // 4))


def test_readers_take_all_slices_by_one_pattern(sliced: dict[str, Any]) -> None:
    query = f"select row_index, sample_index, text from '{sliced['out']}/slice-*/parts/*.parquet' order by all"
    whole = jobs.unhurt(json.dumps(SAMPLING))
    assert duckdb.sql(query).fetchall() == [(row["row_index"], row["sample_index"], row["text"]) for row in whole]


def test_the_first_pass_over_the_input_is_shared(sliced: dict[str, Any]) -> None:
    out = sliced["out"]
    shared = ["cut.json", "files.json"]
    assert sorted(path.name for path in out.iterdir()) == [*shared, *(f"slice-{i}" for i in range(4)), "source"]
    assert not list(out.glob("slice-*/source"))
    assert not list(out.rglob(".tmp-*"))


def test_a_slice_that_is_done_writes_a_lost_record_again(sliced: dict[str, Any]) -> None:
    out = sliced["out"]
    before = read_cut(str(out))
    parts = {path: path.read_bytes() for path in out.glob("slice-*/parts/*")}
    (out / "cut.json").unlink()
    jobs.finish(sliced["spec"], "--slice", "2/4")
    after = read_cut(str(out))
    assert before is not None and after is not None
    assert dataclasses.replace(after, begun_at=before.begun_at) == before
    assert {path: path.read_bytes() for path in out.glob("slice-*/parts/*")} == parts


def test_parts_and_closing_lines_name_the_slice(sliced: dict[str, Any]) -> None:
    [part, *_] = (sliced["out"] / "slice-1" / "parts").iterdir()
    assert pq.read_metadata(part).metadata[b"batchinf.slice"] == b"1/4"
    assert f"{sliced['out']}/slice-2/parts" in sliced["closing"]
    assert "was already done" in sliced["again"]


def test_status_sums_over_slices_and_names_those_that_are_missing(sliced: dict[str, Any]) -> None:
    num_rows = len(jobs.unhurt(json.dumps(SAMPLING)))
    states = [jobs.state_of(sliced["out"] / f"slice-{index}") for index in (0, 2, 3)]
    committed = sum(state.counts.num_rows for state in states)
    before, after = sliced["status"], sliced["status after kill"]
    assert "4 slices: 3 done, 1 not begun" in before
    assert f"committed: {committed:,} of {num_rows:,} output rows" in before
    assert "slice 1/4 has not begun" in before
    assert f"slice 2/4: done; {states[1].counts.num_rows:,} of {states[1].counts.num_rows:,} output rows" in before
    assert "4 slices: 3 done, 1 stopped" in after
    assert "slice 1/4: stopped before its end" in after
    assert "4 slices: 4 done" in jobs.run("status", sliced["out"]).stdout


def test_head_is_in_the_order_of_rows(sliced: dict[str, Any]) -> None:
    whole = {(row["row_index"], row["sample_index"]): row for row in jobs.unhurt(json.dumps(SAMPLING))}
    lengths = []
    for head in (sliced["head"], sliced["head after kill"]):
        rows = [{name: value for name, value in row.items() if name != "attempts"} for row in head]
        keys = [(row["row_index"], row["sample_index"]) for row in rows]
        assert keys == sorted(set(keys))
        assert rows == [whole[key] for key in keys]
        lengths.append(len(rows))
    finished = sum(jobs.state_of(sliced["out"] / f"slice-{index}").counts.num_rows for index in (0, 2, 3))
    assert lengths[0] == finished
    # Three parts were committed before the kill. How many rows they have depends on which parts were full first.
    assert sliced["rows at kill"] > 0
    assert lengths[1] >= finished + sliced["rows at kill"]
    # The folder of a slice may be named itself. No command scans the input into it: see the test of the first pass.
    assert len(sliced["head of a slice"]) == lengths[1] - finished


def test_one_output_holds_one_cut_of_one_job(sliced: dict[str, Any], tmp_path: pathlib.Path) -> None:
    spec, out = sliced["spec"], sliced["out"]
    before = sorted(out.rglob("*"))
    assert "holds a job in 4 slices" in error_of(spec, "--slice", "0/5")
    assert "holds a job in 4 slices" in error_of(spec)
    assert "must be i/N" in error_of(spec, "--slice", "4/4")
    assert sorted(out.rglob("*")) == before
    assert "a job in 4 slices" in jobs.run("validate", spec).stdout
    # A slice that has not begun must be one of the same job.
    shutil.copytree(out, tmp_path / "out", ignore=shutil.ignore_patterns("slice-2"))
    moved = ("--set", f"output.path={tmp_path}/out", "--slice", "2/4")
    refused = jobs.run("run", spec, *moved, "--set", "sampling.max_tokens=5")
    assert refused.returncode == 2
    assert "sampling.max_tokens: the job has 12, now it is 5" in refused.stderr
    # Its neighbour's folder is not its own.
    shutil.rmtree(tmp_path / "out" / "slice-2")
    shutil.copytree(out / "slice-3", tmp_path / "out" / "slice-2")
    refused = jobs.run("run", spec, *moved)
    assert refused.returncode == 2
    assert 'slice: the job has "3/4", now it is "2/4"' in refused.stderr


def test_a_whole_job_is_not_cut_later(tmp_path: pathlib.Path) -> None:
    spec = jobs.spec_of(tmp_path, parallel=ONE, scripted={"step_s": 0.0})
    jobs.finish(spec)
    assert "not cut into slices" in error_of(spec, "--slice", "0/2")
    assert [folder.slice for folder in job_folders(str(tmp_path / "out"))] == [None]


def test_a_slice_that_is_refused_does_not_decide_what_the_folder_holds(tmp_path: pathlib.Path) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"prompt": null, "good": "{row}"}}\n' for row in range(30)))
    where = {"path": str(tmp_path / "rows.jsonl"), "id_column": None}
    spec = jobs.spec_of(tmp_path, input=where, output={"keep_columns": []}, parallel=ONE, scripted={"step_s": 0.0})
    assert "all 30 rows would be error rows" in error_of(spec, "--slice", "0/2")
    assert not (tmp_path / "out" / "cut.json").exists()
    jobs.finish(spec, "--slice", "0/2", "--set", "input.prompt_column=good")


def test_a_slice_without_rows_is_done_at_once(tmp_path: pathlib.Path) -> None:
    spec = jobs.spec_of(tmp_path, parallel=ONE)
    done = jobs.finish(spec, "--slice", "0/1000")
    assert "done: 0 output rows" in done.stdout
    assert (tmp_path / "out" / "slice-000").is_dir()
    assert "slice 000" not in jobs.run("status", tmp_path / "out").stdout
    assert not jobs.events_of(tmp_path / "out" / "slice-000", "ready")


@pytest.mark.parametrize("record", [
    b"", b"[]", b"{}", b'{"version": 1, "num_slices": 4, "num_rows": 5, "identity": {}}',
    encode_record(CUT_VERSION, {"num_slices": "4", "num_rows": 5, "identity": {}}),
])  # fmt: skip
def test_a_damaged_record_is_one_clear_line(record: bytes, tmp_path: pathlib.Path) -> None:
    (tmp_path / "cut.json").write_bytes(record)
    with pytest.raises(OutputError, match=r"cut\.json is damaged"):
        job_folders(str(tmp_path))
    (tmp_path / "cut.json").write_text('{"version": 2}')
    with pytest.raises(OutputError, match="newer batchinf"):
        job_folders(str(tmp_path))


def test_a_flipped_bit_of_the_record_is_never_a_setting(tmp_path: pathlib.Path) -> None:
    cut = write_cut(
        str(tmp_path), Cut(4, 18, {"model.dtype": "auto", "input.limit": None}, "2026-11-23T04:31:47+00:00")
    )
    whole = (tmp_path / "cut.json").read_bytes()
    for bit in range(8 * len(whole)):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        (tmp_path / "cut.json").write_bytes(flipped)
        with contextlib.suppress(OutputError):
            assert read_cut(str(tmp_path)) == cut


def test_the_files_of_a_newer_version_are_not_called_damaged(tmp_path: pathlib.Path) -> None:
    assert read_files(str(tmp_path)) == {}
    (tmp_path / "files.json").write_bytes(encode_record(CUT_VERSION + 1, {"model.safetensors": "0"}))
    with pytest.raises(OutputError, match=r"files\.json was written by a newer batchinf: install a newer one"):
        read_files(str(tmp_path))


def test_a_whole_job_beside_slices_is_told(tmp_path: pathlib.Path) -> None:
    (tmp_path / "cut.json").write_bytes(encode_record(CUT_VERSION, {"num_slices": 12, "num_rows": 5}))
    found = job_folders(str(tmp_path))
    assert [folder.root.name for folder in found] == [f"slice-{index:02d}" for index in range(12)]
    folder = Folder(tmp_path)
    folder.make("manifest")
    folder.write_atomic("manifest/000001.jsonl", b"{}")
    assert len(job_folders(str(tmp_path))) == 12  # that of a job that never began
    folder.write_atomic("job.yaml", b"")
    with pytest.raises(OutputError, match="both a whole job and slices"):
        job_folders(str(tmp_path))
