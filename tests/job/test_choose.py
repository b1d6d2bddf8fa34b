"""Which rows are run: by themselves, and through whole jobs that are hurt, cut, retried and looked at."""

import contextlib
import decimal
import gzip
import json
import pathlib
import random
import tempfile
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from headers import header_of
from hypothesis import given, settings
from hypothesis import strategies as st
from inputs import open_jsonl

import jobs
from batchinf.base.errors import UserError
from batchinf.base.storage import Folder
from batchinf.job import choose as choosing
from batchinf.job.job import max_model_len
from batchinf.job.open import open_job
from batchinf.manifest.lock import LockLost
from batchinf.manifest.log import Manifest
from batchinf.manifest.names import part_name
from batchinf.manifest.state import read_state
from batchinf.records import Part
from batchinf.schedule.shards import Extent
from batchinf.source.files import InputLocation
from batchinf.source.row_hash import is_in_share, row_hashes
from batchinf.source.rows import Source, open_source
from batchinf.spec.file import read_spec

RECORDS = [
    {
        "id": number,
        "prompt": f"text {number} ünï",
        "language": ["en", "de", None][number % 3],
        "score": number / 4,
        "meta": {"a": number % 5, "tags": ["x"] * (number % 3)},
    }
    for number in range(2000)
]


ONE_REPLICA = {"data_parallel_size": 1}


def input_of(folder: pathlib.Path, records: list[Any], name: str = "input.jsonl") -> pathlib.Path:
    path = folder / name
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in records))
    return path


def spec_over(folder: pathlib.Path, records: list[Any], **sections: Any) -> pathlib.Path:
    """A spec over these records; `input` and the other sections over a small default."""
    path = input_of(folder, records)
    given = {"path": str(path), "id_column": "id", **sections.pop("input", {})}
    quick = {"sampling": {"logprobs": None, "max_tokens": 4}, "scripted": {"step_s": 0.0}, "parallel": ONE_REPLICA}
    return jobs.spec_of(folder, **{**quick, "output": {"keep_columns": []}, **sections, "input": given})


def chosen_of(spec: pathlib.Path, *overrides: str) -> list[int]:
    """The rows that are chosen, without a run."""
    file = read_spec(spec, overrides)
    job = open_job(file)
    with tempfile.TemporaryDirectory() as scratch, contextlib.closing(job.source):
        folder = Folder(scratch)
        order = choosing.choose(job, range(job.source.num_rows), folder, limit=job.spec.input.limit)
        rows = list(order)
        [choice] = order.extents
        assert (choice.positions is None) == (rows == list(range(choice.first_row, choice.stop_row)))
        assert [path.name for path in (folder.path("selection")).glob("*")] == (
            [] if choice.positions is None else ["000001.positions"]
        )
    assert rows == sorted(rows) and choice.stop_row > max(rows, default=-1)
    return rows


def refused(spec: pathlib.Path, command: str = "validate") -> str:
    done = jobs.run(command, spec)
    assert done.returncode == 2, done.stderr
    [line] = done.stderr.strip().splitlines()[-1:]
    assert "Traceback" not in done.stderr
    return line


# -- what each of them chooses -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "holds"),
    [
        ("language = 'de'", lambda row: row["language"] == "de"),
        ("language is null or score > 300", lambda row: row["language"] is None or row["score"] > 300),
        ("meta.a = 2 and ID % 7 = 0", lambda row: row["meta"]["a"] == 2 and row["id"] % 7 == 0),
        ("null or length(prompt) = 11", lambda row: len(row["prompt"]) == 11),
    ],
)
def test_where(where: str, holds: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choosing, "_MOST_ROWS", 300)
    spec = spec_over(tmp_path, RECORDS, input={"where": where})
    assert chosen_of(spec) == [row["id"] for row in RECORDS if holds(row)]
    assert chosen_of(spec, "input.limit=7") == [row["id"] for row in RECORDS if holds(row)][:7]


def test_a_broken_row_is_chosen_by_where(tmp_path: pathlib.Path) -> None:
    records: list[Any] = [*RECORDS[:50], "{broken", *RECORDS[50:100], "[]"]
    spec = spec_over(tmp_path, records, input={"where": "id = 60"})
    assert chosen_of(spec) == [50, 61, 101]


def test_broken_rows_are_in_a_sample_by_their_positions(tmp_path: pathlib.Path) -> None:
    records: list[Any] = [RECORDS[row] if row % 2 else "{broken" for row in range(400)]
    spec = spec_over(tmp_path, records, input={"sample": 0.5})
    rows = chosen_of(spec)
    broken = [row for row in rows if row % 2 == 0]
    assert 60 < len(broken) < 140
    assert 60 < len(rows) - len(broken) < 140
    both = chosen_of(spec, "input.where=language = 'de'")
    assert both == [row for row in rows if row % 2 == 0 or RECORDS[row]["language"] == "de"]


@pytest.mark.slow
def test_all_of_them_need_no_file(tmp_path: pathlib.Path) -> None:
    spec = spec_over(tmp_path, RECORDS, input={"where": "id >= 0"})
    jobs.finish(spec)
    [extent] = jobs.state_of(tmp_path / "out").extents
    assert (extent.positions, extent.num_rows, extent.stop_row) == (None, 2000, 2000)
    assert not list((tmp_path / "out" / "selection").glob("*"))


def test_a_larger_share_has_the_smaller_ones_rows(tmp_path: pathlib.Path) -> None:
    spec = spec_over(tmp_path, RECORDS)
    tenth, half = chosen_of(spec, "input.sample=0.1"), chosen_of(spec, "input.sample=0.5")
    assert 130 < len(tenth) < 270
    assert 900 < len(half) < 1100
    assert set(tenth) < set(half)
    assert len(chosen_of(spec, "input.sample=1.0")) == 2000


def test_the_sample_is_of_the_content(tmp_path: pathlib.Path) -> None:
    """The same rows wherever they stand, and whatever else there is."""
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    first = spec_over(tmp_path / "one", RECORDS, input={"sample": 0.1})
    shuffled: list[Any] = [dict(reversed(row.items())) for row in RECORDS]
    others = [{"id": 5000.5, "prompt": f"other {number}", "more": [number]} for number in range(500)]
    mixed = [*shuffled, *others]
    random.Random(4).shuffle(mixed)
    second = spec_over(tmp_path / "two", mixed, input={"sample": 0.1})
    expected = {RECORDS[row]["prompt"] for row in chosen_of(first)}
    assert {mixed[row]["prompt"] for row in chosen_of(second) if mixed[row]["prompt"].startswith("text")} == expected


def hashes_of(source: Source) -> list[int]:
    table = source.read_columns(0, source.num_rows, source.schema.names)
    hashes: list[int] = choosing.content_hashes(np.arange(source.num_rows), table, source).tolist()
    source.close()
    return hashes


def test_a_row_has_the_same_hash_in_each_format(tmp_path: pathlib.Path) -> None:
    expected = hashes_of(open_jsonl(tmp_path, *RECORDS[:300]))
    assert len(set(expected)) == 300
    # In other columns of other types, as they come about where other rows are beside these.
    wider = open_jsonl(tmp_path, *RECORDS[:300], {"id": 1.5, "prompt": 7, "score": "none", "meta": [], "x": {"y": 1}})
    assert hashes_of(wider)[:300] == expected
    plain = pa.Table.from_pylist(RECORDS[:300])
    pq.write_table(plain.set_column(0, "id", plain.column("id").cast(pa.int16())), tmp_path / "rows.parquet")
    assert hashes_of(open_source(InputLocation(str(tmp_path / "rows.parquet")), tmp_path / "c1")) == expected
    flat = [{"id": 3, "prompt": "a", "score": 0.25}, {"id": 4, "prompt": "b", "score": 7.0}]
    (tmp_path / "rows.csv").write_text("score,id,prompt\n0.25,3,a\n7,4,b\n")
    with gzip.open(tmp_path / "rows.jsonl.gz", "wt") as file:
        file.write("\n".join(map(json.dumps, flat)))
    flat_hashes = hashes_of(open_jsonl(tmp_path, *flat))
    for name in ("rows.csv", "rows.jsonl.gz"):
        assert hashes_of(open_source(InputLocation(str(tmp_path / name)), tmp_path / f"cache {name}")) == flat_hashes


def test_the_hash_never_changes() -> None:
    """Who samples again in a year gets the same rows."""
    row = {"a": [1], "b": ["x"], "c": [0.5], "d": [True], "e": [None], "f": [{"y": None, "x": [1.0]}]}
    assert row_hashes(pa.table(row)).tolist() == [PINNED]
    assert is_in_share(np.array([0, 2**63, 2**64 - 1], np.uint64), 0.5).tolist() == [True, True, False]


def test_a_decimal_has_the_hash_of_its_text() -> None:
    """As docs/selection.md says. Another hash would give a job that has begun other rows."""
    exact, text, double = (row_hashes(pa.table({"x": [value]})) for value in (decimal.Decimal("1.50"), "1.50", 1.5))
    assert exact == text != double


PINNED = 10313017175085145133


WIDE = [None, -(2**63), -1, 0, 1, 2**31, 2**63 - 1, 2**63, 2**64 - 1]
TEXTS = [None, "", "a", "a\0", "a\0b", "A", "ä", "\U0001f600", "5", "05", " 5"]
KINDS: dict[str, list[Any]] = {
    **{f"{sign}int{width}": WIDE for width in (8, 16, 32, 64) for sign in ("", "u")},
    "string": TEXTS,
    "large_string": TEXTS,
    "double": [None, 0.0, -0.0, 0.5, 1e300, float("inf"), float("nan"), 2.0**53],
    "bool": [None, True, False],
    "date32[day]": [None, 0, 1, 20_000],
}


def holds(type: pa.DataType, value: Any) -> bool:
    with contextlib.suppress(pa.ArrowInvalid, OverflowError):
        return pa.array([value], type).to_pylist() is not None
    return False


@pytest.mark.parametrize(("own", "theirs"), [
    *((own, theirs) for own in ("int64", "uint64") for theirs in ("int8", "uint32", "int64", "uint64")),
    ("int8", "uint64"), ("uint32", "int64"),
    ("string", "string"), ("string", "large_string"), ("large_string", "string"), ("double", "double"),
    ("bool", "bool"), ("date32[day]", "date32[day]"),
])  # fmt: skip
def test_excluded_rows_are_those_whose_value_is_in_a_set(
    own: str, theirs: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No value is cast to another: 2^64 - 1 is not -1, and no long text is cut."""
    monkeypatch.setattr(choosing, "_MOST_BYTES", 200)
    chance = random.Random(f"{own} {theirs}")
    types = [pa.type_for_alias(name.split("[")[0]) for name in (own, theirs)]

    def values(name: str, type: pa.DataType, num_rows: int) -> list[Any]:
        possible = [value for value in KINDS[name] if holds(type, value)]
        return [chance.choice(possible) for _ in range(num_rows)]

    [own_values, their_values] = [values(n, t, size) for n, t, size in zip((own, theirs), types, (60, 5), strict=True)]
    own_array, their_array = (pa.array(v, t) for v, t in zip((own_values, their_values), types, strict=True))
    pq.write_table(pa.table({"id": own_array, "prompt": [f"Say {i}." for i in range(60)]}), tmp_path / "rows.parquet")
    write_done(tmp_path / "done", their_array)
    given = {"path": str(tmp_path / "rows.parquet"), "id_column": "id"}
    spec = jobs.spec_of(tmp_path, input={**given, "exclude": {"job": str(tmp_path / "done"), "on": "id"}},
                        output={"keep_columns": []})  # fmt: skip
    done = {repr(value + 0 if value == 0 else value) for value in their_array.to_pylist() if value is not None}
    left = [row for row, value in enumerate(own_array.to_pylist())
            if value is None or repr(value + 0 if value == 0 else value) not in done]  # fmt: skip
    assert len(left) > 0
    assert chosen_of(spec) == left
    # A limit does not look at types.
    for limit in {1, len(left) // 2 or 1, len(left)} if own == theirs else ():
        assert chosen_of(spec, f"input.limit={limit}") == left[:limit]


def write_done(out: pathlib.Path, ids: pa.Array) -> None:
    """The output folder of a job that has done the rows with these ids, in two parts, each with a failed row too."""
    folder = Folder(out)
    folder.make("manifest", "parts")
    manifest = Manifest(folder, 1)
    manifest.record(header_of())
    manifest.extent(Extent(0, 2, 1, 0, 0, 2), "input")
    for shard in range(2):
        own = ids[shard::2]
        table = pa.table({"id": own, "error_type": pa.nulls(len(own), "string")})
        pq.write_table(table, out / "parts" / part_name(shard), write_page_checksum=True)
        manifest.part(Part(shard=shard, num_rows=len(own), num_bytes=0, digest=""))
    manifest.commit()
    manifest.close()


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_what_is_chosen_is_what_a_loop_chooses(data: st.DataObject) -> None:
    """All fields together, against a plain loop over the rows."""
    chance = random.Random(data.draw(st.integers(0, 2**32)))
    records: list[Any] = chance.sample(RECORDS, data.draw(st.integers(1, 300)))
    given: dict[str, Any] = {}
    if data.draw(st.booleans()):
        given["where"] = data.draw(st.sampled_from(["language = 'de'", "id % 7 < 3", "score > 100 or meta.a = 1"]))
    if data.draw(st.booleans()):
        given["sample"] = data.draw(st.sampled_from([0.1, 0.5, 0.9]))
    limit = data.draw(st.one_of(st.none(), st.integers(1, 40)))
    done = set(chance.sample(range(2000), 900)) if data.draw(st.booleans()) else set()
    is_true = {
        "language = 'de'": lambda row: row["language"] == "de",
        "id % 7 < 3": lambda row: row["id"] % 7 < 3,
        "score > 100 or meta.a = 1": lambda row: row["score"] > 100 or row["meta"]["a"] == 1,
    }
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        if done:
            write_done(folder / "done", pa.array(sorted(done)))
            given["exclude"] = {"job": str(folder / "done"), "on": "id"}
        spec = spec_over(folder, records, input={**given, **({} if limit is None else {"limit": limit})})
        hashes = row_hashes(pa.Table.from_pylist(records))
        left = [
            position
            for position, row in enumerate(records)
            if ("where" not in given or is_true[given["where"]](row))
            and ("sample" not in given or is_in_share(hashes[position : position + 1], given["sample"])[0])
            and row["id"] not in done
        ][:limit]
        if left:
            assert chosen_of(spec) == left
        else:
            with pytest.raises(UserError, match="leaves none of the"):
                chosen_of(spec)


# -- through jobs ------------------------------------------------------------------------------------------------------


SAMPLED = {"temperature": 1.0, "n": 2, "max_tokens": 24, "logprobs": 1}


@pytest.mark.slow
def test_a_sampled_run_has_the_rows_of_the_full_run(tmp_path: pathlib.Path) -> None:
    """Killed, looked at, checked, cut into slices, retried: the same rows with the same seeds, each once."""
    full = {}
    for name in ("full", "part", "slices"):
        (tmp_path / name).mkdir()
    options: dict[str, Any] = {
        "sampling": SAMPLED, "output": {"keep_columns": ["language", "meta"], "rows_per_shard": 16}
    }  # fmt: skip
    records = RECORDS[:600]
    jobs.finish(spec_over(tmp_path / "full", records, **options))
    full = {(row["row_index"], row["sample_index"]): row for row in jobs.rows_of(tmp_path / "full" / "out")}
    chosen = {"where": "language = 'de' or id = 7", "sample": 0.6, "limit": 100}
    out = tmp_path / "part" / "out"
    slow: dict[str, Any] = {"scripted": {"step_s": 0.03}, "parallel": {"data_parallel_size": 2}}
    spec = spec_over(tmp_path / "part", records, input=chosen, **options, **slow)
    rows = chosen_of(spec)
    assert len(rows) == 100
    expected = [full[row, sample] for row in rows for sample in range(2)]

    process = jobs.start("run", spec)
    jobs.wait_until(lambda: list((out / "journal").glob("*")) and list((out / "parts").glob("*.parquet")))
    jobs.kill(jobs.family(process.pid))
    process.communicate()
    assert not jobs.state_of(out).is_done
    head = [json.loads(line) for line in jobs.run("head", out, "--json", "-n", "400").stdout.splitlines()]
    assert head
    assert {row["row_index"] for row in head} <= set(rows)
    # Which rows are run is found out again where it was lost.
    (out / "selection" / "000001.positions").unlink()
    assert "selection/000001.positions" in jobs.run("check", out).stdout
    done = jobs.finish(spec)
    assert jobs.rows_of(out) == expected
    assert ": all input rows that pass where, about " in done.stdout
    checked = jobs.run("check", out, "--deep")
    assert checked.returncode == 0, checked.stdout
    assert jobs.state_of(out).is_done
    assert "was already done" in jobs.finish(spec).stdout

    jobs.finish(spec, "--retry", f"row_index in ({rows[3]}, {rows[50]})", "--set", "sampling.max_tokens=2")
    again = jobs.rows_of(out)
    assert [row["row_index"] for row in again if row not in expected] == [rows[3]] * 2 + [rows[50]] * 2
    assert jobs.run("check", out, "--deep").returncode == 0

    spec = spec_over(tmp_path / "slices", records, input=chosen, **options)
    found = []
    for index in (1, 0, 2):
        jobs.finish(spec, "--slice", f"{index}/3")
    for index in range(3):
        own = jobs.rows_of(tmp_path / "slices" / "out" / f"slice-{index}")
        assert len(own) in (66, 68)
        found += own
    assert found == expected
    assert "200 of 200 output rows" in jobs.run("status", tmp_path / "slices" / "out").stdout


def test_another_choice_than_before_is_refused(tmp_path: pathlib.Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    excluded = spec_over(other, RECORDS[:100], input={"limit": 10})
    jobs.finish(excluded)
    spec = spec_over(tmp_path, RECORDS[:100], input={"exclude": {"job": str(other / "out"), "on": "id"}})
    jobs.finish(spec)
    jobs.finish(excluded, "--fresh", "--set", "input.limit=20")
    (tmp_path / "out" / "selection" / "000001.positions").write_bytes(b"")
    done = jobs.run("run", spec)
    assert done.returncode == 2
    assert "choose other rows or another order" in done.stderr
    done = jobs.run("run", spec, "--set", "input.limit=3")
    assert done.returncode == 2
    assert "input.limit: the job has nothing, now it is 3" in done.stderr


@pytest.mark.slow
def test_rows_that_other_jobs_have_done_are_left_out(tmp_path: pathlib.Path) -> None:
    for name in ("one", "two", "three", "four"):
        (tmp_path / name).mkdir()
    # A quarter of these is too long, and an error row.
    long = "word " * 3000
    first = [{**row, "prompt": long if row["id"] % 4 == 0 else row["prompt"]} for row in RECORDS[:120]]
    jobs.finish(spec_over(tmp_path / "one", first, max_error_rate=1.0))
    for index in (0, 1):  # the last slice has not begun
        jobs.finish(spec_over(tmp_path / "two", RECORDS[200:290]), "--slice", f"{index}/3")
    done = {row["id"] for row in first if row["prompt"] != long} | set(range(200, 260))
    both = [str(tmp_path / name / "out") for name in ("one", "two")]
    spec = spec_over(tmp_path / "three", RECORDS[:400], input={"exclude": {"job": both, "on": "id"}})
    jobs.finish(spec)
    expected = [row["id"] for row in RECORDS[:400] if row["id"] not in done]
    assert [row["id"] for row in jobs.rows_of(tmp_path / "three" / "out")] == expected
    # By the prompt: those whose prompt was too long then have another now, and are run.
    renamed = [{**row, "id": f"new {row['id']}"} for row in RECORDS[:400]]
    spec = spec_over(tmp_path / "four", renamed, input={"exclude": {"job": both, "on": "prompt_hash"}})
    assert chosen_of(spec) == expected
    assert (
        chosen_of(spec, "input.limit=5", "input.where=language = 'de'")
        == [row for row in expected if RECORDS[row]["language"] == "de"][:5]
    )
    assert "is string here and int64 in" in refused(spec_over(tmp_path / "four", renamed, input={
        "exclude": {"job": both[0], "on": "id"}}))  # fmt: skip


def test_prompts_are_those_of_the_jobs_beginning_whenever_rows_are_chosen(tmp_path: pathlib.Path) -> None:
    chat = {"chat_template": "{{ strftime_now('%H:%M:%S') }} {{ messages[-1].content }}"}
    spec = spec_over(tmp_path, RECORDS[:20], input=chat)
    jobs.finish(spec)
    out = str(tmp_path / "out")
    again = {"exclude": {"job": out, "on": "prompt_hash"}}
    file = read_spec(spec_over(tmp_path, RECORDS[:20], input={**chat, **again}, output={"path": f"{out}-2"}))
    job = open_job(file)
    # As when more is taken in later, or the file is lost: the hashes in the output are of that time.
    state, rows = jobs.state_of(tmp_path / "out"), range(job.source.num_rows)
    choice = choosing.choose(job, rows, Folder(tmp_path / "scratch"), limit=None, may_be_none=True, state=state)
    assert len(choice) == 0
    job.source.close()


def test_who_has_lost_the_job_stores_no_choice(tmp_path: pathlib.Path) -> None:
    def is_lost() -> None:
        raise LockLost("another runs it now")

    file = read_spec(spec_over(tmp_path, RECORDS[:30], input={"where": "language = 'de'"}))
    job = open_job(file)
    job.folder.make()
    with pytest.raises(LockLost):
        choosing.begin_choice(job, print, is_lost)
    assert not job.folder.list("selection")
    choosing.begin_choice(job, print, lambda: None)
    assert job.folder.exists("selection/000001.positions")
    job.source.close()


def test_a_length_that_the_engine_finds_for_itself_is_the_models_here(tmp_path: pathlib.Path) -> None:
    job = open_job(read_spec(spec_over(tmp_path, RECORDS[:3], scripted=None, engine={"max_model_len": -1})))
    assert max_model_len(job) == job.model.max_model_len
    job.source.close()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"where": "langauge = 'de'"},
            "input.where: got \"langauge = 'de'\": there is no column 'langauge'; must be an expression in SQL over "
            "the input's columns, such as \"language = 'en'\"; columns: id, prompt, language, score, meta",
        ),
        ({"where": "id = 3; select 1"}, "input.where: got 'id = 3; select 1': syntax error"),
        ({"where": "prompt::int = 3"}, "input.where: got 'prompt::int = 3': Conversion Error"),
        ({"where": "id < 0", "sample": 0.5}, "input: where 'id < 0', sample 0.5 leaves none of the 60 input rows"),
        ({"exclude": {"job": "out/nothing", "on": "id"}}, "input.exclude: out/nothing holds no job"),
    ],
)  # fmt: skip
def test_what_cannot_be_chosen_is_one_clear_line(given: dict[str, Any], words: str, tmp_path: pathlib.Path) -> None:
    spec = spec_over(tmp_path, RECORDS[:60], input=given)
    assert words in refused(spec)
    assert words in refused(spec, "run")
    assert read_state(Folder(tmp_path / "out")) is None
    assert not (tmp_path / "out" / "job.yaml").exists()


def test_validate_says_how_many_rows_are_chosen(tmp_path: pathlib.Path) -> None:
    spec = spec_over(tmp_path, RECORDS[:60], input={"where": "id % 6 = 5", "limit": 8})
    done = jobs.run("validate", spec)
    assert done.returncode == 0, done.stderr
    assert "chosen by where 'id % 6 = 5', limit 8: 8 of 60 input rows" in done.stdout
    assert "row 5, " in done.stdout
    assert not (tmp_path / "out").exists()


def test_a_job_does_not_exclude_itself(tmp_path: pathlib.Path) -> None:
    """`--fresh` would move the old job aside, and the new one would not find it."""
    spec = spec_over(tmp_path, RECORDS[:20])
    jobs.finish(spec)
    spec = spec_over(tmp_path, RECORDS[:40], input={"exclude": {"job": str(tmp_path / "out"), "on": "id"}})
    words = f"input.exclude: {tmp_path / 'out'} is this job's own output folder; give the new job another output.path"
    assert words in jobs.run("run", spec, "--fresh").stderr
    assert not (tmp_path / "out.1").exists() and len(jobs.rows_of(tmp_path / "out")) == 20
    same = spec_over(tmp_path, RECORDS[:40], input={"exclude": {"job": "new", "on": "id"}}, output={"path": "./new"})
    assert "./new is this job's own output folder" in refused(same)


def test_a_week_without_anything_new_is_one_line(tmp_path: pathlib.Path) -> None:
    """All rows are done elsewhere: no job is begun, so that the same command runs what comes later."""
    week = tmp_path / "week"
    week.mkdir()
    spec = jobs.spec_of(tmp_path, scripted={"step_s": 0.0}, parallel=ONE_REPLICA)
    jobs.finish(spec)
    exclude = {"job": str(tmp_path / "out"), "on": "id"}
    again = jobs.spec_of(week, input={"exclude": exclude})
    refused = jobs.run("run", again)
    assert refused.returncode == 2
    [line] = [line for line in refused.stderr.splitlines() if line.startswith("error: ")]
    assert line.endswith(
        f"exclude {exclude['job']} on id leaves none of the {jobs.num_fewer} input rows; there is nothing to run"
    )
    assert not jobs.snapshot_of(week / "out")
