"""`batchinf run-batch`: the flags of `vllm run-batch` become a spec, and a killed run goes on to the same file."""

import json
import os
import pathlib
from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion

import jobs
from batchinf import api
from batchinf.base.errors import UserError
from batchinf.commands.export import export_job
from batchinf.commands.run_batch import asked_by_lines, batch_run, kept_input, read_flags
from batchinf.engines.installed import engine_argument_names
from batchinf.spec.file import read_spec

NUM_LINES = 60


def write_lines(path: pathlib.Path, *bodies: dict[str, Any]) -> pathlib.Path:
    lines = [
        {"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions",
         "body": {"messages": [{"role": "user", "content": f"Say {number}."}], "max_tokens": 12, **body}}
        for number, body in enumerate(bodies)
    ]  # fmt: skip
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--max-model-len 512 --enforce-eager", {"max_model_len": 512, "enforce_eager": True}),
        ("--max_model_len=32k --max-num-batched-tokens 2K", {"max_model_len": 32_000, "max_num_batched_tokens": 2048}),
        ("--no-enable-prefix-caching -tp 2", {"enable_prefix_caching": False, "tensor_parallel_size": 2}),
        ("--served-model-name a b --seed -1", {"served_model_name": ["a", "b"], "seed": -1}),
        ('--hf-overrides {"a":1} -q fp8', {"hf_overrides": {"a": 1}, "quantization": "fp8"}),
        ("--served-model-name 123 --revision 1234567", {"served_model_name": "123", "revision": "1234567"}),
        ("--served-model-name 1 null --tokenizer true", {"served_model_name": ["1", "null"], "tokenizer": "true"}),
        ("--tool-call-parser 5 --data-parallel-size 2", {"tool_call_parser": "5", "data_parallel_size": 2}),
    ],
)  # fmt: skip
def test_flags_are_read_as_vllm_reads_them(flags: str, expected: dict[str, Any]) -> None:
    assert dict(read_flags(flags.split())) == expected


def test_flags_go_to_the_fields_of_the_spec(tmp_path: pathlib.Path) -> None:
    lines = write_lines(tmp_path / "in.jsonl", {"logprobs": True, "top_logprobs": 3}, {"logprobs": True})
    (tmp_path / "chat.jinja").write_text("{{ messages[0].content }}")
    flags = (
        "--max-model-len 512 --dtype float32 -tp 1 --served-model-name other --seed 7 --response-role assistant "
        f"--chat-template {tmp_path / 'chat.jinja'} --trust-remote-code --disable-log-requests "
        "--enable-auto-tool-choice --tool-call-parser hermes"
    )
    run = batch_run(str(lines), str(tmp_path / "out.jsonl"), str(jobs.MODEL), flags.split())
    spec = read_spec(run.spec).spec
    assert (spec.model.dtype, spec.model.trust_remote_code, spec.model.tool_parser) == ("float32", True, "hermes")
    assert spec.parallel.tensor_parallel_size == 1
    assert spec.engine == {"max_model_len": 512, "served_model_name": "other"}
    assert (spec.sampling.seed, spec.sampling.logprobs) == (7, 3)
    assert spec.input.chat_template == "{{ messages[0].content }}"
    assert (run.folder, run.output.path) == (str(tmp_path / "out.job"), str(tmp_path / "out.jsonl"))
    assert run.notes == (
        "--disable-log-requests has no effect: requests are not logged",
        "--enable-auto-tool-choice has no effect: --tool-call-parser is enough",
    )


@pytest.mark.parametrize(
    ("flags", "task"),
    [
        ("", None),
        ("--runner generate", None),
        ("--runner pooling", "embed"),
        ("--convert embed", "embed"),
        ("--runner pooling --convert classify", "rerank"),
    ],
)
def test_flags_of_pooling_choose_the_lines(flags: str, task: str | None, tmp_path: pathlib.Path) -> None:
    lines = write_lines(tmp_path / "in.jsonl", {}, {"logprobs": True, "top_logprobs": 2})
    more = [{"custom_id": url, "method": "POST", "url": url, "body": {}} for url in ("/x", "/v1/embeddings", "/score")]
    lines.write_text(lines.read_text() + "no JSON\n[]\n" + "".join(f"{json.dumps(line)}\n" for line in more))
    run = batch_run(str(lines), str(tmp_path / "out.jsonl"), str(jobs.MODEL), flags.split())
    assert run.spec.get("task") == task
    assert run.spec["sampling"] == ({"logprobs": 2, "prompt_logprobs": None} if task is None else {})


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--enable-metrics", "--enable-metrics: not supported: no server runs"),
        ("--follow", "--follow: not supported: `batchinf export FOLDER --to openai-batch -o FILE` writes the"),
        ("--lora-modules a=b", "--lora-modules: not supported: write a spec with model.lora"),
        ("--chat-template gone.jinja", "--chat-template: got gone.jinja; must be a file that is there"),
        ("512", "run-batch: got '512' where a flag is expected"),
    ],
)
def test_flags_that_are_refused(flags: str, message: str, tmp_path: pathlib.Path) -> None:
    with pytest.raises(UserError) as raised:
        batch_run("in.jsonl", str(tmp_path / "out.jsonl"), "model", flags.split())
    assert str(raised.value).startswith(message)


@pytest.mark.skipif(engine_argument_names() is None, reason="needs vLLM, whose flags are checked")
def test_a_flag_that_is_not_known(tmp_path: pathlib.Path) -> None:
    with pytest.raises(UserError, match=r"^--max-model-length: not a flag .*; did you mean --max-model-len\?"):
        batch_run("in.jsonl", str(tmp_path / "out.jsonl"), "model", ["--max-model-length", "5"])
    with pytest.raises(UserError, match=r"^--set: not a flag of `batchinf run-batch`\. It takes the engine arguments"):
        batch_run("in.jsonl", str(tmp_path / "out.jsonl"), "model", ["--set", "sampling.n=2"])


def test_a_file_of_something_else_stays(tmp_path: pathlib.Path) -> None:
    (tmp_path / "out.jsonl").write_text("mine")
    with pytest.raises(UserError, match=r"out\.jsonl is there already, and no job in .*out\.job has written it"):
        batch_run("in.jsonl", str(tmp_path / "out.jsonl"), "model", [])


def test_what_some_lines_need_of_the_whole_job(tmp_path: pathlib.Path) -> None:
    none = {"sampling": {"logprobs": None, "prompt_logprobs": None}}
    assert asked_by_lines(str(write_lines(tmp_path / "none.jsonl", {}, {"logprobs": False}))) == none
    bodies: list[dict[str, Any]] = [{"logprobs": True}, {"logprobs": 4}, {"logprobs": True, "top_logprobs": 2}]
    path = write_lines(tmp_path / "some.jsonl", *bodies)
    path.write_text(path.read_text() + 'logprobs {\n{"body": "logprobs"}\n{"logprobs": 9}\n')
    assert asked_by_lines(str(path)) == {"sampling": {"logprobs": 4, "prompt_logprobs": None}}
    path = write_lines(tmp_path / "prompts.jsonl", {"logprobs": 1}, {"prompt_logprobs": 1, "logprobs": 2})
    assert asked_by_lines(str(path)) == {"sampling": {"logprobs": 2, "prompt_logprobs": 1}}
    assert asked_by_lines(str(tmp_path / "gone.jsonl")) == none


def test_lines_with_images_and_their_flags(tmp_path: pathlib.Path) -> None:
    parts = [{"type": "image_url", "image_url": {"url": "data:,"}}] * 6
    pictures = write_lines(tmp_path / "in.jsonl", {}, {"messages": [{"role": "user", "content": parts}]})

    def images_of(model: pathlib.Path, *flags: str) -> Any:
        run = batch_run(str(pictures), str(tmp_path / "out.jsonl"), str(model), flags)
        return read_spec(run.spec).spec.input.images

    vision = jobs.ROOT / "sample_data" / "tiny-vision"
    found = images_of(vision)
    assert (found.max_per_row, found.folders, found.hosts) == (6, (), ())
    flags = ("--limit-mm-per-prompt", '{"image": 2}', "--allowed-local-media-path", str(tmp_path),
             "--allowed-media-domains", "a.example.com", "b.example.com")  # fmt: skip
    found = images_of(vision, *flags)
    assert (found.max_per_row, found.folders) == (2, (str(tmp_path),))
    assert found.hosts == ("a.example.com", "b.example.com")
    # The lines of a model without images are error rows, and the others run.
    assert images_of(jobs.MODEL) is None
    with pytest.raises(UserError, match="--limit-mm-per-prompt: got"):
        images_of(vision, "--limit-mm-per-prompt", '{"image": 0}')


def test_killed_and_run_again_it_writes_the_file_of_an_unhurt_run(tmp_path: pathlib.Path) -> None:
    """All but the ids, which have the job's own."""
    lines = write_lines(tmp_path / "in.jsonl", *({"temperature": 1.0, "logprobs": True} for _ in range(NUM_LINES)))
    answers = []
    for name, faults in (("unhurt", ""), ("hurt", "coordinator.after_publish:2=kill")):
        run = batch_run(str(lines), str(tmp_path / f"{name}.jsonl"), str(jobs.MODEL), [])
        scripted = {"scripted": {"step_s": 0.002, "max_num_seqs": 4}, "checkpoint_interval_s": 0.1}
        output = {"output": {**run.spec["output"], "rows_per_shard": 7}}
        (tmp_path / f"{name}.json").write_text(json.dumps({**run.spec, **scripted, **output}))
        if faults:
            assert jobs.run("run", tmp_path / f"{name}.json", faults=faults).returncode != 0
            export_job(run.folder, run.output)
            assert 0 < len((tmp_path / "hurt.jsonl").read_text().splitlines()) < NUM_LINES
        jobs.finish(tmp_path / f"{name}.json")
        assert export_job(run.folder, run.output).num_rows == NUM_LINES
        text = (tmp_path / f"{name}.jsonl").read_text(encoding="utf-8")
        with_job = text.replace(api.open(run.folder).job_id, "JOB")
        created = str(int(api.open(run.folder).begun_at.timestamp()))
        answers.append(with_job.replace(created, "TIME"))
    assert answers[0] == answers[1]
    assert len(answers[0].splitlines()) == NUM_LINES


def test_lines_from_a_pipe_are_kept_beside_the_answers(tmp_path: pathlib.Path) -> None:
    lines = write_lines(tmp_path / "in.jsonl", {}, {}).read_bytes()
    for sent, expected in ((lines, lines), (lines, lines), (lines[:40], lines[:40])):
        reader, writer = os.pipe()
        os.write(writer, sent)
        os.close(writer)
        run = batch_run(f"/dev/fd/{reader}", str(tmp_path / "out.jsonl"), str(jobs.MODEL), [])
        os.close(reader)
        assert run.spec["input"]["path"] == str(tmp_path / "out.input.jsonl")
        assert (tmp_path / "out.input.jsonl").read_bytes() == expected
        assert [*tmp_path.glob("*.part")] == []
    kept = (tmp_path / "out.input.jsonl").stat().st_mtime_ns
    with open(tmp_path / "out.input.jsonl", "rb") as file:
        name = f"/dev/fd/{file.fileno()}"
        assert kept_input(name, str(tmp_path / "other")) == str((tmp_path / "out.input.jsonl").resolve())
    assert (tmp_path / "out.input.jsonl").stat().st_mtime_ns == kept
    assert kept_input("https://a/b.jsonl", "other") == "https://a/b.jsonl"


def test_places_to_which_no_answers_go(tmp_path: pathlib.Path) -> None:
    lines = write_lines(tmp_path / "in.jsonl", {})
    for target, words in (
        ("ssh://host/out.jsonl", "-o: got 'ssh://host/out.jsonl', but only a path of this host is possible"),
        ("https://host/out.jsonl", "`curl -T FILE URL` sends a file by PUT"),
    ):
        done = jobs.run("run-batch", "-i", lines, "-o", target, "--model", jobs.MODEL, is_refused=True)
        assert done.returncode == 2
        assert words in done.stderr


def test_the_answers_are_no_pipe() -> None:
    with pytest.raises(UserError, match=r"^-o: got /dev/stdout; must be a file"):
        batch_run("in.jsonl", "/dev/stdout", "model", [])


def test_an_empty_file_has_no_answers(tmp_path: pathlib.Path) -> None:
    (tmp_path / "in.jsonl").write_text("\n")
    options = ("-i", tmp_path / "in.jsonl", "-o", tmp_path / "out.jsonl", "--model", jobs.MODEL)
    for _ in range(2):
        done = jobs.run("run-batch", *options, is_refused=True)
        assert done.returncode == 0, done.stderr
        assert "has no rows, so nothing ran" in done.stdout
        assert (tmp_path / "out.jsonl").read_bytes() == b""


@pytest.mark.slow
def test_the_command_itself_on_vllm(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("vllm")
    schema = {"type": "json_schema", "json_schema": {"name": "city", "schema": {"enum": ["Rome"]}}}
    good: list[dict[str, Any]] = [
        {"temperature": 0}, {"temperature": 0, "logprobs": True}, {"response_format": schema},
        {"structured_outputs": {"regex": "a{3}"}}, {"structured_outputs": {"choice": ["yes"]}},
    ]  # fmt: skip
    bad: list[dict[str, Any]] = [{"stream": True}, {"model": "another"}, {"messages": []}, {"temperature": 9}]
    lines = write_lines(tmp_path / "in.jsonl", *good, *bad)
    others = [
        {
            "custom_id": "text",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": ["Once", "Twice"], "max_tokens": 3},
        },
        {"custom_id": "url", "method": "POST", "url": "/v1/audio/transcriptions", "body": {}},
        {"custom_id": "vector", "method": "POST", "url": "/v1/embeddings", "body": {"input": "a"}},
        {"custom_id": "body", "method": "POST", "url": "/v1/chat/completions"},
        {"custom_id": "response", "method": "POST", "url": "/v1/responses", "body": {"input": "Say."}},
    ]
    more = "".join(f"{json.dumps(line)}\n\n" for line in others)  # blank lines are none
    lines.write_text(f'{lines.read_text()}{more}{{"custom_id": "broken", "meth\n')
    flags = ("--max-model-len", "256", "--dtype", "float32", "-dp", "1")
    options = ("-i", lines, "-o", tmp_path / "out.jsonl", "--model", jobs.MODEL)
    done = jobs.run("run-batch", *options, *flags)
    assert done.returncode == 3, done.stderr
    assert "error: 9 of 16 answers are errors; the file has each of them" in done.stderr
    assert f"16 output rows in {tmp_path / 'out.jsonl'}" in done.stdout
    answers = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    names = [answer["custom_id"] for answer in answers]
    assert names == [*map(str, range(9)), "text", "url", "vector", "body", "response", "row_index 14"]
    answered = {answer["custom_id"]: answer["response"]["body"] for answer in answers if answer["error"] is None}
    assert [*answered] == ["0", "1", "2", "3", "4", "text"]
    texts = {name: ChatCompletion.model_validate(answered[name]).choices[0].message.content for name in "01234"}
    assert (texts["2"], texts["3"], texts["4"]) == ('"Rome"', "aaa", "yes")
    assert texts["0"] == texts["1"]
    assert [bool(choice.text) for choice in Completion.model_validate(answered["text"]).choices] == [True, True]
    errors = {answer["custom_id"]: answer["error"]["message"] for answer in answers if answer["error"] is not None}
    beginnings = {
        "5": "body.stream", "6": "body.model", "7": "body.messages", "8": "sampling.temperature", "url": "url: got",
        "vector": "url: got", "body": "body is missing", "response": "url: got '/v1/responses', which is not supported",
    }  # fmt: skip
    for name, beginning in beginnings.items():
        assert errors[name].startswith(beginning)
    assert {*errors} == {*beginnings, "row_index 14"}
    kept = (tmp_path / "out.jsonl").read_bytes()
    again = jobs.run("run-batch", *options, *flags)
    assert again.returncode == 3, again.stderr
    assert (tmp_path / "out.jsonl").read_bytes() == kept
