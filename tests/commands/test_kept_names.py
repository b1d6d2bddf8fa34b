"""Kept columns with the names that columns of other jobs have: no reader takes them for the job's own."""

import json
import pathlib

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import jobs
from batchinf.commands.diff import diff_jobs
from batchinf.commands.export import ExportRequest, export_job
from batchinf.commands.whole_row import read_whole_row
from batchinf.report.page import report_page

KEPT = {
    "reasoning": ["because", "so"],
    "num_reasoning_tokens": [111, 222],
    "tool_calls": [[{"id": "i", "name": "n", "arguments": "{}"}], None],
    "request": ["buy milk", "{}"],
    "prompt_token_ids": [[5], [6]],
    "prompt_logprobs": [[-0.5], [-0.25]],
    "prompt_ranks": [[1], [1]],
    "logprobs": [[-1.0, -2.0, -3.0], [-1.0]],
    "ranks": [[1], [2, 3]],
    "image_digests": [["a"], ["b"]],
    "error_margin": [0.5, 0.25],
}


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("kept")
    path = folder / "rows.parquet"
    messages = [[{"role": "user", "content": text}] for text in ("One.", "Two.")]
    pq.write_table(pa.table({"messages": messages, **KEPT}), path)
    jobs.finish(
        jobs.spec_of(
            folder,
            input={"path": str(path), "prompt_column": None, "id_column": None, "messages_column": "messages"},
            sampling={"logprobs": None, "max_tokens": 4},
            output={"keep_columns": [*KEPT]},
            parallel={"data_parallel_size": 1},
        )
    )
    return str(folder / "out")


def exported(out: str, path: pathlib.Path, to: str) -> list[dict[str, object]]:
    export_job(out, ExportRequest(path=str(path), to=to))
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_exports(out: str, tmp_path: pathlib.Path) -> None:
    rows = exported(out, tmp_path / "rows.jsonl", "jsonl")
    assert [{name: row[name] for name in KEPT} for row in rows] == pa.table(KEPT).to_pylist()
    for line in exported(out, tmp_path / "batch.jsonl", "openai-batch"):
        body = line["response"]["body"]  # type: ignore[index]
        [choice] = body["choices"]
        assert {*choice["message"]} == {"role", "content", "refusal"}
        assert "completion_tokens_details" not in body["usage"]


def test_looks(out: str) -> None:
    report = read_whole_row(out, "0")
    [sample] = report.samples
    assert {name: sample.fields[name] for name in KEPT} == {name: values[0] for name, values in KEPT.items()}
    assert {*KEPT} <= {name for name, _ in sample.shown_fields()}
    assert report.prompt is not None
    assert "One." in "".join(piece.text for piece in report.prompt)
    assert sample.prompt_tokens == ()
    assert [token.logprob for token in sample.tokens] == [None] * len(sample.tokens)
    assert "because" in report_page(out)
    assert diff_jobs(out, out).changes.num_changed == 0
