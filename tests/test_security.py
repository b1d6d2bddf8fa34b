"""What a stranger's rows, files and models cannot do, and what stays secret. docs/security.md says why for each."""

import ast
import json
import os
import pathlib
import pickle
import stat
import subprocess
import sys
import tempfile
import tracemalloc
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

import batchinf
import jobs
from batchinf.base.errors import InputError, ModelError, RowError, SpecError
from batchinf.fleet.local.backend import LocalBackend
from batchinf.fleet.local.environment import engine_environment
from batchinf.fleet.local.process_group import StoredGroup
from batchinf.manifest.lines import StartedReplica
from batchinf.prompts.builder import PromptBuilder
from batchinf.prompts.encoder import load_tokenizer
from batchinf.prompts.renderer import Renderer
from batchinf.source.files import InputLocation
from batchinf.source.rows import Row, open_source
from batchinf.spec.file import dump_spec, read_spec
from batchinf.spec.job import JobSpec

SECRETS = {
    "HF_TOKEN": "hf_SENTINELTOKEN",
    "HUGGING_FACE_HUB_TOKEN": "hf_SENTINELOLDER",
    "OPENAI_API_KEY": "sk-SENTINELKEY",
    "AWS_SECRET_ACCESS_KEY": "SENTINELAWS",
    "VLLM_API_KEY": "SENTINELVLLM",
    "DB_PASSWORD": "SENTINELPASS",
    "HTTPS_PROXY": "http://user:SENTINELPROXY@localhost:9",
}
# A job that is only to write its files.
FEW: dict[str, Any] = {"input": {"limit": 20}, "parallel": {"data_parallel_size": 1}}
TOUCH = "__import__('pathlib').Path({!r}).touch()"


def touching(path: pathlib.Path) -> str:
    """Python that leaves a trace if it is run."""
    return TOUCH.format(str(path))


# -- spec --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        "!!python/object/apply:os.system ['touch TRACE']",
        "!!python/object/new:subprocess.Popen [[touch, TRACE]]",
        "!!python/name:os.system",
        "!!python/module:os",
        "!!python/tuple [1, 2]",
        "!!binary aGk=",
        "!!set {a, b}",
        "!!timestamp 2020-01-01",
        "!own 1",
    ],
)
def test_no_tag_of_a_spec_makes_an_object(value: str, tmp_path: pathlib.Path) -> None:
    trace = tmp_path / "trace"
    path = tmp_path / "job.yaml"
    path.write_text(
        f"model: m\ninput: {{path: p}}\noutput: {{path: o}}\nengine: {{a: {value.replace('TRACE', str(trace))}}}\n"
    )
    with pytest.raises(SpecError, match=r"is not allowed here|not valid YAML"):
        read_spec(path)
    with pytest.raises(SpecError, match="is not allowed here"):
        read_spec(jobs.spec_of(tmp_path), [f"engine.a={value}"])
    assert not trace.exists()


def test_only_path_fields_expand_the_environment(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "SENTINEL")
    path = jobs.spec_of(
        tmp_path,
        input={"prompt_template": "{{ prompt }} $HF_TOKEN ${HF_TOKEN}"},
        engine={"a": "$HF_TOKEN"},
        sampling={"stop": ["$HF_TOKEN"]},
    )
    assert "SENTINEL" not in read_spec(path).spec.model_dump_json()


@pytest.mark.parametrize("name", ["HF_TOKEN", "MY_API_KEY", "DB_PASSWORD", "CLIENT_SECRET"])
@pytest.mark.parametrize("field", ["model.name", "model.tokenizer", "model.lora", "input.path", "output.path"])
def test_a_secret_is_not_expanded_into_a_path(
    name: str, field: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "SENTINEL")
    with pytest.raises(SpecError, match=name) as caught:
        read_spec(jobs.spec_of(tmp_path), [f"{field}=/data/${name}/x"])
    assert "SENTINEL" not in str(caught.value)


@pytest.mark.parametrize("job", ["/data/$NAME/x", ["~/x", "${NAME}/y"]])
def test_folders_of_other_jobs_are_paths_too(job: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NAME", "a$b")
    monkeypatch.setenv("HOME", "/home/me")
    spec = read_spec(jobs.spec_of(tmp_path, input={"exclude": {"job": job, "on": "id"}})).spec
    assert spec.input.exclude is not None
    assert spec.input.exclude.job == (("/data/a$b/x",) if isinstance(job, str) else ("/home/me/x", "a$b/y"))
    assert read_spec({**yaml.safe_load(dump_spec(spec))}).spec == spec  # job.yaml has it, and is read as it is
    monkeypatch.setenv("HF_TOKEN", "SENTINEL")
    with pytest.raises(SpecError, match=r"input\.exclude\.job.*HF_TOKEN"):
        read_spec(jobs.spec_of(tmp_path, input={"exclude": {"job": "$HF_TOKEN/x", "on": "id"}}))


# -- no pickle, no eval ------------------------------------------------------------------------------------------------


def test_nothing_of_ours_unpickles_or_evaluates() -> None:
    banned = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
    calls = {"eval", "exec", "compile", "__import__"}
    for path in (jobs.ROOT / "batchinf").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Import():
                    assert not banned & {alias.name.split(".")[0] for alias in node.names}, path
                case ast.ImportFrom(module=str(module)):
                    assert module.split(".")[0] not in banned, path
                case ast.Call(func=ast.Name(id="exec"), args=[ast.Constant(value="")]):
                    pass  # of nothing: why is said in `stop_signals`
                case ast.Call(func=ast.Name(id=name)):
                    assert name not in calls, path
                case ast.Call(func=ast.Attribute(attr=name, value=ast.Name(id=owner))):
                    assert (owner, name) not in {("torch", "load"), ("yaml", "load"), ("np", "load")}, path
                case ast.keyword(arg="allow_pickle", value=value):
                    assert isinstance(value, ast.Constant) and value.value is False, path


class _Trap:
    def __init__(self, path: pathlib.Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return pathlib.Path.touch, (self.path,)


@pytest.mark.parametrize("extension", [b"arrow.py_extension_type", b"datasets.features.features.Array2DExtensionType"])
@pytest.mark.parametrize("format", ["arrow", "parquet"])
def test_an_extension_type_of_a_file_runs_nothing(extension: bytes, format: str, tmp_path: pathlib.Path) -> None:
    trace = tmp_path / "trace"
    metadata = {b"ARROW:extension:name": extension, b"ARROW:extension:metadata": pickle.dumps(_Trap(trace))}
    schema = pa.schema([pa.field("prompt", pa.string(), metadata=metadata)])
    table = pa.table([pa.array(["a", "b"])], schema=schema)
    path = tmp_path / f"a.{format}"
    if format == "parquet":
        pq.write_table(table, path)
    else:
        with pa.ipc.new_file(path, schema) as writer:
            writer.write_table(table)
    try:
        source = open_source(InputLocation(str(path)), tmp_path / "cache")
    except InputError as error:
        # `datasets`, once it is imported, reads what its own types say of themselves, as JSON.
        assert extension.startswith(b"datasets") and "damaged" in str(error)  # noqa: PT017
    else:
        assert [row.values["prompt"] for row in source.read(0, 2)] == ["a", "b"]
        source.close()
    assert not trace.exists()


# -- a model's own code ------------------------------------------------------------------------------------------------


def model_with_code(folder: pathlib.Path, trace: pathlib.Path, where: str) -> pathlib.Path:
    """The sample model with code of its own, named in `where`."""
    model = folder / "model"
    model.mkdir()
    for path in jobs.MODEL.iterdir():
        (model / path.name).write_bytes(path.read_bytes())
    (model / "own.py").write_text(
        f"{touching(trace)}\nfrom transformers import LlamaConfig, PreTrainedTokenizerFast\n"
        "class Own(PreTrainedTokenizerFast):\n    pass\nclass OwnConfig(LlamaConfig):\n    model_type = 'own'\n"
    )
    config = json.loads((model / "tokenizer_config.json").read_text())
    own = {"AutoTokenizer": ["own.Own", "own.Own"]}
    if where == "tokenizer_config.json":
        config |= {"tokenizer_class": "Own", "auto_map": own}
    else:
        config.pop("tokenizer_class", None)
        whole = json.loads((model / "config.json").read_text())
        whole |= {"model_type": "own", "auto_map": {**own, "AutoConfig": "own.OwnConfig"}}
        (model / "config.json").write_text(json.dumps(whole))
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    return model


@pytest.mark.parametrize("where", ["tokenizer_config.json", "config.json"])
def test_code_of_the_model_is_not_run_unasked(
    where: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = tmp_path / "trace"
    model = model_with_code(tmp_path, trace, where)
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    try:
        load_tokenizer(str(model), trust_remote_code=False)
    except ModelError as error:
        assert "trust_remote_code" in str(error)  # noqa: PT017
    assert not trace.exists()


def test_trust_stands_in_the_spec_and_nowhere_else(tmp_path: pathlib.Path) -> None:
    assert JobSpec(model={"name": "m"}, input={"path": "p"}, output={"path": "o"}).model.trust_remote_code is False
    spec = jobs.spec_of(tmp_path, scripted=None, engine={"trust_remote_code": True})
    done = jobs.run("validate", spec)
    assert done.returncode == 2
    assert "say model.trust_remote_code instead" in done.stderr


def test_code_of_a_dataset_is_not_run(tmp_path: pathlib.Path) -> None:
    trace = tmp_path / "trace"
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "own.py").write_text(
        f"{touching(trace)}\nimport datasets\nclass Own(datasets.GeneratorBasedBuilder): pass\n"
    )
    for path in (str(folder), str(folder / "own.py")):
        with pytest.raises(InputError):
            open_source(InputLocation(path, "hf"), tmp_path / "cache")
    assert not trace.exists()


# -- templates ---------------------------------------------------------------------------------------------------------


def renderer(template: str) -> Renderer:
    return Renderer(
        JobSpec(model={"name": "m"}, input={"path": "p", "prompt_template": template}, output={"path": "o"})
    )


ESCAPES = [
    "{{ x.__class__.__mro__ }}",
    "{{ x['__class__'] }}",
    "{{ x | attr('__class__') }}",
    "{{ ''.__class__.__base__.__subclasses__() }}{{ x }}",
    "{{ x.__init__.__globals__ }}",
    "{{ range.__self__ }}{{ x }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}{{ x }}",
    "{{ joiner.__init__.__globals__ }}{{ x }}",
    "{{ namespace.__init__.__globals__ }}{{ x }}",
    "{{ self._TemplateReference__context }}{{ x }}",
    "{{ self.__init__.__globals__ }}{{ x }}",
    "{{ '{0.__class__.__mro__}'.format(x) }}",
    "{{ '{0.__class__}'.format_map({'0': x}) }}",
    "{{ ('{0.__cla' ~ 'ss__}').format(x) }}",
    "{{ x | map(attribute='__class__') | list }}",
    "{% set f = '{0.__class__}'.format %}{{ f(x) }}",
    "{{ (x | attr('format')).__self__.__class__ }}",
    "{{ ['{0.__class__}'] | map('format', x) | first }}",
]


@pytest.mark.parametrize("template", ESCAPES)
def test_a_template_does_not_leave_the_sandbox(template: str) -> None:
    found = jobs.or_error(renderer(template).render, Row(0, {"x": "text"}))
    # Refused, or, where a filter knows no attributes, without anything of Python's own in it.
    assert isinstance(found, RowError) or not any(
        word in found for word in ("class ", "module ", "function ", "<bound")
    )


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(99999) %}{{ x * 1000 }}{% endfor %}",
        "{% for i in range(10**9) %}{% endfor %}{{ x }}",
        "{{ x * n }}",
        "{{ n * [x] }}",
    ],
)
def test_a_template_makes_no_endless_text(template: str) -> None:
    tracemalloc.start()
    found = jobs.or_error(renderer(template).render, Row(0, {"x": "text", "n": 10**9}))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert isinstance(found, RowError) and peak < 256 << 20


def test_a_template_does_not_change_the_row() -> None:
    row = Row(0, {"x": ["text"]})
    for template in ("{{ x.append('more') }}", "{{ x.clear() or '' }}"):
        assert isinstance(jobs.or_error(renderer(template).render, row), RowError)
    assert row.values == {"x": ["text"]}


def test_a_row_is_data_and_no_template() -> None:
    for value in ("{{ 7 * 7 }}", "{% for i in range(9) %}x{% endfor %}", "{0.__class__}", "%s %(x)s"):
        assert renderer("{{ x }}").render(Row(0, {"x": value})) == value


# -- paths from rows ---------------------------------------------------------------------------------------------------


def test_paths_in_rows_are_never_opened(tmp_path: pathlib.Path) -> None:
    """Every file that this process opens is told of by Python; a pipe would hang who opens it past Python."""
    import datasets

    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    secret = tmp_path / "secret.txt"
    secret.write_text("SENTINEL")
    paths = [str(pipe), str(secret), f"file://{secret}", "../secret.txt", "/etc/passwd"]
    storage = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    media = pa.array([{"bytes": None, "path": path} for path in paths], storage)
    saved = datasets.Dataset(pa.table({"prompt": paths, "image": media, "audio": media}))
    saved.save_to_disk(tmp_path / "saved")
    info = json.loads((tmp_path / "saved" / "dataset_info.json").read_text())
    info["features"] |= {"image": {"_type": "Image"}, "audio": {"_type": "Audio"}}
    (tmp_path / "saved" / "dataset_info.json").write_text(json.dumps(info))
    pq.write_table(saved.data.table, tmp_path / "a.parquet")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"prompt": path, "image": path}) + "\n" for path in paths))
    opened: list[str] = []
    is_on = [True]
    sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" and is_on else None)
    try:
        tokenizer = load_tokenizer(str(jobs.MODEL), trust_remote_code=False)
        for name in ("saved", "a.parquet", "a.jsonl"):
            source = open_source(InputLocation(str(tmp_path / name)), tmp_path / f"cache {name}")
            rows = source.read(0, len(paths))
            source.read_columns(0, len(paths), source.schema.names)
            spec = JobSpec(model={"name": "m"}, input={"path": "p"}, output={"path": "o"})
            prompts = PromptBuilder(spec, tokenizer, None).build(rows, 512)
            assert [prompt.error for prompt in prompts] == [None] * len(paths)
            source.close()
    finally:
        is_on.clear()
    assert any("a.parquet" in path or "a.jsonl" in path for path in opened)
    assert not {str(pipe), str(secret), "/etc/passwd"} & set(opened)


@pytest.mark.parametrize("name", ["../secret.arrow", "/etc/passwd", "", "..", 5])
def test_a_saved_dataset_names_no_file_outside_of_itself(name: Any, tmp_path: pathlib.Path) -> None:
    import datasets

    datasets.Dataset.from_dict({"prompt": ["a"]}).save_to_disk(tmp_path / "saved")
    datasets.Dataset.from_dict({"prompt": ["SENTINEL"]}).save_to_disk(tmp_path / "other")
    (tmp_path / "secret.arrow").write_bytes(next((tmp_path / "other").glob("*.arrow")).read_bytes())
    state = json.loads((tmp_path / "saved" / "state.json").read_text())
    state["_data_files"] = [{"filename": name}]
    (tmp_path / "saved" / "state.json").write_text(json.dumps(state))
    with pytest.raises(InputError, match="not in the folder"):
        open_source(InputLocation(str(tmp_path / "saved")), tmp_path / "cache")


# -- secrets, permissions, sockets -------------------------------------------------------------------------------------


def everything(folder: pathlib.Path) -> dict[pathlib.Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_secrets_of_the_environment_stand_nowhere(tmp_path: pathlib.Path) -> None:
    spec = jobs.spec_of(tmp_path, **FEW, max_restarts=1)
    stopped = jobs.run("run", spec, faults="replica.start=kill", **SECRETS)
    done = jobs.run("run", spec, **SECRETS)
    seen = [jobs.run(command, tmp_path / "out", **SECRETS) for command in ("status", "head", "report", "check")]
    assert done.returncode == 0, done.stderr
    files = everything(tmp_path / "out")
    assert {"job.yaml", "status.json"} <= {path.name for path in files}
    assert any(path.suffix == ".parquet" for path in files)
    for path, data in files.items():
        assert b"SENTINEL" not in data, path
    for metadata in (pq.read_metadata(path).metadata for path in files if path.suffix == ".parquet"):
        assert b"SENTINEL" not in str(metadata).encode()
    for run in (stopped, done, *seen):
        assert "SENTINEL" not in run.stdout + run.stderr


@pytest.mark.parametrize(
    "url", ["https://me:SENTINEL@host/a.jsonl", "https://host/a.jsonl?X-Amz-Signature=SENTINEL", "$SITE/a.jsonl"]
)
def test_a_url_with_a_secret_is_refused_and_shown_nowhere(
    url: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SITE", "https://me:SENTINEL@host")
    spec = jobs.spec_of(tmp_path)
    for run in (lambda: batchinf.run(spec, overrides=[f"input.path={url}"], quiet=True),
                lambda: batchinf.validate(spec, overrides=[f"input.path={url}"])):  # fmt: skip
        with pytest.raises(SpecError, match="recorded") as caught:
            run()
        assert "SENTINEL" not in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("mask", "bits"), [(0o077, 0o077), (0o022, 0o022)])
def test_files_have_the_users_umask(mask: int, bits: int, tmp_path: pathlib.Path) -> None:
    spec = jobs.spec_of(tmp_path, **FEW)
    before = os.umask(mask)
    try:
        jobs.finish(spec)
    finally:
        os.umask(before)
    paths = [tmp_path / "out", *(tmp_path / "out").rglob("*")]
    assert {path.name for path in paths} >= {"parts", "manifest", "replica-0.log", "job.yaml"}
    for path in paths:
        mode = stat.S_IMODE(path.stat().st_mode)
        assert not mode & bits, (path, oct(mode))
        expected = (0o777 if path.is_dir() else 0o666) & ~mask
        assert mode == expected, (path, oct(mode))


@pytest.mark.slow
@pytest.mark.real_starts  # the environment that a fork was started with is the server's
def test_nothing_of_a_scripted_job_listens_and_its_sockets_folder_is_its_own(tmp_path: pathlib.Path) -> None:
    process = jobs.start("run", jobs.spec_of(tmp_path, scripted={"step_s": 0.05}))
    try:
        jobs.wait_until(lambda: jobs.snapshot_of(tmp_path / "out").get("state") == "running")
        replicas = jobs.replicas_of(process.pid)
        assert replicas
        for one in jobs.family(process.pid):
            assert not [c for c in one.net_connections("inet") if c.status == "LISTEN"]
        for replica in replicas:
            folder = pathlib.Path(replica.environ()["VLLM_RPC_BASE_PATH"])
            assert folder.parent == pathlib.Path(tempfile.gettempdir())
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
            assert folder.stat().st_uid == os.getuid()
    finally:
        jobs.kill(jobs.family(process.pid))
        process.communicate()


def test_a_replica_is_told_to_stay_on_this_host(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = {"VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    for name in wanted:
        monkeypatch.delenv(name, raising=False)
    for devices in ((), ("0", "1")):
        assert engine_environment(devices, 4).items() >= wanted.items()
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    assert "GLOO_SOCKET_IFNAME" not in engine_environment(("0",), 4)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_real_engine_with_its_core_in_a_process_listens_on_loopback_only(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("vllm")
    sampling = {"max_tokens": 400, "ignore_eos": True}
    engine = {"max_model_len": 512, "max_num_seqs": 4}
    spec = jobs.spec_of(tmp_path, scripted=None, parallel={"data_parallel_size": 1}, sampling=sampling, engine=engine)
    process = jobs.start("run", spec, VLLM_ENABLE_V1_MULTIPROCESSING="1")
    try:
        jobs.wait_until(lambda: jobs.snapshot_of(tmp_path / "out").get("state") == "running", 500)
        everyone = jobs.family(process.pid)
        assert len(jobs.engine_cores_of(process.pid)) == 1
        listening = [c.laddr.ip for one in everyone for c in one.net_connections("inet") if c.status == "LISTEN"]
        bound = [c.laddr.ip for one in everyone for c in one.net_connections("udp") if c.laddr]
        # Gloo's, for one: were there none at all, this test would see nothing.
        assert listening
        assert {*listening, *bound} <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
    finally:
        jobs.kill(jobs.family(process.pid))
        process.communicate()


# -- the output folder -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["parts", "journal", "staging", "manifest", "logs", "source"])
def test_a_planted_link_is_refused(name: str, tmp_path: pathlib.Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious").write_text("x")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).symlink_to(elsewhere)
    done = jobs.run("run", jobs.spec_of(tmp_path))
    assert done.returncode == 2
    assert "link" in done.stderr
    assert "Traceback" not in done.stderr
    assert [path.name for path in elsewhere.iterdir()] == ["precious"]


def test_the_output_folder_itself_may_be_a_link(tmp_path: pathlib.Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "disk")
    jobs.finish(jobs.spec_of(tmp_path, **FEW))
    assert len(jobs.rows_of(tmp_path / "disk")) == FEW["input"]["limit"]


def test_a_file_of_the_job_that_is_a_link_is_replaced_not_followed(tmp_path: pathlib.Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("x")
    (tmp_path / "out").mkdir()
    for name in ("job.yaml", "status.json"):
        (tmp_path / "out" / name).symlink_to(precious)
    jobs.finish(jobs.spec_of(tmp_path, **FEW))
    assert precious.read_text() == "x"


def test_a_log_that_is_a_link_is_not_followed(tmp_path: pathlib.Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("x")
    (tmp_path / "out" / "logs").mkdir(parents=True)
    (tmp_path / "out" / "logs" / "replica-0.log").symlink_to(precious)
    done = jobs.run("run", jobs.spec_of(tmp_path))
    assert done.returncode == 2
    assert "link" in done.stderr
    assert precious.read_text() == "x"


def test_words_of_strangers_do_not_reach_the_terminal_raw(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"\x1b[2J\x1b]0;owned\x07": "x"}) + "\n")
    done = jobs.run("validate", jobs.spec_of(tmp_path, input={"path": str(path)}))
    assert done.returncode == 2
    assert "\x1b" not in done.stderr + done.stdout
    assert "owned" in done.stderr


@pytest.mark.parametrize("pgid", [0, 1, -1, "7", 2**40, None])
def test_process_groups_that_were_never_replicas_are_not_ended(pgid: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A group of 0 would be the reader's own."""
    signals: list[Any] = []
    monkeypatch.setattr(psutil.Process, "kill", signals.append)
    # A live group with its leader. The tests' own group may have lost its leader, and so its start time.
    sleeper = subprocess.Popen(["sleep", "60"], start_new_session=True)
    own = StoredGroup.of(sleeper.pid).model_dump()
    named = [{**own, "pgid": pgid}, {**own, "boot_id": "another"}, {**own, "host": "another"}, {"pgid": pgid}, {}]
    named.append({**own, "pid_start_time": own["pid_start_time"] + 1})
    leftovers = [StartedReplica(0, "000001.0001", "local", identity) for identity in named]
    leftovers.append(StartedReplica(0, "000001.0001", "another backend", own))
    try:
        LocalBackend().end_leftovers(leftovers, None)
    finally:
        sleeper.kill()
        sleeper.wait()
    assert not signals
