"""Values of a spec from files: put in their places as if they had been written there, or one clear line."""

import json
import pathlib
from typing import Any

import jsonschema
import numpy
import pandas
import pytest
import torch
import yaml

from batchinf.base.errors import SpecError
from batchinf.spec.file import MAX_VALUE_BYTES, dump_spec, read_spec
from batchinf.spec.job import fields, fingerprint
from batchinf.spec.reference import field_docs, json_schema

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}}
TURNS = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "{{ q }}\n"}]


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def read(input: dict[str, Any], sampling: dict[str, Any] | None = None, *overrides: str) -> Any:
    spec = {"model": "a/b", "input": {"path": "x", **input}, "output": {"path": "y"}, "sampling": sampling or {}}
    pathlib.Path("job.yaml").write_text(yaml.safe_dump(spec, sort_keys=False))
    return read_spec("job.yaml", overrides).spec


def refusal(input: dict[str, Any], sampling: dict[str, Any] | None = None) -> str:
    with pytest.raises(SpecError) as caught:
        read(input, sampling)
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_rows_in_memory_are_refused_with_what_to_do() -> None:
    frame = pandas.DataFrame({"body": ["a", "b"]})
    with pytest.raises(SpecError, match=r"spec: input.path: got a DataFrame; must be plain values. Rows come from a f"):
        read_spec({"model": "a/b", "input": {"path": frame}, "output": {"path": "y"}})


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("sampling.max_tokens", numpy.int64(5), 5),
        ("sampling.max_tokens", numpy.uint8(5), 5),
        ("sampling.max_tokens", numpy.array(5), 5),
        ("sampling.max_tokens", torch.tensor(5), 5),
        ("sampling.temperature", numpy.float64(0.5), 0.5),
        ("sampling.temperature", numpy.float32(0.5), 0.5),
        ("sampling.ignore_eos", numpy.bool_(True), True),
        ("sampling.stop_token_ids", [numpy.int32(5), numpy.int64(6)], (5, 6)),
        ("sampling.stop", numpy.str_("x"), ("x",)),
    ],
)
def test_a_number_of_a_library_of_arrays_is_a_plain_number(field: str, value: Any, expected: Any) -> None:
    section, name = field.split(".")
    spec = {"model": "a/b", "input": {"path": "x"}, "output": {"path": "y"}}
    for file in (read_spec({**spec, section: {name: value}}), read_spec(spec, {field: value})):
        found = getattr(getattr(file.spec, section), name)
        assert (found, type(found)) == (expected, type(expected))
        assert read_spec(file.spec, {"model": "c/d"}).spec.sampling == file.spec.sampling
    assert read_spec({**spec, "engine": {"max_num_seqs": numpy.int64(5)}}).spec.engine == {"max_num_seqs": 5}
    with pytest.raises(SpecError, match=r"spec: sampling\.max_tokens: got \"<NA>\"; must be a whole number"):
        read_spec({**spec, "sampling": {"max_tokens": pandas.NA}})
    with pytest.raises(SpecError, match=r"spec: sampling\.max_tokens: got 0; must be a whole number"):
        read_spec({**spec, "sampling": {"max_tokens": numpy.int64(0)}})


def put(name: str, content: str | bytes) -> dict[str, str]:
    pathlib.Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return {"file": name}


@pytest.mark.parametrize(
    ("input", "content", "inline"),
    [
        ("prompt_template", "Q: {{ q }} $HOME ~\nA:\n", "Q: {{ q }} $HOME ~\nA:"),
        ("prompt_template", "Q: {{ q }}\n\n", "Q: {{ q }}\n"),
        ("prompt_template", b"\xef\xbb\xbfQ: {{ q }}\r\nA:", "Q: {{ q }}\nA:"),
        ("system_prompt", "Be brief.\n", "Be brief."),
        ("chat_template", "{{ messages }}\n", "{{ messages }}"),
        ("messages", json.dumps(TURNS), TURNS),
        ("messages", yaml.safe_dump(TURNS), TURNS),
    ],
)
def test_a_file_is_as_good_as_what_it_says(input: str, content: str | bytes, inline: Any) -> None:
    spec, expected = read({input: put("value", content)}), read({input: inline})
    assert spec == expected
    assert fingerprint(fields(spec, "identity")) == fingerprint(fields(expected, "identity"))
    pathlib.Path("value").unlink()
    pathlib.Path("again.yaml").write_text(dump_spec(spec))
    assert read_spec("again.yaml").spec == spec
    other = read({input: TURNS[1:] if input == "messages" else put("value", "{{ other }} of messages")})
    assert fingerprint(fields(other, "identity")) != fingerprint(fields(spec, "identity"))


def test_a_file_may_hold_a_message_and_messages_may_name_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHERE", "texts")
    pathlib.Path("texts").mkdir()
    put("texts/system", "Be brief.\n")
    turns = [{"role": "system", "content": {"file": "$WHERE/system"}}, TURNS[1]]
    assert [message.content for message in read({"messages": turns}).input.messages] == ["Be brief.", "{{ q }}\n"]
    assert read({"messages": put("turns.yaml", yaml.safe_dump(turns))}) == read({"messages": TURNS})
    assert read({}, None, "input.prompt_template={file: texts/system}").input.prompt_template == "Be brief."
    assert read({}, None, "input.prompt_template.file=texts/system").input.prompt_template == "Be brief."


@pytest.mark.parametrize(
    ("kind", "content", "inline"),
    [
        ("json", json.dumps(SCHEMA, indent=2), SCHEMA),
        ("json", yaml.safe_dump(SCHEMA, sort_keys=False), SCHEMA),
        ("regex", "[0-9]+\n", "[0-9]+"),
        ("grammar", 'root ::= "a"\n', 'root ::= "a"'),
        ("choice", "- yes it is\n- 'no'\n", ["yes it is", "no"]),
    ],
)
def test_structures_from_files(kind: str, content: str, inline: Any) -> None:
    spec = read({}, {"structured_outputs": {kind: put("value", content)}})
    assert spec.sampling.structured_outputs[kind] in (inline, json.dumps(inline))
    assert spec == read({}, {"structured_outputs": {kind: inline}})


def test_what_is_wrong_with_a_file() -> None:
    where = "job.yaml:4:3: input.prompt_template: "
    assert (
        refusal({"prompt_template": {"file": "none"}}) == where + "cannot read the file none: no such file or directory"
    )
    assert refusal({"prompt_template": {"file": "."}}) == where + "cannot read the file .: is a directory"
    assert refusal({"prompt_template": put("latin", "a\nb\u00e9".encode("latin-1"))}) == (
        where + "the file latin is not UTF-8, at line 2; save it as UTF-8"
    )
    assert refusal({"prompt_template": put("long", "a" * (MAX_VALUE_BYTES + 1))}) == (
        where + f"the file long is too large; all that a spec takes in may be {MAX_VALUE_BYTES:,} bytes"
    )
    assert refusal({"prompt_template": {"file": "$UNSET_HERE/x"}}) == (
        where + "$UNSET_HERE is unset or empty in the environment; set it, or write $$ for a plain $"
    )
    for value in ({"file": 5}, {"fil": "x"}, {"file": "x", "more": 1}):
        assert refusal({"prompt_template": value}) == where + "got a mapping; must be {file: path}, or text"
    assert refusal({"prompt_template": put("empty", "\n")}) == (
        where + "got empty text; must be {file: path}, or text that is not empty"
    )
    where = "job.yaml:4:3: input.messages"
    assert refusal({"messages": put("empty", "")}) == f"{where}: the file empty has nothing in it"
    assert refusal({"messages": put("m", "hello")}).startswith(
        f"{where}: got 'hello'; must be {{file: path}}, or a list"
    )
    assert refusal({"messages": put("m", "- {role: user, contents: a}")}).splitlines()[1] == (
        f"{where}[0].contents: unknown field; did you mean content? Allowed: role, content"
    )
    assert refusal({"messages": put("m", "- [a\n")}).startswith("m:2:1: not valid YAML: ")
    two = [{"role": "user", "content": {"file": "none"}}, {"role": "user", "content": {"file": "nor"}}]
    assert refusal({"messages": two}).splitlines() == [
        "job.yaml:6:5: input.messages[0].content: cannot read the file none: no such file or directory",
        "job.yaml:9:5: input.messages[1].content: cannot read the file nor: no such file or directory",
    ]


def test_files_together_are_bounded_so_that_job_yaml_can_be_read() -> None:
    half = "a" * (MAX_VALUE_BYTES // 2 - 100)
    spec = read({"prompt_template": put("one", half), "system_prompt": put("two", half)})
    pathlib.Path("again.yaml").write_text(dump_spec(spec))
    assert read_spec("again.yaml").spec == spec
    with pytest.raises(SpecError, match=r"input.system_prompt: the file two is too large"):
        read({"prompt_template": put("one", half + "a" * 500), "system_prompt": put("two", half)})


def test_the_schema_and_the_reference_say_so() -> None:
    validator = jsonschema.Draft202012Validator(json_schema())
    base = {"model": "a/b", "output": {"path": "y"}}
    for name in ("prompt_template", "system_prompt", "chat_template", "messages"):
        assert field_docs()[f"input.{name}"].allowed.startswith("{file: path}, or ")
        assert validator.is_valid({**base, "input": {"path": "x", name: {"file": "y"}}})
        assert not validator.is_valid({**base, "input": {"path": "x", name: {"file": 5}}})
        assert not validator.is_valid({**base, "input": {"path": "x", name: {"fil": "y"}}})
    turns = [{"role": "user", "content": {"file": "y"}}]
    assert validator.is_valid({**base, "input": {"path": "x", "messages": turns}})
    assert not validator.is_valid({**base, "input": {"path": "x", "messages": [{"role": "user", "content": {}}]}})
