"""What runs but may not be meant: a chat template that is not applied, a second BOS, a turn that was to go on."""

import contextlib
import json
import pathlib
import shutil
from typing import Any

import pytest

import batchinf
import jobs
from batchinf.base.errors import SpecError
from batchinf.job.open import open_job
from batchinf.prompts import checks
from batchinf.prompts.checks import first_row_warnings
from batchinf.prompts.encoder import load_tokenizer
from batchinf.prompts.renderer import check_columns
from batchinf.spec.file import read_spec
from batchinf.spec.job import JobSpec

BOS = "<|begin_of_text|>"
NOT_APPLIED = (
    "warning: the model has a chat template, which input.{} alone does not apply; "
    "input.add_generation_prompt: true makes each prompt a user's message, and input.apply_chat_template: false says "
    "that plain text is meant"
)
TURNS = [{"role": "user", "content": "{{ prompt }}"}, {"role": "assistant", "content": "So"}]


def warned(folder: pathlib.Path, texts: list[str], **input: Any) -> list[str]:
    (folder / "rows.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    sections = {"input": {"path": str(folder / "rows.jsonl"), "id_column": None, **input}}
    job = open_job(read_spec(jobs.spec_of(folder, output={"keep_columns": []}, **sections)))
    with contextlib.closing(job.source):
        return list(job.task.prompt_warnings(job.model, job.source))


@pytest.mark.parametrize(
    ("input", "expected"),
    [
        ({}, [NOT_APPLIED.format("prompt_column")]),
        ({"prompt_template": "{{ prompt }}!"}, [NOT_APPLIED.format("prompt_template")]),
        ({"add_generation_prompt": True}, []),
        ({"apply_chat_template": False}, []),
        ({"token_ids_column": "prompt"}, []),
        ({"messages": TURNS, "continue_final_message": True}, []),
        ({"messages": TURNS, "add_generation_prompt": True}, []),
        (
            {"messages": TURNS},
            [
                "warning: the last of input.messages is the assistant's, and the model begins a new turn after it; "
                "input.continue_final_message: true lets the model continue that message"
            ],
        ),
        (
            {"system_prompt": "Be {{ mood }}."},
            [
                "warning: input.system_prompt is plain text, in which {{ … }} stays as it is; "
                "write a message of the role system under input.messages for a template"
            ],
        ),
    ],
)
def test_what_may_not_be_meant(input: dict[str, Any], expected: list[str], tmp_path: pathlib.Path) -> None:
    assert warned(tmp_path, ["a", "b"], **input) == expected


def test_a_second_bos_is_seen_where_the_tokenizer_adds_one(tmp_path: pathlib.Path) -> None:
    tokenizer = load_tokenizer(str(jobs.MODEL), False)
    assert tokenizer(BOS + "fox")["input_ids"][:3] == [0, 0, *tokenizer("fox")["input_ids"][1:2]]
    texts = ["one", BOS + "two", f"a {BOS}", BOS]
    said = (
        f"warning: of the first 4 prompts 2 (row 1 first) begin with {BOS}, and the tokenizer puts another {BOS} "
        "before it; leave it out of the text"
    )
    assert warned(tmp_path, texts) == [NOT_APPLIED.format("prompt_column"), said]
    assert warned(tmp_path, texts, prompt_template=BOS + "{{ prompt }}")[1].startswith(
        "warning: of the first 4 prompts 4 (row 0 first)"
    )
    assert warned(tmp_path, texts, add_generation_prompt=True) == []


def test_no_second_bos_where_the_tokenizer_adds_none(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(jobs.MODEL, folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    content["post_processor"] = None
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "chat_template.jinja").unlink()
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": BOS + "fox"}))
    where = {"path": str(tmp_path / "rows.jsonl"), "id_column": None}
    job = open_job(read_spec(jobs.spec_of(tmp_path, model=str(folder), input=where, output={"keep_columns": []})))
    with contextlib.closing(job.source):
        assert list(job.task.prompt_warnings(job.model, job.source)) == []


def test_run_says_it_once_before_it_works(tmp_path: pathlib.Path) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"{BOS}{i}"}) + "\n" for i in range(40)))
    where = {"path": str(tmp_path / "rows.jsonl"), "id_column": None}
    quick = {"scripted": {"step_s": 0.0}, "parallel": {"data_parallel_size": 1}}
    done = jobs.finish(jobs.spec_of(tmp_path, input=where, output={"keep_columns": []}, **quick))
    said = done.stdout + done.stderr
    assert said.count("begin with <|begin_of_text|>") == said.count("the model has a chat template") == 1
    # Said, and not altered: the ids are those of `LLM.generate`.
    assert {row["num_prompt_tokens"] for row in jobs.rows_of(tmp_path / "out")} == {3, 4}


@pytest.mark.parametrize("add_bos_token", [None, True, False])
def test_a_bos_that_is_scored_too(add_bos_token: bool | None, tmp_path: pathlib.Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": "a"}) + "\n")
    where = {"path": str(tmp_path / "rows.jsonl"), "id_column": None, "text_column": "text"}
    score = {} if add_bos_token is None else {"add_bos_token": add_bos_token}
    spec = jobs.spec_of(tmp_path, task="score", sampling=None, input=where, output={"keep_columns": []}, score=score)
    job = open_job(read_spec(spec))
    with contextlib.closing(job.source):
        warnings = list(job.task.prompt_warnings(job.model, job.source))
    assert [line.partition(", which your texts need not")[0] for line in warnings] == (
        [f"warning: each request begins with two {BOS}"] if add_bos_token is None else []
    )


@pytest.mark.parametrize(
    "name", ["quickstart", "chat", "samples", "score", "logits", "multiple_choice", "embed", "ray"]
)
def test_sample_jobs_run_without_warnings(name: str, tmp_path: pathlib.Path) -> None:
    on_this_host = {"backend": "local", "ray": {}}
    report = batchinf.validate(
        jobs.ROOT / "jobs" / f"{name}.yaml",
        overrides={"output.path": str(tmp_path / "out"), "sampling.structured_outputs": None, **on_this_host},
        num_rows=0,
    )
    assert [remark.text for remark in report.remarks if remark.kind == "warning"] == []


@pytest.mark.parametrize(
    ("input", "of"),
    [
        ({"prompt_template": "Label {{ prompt }}: {{ note }}"}, {"note": (2, 0), "prompt": (1, 1)}),
        ({"messages": [{"role": "user", "content": "{{ prompt | trim }}"}]}, {"prompt": (1, 1)}),
        # Asked for: the template has thought of rows without a text.
        ({"prompt_template": "a {{ note or 'none' }} {{ note }}"}, {}),
        ({"prompt_template": "a {% if note | length > 1 %}{{ note }}{% endif %}"}, {}),
        ({"prompt_template": "a {{ note | default('', true) }} {{ 'b' if prompt else 'c' }}"}, {}),
        # Error rows, which `validate` counts already.
        ({"prompt_column": "prompt"}, {}),
        ({"prompt_template": "Label {{ nothing }}"}, {}),
    ],
)
def test_columns_without_text_in_a_template(
    input: dict[str, Any], of: dict[str, tuple[int, int]], tmp_path: pathlib.Path
) -> None:
    rows = [{"prompt": "a", "note": ""}, {"prompt": " ", "note": " \n"}, {"prompt": "c", "note": "d", "nothing": "e"}]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"nothing": None, **row}) for row in rows))
    where = {"path": str(tmp_path / "rows.jsonl"), "id_column": None, **input}
    spec = jobs.spec_of(tmp_path, input=where, output={"keep_columns": []})
    said = [
        f"warning: {number} of 3 sampled rows {'has' if number == 1 else 'have'} no text in '{name}' (row {first} "
        f"first), and {'it runs' if number == 1 else 'they run'} all the same; input.where: trim(\"{name}\") <> '' "
        "leaves such rows out"
        for name, (number, first) in of.items()
    ]
    job = open_job(read_spec(spec))
    with contextlib.closing(job.source):
        assert list(first_row_warnings(job.spec, job.source, job.rows)) == said
    report = batchinf.validate(spec)
    assert [remark.text for remark in report.remarks if "no text in" in remark.text] == said
    if of:
        advised = [line.partition("input.where: ")[2].partition(" leaves")[0] for line in said]
        report = batchinf.validate(spec, overrides={"input.where": " AND ".join(advised)})
        assert report.chosen is not None and report.chosen.num_rows < 3
        assert not [remark for remark in report.remarks if "no text in" in remark.text]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({}, "4 of 6 rows that were looked at share their 'id' with another one, such as rows 0 and 4 with 5; "),
        (
            {"where": "id > 5"},
            "2 of 2 rows that were looked at share their 'id' with another one, such as rows 2 and 5 with 7; ",
        ),
        ({"limit": 3}, None),
        ({"id_column": None}, None),
    ],
)
def test_an_id_that_repeats(more: dict[str, Any], said: str | None, tmp_path: pathlib.Path) -> None:
    lines = [json.dumps({"id": number, "prompt": "a"}) for number in (5, None, 7, None, 5, 7)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    where = {"path": str(tmp_path / "rows.jsonl"), "prompt_column": "prompt", **more}
    spec = jobs.spec_of(tmp_path, input=where, output={"keep_columns": []})
    beginning = "warning: input.id_column: "
    of_validate = [remark.text for remark in batchinf.validate(spec).remarks if "id_column" in remark.text]
    of_run = [line for line in jobs.run("run", spec).stderr.splitlines() if "id_column" in line]
    wanted = [f"{beginning}{said}a merge by id multiplies such rows, a merge by row_index does not"] if said else []
    assert (of_validate, of_run) == (wanted, wanted)


def test_the_look_at_large_rows_ends(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """6,000 rows of a megabyte took 11 s, before the first request."""
    lines = [json.dumps({"id": number % 40, "prompt": ""}) for number in range(200)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    where = {"path": str(tmp_path / "rows.jsonl"), "prompt_template": "{{ prompt }}"}
    job = open_job(read_spec(jobs.spec_of(tmp_path, input=where, output={"keep_columns": []})))
    with contextlib.closing(job.source):
        warnings = [*first_row_warnings(job.spec, job.source, job.rows)]
        assert [line.split()[1] for line in warnings] == ["200", "input.id_column:"]
        monkeypatch.setattr(checks, "_LOOK_S", 0.0)
        assert [line.split()[1] for line in first_row_warnings(job.spec, job.source, job.rows)] == ["32"]


def test_run_warns_of_columns_without_text(tmp_path: pathlib.Path) -> None:
    where = {"path": str(tmp_path / "rows.jsonl"), "id_column": None}
    quick = {"scripted": {"step_s": 0.0}, "parallel": {"data_parallel_size": 1}, "output": {"keep_columns": []}}
    (tmp_path / "rows.jsonl").write_text('{"note": ""}\n{"note": "c"}\n')
    done = jobs.finish(jobs.spec_of(tmp_path, input={**where, "prompt_template": "Say {{ note }}"}, **quick))
    assert "warning: 1 of 2 sampled rows has no text in 'note' (row 0 first)" in done.stderr
    assert len(jobs.rows_of(tmp_path / "out")) == 2


def test_run_warns_of_error_rows_and_wrong_answers_as_validate_does(tmp_path: pathlib.Path) -> None:
    rows = [("a", "x"), (None, "x"), ("c", "z"), (None, "y")]
    lines = [json.dumps({"q": question, "answer": answer}) for question, answer in rows]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    where = {
        "path": str(tmp_path / "rows.jsonl"),
        "prompt_template": "{{ q }}",
        "choices": ["x", "y"],
        "answer_column": "answer",
    }
    quick = {"scripted": {"step_s": 0.0}, "parallel": {"data_parallel_size": 1}, "output": {"keep_columns": []}}
    spec = jobs.spec_of(tmp_path, task="score", sampling=None, input={**where, "id_column": None}, **quick)
    shown = [line.strip() for line in jobs.run("validate", spec).stdout.splitlines()]
    said = [line.strip() for line in jobs.run("run", spec).stderr.splitlines()]
    parts = ("3 of 4 rows will be error", "2 null_prompt, first row 1: ", "75.0% errors are more", "are no choices")
    for part in parts:
        [line] = [line for line in shown if part in line]
        assert said.count(line) == 1, said


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["id;q"], "do ';' signs separate the columns of a CSV file? Then set input.csv.delimiter"),
        (["id\tq"], r"do '\t' signs separate the columns of a CSV file?"),
        (["id"], None),
    ],
)
def test_why_a_column_may_be_missing(names: list[str], said: str | None, tmp_path: pathlib.Path) -> None:
    input = {"path": str(tmp_path), "prompt_column": "q"}
    spec = JobSpec.model_validate({"model": {"name": "m"}, "input": input, "output": {"path": "o"}})
    with pytest.raises(SpecError) as refused:
        check_columns(spec, names, ())
    assert (said or "it has: id") in str(refused.value)
    inside = spec.model_copy(update={"input": spec.input.model_copy(update={"path": f"{tmp_path}/q=de"})})
    with pytest.raises(SpecError) as refused:
        check_columns(inside, names, ())
    assert ("q=… is a folder of the path itself" in str(refused.value)) == (said is None)


CALLS = [
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "w", "arguments": "{}"}}]},
    {"role": "tool", "content": "Rain"},
]
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


@pytest.mark.parametrize(
    ("more", "num"),
    [("", 2), ("{{ messages | tojson }}", 1), ("{% if mood %}{{ messages[1].tool_calls }}{% endif %}", 0)],
)
@pytest.mark.parametrize("is_batch_file", [False, True])
def test_what_a_chat_template_never_reads(more: str, num: int, is_batch_file: bool, tmp_path: pathlib.Path) -> None:
    """Calls of tools, and variables of a line's own."""
    row: dict[str, Any] = {"messages": CALLS}
    if is_batch_file:
        body = {**row, "max_tokens": 2, "chat_template_kwargs": {"mood": "calm"}}
        row = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    where = {"format": "openai"} if is_batch_file else {"messages_column": "messages"}
    where |= {"path": str(tmp_path / "rows.jsonl"), "id_column": None, "chat_template": PLAIN + more}
    job = open_job(read_spec(jobs.spec_of(tmp_path, input=where, output={"keep_columns": []}, sampling=None)))
    with contextlib.closing(job.source):
        warnings = list(job.task.prompt_warnings(job.model, job.source))
    assert len(warnings) == (num if is_batch_file else int(num == 2))
    assert all("some of the first 1 rows (row 0 first) have" in line for line in warnings)


def warned_of_messages(folder: pathlib.Path, rows: list[list[dict[str, str]] | None], **input: Any) -> list[str]:
    (folder / "rows.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    where = {"path": str(folder / "rows.jsonl"), "id_column": None, "messages_column": "messages", **input}
    job = open_job(read_spec(jobs.spec_of(folder, input=where, output={"keep_columns": []})), folder / "cache")
    with contextlib.closing(job.source):
        return list(job.task.prompt_warnings(job.model, job.source))


def test_conversations_that_end_with_the_assistant(tmp_path: pathlib.Path) -> None:
    asked = [{"role": "user", "content": "Hi"}]
    answered = [*asked, {"role": "assistant", "content": "Hello"}]
    [warning] = warned_of_messages(tmp_path, [None, asked, answered, answered])
    assert warning.startswith(
        "warning: 2 of the first 3 conversations (row 2 first) end with a message of the assistant"
    )
    assert "input.continue_final_message: true" in warning
    for field, value in (("continue_final_message", True), ("add_generation_prompt", True)):
        assert not warned_of_messages(tmp_path, [answered], **{field: value})
    assert not warned_of_messages(tmp_path, [asked, [*answered, *asked]])


@pytest.mark.parametrize(
    ("template", "is_warned"),
    [
        (None, True),
        (PLAIN, True),
        (PLAIN + "{# 'human', 'gpt' and 'User' #}", False),
        (PLAIN + "{% if messages[0].role != 'user' %}{{ raise_exception('no') }}{% endif %}", False),
    ],
)
def test_roles_that_a_chat_template_does_not_name(
    template: str | None, is_warned: bool, tmp_path: pathlib.Path
) -> None:
    usual = [{"role": role, "content": "Hi"} for role in ("system", "user", "assistant", "tool", "user")]
    unusual = [{"role": role, "content": "Hi"} for role in ("human", "gpt", "human", "User")]
    given = {} if template is None else {"chat_template": template}
    warnings = warned_of_messages(tmp_path, [usual, unusual], **given)
    assert len(warnings) == is_warned
    said = "warning: 1 of the first 2 conversations (row 1 first) has roles that the chat template does not name: "
    assert all(line.startswith(f"{said}human, gpt, User; ") for line in warnings)
    assert not warned_of_messages(tmp_path, [usual], **given)


@pytest.mark.parametrize(("on", "num"), [("prompt_hash", 1), ("id", 0)])
def test_lines_that_are_left_out_by_their_prompts_alone(on: str, num: int, tmp_path: pathlib.Path) -> None:
    line = {"custom_id": "a", "method": "POST", "url": "/v1/embeddings", "body": {"input": [[5, 6], [7]]}}
    (tmp_path / "rows.jsonl").write_text(json.dumps(line))
    where = {"path": str(tmp_path / "rows.jsonl"), "format": "openai", "exclude": {"job": str(tmp_path), "on": on}}
    sections = {"input": {**where, "id_column": None}, "output": {"keep_columns": []}, "sampling": None}
    job = open_job(read_spec(jobs.spec_of(tmp_path, task="embed", **sections)))
    with contextlib.closing(job.source):
        found = [line for line in job.task.prompt_warnings(job.model, job.source) if "prompt_hash" in line]
    assert len(found) == num
