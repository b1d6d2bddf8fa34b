"""A whole job with tools on real vLLM that is killed: calls and ids follow from job and row."""

import hashlib
import json
import pathlib

import pytest
import run_batch_lines as given
from openai.types.chat import ChatCompletion

import batchinf
import jobs
from batchinf.commands.export import ExportRequest, export_job

pytest.importorskip("vllm")

TEMPLATE = pathlib.Path(__file__).parents[1] / "tools.jinja"
GOOD = {name: body for name, body in given.CHATS.items() if "tools" in body}


def spec_of(folder: pathlib.Path) -> pathlib.Path:
    given.write(folder / "in.jsonl", given.chat_lines(GOOD | given.BROKEN_CALLS))
    return jobs.spec_of(
        folder,
        model={"name": str(jobs.MODEL), "tool_parser": "hermes"},
        input={"path": str(folder / "in.jsonl"), "id_column": None, "chat_template": {"file": str(TEMPLATE)}},
        sampling={"temperature": None, "max_tokens": None, "logprobs": None},
        engine={"max_model_len": 1024, "max_num_seqs": 16},
        output={"keep_columns": [], "rows_per_shard": 4},
        parallel={"data_parallel_size": 1},
        scripted=None,
        max_error_rate=1.0,
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_killed_job_has_the_calls_of_an_unhurt_one(tmp_path: pathlib.Path) -> None:
    spec = spec_of(tmp_path)
    assert jobs.run("run", spec, faults="coordinator.after_publish:2=kill").returncode == -9
    jobs.run("run", spec)
    out = tmp_path / "out"
    rows = {row["id"]: row for row in jobs.rows_of(out)}
    assert {name for name, row in rows.items() if row["error_type"] is not None} == {*given.BROKEN_CALLS}
    # Ids follow from job and row.
    job_id = batchinf.open(out).job_id
    for row in rows.values():
        for number, call in enumerate(row["tool_calls"] or ()):
            key = f"{job_id},{row['row_index']},0,{number}"
            assert call["id"] == f"call_{hashlib.blake2b(key.encode(), digest_size=12).hexdigest()}"
    export_job(str(out), ExportRequest(to="openai-batch", path=str(tmp_path / "out.jsonl")))
    exported = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [line["custom_id"] for line in exported] == [*GOOD]
    assert [call["name"] for call in rows["two"]["tool_calls"]] == ["get_weather", "get_time"]
    assert [call["name"] for call in rows["named"]["tool_calls"]] == ["get_time"]
    for name in ("required", "required strict"):
        [call] = rows[name]["tool_calls"]
        assert set(json.loads(call["arguments"])) <= {"city", "h"}
    for line in exported:
        [choice] = ChatCompletion.model_validate(line["response"]["body"]).choices
        stored = [(call["id"], call["name"]) for call in rows[line["custom_id"]]["tool_calls"] or ()]
        assert [(call.id, call.function.name) for call in choice.message.tool_calls or ()] == stored
    for name in given.BROKEN_CALLS:
        assert rows[name]["error_type"] == "invalid_tool_call"
        assert rows[name]["text"]
