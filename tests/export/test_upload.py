"""Exports to a bucket: whole, or not there."""

import json
import pathlib
import uuid

import pytest
import stores

import jobs
from batchinf.base.errors import OutputError, UserError
from batchinf.commands.export import Exported, ExportRequest, export_job
from batchinf.export import files

pytestmark = pytest.mark.usefixtures("store_of_this_process")

NUM_ROWS = 24


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("job")
    rows = [{"id": f"r{n}", "prompt": "a" if n else ""} for n in range(NUM_ROWS)]
    (folder / "in.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    spec = jobs.spec_of(
        folder,
        input={"path": str(folder / "in.jsonl")},
        output={"keep_columns": []},
        scripted={"step_s": 0.0},
        max_error_rate=1.0,
    )
    jobs.finish(spec)
    return folder / "out"


def exported(out: pathlib.Path, path: pathlib.Path | str, **options: object) -> Exported:
    return export_job(str(out), ExportRequest(path=str(path), **options))  # type: ignore[arg-type]


# -- buckets -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder() -> str:
    return f"s3://{stores.BUCKET}/{uuid.uuid4().hex[:12]}"


@pytest.mark.parametrize("form", ["jsonl", "csv", "parquet", "openai-batch"])
def test_an_object_has_the_bytes_of_the_file(
    form: str, out: pathlib.Path, tmp_path: pathlib.Path, folder: str, store: stores.Proxy
) -> None:
    exported(out, tmp_path / "rows.x", to=form)
    done = exported(out, f"{folder}/rows.x", to=form)
    written = sorted(path.name for path in tmp_path.iterdir())
    assert sorted(done.files) == [f"{folder}/{name}" for name in written]
    assert [*stores.names(folder)] == written
    for name in written:
        assert stores.read(folder, name) == (tmp_path / name).read_bytes()


def test_several_objects_and_one_that_is_there(out: pathlib.Path, folder: str, store: stores.Proxy) -> None:
    store.fault = stores.often(0.2, seed=3, faults=("500", "503", "drop"))
    exported(out, f"{folder}/rows.jsonl", num_files=3)
    names = [f"rows-{number:05}-of-00003.jsonl" for number in range(3)]
    assert sorted(stores.names(folder)) == names
    lines = b"".join(stores.read(folder, name) for name in names).splitlines()
    assert [json.loads(line)["row_index"] for line in lines] == [*range(NUM_ROWS)]
    with pytest.raises(UserError, match=r"^-o: s3://.*rows-00000-of-00003\.jsonl is there already; "):
        exported(out, f"{folder}/rows.jsonl", num_files=3)
    exported(out, f"{folder}/rows.jsonl", num_files=3, overwrites=True, columns=("id",))
    assert stores.read(folder, names[0]).startswith(b'{"id":"r0"}\n')


def test_a_large_object_goes_in_parts(
    tmp_path: pathlib.Path, folder: str, store: stores.Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = bytes(range(256)) * (90 << 10)  # 22.5 MiB
    with files.Files(overwrites=False) as made:
        made.open(f"{folder}/large").write(data)
    assert stores.read(folder, "large") == data
    assert sum(method == "PUT" and "partNumber" in path for method, path in store.seen) == 3


def test_after_a_failure_no_object_is_there(out: pathlib.Path, folder: str, store: stores.Proxy) -> None:
    def fault(method: str, path: str) -> str:
        return "403" if method == "PUT" and "errors" not in path else ""

    store.fault = fault
    with pytest.raises(OutputError, match="check that the key is right"):
        exported(out, f"{folder}/rows.jsonl", to="openai-batch")
    assert stores.names(folder) == {}


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("s3://jobs/rows.jsonl", "got 's3://jobs/rows.jsonl'; must be in a folder of the bucket: s3://bucket/folder/"),
        ("s3://key@jobs/a/rows.jsonl", "with a key, a query or a fragment in it"),
        ("s3://jobs/a/", "which names no file"),
        ("ssh://host/rows.jsonl", "give a path here, or the URL of a bucket; `curl"),
        ("https://host/rows.jsonl", "give a path here, or the URL of a bucket; `curl -T FILE URL` sends a file by PUT"),
    ],
)
def test_places_that_take_no_file(path: str, words: str, out: pathlib.Path) -> None:
    with pytest.raises(UserError, match=r"^-o: got ") as raised:
        exported(out, path, to="jsonl")
    assert words in str(raised.value)


def test_a_dataset_is_a_folder_here(out: pathlib.Path) -> None:
    with pytest.raises(UserError, match=r"^-o: got a URL, but a dataset is a folder here"):
        exported(out, "s3://jobs/a/rows", to="hf")
