"""What a folder leaves out is said, and what must not be read as plain files is refused for new jobs."""

import dataclasses
import gzip
import os
import pathlib
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import stores
from inputs import refusal

import jobs
from batchinf.base.errors import InputError, UserError
from batchinf.job.columns import column_warnings
from batchinf.job.open import open_job
from batchinf.prompts.checks import input_notes
from batchinf.source import left_out
from batchinf.source.files import InputLocation
from batchinf.source.rows import Source, open_source
from batchinf.spec.file import read_spec

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 24960\n"
PNG = b"\x89PNG"
ROW = b'{"text": "a"}\n'
BEGUN = {"is_new": False}
SAME = "the same content, so these rows run more than once; move one of the files away"


def opened(folder: pathlib.Path, files: dict[str, bytes], **location: Any) -> Source:
    for name, content in files.items():
        (folder / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "in" / name).write_bytes(content)
    return open_source(InputLocation(**{"path": str(folder / "in"), **location}), folder / "cache")


def test_what_a_folder_leaves_out_is_said(tmp_path: pathlib.Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other/b.jsonl").write_bytes(ROW)
    (tmp_path / "in").mkdir()
    (tmp_path / "in/2023").symlink_to(tmp_path / "other")
    os.mkfifo(tmp_path / "in/pipe.jsonl")
    unknown = ["b.jsonlines", "c.jl", "d.jsonl-00001-of-00002", "sub/f.jsonl.xz"]
    files = {
        "a.jsonl": ROW,
        "e.json": b'[{"text": "a"}]',
        "dataset_info.json": b'{"rows": 1}',
        "p.png": PNG,
        "_x.jl": b"",
    }
    source = opened(tmp_path, {**files, **dict.fromkeys(unknown, ROW)})
    said = {
        left_out.UNKNOWN: unknown,
        left_out.LINKS.format(path=tmp_path / "in"): ["2023"],
        left_out.NOT_FILES: ["pipe.jsonl"],
        left_out.JSON: ["e.json"],
        left_out.PICTURES: ["p.png"],
    }
    assert (source.num_rows, source.remarks) == (1, said)
    # Also when it is opened again, but with a format of the spec only what no format reads.
    assert opened(tmp_path, {}, format="jsonl").remarks == {key: said[key] for key in [*said][:3]}
    (tmp_path / "in/a.jsonl").unlink()
    (tmp_path / "in/e.json").unlink()
    (tmp_path / "in/dataset_info.json").unlink()
    with pytest.raises(InputError, match=r"has no jsonl file; 2023: a link to a folder is not followed; a glob"):
        opened(tmp_path, {}, format="jsonl")


@pytest.mark.parametrize("ending", ["jsonl", "json", "csv", "txt", "parquet", "arrow", "png"])
@pytest.mark.parametrize("path", ["in", "in/*"])
def test_a_link_to_nothing_is_refused_by_name(path: str, ending: str, tmp_path: pathlib.Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / f"in/b.{ending}").symlink_to("gone")
    said = rf"^b\.{ending} is a link to gone, which does not exist; restore that, or remove the link$"
    with pytest.raises(InputError, match=said):
        opened(tmp_path, {f"a.{ending}": b""}, path=str(tmp_path / path))


@pytest.mark.parametrize("path", ["in", "in/*"])
def test_a_job_that_began_with_a_link_that_leads_nowhere(path: str, tmp_path: pathlib.Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "target").write_bytes(ROW)
    (tmp_path / "in/b.jsonl").symlink_to(tmp_path / "target")
    location = InputLocation(str(tmp_path / path))
    begun = opened(tmp_path, {"a.jsonl": ROW}, path=location.path)
    (tmp_path / "target").rename(tmp_path / "moved")
    with pytest.raises(UserError, match=r"b\.jsonl is a link to .*target, which does not exist|is gone: b\.jsonl"):
        open_source(location, tmp_path / "cache", begun.fingerprints)
    # Where a glob passed over such a link, the job still does.
    (tmp_path / "in/b.jsonl").unlink()
    (tmp_path / "moved").rename(tmp_path / "in/b.jsonl")
    (tmp_path / "in/c.jsonl").symlink_to("gone")
    if path == "in/*":
        assert open_source(location, tmp_path / "cache", begun.fingerprints).num_rows == 2


def test_folders_that_a_glob_matches_are_said(tmp_path: pathlib.Path) -> None:
    """Spark and Dask write folders with the endings of files."""
    path = str(tmp_path / "in/*.jsonl")
    os.mkfifo(tmp_path / "x.jsonl")
    source = opened(tmp_path, {"a.jsonl": ROW, "b.jsonl/part-0.jsonl": ROW * 2, "c/d.jsonl": ROW * 3}, path=path)
    assert (source.num_rows, source.remarks) == (1, {left_out.FOLDERS.format(path=path): ["b.jsonl"]})
    assert opened(tmp_path, {}, path=f"{path}/*").num_rows == 2
    whole = opened(tmp_path, {}, path=str(tmp_path / "in/**/*.jsonl"))
    assert (whole.num_rows, whole.remarks) == (6, {})
    assert opened(tmp_path, {}, path=str(tmp_path / "in/**")).remarks == {}  # it matches the folder `in`, too
    (tmp_path / "x.jsonl").rename(tmp_path / "in/x.jsonl")
    assert opened(tmp_path, {}, path=path).remarks[left_out.NOT_FILES] == ["x.jsonl"]
    (tmp_path / "in/a.jsonl").unlink()
    with pytest.raises(
        InputError, match=r"no file matches .*; b\.jsonl: a glob does not read the files of a folder; `.*/\*"
    ):
        opened(tmp_path, {}, path=path)


def test_files_of_several_splits_are_said(tmp_path: pathlib.Path) -> None:
    """The usual folder of a dataset that was downloaded from the hub."""
    files = {f"data/{split}-0000{number}-of-00002.jsonl": ROW for split in ("test", "train") for number in range(2)}
    source = opened(tmp_path, files, path=str(tmp_path / "in"))
    words = left_out.SPLITS.format(path=tmp_path / "in", split="train")
    assert source.num_rows == 4
    assert source.remarks[words] == ["data/test-00000-of-00002.jsonl", "data/train-00000-of-00002.jsonl"]
    assert opened(tmp_path, {}, path=str(tmp_path / "in/**/*train*")).num_rows == 2
    of_one = opened(tmp_path, {"latest/train/testimony.jsonl": ROW}, path=str(tmp_path / "in/latest"))
    assert (of_one.num_rows, of_one.remarks) == (1, {})


@pytest.mark.usefixtures("store_of_this_process")
def test_folders_of_a_bucket_that_a_glob_matches_are_said(url: str, tmp_path: pathlib.Path) -> None:
    for number, name in enumerate(("a.jsonl", "b.jsonl/part-0.jsonl", "c/d.jsonl"), 1):
        stores.put(f"{url}/in/{name}", ROW * number)
    path = f"{url}/in/*.jsonl"
    source = open_source(InputLocation(path), tmp_path / "cache")
    assert (source.num_rows, source.remarks) == (1, {left_out.FOLDERS.format(path=path): ["b.jsonl"]})
    whole = open_source(InputLocation(f"{url}/in/**/*.jsonl"), tmp_path / "whole")
    assert (whole.num_rows, whole.remarks) == (6, {})
    with pytest.raises(InputError, match=r"no file matches .*; b\.jsonl: a glob does not read the files of a folder"):
        open_source(InputLocation(f"{url}/in/b*"), tmp_path / "none")


def test_a_folder_behind_a_url_says_it_too(tmp_path: pathlib.Path) -> None:
    memory = fsspec.filesystem("memory")
    for name in ("a.jsonl", "b.jl", "_delta_log/0.json"):
        memory.pipe(f"/left/{tmp_path.name}/{name}", ROW)
    url = f"memory://left/{tmp_path.name}"
    with pytest.raises(InputError, match="is or has a Delta table"):
        open_source(InputLocation(url), tmp_path / "cache")
    source = open_source(InputLocation(url, is_new=False), tmp_path / "cache")
    assert (source.num_rows, source.remarks) == (1, {left_out.UNKNOWN: ["b.jl"]})
    memory.pipe(f"/left/{tmp_path.name}/pointer.txt", POINTER)
    with pytest.raises(InputError, match=r"pointer\.txt: a pointer of Git LFS"):
        open_source(InputLocation(f"{url}/pointer.txt"), tmp_path / "of pointer")


@pytest.mark.parametrize(
    ("log", "path", "message", "num_requests"),
    [
        ("_delta_log/0.json", "table/data", "is or has a Delta table", 1),
        (".hoodie/hoodie.properties", "table/data/p=1", "a Hudi table", 2),
        ("metadata/1.metadata.json", "table/data/p=1", "an Iceberg table", 3),
        ("metadata/about.json", "table/data", None, 3),
        ("about.json", "table/data/p=1", None, 2),
    ],
)
@pytest.mark.usefixtures("store_of_this_process")
def test_a_folder_of_a_bucket_in_a_table_is_refused(
    log: str, path: str, message: str | None, num_requests: int, url: str, store: stores.Proxy, tmp_path: pathlib.Path
) -> None:
    stores.put(f"{url}/table/data/p=1/a.jsonl", ROW)
    stores.put(f"{url}/table/{log}", b"{}")
    store.seen.clear()
    if message is None:
        assert open_source(InputLocation(f"{url}/{path}"), tmp_path / "new").num_rows == 1
    else:
        with pytest.raises(InputError, match=message):
            open_source(InputLocation(f"{url}/{path}"), tmp_path / "new")
    listed = [asked for _, asked in store.seen if "delimiter" in asked]
    store.seen.clear()
    assert open_source(InputLocation(f"{url}/{path}", **BEGUN), tmp_path / "begun").num_rows == 1
    begun = [asked for _, asked in store.seen if "delimiter" in asked]
    assert len(listed) - len(begun) == num_requests
    assert open_source(InputLocation(f"{url}/{path}/**/*.jsonl"), tmp_path / "glob").num_rows == 1


@pytest.mark.usefixtures("store_of_this_process")
def test_a_key_without_permission_above_the_folder_reads_it(
    url: str, store: stores.Proxy, tmp_path: pathlib.Path
) -> None:
    stores.put(f"{url}/table/data/a.jsonl", ROW)
    stores.put(f"{url}/table/_delta_log/0.json", b"{}")
    prefix = f"{url.rpartition('/')[2]}%2Ftable%2F"
    store.fault = lambda method, asked: "403" if asked.endswith(f"prefix={prefix}") else ""
    assert open_source(InputLocation(f"{url}/table/data"), tmp_path / "cache").num_rows == 1


@pytest.mark.parametrize("ending", ["jsonl", "parquet", "arrow"])
@pytest.mark.usefixtures("store_of_this_process")
def test_a_pointer_of_git_lfs_in_a_bucket_is_refused_by_name(
    ending: str, url: str, store: stores.Proxy, tmp_path: pathlib.Path
) -> None:
    stores.put(f"{url}/in/x.{ending}", POINTER)
    with pytest.raises(InputError, match=rf"x\.{ending}: a pointer of Git LFS, and no data; `git lfs pull` fetches"):
        open_source(InputLocation(f"{url}/in"), tmp_path / "cache")
    assert len([asked for method, asked in store.seen if method == "GET" and f"x.{ending}" in asked]) == 1


def test_files_of_equal_content_are_said(tmp_path: pathlib.Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/latest.jsonl").symlink_to("a.jsonl")
    files = {"a (1).jsonl": ROW, "a.jsonl": ROW, "b.jsonl": ROW * 2, "c.jsonl": b"", "d.jsonl": b"", "p=1/a.jsonl": ROW}
    repeated = {SAME: ["a.jsonl (as a (1).jsonl)", "latest.jsonl (as a (1).jsonl)", "old/b.jsonl.gz (as b.jsonl)"]}
    source = opened(tmp_path, {**files, "old/b.jsonl.gz": gzip.compress(ROW * 2)})
    assert (source.num_rows, source.remarks) == (8, repeated)
    again = open_source(InputLocation(str(tmp_path / "in")), tmp_path / "cache", source.fingerprints)
    assert again.remarks == repeated
    location = InputLocation(str(tmp_path / "in/*a*.jsonl"))
    files_of = list(input_notes(open_source(location, tmp_path / "glob")))
    assert files_of == [f"note: a.jsonl (as a (1).jsonl), latest.jsonl (as a (1).jsonl): {SAME}"]


@pytest.mark.parametrize("ending", ["json", "csv", "txt", "arrow", "parquet", "png"])
def test_files_of_equal_content_in_every_format(ending: str, tmp_path: pathlib.Path) -> None:
    table = pa.table({"text": ["a", "b"]})
    sink = pa.BufferOutputStream()
    if ending == "parquet":
        pq.write_table(table, sink)
    else:
        with pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
    contents = {"json": b'[{"text": "a"}]', "csv": b"text\na\n", "txt": b"a\n", "png": PNG}
    content = contents.get(ending, sink.getvalue().to_pybytes())
    source = opened(tmp_path, {f"a.{ending}": content, f"b.{ending}": content})
    # A picture may be shown twice, and its scan does not read it.
    remark = SAME.replace("the same content", "probably the same content, with the same size and footer")
    expected = {"png": {}, "parquet": {remark: ["b.parquet (as a.parquet)"]}}
    assert source.remarks == expected.get(ending, {SAME: [f"b.{ending} (as a.{ending})"]})


TABLE = {"data/p=1/a.jsonl": ROW}


@pytest.mark.parametrize(
    ("files", "path", "message"),
    [
        ({"_delta_log/0.json": b"{}"}, "in", "is or has a Delta table, whose log says which of its files count"),
        ({"_delta_log/0.json": b"{}"}, "in/data", "a Delta table"),
        ({"_delta_log/0.json": b"{}"}, "in/data/p=1", "a Delta table"),
        ({"metadata/00001-a.metadata.json": b"{}"}, "in/data", "an Iceberg table"),
        ({".hoodie/hoodie.properties": b""}, "in/data", "a Hudi table"),
        ({"data/_delta_log/0.json": b"{}"}, "in", "a Delta table"),
        ({"metadata/about.json": b"{}"}, "in", None),
    ],
)
def test_a_table_is_refused_and_a_glob_reads_its_files(
    files: dict[str, bytes], path: str, message: str | None, tmp_path: pathlib.Path
) -> None:
    if message is None:
        assert opened(tmp_path, {**TABLE, **files}).num_rows == 1
    else:
        with pytest.raises(InputError, match=message):
            opened(tmp_path, {**TABLE, **files}, path=str(tmp_path / path))
    assert opened(tmp_path, {}, path=str(tmp_path / path), **BEGUN).num_rows == 1
    assert opened(tmp_path, {}, path=str(tmp_path / path / "**/*.jsonl")).num_rows == 1


@pytest.mark.parametrize("path", ["in", "in/*"])
def test_a_file_beside_its_compressed_copy_is_refused(path: str, tmp_path: pathlib.Path) -> None:
    files = {"a.jsonl": ROW, "a.jsonl.gz": ROW, "b.jsonl.zst": ROW}
    with pytest.raises(InputError, match=r"has a\.jsonl and a\.jsonl\.gz, so that its rows would run twice"):
        opened(tmp_path, files, path=str(tmp_path / path))
    assert opened(tmp_path, {}, path=str(tmp_path / path), **BEGUN).num_rows == 3


def test_pictures_beside_texts_alone_are_refused_and_a_job_keeps_its_format(tmp_path: pathlib.Path) -> None:
    first = opened(tmp_path, {"a.png": PNG, "b.png": PNG})
    assert first.num_rows == 2
    with pytest.raises(
        InputError, match=r"2 of pictures and 1 of text, such as notes\.txt; set `input\.format: images`"
    ):
        opened(tmp_path, {"notes.txt": b"a\nb\nc\n"})
    assert opened(tmp_path, {}, format="text").num_rows == 3
    assert opened(tmp_path, {}, format="images").num_rows == 2
    # A job that began keeps its format, also one that read the texts.
    location = InputLocation(str(tmp_path / "in"))
    (tmp_path / "in/c.png").write_bytes(PNG)
    again = open_source(location, tmp_path / "cache", first.fingerprints, "take")
    assert (again.num_rows, again.schema.names[0]) == (3, "path")
    texts = open_source(dataclasses.replace(location, **BEGUN), tmp_path / "of texts")
    assert (texts.num_rows, texts.schema.names) == (3, ["text"])
    assert open_source(location, tmp_path / "of texts", texts.fingerprints).num_rows == 3
    # Rows that name pictures are the usual case.
    (tmp_path / "in/metadata.jsonl").write_bytes(ROW)
    (tmp_path / "in/notes.txt").unlink()
    assert open_source(location, tmp_path / "rows").remarks == {left_out.PICTURES: ["a.png", "b.png", "c.png"]}


@pytest.mark.parametrize("ending", ["jsonl", "json", "csv", "txt", "parquet", "arrow", "png"])
def test_a_pointer_of_git_lfs_is_refused_by_name_in_every_format(ending: str, tmp_path: pathlib.Path) -> None:
    files = {f"f/x.{ending}": POINTER, f"f/_y.{ending}": POINTER}
    said = refusal(files, InputLocation("f"), tmp_path)
    assert said == f"x.{ending}: a pointer of Git LFS, and no data; `git lfs pull` fetches the files"


def test_a_job_that_began_with_a_pointer_goes_on(tmp_path: pathlib.Path) -> None:
    assert opened(tmp_path, {"x.txt": POINTER}, **BEGUN).num_rows == 3


def test_a_file_without_a_good_row_is_named(tmp_path: pathlib.Path) -> None:
    rows = {
        "a": [b'{"prompt": "Say %d."}' % i for i in range(150)],
        "b": [b"no JSON"] * 120,
        "c": [b'{"text": "Say %d."}' % i for i in range(130)],
        "d": [b"no JSON"] * 99,
        "e": [b'{"prompt": ""}'] * 101,
        "f": [*[b'{"prompt": ""}'] * 140, b'{"prompt": "Say."}'],
    }
    (tmp_path / "in").mkdir()
    for name, lines in rows.items():
        (tmp_path / f"in/{name}.jsonl").write_bytes(b"\n".join(lines))
    own = {"input": {"path": str(tmp_path / "in"), "id_column": None}, "output": {"keep_columns": []}}
    spec = jobs.spec_of(tmp_path, **own, max_error_rate=1)
    job = open_job(read_spec(spec), tmp_path / "cache")
    said = [line for line in column_warnings(job.task, job.source) if "every row" in line]
    job.source.close()
    remedy = "so every row there becomes an error row; correct or move it"
    assert said == [
        f"warning: b.jsonl: no row can be read, {remedy}",
        f"warning: c.jsonl: no row has the column 'prompt', {remedy}",
    ]
    named = "every row of b.jsonl (120 rows), c.jsonl (130 rows), e.jsonl (101 rows) is an error row"
    done = jobs.finish(spec)
    assert named in done.stdout + done.stderr
    # With a selection, parts without an error are looked at too.
    some = tmp_path / "some"
    some.mkdir()
    limited = jobs.finish(jobs.spec_of(some, **own, max_error_rate=1), "--set", "input.limit=300")
    assert "every row of b.jsonl (120 rows) is an error row" in limited.stdout + limited.stderr
