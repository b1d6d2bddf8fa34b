"""Every byte of a model's local files counts, each file is read once, and a changed file is never taken for another."""

import dataclasses
import json
import os
import pathlib
import shutil
from typing import Any

import pytest
import xxhash
from adapters import make_adapter

import jobs
from batchinf.base.errors import DriftError, ModelError
from batchinf.model import content
from batchinf.model.content import Contents, check_unchanged
from batchinf.model.lora import resolve_adapters
from batchinf.model.model import resolve
from batchinf.spec.job import JobSpec

DENSE = [{"type": "sentence_transformers.models.Transformer", "path": ""},
         {"type": "sentence_transformers.models.Dense", "path": "2_Dense"}]  # fmt: skip


@pytest.fixture(autouse=True)
def cache(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """The user's cache, which takes files that have just been written, too."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(content, "_SETTLED_NS", -(10**9))
    return tmp_path / "cache" / "batchinf" / "digests"


def contents(model: dict[str, Any]) -> Contents:
    column = {"adapter_column": "adapter"} if "lora" in model else {}
    spec = JobSpec(model=model, input={"path": "x.jsonl", **column}, output={"path": "out"})
    found = resolve(spec.model)
    return Contents(found, spec.model, resolve_adapters(spec, found))


def digested(model: dict[str, Any]) -> Contents:
    found = contents(model)
    found.start()
    jobs.wait_until(lambda: found.is_known)
    return found


def everything(folder: pathlib.Path) -> dict[str, Any]:
    """A model with a file of each kind, and the section of the spec that uses them."""
    model, tokenizer = folder / "model", folder / "tokenizer"
    shutil.copytree(jobs.MODEL, model)
    shutil.copytree(jobs.MODEL, tokenizer, ignore=shutil.ignore_patterns("*.safetensors"))
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    (model / "model.safetensors").rename(model / names[0])
    shutil.copy(model / names[0], model / names[1])
    index = {"weight_map": {f"tensor {name}": name for name in names}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    (model / "modules.json").write_text(json.dumps(DENSE))
    (model / "2_Dense").mkdir()
    (model / "2_Dense" / "config.json").write_text('{"in_features": 128, "out_features": 48}')
    (model / "2_Dense" / "model.safetensors").write_bytes(os.urandom(500))
    (model / "code").mkdir()
    for name in ("modeling.py", "code/layers.py"):
        (model / name).write_text("pass")
    make_adapter(folder / "adapter", 1)
    return {
        "name": str(model),
        "tokenizer": str(tokenizer),
        "trust_remote_code": True,
        "lora": {"sql": str(folder / "adapter")},
    }


# By the name that people see: the file.
FILES = {
    "config.json": "model/config.json",
    "generation_config.json": "model/generation_config.json",
    "chat_template.jinja": "model/chat_template.jinja",
    "tokenizer.json": "model/tokenizer.json",
    "modules.json": "model/modules.json",
    "2_Dense/config.json": "model/2_Dense/config.json",
    "2_Dense/model.safetensors": "model/2_Dense/model.safetensors",
    "modeling.py": "model/modeling.py",
    "code/layers.py": "model/code/layers.py",
    "model-00001-of-00002.safetensors": "model/model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors": "model/model-00002-of-00002.safetensors",
    "tokenizer/tokenizer.json": "tokenizer/tokenizer.json",
    "tokenizer/tokenizer_config.json": "tokenizer/tokenizer_config.json",
    "tokenizer/chat_template.jinja": "tokenizer/chat_template.jinja",
    "lora/sql/adapter_config.json": "adapter/adapter_config.json",
    "lora/sql/adapter_model.safetensors": "adapter/adapter_model.safetensors",
}


def change(path: pathlib.Path) -> None:
    """Change the last byte of weights, and text behind the end of other files; the size of weights stays."""
    data = bytearray(path.read_bytes())
    if path.suffix == ".json":
        data += b"\n"
    elif path.suffix in (".py", ".jinja"):
        data += b"#"
    else:
        data[-1] ^= 1
    path.write_bytes(data)


def test_each_byte_of_each_file_counts(tmp_path: pathlib.Path) -> None:
    model = everything(tmp_path)
    before = digested(model).digests
    assert FILES.keys() <= before.keys()
    for name, file in FILES.items():
        assert before[name] == xxhash.xxh3_128_hexdigest((tmp_path / file).read_bytes())
        kept = (tmp_path / file).read_bytes()
        change(tmp_path / file)
        assert [line.split(":")[0].strip() for line in digested(model).differences(before)] == [name]
        (tmp_path / file).write_bytes(kept)
    assert digested(model).differences(before) == []


@pytest.mark.parametrize(
    ("load_format", "name"),
    [("auto", "pytorch_model.bin"), ("pt", "x.pt"), ("gguf", "tiny-Q4.gguf"), ("sharded_state", "model-rank-0.bin")],
)
def test_weights_of_every_format_count(load_format: str, name: str, tmp_path: pathlib.Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(jobs.MODEL, model)
    (model / "model.safetensors").rename(model / name)
    section = {"name": str(model), "load_format": load_format}
    before = digested(section)
    change(model / name)
    assert len(digested(section).differences(before.digests)) == 1
    # Files beside the weights are not read.
    (model / "README.md").write_text("other words")
    assert name in before.digests
    assert "README.md" not in digested(section).digests


def test_files_that_come_and_go(tmp_path: pathlib.Path) -> None:
    model = everything(tmp_path)
    before = digested(model).digests
    (tmp_path / "model" / "2_Dense" / "pytorch_model.bin").write_bytes(b"x")
    (tmp_path / "model" / "code" / "layers.py").unlink()
    lines = contents(model).differences(before)
    assert [line.partition(",")[0] for line in lines] == [
        f"  2_Dense/pytorch_model.bin: the job began without it ({tmp_path}/model/2_Dense/pytorch_model.bin)",
        "  code/layers.py: the job began with it",
    ]


def test_unchanged_weights_are_read_once(tmp_path: pathlib.Path, cache: pathlib.Path) -> None:
    model = everything(tmp_path)
    first = contents(model)
    assert (first.is_known, first.num_bytes > 0) == (False, True)
    first = digested(model)
    again = contents(model)
    assert (again.is_known, again.num_bytes, again.digests) == (True, 0, first.digests)
    # Small files are always read. Files that were only touched are read again, and are the same.
    weights = tmp_path / "model" / "model-00001-of-00002.safetensors"
    os.utime(weights)
    touched = contents(model)
    assert (touched.is_known, touched.num_bytes) == (False, weights.stat().st_size)
    assert digested(model).digests == first.digests
    for entry in cache.iterdir():
        entry.write_bytes(entry.read_bytes().replace(b'"digest": "', b'"digest": "0'))
    assert not contents(model).is_known
    assert digested(model).digests == first.digests


def test_a_change_with_the_old_time_and_size_is_noticed(tmp_path: pathlib.Path) -> None:
    model = everything(tmp_path)
    before = digested(model).digests
    weights = tmp_path / "model" / "model-00001-of-00002.safetensors"
    stamp = weights.stat()
    change(weights)
    os.utime(weights, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert len(digested(model).differences(before)) == 1


def test_a_file_that_has_just_changed_is_not_kept(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(content, "_SETTLED_NS", 2 * 10**9)
    model = everything(tmp_path)
    digested(model)
    assert not contents(model).is_known


def test_without_a_cache(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    model = everything(tmp_path)
    first = digested(model)
    assert not contents(model).is_known
    assert digested(model).digests == first.digests


def test_links_are_followed(tmp_path: pathlib.Path) -> None:
    model = everything(tmp_path)
    before = digested(model).digests
    weights, blob = tmp_path / "model" / "model-00001-of-00002.safetensors", tmp_path / "blob"
    weights.rename(blob)
    weights.symlink_to(blob)
    assert contents(model).differences(before) == []
    assert digested(model).digests == before
    other = tmp_path / "other"
    shutil.copy(blob, other)
    change(other)
    weights.unlink()
    weights.symlink_to(other)
    assert len(digested(model).differences(before)) == 1


def test_a_file_that_changes_meanwhile_is_refused(tmp_path: pathlib.Path) -> None:
    model, weights = everything(tmp_path), tmp_path / "model" / "model-00002-of-00002.safetensors"
    found = contents(model)
    check_unchanged(found.stamps)
    os.utime(weights)
    with pytest.raises(DriftError, match=r"model-00002-of-00002\.safetensors was changed while the job ran"):
        check_unchanged(found.stamps)
    found.start()
    with pytest.raises(DriftError, match=r"model-00002-of-00002\.safetensors was changed while the job ran"):
        jobs.wait_until(lambda: found.is_known)
    weights.unlink()
    with pytest.raises(DriftError, match="was changed"):
        check_unchanged(found.stamps)


def test_a_file_that_cannot_be_read(tmp_path: pathlib.Path) -> None:
    model = everything(tmp_path)
    found = contents(model)
    dense = tmp_path / "model" / "2_Dense" / "model.safetensors"
    dense.unlink()
    dense.mkdir()
    found.start()
    with pytest.raises(ModelError, match=r"cannot read .*2_Dense/model\.safetensors: is a directory"):
        jobs.wait_until(lambda: found.is_known)


def test_a_thread_that_is_told_to_end_ends(tmp_path: pathlib.Path) -> None:
    model = everything(tmp_path)
    found = contents(model)
    found._is_closed.set()
    found.start()
    found.close()
    assert found._thread is not None
    assert not found._thread.is_alive()
    assert not found.is_known


def test_files_of_a_hub_id_are_not_read(tmp_path: pathlib.Path) -> None:
    spec = JobSpec(model={"name": str(jobs.MODEL)}, input={"path": "x.jsonl"}, output={"path": "out"})
    snapshot = dataclasses.replace(resolve(spec.model), commit="a" * 40)
    found = Contents(snapshot, spec.model, ())
    assert (found.is_known, found.digests) == (True, {})
