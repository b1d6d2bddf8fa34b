"""Lines of `/v1/completions` on real vLLM: the answers of vLLM's server for several prompts and truncation.

`vllm run-batch` does not take this URL.
"""

import contextlib
import json
import pathlib
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from openai.types import Completion

import jobs
from batchinf.commands.verify import verify_job
from batchinf.spec.file import read_spec

pytest.importorskip("vllm")

MAX_MODEL_LEN = 128
LONG = "The quick brown fox jumps over the lazy dog. " * 12
CHAT = [{"role": "user", "content": LONG}]
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
COMPLETIONS = "/v1/completions"
GOOD: dict[str, tuple[str, dict[str, Any]]] = {
    "texts": (COMPLETIONS, {"prompt": ["Once upon a time", "Two roads", "The end of"]}),
    "ids": (COMPLETIONS, {"prompt": [[5, 6, 7], [8, 9], [1, 20, 30, 40]]}),
    "logprobs of several": (COMPLETIONS, {"prompt": ["Once upon", "a time"], "logprobs": 2}),
    "logprobs of ids": (COMPLETIONS, {"prompt": [[5, 6, 7], [8, 9]], "logprobs": 0}),
    "logprobs": (COMPLETIONS, {"prompt": "Once upon a time", "logprobs": 2}),
    "right": (COMPLETIONS, {"prompt": LONG, "truncate_prompt_tokens": 20, "truncation_side": "right"}),
    "left": (COMPLETIONS, {"prompt": LONG, "truncate_prompt_tokens": 20, "truncation_side": "left"}),
    "default side": (COMPLETIONS, {"prompt": LONG, "truncate_prompt_tokens": 20, "logprobs": 0}),
    "as many as fit": (COMPLETIONS, {"prompt": LONG, "truncate_prompt_tokens": -1}),
    "ids, cut": (COMPLETIONS, {"prompt": [[*range(5, 60)], [7, 8]], "truncate_prompt_tokens": 9}),
    "not cut": (COMPLETIONS, {"prompt": "Two roads", "truncate_prompt_tokens": 100}),
    "conversation": ("/v1/chat/completions", {"messages": CHAT, "truncate_prompt_tokens": 30}),
}  # fmt: skip
BAD: dict[str, tuple[str, dict[str, Any]]] = {
    "too much": (COMPLETIONS, {"prompt": LONG, "truncate_prompt_tokens": MAX_MODEL_LEN + 1}),
    "suffix": (COMPLETIONS, {"prompt": "Once", "suffix": "end"}),
    "greedy samples": (COMPLETIONS, {"prompt": "Once", "n": 2}),
    "nothing to write": (COMPLETIONS, {"prompt": "Once", "max_tokens": 0}),
    "empty": (COMPLETIONS, {"prompt": []}),
}


def answers(path: pathlib.Path) -> dict[str, dict[str, Any]]:
    return {answer["custom_id"]: answer for answer in map(json.loads, path.read_text().splitlines())}


def compare(expected: dict[str, Any], found: dict[str, Any]) -> None:
    assert [choice["index"] for choice in found["choices"]] == [choice["index"] for choice in expected["choices"]]
    for theirs, ours in zip(expected["choices"], found["choices"], strict=True):
        if "message" in theirs:
            assert ours["message"]["content"] == theirs["message"]["content"]
            continue
        assert ours["text"] == theirs["text"]
        assert ours["finish_reason"] == theirs["finish_reason"]
        assert (ours["logprobs"] is None) == (theirs["logprobs"] is None)
        if theirs["logprobs"] is not None:
            compare_logprobs(theirs["logprobs"], ours["logprobs"])
    usage = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert [found["usage"][name] for name in usage] == [expected["usage"][name] for name in usage]


def compare_logprobs(theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    values = [np.array([np.nan if v is None else v for v in each["token_logprobs"]]) for each in (theirs, ours)]
    assert np.allclose(*values, atol=2e-3, equal_nan=True)
    assert len(ours["tokens"]) == len(theirs["tokens"])
    for mine, other in zip(ours["top_logprobs"], theirs["top_logprobs"], strict=True):
        assert (mine is None) == (other is None)
        if mine is not None:
            # Tokens that are parts of characters have other names, and may share one.
            assert max(mine.values()) == pytest.approx(max(other.values()), abs=2e-3)


@contextlib.contextmanager
def server(folder: pathlib.Path, *flags: str) -> Iterator[str]:
    """vLLM's server; its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with (folder / "server.log").open("wb") as log:
        module = "vllm.entrypoints.openai.api_server"
        process = jobs.start_vllm(module, "--port", str(port), *flags, stdout=log, stderr=log)
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{address}/health", timeout=5):
                break
            assert process.poll() is None, (folder / "server.log").read_text()[-3000:]
            time.sleep(0.5)
        yield address
    finally:
        jobs.kill(jobs.family(process.pid))
        process.wait()


def post(url: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    data = json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_answers_are_those_of_the_server(tmp_path: pathlib.Path) -> None:
    bodies = {name: (url, {"temperature": 0, "max_tokens": 8, **body}) for name, (url, body) in (GOOD | BAD).items()}
    lines = [{"custom_id": name, "method": "POST", "url": url, "body": body} for name, (url, body) in bodies.items()]
    (tmp_path / "in.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    flags = ("--model", str(jobs.MODEL), "--dtype", "float32", "--max-model-len", str(MAX_MODEL_LEN),
             "--chat-template", str(tmp_path / "template.jinja"))  # fmt: skip
    done = jobs.run("run-batch", "-i", tmp_path / "in.jsonl", "-o", tmp_path / "ours", *flags, "-dp", "1")
    assert done.returncode == 3, done.stderr
    found = answers(tmp_path / "ours")
    assert found.keys() == {*GOOD, *BAD}
    with server(tmp_path, *flags, "--enforce-eager") as address:
        expected = {name: post(address + url, body) for name, (url, body) in bodies.items()}
    for name, (url, _) in GOOD.items():
        status, body = expected[name]
        assert (status, found[name]["error"]) == (200, None), (name, body, found[name])
        compare(body, found[name]["response"]["body"])
        if url == COMPLETIONS:
            Completion.model_validate(found[name]["response"]["body"])
    for name in BAD:
        assert (expected[name][0] >= 400, found[name]["response"]) == (True, None), (name, expected[name])
    # The stored logprobs are those of each sample's own prompt.
    report = verify_job(read_spec(tmp_path / "ours.job" / "job.yaml"), num_rows=40)
    report.raise_if_beyond()
