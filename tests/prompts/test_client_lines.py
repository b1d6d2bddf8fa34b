"""Lines as real clients write them: none is an error row for a field that does not matter.

`client_lines.jsonl` has a line of each form: the client, the line, the beginning of the error if it is refused, and of
some the row's own sampling.
"""

import json
import pathlib
from typing import Any

import pytest
from conftest import MODEL
from openai.types import Completion
from openai.types.chat import ChatCompletion
from transformers import AutoTokenizer

import jobs
from batchinf.commands.export import ExportRequest, export_job
from batchinf.prompts.builder import PromptBuilder
from batchinf.prompts.openai.lines import CHAT_URL, COMPLETIONS_URL, EMBEDDINGS_URL, url_of
from batchinf.records import Prompt
from batchinf.source.rows import Row
from batchinf.spec.job import JobSpec
from batchinf.tasks.registry import task_of

FILE = pathlib.Path(__file__).with_name("client_lines.jsonl")
ENTRIES: list[dict[str, Any]] = [json.loads(text) for text in FILE.read_text(encoding="utf-8").splitlines()]
TEMPLATE = (pathlib.Path(__file__).parents[1] / "tools.jinja").read_text(encoding="utf-8")
# Names that lines have for the job's model.
SERVED = [
    "BAAI/bge-m3", "Qwen/Qwen3-8B", "gpt-3.5-turbo-0125", "gpt-3.5-turbo-instruct", "gpt-35-turbo-instruct",
    "gpt-4.1-mini", "gpt-4o-audio-preview", "gpt-4o-batch", "gpt-4o-mini", "gpt-4o-search-preview", "gpt-5-mini",
    "meta-llama/Llama-3.1-8B-Instruct", "o3-mini", "openai/gpt-oss-20b", "text-embedding-3-small",
]  # fmt: skip
MAX_MODEL_LEN = 2048


def spec_of(task: str) -> dict[str, Any]:
    """A job for these lines."""
    is_embed = task == "embed"
    return {
        "task": task,
        "model": {"name": str(MODEL), **({} if is_embed else {"tool_parser": "hermes"})},
        "input": {"path": "batch.jsonl", "format": "openai", "chat_template": TEMPLATE},
        "engine": {"served_model_name": SERVED, **({"hf_overrides": {"is_matryoshka": True}} if is_embed else {})},
        "output": {"path": "out", "include_prompt": True},
        **({} if is_embed else {"sampling": {"temperature": 1.0, "logprobs": 5, "prompt_logprobs": 0}}),
    }


@pytest.fixture(scope="module")
def prompts() -> dict[int, Prompt]:
    """The prompt or error of each line, by its place."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    found: dict[int, Prompt] = {}
    places: dict[str, list[int]] = {"generate": [], "embed": []}
    for place, entry in enumerate(ENTRIES):
        places["embed" if url_of(entry["line"]) == EMBEDDINGS_URL else "generate"].append(place)
    for task, rows in places.items():
        spec = JobSpec.model_validate(spec_of(task))
        builder: PromptBuilder = task_of(spec).prompt_builder(tokenizer, len(tokenizer))
        built = builder.build([Row(place, ENTRIES[place]["line"], None) for place in rows], MAX_MODEL_LEN)
        found |= dict(zip(rows, built, strict=True))
    return found


def test_there_are_many_of_many_clients() -> None:
    assert len(ENTRIES) >= 170
    assert len({entry["client"] for entry in ENTRIES}) >= 20
    assert len({json.dumps(entry["line"]["body"], sort_keys=True) for entry in ENTRIES}) == len(ENTRIES)
    assert sum("error" not in entry for entry in ENTRIES) >= 110


@pytest.mark.parametrize("place", range(len(ENTRIES)))
def test_each_line_runs_or_says_why_not(place: int, prompts: dict[int, Prompt]) -> None:
    entry = ENTRIES[place]
    error = prompts[place].error
    message = None if error is None else error.error_message
    if "error" in entry:
        assert message is not None
        assert message.startswith(entry["error"])
        return
    assert message is None
    sampling = prompts[place].sampling
    for name, value in entry.get("sampling", {}).items():
        found = getattr(sampling, name)
        assert json.loads(json.dumps(found)) == value, name


TYPES = {CHAT_URL: ChatCompletion, COMPLETIONS_URL: Completion}
# The scripted engine follows no structure and calls no tool. With the sample model, a text may be cut off.
OF_THE_ENGINE = {"invalid_json", "structure_violated", "invalid_structure", "invalid_tool_call", "invalid_choice"}


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["scripted", "vllm"])
def test_a_whole_job_gives_each_line_an_answer_that_the_openai_package_reads(
    engine: str, tmp_path: pathlib.Path
) -> None:
    is_real = engine == "vllm"
    if is_real:
        pytest.importorskip("vllm")
    entries = {f"{number}": entry for number, entry in enumerate(ENTRIES) if url_of(entry["line"]) != EMBEDDINGS_URL}
    lines = [json.dumps({**entry["line"], "custom_id": name}) for name, entry in entries.items()]
    (tmp_path / "in.jsonl").write_text("".join(f"{text}\n" for text in lines))
    spec = jobs.spec_of(
        tmp_path,
        **{name: spec_of("generate")[name] for name in ("task", "model", "sampling")},
        engine={"served_model_name": SERVED, **({"max_model_len": 1024, "max_num_seqs": 64} if is_real else {})},
        input={"path": str(tmp_path / "in.jsonl"), "id_column": None, "chat_template": TEMPLATE},
        output={"keep_columns": [], "include_prompt": True},
        scripted=None if is_real else {"step_s": 0.0, "max_model_len": MAX_MODEL_LEN},
        parallel={"data_parallel_size": 1},
        max_error_rate=1.0,
    )
    jobs.finish(spec)
    request = ExportRequest(to="openai-batch", path=str(tmp_path / "out.jsonl"), splits_errors=False)
    export_job(str(tmp_path / "out"), request)
    texts = (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(texts) == len(entries)
    answered = 0
    for text in texts:
        answer = json.loads(text)
        entry = entries[answer["custom_id"]]
        if "error" in entry:
            assert answer["error"]["message"].startswith(entry["error"])
        elif answer["error"] is None:
            answered += 1
            body = answer["response"]["body"]
            assert TYPES[url_of(entry["line"]) or ""].model_validate(body).id == body["id"]
        else:
            assert answer["error"]["code"] in OF_THE_ENGINE, answer["error"]
    assert answered > 80
