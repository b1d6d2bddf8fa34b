"""Whole jobs with images: killed, resumed and retried, with pictures that change meanwhile."""

import hashlib
import json
import os
import pathlib
import shutil
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import stores
import yaml
from adapters import make_adapter
from pictures import VISION, data_url, paths_in_lines, ten_rows, write_lines
from PIL import Image
from run_batch_lines import answered, by_batchinf, by_vllm

import batchinf
import jobs
from batchinf.base.errors import DriftError, UserError
from batchinf.commands.verify import verify_job
from batchinf.commands.whole_row import read_whole_row
from batchinf.job.input_job import image_folder
from batchinf.spec.file import read_spec
from batchinf.spec.input import InputSpec

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
    # The row without a picture runs.
    where = {"images": {"on_missing": "run"}, **(sections.pop("input", None) or options["input"])}
    return jobs.spec_of(folder, **{**options, "input": where, **sections})


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
    facts = ("image_formats", "image_widths", "image_heights")
    assert [of_row["row-6"][name] for name in facts] == [["PNG"] * 2, [96] * 2, [64] * 2]
    assert [of_row["row-7"][name] for name in facts] == [None] * 3
    assert sum(row["error_type"] is not None for row in unhurt) == 2
    # Other pictures of the same size make other prompts.
    assert len({row["prompt_hash"] for row in unhurt}) == NUM_ROWS


@pytest.mark.slow
@pytest.mark.parametrize("own", [{}, {"task": "embed", "sampling": None}])
def test_rows_with_too_few_pictures_are_counted_at_the_end(own: dict[str, Any], tmp_path: pathlib.Path) -> None:
    photo = "pictures/blue-square.png"
    columns = [(photo, photo), (photo, None), ("", photo), (None, None), ("pictures/gone.png", None)]
    rows = [{"id": str(number), "photo": a, "other": b} for number, (a, b) in enumerate(columns)]
    messages = [{"role": "user", "content": [*ASK[0]["content"], {"type": "image", "column": "other"}]}]
    where = {"path": str(tmp_path / "rows.jsonl"), "messages": messages}
    done = jobs.finish(spec_of(tmp_path, rows, **{"input": where, "sampling": {"max_tokens": 4}, **own}))
    none = "1 of 5 output rows ran without an image, since their columns of images are empty"
    some = "2 of 5 output rows ran with fewer images than the job has columns of them, since some are empty"
    for printed in (done.stdout, jobs.run("status", tmp_path / "out").stdout):
        assert {none, some} <= {line.strip() for line in printed.splitlines()}
    one = spec_of(tmp_path / "one", rows[:3], **own)  # of one column with pictures, of which the third row has none
    printed = jobs.finish(one).stdout
    assert "ran without an image" in printed and "with fewer images" not in printed
    all_of_them = spec_of(tmp_path / "all", rows[:2], **own)
    assert "without an image" not in jobs.finish(all_of_them).stdout


@pytest.mark.slow
def test_rows_with_the_same_pictures_are_left_out(tmp_path: pathlib.Path) -> None:
    path = spec_of(tmp_path / "old")
    assert f"relative paths of images begin in {tmp_path / 'old'}\n" in jobs.finish(path).stdout
    new = tmp_path / "new"
    exclude = {"job": str(path.parent / "out"), "on": "prompt_hash"}
    again = spec_of(new, input={"path": str(new / "rows.jsonl"), "messages": ASK, "exclude": exclude})
    changed = sorted(path.name for path in PICTURES.iterdir())[0]
    data = (new / "pictures" / changed).read_bytes()
    (new / "pictures" / changed).write_bytes(data + b"more")
    rows = [json.loads(line) for line in (new / "rows.jsonl").read_text().splitlines()]
    # The path does not count, and bytes in the row count like those of a file.
    (new / "pictures" / "blue-square.png").rename(new / "moved.png")
    for row in rows:
        if row["photo"] == "pictures/blue-square.png":
            row["photo"] = "moved.png"
        if row["photo"] == "pictures/blue-triangle.png":
            row["photo"] = data_url((PICTURES / "blue-triangle.png").read_bytes())
    write_lines(new / "rows.jsonl", rows)
    jobs.finish(again)
    # Those with the changed picture; 6 has two, and the picture of 7 was gone and is gone.
    assert {row["row_index"] for row in jobs.rows_of(new / "out")} == {0, 6, 7, 12, 24, 36}

    compared = jobs.run("diff", tmp_path / "old" / "out", new / "out", "--on", "id")
    assert "token ids or images, 8 of them other images" in compared.stdout  # the rows without errors, twice

    [part, *_] = sorted((tmp_path / "old" / "out" / "parts").iterdir())
    table = pq.read_table(part)
    pq.write_table(table.drop_columns(["unrendered_prompt_hash"]), part)
    refused = jobs.run("run", again, "--set", f"output.path={tmp_path / 'third'}")
    assert (
        refused.returncode == 2
        and "began with an older version of batchinf; give both jobs an id_column" in refused.stderr
    )


@pytest.mark.parametrize("fault", ["worker.store:9=kill", "feeder.read:5=kill", "storage.write.before_fsync:3=kill"])
def test_killed_and_resumed_has_the_rows_of_one_never_hurt(
    fault: str, tmp_path: pathlib.Path, unhurt: list[dict[str, Any]]
) -> None:
    path = spec_of(tmp_path / "job", max_restarts=0)
    killed = jobs.run("run", path, faults=fault, BATCHINF_FAULTS_ONCE=str(tmp_path / "once"))
    assert killed.returncode != 0
    jobs.finish(path)
    assert jobs.rows_of(tmp_path / "job" / "out") == unhurt


def rows_by_position(out: pathlib.Path) -> list[dict[str, Any]]:
    """The rows of all slices, as `jobs.rows_of` gives those of a job."""
    table = batchinf.open(out).table().drop_columns(["attempts"])
    return table.sort_by([("row_index", "ascending"), ("sample_index", "ascending")]).to_pylist()


def test_slices_in_the_order_of_prefixes(tmp_path: pathlib.Path, unhurt: list[dict[str, Any]]) -> None:
    path = spec_of(tmp_path / "job")
    for number in range(2):
        jobs.finish(path, "--slice", f"{number}/2", "--set", "input.order=prefix")
    assert rows_by_position(tmp_path / "job" / "out") == unhurt


@pytest.mark.slow
def test_a_job_in_a_bucket(url: str, store: stores.Proxy, tmp_path: pathlib.Path, unhurt: list[dict[str, Any]]) -> None:
    output = {"path": url, "work_dir": str(tmp_path / "work"), "keep_columns": [], "rows_per_shard": 16}
    path = spec_of(tmp_path / "job", output=output)
    assert jobs.run("run", path, faults="mirror.after_part:2=kill", **store.environment).returncode == -9
    shutil.rmtree(tmp_path / "work")
    jobs.finish(path, **store.environment)
    assert stores.rows(url) == unhurt
    shutil.copy(PICTURES / "red-square.png", tmp_path / "job" / "pictures" / "blue-circle.png")
    take = ["--set", "input.images.on_changed=take"]
    replaced = jobs.finish(path, "--retry", "row_index = 0", *take, **store.environment)
    assert "1 input row ran again with other images than before (row 0)" in replaced.stderr
    digest = hashlib.sha256((PICTURES / "red-square.png").read_bytes()).hexdigest()
    assert [row["image_digests"] for row in stores.rows(url)[:2]] == [[digest]] * 2
    assert stores.rows(url)[2:] == unhurt[2:]


def test_an_input_and_its_pictures_in_a_bucket(
    url: str, store: stores.Proxy, tmp_path: pathlib.Path, unhurt: list[dict[str, Any]]
) -> None:
    path = spec_of(tmp_path / "job", input={"path": f"{url}/in/rows.jsonl", "messages": ASK})
    for file in [tmp_path / "job" / "rows.jsonl", *PICTURES.iterdir()]:
        folder = "in" if file.suffix == ".jsonl" else "in/pictures"
        stores.put(f"{url}/{folder}/{file.name}", file.read_bytes())
    shutil.rmtree(tmp_path / "job" / "pictures")
    jobs.finish(path, **store.environment)
    rows = jobs.rows_of(tmp_path / "job" / "out")
    gone = f"image 1: '{url}/in/pictures/gone.png' does not exist"
    assert rows == [{**row, "error_message": gone} if row["error_type"] else row for row in unhurt]
    # Nothing was read twice: the pictures and the one that is gone.
    num_read = sum("pictures" in path for method, path in store.seen if method == "GET")
    assert len(list(PICTURES.iterdir())) <= num_read <= NUM_ROWS
    shown = jobs.run("head", tmp_path / "job" / "out", "--row", "row-1", **store.environment)
    assert shown.returncode == 0 and "PNG, " in shown.stdout


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"task": "rerank", "input": {"messages": None, "query_column": "id", "document_column": "id", "images": {}}},
         "input.query_column: got it in a job with images, which queries and documents cannot have"),
        ({"task": "reward"}, "has no classification head"),
        ({"task": "classify", "pooling": {"labels": ["a", "b"]}}, "has no classification head"),
        ({"task": "logits", "logits": {"positions": {"column": "id"}}}, "logits.positions: got a column in a job with"),
    ],
)  # fmt: skip
def test_tasks_that_take_no_images_here(sections: dict[str, Any], message: str, tmp_path: pathlib.Path) -> None:
    path = spec_of(tmp_path / "job", sampling=None)
    spec = yaml.safe_load(path.read_text())
    where = {**spec["input"], **sections.get("input", {})}
    path.write_text(yaml.safe_dump({**spec, **sections, "input": where}))
    refused = jobs.run("run", path, is_refused=True)
    assert refused.returncode == 2
    assert message in refused.stderr
    assert len(refused.stderr.splitlines()) == 1


def test_a_folder_of_pictures_is_an_input(tmp_path: pathlib.Path) -> None:
    content = [{"type": "image", "column": "path"}, {"type": "text", "text": "{{ folder }}?"}]
    folder = tmp_path / "job" / "pictures"
    where = {"path": str(folder), "id_column": "path", "messages": [{"role": "user", "content": content}],
             "where": "path NOT LIKE '%square%'"}  # fmt: skip
    path = spec_of(tmp_path / "job", input=where, sampling={"max_tokens": 8}, output={"keep_columns": ["num_bytes"]})
    jobs.finish(path)
    before = jobs.rows_of(tmp_path / "job" / "out")
    names = sorted(picture.name for picture in folder.iterdir() if "square" not in picture.name)
    assert [row["id"] for row in before] == names
    assert [row["num_bytes"] for row in before] == [(folder / name).stat().st_size for name in names]
    digests = [[hashlib.sha256((folder / name).read_bytes()).hexdigest()] for name in names]
    assert [row["image_digests"] for row in before] == digests
    shutil.copy(PICTURES / "red-circle.png", folder / "a.png")
    refused = jobs.run("run", path, is_refused=True)
    assert "1 file is new: a.png; use --extend" in refused.stderr
    jobs.finish(path, "--extend")
    after = jobs.rows_of(tmp_path / "job" / "out")
    assert after[:-1] == before
    assert (after[-1]["id"], after[-1]["row_index"]) == ("a.png", 12)
    shutil.copy(PICTURES / "red-square.png", folder / "blue-circle.png")
    replaced = jobs.finish(path, "--retry", "id = 'blue-circle.png'", "--set", "input.images.on_changed=take")
    assert "1 input row ran again with other images than before (row 0)" in replaced.stderr
    [new] = [row for row in jobs.rows_of(tmp_path / "job" / "out") if row["row_index"] == 0]
    assert new["image_digests"] == [hashlib.sha256((folder / "blue-circle.png").read_bytes()).hexdigest()]


def test_a_picture_that_was_mended_in_its_folder_runs_again(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "pictures"
    folder.mkdir()
    for name in ("a.png", "b.png"):
        shutil.copy(PICTURES / "red-circle.png", folder / name)
    (folder / "b.png").write_bytes((folder / "b.png").read_bytes()[:40])
    content = [{"type": "image", "column": "path"}, {"type": "text", "text": "What?"}]
    where = {"path": str(folder), "id_column": "path", "messages": [{"role": "user", "content": content}]}
    path = spec_of(tmp_path / "job", input=where, sampling={"max_tokens": 4}, max_error_rate=1.0)
    jobs.finish(path)
    broken = jobs.rows_of(tmp_path / "job" / "out")
    assert [row["error_type"] for row in broken] == [None, "image_broken"]
    shutil.copy(PICTURES / "red-circle.png", folder / "b.png")
    jobs.finish(path, "--retry", "errors")
    mended = jobs.rows_of(tmp_path / "job" / "out")
    assert [row["error_type"] for row in mended] == [None, None]
    assert mended[0] == broken[0]
    assert mended[1]["image_digests"] == mended[0]["image_digests"]


@pytest.mark.slow
def test_a_chain_of_jobs_keeps_its_images(tmp_path: pathlib.Path) -> None:
    """Paths and bytes of kept columns are the images of the next job. Bytes are copied only if they are kept."""
    names = sorted(path.name for path in PICTURES.iterdir())[:2]
    contents = [(PICTURES / name).read_bytes() for name in names]
    feature = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    of_hub = pa.array([{"bytes": data, "path": "gone.png"} for data in contents], feature)
    paths = [f"pictures/{name}" for name in names]
    first = spec_of(tmp_path / "first", sampling={"max_tokens": 4},
                    input={"path": str(tmp_path / "first" / "rows.parquet"), "id_column": None,
                           "images_column": "photo", "messages_column": "chat"},
                    output={"keep_columns": ["path", "photo"]})  # fmt: skip
    chat = [{"role": "user", "content": "What?"}]
    columns = {"path": paths, "photo": of_hub, "other": of_hub, "chat": [chat] * 2}
    pq.write_table(pa.table(columns), tmp_path / "first" / "rows.parquet")
    jobs.finish(first)
    rows = jobs.rows_of(tmp_path / "first" / "out")
    digests = [[hashlib.sha256(data).hexdigest()] for data in contents]
    assert [row["image_digests"] for row in rows] == digests
    assert [row["photo"]["bytes"] for row in rows] == contents
    assert "other" not in rows[0]
    for column in ("path", "photo"):
        where = {"path": None, "job": str(tmp_path / "first" / "out"), "id_column": None, "images_column": column,
                 "prompt_template": "<image> {{ text }}", "messages": None}  # fmt: skip
        again = spec_of(tmp_path / column, input=where, sampling={"max_tokens": 4})
        jobs.finish(again)
        assert [row["image_digests"] for row in jobs.rows_of(tmp_path / column / "out")] == digests


def test_a_chain_knows_the_folder_in_which_its_first_job_began(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"id": "row", "photo": "pictures/red-circle.png"}]
    folder = tmp_path / "first"
    where = {"path": os.path.relpath(folder / "rows.jsonl", jobs.ROOT), "messages": ASK}
    jobs.finish(spec_of(folder, rows, input=where, output={"keep_columns": ["photo"]}))
    second = {"path": None, "job": str(folder / "out"), "messages": ASK}
    jobs.finish(spec_of(tmp_path / "second", input=second))
    # From here the path in the first spec leads nowhere, and it could lead to another file.
    monkeypatch.chdir(tmp_path)
    for name in ("first", "second"):
        chained = InputSpec(job=str(tmp_path / name / "out"), images_column=("photo",), prompt_template="<image>")
        assert image_folder(chained) == str(folder)


def test_repaired_rows_have_their_own_images(tmp_path: pathlib.Path) -> None:
    rows = [{"id": "a", "photo": "pictures/red-circle.png"}, {"id": "b", "photo": "pictures/gone.png"}]
    path = spec_of(tmp_path / "job", rows)
    jobs.finish(path)
    # Relative to the folder of the input, wherever the file with the repairs is.
    (tmp_path / "elsewhere").mkdir()
    fixed = write_lines(tmp_path / "elsewhere" / "fixed.jsonl", [{"id": "b", "photo": "pictures/blue-circle.png"}])
    jobs.finish(path, "--retry", "errors", "--input", str(fixed))
    after = {row["id"]: row for row in jobs.rows_of(tmp_path / "job" / "out")}
    assert after["b"]["error_type"] is None
    digest = hashlib.sha256((PICTURES / "blue-circle.png").read_bytes()).hexdigest()
    assert after["b"]["image_digests"] == [digest]
    # A repair may give a good row another picture.
    write_lines(fixed, [{"id": "a", "photo": "pictures/blue-circle.png"}])
    jobs.finish(path, "--retry", "id = 'a'", "--input", str(fixed))
    repaired = jobs.rows_of(tmp_path / "job" / "out")
    assert [row["image_digests"] for row in repaired] == [[digest]] * 4
    # The other rows of its retry must have the pictures that they had.
    shutil.copy(PICTURES / "red-square.png", tmp_path / "job" / "pictures" / "blue-circle.png")
    write_lines(fixed, [{"id": "a", "photo": "pictures/red-circle.png"}])
    stopped = jobs.run("run", path, "--retry", "error_type is null", "--input", str(fixed))
    assert stopped.returncode == 2
    assert "row 1: image 1 ('pictures/blue-circle.png') has changed since the job ran the row" in stopped.stderr
    assert jobs.rows_of(tmp_path / "job" / "out") == repaired


def test_the_files_of_the_image_processor_identify_the_model(tmp_path: pathlib.Path) -> None:
    model = shutil.copytree(VISION, tmp_path / "model")
    path = spec_of(tmp_path / "job", [{"id": "row", "photo": "pictures/red-circle.png"}], model=str(model))
    jobs.finish(path)
    results = batchinf.open(tmp_path / "job" / "out")
    assert results.tokenizer() is not None
    processor = model / "processor_config.json"
    processor.write_text(processor.read_text().replace("0.5", "0.4"))
    refused = jobs.run("run", path, is_refused=True)
    assert refused.returncode == 2
    assert "model" in refused.stderr
    with pytest.raises(DriftError):
        results.tokenizer()


@pytest.mark.slow
def test_a_retry_stops_at_a_changed_picture_or_takes_it(tmp_path: pathlib.Path) -> None:
    rows = [{"id": f"row-{name}", "photo": f"pictures/{name}"} for name in ("a.png", "b.png", "gone.png")]
    # Without a temperature, a row that runs again has the same text.
    path = spec_of(tmp_path / "job", rows, sampling={"max_tokens": 8, "temperature": 0.0, "n": 1})
    pictures = tmp_path / "job" / "pictures"
    shutil.copy(PICTURES / "red-circle.png", pictures / "a.png")
    shutil.copy(PICTURES / "blue-circle.png", pictures / "b.png")
    jobs.finish(path)
    before = jobs.rows_of(tmp_path / "job" / "out")
    # The picture of a row without a result may come later.
    shutil.copy(PICTURES / "green-circle.png", pictures / "gone.png")
    jobs.finish(path, "--retry", "errors")
    after = jobs.rows_of(tmp_path / "job" / "out")
    assert after[:2] == before[:2]
    assert {row["error_type"] for row in after} == {None}
    shutil.copy(PICTURES / "red-square.png", pictures / "b.png")
    jobs.finish(path, "--retry", "row_index = 0")
    assert jobs.rows_of(tmp_path / "job" / "out") == after
    stopped = jobs.run("run", path, "--retry", "row_index <= 1")
    assert stopped.returncode == 2
    assert "row 1: image 1 ('pictures/b.png') has changed since the job ran the row" in stopped.stderr
    assert jobs.rows_of(tmp_path / "job" / "out") == after
    # With the old picture, a plain run ends the retry.
    shutil.copy(PICTURES / "blue-circle.png", pictures / "b.png")
    jobs.finish(path)
    assert jobs.rows_of(tmp_path / "job" / "out") == after
    # With the new one, too, if the user says so. A kill changes nothing in this.
    shutil.copy(PICTURES / "red-square.png", pictures / "b.png")
    killed = jobs.run("run", path, "--retry", "row_index <= 1", faults="retry.after_line=kill")
    assert killed.returncode != 0
    again = jobs.run("run", path)
    assert again.returncode == 2
    assert "--set input.images.on_changed=take" in again.stderr
    taken = jobs.finish(path, "--set", "input.images.on_changed=take")
    assert "1 input row ran again with other images than before (row 1)" in taken.stderr
    replaced = jobs.rows_of(tmp_path / "job" / "out")
    others = [number for number, row in enumerate(replaced) if row["row_index"] != 1]
    assert [replaced[number] for number in others] == [after[number] for number in others]
    digest = hashlib.sha256((PICTURES / "red-square.png").read_bytes()).hexdigest()
    assert [row["image_digests"] for row in replaced if row["row_index"] == 1] == [[digest]]
    assert jobs.run("check", tmp_path / "job" / "out").returncode == 0
    assert jobs.run("export", tmp_path / "job" / "out", "-o", tmp_path / "rows.jsonl").returncode == 0


def test_a_changed_picture_fails_its_row_in_an_attempt_and_not_the_job(tmp_path: pathlib.Path) -> None:
    rows = [{"id": f"row-{name}", "photo": f"pictures/{name}"} for name in ("a.png", "b.png")]
    path = spec_of(tmp_path / "job", rows, retry={"where": "true"}, max_error_rate=1.0)
    pictures = tmp_path / "job" / "pictures"
    shutil.copy(PICTURES / "red-circle.png", pictures / "a.png")
    shutil.copy(PICTURES / "blue-circle.png", pictures / "b.png")
    assert jobs.run("run", path, faults="retry.after_line=kill").returncode == -9
    shutil.copy(PICTURES / "red-square.png", pictures / "b.png")
    jobs.finish(path)
    after = jobs.table_of(tmp_path / "job" / "out").to_pylist()
    errors = {row["row_index"]: row["error_type"] for row in after}
    assert errors == {0: None, 1: "image_changed"}
    assert {row["error_message"] for row in after if row["row_index"] == 1} == {
        "image 1 ('pictures/b.png') has changed since the job ran the row"
    }
    assert {row["attempts"] for row in after} == {2}
    # By hand, the job stops.
    shutil.copy(PICTURES / "green-circle.png", pictures / "a.png")
    assert jobs.run("run", path, "--retry", "row_index = 0").returncode == 2


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


def test_an_image_that_is_gone_between_two_requests_of_a_row(tmp_path: pathlib.Path) -> None:
    rows = [{"id": "row", "photo": "pictures/red-circle.png"}]
    choices = [f" choice {number}" for number in range(12)]
    where = {"choices": choices, "path": str(tmp_path / "job" / "rows.jsonl"), "messages": ASK}
    script = {"max_num_seqs": 1, "step_s": 0.001}
    path = spec_of(tmp_path / "job", rows, task="score", input=where, sampling=None, scripted=script,
                   checkpoint_interval_s=0.01)  # fmt: skip
    marker = tmp_path / "marker"
    process = jobs.start("run", path, faults=f"engine.step:4=hold {marker}")
    jobs.wait_until(lambda: marker.exists() and list((tmp_path / "job" / "out" / "journal").glob("0*")))
    jobs.kill(jobs.family(process.pid))
    jobs.end(process)
    (tmp_path / "job" / "pictures" / "red-circle.png").unlink()
    jobs.finish(path)
    [row] = jobs.rows_of(tmp_path / "job" / "out")
    assert row["error_type"] == "image_not_found"
    assert row["choice_logprob_sums"] is None


def of_vllm(folder: pathlib.Path, where: dict[str, Any], **sections: Any) -> pathlib.Path:
    """A job on real vLLM."""
    options: dict[str, Any] = {
        "model": {"name": str(VISION), "dtype": "float32"},
        "input": {"id_column": None, **where},
        "sampling": {"max_tokens": 6, "temperature": 0.0, "logprobs": 3, "ignore_eos": True},
        "parallel": {"data_parallel_size": 1},
        "output": {"keep_columns": [], "include_prompt": True, "rows_per_shard": 4},
        "engine": {"max_model_len": 512, "max_num_seqs": 2},
        "scripted": None,
    }
    folder.mkdir(exist_ok=True)
    # The row without a picture runs.
    where = {"images": {"on_missing": "run"}, **options["input"], **(sections.pop("input", None) or {})}
    return jobs.spec_of(folder, **{**options, "input": where, **sections})


def assert_same(rows: list[dict[str, Any]], others: list[dict[str, Any]]) -> None:
    """Equal prompts, images and tokens; logprobs as near as other batches allow."""
    names = ("row_index", "prompt_hash", "image_digests", "prompt_token_ids", "token_ids", "text", "error_type")
    assert [[row[name] for name in names] for row in rows] == [[row[name] for name in names] for row in others]
    for row, other in zip(rows, others, strict=True):
        assert np.allclose(row["logprobs"], other["logprobs"], rtol=0, atol=1e-5)


@pytest.mark.slow
def test_a_batch_file_has_the_answers_of_vllm(tmp_path: pathlib.Path) -> None:
    """`vllm run-batch` and `batchinf run-batch` over one file."""
    pytest.importorskip("vllm")
    lines = []
    for number, row in enumerate(ten_rows()):
        images = [{"type": "image_url", "image_url": {"url": data_url(picture)}} for picture in row.pictures]
        content = [{"type": "text", "text": f"Look {number}: "}, *images, {"type": "text", "text": "What is it?"}]
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 6, "temperature": 0,
                "logprobs": True, "top_logprobs": 2}  # fmt: skip
        lines.append({"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions", "body": body})
    broken = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]
    lines.append({**lines[0], "custom_id": "broken", "body": {"messages": [{"role": "user", "content": broken}]}})
    path = write_lines(tmp_path / "in.jsonl", lines)
    flags = ("--dtype", "float32", "--enforce-eager", "--max-model-len", "512")
    answers, expected = (by(path, VISION, *flags) for by in (by_batchinf, by_vllm))
    assert answers["broken"]["error"]["code"] == "image_broken"
    assert expected["broken"]["response"]["status_code"] == 400
    found, theirs = answered(answers), answered(expected)
    assert found.keys() == theirs.keys() == {str(number) for number in range(10)}
    for name, body in found.items():
        [choice] = body["choices"]
        [other] = theirs[name]["choices"]
        assert choice["message"]["content"] == other["message"]["content"]
        assert body["usage"].items() <= theirs[name]["usage"].items()
        logprobs, others = ([token["logprob"] for token in of["logprobs"]["content"]] for of in (choice, other))
        assert np.allclose(logprobs, others, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_rewards_of_pictures_equal_transformers(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("vllm")
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForImageTextToText, AutoProcessor

    model = tmp_path / "model"
    shutil.copytree(VISION, model)
    config = json.loads((model / "config.json").read_text())
    config |= {"architectures": ["Idefics3ForSequenceClassification"], "num_labels": 1}
    (model / "config.json").write_text(
        json.dumps({**config, "text_config": {**config["text_config"], "num_labels": 1}})
    )
    [weights] = model.glob("*.safetensors")
    head = torch.randn(1, 64, generator=torch.Generator().manual_seed(0))
    save_file({**load_file(weights), "score.weight": head}, weights, metadata={"format": "pt"})
    rows = [{"id": path.name, "photo": str(path)} for path in sorted(PICTURES.iterdir())[:4]]
    where = {
        "path": str(write_lines(tmp_path / "rows.jsonl", rows)),
        "messages": ASK,
        "images": {"folders": [str(PICTURES)]},
    }
    path = jobs.spec_of(tmp_path, model=str(model), task="reward", input=where, output={"keep_columns": []},
                        parallel={"data_parallel_size": 1}, scripted=None, sampling=None)  # fmt: skip
    jobs.finish(path)

    processor = AutoProcessor.from_pretrained(VISION)
    reference = AutoModelForImageTextToText.from_pretrained(VISION, dtype=torch.float32).eval()
    for row in jobs.rows_of(tmp_path / "out"):
        message = {"role": "user", "content": [{"type": "text", "text": f"{row['id']}: "}, {"type": "image"}]}
        text = processor.apply_chat_template([message], add_generation_prompt=True, tokenize=False)
        with Image.open(PICTURES / row["id"]) as image:
            inputs = processor(
                text=[text], images=[[image.convert("RGB")]], return_tensors="pt", add_special_tokens=False
            )
        with torch.no_grad():
            last = reference.model(**inputs).last_hidden_state[0, -1]
        assert abs(row["reward"] - float(last @ head[0])) < 1e-4


@pytest.mark.slow
def test_adapters_and_hidden_states_run_with_images(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("vllm")
    layers = tuple(f"model.text_model.layers.{number}" for number in range(2))
    widths = {"self_attn.q_proj": (64, 128), "mlp.down_proj": (128, 64)}
    adapters = {
        name: str(make_adapter(tmp_path / name, seed, modules=tuple(widths), layers=layers, widths=widths))
        for seed, name in enumerate("ab")
    }
    where = paths_in_lines(tmp_path, ten_rows()[:6])
    lines = [json.loads(line) for line in pathlib.Path(where["path"]).read_text().splitlines()]
    names = ["a", "b", None] * 2
    write_lines(pathlib.Path(where["path"]), [{**row, "adapter": name} for row, name in zip(lines, names, strict=True)])
    where["apply_chat_template"] = False
    model = {"name": str(VISION), "dtype": "float32", "lora": adapters}
    jobs_of = {
        "lora": {"model": model, "input": {"id_column": None, "adapter_column": "adapter", **where}},
        "states": {"task": "hidden_states", "pooling": {"positions": "all"}, "sampling": None},
    }
    for name, sections in jobs_of.items():
        path = of_vllm(tmp_path / name, where, output={"keep_columns": []}, **sections)
        jobs.finish(path)
    lines_of = {row["row_index"]: row["token_ids"] for row in jobs.rows_of(tmp_path / "lora" / "out")}
    assert len(set(map(tuple, lines_of.values()))) == 6


@pytest.mark.slow
def test_a_row_of_images_is_shown_without_stored_prompts_and_is_not_verified(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("vllm")
    rows = ten_rows()
    where = paths_in_lines(tmp_path, rows)
    sampling = {"max_tokens": 6, "temperature": 0.0, "logprobs": 3, "prompt_logprobs": 2, "ignore_eos": True}
    path = of_vllm(tmp_path / "job", {"apply_chat_template": False, **where}, sampling=sampling,
                   output={"keep_columns": []})  # fmt: skip
    jobs.finish(path)
    with pytest.raises(UserError, match=r"^a job with images cannot be verified; run the job a second time with --set"):
        verify_job(read_spec(path))
    report = read_whole_row(str(tmp_path / "job" / "out"), "6")
    assert report.prompt_note == ""
    assert report.prompt is not None
    pieces = [piece.text for piece in report.prompt]
    assert pieces.count("<image>") == 2
    assert [picture.name for picture in report.pictures] == ["pictures/6-0.png", "pictures/6-1.png"]


@pytest.mark.slow
def test_real_vllm_killed_with_images(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("vllm")
    where = paths_in_lines(tmp_path, ten_rows())
    unhurt, hurt = (
        of_vllm(tmp_path / name, {"apply_chat_template": False, **where}, max_restarts=0, checkpoint_interval_s=0.01)
        for name in ("unhurt", "hurt")
    )
    jobs.finish(unhurt)
    assert jobs.run("run", hurt, faults="worker.store:3=kill").returncode != 0
    jobs.finish(hurt)
    assert_same(jobs.rows_of(tmp_path / "hurt" / "out"), jobs.rows_of(tmp_path / "unhurt" / "out"))
