import os
import pathlib
import shutil
import subprocess
import sys

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from inputs import check, records

from batchinf.base.errors import InputError
from batchinf.prompts.checks import input_notes
from batchinf.source.files import InputLocation
from batchinf.source.rows import open_source


def test_a_dataset_by_id_is_asked_for_once(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hub")
    rows = records(200)
    (tmp_path / "repo").mkdir()
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "repo" / "train-0.parquet")
    location = InputLocation(str(tmp_path / "repo"), "hf", split="train")
    first = open_source(location, tmp_path / "cache")
    check(first, list(rows))
    first.close()
    shutil.rmtree(tmp_path / "repo")
    again = open_source(location, tmp_path / "cache")
    check(again, list(rows))
    assert again.fingerprint == first.fingerprint
    again.close()
    with pytest.raises(InputError, match=r"there is no file or folder .* cannot be loaded as a Hugging Face dataset"):
        open_source(location, tmp_path / "another cache")


def test_a_slice_of_a_split(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hub")
    (tmp_path / "repo").mkdir()
    (tmp_path / "repo" / "train.jsonl").write_text("".join(f'{{"x": {i}}}\n' for i in range(50)))
    for _ in range(2):
        found = open_source(InputLocation(str(tmp_path / "repo"), "hf", split="train[10:30]"), tmp_path / "cache")
        assert [row.values["x"] for row in found.read(0, found.num_rows)] == list(range(10, 30))
        found.close()


def test_the_fingerprint_of_a_saved_dataset_is_of_its_rows(tmp_path: pathlib.Path) -> None:
    found = []
    for name, word in [("a", "x"), ("b", "x"), ("c", "y")]:
        datasets.Dataset.from_list([{"prompt": word}] * 10).save_to_disk(tmp_path / name)
        found.append(open_source(InputLocation(str(tmp_path / name)), tmp_path / f"cache {name}").fingerprint)
    assert found[0] == found[1] != found[2]


def test_a_split_that_is_not_chosen_is_named(tmp_path: pathlib.Path) -> None:
    splits = {name: datasets.Dataset.from_dict({"x": [name]}) for name in ("train", "test")}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "two")
    datasets.DatasetDict({"train": splits["train"]}).save_to_disk(tmp_path / "one")
    for name, split, is_noted in [("two", None, True), ("two", "test", False), ("one", None, False)]:
        location = InputLocation(str(tmp_path / name), split=split)
        found = open_source(location, tmp_path / f"cache {name} {split}")
        assert found.read(0, 1)[0].values["x"] == (split or "train")
        words = f"{location.path}: the split train is read, of train, test; `input.split` names another one"
        assert list(input_notes(found)) == ([f"note: {words}"] if is_noted else [])
        found.close()


def test_a_file_that_is_no_part_of_the_dataset_is_named(tmp_path: pathlib.Path) -> None:
    datasets.DatasetDict({"train": datasets.Dataset.from_dict({"x": [1, 2]})}).save_to_disk(tmp_path / "data")
    train = tmp_path / "data" / "train"
    (tmp_path / "data" / ".git").mkdir()
    (tmp_path / "data" / ".git" / "x.jsonl").write_text("")
    for name, others in (
        ("cache-1.arrow", None),
        ("more.arrow", "train/more.arrow"),
        ("more.jsonl", "train/more.arrow, train/more.jsonl"),
        ("../README.md", "README.md, train/more.arrow, train/more.jsonl"),
    ):
        shutil.copy(train / "data-00000-of-00001.arrow", train / name)
        opened = open_source(InputLocation(str(tmp_path / "data")), tmp_path / "cache")
        assert opened.num_rows == 2
        ending = f"so these are not read: {others}"
        assert [note.endswith(ending) for note in input_notes(opened)] == ([] if others is None else [True])
        opened.close()


def test_a_split_of_a_dataset_by_id_that_is_not_chosen_is_named(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hub")
    (tmp_path / "repo").mkdir()
    for name in ("train", "test"):
        (tmp_path / "repo" / f"{name}.jsonl").write_text(f'{{"x": "{name}"}}\n')
    said = f"note: {tmp_path}/repo: the split train is read, of train, test; `input.split` names another one"
    for split, lines in ((None, [said]), (None, [said]), ("test", [])):  # the second time, the hub is not asked
        found = open_source(InputLocation(f"{tmp_path}/repo", "hf", split=split), tmp_path / f"cache {split}")
        assert found.read(0, 1)[0].values["x"] == (split or "train")
        assert list(input_notes(found)) == lines
        found.close()


def test_a_dataset_that_the_hub_does_not_give(tmp_path: pathlib.Path) -> None:
    code = (
        "import sys, pathlib; from batchinf.source.rows import *; from batchinf.base.errors import InputError\n"
        "try: open_source(InputLocation('no-such/dataset'), pathlib.Path(sys.argv[1]))\n"
        "except InputError as error: print(error)"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.startswith("there is no file or folder no-such/dataset, and it cannot be loaded as a ")
    assert done.stdout.count("\n") == 1
