"""Whole jobs with images: killed, resumed and retried, with pictures that change meanwhile."""

import hashlib
import pathlib
import shutil
from typing import Any

import pytest
from pictures import VISION, write_lines

import jobs

PICTURES = jobs.ROOT / "sample_data" / "pictures"
ASK = [{"role": "user", "content": [{"type": "text", "text": "{{ id }}: "}, {"type": "image", "column": "photo"}]}]
NUM_ROWS = 48


def spec_of(folder: pathlib.Path, rows: list[dict[str, Any]] | None = None, **sections: Any) -> pathlib.Path:
    """A job on the scripted engine over copies of the sample pictures; one row has none, one two, one is gone."""
    folder.mkdir(exist_ok=True)
    shutil.copytree(PICTURES, folder / "pictures", dirs_exist_ok=True)
    names = sorted(path.name for path in PICTURES.iterdir())
    photos: list[Any] = [f"pictures/{names[number % len(names)]}" for number in range(NUM_ROWS)]
    photos[5:8] = [None, photos[:2], "pictures/gone.png"]
    lines = rows or [{"id": f"row-{number}", "photo": photo} for number, photo in enumerate(photos)]
    path = write_lines(folder / "rows.jsonl", lines)
    options: dict[str, Any] = {
        "model": str(VISION),
        "input": {"path": str(path), "messages": ASK},
        "sampling": {"max_tokens": 8, "temperature": 1.0, "n": 2, "seed": 1},
        "parallel": {"data_parallel_size": 1},
        "output": {"keep_columns": [], "rows_per_shard": 16},
        "max_error_rate": 1.0,
    }
    return jobs.spec_of(folder, **{**options, **sections})


@pytest.fixture(scope="module")
def unhurt(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    path = spec_of(tmp_path_factory.mktemp("unhurt"))
    jobs.finish(path)
    return jobs.rows_of(path.parent / "out")


def test_rows_have_the_digests_of_their_images(unhurt: list[dict[str, Any]]) -> None:
    assert len(unhurt) == 2 * NUM_ROWS
    of_row = {row["id"]: row for row in unhurt}
    names = sorted(path.name for path in PICTURES.iterdir())
    digests = [hashlib.sha256((PICTURES / name).read_bytes()).hexdigest() for name in names]
    assert of_row["row-4"]["image_digests"] == [digests[4]]
    assert of_row["row-5"]["image_digests"] == []
    assert of_row["row-6"]["image_digests"] == digests[:2]
    assert (of_row["row-7"]["image_digests"], of_row["row-7"]["error_type"]) == (None, "image_not_found")
    assert sum(row["error_type"] is not None for row in unhurt) == 2
    # Other pictures of the same size make other prompts.
    assert len({row["prompt_hash"] for row in unhurt}) == NUM_ROWS


@pytest.mark.parametrize("fault", ["worker.store:9=kill", "feeder.read:5=kill", "storage.write.before_fsync:3=kill"])
def test_killed_and_resumed_has_the_rows_of_one_never_hurt(
    fault: str, tmp_path: pathlib.Path, unhurt: list[dict[str, Any]]
) -> None:
    path = spec_of(tmp_path / "job", max_restarts=0)
    killed = jobs.run("run", path, faults=fault, BATCHINF_FAULTS_ONCE=str(tmp_path / "once"))
    assert killed.returncode != 0
    jobs.finish(path)
    assert jobs.rows_of(tmp_path / "job" / "out") == unhurt


def test_a_retry_notices_a_changed_picture(tmp_path: pathlib.Path) -> None:
    rows = [{"id": f"row-{name}", "photo": f"pictures/{name}"} for name in ("a.png", "b.png", "gone.png")]
    path = spec_of(tmp_path / "job", rows)
    pictures = tmp_path / "job" / "pictures"
    shutil.copy(PICTURES / "red-circle.png", pictures / "a.png")
    shutil.copy(PICTURES / "blue-circle.png", pictures / "b.png")
    jobs.finish(path)
    before = jobs.rows_of(tmp_path / "job" / "out")
    # The picture of a row without a result may come later.
    shutil.copy(PICTURES / "green-circle.png", pictures / "gone.png")
    jobs.finish(path, "--retry", "errors")
    after = jobs.rows_of(tmp_path / "job" / "out")
    assert after[:4] == before[:4]
    assert {row["error_type"] for row in after} == {None}
    shutil.copy(PICTURES / "red-square.png", pictures / "b.png")
    jobs.finish(path, "--retry", "row_index = 0")
    stopped = jobs.run("run", path, "--retry", "row_index <= 1")
    assert stopped.returncode == 2
    assert "row 1: image 1 ('pictures/b.png') has changed since the job ran the row" in stopped.stderr
    assert jobs.rows_of(tmp_path / "job" / "out") == after
    shutil.copy(PICTURES / "blue-circle.png", pictures / "b.png")
    jobs.finish(path)
    assert jobs.rows_of(tmp_path / "job" / "out") == after


def test_a_resume_notices_a_picture_that_changed_between_samples(tmp_path: pathlib.Path) -> None:
    rows = [{"id": "row", "photo": "pictures/red-circle.png"}]
    # Two samples run at a time, each for four steps: at the twelfth step, four of twelve are finished.
    script = {"max_num_seqs": 2, "vary_lengths": False}
    sampling = {"max_tokens": 4, "temperature": 1.0, "n": 12, "seed": 1}
    path = spec_of(tmp_path / "job", rows, sampling=sampling, scripted=script, checkpoint_interval_s=0.01)
    marker = tmp_path / "marker"
    process = jobs.start("run", path, faults=f"engine.step:12=hold {marker}")
    jobs.wait_until(lambda: marker.exists() and list((tmp_path / "job" / "out" / "journal").glob("0*")))
    jobs.kill(jobs.family(process.pid))
    jobs.end(process)
    picture = tmp_path / "job" / "pictures" / "red-circle.png"
    shutil.copy(PICTURES / "red-square.png", picture)
    stopped = jobs.run("run", path)
    assert stopped.returncode == 2
    assert "row 0: image 1 ('pictures/red-circle.png') has changed since the job ran the row" in stopped.stderr
    shutil.copy(PICTURES / "red-circle.png", picture)
    jobs.finish(path)
    assert len({row["prompt_hash"] for row in jobs.rows_of(tmp_path / "job" / "out")}) == 1
