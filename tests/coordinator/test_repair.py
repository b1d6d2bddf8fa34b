"""`--retry errors --input fixed.csv`: repaired rows take the places of broken ones, whatever is killed."""

import json
import pathlib
import shutil
from collections.abc import Callable, Sequence
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import batchinf
import jobs
from batchinf.commands.check import check_job
from batchinf.commands.whole_row import read_whole_row
from batchinf.job.begun import open_begun
from batchinf.schedule.positions import RowBits
from batchinf.source.files import InputLocation
from batchinf.source.repairs import RepairedRows, RepairedSource
from batchinf.source.rows import open_source
from batchinf.spec.file import read_spec

pytestmark = pytest.mark.usefixtures("quick_replicas")

NUM_ROWS = 24
BROKEN = (2, 5, 6, 13, 20, 23)  # without a prompt
Lines = Sequence[tuple[str, str, str]]
REPAIR = ("--retry", "errors", "--input")


def lines(*rows: int, fixed: Sequence[int] = ()) -> Lines:
    """Rows as (id, language, prompt); the fixed ones have a prompt."""
    return [
        (f"r{row}", "en" if row % 2 else "de", "" if row in BROKEN and row not in fixed else f"Once {row}")
        for row in rows
    ]


def write_csv(path: pathlib.Path, rows: Lines) -> pathlib.Path:
    path.write_text("id,language,prompt\n" + "".join(",".join(row) + "\n" for row in rows))
    return path


def spec_in(folder: pathlib.Path, **input_: Any) -> pathlib.Path:
    where = {"path": str(folder / "rows.csv"), "csv": {"null_values": [""]}, **input_}
    return jobs.spec_of(
        folder, input=where, output={"rows_per_shard": 6}, parallel={"data_parallel_size": 1}, max_error_rate=1.0
    )


def prompt_of(out: pathlib.Path, row: str) -> str:
    pieces = read_whole_row(str(out), row).prompt
    assert pieces is not None
    return "".join(piece.text for piece in pieces)


def prompts_of(spec: pathlib.Path, out: pathlib.Path, *rows: int) -> list[object]:
    """The prompts from which commands make those of finished rows again."""
    with open_begun(read_spec(spec), str(out)) as (job, _):
        return [job.source.read(row, row + 1)[0].values["prompt"] for row in rows]


@pytest.fixture(scope="module")
def hurt(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The folder of a finished job with broken rows."""
    folder = tmp_path_factory.mktemp("hurt")
    write_csv(folder / "rows.csv", lines(*range(NUM_ROWS)))
    jobs.finish(spec_in(folder))
    return folder


@pytest.fixture(scope="module")
def unhurt(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The rows of a job whose input never had broken rows."""
    folder = tmp_path_factory.mktemp("unhurt")
    write_csv(folder / "rows.csv", lines(*range(NUM_ROWS), fixed=BROKEN))
    jobs.finish(spec_in(folder))
    return jobs.rows_of(folder / "out")


@pytest.fixture
def copied(hurt: pathlib.Path, tmp_path: pathlib.Path) -> Callable[[], pathlib.Path]:
    """Makes a copy of the job, and returns its spec."""

    def copy() -> pathlib.Path:
        shutil.copytree(hurt, tmp_path, dirs_exist_ok=True)
        return spec_in(tmp_path)

    return copy


def test_a_repaired_job_is_that_of_a_correct_input(
    copied: Callable[[], pathlib.Path], unhurt: list[dict[str, Any]], tmp_path: pathlib.Path
) -> None:
    spec, out = copied(), tmp_path / "out"
    # In another order, with a row that is as it was.
    fixed = write_csv(tmp_path / "fixed.csv", lines(3, *reversed(BROKEN), fixed=BROKEN))
    jobs.finish(spec, *REPAIR, fixed)
    assert jobs.rows_of(out) == unhurt
    attempts = jobs.table_of(out)["attempts"].to_pylist()
    assert attempts == [2 if row in BROKEN else 1 for row in range(NUM_ROWS)]
    [retry] = jobs.state_of(out).repairs()
    assert retry.repair is not None
    assert (retry.repair.path, retry.repair.num_rows, retry.num_rows) == (str(fixed), 6, 6)
    stored = pq.read_metadata(out / "parts" / "part-000000.parquet").metadata[b"batchinf.retry.1"]
    assert json.loads(stored)["input"] == {"path": str(fixed), "num_rows": 6}
    assert f"retry 1 took 6 input rows from {fixed}" in jobs.run("status", out).stdout
    # The file is not needed any more, neither to make a lost part again nor to show a prompt.
    fixed.unlink()
    assert prompt_of(out, "r13").endswith("Once 13")
    (out / "parts" / "part-000000.parquet").unlink()
    jobs.finish(spec)
    assert jobs.rows_of(out) == unhurt
    with (tmp_path / "rows.csv").open("a") as rows:
        rows.write("r24,en,Once 24\n")
    jobs.finish(spec, "--extend")
    assert jobs.rows_of(out)[:-1] == unhurt
    # A file of the repair that is lost is named; the same file restores its copy.
    copy = next((out / "repairs").glob("*/fixed.csv"))
    copy.write_text("id\n")
    [check] = check_job(str(out), is_deep=False, repair=False).jobs
    assert [(finding.problem, finding.file) for finding in check.findings] == [
        ("repair_lost", str(copy.relative_to(out)))
    ]
    write_csv(fixed, lines(3, *reversed(BROKEN), fixed=BROKEN))
    assert "no row matches errors" in jobs.finish(spec, *REPAIR, fixed).stderr
    assert check_job(str(out), is_deep=False, repair=False).is_whole


def test_killed_at_every_step(
    copied: Callable[[], pathlib.Path], unhurt: list[dict[str, Any]], tmp_path: pathlib.Path
) -> None:
    spec, out = copied(), tmp_path / "out"
    before = jobs.rows_of(out)
    fixed = write_csv(tmp_path / "fixed.csv", lines(*BROKEN, fixed=BROKEN))

    def killed(where: str, *arguments: str | pathlib.Path, may_be_done: bool = False) -> None:
        died = jobs.run("run", spec, *arguments, faults=f"{where}=kill")
        assert died.returncode == -9 or (may_be_done and died.returncode == 0), died.stderr
        for row in jobs.rows_of(out):
            assert row in (before[row["row_index"]], unhurt[row["row_index"]])

    for where in ("repair.copy.before_rename", "repair.after_copy", "repair.after_rows", "retry.before_line"):
        killed(where, *REPAIR, fixed)
        assert not jobs.state_of(out).retries
    killed("retry.after_line", *REPAIR, fixed)
    # Until a part is replaced, its rows have the prompts of the input.
    assert prompts_of(spec, out, 2, 13) == [None, None]
    # Neither another file nor none is the repair that has begun.
    other = write_csv(tmp_path / "other.csv", lines(2, fixed=[2]))
    for arguments in ([*REPAIR, other], ["--retry", "errors"]):
        refused = jobs.run("run", spec, *arguments)
        assert refused.returncode == 2
        assert f"unfinished retry 1 (errors, --input {fixed})" in refused.stderr
    killed("coordinator.before_publish", *REPAIR, fixed)
    fixed.unlink()
    killed("coordinator.after_publish:2")
    # A part that is lost is made of the input first, and goes through the repair then.
    (out / "parts" / "part-000003.parquet").unlink()
    (out / "retry" / "000001.positions").unlink()
    # A replica outlives its coordinator for a moment. If it stages the missing parts, these two have less to do.
    killed("coordinator.after_publish", may_be_done=True)
    killed("retry.after_line", may_be_done=True)
    jobs.finish(spec)
    assert prompts_of(spec, out, 2, 13) == ["Once 2", "Once 13"]
    assert jobs.rows_of(out) == unhurt
    assert check_job(str(out), is_deep=True, repair=False).is_whole


def test_a_second_repair(
    copied: Callable[[], pathlib.Path], unhurt: list[dict[str, Any]], tmp_path: pathlib.Path
) -> None:
    spec, out = copied(), tmp_path / "out"
    wrong = [(id, language, "Twice") for id, language, _ in lines(2, 5)]
    said = jobs.finish(spec, *REPAIR, write_csv(tmp_path / "first.csv", wrong)).stderr
    assert "4 chosen rows are not in" in said and "id 'r6', id 'r13', id 'r20' and 1 more" in said
    assert sorted(row["id"] for row in jobs.rows_of(out) if row["error_type"]) == ["r13", "r20", "r23", "r6"]
    # The rest, and one of the first file's rows once more. A row as the first file has it is no change.
    second = write_csv(tmp_path / "second.csv", [*lines(5, 6, 13, 20, 23, fixed=BROKEN), wrong[0]])
    jobs.finish(spec, "--retry", "error_type is not null or id = 'r5'", "--input", second)
    rows = jobs.rows_of(out)
    assert [row for row in rows if row["id"] != "r2"] == [row for row in unhurt if row["id"] != "r2"]
    [scan, *_] = out.glob("repairs/*/scan")
    for name in (".tmp-000000000000-files.json", "versions/.tmp-000000000000-version.json"):
        (scan / name).write_text("half of it")  # as a killed repair leaves it
    third = write_csv(tmp_path / "third.csv", lines(2, fixed=[2]))
    jobs.finish(spec, "--retry", "id = 'r2'", "--input", third)
    assert jobs.rows_of(out) == unhurt
    assert not list(out.rglob(".tmp-*"))


GOOD = lines(2, 5, fixed=BROKEN)


@pytest.mark.parametrize(
    ("rows", "options", "words"),
    [
        ([*GOOD, ("r99", "de", "Once")], {}, "1 row of it is not in the job's input: id 'r99'; correct the ids"),
        ([*GOOD, ("r3", "en", "Twice")], {}, "it changes 1 row that --retry does not choose, .*: id 'r3'; choose"),
        ([*GOOD, ("r3", "de", "Once 3")], {}, "it changes 1 row that --retry does not choose, .*: id 'r3'; choose"),
        (lines(3), {}, "none of the rows that --retry chooses"),
        ([*GOOD, GOOD[0]], {}, "more than one row for id 'r2'"),
        ([("r2", "", "Once")], {"retry": None}, "got --input without --retry"),
        (GOOD, {"slice": "1/2"}, "a slice takes no repaired rows"),
        (GOOD, {"overrides": ["output.path=s3://bucket/out"]}, "a job in a bucket cannot take repaired rows"),
    ],
)  # fmt: skip
def test_rows_that_do_not_fit_are_named(
    rows: Lines, options: dict[str, Any], words: str, copied: Callable[[], pathlib.Path], tmp_path: pathlib.Path
) -> None:
    spec, out = copied(), tmp_path / "out"
    fixed = write_csv(tmp_path / "fixed.csv", rows)
    before = jobs.rows_of(out)
    with pytest.raises(batchinf.UserError, match=words):
        batchinf.run(spec, **{"retry": "errors", "input": fixed, "quiet": True, **options})
    assert jobs.rows_of(out) == before
    assert jobs.state_of(out).is_done
    assert not list((out / "repairs").glob("*/*.csv"))


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("fixed.csv", "id,prompt\nr2,Once\n", "no column 'language'"),
        ("fixed.csv", "language,prompt\nen,Once\n", "no column 'id'"),
        ("fixed.jsonl", '{"id": "r2", "language": "en", "prompt": "Once"}\n', "format jsonl, but .* format csv"),
        ("fixed.csv", "id,language,prompt,row_index\nr2,en,Once,24\n", r"no row of the input \(0 to 23\) in its row 1"),
    ],
)  # fmt: skip
def test_a_file_that_does_not_fit_is_refused(
    name: str, text: str, words: str, copied: Callable[[], pathlib.Path], tmp_path: pathlib.Path
) -> None:
    spec = copied()
    (tmp_path / name).write_text(text)
    with pytest.raises(batchinf.UserError, match=words):
        batchinf.run(spec, retry="errors", input=tmp_path / name, quiet=True)


def test_the_whole_table_may_have_ids_that_repeat(tmp_path: pathlib.Path) -> None:
    """Rows that share an id are matched in their order, as long as none of them is chosen or changed."""
    rows = [("a", "de", "One"), ("b", "en", ""), ("a", "de", "Two"), ("c", "en", "Once"), ("a", "de", "Three")]
    write_csv(tmp_path / "rows.csv", rows)
    spec = spec_in(tmp_path)
    jobs.finish(spec)
    repaired = [rows[0], ("b", "en", "Twice"), *rows[2:]]
    fixed = tmp_path / "fixed.csv"
    write_csv(fixed, [*repaired[:4], ("a", "de", "Four")])
    with pytest.raises(batchinf.UserError, match=r"it changes 1 row that --retry .*: id 'a'; choose"):
        batchinf.run(spec, retry="errors", input=fixed, quiet=True)
    write_csv(fixed, repaired)
    with pytest.raises(batchinf.UserError, match="id 'a' is that of several rows of the input; name the row"):
        batchinf.run(spec, retry="error_type is not null or row_index = 2", input=fixed, quiet=True)
    write_csv(fixed, repaired[:4])
    with pytest.raises(batchinf.UserError, match="id 'a' is that of several rows of the input; name the row"):
        batchinf.run(spec, retry="errors", input=fixed, quiet=True)
    write_csv(fixed, repaired)
    jobs.finish(spec, *REPAIR, fixed)
    assert prompts_of(spec, tmp_path / "out", *range(5)) == ["One", "Twice", "Two", "Once", "Three"]
    assert not [row for row in jobs.rows_of(tmp_path / "out") if row["error_type"]]


def test_rows_without_ids(tmp_path: pathlib.Path) -> None:
    """Lines that are no JSON have no id: a column with their positions names them, or the place in a whole file."""
    good = [json.dumps({"prompt": f"Once {row}", "language": "en"}) for row in range(8)]
    broken = [*good[:2], "{", *good[3:6], '{"prompt": 7', good[7]]
    (tmp_path / "rows.jsonl").write_text("\n".join(broken))
    spec = spec_in(tmp_path, path=str(tmp_path / "rows.jsonl"), csv=None, id_column=None)
    jobs.finish(spec)
    fixed = tmp_path / "fixed.jsonl"
    fixed.write_text(json.dumps({**json.loads(good[6]), "row_index": 6}))
    jobs.finish(spec, *REPAIR, fixed)
    assert [row["row_index"] for row in jobs.rows_of(tmp_path / "out") if row["error_type"]] == [2]
    fixed.write_text(good[2])
    needed = r"give it a column row_index .* or all 8 rows of the input \(it has 1\)"
    with pytest.raises(batchinf.UserError, match=needed):
        batchinf.run(spec, retry="errors", input=fixed, quiet=True)
    fixed.write_text("\n".join(good))
    assert "each row replaces the one at its place" in jobs.finish(spec, *REPAIR, fixed).stderr
    assert [prompt_of(tmp_path / "out", str(row))[-6:] for row in (2, 6)] == ["Once 2", "Once 6"]


@pytest.mark.slow
@pytest.mark.fewer_rows
def test_batch_files_and_datasets(tmp_path: pathlib.Path) -> None:
    """Lines of a batch file are known by their custom_id; Parquet repairs a dataset."""

    def line(row: int, content: object) -> str:
        body = {"model": str(jobs.MODEL), "messages": [{"role": "user", "content": content}], "max_tokens": 5}
        return (
            json.dumps({"custom_id": f"r{row}", "method": "POST", "url": "/v1/chat/completions", "body": body}) + "\n"
        )

    rows = pa.table({"id": ["r0", "r1"], "prompt": [None, "Once"], "language": ["de", "en"]})
    datasets.Dataset(rows).save_to_disk(tmp_path / "saved")
    pq.write_table(pa.table({"id": ["r0"], "prompt": ["Twice"], "language": ["de"]}), tmp_path / "fixed.parquet")
    (tmp_path / "rows.jsonl").write_text(line(0, 5) + line(1, "Once"))
    (tmp_path / "fixed.jsonl").write_text(line(0, "Twice"))
    for where, fixed in (
        ({"path": str(tmp_path / "saved"), "csv": None}, "fixed.parquet"),
        ({"path": str(tmp_path / "rows.jsonl"), "csv": None, "id_column": None, "format": "openai"}, "fixed.jsonl"),
    ):
        spec = json.loads(spec_in(tmp_path, **where).read_text())
        spec["output"] = {"path": str(tmp_path / fixed.partition(".")[2])}
        spec.pop("sampling")
        batchinf.run(spec, quiet=True)
        batchinf.run(spec, retry="errors", input=tmp_path / fixed, quiet=True)
        done = batchinf.open(spec["output"]["path"]).table(["id", "error_type", "attempts"]).to_pydict()
        assert done == {"id": ["r0", "r1"], "error_type": [None, None], "attempts": [2, 1]}


def test_repaired_rows_are_read_as_any_others(tmp_path: pathlib.Path) -> None:
    """Each span of a source with two repairs has the latest row at each place."""
    texts: dict[str, list[str]] = {name: [f"{name} {row}" for row in range(12)] for name in ("a", "b", "c")}
    sources = {}
    for name, values in texts.items():
        write_csv(tmp_path / f"{name}.csv", [(str(row), "en", value) for row, value in enumerate(values)])
        sources[name] = open_source(InputLocation(str(tmp_path / f"{name}.csv")), tmp_path / "cache" / name)
    repairs = {"b": {1: 4, 2: 5, 3: 6, 9: 0}, "c": {3: 3, 4: 4, 11: 2}}

    def finder(pairs: dict[int, int]) -> Callable[[int, int], tuple[Any, Any]]:
        def find(first: int, stop: int) -> tuple[Any, Any]:
            rows = np.array([row for row in pairs if first <= row < stop], np.int64)
            return rows, np.array([pairs[row] for row in rows.tolist()], np.int64)

        return find

    expected = list(texts["a"])
    for name, pairs in repairs.items():
        for row, place in pairs.items():
            expected[row] = texts[name][place]
    source = RepairedSource(sources["a"], [RepairedRows(sources[name], finder(repairs[name])) for name in repairs])
    for start in range(13):
        for stop in range(start, 13):
            rows = source.read(start, stop)
            assert [row.row_index for row in rows] == [*range(start, stop)]
            assert [row.values["prompt"] for row in rows] == expected[start:stop]
            assert source.read_columns(start, stop, ["prompt"])["prompt"].to_pylist() == expected[start:stop]
    source.close()


def test_a_set_of_rows() -> None:
    rows = np.array([7, 100, 9, 7, 120], np.int64)
    bits = RowBits(5, 130, [rows[:2], rows[2:]])
    assert np.concatenate([*bits.pieces()]).tolist() == [7, 9, 100, 120]
    assert bits.count() == 4 and bits
    asked = np.arange(140)
    assert asked[bits.has(asked)].tolist() == [7, 9, 100, 120]
    assert not RowBits(0, 9, [])


@pytest.mark.slow
def test_a_repair_on_vllm_is_what_transformers_computes(tmp_path: pathlib.Path) -> None:
    """`verify` makes the prompts again from the input and its repair, and computes the repaired rows by itself."""
    pytest.importorskip("vllm")
    write_csv(tmp_path / "rows.csv", lines(*range(8)))
    spec = jobs.spec_of(
        tmp_path,
        input={"path": str(tmp_path / "rows.csv"), "csv": {"null_values": [""]}},
        sampling={"max_tokens": 8},
        engine={"max_model_len": 128, "max_num_seqs": 8},
        parallel={"data_parallel_size": 1},
        max_error_rate=1.0,
        scripted=None,
    )
    jobs.finish(spec, VLLM_ENABLE_V1_MULTIPROCESSING="0")
    fixed = write_csv(tmp_path / "fixed.csv", lines(2, 5, 6, fixed=BROKEN))
    jobs.finish(spec, *REPAIR, fixed, VLLM_ENABLE_V1_MULTIPROCESSING="0")
    assert not any(row["error_type"] for row in jobs.rows_of(tmp_path / "out"))
    verified = jobs.run("verify", spec, "-n", "8")
    assert verified.returncode == 0, verified.stderr
    assert "8 of 8 rows" in verified.stdout
