"""One file of lines that ask for embeddings, through `vllm run-batch` and through `batchinf run-batch`."""

import base64
import json
import pathlib
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from openai.types import CreateEmbeddingResponse

import jobs
from batchinf.commands.verify import verify_job
from batchinf.spec.file import read_spec

pytest.importorskip("vllm")

MODEL = str(jobs.MODEL)
CHAT = [{"role": "user", "content": "hello there"}]
TEXT = "Once upon a time there was a small fox who lived in a wood"
GOOD: list[dict[str, Any]] = [
    {"input": TEXT},
    {"input": ["A fox", "the sea is blue", "wood"], "user": "me", "encoding_format": "float"},
    {"input": [5, 6, 7, 8]},
    {"input": [[5, 6, 7], [8, 9]], "encoding_format": "base64"},
    {"input": TEXT, "dimensions": 16},
    {"input": ["A", "B"], "dimensions": 8, "encoding_format": "base64"},
    {"messages": CHAT},
    {"messages": CHAT, "add_generation_prompt": True},
    {"input": [CHAT, [{"role": "system", "content": "Be brief."}, *CHAT]]},
    {"input": TEXT, "truncate_prompt_tokens": 4},
    {"input": TEXT, "truncate_prompt_tokens": 4, "truncation_side": "left"},
    {"input": f"{TEXT} " * 60, "truncate_prompt_tokens": -1},
    {"input": TEXT, "add_special_tokens": False},
]
BAD: list[dict[str, Any]] = [
    {"input": "fox " * 400},
    {"input": TEXT, "dimensions": 4096},
    {"input": TEXT, "truncate_prompt_tokens": 4096},
    {"input": []},
]
FLAGS = ("--runner", "pooling", "--convert", "embed", "--dtype", "float32", "--max-model-len", "256",
         "--hf-overrides", '{"is_matryoshka": true}', "--enforce-eager")  # fmt: skip


def vectors_of(body: dict[str, Any]) -> list[np.ndarray]:
    """As the openai package gives them: it decodes base64 before its caller sees it."""
    for item in body["data"]:
        if isinstance(item["embedding"], str):
            item["embedding"] = np.frombuffer(base64.b64decode(item["embedding"]), "<f4").tolist()
    parsed = CreateEmbeddingResponse.model_validate(body)
    assert [item.index for item in parsed.data] == list(range(len(parsed.data)))
    return [np.array(item.embedding, np.float32) for item in parsed.data]


@pytest.mark.slow
def test_the_vectors_are_those_of_vllm_run_batch(tmp_path: pathlib.Path) -> None:
    lines = [
        {"custom_id": str(number), "method": "POST", "url": "/v1/embeddings", "body": {"model": MODEL, **body}}
        for number, body in enumerate([*GOOD, *BAD])
    ]
    (tmp_path / "in.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    files = ("-i", str(tmp_path / "in.jsonl"), "--model", MODEL)
    command = (sys.executable, "-m", "vllm.entrypoints.openai.run_batch", *files, "-o", str(tmp_path / "theirs"))
    theirs = subprocess.run(
        [*command, *FLAGS, "--gpu-memory-utilization", "0.1"],
        capture_output=True,
        text=True,
        check=False,
        env={**jobs.inherited(), **jobs.quick_start()},
    )
    assert theirs.returncode == 0, theirs.stderr[-4000:]
    done = jobs.run("run-batch", *files, "-o", tmp_path / "ours", *FLAGS, "-dp", "1")
    assert done.returncode == 0, done.stderr
    by_id = [
        {answer["custom_id"]: answer for answer in map(json.loads, (tmp_path / name).read_text().splitlines())}
        for name in ("theirs", "ours")
    ]
    assert all(len(answers) == len(lines) for answers in by_id)
    for number, sent in enumerate(GOOD):
        expected, found = (answers[str(number)]["response"]["body"] for answers in by_id)
        types = [[type(item["embedding"]) for item in body["data"]] for body in (expected, found)]
        assert types[0] == types[1]
        pairs = list(zip(vectors_of(expected), vectors_of(found), strict=True))
        assert all(np.allclose(a, b, atol=1e-5) for a, b in pairs), sent
        assert {key: found["usage"][key] for key in ("prompt_tokens", "total_tokens")} == {
            key: expected["usage"][key] for key in ("prompt_tokens", "total_tokens")
        }
        assert found.keys() == expected.keys() and found["object"] == expected["object"]
    for number in range(len(GOOD), len(lines)):
        assert all(answers[str(number)]["error"] is not None for answers in by_id), number
        assert by_id[1][str(number)]["response"] is None
    spec = read_spec(tmp_path / "ours.job" / "job.yaml")
    report = verify_job(spec, num_rows=len(lines), seed=0, dtype="float32", device="cpu", tolerance=None)
    report.raise_if_beyond()
    assert any("embeddings" in line for line in report.lines()), list(report.lines())
