"""`--fresh`: the old folder is moved aside whole, whoever dies meanwhile, and never from under a job at work."""

import pathlib
import shutil

import pytest

import jobs


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
    assert f"moved the job in {out} to {tmp_path / 'out.2'}" in told
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


def test_a_link_stays_a_link(spec: pathlib.Path, tmp_path: pathlib.Path) -> None:
    (tmp_path / "out").rename(tmp_path / "large-disk")
    (tmp_path / "out").symlink_to(tmp_path / "large-disk")
    jobs.finish(spec, "--fresh")
    assert (tmp_path / "out").is_symlink()
    assert jobs.state_of(tmp_path / "out").is_done
    assert jobs.state_of(tmp_path / "large-disk.1").is_done
