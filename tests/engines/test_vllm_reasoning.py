"""Chats with a model that thinks, on real vLLM: the answers are those of `vllm run-batch`."""

import json
import pathlib
import shutil
from typing import Any

import pytest
import run_batch_lines as given
from openai.types.chat import ChatCompletion

import jobs
from batchinf.commands.export import ExportRequest, export_job

pytest.importorskip("vllm")

# It closes the thinking in the prompt if it is off, so that the text is an answer.
TEMPLATE = """{{ bos_token }}
{%- for message in messages %}[{{ message.role }}] {{ message.content }}
{%- if message.reasoning_content %}({{ message.reasoning_content }}){% endif %}
{% endfor %}
{%- if add_generation_prompt %}[assistant] <think>{% endif %}
{%- if enable_thinking is defined and not enable_thinking %}</think>{% endif %}"""
HELLO = [{"role": "user", "content": "Say hello."}]
CHATS: dict[str, dict[str, Any]] = {
    "thinks": {"max_tokens": 40},
    "thinks unseen": {"include_reasoning": False, "max_tokens": 40},
    "is cut off in its thoughts": {"max_tokens": 1},
    "answers at once": {"reasoning_effort": "none"},
    "has thought before": {"messages": [*HELLO, {"role": "assistant", "reasoning": "Hm.", "content": "Hi."}, *HELLO],
                           "reasoning_effort": "none"},
}  # fmt: skip


def thinker(folder: pathlib.Path) -> pathlib.Path:
    """The sample model with two of its special tokens made marks of thinking, which models have as plain tokens."""
    shutil.copytree(jobs.MODEL, folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    marks = {"<|start_header_id|>": "<think>", "<|end_header_id|>": "</think>"}
    for token in tokenizer["added_tokens"]:
        if token["content"] in marks:
            token |= {"content": marks[token["content"]], "special": False}
    vocab = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {marks.get(name, name): number for name, number in vocab.items()}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    return folder


def seen(answer: dict[str, Any]) -> dict[str, Any]:
    """What a chat's answer says."""
    [choice] = ChatCompletion.model_validate(answer).choices
    return {
        "content": choice.message.content or None,
        "reasoning": getattr(choice.message, "reasoning", None),
        "finish_reason": choice.finish_reason,
        "tokens": {name: answer["usage"][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")},
        "reasoning_tokens": answer["usage"]["completion_tokens_details"]["reasoning_tokens"],
    }


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_answers_are_those_of_vllm(tmp_path: pathlib.Path) -> None:
    model = thinker(tmp_path / "thinker")
    common = {"messages": HELLO, "model": "tiny", "temperature": 0}
    path = given.write(tmp_path / "in.jsonl", given.chat_lines({name: common | body for name, body in CHATS.items()}))
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    spec = jobs.spec_of(
        tmp_path,
        model={"name": str(model), "reasoning_parser": "qwen3"},
        input={"path": str(path), "id_column": None, "chat_template": TEMPLATE},
        sampling={"temperature": None, "max_tokens": None, "logprobs": None},
        engine={"max_model_len": 1024, "max_num_seqs": 16, "served_model_name": "tiny"},
        output={"keep_columns": []},
        parallel={"data_parallel_size": 1},
        scripted=None,
    )
    jobs.finish(spec)
    export_job(str(tmp_path / "out"), ExportRequest(to="openai-batch", path=str(tmp_path / "out.jsonl")))
    flags = ("--served-model-name", "tiny", "--dtype", "float32", "--enforce-eager", "--max-model-len", "1024")
    parsers = ("--reasoning-parser", "qwen3", "--chat-template", str(tmp_path / "template.jinja"))
    ours = {name: seen(body) for name, body in given.answered(given.answers_in(tmp_path / "out.jsonl")).items()}
    answers = given.by_vllm(path, model, *flags, *parsers)
    assert ours == {name: seen(body) for name, body in given.answered(answers).items()}
    assert [*ours] == [*CHATS]
    assert ours["thinks"]["reasoning"]
    assert ours["thinks unseen"]["reasoning"] is None
    assert 0 < ours["thinks"]["reasoning_tokens"] < 40
    cut = ours["is cut off in its thoughts"]
    assert (cut["reasoning_tokens"], cut["content"]) == (1, None)
