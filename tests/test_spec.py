"""The spec and its file: what is read, what is refused and in which words, what comes out again."""

import json
import math
import pathlib
import re
import time

import jsonschema
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from batchinf.engine import engine_argument_names
from batchinf.errors import SpecError
from batchinf.spec import (
    ENGINE_ARGUMENTS_ELSEWHERE,
    RUNTIME_ENGINE_ARGUMENTS,
    JobSpec,
    field_docs,
    fields,
    fingerprint,
)
from batchinf.spec_file import MAX_BYTES, SpecFile, check_engine_arguments, dump_spec, json_schema, read_spec

ROOT = pathlib.Path(__file__).parent.parent
JOBS = sorted((ROOT / "jobs").glob("*.yaml"))
LEAST = "model: a/b\ninput: {path: x.jsonl}\noutput: {path: out}\n"
TOP = ", ".join(name for name in field_docs() if "." not in name)


@pytest.fixture(autouse=True)
def _in_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def read(text, *overrides) -> SpecFile:
    content = text if isinstance(text, bytes) else text.encode()
    pathlib.Path("job.yaml").write_bytes(content)
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
    given = spec.model_dump(exclude_unset=True)
    assert given == {
        "model": {"name": "sample_data/tiny-llama"},
        "task": "generate",
        "input": {"path": "sample_data/prompts.jsonl", "prompt_column": "prompt", "id_column": "id"},
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
    lines = refusal("task: generate").splitlines()
    assert [line.split(": ")[:3] for line in lines] == [
        ["job.yaml", name, f"missing; must be {field_docs()[name].allowed}. {field_docs()[name].meaning}"]
        for name in ("model", "input", "output")
    ]


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("1e-3", 0.001), ("1E3", 1000.0), ("-.5", -0.5), ("5.", 5.0), ("7", 7), ("-7", -7), ("+7", 7), ("0", 0),
        ("0x1F", 31), ("0o17", 15), ("true", True), ("False", False), ("~", None), ("null", None), ("", None),
        ("no", "no"), ("off", "off"), ("yes", "yes"), ("y", "y"), ("012", "012"), ("12:30", "12:30"), ("1_000", "1_000"),
        ("0b11", "0b11"), ("2024-01-01", "2024-01-01"), ("=", "="), ("<<", "<<"), ("'5'", "5"), ("!!str 5", "5"),
        ("!!float 5", 5.0), ("1e3x", "1e3x"), ("[1, a]", [1, "a"]), ("9" * 101, "9" * 101),
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


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("sampling:\n  temperature: 0\n  max_token: 3", "6:3: sampling.max_token: unknown field; did you mean max_tokens? "
         f"Allowed: {', '.join(name[9:] for name in field_docs() if name.startswith('sampling.'))}"),
        ("zzz: 1", f"4:1: zzz: unknown field. Allowed: {TOP}"),
        ("max_tokens: 1", f"4:1: max_tokens: unknown field; did you mean sampling.max_tokens? Allowed: {TOP}"),
        ("path: 1", f"4:1: path: unknown field; did you mean input.path or output.path? Allowed: {TOP}"),
        ("max_model_len: 1", f"4:1: max_model_len: unknown field; did you mean engine.max_model_len? Allowed: {TOP}"),
        ("Sampling: {}", f"4:1: Sampling: unknown field; did you mean sampling? Allowed: {TOP}"),
        ("sampling.n: 1", f"4:1: sampling.n: unknown field; did you mean n, within sampling? Allowed: {TOP}"),
        ("parallel: {max_restarts: 1}", "4:12: parallel.max_restarts: unknown field; did you mean max_restarts, at the top "
         "level? Allowed: tensor_parallel_size, pipeline_parallel_size, data_parallel_size"),
        ("sampling: {n: 0}", f"4:12: sampling.n: got 0; must be {POSITIVE}"),
        ("sampling: {n: true}", f"4:12: sampling.n: got true; must be {POSITIVE}"),
        ("sampling: {n: '5'}", f"4:12: sampling.n: got '5'; must be {POSITIVE}; write it without quotes"),
        ("sampling: {n: 5.0}", f"4:12: sampling.n: got 5.0; must be {POSITIVE}; write it as 5"),
        ("sampling: {n: 5.5}", f"4:12: sampling.n: got 5.5; must be {POSITIVE}"),
        ("sampling: {n: 99999999999}", f"4:12: sampling.n: got 99999999999; must be {POSITIVE}"),
        ("sampling: {min_tokens: }", f"4:12: sampling.min_tokens: got nothing (null); must be {WHOLE}; "
         "leave it out for its default"),
        ("sampling: {top_p: 0}", "4:12: sampling.top_p: got 0; must be a number, above 0 and at most 1"),
        ("sampling: {top_p: 1.5}", "4:12: sampling.top_p: got 1.5; must be a number, above 0 and at most 1"),
        ("sampling: {min_p: .nan}", "4:12: sampling.min_p: got NaN; must be a number, at least 0 and at most 1"),
        ("stall_timeout_s: .inf", "4:1: stall_timeout_s: got Infinity; must be a number, above 0"),
        ("drain_timeout_s: '1'", "4:1: drain_timeout_s: got '1'; must be a number, at least 0; write it without quotes"),
        ("drain_timeout_s: false", "4:1: drain_timeout_s: got false; must be a number, at least 0"),
        ("sampling: {ignore_eos: no}", "4:12: sampling.ignore_eos: got 'no'; must be true or false"),
        ("sampling: {ignore_eos: 1}", "4:12: sampling.ignore_eos: got 1; must be true or false"),
        ("sampling: {stop: 5}", "4:12: sampling.stop: got 5; must be a list of texts, or text; "
         "text that looks like something else needs quotes"),
        ("sampling: {stop: [a, 5]}", "4:22: sampling.stop[1]: got 5; must be a list of texts, or text; "
         "text that looks like something else needs quotes"),
        ("sampling: {stop: ['']}", "4:19: sampling.stop[0]: got empty text; must be a list of texts, or text "
         "that is not empty"),
        ("sampling: {stop_token_ids: [1, -1]}", f"4:32: sampling.stop_token_ids[1]: got -1; must be a list of "
         f"{WHOLE[2:].replace('number', 'numbers')}"),
        ("sampling: {stop_token_ids: 5}", f"4:12: sampling.stop_token_ids: got 5; must be a list of "
         f"{WHOLE[2:].replace('number', 'numbers')}"),
        ("parallel: {data_parallel_size: 0}", f"4:12: parallel.data_parallel_size: got 0; must be {POSITIVE}, or auto"),
        ("parallel: {data_parallel_size: all}", "4:12: parallel.data_parallel_size: got 'all'; must be "
         f"{POSITIVE}, or auto"),
        ("task: chat", "4:1: task: got 'chat'; must be generate"),
        ("scripted: 5", "4:1: scripted: got 5; must be a mapping of fields "
         "(max_num_seqs, step_s, start_s, max_model_len, vary_lengths)"),
        ("engine: [a]", "4:1: engine: got a list; must be a mapping"),
        ("engine: {a: [.inf]}", "4:10: engine.a: must be made of text, finite numbers, true or false, null, lists and "
         "mappings"),
        ("engine: {gpu_memory_utilization: 90}", "4:10: engine.gpu_memory_utilization: got 90; must be a number above 0 "
         "and at most 1"),
        ("sampling: {temperature: 0, n: 4}", "4:28: sampling.n: got 4 with temperature 0; greedy samples are all equal: "
         "set n to 1, or a temperature above 0"),
        ("sampling: {min_tokens: 5, max_tokens: 4}", "4:12: sampling.min_tokens: got 5 with max_tokens 4; must not be "
         "above it"),
    ],
)  # fmt: skip
def test_refused_fields(more, message):
    assert refusal(LEAST + more) == f"job.yaml:{message}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (LEAST.replace("a/b", "5"), "1:1: model: got 5; must be text, or a mapping of fields (name, revision, tokenizer, "
         "dtype, quantization, load_format, trust_remote_code)"),
        (LEAST.replace("a/b", "{}"), "1:1: model.name: missing; must be text. A Hugging Face id or a folder. Known on "
         "resume by its content or commit, not by where it lies."),
        (LEAST.replace("a/b", "{name: a, revision: 12}"), "1:18: model.revision: got 12; must be text; text that looks "
         "like something else needs quotes"),
        (LEAST.replace("out}", "o, keep_columns: a}"), "3:19: output.keep_columns: got 'a'; must be a list of texts; for a "
         "list of one write [a]"),
        (LEAST.replace("out}", "o, keep_columns: [a, a]}"), "3:19: output.keep_columns: got 'a' twice; name each column "
         "once"),
        (LEAST.replace("out}", '"\\0"}'), "3:10: output.path: got '\\x00'; a path cannot hold a null character"),
        (LEAST.replace("out}", "~nobody-here/x}"), "3:10: output.path: got '~nobody-here/x', but there is no such user's "
         "home; for a name that begins with ~ write ./~"),
        (LEAST.replace("x.jsonl}", "x, prompt_column: a, prompt_template: b}"), "2:36: input.prompt_template: got a "
         "template beside prompt_column; give one of them"),
        (LEAST.replace("x.jsonl}", "x, format: csv, split: a}"), "2:31: input.split: got 'a' with format csv; only a "
         "Hugging Face dataset (format hf) has a split: leave it out"),
        (LEAST + "task: generate\ntask: generate", "5:1: task: given twice; leave one of them out"),
        ("", f" got nothing (null); must be a mapping of fields ({TOP})"),
        ("# only this", f" got nothing (null); must be a mapping of fields ({TOP})"),
        ("- a", f" got a list; must be a mapping of fields ({TOP})"),
        ("a: [1", "1:6: not valid YAML: while parsing a flow sequence, expected ',' or ']', but got '<stream end>'; does "
         "a text need quotes?"),
        ("a: b: c", "1:5: not valid YAML: mapping values are not allowed here; does a text need quotes?"),
        ("a:\n\tb: 1", "2:1: not valid YAML: while scanning for the next token, found character '\\t' that cannot start "
         "any token; indent with spaces"),
        ("a: {{ b }}", "1:5: got a mapping for a field's name; must be text: does it need quotes?"),
        ("5: b", "1:1: got 5 for a field's name; must be text: does it need quotes?"),
        (b"a: b\nc: \xff", "2:4: not UTF-8; save the file as UTF-8"),
        ("a: b\nc: \a", "2:4: not valid YAML: character U+0007"),
        ("--- a\n--- b", "2:1: not valid YAML: expected a single document in the stream, but found another document"),
        ("a: *b", "1:4: not valid YAML: found undefined alias 'b'"),
        ("a: !!python/object/apply:os.getcwd []", "1:4: tag !!python/object/apply:os.getcwd is not allowed here; leave it "
         "out"),
        ("a: !!int x", "1:4: tag !!int is not allowed here; leave it out"),
        ("a: !!timestamp 2024-01-01", "1:4: tag !!timestamp is not allowed here; leave it out"),
        ('a: "\\ud800"', "1:4: got '\\ud800', which holds half a character (a surrogate)"),
        ('a: "\\UFFFFFFFF"', "1:7: not valid YAML: impossible number"),
        ("a: {<<: 5}", "1:9: << takes a mapping, or a list of mappings"),
        ("[" * 99, "1:101: not valid YAML: too long or too deeply nested"),
        ("a: &a [*a]", "1:4: too long or too deeply nested with its aliases written out"),
        ("a: &a {<<: *a}", "1:4: too long or too deeply nested with its aliases written out"),
    ],
)  # fmt: skip
def test_refused_files(text, message):
    assert re.sub("1:100", "1:101", refusal(text)) == f"job.yaml:{message}"


def test_files_that_cannot_be_read(tmp_path):
    pathlib.Path("long.yaml").write_bytes(b"#" * (MAX_BYTES + 1))
    (tmp_path / "folder").mkdir()
    for name, why in {"none.yaml": "no such file or directory", "folder": "is a directory",
                      "long.yaml": f"longer than {MAX_BYTES} bytes"}.items():  # fmt: skip
        with pytest.raises(SpecError) as caught:
            read_spec(name)
        assert str(caught.value) == f"{name}: {why}; must be a job spec, such as jobs/quickstart.yaml"


@pytest.mark.parametrize("item", ["[{}]", "{{<<: [{}]}}"], ids=["lists", "merge keys"])
def test_aliases_may_not_multiply(item):
    lines = ["a0: &a0 {x: 1, y: 2}"]
    lines += [f"a{i}: &a{i} {item.format(', '.join([f'*a{i - 1}'] * 10))}" for i in range(1, 20)]
    started = time.monotonic()
    assert refusal("\n".join(lines)).endswith("too long or too deeply nested with its aliases written out")
    assert time.monotonic() - started < 5


def test_all_errors_are_shown_one_a_line():
    lines = refusal(LEAST + "".join(f"unknown_{i}: 1\n" for i in range(13))).splitlines()
    assert [line.split(":")[1] for line in lines[:-1]] == [str(4 + i) for i in range(10)]
    assert lines[-1] == "and 3 more"
    assert (
        len(refusal(LEAST + "sampling: {n: 0, top_p: 7, stop: 5}\nparallel: {data_parallel_size: x}").splitlines()) == 4
    )


VALUES = [None, True, 5, -1, 5.5, 5.0, 10**30, math.nan, math.inf, "", "x", "5", "\0", "\ud800", "~x", [], [None], [1],
          ["a", ""], [[]], {}, {"a": 1}, {"name": 1, "path": 2}]  # fmt: skip


def test_every_pydantic_error_has_words():
    """Any value in any field gives a line about that field that says what was got and what is allowed."""
    types = set()
    for doc in field_docs().values():
        for value in VALUES:
            spec = data()
            *section, name = doc.name.split(".")
            fields_of = spec if not section else spec.setdefault(section[0], {})
            if section == ["model"]:
                fields_of = spec["model"] = {"name": "a/b"}
            fields_of[name] = value
            try:
                JobSpec.model_validate(spec)
                continue
            except ValidationError as error:
                types |= {one["type"] for one in error.errors()}
            if value == "\ud800":
                continue  # YAML itself refuses it
            for line in refusal(yaml.safe_dump(spec, default_flow_style=True, width=10**9)).splitlines():
                where, field, message = line.split(": ", 2)
                assert re.fullmatch(r"job\.yaml:1:\d+", where)
                assert field.startswith(doc.name)
                assert re.match(
                    r"got .*; (must be|a path|leave)|got .* but|must be made|missing; must|unknown", message
                )
                assert not re.search(r"pydantic|[Ii]nput should|https?:|validation|constrained", line)
    assert types == {
        "missing", "extra_forbidden", "wrong", "model_type", "dict_type", "tuple_type", "string_type", "string_too_short",
        "string_unicode", "int_type", "float_type", "bool_type", "literal_error", "finite_number", "greater_than",
        "greater_than_equal", "less_than_equal",
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
    assert read(LEAST, "model.dtype=float32", "model=c", "model.revision=d").spec.model.model_dump(exclude_unset=True) == {
        "name": "c", "revision": "d"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("parallel.max_token=3", "parallel.max_token: unknown field; did you mean sampling.max_tokens? Allowed: "
         "tensor_parallel_size, pipeline_parallel_size, data_parallel_size"),
        ("samplng.n=3", f"samplng: unknown field; did you mean sampling? Allowed: {TOP}"),
        ("sampling={n: 0}", f"sampling.n: got 0; must be {POSITIVE}"),
        ("model.revision=1234567", "model.revision: got 1234567; must be text; text that looks like something else needs "
         "quotes"),
        ("sampling.n", "must be field=value, such as --set sampling.max_tokens=64"),
        ("=3", "must be field=value, such as --set sampling.max_tokens=64"),
        ("sampling..n=3", "must be field=value, such as --set sampling.max_tokens=64"),
        ("input.path.x=3", "input.path is 'x.jsonl', which has no fields; set input.path itself"),
        ("sampling.stop=[", "not valid YAML: while parsing a flow node, expected the node content, but found '<stream end>'; "
         "does a text need quotes?"),
    ],
)  # fmt: skip
def test_refused_overrides(override, message):
    assert refusal(LEAST, override) == f"--set {override}: {message}"


def test_variables_and_home_are_expanded_in_paths(monkeypatch):
    for name, value in {
        "HOME": "/home/me",
        "A": "/data",
        "ODD": "~$A",
        "EMPTY": "",
        "RAW": b"\xff".decode("utf8", "surrogateescape"),
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("UNSET", raising=False)
    text = (
        "model: {name: $A/m, tokenizer: '${A}s/$ODD', revision: $A}\ninput: {path: ~/$A}\noutput: {path: $$A/$$/100$}"
    )
    spec = read(text).spec
    assert (spec.model.name, spec.model.tokenizer, spec.model.revision) == ("/data/m", "/datas/~$A", "$A")
    assert (spec.input.path, spec.output.path) == ("/home/me//data", "$A/$/100$")
    assert read(dump_spec(spec)).spec == spec
    assert read(LEAST, "output.path=$A/o").spec.output.path == "/data/o"
    assert refusal(LEAST.replace("a/b", "$UNSET/b").replace("out}", "'${EMPTY}/x'}")).splitlines() == [
        f"job.yaml:{place}: {name} is unset or empty in the environment; set it, or write $$ for a plain $"
        for place, name in (("1:1: model.name", "$UNSET"), ("3:10: output.path", "${EMPTY}"))
    ]
    assert refusal(LEAST, "output.path=$RAW") == "--set output.path=$RAW: output.path: got '\\udcff'; must be text"


def test_engine_arguments():
    known = frozenset({"max_model_len", "enforce_eager", "_private"})
    file = read(
        LEAST + "engine:\n  max_model_length: 1\n  tensor_parallel_size: 2\n  max_tokens: 3\n  zzz: 4\n  _private: 5\n"
    )
    with pytest.raises(SpecError) as caught:
        check_engine_arguments(file, known)
    assert str(caught.value).splitlines() == [
        "job.yaml:5:3: engine.max_model_length: no engine argument of the installed vLLM; did you mean max_model_len?",
        "job.yaml:6:3: engine.tensor_parallel_size: say parallel.tensor_parallel_size instead",
        "job.yaml:7:3: engine.max_tokens: no engine argument of the installed vLLM; did you mean sampling.max_tokens?",
        "job.yaml:8:3: engine.zzz: no engine argument of the installed vLLM; its EngineArgs have the names",
        "job.yaml:9:3: engine._private: no engine argument of the installed vLLM; its EngineArgs have the names",
    ]
    with pytest.raises(SpecError, match=r"^--set engine.model=x: engine.model: say model.name instead$"):
        check_engine_arguments(read(LEAST, "engine.model=x"), None)
    check_engine_arguments(read(LEAST + "engine: {anything: 1}"), None)
    check_engine_arguments(read(LEAST + "engine: {enforce_eager: true, max_model_len: 5}"), known)


# -- out again, and whatever comes in --------------------------------------------------------------------------------

TEXTS = st.text(min_size=1, max_size=20) | st.sampled_from(
    ["no", "1e-3", "012", "12:30", "<<", "~", " a\n\n b ", "{{ q }}"]
)
PATHS = TEXTS.filter(lambda text: "\0" not in text and not text.startswith("~"))
INTS = st.integers(1, 2**31 - 1)
PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS


def mapping(required=(), **optional):
    return st.fixed_dictionaries(dict(required), optional=optional)


SPECS = mapping(
    [("model", mapping([("name", PATHS)], tokenizer=st.none() | PATHS, revision=TEXTS, trust_remote_code=st.booleans())),
     ("input", mapping([("path", PATHS)], prompt_template=TEXTS, id_column=TEXTS)),
     ("output", mapping([("path", PATHS)], rows_per_shard=INTS | st.just("auto"), keep_columns=st.lists(TEXTS, unique=True)))],
    sampling=mapping(
        n=INTS, temperature=st.floats(0.01, 2), top_p=st.floats(0, 1, exclude_min=True), top_k=st.none() | INTS,
        stop=st.lists(TEXTS) | TEXTS, stop_token_ids=st.lists(INTS), seed=st.integers(-(2**63), 2**63 - 1),
    ),
    engine=st.dictionaries(TEXTS, st.recursive(PLAIN, lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner))),
    checkpoint_interval_s=st.floats(0, exclude_min=True, allow_infinity=False) | INTS,
    scripted=st.none() | mapping(step_s=st.floats(0, 10), vary_lengths=st.booleans()),
).map(JobSpec.model_validate)  # fmt: skip
FUZZ = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


@settings(FUZZ, max_examples=300)
@given(SPECS)
def test_a_dumped_spec_reads_back_as_it_was(spec):
    again = read(dump_spec(spec)).spec
    assert again == spec
    assert again.model_dump_json() == spec.model_dump_json()  # 1 == 1.0, but not here
    assert JobSpec.model_validate_json(spec.model_dump_json()) == spec
    jsonschema.validate(json.loads(spec.model_dump_json()), json_schema())


def survives(content):
    try:
        read(content)
    except SpecError as error:
        for line in str(error).splitlines():
            assert line.startswith("job.yaml:") or re.fullmatch("and [0-9]+ more", line)
            assert line.isprintable()


@settings(FUZZ, max_examples=700)
@given(st.binary(max_size=200) | st.text(max_size=200) | st.text("ab:-?&*!<>|'\"{}[],#% \n\t01.~\\xU", max_size=60))
def test_any_file_is_a_spec_or_a_spec_error(content):
    survives(content)


WHOLE_SPEC = (ROOT / "jobs" / "quickstart.yaml").read_bytes()
PIECES = st.binary(max_size=3) | st.sampled_from(
    [
        b": ",
        b"\n",
        b"- ",
        b"&a ",
        b"*a",
        b"<<: *a",
        b"~",
        b"$",
        b"!!",
        b"{",
        b"]",
        b"'",
        b'"\\u',
        b"1e999",
        b"null",
        b"  ",
    ]
)


@settings(FUZZ, max_examples=1500)
@given(st.lists(st.tuples(st.integers(0, len(WHOLE_SPEC)), st.integers(0, 12), PIECES), min_size=1, max_size=4))
def test_any_damaged_spec_is_a_spec_or_a_spec_error(edits):
    content = WHOLE_SPEC
    for start, length, piece in edits:
        content = content[:start] + piece + content[start + length :]
    survives(content)


# -- the schema, the reference, and the spec itself ------------------------------------------------------------------


def test_json_schema():
    schema = json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    valid = jsonschema.Draft202012Validator(schema).is_valid
    for path in JOBS:
        written = read_spec(path).spec.model_dump(mode="json", exclude_unset=True)
        assert valid(written)
        assert valid({**written, "model": "a/b"})
    for wrong in ({"zzz": 1}, {"model": 5}, {"model": {}}, {"sampling": {"n": 0}}, {"input": {"path": "x", "zzz": 1}}):
        assert not valid(data(**wrong))
    for section in (schema, *schema["$defs"].values()):
        assert section["additionalProperties"] is False
        assert all(
            "description" in one or "$ref" in one for one in section["properties"].values() if "$ref" not in one
        )


def test_equal_meanings_have_equal_fingerprints():
    pairs = [({"stop": "a"}, {"stop": ["a"]}), ({"temperature": 1}, {"temperature": 1.0}), ({}, {"n": 1})]
    for left, right in pairs:
        prints = [fingerprint(fields(JobSpec.model_validate(data(sampling=one)), "identity")) for one in (left, right)]
        assert prints[0] == prints[1]


def reference() -> str:
    """The tables of `docs/spec.md`."""
    lines = []
    for section in ("", *(name for name, doc in field_docs().items() if doc.resume is None)):
        lines += ["", f"### `{section}`: {field_docs()[section].meaning}" if section else "### The top level", ""]
        lines += ["| field | type | default | kind | meaning |", "|---|---|---|---|---|"]
        for doc in field_docs().values():
            parent, _, name = doc.name.rpartition(".")
            if parent == section:
                default = "unset" if doc.default is None else f"`{json.dumps(doc.default)}`"
                default = "required" if doc.is_required else default if doc.resume else ""
                lines.append(f"| `{name}` | {doc.allowed} | {default} | {doc.resume or 'a section'} | {doc.meaning} |")
    runtime = ", ".join(f"`{name}`" for name in sorted(RUNTIME_ENGINE_ARGUMENTS))
    elsewhere = ", ".join(f"`{name}` (say `{field}`)" for name, field in ENGINE_ARGUMENTS_ELSEWHERE.items())
    lines += ["", f"Under `engine`, these are *runtime*: {runtime}.", "", f"And these are refused: {elsewhere}.", ""]
    return "\n".join(lines)


def reference_page(page: str) -> str:
    """`docs/spec.md` with its tables made anew."""
    return re.sub(
        r"(<!-- tables -->\n).*(<!-- end -->)", lambda ends: ends[1] + reference() + ends[2], page, flags=re.DOTALL
    )


def test_the_reference_is_fresh():
    page = (ROOT / "docs" / "spec.md").read_text()
    assert reference() in page
    assert page == reference_page(page), "docs/spec.md is stale; run: python -m tests.test_spec"


if __name__ == "__main__":
    PAGE = ROOT / "docs" / "spec.md"
    PAGE.write_text(reference_page(PAGE.read_text()))
