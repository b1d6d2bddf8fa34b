"""`--fresh`: the old folder is moved aside whole, whoever dies meanwhile, and never from under a job at work."""

import pathlib
import shutil

import pytest

import batchinf
import jobs
from batchinf.base.storage import Folder
from batchinf.manifest.names import other_names
from batchinf.report.page import write_report


def spec_in(folder: pathlib.Path) -> pathlib.Path:
    prompts = folder / "prompts.jsonl"
    prompts.write_text('{"prompt": "Once"}\n' * 20)
    return jobs.spec_of(
        folder,
        input={"path": str(prompts), "id_column": None},
        output={"keep_columns": []},
        parallel={"data_parallel_size": 1},
        scripted={"step_s": 0.0},
    )


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A finished job's folder."""
    folder = tmp_path_factory.mktemp("done")
    jobs.finish(spec_in(folder), "--fresh")  # nothing is there yet
    assert not (folder / "out.1").exists()
    return folder / "out"


@pytest.fixture
def spec(done: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
    """A spec whose job is done."""
    shutil.copytree(done, tmp_path / "out")
    return spec_in(tmp_path)


def test_the_old_folder_is_moved_aside_whole(spec: pathlib.Path, tmp_path: pathlib.Path) -> None:
    out = tmp_path / "out"
    (tmp_path / "out.1").write_text("a name that is taken")
    before = {path.relative_to(out): path.read_bytes() for path in out.rglob("*") if path.is_file()}
    told = jobs.finish(spec, "--fresh", "--set", "sampling.max_tokens=5").stderr
    assert f"moved the old job from {out} to {tmp_path / 'out.2'}" in told
    aside = tmp_path / "out.2"
    assert {path.relative_to(aside): path.read_bytes() for path in aside.rglob("*") if path.is_file()} == before
    assert (tmp_path / "out.1").read_text() == "a name that is taken"
    assert jobs.state_of(out).header.spec["sampling"]["max_tokens"] == 5
    assert max(row["num_output_tokens"] for row in jobs.rows_of(out)) <= 5


def test_nothing_is_moved_without_an_input(spec: pathlib.Path, tmp_path: pathlib.Path) -> None:
    (tmp_path / "prompts.jsonl").unlink()
    refused = jobs.run("run", spec, "--fresh")
    assert refused.returncode == 2
    assert "prompts.jsonl does not exist" in refused.stderr
    assert not (tmp_path / "out.1").exists()
    assert jobs.state_of(tmp_path / "out").is_done


def test_never_from_under_a_job_at_work(spec: pathlib.Path, tmp_path: pathlib.Path) -> None:
    out, marker = tmp_path / "out", tmp_path / "held"
    process = jobs.start("run", spec, "--retry", "true", faults=f"retry.before_line=hold {marker}")
    jobs.wait_until(lambda: marker.exists() or process.poll() is not None)
    refused = jobs.run("run", spec, "--fresh")
    assert refused.returncode == 2
    assert f"is being run by pid {process.pid}" in refused.stderr
    marker.unlink()
    assert process.wait(60) == 0
    process.communicate()
    assert out.exists()
    assert not (tmp_path / "out.1").exists()


@pytest.mark.parametrize("where", ["fresh.before_rename", "fresh.after_rename"])
def test_killed_while_moving(where: str, spec: pathlib.Path, tmp_path: pathlib.Path) -> None:
    rows = jobs.rows_of(tmp_path / "out")
    assert jobs.run("run", spec, "--fresh", faults=f"{where}=kill").returncode == -9
    jobs.finish(spec, "--fresh")
    assert jobs.rows_of(tmp_path / "out") == jobs.rows_of(tmp_path / "out.1") == rows
    assert not (tmp_path / "out.2").exists()
    assert not [name for name in (".tmp-fresh", "lock") if (tmp_path / "out.1" / name).exists()]


@pytest.mark.parametrize("slice_of", ["", *jobs.slowly("0/2")])
def test_replicas_of_the_old_job_are_ended(slice_of: str, tmp_path: pathlib.Path) -> None:
    """A coordinator was killed, and its replica stands still, so it has not noticed that."""
    spec, marker = spec_in(tmp_path), tmp_path / "held"
    sliced = ("--slice", slice_of) if slice_of else ()
    process = jobs.start("run", spec, *sliced, faults=f"feeder.read=hold {marker}")
    jobs.wait_until(lambda: marker.exists() or process.poll() is not None)
    replicas = jobs.replicas_of(process.pid)
    assert len(replicas) == 1
    replicas[0].suspend()
    process.kill()
    process.communicate()
    try:
        jobs.finish(spec, "--fresh")
        assert jobs.are_gone(replicas)
    finally:
        jobs.kill(replicas)
    assert len(jobs.rows_of(tmp_path / "out")) == 20


def test_a_link_stays_a_link(spec: pathlib.Path, tmp_path: pathlib.Path) -> None:
    (tmp_path / "out").rename(tmp_path / "large-disk")
    (tmp_path / "out").symlink_to(tmp_path / "large-disk")
    jobs.finish(spec, "--fresh")
    assert (tmp_path / "out").is_symlink()
    assert jobs.state_of(tmp_path / "out").is_done
    assert jobs.state_of(tmp_path / "large-disk.1").is_done


# -- a folder with other files -----------------------------------------------------------------------------------------


def test_files_of_others_are_named_and_not_moved(done: pathlib.Path, tmp_path: pathlib.Path) -> None:
    out, spec = tmp_path / "out", spec_in(tmp_path)
    (out / "drafts").mkdir(parents=True)
    for name in ("customers.csv", "drafts/part-000000.parquet", "evil\x1b[31m\n.txt", "notes.txt", ".gitignore"):
        (out / name).write_text("mine")
    named = ".gitignore, customers.csv, drafts and 2 more"
    note = f"note: {out} holds other files, which the job leaves alone: {named}"
    assert str(batchinf.validate(spec).output.others_note) == note
    assert f"{note}\n" in jobs.finish(spec).stderr
    assert "note:" not in jobs.finish(spec).stderr
    assert batchinf.validate(spec).output.others_note is None  # it is the job's folder by now

    before = files_of(tmp_path)
    refused = jobs.run("run", spec, "--fresh")
    assert refused.returncode == 2
    [line] = refused.stderr.splitlines()
    assert line == (
        f"error: --fresh: {out} holds files that are not the job's: {named}; --fresh moves the whole folder, so move "
        "them out of it first, or give the new job another output.path"
    )
    assert files_of(tmp_path) == before
    shutil.rmtree(out / "drafts")
    for name in other_names(Folder(out)):
        (out / name).unlink()
    jobs.finish(spec, "--fresh")
    assert jobs.rows_of(out) == jobs.rows_of(tmp_path / "out.1")


def test_files_of_others_in_a_slice(done: pathlib.Path, tmp_path: pathlib.Path) -> None:
    spec = spec_in(tmp_path)
    jobs.finish(spec, "--slice", "0/2")
    (tmp_path / "out" / "slice-0" / "labels.csv").write_text("mine")
    (tmp_path / "out" / "notes.txt").write_text("mine")
    for arguments, named in (((), "notes.txt, slice-0/labels.csv"), (("--slice", "0/2"), "labels.csv")):
        refused = jobs.run("run", spec, "--fresh", *arguments)
        assert refused.returncode == 2
        assert f"holds files that are not the job's: {named};" in refused.stderr
    (tmp_path / "out" / "slice-0" / "labels.csv").unlink()
    jobs.finish(spec, "--fresh", "--slice", "0/2")
    assert (tmp_path / "out" / "old-slice-0.1").exists()


def test_what_batchinf_makes_is_its_own(spec: pathlib.Path, tmp_path: pathlib.Path) -> None:
    out = tmp_path / "out"
    write_report(str(out), None)
    jobs.finish(spec, "--retry", "row_index < 3")
    for name in ("lock.stale-1", ".tmp-1-lock", ".nfs000123", "slice-07/lock", "old-slice-07.12/lock", "damaged/x"):
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).touch()
    assert other_names(Folder(out)) == []
    for name in ("slice", "slice-x", "parts-old", "lockers", "job.yaml.orig", "report.html.bak"):
        (out / name).touch()
    assert len(other_names(Folder(out))) == 6
    assert other_names(Folder(out / "job.yaml")) == other_names(Folder(tmp_path / "nothing")) == []


# -- what keeps the new job from beginning -----------------------------------------------------------------------------


def files_of(folder: pathlib.Path) -> dict[pathlib.Path, bytes]:
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    "wrong",
    [
        ("input.prompt_column=nothing", "no column 'nothing'"),
        ("input.where=prompt = 'none'", "leaves none of the 20 input rows"),
        *jobs.slowly(("model.name=nothing", "model.name"), ("output.max_output_bytes=10", "output.max_output_bytes")),
    ],
)
def test_the_old_job_stays_where_the_new_one_cannot_begin(
    wrong: tuple[str, str], spec: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    (settings, words), before = wrong, files_of(tmp_path)
    refused = jobs.run("run", spec, "--fresh", "--set", settings)
    assert refused.returncode == 2
    assert words in refused.stderr
    assert files_of(tmp_path) == before


def test_a_damaged_file_behind_the_first_is_found_before_the_move(spec: pathlib.Path, tmp_path: pathlib.Path) -> None:
    (tmp_path / "input").mkdir()
    (tmp_path / "prompts.jsonl").rename(tmp_path / "input" / "a.jsonl")
    (tmp_path / "input" / "b.jsonl.gz").write_bytes(b"\x1f\x8b" + bytes(100))
    before = files_of(tmp_path)
    moved = ("--fresh", "--set", f"input.path={tmp_path / 'input'}")
    # A kill leaves the scan of the new input behind, and the next start deletes it.
    assert jobs.run("run", spec, *moved, faults="job.input_open=kill,source.before_fsync=kill").returncode == -9
    assert (tmp_path / "out" / ".tmp-fresh").exists()
    refused = jobs.run("run", spec, *moved)
    assert refused.returncode == 2
    assert "b.jsonl.gz cannot be read as jsonl" in refused.stderr
    assert files_of(tmp_path) == before
    assert not (tmp_path / "out" / ".tmp-fresh").exists()


# -- slices ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def sliced(tmp_path: pathlib.Path) -> pathlib.Path:
    """A spec whose job is done in two slices."""
    spec = spec_in(tmp_path)
    for index in range(2):
        jobs.finish(spec, "--slice", f"{index}/2")
    return spec


def test_one_slice_begins_anew_and_all_of_them(sliced: pathlib.Path, tmp_path: pathlib.Path) -> None:
    out = tmp_path / "out"
    before = files_of(out / "slice-1")
    refused = jobs.run("run", sliced, "--slice", "1/2", "--fresh", "--set", "sampling.max_tokens=5")
    assert refused.returncode == 2
    assert "holds slices of a job that began with other settings" in refused.stderr
    assert "holds a job in 2 slices" in jobs.run("run", sliced, "--slice", "1/3", "--fresh").stderr
    assert files_of(out / "slice-1") == before
    jobs.finish(sliced, "--slice", "1/2", "--fresh")
    assert files_of(out / "old-slice-1.1") == before
    assert jobs.rows_of(out / "slice-1") == jobs.rows_of(out / "old-slice-1.1")
    before = files_of(out)
    jobs.finish(sliced, "--fresh", "--set", "sampling.max_tokens=5")
    assert files_of(tmp_path / "out.1") == before
    assert max(row["num_output_tokens"] for row in jobs.rows_of(out)) <= 5


def test_never_from_under_a_slice_at_work(sliced: pathlib.Path, tmp_path: pathlib.Path) -> None:
    out, marker = tmp_path / "out", tmp_path / "held"
    process = jobs.start("run", sliced, "--slice", "1/2", "--retry", "true", faults=f"retry.before_line=hold {marker}")
    jobs.wait_until(lambda: marker.exists() or process.poll() is not None)
    refused = jobs.run("run", sliced, "--fresh")
    assert refused.returncode == 2
    assert f"slice-1 is being run by pid {process.pid}" in refused.stderr
    marker.unlink()
    assert process.wait(60) == 0
    process.communicate()
    assert not (tmp_path / "out.1").exists()
    # Nor does a slice begin while the folder is about to be moved.
    process = jobs.start("run", sliced, "--fresh", faults=f"fresh.before_rename=hold {marker}")
    jobs.wait_until(lambda: marker.exists() or process.poll() is not None)
    refused = jobs.run("run", sliced, "--slice", "1/2", "--retry", "true")
    assert refused.returncode == 2
    assert f"out is being run by pid {process.pid}" in refused.stderr
    marker.unlink()
    assert process.wait(60) == 0
    process.communicate()
    assert len(jobs.rows_of(out)) == 20


@pytest.mark.slow
@pytest.mark.parametrize(
    "where", ["fresh.before_rename", "fresh.after_rename", "cut.before_record", "cut.after_record"]
)
def test_killed_while_slices_become_a_whole_job(where: str, sliced: pathlib.Path, tmp_path: pathlib.Path) -> None:
    out = tmp_path / "out"
    rows = [row for index in range(2) for row in jobs.rows_of(out / f"slice-{index}")]
    assert jobs.run("run", sliced, "--fresh", faults=f"{where}=kill").returncode == -9
    jobs.finish(sliced, *(["--fresh"] if where == "fresh.before_rename" else []))
    assert jobs.rows_of(out) == rows
    assert [row for index in range(2) for row in jobs.rows_of(tmp_path / "out.1" / f"slice-{index}")] == rows
