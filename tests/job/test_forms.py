"""A field that has no effect for the form of the input, of the prompts or of the job is refused in new jobs."""

import json
import pathlib
from typing import Any

import datasets
import pytest

import jobs
from batchinf.base.errors import SpecError
from batchinf.job.forms import FILES, HUB, LINES, SAVED, SPLITS, unused_fields
from batchinf.job.open import open_job
from batchinf.spec.file import read_spec

LEAST: dict[str, Any] = {"model": "m", "input": {"path": "x"}, "output": {"path": "y"}}
CHOICES = {"context_column": "q", "choices": ["a", "b"]}
# The form of the input, fields of the spec, and those among them that have no effect.
CASES: list[tuple[str, dict[str, Any], list[str]]] = [
    (FILES, {"input.split": "train", "input.name": "n", "input.revision": "main"},
     ["input.split", "input.name", "input.revision"]),
    (HUB, {"input.split": "train", "input.name": "n", "input.revision": "main"}, []),
    (SPLITS, {"input.split": "train", "input.name": "n"}, ["input.name"]),
    (SAVED, {"input.split": "train", "input.revision": "main"}, ["input.split", "input.revision"]),
    (FILES, {"input.images": {}}, ["input.images"]),
    (FILES, {"input.images": {}, "input.images_column": "p"}, []),
    (FILES, {"input.images": {}, "input.messages_column": "m"}, []),
    (FILES, {"input.images": {}, "input.format": "openai"}, []),
    (FILES, {"input.images_column": "p", "input.format": "openai"}, ["input.images_column"]),
    (FILES, {"input.images": {}, "input.messages": [{"role": "user", "content": "{{ a }}"}]}, ["input.images"]),
    (FILES, {"input.messages": [{"role": "user", "content": [{"type": "image", "column": "p"}]}]}, []),
    (FILES, {"input.apply_chat_template": False}, []),
    (FILES, {"input.apply_chat_template": False, "input.token_ids_column": "t"}, ["input.apply_chat_template"]),
    (FILES, {"input.apply_chat_template": False, "input.format": "openai"}, ["input.apply_chat_template"]),
    (FILES, {"input.parallel_tool_calls": False, "input.messages_column": "m"}, ["input.parallel_tool_calls"]),
    (FILES, {"input.parallel_tool_calls": False, "input.messages_column": "m", "model.tool_parser": "hermes"}, []),
    (FILES, {"input.images": {}, "input.format": "openai", "task": "embed"}, ["input.images"]),
    (FILES, {"input.images": {}, "input.format": "openai", "task": "logits"}, []),
    (FILES, {"input.answers": "texts"}, ["input.answers"]),
    (FILES, {"task": "score", **{f"input.{k}": v for k, v in CHOICES.items()}, "input.answers": "places",
             "input.answer_column": "a"}, []),
    (FILES, {"task": "score", "input.text_column": "t", "score.one_pass": False}, ["score.one_pass"]),
    (FILES, {"task": "score", "input.text_column": "t", "score.add_bos_token": False}, []),
    (FILES, {"task": "score", **{f"input.{k}": v for k, v in CHOICES.items()}, "score.add_bos_token": True}, []),
    (FILES, {"task": "score", "input.messages": [{"role": "user", "content": "{{ a }}"}],
             "input.choices": ["a", "b"], "score.add_bos_token": False}, ["score.add_bos_token"]),
    (FILES, {"task": "score", "input.token_ids_column": "t", "input.choices": ["a", "b"],
             "score.add_bos_token": True}, ["score.add_bos_token"]),
    (FILES, {"task": "score", **{f"input.{k}": v for k, v in CHOICES.items()}, "score.one_pass": False}, []),
    (FILES, {"sampling.logprobs_mode": "raw_logits", "output.logprobs_dtype": "float16"},
     ["sampling.logprobs_mode", "output.logprobs_dtype"]),
    *((FILES, {"sampling.logprobs_mode": "raw_logits", "output.logprobs_dtype": "float16", f"sampling.{k}": v}, [])
      for k, v in {"logprobs": 0, "prompt_logprobs": 0, "logprob_token_ids": [1]}.items()),
    (FILES, {"task": "score", "input.text_column": "t", "output.logprobs_dtype": "float16"}, []),
    (FILES, {"task": "score", "input.text_column": "t", "output.logprobs_dtype": "float16",
             "output.include_token_logprobs": False}, ["output.logprobs_dtype"]),
    (FILES, {"task": "logits", "output.logprobs_dtype": "float16"}, ["output.logprobs_dtype"]),
    (FILES, {"sampling.include_stop_str_in_output": True}, ["sampling.include_stop_str_in_output"]),
    (FILES, {"sampling.include_stop_str_in_output": True, "sampling.bad_words": ["a"]},
     ["sampling.include_stop_str_in_output"]),
    *((FILES, {"sampling.include_stop_str_in_output": True, **fields}, []) for fields in (
        {"sampling.stop": "a"}, {"sampling.stop_token_ids": [1]}, {"sampling.skip_special_tokens": False},
        {"sampling.columns": {"stop": "s"}}, {"sampling.stop_token_ids": {"column": "s"}}, {"input.format": "openai"})),
    (FILES, {"task": "logits", "logits.positions": "generated", "sampling.include_stop_str_in_output": True},
     ["sampling.include_stop_str_in_output"]),
    (FILES, {"output.include_token_ids": False}, []),
    *((FILES, {"task": task, "output.include_token_ids": False}, ["output.include_token_ids"])
      for task in ("embed", "classify", "logits", "hidden_states")),
    (FILES, {"task": "score", "input.text_column": "t", "output.include_token_ids": False},
     ["output.include_token_ids"]),
    (FILES, {"output.store_timeout_s": 5}, ["output.store_timeout_s"]),
    (FILES, {"output.store_timeout_s": 5, "output.path": "s3://bucket/out"}, []),
    (FILES, {"ray": {"address": "auto", "resources": {"CPU": 2}}}, ["ray.address", "ray.resources"]),
    (FILES, {"ray": {"resources": {}}}, []),
    (FILES, {"ray": {"address": "auto", "resources": {"CPU": 2}}, "backend": "ray"}, []),
]  # fmt: skip


@pytest.mark.parametrize(("of_input", "fields", "unused"), CASES)
def test_fields_without_an_effect_are_found(of_input: str, fields: dict[str, Any], unused: list[str]) -> None:
    messages = unused_fields(read_spec(LEAST, fields).spec, of_input=of_input)
    assert [message.partition(":")[0] for message in messages] == unused


def test_the_message_says_what_the_field_is_for() -> None:
    [message] = unused_fields(read_spec(LEAST, {"input.split": "train"}).spec, of_input=FILES)
    assert message == (
        "input.split: got 'train', which has no effect with files; it is for a dataset of the hub or a saved dataset "
        "with splits: leave it out and narrow input.path, or set input.format: hf to read a dataset"
    )
    fields = {"input.apply_chat_template": False, "input.format": "openai"}
    [message] = unused_fields(read_spec(LEAST, fields).spec, of_input=FILES)
    assert f"got false, which has no effect with files and {LINES}; it is for prompts that are plain text" in message


def test_a_field_of_some_jobs_names_them() -> None:
    fields = {"output.store_timeout_s": 5, "sampling.logprobs_mode": "raw_logits"}
    assert unused_fields(read_spec(LEAST, fields).spec, of_input=FILES) == [
        "sampling.logprobs_mode: got 'raw_logits', which has no effect here; it is for a job with sampling.logprobs, "
        "prompt_logprobs or logprob_token_ids: leave it out",
        "output.store_timeout_s: got 5.0, which has no effect here; it is for a job with a bucket as output.path: "
        "leave it out",
    ]


def test_a_resume_on_this_host_passes_over_the_section_of_the_cluster(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs.finish(jobs.spec_of(tmp_path))
    spec = jobs.spec_of(tmp_path, ray={"resources": {"CPU": 2}})
    with pytest.raises(
        SpecError, match=r"ray\.resources: got it, .* for a job with backend: ray: leave it out, or set"
    ):
        open_job(read_spec(spec), tmp_path / "cache")
    open_job(read_spec(spec), tmp_path / "cache", jobs.state_of(tmp_path / "out")).source.close()
    assert "note: ray.resources: got it, which has no effect here" in capsys.readouterr().err


def test_a_new_job_refuses_them(tmp_path: pathlib.Path) -> None:
    given = {"input": {"split": "nonsense"}}
    spec = jobs.spec_of(tmp_path, **given)
    with pytest.raises(SpecError, match=r"job\.yaml:\S+ input\.split: got 'nonsense', which has no effect with files"):
        open_job(read_spec(spec), tmp_path / "cache")
    assert "input.split" in jobs.run("run", spec).stderr


def test_a_saved_dataset_without_splits_has_no_split(tmp_path: pathlib.Path) -> None:
    rows = [{"id": i, "prompt": f"Say {i}.", "language": "en"} for i in range(3)]
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"test": datasets.Dataset.from_list(rows)}).save_to_disk(str(tmp_path / "several"))
    file = read_spec(jobs.spec_of(tmp_path, input={"path": str(tmp_path / "one"), "split": "test"}))
    with pytest.raises(SpecError, match=r"input\.split: got 'test', which has no effect with a saved dataset without"):
        open_job(file, tmp_path / "cache")
    file = read_spec(jobs.spec_of(tmp_path, input={"path": str(tmp_path / "several"), "split": "test"}))
    job = open_job(file, tmp_path / "other cache")
    assert (job.source.num_rows, json.loads((tmp_path / "job.yaml").read_text())["input"]["split"]) == (3, "test")
    job.source.close()
