"""Finding a model: folders by content, hub ids by commit (from a hub on 127.0.0.1), weights whole, sampling filled."""

import json
import os
import pathlib
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hub_server import Hub, serving

from batchinf.base.errors import ModelError, SpecError
from batchinf.model import files
from batchinf.model import files as model_files
from batchinf.model.model import (
    Model,
    check_weights,
    derive_max_model_len,
    resolve,
    resolve_sampling,
    sampling_defaults,
)
from batchinf.spec.job import ModelSpec
from batchinf.spec.sampling import SamplingSpec

ROOT = pathlib.Path(__file__).parents[2]
CONFIG = {"model_type": "llama", "max_position_embeddings": 512, "vocab_size": 384}
TENSORS = {"embed.weight": [384, 8], "lm_head.weight": [384, 8], "norm.weight": [8]}


def weights(tensors: dict[str, list[int]] = TENSORS, fill: bytes = b"\1\2\3\4", num_bytes: int | None = None) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in tensors.items():
        size = 4
        for length in shape:
            size *= length
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + fill * ((end if num_bytes is None else num_bytes) // len(fill))


def model_content(**more: bytes) -> dict[str, bytes]:
    return {
        "config.json": json.dumps(CONFIG).encode(),
        "generation_config.json": b'{"temperature": 0.6, "eos_token_id": [1, 2]}',
        "tokenizer.json": b'{"version": "1.0"}',
        "tokenizer_config.json": b'{"chat_template": "{{ messages }}"}',
        "model.safetensors": weights(),
        "README.md": b"read me",
        **more,
    }


def write(folder: pathlib.Path, content: dict[str, bytes]) -> pathlib.Path:
    for name, data in content.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    return write(tmp_path / "tiny", model_content())


def spec(name: object, **more: Any) -> ModelSpec:
    return ModelSpec(name=str(name), **more)


def refusal(call: Callable[[], object], kind: type[Exception] = ModelError) -> str:
    with pytest.raises(kind) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


# Folders


def test_a_folder_says_what_it_is(folder: pathlib.Path) -> None:
    model = resolve(spec(folder))
    assert model == Model(
        name=str(folder),
        path=str(folder),
        commit=None,
        fingerprint=model.fingerprint,
        config=CONFIG,
        generation_config={"temperature": 0.6, "eos_token_id": [1, 2]},
        has_chat_template=True,
        max_model_len=512,
        vocab_size=384,
        tokenizer=str(folder),
        folder=str(folder),
    )
    assert len(model.fingerprint) == 32


def test_a_folder_is_given_to_other_processes_as_absolute(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)
    assert resolve(spec("tiny")).path == resolve(spec("./tiny")).path == str(folder)


def test_what_a_folder_need_not_have(tmp_path: pathlib.Path) -> None:
    model = resolve(spec(write(tmp_path / "bare", {"config.json": b"{}"}), load_format="dummy"))
    assert (model.generation_config, model.has_chat_template) == ({}, False)
    assert (model.max_model_len, model.vocab_size) == (None, None)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"tokenizer_config.json": b"{}"}, False),
        ({"tokenizer_config.json": b"{}", "chat_template.jinja": b"{{ messages }}"}, True),
        ({"tokenizer_config.json": b"{}", "chat_template.json": b"{}"}, True),
        ({"tokenizer_config.json": b'{"chat_template": [{"name": "default", "template": "x"}]}'}, True),
    ],
)
def test_chat_templates_are_found(folder: pathlib.Path, content: dict[str, bytes], expected: bool) -> None:
    assert resolve(spec(write(folder, content))).has_chat_template is expected


def test_the_same_content_elsewhere_is_the_same_model(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    before = resolve(spec(folder)).fingerprint
    copy = shutil.copytree(folder, tmp_path / "elsewhere" / "renamed")
    for path in copy.rglob("*"):
        os.utime(path, (1, 1))
    write(copy, {"README.md": b"other words", "training_args.bin": b"x", "runs/log.txt": b"x"})
    assert resolve(spec(copy)).fingerprint == before


@pytest.mark.parametrize(
    "content",
    [
        {"config.json": json.dumps({**CONFIG, "vocab_size": 385}).encode()},
        {"generation_config.json": b'{"temperature": 0.7}'},
        {"tokenizer.json": b'{"version": "1.1"}'},
        {"tokenizer_config.json": b'{"chat_template": "{{ message }}"}'},
        {"chat_template.jinja": b""},
        {"additional_chat_templates/tools.jinja": b""},
        {"model.safetensors": weights({**TENSORS, "norm.weight": [2, 4]})},
        {"model.safetensors": weights({**TENSORS, "bias": [8]})},
        {"model.safetensors": weights(fill=b"\1\2\3\5")},
        {"model.safetensors": weights().replace(b"F32", b"I32")},
        {"model-2.safetensors": weights()},
    ],
    ids=lambda content: next(iter(content)),
)
def test_other_content_is_another_model(folder: pathlib.Path, content: dict[str, bytes]) -> None:
    before = resolve(spec(folder)).fingerprint
    assert resolve(spec(write(folder, content))).fingerprint != before


def test_code_counts_where_it_is_run(folder: pathlib.Path) -> None:
    before = [resolve(spec(folder, trust_remote_code=trust)).fingerprint for trust in (False, True)]
    write(folder, {"modeling_tiny.py": b"pass"})
    after = [resolve(spec(folder, trust_remote_code=trust)).fingerprint for trust in (False, True)]
    assert (after[0] == before[0], after[1] == before[1]) == (True, False)


def test_weights_do_not_count_where_they_are_random(folder: pathlib.Path) -> None:
    before = resolve(spec(folder, load_format="dummy")).fingerprint
    (folder / "model.safetensors").unlink()
    assert resolve(spec(folder, load_format="dummy")).fingerprint == before


def test_a_tokenizer_of_its_own(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    other = write(tmp_path / "other", {"tokenizer.json": b"{}"})
    plain, model = resolve(spec(folder)), resolve(spec(folder, tokenizer=str(other)))
    assert (model.tokenizer, model.path, model.has_chat_template) == (str(other), str(folder), False)
    assert model.fingerprint.startswith(f"{plain.fingerprint}, tokenizer ")
    write(other, {"tokenizer.json": b"{ }"})
    assert resolve(spec(folder, tokenizer=str(other))).fingerprint != model.fingerprint


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("/nowhere/at/all", "model.name: there is no folder '/nowhere/at/all'; a Hugging Face id would be 'org/name'"),
        ("./absent", "model.name: there is no folder 'absent'; a Hugging Face id would be 'org/name'"),
        ("./tiny2", "model.name: there is no folder 'tiny2'; did you mean ./tiny?"),
        ("a/b/c", "model.name: there is no folder 'a/b/c'; a Hugging Face id would be 'org/name'"),
        ("two words", "model.name: 'two words' is neither a folder here nor a Hugging Face id (org/name)"),
        ("tiny/config.json", "model.name: 'tiny/config.json' is a file; give the folder that holds config.json and the "
         "weights"),
        ("empty", "model.name: 'empty' has no config.json; give a model in the Hugging Face format"),
        ("cut", "cut/config.json is not JSON (Unterminated string starting at: line 1 column 2 (char 1)); "
         "get the file again"),
        ("list", "list/config.json holds a list, not a JSON object; get the file again"),
        ("lfs", "lfs/config.json is a git-lfs pointer in place of the file; run `git lfs pull` in lfs"),
    ],
)  # fmt: skip
def test_what_is_no_model(folder: pathlib.Path, name: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 600\n"
    for other, config in {"cut": b'{"a', "list": b"[]", "lfs": pointer}.items():
        write(folder.parent / other, {"config.json": config})
    (folder.parent / "empty").mkdir()
    assert refusal(lambda: resolve(spec(name))).replace(f"{folder.parent}/", "") == message


def test_a_folder_has_no_revision(folder: pathlib.Path) -> None:
    assert refusal(lambda: resolve(spec(folder, revision="main"))) == (
        f"model.revision: got 'main', but '{folder}' is a folder here and has no revisions"
    )


# Weights


INDEX = json.dumps({"weight_map": {"a": "a.safetensors", "b": "b.safetensors", "c": "c.safetensors"}}).encode()
BIN_INDEX = json.dumps({"weight_map": {"a": "a.bin", "b": "b.bin"}}).encode()
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 24960\n"
AGAIN = "Copy them again, or get them with `hf download ORG/MODEL --local-dir FOLDER`"


@pytest.mark.parametrize(
    ("content", "load_format", "problem"),
    [
        ({"model.safetensors": weights()}, "auto", None),
        ({"model.safetensors": weights() + b"more"}, "safetensors", None),
        ({"pytorch_model.bin": b"x"}, "auto", None),
        ({"consolidated.safetensors": weights()}, "mistral", None),
        ({}, "dummy", None),
        ({}, "tensorizer", None),
        ({"model.safetensors.index.json": INDEX, **dict.fromkeys(["a.safetensors", "b.safetensors", "c.safetensors"],
          weights())}, "auto", None),
        ({"pytorch_model.bin.index.json": BIN_INDEX, "a.bin": b"x", "b.bin": b"x"}, "auto", None),
        ({"model.safetensors": weights()[:-1]}, "auto",
         f"model.safetensors is cut short (24,896 of 24,897 bytes). {AGAIN}"),
        ({"model.safetensors": weights()[:100]}, "auto",
         f"model.safetensors is cut short, or no safetensors file (100 bytes). {AGAIN}"),
        ({"model.safetensors": b""}, "auto",
         f"model.safetensors is cut short, or no safetensors file (0 bytes). {AGAIN}"),
        ({"model.safetensors": struct.pack("<Q", 4) + b"[{}]" + b"x" * 9}, "auto",
         f"model.safetensors is cut short, or no safetensors file (21 bytes). {AGAIN}"),
        ({"model.safetensors": POINTER}, "auto",
         "model.safetensors is a git-lfs pointer in place of the weights. Get them with `git lfs pull` in FOLDER"),
        ({"model.safetensors.index.json": INDEX, "a.safetensors": weights(), "b.safetensors": weights()[:-4]}, "auto",
         f"b.safetensors is cut short (24,893 of 24,897 bytes); c.safetensors is missing. {AGAIN}"),
        ({"model.safetensors.index.json": json.dumps({"weight_map": {str(i): f"{i}.safetensors" for i in range(9)}})
          .encode()}, "auto",
         f"0.safetensors is missing; 1.safetensors is missing; 2.safetensors is missing; and 6 more. {AGAIN}"),
        ({"pytorch_model.bin.index.json": BIN_INDEX, "a.bin": b"", "training_args.bin": b"x"}, "auto",
         f"a.bin is empty; b.bin is missing. {AGAIN}"),
        ({"training_args.bin": b"x", "README.md": b"x"}, "auto",
         "the folder has no weights (consolidated*.safetensors, *.safetensors, *.bin, *.pt). " + AGAIN),
        ({"pytorch_model.bin": b"x"}, "safetensors", f"the folder has no weights (*.safetensors). {AGAIN}"),
    ],
)  # fmt: skip
def test_weights_are_whole_or_named(
    tmp_path: pathlib.Path, content: dict[str, bytes], load_format: str, problem: str | None
) -> None:
    model = resolve(spec(write(tmp_path / "m", {"config.json": b"{}", **content}), load_format=load_format))
    if problem is None:
        check_weights(model, load_format)
        return
    message = refusal(lambda: check_weights(model, load_format)).replace(model.path, "FOLDER")
    assert message == f"the weights of 'FOLDER' are not whole: {problem}"


def test_an_index_of_another_kind(tmp_path: pathlib.Path) -> None:
    folder = write(tmp_path / "m", {"config.json": b"{}", "model.safetensors.index.json": b"{}"})
    assert refusal(lambda: resolve(spec(folder))) == (
        f"{folder}/model.safetensors.index.json has no weight_map; get the file again"
    )


def test_headers_are_all_that_is_read_of_large_weights(tmp_path: pathlib.Path) -> None:
    folder = write(
        tmp_path / "m", {"config.json": b"{}", "model.safetensors": weights({"a": [1 << 20, 1 << 14]}, num_bytes=0)}
    )
    # 64 GiB, of which nothing is on the disk: who reads them needs more memory than there is.
    os.truncate(folder / "model.safetensors", 200 + (1 << 36))
    before = pathlib.Path("/proc/self/io").read_text().split()
    model = resolve(spec(folder))
    check_weights(model, "auto")
    after = pathlib.Path("/proc/self/io").read_text().split()
    assert int(after[1]) - int(before[1]) < 1 << 26  # bytes read
    assert model_files.read_header(folder / "model.safetensors")[0]["a"]["shape"] == [1 << 20, 1 << 14]


# The hub


OLD, NEW = "a" * 40, "b" * 40


@pytest.fixture
def server(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.chdir(tmp_path)
    with serving(tmp_path, monkeypatch) as server:
        server.refs["org/tiny"] = {"main": NEW, "v1": OLD}
        server.commits = {OLD: model_content(), NEW: model_content(**{"additional_chat_templates/tools.jinja": b"x"})}
        yield server


def snapshot(commit: str) -> str:
    from huggingface_hub import constants

    return str(pathlib.Path(constants.HF_HUB_CACHE) / "models--org--tiny" / "snapshots" / commit)


def go_offline(server: Hub) -> None:
    from huggingface_hub import close_session

    close_session()
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(("revision", "commit"), [(None, NEW), ("main", NEW), ("v1", OLD), (OLD, OLD)])
def test_a_hub_id_is_known_by_its_commit(server: Hub, revision: str | None, commit: str) -> None:
    model = resolve(spec("org/tiny", revision=revision))
    assert (model.commit, model.fingerprint) == (commit, f"org/tiny@{commit}")
    assert (model.tokenizer, model.has_chat_template, model.max_model_len) == (snapshot(commit), True, 512)
    # The weights are the engine's to fetch.
    assert model.path == "org/tiny"
    names = {str(path.relative_to(snapshot(commit))) for path in pathlib.Path(snapshot(commit)).rglob("*.*")}
    assert names == server.commits[commit].keys() - {"README.md", "model.safetensors"}
    check_weights(model, "auto")


def test_a_model_in_the_cache_is_given_as_its_folder(server: Hub) -> None:
    resolve(spec("org/tiny"))
    assert resolve(spec("org/tiny", load_format="dummy")).path == snapshot(NEW)
    write(pathlib.Path(snapshot(NEW)), {"model.safetensors": weights()})
    assert resolve(spec("org/tiny")).path == snapshot(NEW)
    num_asked = len(server.asked)
    assert resolve(spec("org/tiny", revision=NEW)).path == snapshot(NEW)
    assert len(server.asked) == num_asked


@pytest.mark.parametrize("how", ["offline", "down", "gone", "moved", "gated", "broken"])
def test_without_a_hub_the_cache_serves(server: Hub, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = resolve(spec("org/tiny"))
    if how == "offline":
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    elif how == "down":
        go_offline(server)
    elif how == "gone":
        del server.refs["org/tiny"]
    elif how == "moved":
        server.refs["org/tiny"] = {}
    elif how == "gated":
        server.gated_files.add("org/tiny")
        server.refs["org/tiny"]["main"] = OLD
    else:
        server.refusals["org/tiny"] = (503, {})
    after = resolve(spec("org/tiny"))
    assert (after.fingerprint, after.path) == (before.fingerprint, snapshot(NEW))
    assert refusal(lambda: check_weights(after, "auto")) == (
        "the weights of 'org/tiny' are not whole: the folder has no weights (consolidated*.safetensors, "
        f"*.safetensors, *.bin, *.pt). Get them with `hf download org/tiny --revision {NEW}`"
    )
    write(pathlib.Path(after.path), {"model.safetensors": weights()[:-1]})
    assert refusal(lambda: check_weights(after, "auto")).endswith(f"--revision {NEW} --force-download`")


def test_a_tokenizer_from_the_hub(server: Hub, folder: pathlib.Path) -> None:
    model = resolve(spec(folder, tokenizer="org/tiny"))
    assert (model.path, model.commit, model.tokenizer) == (str(folder), None, snapshot(NEW))
    assert model.fingerprint == f"{resolve(spec(folder)).fingerprint}, tokenizer org/tiny@{NEW}"


@pytest.mark.parametrize("revision", [None, "main"])
def test_what_a_job_began_with_is_gone_on_with(server: Hub, folder: pathlib.Path, revision: str | None) -> None:
    began_as = f"org/tiny@{OLD}"
    model = resolve(spec("org/tiny", revision=revision), began_as)
    assert (model.commit, model.fingerprint) == (OLD, began_as)
    # Cached whole, it is not asked about.
    write(pathlib.Path(snapshot(OLD)), {"model.safetensors": weights()})
    server.asked.clear()
    assert resolve(spec("org/tiny", revision=revision), began_as).path == snapshot(OLD)
    assert server.asked == []
    # Of another model it says nothing.
    assert resolve(spec("org/tiny", revision=revision), f"org/other@{OLD}").commit == NEW
    assert resolve(spec(folder), began_as) == resolve(spec(folder))
    with_tokenizer = f"{resolve(spec(folder)).fingerprint}, tokenizer {began_as}"
    model = resolve(spec(folder, tokenizer="org/tiny"), with_tokenizer)
    assert (model.tokenizer, model.fingerprint) == (snapshot(OLD), with_tokenizer)


def test_a_commit_that_is_nowhere_any_more(server: Hub) -> None:
    message = refusal(lambda: resolve(spec("org/tiny"), "org/tiny@" + "c" * 40))
    assert message.replace(server.url, "HUB") == (
        f"model.name: 'org/tiny' has no revision '{'c' * 40}'; its branches and tags are at HUB/org/tiny/tree/main. "
        "The job began with this commit: restore it, or start a new job"
    )


@pytest.mark.parametrize(
    ("name", "revision", "answer", "message"),
    [
        ("org/none", None, None,
         "model.name: there is no folder 'org/none', nor a model 'org/none' on the hub; check the name; "
         "a private one needs `hf auth login`"),
        ("gpt3", None, None,
         "model.name: there is no folder 'gpt3', nor a model 'gpt3' on the hub; check the name; "
         "a private one needs `hf auth login`"),
        ("near/tyni", None, None,
         "model.name: there is no 'tyni' in the folder 'HERE/near', nor a model 'near/tyni' on the hub; check the "
         "name; a private one needs `hf auth login`"),
        ("org/gated", None, (403, {"X-Error-Code": "GatedRepo"}),
         "model.name: 'org/gated' is gated; accept its licence at HUB/org/gated, then run `hf auth login`"),
        ("org/gated", None, (401, {"X-Error-Code": "GatedRepo"}),
         "model.name: 'org/gated' is gated; accept its licence at HUB/org/gated, then run `hf auth login`"),
        ("org/tiny", "v9", None,
         "model.name: 'org/tiny' has no revision 'v9'; its branches and tags are at HUB/org/tiny/tree/main"),
        ("org/mine", None, (401, {"X-Error-Message": "Invalid credentials in Authorization header"}),
         "model.name: the hub refuses this machine's token for 'org/mine'; run `hf auth login`"),
        ("org/busy", "v1", (503, {}),
         "model.name: there is no folder 'org/busy', nor a model in the hub cache, and the hub answered with status "
         "503; run `hf download org/busy --revision v1` where there is a network"),
    ],
)  # fmt: skip
def test_why_the_hub_gives_nothing(
    server: Hub, name: str, revision: str | None, answer: tuple[int, dict[str, str]] | None, message: str
) -> None:
    pathlib.Path("near").mkdir()
    if answer is not None:
        server.refusals[name] = answer
    assert (
        refusal(lambda: resolve(spec(name, revision=revision))).replace(server.url, "HUB").replace(os.getcwd(), "HERE")
        == message
    )


def test_a_gate_before_the_files_only(server: Hub) -> None:
    server.gated_files.add("org/tiny")
    assert refusal(lambda: resolve(spec("org/tiny"))).replace(server.url, "HUB") == (
        "model.name: 'org/tiny' is gated; accept its licence at HUB/org/tiny, then run `hf auth login`"
    )


def test_offline_is_said(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert refusal(lambda: resolve(spec("org/tiny", revision="v1"))) == (
        "model.name: there is no folder 'org/tiny', nor a model in the hub cache, and HF_HUB_OFFLINE is set; unset it, "
        "or run `hf download org/tiny --revision v1` first"
    )
    pathlib.Path("org").mkdir()
    assert refusal(lambda: resolve(spec("org/tiny"))) == (
        f"model.name: there is no 'tiny' in the folder '{os.getcwd()}/org', nor a model in the hub cache, and "
        "HF_HUB_OFFLINE is set; check the name"
    )
    assert refusal(lambda: resolve(spec("config.json"))) == (
        "model.name: there is no file 'config.json', nor a model in the hub cache, and HF_HUB_OFFLINE is set; check "
        "the name"
    )
    assert server.asked == []


def test_a_hub_that_does_not_answer_is_not_waited_for(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_TIMEOUT_S", 1.0)
    server.delay_s = 60.0
    started = time.monotonic()
    assert refusal(lambda: resolve(spec("org/tiny"))).endswith("`hf download org/tiny` where there is a network")
    assert time.monotonic() - started < 30


def test_a_name_server_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    hanging = threading.Event()
    monkeypatch.setattr(files, "_TIMEOUT_S", 0.2)
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda *_, **__: hanging.wait())
    started = time.monotonic()
    assert "cannot be reached (no answer in 0 s)" in refusal(lambda: resolve(spec("org/absent")))
    assert time.monotonic() - started < 30
    hanging.set()


def test_without_a_network_it_fails_in_seconds_and_imports_nothing_heavy(tmp_path: pathlib.Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    code = (
        "import sys; from batchinf.model.model import resolve; from batchinf.spec.job import ModelSpec\n"
        "try: resolve(ModelSpec(name='org/tiny'))\n"
        "except Exception as error: print(type(error).__name__, error)\n"
        "print({'torch', 'transformers', 'vllm'} & sys.modules.keys())"
    )
    environment = {"HF_ENDPOINT": f"http://127.0.0.1:{port}", "HF_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "TRANSFORMERS_"))}
    run = subprocess.run(
        [sys.executable, "-c", code], env={**kept, **environment}, cwd=tmp_path, capture_output=True, text=True,
        timeout=60, check=True,
    )  # fmt: skip
    assert run.stdout.splitlines() == [
        "ModelError model.name: there is no folder 'org/tiny', nor a model in the hub cache, and the hub cannot be "
        "reached ([Errno 111] Connection refused); run `hf download org/tiny` where there is a network",
        "set()",
    ]


# What a config says


@pytest.mark.parametrize(
    ("config", "length"),
    [
        ({}, None),
        ({"max_position_embeddings": None}, None),
        ({"n_positions": 1024}, 1024),
        ({"max_position_embeddings": 4096, "max_seq_len": 2048}, 2048),
        ({"max_position_embeddings": 8192, "model_max_length": 131072}, 131072),
        ({"text_config": {"max_position_embeddings": 32768}, "max_position_embeddings": 1}, 32768),
        ({"thinker_config": {"text_config": {"max_position_embeddings": 32768}}}, 32768),
        ({"text_config": {"hidden_size": 8}, "seq_length": 2048}, 2048),
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": 4.0}}, 16384),
        ({"max_position_embeddings": 4096, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, 8192),
        ({"max_position_embeddings": 4096, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, 4096),
        ({"max_position_embeddings": 131072, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 131072),
        ({"max_position_embeddings": 131072, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 131072),
        (
            {"max_position_embeddings": 131072, "original_max_position_embeddings": 4096,
             "rope_scaling": {"type": "longrope"}}, 4096,
        ),
        ({"model_type": "gemma3_text", "max_position_embeddings": 131072,
          "rope_scaling": {"rope_type": "linear", "factor": 8.0}}, 131072),
        ({"max_position_embeddings": 4096, "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 2.0}, "sliding_attention": {"rope_type": "default"},
         }}, 8192),
    ],
)  # fmt: skip
def test_the_longest_sequence(config: dict[str, Any], length: int | None) -> None:
    assert derive_max_model_len(config) == length


def test_the_vocabulary_of_a_text_section(tmp_path: pathlib.Path) -> None:
    config = json.dumps({"vocab_size": 5, "text_config": {"vocab_size": 7}}).encode()
    assert resolve(spec(write(tmp_path / "m", {"config.json": config}), load_format="dummy")).vocab_size == 7


# Sampling


DEFAULTS = {
    "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0,
    "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "max_tokens": None,
}  # fmt: skip


@pytest.mark.parametrize(
    ("given", "generation_config", "expected", "origins"),
    [
        ({}, {}, {}, {}),
        (
            {"temperature": 0.2, "max_tokens": 5},
            {"temperature": 0.6, "top_k": 20, "max_new_tokens": 99},
            {"temperature": 0.2, "top_k": 20, "max_tokens": 5},
            {"temperature": "spec", "top_k": "generation_config", "max_tokens": "spec"},
        ),
        (
            {"temperature": 0.0, "top_k": 0},
            {"temperature": 0.6, "top_k": 20},
            {"temperature": 0.0, "top_k": 0},
            {"temperature": "spec", "top_k": "spec"},
        ),
        (
            {},
            {"top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.05, "presence_penalty": 1.5, "frequency_penalty": -1,
             "max_new_tokens": 99, "top_k": -1},
            {"top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.05, "presence_penalty": 1.5, "frequency_penalty": -1.0,
             "max_tokens": 99, "top_k": 0},
            dict.fromkeys(["top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
                           "max_tokens", "top_k"], "generation_config"),
        ),
        # What vLLM's rule leaves out.
        ({}, {"do_sample": False, "max_length": 20, "eos_token_id": [1, 2], "temperature": None, "n": 4}, {}, {}),
    ],
)  # fmt: skip
def test_sampling_is_filled(
    given: dict[str, Any], generation_config: dict[str, Any], expected: dict[str, Any], origins: dict[str, str]
) -> None:
    sampling, told = resolve_sampling(SamplingSpec(stop="x", seed=7, **given), generation_config)
    assert sampling == SamplingSpec(stop="x", seed=7, **{**DEFAULTS, **expected})
    assert told == {**dict.fromkeys(DEFAULTS, "default"), **origins}
    assert resolve_sampling(sampling, {"temperature": 0.123})[0] == sampling


@pytest.mark.parametrize(
    ("given", "generation_config", "message"),
    [
        (
            {"n": 3},
            {"temperature": 0.0, "top_k": 5},
            "sampling.n: got 3 with temperature 0; greedy samples are all equal: set n to 1, or a temperature above 0 "
            "(from the model's generation_config: temperature=0.0, top_k=5)",
        ),
        (
            {"min_tokens": 300},
            {"max_new_tokens": 256},
            "sampling.min_tokens: got 300 with max_tokens 256; must not be above it "
            "(from the model's generation_config: max_tokens=256)",
        ),
        (
            {},
            {"top_p": 0},
            "sampling.top_p: input should be greater than 0, but the model's generation_config has 0; "
            "set it in the spec",
        ),
        (
            {},
            {"max_new_tokens": "many"},
            "sampling.max_tokens: input should be a valid integer, but the model's generation_config has 'many'; "
            "set it in the spec",
        ),
    ],
)
def test_sampling_that_cannot_be(given: dict[str, Any], generation_config: dict[str, Any], message: str) -> None:
    assert refusal(lambda: resolve_sampling(SamplingSpec(**given), generation_config), SpecError) == message


def test_the_rule_is_vllms() -> None:
    """The keys that count are read from the installed vLLM's own text, where it is installed."""
    import importlib.util

    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:
        pytest.skip("vLLM is not installed")
    text = (pathlib.Path(found.origin).parent / "config" / "model.py").read_text(encoding="utf-8")
    rule = text.split("available_params = [")[1].split("]")[0]
    keys = {key.strip(' \n"') for key in rule.split(",")} - {""}
    assert keys == {"max_new_tokens" if field == "max_tokens" else field for field in DEFAULTS}


def test_sampling_defaults_can_be_vllms_or_anothers(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    model = resolve(spec(folder))
    other = write(tmp_path / "other", {"generation_config.json": b'{"top_k": 5}'})
    assert sampling_defaults(model, {}) == model.generation_config
    assert sampling_defaults(model, {"generation_config": "vllm"}) == {}
    assert sampling_defaults(model, {"generation_config": str(other)}) == {"top_k": 5}
    assert sampling_defaults(model, {"override_generation_config": {"temperature": 0.1}})["temperature"] == 0.1
    assert refusal(lambda: sampling_defaults(model, {"generation_config": "none"})) == (
        "engine.generation_config: got 'none', where there is no generation_config.json"
    )
