"""The weekly rerun over 2,000 rows, of which some files are new, changed, deleted, renamed and longer."""

import dataclasses
import json
import pathlib
import random
from typing import Any

import pyarrow as pa
import pytest

import jobs

NUM_FILES, ROWS_PER_FILE = 20, 100
WORDS = ["alpha", "beta", "gamma", "delta", "eps", "zeta", "eta", "theta", "iota", "kappa"]


@dataclasses.dataclass
class Documents:
    """Files of documents by name; `version` says how often a document was changed."""

    files: dict[str, list[dict[str, Any]]]
    next_id: int = 0

    def rows(self, num_rows: int) -> list[dict[str, Any]]:
        """Documents that are new."""
        ids = range(self.next_id, self.next_id + num_rows)
        self.next_id += num_rows
        return [document(number, 0) for number in ids]

    def write(self, folder: pathlib.Path) -> None:
        folder.mkdir(exist_ok=True)
        for path in folder.iterdir():
            if path.name not in self.files:
                path.unlink()
        for name, rows in self.files.items():
            data = "".join(json.dumps(row) + "\n" for row in rows).encode()
            if not (folder / name).exists() or (folder / name).read_bytes() != data:
                (folder / name).write_bytes(data)


def document(number: int, version: int) -> dict[str, Any]:
    rng = random.Random(number * 1000 + version)
    return {"id": number, "prompt": f"{' '.join(rng.choices(WORDS, k=3))} {number} {version}", "version": version}


def spec_of(folder: pathlib.Path, out: str, **input: Any) -> pathlib.Path:
    (folder / out).mkdir(exist_ok=True)
    return jobs.spec_of(
        folder / out,
        input={"path": str(folder / "documents"), **input},
        sampling={"max_tokens": 2, "logprobs": None},
        parallel={"data_parallel_size": 1},
        output={"path": str(folder / out), "keep_columns": ["version"], "include_token_ids": False},
        scripted={"max_num_seqs": 8192, "step_s": 0.0},
        checkpoint_interval_s=60,
    )


def rows_by_id(*outs: pathlib.Path) -> dict[int, tuple[object, ...]]:
    """Each document's output, of whichever job."""
    columns = ["id", "version", "prompt_hash", "text", "finish_reason", "error_type", "num_output_tokens"]
    table = pa.concat_tables([jobs.table_of(out).select(columns) for out in outs])
    rows = {row[0]: row[1:] for row in zip(*(table.column(name).to_pylist() for name in columns), strict=True)}
    assert len(rows) == table.num_rows
    return rows


def num_run(out: pathlib.Path) -> int:
    """Requests that went through an engine, by what the parts say of their tries."""
    table = jobs.table_of(out)
    assert set(table.column("attempts").to_pylist()) == {1}
    return table.num_rows


@pytest.fixture(scope="module")
def last_week(tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, Documents]:
    folder = tmp_path_factory.mktemp("weekly")
    documents = Documents({})
    for number in range(NUM_FILES):
        documents.files[f"part-{number:02d}.jsonl"] = documents.rows(ROWS_PER_FILE)
    documents.write(folder / "documents")
    jobs.finish(spec_of(folder, "last-week"))
    assert num_run(folder / "last-week") == NUM_FILES * ROWS_PER_FILE
    return folder, documents


@pytest.mark.slow
def test_extending_runs_what_came_and_nothing_else(last_week: tuple[pathlib.Path, Documents]) -> None:
    folder, documents = last_week
    spec, out = folder / "last-week" / "job.yaml", folder / "last-week"
    before = {path.name: path.stat().st_mtime_ns for path in (out / "parts").iterdir()}
    old_rows = [(row["row_index"], row["id"]) for row in jobs.table_of(out).select(["row_index", "id"]).to_pylist()]
    parts = sorted(documents.files)
    # In front of all, between, and rows behind a file's own; two change their names, and with them their order.
    longer, first, middle = documents.rows(140), documents.rows(300), documents.rows(160)
    documents.files[parts[7]] = [*documents.files[parts[7]], *longer]
    documents.files["a-new.jsonl"], documents.files["part-03b.jsonl"] = first, middle
    for old, new in ((parts[2], "z-moved.jsonl"), (parts[11], "b-moved.jsonl")):
        documents.files[new] = documents.files.pop(old)
    documents.write(folder / "documents")
    spec = spec_of(folder, "last-week")
    done = jobs.finish(spec, "--extend")
    assert "extended: 600 more input rows to run, out of 600 that the job had not seen" in done.stderr

    assert {name: (out / "parts" / name).stat().st_mtime_ns for name in before} == before
    came = [row["id"] for row in (*first, *middle, *longer)]
    rows = [(row["row_index"], row["id"]) for row in jobs.table_of(out).select(["row_index", "id"]).to_pylist()]
    assert rows == old_rows + list(enumerate(came, len(old_rows)))
    assert num_run(out) == NUM_FILES * ROWS_PER_FILE + 600

    # What is changed and deleted is named, and nothing is touched.
    changed, deleted = documents.files[parts[4]], documents.files.pop(parts[5])
    documents.files[parts[4]] = [document(changed[0]["id"], 1), *changed[1:]]
    documents.write(folder / "documents")
    refused = jobs.run("run", spec, "--extend")
    assert refused.returncode == 2
    assert f"1 file is changed: {parts[4]}; 1 file is gone: {parts[5]}; restore these" in refused.stderr
    assert jobs.state_of(out).is_done
    documents.files[parts[4]], documents.files[parts[5]] = changed, deleted
    documents.write(folder / "documents")
    assert "was already done" in jobs.finish(spec).stdout


@pytest.mark.slow
@pytest.mark.parametrize("on", ["prompt_hash", "id"])
def test_a_new_job_leaves_out_what_last_week_did(on: str, this_week: tuple[pathlib.Path, Documents]) -> None:
    folder, documents = this_week
    before = rows_by_id(folder / "last-week")
    now = {row["id"]: row["version"] for rows in documents.files.values() for row in rows}
    out = folder / f"this-week-{on}"
    jobs.finish(spec_of(folder, out.name, exclude={"job": [str(folder / "last-week")], "on": on}))
    ran = rows_by_id(out)
    # By id, a document whose text has changed is one that has been done.
    is_new = {number for number in now if number not in before}
    is_changed = {number for number in now if number in before and now[number] != before[number][0]}
    assert len(is_new) == 400 and len(is_changed) == 50
    assert ran.keys() == is_new | (is_changed if on == "prompt_hash" else set())
    assert num_run(out) == len(ran)

    if on == "prompt_hash":
        jobs.finish(spec_of(folder, "all-anew"))
        expected = rows_by_id(folder / "all-anew")
        assert expected.keys() == now.keys()
        kept = {number: row for number, row in before.items() if number in now and number not in is_changed}
        assert {**kept, **ran} == expected
        assert len(kept) + len(ran) == len(expected)


@pytest.fixture(scope="module")
def this_week(last_week: tuple[pathlib.Path, Documents]) -> tuple[pathlib.Path, Documents]:
    """A new file in front, 50 rows of one file changed, a file deleted, one renamed."""
    folder, documents = last_week
    names = [name for name, rows in sorted(documents.files.items()) if len(rows) == ROWS_PER_FILE]
    documents.files["0-new.jsonl"] = documents.rows(400)
    rows = documents.files[names[9]]
    documents.files[names[9]] = [document(row["id"], 1) if place % 2 == 0 else row for place, row in enumerate(rows)]
    assert sum(row["version"] for row in documents.files[names[9]]) == 50
    documents.files.pop(names[12])
    documents.files["y-moved.jsonl"] = documents.files.pop(names[14])
    documents.write(folder / "documents")
    return folder, documents
