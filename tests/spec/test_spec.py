"""The spec and its file: what is read, what is refused and in which words, what comes out again."""

import contextlib
import json
import math
import os
import pathlib
import re
import subprocess
import sys
import time

import jsonschema
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

import batchinf.tasks.registry  # noqa: F401  # it adds the tasks to the spec, if this file runs as a program
from batchinf.base.errors import SpecError, UserError
from batchinf.engines.installed import check_engine_types, engine_argument_names
from batchinf.source.files import CsvDialect
from batchinf.spec.explain import OTHER_NAMES, field_names
from batchinf.spec.file import SpecFile, check_engine_arguments, dump_spec, read_spec
from batchinf.spec.job import (
    ENGINE_ARGUMENTS_ELSEWHERE,
    RUNTIME_ENGINE_ARGUMENTS,
    JobSpec,
    fields,
    fingerprint,
)
from batchinf.spec.reference import field_docs, json_schema
from batchinf.spec.yaml_text import MAX_SPEC_BYTES

ROOT = pathlib.Path(__file__).parents[2]
PAGE = ROOT / "docs" / "spec.md"
JOBS = sorted((ROOT / "jobs").glob("*.yaml"))
LEAST = "model: a/b\ninput: {path: x.jsonl}\noutput: {path: out}\n"
TOP = ", ".join(name for name in field_docs() if "." not in name)
PARALLEL = "tensor_parallel_size, pipeline_parallel_size, replicas_per_device, devices, data_parallel_size"


@pytest.fixture(autouse=True)
def _in_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def read(text, *overrides) -> SpecFile:
    pathlib.Path("job.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_spec("job.yaml", overrides)


def refusal(text, *overrides) -> str:
    with pytest.raises(SpecError) as caught:
        read(text, *overrides)
    assert caught.value.exit_code == 2
    return str(caught.value)


def data(**sections):
    return {"model": "a/b", "input": {"path": "x"}, "output": {"path": "y"}, **sections}


# -- reading ---------------------------------------------------------------------------------------------------------


def test_quickstart():
    spec = read_spec(ROOT / "jobs" / "quickstart.yaml").spec
    assert spec.model_dump(exclude_unset=True) == {
        "model": {"name": "sample_data/tiny-llama"},
        "task": "generate",
        "input": {
            "path": "sample_data/prompts.jsonl",
            "prompt_column": "prompt",
            "apply_chat_template": False,
            "id_column": "id",
        },
        "sampling": {"temperature": 0.0, "max_tokens": 64, "logprobs": 5},
        "parallel": {"tensor_parallel_size": 1, "data_parallel_size": 2},
        "engine": {"max_model_len": 512},
        "output": {"path": "out/quickstart", "rows_per_shard": "auto"},
        "checkpoint_interval_s": 10.0,
    }


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.name)
def test_examples_are_right(path):
    file = read_spec(path)
    check_engine_arguments(file, engine_argument_names())
    assert file.spec.output.path == f"out/{path.stem}"


def test_only_model_input_and_output_must_be_there():
    assert read(LEAST).spec == JobSpec.model_validate(data(input={"path": "x.jsonl"}, output={"path": "out"}))
    assert read(b"\xef\xbb\xbf" + LEAST.encode()).spec == read(LEAST).spec  # a byte order mark
    docs = [field_docs()[name] for name in ("model", "input", "output")]
    assert refusal("task: generate").splitlines() == [
        f"job.yaml: {doc.name}: missing; must be {doc.allowed}. {doc.meaning}" for doc in docs
    ]


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("1e-3", 0.001), ("1E3", 1000.0), ("-.5", -0.5), ("5.", 5.0), ("7", 7), ("-7", -7), ("+7", 7), ("0", 0),
        ("0x1F", 31), ("0o17", 15), ("true", True), ("False", False), ("~", None), ("null", None), ("", None),
        ("no", "no"), ("off", "off"), ("yes", "yes"), ("y", "y"), ("012", "012"), ("12:30", "12:30"),
        ("1_000", "1_000"), ("0b11", "0b11"), ("2024-01-01", "2024-01-01"), ("=", "="), ("<<", "<<"), ("'5'", "5"),
        ("!!str 5", "5"), ("!!float 5", 5.0), ("1e3x", "1e3x"), ("[1, a]", [1, "a"]), ("9" * 101, "9" * 101),
        (r'"\ud83d\ude00"', "😀"), (r'{"\ud83d\ude00": 1}', {"😀": 1}),
    ],
)  # fmt: skip
def test_scalars_are_read_as_in_yaml_1_2(written, value):
    found = read(LEAST + f"engine:\n  x: {written}\n").spec.engine["x"]
    assert (found, type(found)) == (value, type(value))


def test_anchors_and_merge_keys():
    spec = read("input: &i {path: a}\noutput: {<<: *i, include_prompt: true}\nmodel: {<<: [{name: m}, {name: n}]}").spec
    assert (spec.output.path, spec.output.include_prompt, spec.model.name) == ("a", True, "m")
    assert read("input: &i {path: a}\noutput: {path: b, <<: *i}\nmodel: m").spec.output.path == "b"


def test_places_are_kept():
    file = read(LEAST + "engine:\n  x:\n    - 1\n", "sampling.n=2")
    assert str(file.error("engine.x[0]", "no")) == "job.yaml:6:7: engine.x[0]: no"
    assert str(file.error("engine.x[3].y", "no")) == "job.yaml:5:3: engine.x[3].y: no"
    assert str(file.error("model.name", "no")) == "job.yaml:1:1: model.name: no"
    assert str(file.error("sampling.n", "no")) == "--set sampling.n=2: sampling.n: no"
    assert str(file.error("task", "no")) == "job.yaml: task: no"


# -- what is refused, and in which words -----------------------------------------------------------------------------

WHOLE = "a whole number, at least 0 and at most 2147483647"
POSITIVE = "a whole number, at least 1 and at most 2147483647"
SAMPLES = "a whole number, at least 1 and at most 16384"
LOGITS = "tokens, token_ids, token_ids_column, num_token_ids, values, positions, dtype, vocab_size"
QUOTES = "text that looks like something else needs quotes"


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("sampling.n", "0", f"got 0; must be {SAMPLES}"),
        ("sampling.n", "true", f"got true; must be {SAMPLES}"),
        ("sampling.n", "'5'", f"got '5'; must be {SAMPLES}; write it without quotes"),
        ("sampling.n", "5.0", f"got 5.0; must be {SAMPLES}; write it as 5"),
        ("sampling.n", "5.5", f"got 5.5; must be {SAMPLES}"),
        ("sampling.n", "99999999999", f"got 99999999999; must be {SAMPLES}"),
        ("sampling.n", "4, temperature: 0", "got 4 with temperature 0; greedy samples are all equal: set n to 1, or a "
         "temperature above 0"),
        ("sampling.min_tokens", "", f"got nothing (null); must be {WHOLE}; leave it out for its default"),
        ("sampling.logprobs", "none", "got 'none'; must be a whole number, at least 0 and at most 1000; for no value "
         "write null"),
        ("input.limit", "None", "got 'None'; must be a whole number, at least 1 and at most 2147483647; for no value "
         "write null"),
        ("sampling.min_tokens", "none", f"got 'none'; must be {WHOLE}"),
        ("engine.max_model_len", "none", "got 'none'; must be a whole number, or auto; for no value write null"),
        ("sampling.min_tokens", "5, max_tokens: 4", "got 5 with max_tokens 4; must not be above it"),
        ("sampling.top_p", "0", "got 0; must be a number, above 0 and at most 1"),
        ("sampling.top_p", "1.5", "got 1.5; must be a number, above 0 and at most 1"),
        ("sampling.min_p", ".nan", "got NaN; must be a number, at least 0 and at most 1"),
        ("sampling.ignore_eos", "no", "got 'no'; must be true or false"),
        ("sampling.ignore_eos", "1", "got 1; must be true or false"),
        ("sampling.logit_bias", "{a: 1}", "got 'a' as a key; must be token ids, each of them once; the "
         "model's tokenizer gives those of a word"),
        ("sampling.logit_bias", "{'5': x}", "got 'x' for token 5; must be a number, at least -100 and at most 100"),
        ("sampling.allowed_token_ids", "[]", "got no token; must be at least one, and without the field all are "
         "allowed"),
        ("sampling.thinking_token_budget", "5", "must be left out, or stand beside "
         "model.reasoning_parser or engine.reasoning_config, which say where the reasoning ends"),
        ("sampling.stop", "5", f"got 5; must be a list of texts, or text; {QUOTES}"),
        ("sampling.stop", "''", "got empty text; must be a list of texts, or text; leave empty texts out"),
        ("sampling.stop_token_ids", "5", f"got 5; must be a list of {WHOLE[2:].replace('number', 'numbers')}"),
        ("stall_timeout_s", ".inf", "got Infinity; must be a number, at least 2 and at most 1000000000"),
        ("stall_timeout_s", "0.001", "got 0.001; must be a number, at least 2 and at most 1000000000"),
        ("sampling.n", "2147483647", f"got 2147483647; must be {SAMPLES}"),
        ("sampling.min_p", "'1'", "got '1'; must be a number, at least 0 and at most 1; write it without quotes"),
        ("drain_timeout_s", "false", "got false; must be a number, at least 0 and at most 1000000000"),
        ("parallel.data_parallel_size", "0", f"got 0; must be {POSITIVE}, or auto"),
        ("parallel.devices", "[]", f"got an empty list; must be {field_docs()['parallel.devices'].allowed} that is not "
         "empty"),
        ("parallel.devices", "[1, GPU-a, '1']", "got 1 twice; name each device once"),
        ("parallel.data_parallel_size", "all", f"got 'all'; must be {POSITIVE}, or auto"),
        ("task", "chat", "got 'chat'; must be one of generate, score, logits, embed, classify, reward, hidden_states, "
         "rerank"),
        ("scripted", "5", f"got 5; must be {field_docs()['scripted'].allowed}"),
        ("engine", "[a]", "got a list; must be a mapping"),
        ("engine.a", "[.inf]", "must be made of text, finite numbers, true or false, null, lists and mappings"),
        ("engine.gpu_memory_utilization", "90", "got 90; must be a number above 0 and at most 1"),
        ("model", "5", "got 5; must be text, or a mapping of fields (name, revision, tokenizer, dtype, quantization, "
         "load_format, trust_remote_code, reasoning_parser, tool_parser, lora)"),
        ("model.revision", "12", f"got 12; must be text; {QUOTES}"),
        ("model.dtype", "int4", "got 'int4'; must be one of auto, bfloat16, float16, float32"),
        ("model.tokenizer", '"\\0"', "got '\\x00'; a path cannot hold a null character"),
        ("model.tokenizer", "~nobody-here/x", "got '~nobody-here/x', but there is no such user's home; for a name that "
         "begins with ~ write ./~"),
        ("input.prompt_template", "b, prompt_column: a", "got prompt_template beside prompt_column; give one of them"),
        ("input.messages", "[]", "got an empty list; must be {file: path}, or a list of mappings that is not empty"),
        ("input.tools", "[]", "got an empty list; must be {file: path}, or a list of mappings that is not empty"),
        ("input.tools", "[{type: web}]", "got a tool of type web; must be {type: function, function: {name, "
         "description, parameters}}"),
        ("input.tool_choice", "required", "got 'required' without tools; must be given beside tools or tools_column"),
        ("input.tool_choice", "g, tools: [{function: {name: f}}]", "got 'g'; must be none, auto, required or the name "
         "of a tool: f"),
        ("input.tool_choice", "f, tools: [{function: {name: f}}]", "got 'f', but nothing says how the model writes its "
         "calls: name the parser in model.tool_parser, such as hermes, or auto"),
        ("input.tools", "[{function: {name: f}}], format: openai", "got it with format openai, whose lines have their "
         "own; leave it out"),
        ("input.split", "a, format: csv", "got 'a' with format csv; only a Hugging Face dataset (format hf) has a "
         "split: leave it out"),
        ("output.keep_columns", "a", "got 'a'; must be a list of texts, or a mapping; for a list of one write [a]"),
        ("output.keep_columns", "[a, b, a]", "got 'a' twice; name each column once"),
        ("input.csv", "{}, format: jsonl", "got it with format jsonl; only csv has a delimiter and the like: leave it "
         "out"),
        ("parallel.zzz", "1", f"unknown field. Allowed: {PARALLEL}"),
        ("parallel.Tensor-parallel-sise", "1",
         f"unknown field; did you mean tensor_parallel_size? Allowed: {PARALLEL}"),
        ("parallel.max_restarts", "1",
         f"unknown field; did you mean max_restarts, at the top level? Allowed: {PARALLEL}"),
        ("parallel.max_token", "1", f"unknown field; did you mean sampling.max_tokens? Allowed: {PARALLEL}"),
        # Top logits are no cut of the sampling.
        ("logits.top_k", "5", f"unknown field. Allowed: {LOGITS}"),
        ("logits.position", "last", f"unknown field; did you mean positions? Allowed: {LOGITS}"),
        ("logits.num_token_ids", "5", "must be left out, as it has no meaning without token_ids_column"),
        ("path", "1", f"unknown field; did you mean input.path or output.path? Allowed: {TOP}"),
        ("max_model_len", "1", f"unknown field; did you mean engine.max_model_len? Allowed: {TOP}"),
        ("Sampling", "{}", f"unknown field; did you mean sampling? Allowed: {TOP}"),
    ],
)  # fmt: skip
def test_refused_fields(field, value, message):
    section, _, name = field.rpartition(".")
    required = {"model": "name: a/b", "input": "path: x", "output": "path: y"}
    lines = {each: f"{each}: {{{fields}}}" for each, fields in required.items()}
    start = f"{section}: {{" + (f"{required[section]}, " if section in required else "") if section else ""
    lines[section or name] = f"{start}{name}: {value}" + ("}" if section else "")
    place = f"job.yaml:{list(lines).index(section or name) + 1}:{len(start) + 1}"
    assert refusal("\n".join(lines.values())) == f"{place}: {field}: {message}"


@pytest.mark.parametrize("texts", ["['']", "[a, '']"])
def test_an_empty_text_among_others_is_refused_with_what_to_do(texts):
    place = texts.index("''")
    item = texts.count(",")
    assert refusal(f"{LEAST}sampling:\n  stop: {texts}\n") == (
        f"job.yaml:5:{9 + place}: sampling.stop[{item}]: got empty text; must be a list of texts, or text; "
        "leave empty texts out"
    )


@pytest.mark.parametrize(("name", "meant"), [("name", "repository"), ("path", "repository"), ("private", "public")])
def test_a_hint_in_a_nested_section_is_of_that_section(name, meant):
    told = refusal(
        f"model: a/b\ninput: {{path: x}}\noutput: {{path: y, push_to_hub: {{repository: a/b, {name}: c}}}}\n"
    )
    assert f"output.push_to_hub.{name}: unknown field; did you mean {meant}? Allowed: repository, " in told


def test_places_of_nested_fields_and_items():
    lines = refusal(
        "model:\n  name: a/b\n  revison: 1\noutput: {path: y}\n"
        "sampling:\n  stop: [a, 5]\n  stop_token_ids:\n    - 1\n    - -1\nsampling.n: 1\n"
    ).splitlines()
    assert [line.partition(";")[0] for line in lines] == [
        "job.yaml:3:3: model.revison: unknown field",
        "job.yaml: input: missing",
        "job.yaml:6:13: sampling.stop[1]: got 5",
        "job.yaml:9:7: sampling.stop_token_ids[1]: got -1",
        "job.yaml:10:1: sampling.n: unknown field",
    ]
    assert lines[-1].endswith(f"; did you mean n, within sampling? Allowed: {TOP}")
    meaning = field_docs()["model.name"].meaning
    assert refusal(LEAST.replace("a/b", "{}")) == f"job.yaml:1:1: model.name: missing; must be text. {meaning}"
    assert refusal(LEAST + '"a\\nb": 1').startswith("job.yaml:4:1: a\\nb: unknown field")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", f" got nothing (null); must be a mapping of fields ({TOP})"),
        ("# only this", f" got nothing (null); must be a mapping of fields ({TOP})"),
        ("- a", f" got a list; must be a mapping of fields ({TOP})"),
        ("a: [1", "1:6: not valid YAML: while parsing a flow sequence, expected ',' or ']', but got '<stream end>'; "
         "does a text need quotes?"),
        ("a: 1\nb: 'c\nd: 2\n", "2:4: not valid YAML: the quote that begins here is not closed"),
        ('a: [1, "b]\n', "1:8: not valid YAML: the quote that begins here is not closed"),
        ("a: b: c", "1:5: not valid YAML: mapping values are not allowed here; does a text need quotes?"),
        ("a:\n\tb: 1", "2:1: not valid YAML: while scanning for the next token, found character '\\t' that cannot "
         "start any token; indent with spaces"),
        ("a: {{ b }}", "1:5: got a mapping for a field's name; must be text: does it need quotes?"),
        ("5: b", "1:1: got 5 for a field's name; must be text: write \"5\""),
        ("task: a\ntask: a", "2:1: task: given twice; leave one of them out"),
        (b"a: b\nc: \xff", "2:4: not UTF-8; save the file as UTF-8"),
        ("a: b\nc: \a", "2:4: not valid YAML: character U+0007"),
        ("--- a\n--- b", "2:1: not valid YAML: expected a single document in the stream, but found another document"),
        ("a: *b", "1:4: not valid YAML: found undefined alias 'b'"),
        ("a: !!python/object/apply:os.getpid []", "1:4: tag !!python/object/apply:os.getpid is not allowed here; "
         "leave it out"),
        ("a: !!int x", "1:4: tag !!int is not allowed here; leave it out"),
        ("a: !!timestamp 2024-01-01", "1:4: tag !!timestamp is not allowed here; leave it out"),
        ('a: "\\ud800"', "1:4: got '\\ud800', which holds half a character (a surrogate)"),
        ('a: "\\UFFFFFFFF"', "1:7: not valid YAML: impossible number"),
        ("<<: {a: 1}\n<<: {b: 2}", "2:1: <<: given twice; write one with a list, such as <<: [*a, *b]"),
        ("a: {<<: 5}", "1:9: << takes a mapping, or a list of mappings"),
        ("[" * 99, "1:100: not valid YAML: too long or too deeply nested"),
        ("[" + "1," * 10_000, "1:20002: not valid YAML: too long or too deeply nested"),
        ("a: &a [*a]", "1:4: too long or too deeply nested with its aliases written out"),
        ("a: &a {<<: *a}", "1:4: too long or too deeply nested with its aliases written out"),
    ],
)  # fmt: skip
def test_refused_files(text, message):
    assert refusal(text) == f"job.yaml:{message}"


@pytest.mark.parametrize("text", ["x" * 500_000 + ": b: c", "a: 1\n" + "a." * 250_000 + ": 'b' c"])
def test_a_long_word_before_an_error_costs_no_time(text):
    began = time.process_time()
    assert "not valid YAML" in refusal(text)
    assert time.process_time() - began < 15  # 9 s for 16,000 characters, when each of them began a search


@pytest.mark.parametrize("secret", ["SECRET", "SEC/RET", "S/ECRET?x#y", "a@SECRET"])
@pytest.mark.parametrize(
    "field", ["input.images.hosts", "input.images.folders", "input.path", "input.exclude.job", "model", "output.path"]
)
def test_no_refusal_repeats_a_secret_of_a_url(field, secret):
    urls = [f"https://me:{secret}@h/a.png", f"s3://KEY:{secret}@bucket/x", f"me:{secret}@h", "https://h/a?sig=SECRET"]
    said = ""
    for url in urls:
        for value in (f"'{url}'", f"['{url}']"):
            with contextlib.suppress(SpecError):
                read(LEAST, f"{field}={value}")
                continue
            said += refusal(LEAST, f"{field}={value}")
    assert said.count(field) >= 4
    assert "SEC" not in said and "RET" not in said


def test_no_error_is_longer_than_a_screen():
    for text in (
        LEAST + "task: " + "x" * 100_000,
        LEAST + "engine: {" + "y" * 100_000 + ": .inf}",
        LEAST + "sampling: {stop: [" + "1, " * 3_000 + "]}",
        LEAST.replace("path: x", "path: x, exclude: {job: 's3://" + "z" * 100_000 + "', on: id}"),
    ):
        assert len(refusal(text)) < 5_000
        assert refusal(text).count("\n") <= 40
    long = str(UserError("got '" + "x" * 10_000 + "'; must be short"))
    assert long.startswith("got 'xxx") and long.endswith("xxx'; must be short") and len(long) < 5_000
    assert str(UserError("\n".join(["first", *["x"] * 500, "what to do"]))).split("\n")[-1] == "what to do"


def test_the_section_of_a_ray_cluster():
    spec = read(LEAST + "backend: ray\nray: {address: 'h:6379', resources: {CPU: 8, slot: 0.5}, env_vars: {A: b}}").spec
    assert (spec.backend, spec.ray.resources) == ("ray", {"CPU": 8.0, "slot": 0.5})
    # A job may go on elsewhere.
    assert {name for name in fields(spec, "runtime") if name.split(".")[0] in ("backend", "ray")} == {
        "backend", "ray.address", "ray.resources", "ray.env_vars", "ray.placement_timeout_s",
    }  # fmt: skip
    assert "'ray://h:10001', the address of a Ray Client" in refusal(LEAST + "ray: {address: 'ray://h:10001'}")
    assert "parallel.devices: got a list with backend: ray" in refusal(LEAST + "backend: ray\nparallel: {devices: [0]}")
    assert "ray.resources.GPU: must not name GPU" in refusal(LEAST + "ray: {resources: {GPU: 1}}")
    assert "ray.env_vars.HF_TOKEN: is named like a secret" in refusal(LEAST + "ray: {env_vars: {HF_TOKEN: x}}")


def test_files_that_cannot_be_read(tmp_path):
    (tmp_path / "long.yaml").write_bytes(b"#" * (MAX_SPEC_BYTES + 1))
    (tmp_path / "folder").mkdir()
    reasons = {"none.yaml": "no such file or directory", "folder": "is a directory"}
    for name, why in {**reasons, "long.yaml": f"longer than {MAX_SPEC_BYTES} bytes"}.items():
        with pytest.raises(SpecError) as caught:
            read_spec(name)
        near = "; did you mean long.yaml?" if name == "none.yaml" else ""
        assert str(caught.value) == f"{name}: {why}; must be a job spec, as `batchinf init` writes it{near}"


@pytest.mark.parametrize("item", ["[{}]", "{{<<: [{}]}}"], ids=["lists", "merge keys"])
def test_aliases_may_not_multiply(item):
    lines = ["a0: &a0 {x: 1, y: 2}"]
    lines += [f"a{i}: &a{i} {item.format(', '.join([f'*a{i - 1}'] * 10))}" for i in range(1, 20)]
    assert refusal("\n".join(lines)).endswith("too long or too deeply nested with its aliases written out")


def test_all_errors_are_shown_one_a_line():
    lines = refusal(LEAST + "".join(f"unknown_{i}: 1\n" for i in range(13))).splitlines()
    assert [line.split(":")[1] for line in lines] == [str(4 + i) for i in range(13)]
    assert ["Allowed: " in line for line in lines] == [True] + [False] * 12  # once for a section


def test_names_that_people_try_lead_to_fields_that_there_are():
    for section, names in OTHER_NAMES.items():
        fields = field_names(section)
        for name, meant in names.items():
            own = f"{section}.{meant}".lstrip(".")
            assert name not in fields
            in_structures = meant.removeprefix("sampling.").startswith("structured_outputs.")
            assert meant in field_docs() or own in field_docs() or in_structures


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("  where: \"id\" = 'x'  # y", ": \"id\" = 'x'  # y"),
        ("  where: 'id' > 5", ": 'id' > 5"),
        ("  where: \"a b\" > 'x'", ": \"a b\" > 'x'"),
    ],
)
def test_a_quoted_name_of_sql(line, told):
    start = "the value of where ends with its second quote, but the line goes on; write"
    said = refusal(f"model: a/b\ninput:\n  path: x\n{line}\noutput: {{path: y}}\n")
    assert said.endswith(f"{start} `where: >-` and the value on the next line, indented{told}")
    assert said.startswith("job.yaml:4:")
    flow = refusal(f"model: a/b\ninput: {{path: x, {line.strip()}}}\noutput: {{path: y}}\n")
    assert f"{start} in a section without braces, `where: >-` and the value on the next line, indented" in flow
    written = line.replace("where: ", "where: >-\n    ").removesuffix("  # y")
    assert read(f"model: a/b\ninput:\n  path: x\n{written}\noutput: {{path: y}}\n").spec.input.where in line


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("delimiter", "ab", "got 'ab'; must be one character, and no line break"),
        ("delimiter", "\\t", 'a tab is "\\t" in double quotes'),
        ("delimiter", '"\\n"', "must be one character, and no line break"),
        ("delimiter", "''", "got empty text; must be text that is not empty"),
        ("quotechar", "ab", "got 'ab'; must be one character, and no line break"),
        ("quotechar", "'#', delimiter: '#'", "got '#', which is the delimiter, too; must be another character"),
        ("escapechar", "ab", "got 'ab'; must be one character, and no line break"),
        ("escapechar", "'\"'", "which is the delimiter or the quotechar, too; must be another character"),
        ("escapechar", "'\\', quotechar: ''", "got it beside an empty quotechar, so that there is no quote to escape"),
        ("encoding", "utf-9", "got 'utf-9'; must be an encoding of text that Python has, such as utf-8, cp1252"),
        ("encoding", "base64", "got 'base64'; must be an encoding of text that Python has"),
        ("null_values", "5", "got 5; must be a list of texts, or text"),
    ],
)
def test_a_wrong_dialect_of_csv(field, value, message):
    said = refusal(f"model: a/b\ninput: {{path: x.csv, csv: {{{field}: {value}}}}}\noutput: {{path: y}}\n")
    assert f": input.csv.{field}: " in said and message in said


def test_dialects_of_csv():
    found = read(LEAST.replace("x.jsonl", 'x.csv, csv: {delimiter: "\\t", quotechar: "", null_values: ["", NA]}')).spec
    assert found.input.csv.dialect == CsvDialect("\t", "", None, ("", "NA"))
    assert read(LEAST.replace("x.jsonl", "x.csv, csv: {null_values: NA}")).spec.input.csv.null_values == ("NA",)


def test_a_job_as_input():
    spec = read("model: a/b\ninput: {job: out/first}\noutput: {path: y}\n").spec
    assert (spec.input.path, spec.input.job) == ("out/first", "out/first")
    assert JobSpec.model_validate(spec.model_dump(mode="json")) == spec
    for field, message in (
        ("path: x", "input.job: got 'out/first' beside path 'x'; must be given alone"),
        ("format: parquet", "input.format: got it beside job, whose output is read as it is; must be left out"),
    ):
        assert message in refusal(f"model: a/b\ninput: {{job: out/first, {field}}}\noutput: {{path: y}}\n")
    assert "input.job: " in refusal("model: a/b\ninput: {job: hf://buckets/a/b/first}\noutput: {path: y}\n")
    with_images = "model: a/b\ninput: {job: s3://b/first, images_column: a, prompt_column: b}\noutput: {path: y}\n"
    assert "input.job: got 's3://b/first' in a job with images" in refusal(with_images)
    assert "input.path: missing; must be text" in refusal("model: a/b\ninput: {}\noutput: {path: y}\n")


def test_a_number_as_a_key_is_told_its_quotes():
    said = refusal(LEAST + "sampling: {logit_bias: {5: 1}}\n")
    assert said.endswith('got 5 for a field\'s name; must be text: write "5"')


VALUES = [None, True, 5, -1, 5.5, 5.0, 10**30, math.nan, math.inf, "", "x", "5", "\0", "\ud800", "~x", "~\0", [],
          [None], [1], ["a", ""], [[]], {}, {"a": 1}, {"name": 1, "path": 2}]  # fmt: skip


def json_as_yaml(spec) -> str:
    """In one line, and ten times as fast as by `yaml.safe_dump`."""
    return json.dumps(spec).replace("NaN", ".nan").replace("Infinity", ".inf")


def test_every_pydantic_error_has_words():
    """Any value in any field gives a line about that field that says what was got and what is allowed.

    The line of each kind of error is read once a field, for another of the values each time.
    """
    types = set()
    for number, doc in enumerate(field_docs().values()):
        kinds = set()
        for value in [*VALUES[number % len(VALUES) :], *VALUES[: number % len(VALUES)]] if "[]" not in doc.name else []:
            spec = data(model={"name": "a/b"})
            *sections, name = doc.name.split(".")
            if doc.name.startswith("logits."):
                spec["task"] = "logits"
            inner = spec
            for section in sections:
                inner = inner.setdefault(section, {})
            inner[name] = value
            try:
                JobSpec.model_validate(spec)
                continue
            except ValidationError as error:
                kind = frozenset(one["type"] for one in error.errors())
                types |= kind
            if value == "\ud800" or kind in kinds:
                continue  # the first is refused by YAML itself
            kinds.add(kind)
            for line in refusal(json_as_yaml(spec)).splitlines():
                place, field, message = line.split(": ", 2)
                assert re.fullmatch(r"job\.yaml:1:\d+", place)
                # Beside the one that is wrong, the other field of the section may be missing.
                assert field.startswith(doc.name) or message.startswith("missing; must be")
                assert re.match("got .*(; must be|; a path|but there)|must be|missing; must be|unknown field", message)
                assert not re.search(r"pydantic|[Ii]nput should|https?:|validation|constrained", line)
    assert types == {
        "missing", "extra_forbidden", "wrong", "model_type", "dict_type", "tuple_type", "string_type", "string_unicode",
        "string_too_short", "int_type", "float_type", "bool_type", "literal_error", "finite_number", "greater_than",
        "greater_than_equal", "less_than_equal", "too_short",
    }  # fmt: skip


# -- overrides, variables, engine arguments --------------------------------------------------------------------------


def test_overrides():
    spec = read(
        LEAST + "sampling: {n: 2, top_p: 0.5}\nscripted:\n",
        "sampling.n=3", "sampling.n=4", "sampling.stop=[a, b]", "model.dtype=float32", "engine.x.y=1", "engine.x.z=",
        "scripted.step_s=1e-3", "parallel={tensor_parallel_size: 2}", "output.path=a=b",
    ).spec  # fmt: skip
    assert (spec.sampling.n, spec.sampling.top_p, spec.sampling.stop_strings) == (4, 0.5, ("a", "b"))
    assert (spec.model.name, spec.model.dtype, spec.engine) == ("a/b", "float32", {"x": {"y": 1, "z": None}})
    assert (spec.scripted.step_s, spec.parallel.tensor_parallel_size, spec.output.path) == (0.001, 2, "a=b")
    model = read(LEAST, "model.dtype=float32", "model=c", "model.revision=d").spec.model
    assert model.model_dump(exclude_unset=True) == {"name": "c", "revision": "d"}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("parallel.max_token=3", "parallel.max_token: unknown field; did you mean sampling.max_tokens? Allowed: "
         f"{PARALLEL}"),
        ("samplng.n=3", f"samplng: unknown field; did you mean sampling? Allowed: {TOP}"),
        ("sampling={n: 0}", f"sampling.n: got 0; must be {SAMPLES}"),
        ("model.revision=1234567", f"model.revision: got 1234567; must be text; {QUOTES}"),
        ("output={}", f"output.path: missing; must be text. {field_docs()['output.path'].meaning}"),
        ("sampling.n", "must be field=value, such as --set sampling.max_tokens=64"),
        ("=3", "must be field=value, such as --set sampling.max_tokens=64"),
        ("sampling..n=3", "must be field=value, such as --set sampling.max_tokens=64"),
        ("input.path.x=3", "input.path is 'x.jsonl', which has no fields; set input.path itself"),
        ("sampling.stop=a: b: c", "not valid YAML: mapping values are not allowed here; does a text need quotes?"),
    ],
)  # fmt: skip
def test_refused_overrides(override, message):
    assert refusal(LEAST, override) == f"--set {override}: {message}"


def test_variables_and_home_are_expanded_in_paths(monkeypatch):
    raw = b"\xff".decode("utf8", "surrogateescape")
    for name, value in {
        "HOME": "/home/me",
        "A": "/data",
        "ODD": "~$A",
        "TILDE": "~/t",
        "EMPTY": "",
        "RAW": raw,
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("UNSET", raising=False)
    model = "model: {name: $A/m, tokenizer: '${A}s/$ODD', revision: $A}"
    spec = read(f"{model}\ninput: {{path: ~/$A}}\noutput: {{path: $$A/$$/100$}}").spec
    assert (spec.model.name, spec.model.tokenizer, spec.model.revision) == ("/data/m", "/datas/~$A", "$A")
    assert (spec.input.path, spec.output.path) == ("/home/me//data", "$A/$/100$")
    assert read(dump_spec(spec)).spec == spec
    assert read(LEAST, "output.path=$A/o").spec.output.path == "/data/o"
    assert read(LEAST, "output.path=$TILDE/o").spec.output.path == "/home/me/t/o"
    assert refusal(LEAST.replace("a/b", "$UNSET/b").replace("out}", "'${EMPTY}/x'}")).splitlines() == [
        f"job.yaml:{place}: {name} is unset or empty in the environment; set it, or write $$ for a plain $"
        for place, name in (("1:1: model.name", "$UNSET"), ("3:10: output.path", "${EMPTY}"))
    ]
    assert refusal(LEAST, "output.path=$RAW") == "--set output.path=$RAW: output.path: got '\\udcff'; must be text"


def test_engine_arguments():
    known = frozenset({"max_model_len", "enforce_eager", "_private"})
    names = ("max_model_length", "tensor_parallel_size", "max_tokens", "zzz", "_private", "swap_space")
    file = read(LEAST + "engine:\n" + "".join(f"  {name}: 1\n" for name in names))
    with pytest.raises(SpecError) as caught:
        check_engine_arguments(file, known)
    assert str(caught.value).splitlines() == [
        "job.yaml:5:3: engine.max_model_length: no engine argument of the installed vLLM; did you mean max_model_len?",
        "job.yaml:6:3: engine.tensor_parallel_size: say parallel.tensor_parallel_size instead",
        "job.yaml:7:3: engine.max_tokens: no engine argument of the installed vLLM; did you mean sampling.max_tokens?",
        "job.yaml:8:3: engine.zzz: no engine argument of the installed vLLM; its EngineArgs have the names",
        "job.yaml:9:3: engine._private: no engine argument of the installed vLLM; its EngineArgs have the names",
        "job.yaml:10:3: engine.swap_space: no engine argument of the installed vLLM; its EngineArgs have the names",
    ]
    with pytest.raises(SpecError, match=r"^--set engine.model=x: engine.model: say model.name instead$"):
        check_engine_arguments(read(LEAST, "engine.model=x"), None)
    check_engine_arguments(read(LEAST + "engine: {anything: 1}"), None)
    check_engine_arguments(read(LEAST + "engine: {enforce_eager: true, max_model_len: 5}"), known)
    elsewhere = {name: field for name, field in ENGINE_ARGUMENTS_ELSEWHERE.items() if name != "hf_token"}
    assert all(field in field_docs() for field in elsewhere.values())
    with pytest.raises(SpecError, match=r"say HF_TOKEN in the environment instead$"):
        check_engine_arguments(read(LEAST, "engine.hf_token=x"), None)


@pytest.mark.skipif(engine_argument_names() is None, reason="needs vLLM, whose types are checked")
def test_types_of_engine_arguments():
    right = (
        "{max_model_len: auto, enforce_eager: null, async_scheduling: false, cpu_offload_gb: 4, served_model_name: [a]}"
    )
    check_engine_types(read(LEAST + f"engine: {right}"))
    for setting, told in [
        ("enable_prefix_caching=no", "got 'no'; must be true or false"),
        ("enforce_eager=1", "got 1; must be true or false"),
        ("max_num_seqs='16'", "got '16'; must be a whole number"),
        ("max_num_seqs=true", "got true; must be a whole number"),
        ("max_model_len=512.0", "got 512.0; must be a whole number"),
        ("download_dir=5", "got 5; must be text"),
    ]:
        with pytest.raises(SpecError) as caught:
            check_engine_types(read(LEAST, f"engine.{setting}"))
        assert str(caught.value).endswith(f": engine.{setting.partition('=')[0]}: {told}")


# -- out again, and whatever comes in --------------------------------------------------------------------------------

ODD = ["no", "1e-3", "012", "12:30", "<<", "~", " a\n\n b ", "a\n", "\na", "a \nb", "{{ q }}", "\x85", "\r\n", "😀"]
TEXTS = st.text(min_size=1, max_size=20) | st.sampled_from(ODD)
PATHS = TEXTS.filter(lambda text: "\0" not in text and not text.startswith("~"))
INTS = st.integers(1, 2**31 - 1)
PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS


def mapping(required=(), **optional):
    return st.fixed_dictionaries(dict(required), optional=optional)


MODELS = mapping([("name", PATHS)], tokenizer=st.none() | PATHS, revision=TEXTS, trust_remote_code=st.booleans())
INPUTS = mapping([("path", PATHS)], prompt_template=TEXTS, id_column=TEXTS)
OUTPUTS = mapping(
    [("path", PATHS)], rows_per_shard=INTS | st.just("auto"), keep_columns=st.lists(TEXTS, unique=True, max_size=3)
)
SPECS = mapping(
    [("model", MODELS), ("input", INPUTS), ("output", OUTPUTS)],
    sampling=mapping(
        temperature=st.floats(0.01, 2),
        top_k=st.none() | INTS,
        stop=st.lists(TEXTS, max_size=3) | TEXTS,
        stop_token_ids=st.lists(INTS, max_size=3),
        seed=st.integers(-(2**63), 2**63 - 1),
    ),
    engine=st.dictionaries(
        TEXTS,
        st.recursive(PLAIN, lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner), max_leaves=5),
        max_size=3,
    ),
    checkpoint_interval_s=st.floats(0, 1e9, exclude_min=True) | st.integers(1, 10**9),
    scripted=st.none() | mapping(step_s=st.floats(0, 10), vary_lengths=st.booleans()),
).map(JobSpec.model_validate)
SCHEMA = jsonschema.Draft202012Validator(json_schema())
FUZZ = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


@settings(FUZZ, max_examples=25)
@given(SPECS)
def test_a_dumped_spec_reads_back_as_it_was(spec):
    again = read(dump_spec(spec)).spec
    assert again == spec
    assert again.model_dump_json() == spec.model_dump_json()  # 1 == 1.0, but not here
    assert JobSpec.model_validate_json(spec.model_dump_json()) == spec
    assert SCHEMA.is_valid(json.loads(spec.model_dump_json()))


def survives(content):
    try:
        read(content)
    except SpecError as error:
        for line in str(error).splitlines():
            assert line.startswith("job.yaml:") or re.fullmatch("and [0-9]+ more", line)
            assert line.isprintable()


@settings(FUZZ, max_examples=300)
@given(st.binary(max_size=200) | st.text(max_size=200) | st.text("ab:-?&*!<>|'\"{}[],#% \n\t01.~\\xU", max_size=60))
def test_any_file_is_a_spec_or_a_spec_error(content):
    survives(content)


QUICKSTART = (ROOT / "jobs" / "quickstart.yaml").read_bytes()
PIECES = st.binary(max_size=3) | st.sampled_from(
    [b": ", b"\n", b"- ", b"&a ", b"*a", b"<<: *a", b"~", b"$", b"!!", b"{", b"]", b"'", b'"\\u', b"1e999", b"null"]
)


@settings(FUZZ, max_examples=300)
@given(st.lists(st.tuples(st.integers(0, len(QUICKSTART)), st.integers(0, 12), PIECES), min_size=1, max_size=4))
def test_any_damaged_spec_is_a_spec_or_a_spec_error(edits):
    content = QUICKSTART
    for start, length, piece in edits:
        content = content[:start] + piece + content[start + length :]
    survives(content)


# -- the schema, the reference, and the spec itself ------------------------------------------------------------------


def test_json_schema():
    schema = json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    for path in JOBS:
        written = yaml.safe_load(path.read_text())
        assert SCHEMA.is_valid(written)
        assert SCHEMA.is_valid({**written, "model": {"name": "a/b", "dtype": "float32"}})
    for wrong in ({"zzz": 1}, {"model": 5}, {"model": {}}, {"sampling": {"n": 0}}, {"input": {"path": "x", "zzz": 1}}):
        assert not SCHEMA.is_valid(data(**wrong))
    for section in (schema, *schema["$defs"].values()):
        assert section["additionalProperties"] is False
        for field in section["properties"].values():
            assert "$ref" in field or ("description" in field and ("title" in field or "anyOf" in field))


def test_equal_meanings_have_equal_fingerprints():
    pairs = [
        ({"logit_bias": {5: 1, 6: 2}}, {"logit_bias": {"6": 2.0, "5": 1}}),
        ({"stop": "a"}, {"stop": ["a"]}),
        ({"temperature": 1}, {"temperature": 1.0}),
        ({}, {"n": 1}),
    ]
    for left, right in pairs:
        prints = [fingerprint(fields(JobSpec.model_validate(data(sampling=one)), "identity")) for one in (left, right)]
        assert prints[0] == prints[1]


def reference() -> str:
    """The tables of `docs/spec.md`."""
    lines = []
    for section in ("", *(name for name, doc in field_docs().items() if doc.resume is None)):
        lines += ["", f"### {section or 'The top level'}", ""]
        lines += ["| field | type | default | kind | meaning |", "|---|---|---|---|---|"]
        lines += [row(doc) for doc in field_docs().values() if doc.name.rpartition(".")[0] == section]
    runtime = ", ".join(f"`{name}`" for name in sorted(RUNTIME_ENGINE_ARGUMENTS))
    elsewhere = ", ".join(f"`{name}` (use `{field}`)" for name, field in ENGINE_ARGUMENTS_ELSEWHERE.items())
    lines += ["", f"Under `engine`, these are *runtime*: {runtime}.", "", f"And these are refused: {elsewhere}.", ""]
    return "\n".join(lines)


def row(doc) -> str:
    name = doc.name.rpartition(".")[2]
    default = "required" if doc.is_required else "unset" if doc.default is None else f"`{json.dumps(doc.default)}`"
    if doc.resume is None:  # a section: its fields have a table of their own
        default = "" if isinstance(doc.default, dict) else default
        anchor = re.sub(r"[^a-z_]", "", doc.name)  # as GitHub makes it of the heading
        return f"| [`{name}`](#{anchor}) | {doc.allowed.partition(' (')[0]} | {default} | | {doc.meaning} |"
    return f"| `{name}` | {doc.allowed} | {default} | {doc.resume} | {doc.meaning} |"


def with_fresh_tables(page: str) -> str:
    start, _, rest = page.partition("<!-- tables -->\n")
    return f"{start}<!-- tables -->\n{reference()}\n<!-- end -->{rest.partition('<!-- end -->')[2]}"


def test_the_reference_is_fresh():
    page = PAGE.read_text()
    assert reference() in page
    assert page == with_fresh_tables(page), "docs/spec.md is stale; run: python tests/spec/test_spec.py"


def test_the_program_that_writes_the_reference_knows_the_tasks():
    script = f"import runpy; print(runpy.run_path({__file__!r})['reference']())"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True,
        text=True, timeout=120, check=True,
    )  # fmt: skip
    assert done.stdout == f"{reference()}\n"


if __name__ == "__main__":
    PAGE.write_text(with_fresh_tables(PAGE.read_text()))
