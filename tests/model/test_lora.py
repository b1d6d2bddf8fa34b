"""LoRA adapters: found, checked against the model, chosen by row, and applied by real vLLM as by plain matrices."""

import json
import pathlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from adapters import make_adapter
from hub_server import Hub, serving
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import jobs
from batchinf.base.errors import DriftError, EngineStartError, ModelError, RowError, UserError
from batchinf.coordinator.begin import new_header
from batchinf.job.drift import check_drift
from batchinf.job.job import Job
from batchinf.job.open import open_job, prepare_job
from batchinf.model.lora import Adapter, resolve_adapters
from batchinf.model.model import resolve
from batchinf.prompts.builder import PromptBuilder
from batchinf.records import Completion, Request
from batchinf.schedule.shards import uncut
from batchinf.source.rows import Row
from batchinf.spec.file import dump_spec, read_spec
from batchinf.spec.job import JobSpec
from batchinf.spec.sampling import SamplingSpec
from batchinf.tasks.registry import task_of

GREEDY = SamplingSpec(temperature=0, logprobs=3)
# Requests with prompt logprobs do not read the cache of prompts, and the others do.
SCORED = SamplingSpec(temperature=0, logprobs=3, prompt_logprobs=1)
MAX_TOKENS = 12


def spec_of(lora: Any, column: str | None = None, **sections: Any) -> JobSpec:
    return JobSpec(
        model={"name": str(jobs.MODEL), "lora": lora},
        input={"path": "prompts.jsonl", "adapter_column": column},
        output={"path": "out"},
        **sections,
    )


def find(lora: Any, **sections: Any) -> tuple[Adapter, ...]:
    spec = spec_of(lora, "adapter" if isinstance(lora, dict) else None, **sections)
    return resolve_adapters(spec, resolve(spec.model))


# Finding them


def test_an_adapter_is_known_by_its_content(tmp_path: pathlib.Path) -> None:
    one, moved = make_adapter(tmp_path / "one", 1), tmp_path / "moved"
    shutil.copytree(one, moved)
    [first], [again] = find(str(one)), find(str(moved))
    assert (first.rank, first.path) == (8, str(one))
    assert first.fingerprint == again.fingerprint
    # The next checkpoint of the same training has other weights of the same shapes; another scale is another adapter.
    others = [make_adapter(tmp_path / "two", 2), make_adapter(tmp_path / "three", 1, lora_alpha=8)]
    assert len({first.fingerprint, *(find(str(other))[0].fingerprint for other in others)}) == 3
    # What else lies in a checkpoint's folder is not looked at.
    (moved / "optimizer.pt").write_bytes(b"x")
    (moved / "model.safetensors").write_bytes(b"x")
    modules = ("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj")
    assert find(str(moved)) == (Adapter("lora", str(moved), 8, first.fingerprint, modules),)


def test_an_adapter_of_the_head_is_refused_if_logits_of_prompts_are_needed(tmp_path: pathlib.Path) -> None:
    folder = make_adapter(tmp_path / "a", 1)
    weights = folder / "adapter_model.safetensors"
    save_file({**load_file(weights), "base_model.model.lm_head.lora_A.weight": torch.zeros(8, 128)}, weights)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n')
    fields = {"model": {"name": str(jobs.MODEL), "lora": str(folder)}, "output": {"path": str(tmp_path / "out")}}
    fields |= {"input": {"path": str(tmp_path / "rows.jsonl")}}
    [adapter] = prepare_job(read_spec(fields)).adapters
    assert "lm_head" in adapter.modules
    for section in ({"sampling": {"prompt_logprobs": 1}}, {"task": "logits", "logits": {"positions": "all"}}):
        with pytest.raises(ModelError, match=f"^model.lora: {folder} changes lm_head"):
            prepare_job(read_spec({**fields, **section}))


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> Iterator[Hub]:
    with serving(tmp_path / "hub", monkeypatch) as hub:
        yield hub


def wrong_adapter(folder: pathlib.Path, how: str) -> None:
    config = json.loads((folder / "adapter_config.json").read_text())
    weights = folder / "adapter_model.safetensors"
    tensors = load_file(weights)
    match how:
        case "no config":
            (folder / "adapter_config.json").unlink()
        case "no weights":
            weights.unlink()
        case "cut short":
            weights.write_bytes(weights.read_bytes()[:-100])
        case "width":
            name = "base_model.model.model.layers.1.mlp.down_proj.lora_A.weight"
            save_file({**tensors, name: torch.zeros(8, 512)}, weights)
        case "layers":
            name = "base_model.model.model.layers.31.mlp.down_proj.lora_A.weight"
            save_file({**tensors, name: torch.zeros(8, 320)}, weights)
        case "other weights":
            save_file({"weight": torch.zeros(8)}, weights)
        case _:
            key, _, value = how.partition("=")
            (folder / "adapter_config.json").write_text(json.dumps({**config, key: json.loads(value)}))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("no config", "/a has no adapter_config.json; give the folder of a LoRA adapter as PEFT saves it"),
        ("no weights", "the weights are not whole: the folder has no weights (adapter_model.safetensors, "
         "adapter_model.bin, adapter_model.pt); get them again"),
        ("cut short", "the weights are not whole: adapter_model.safetensors is cut short"),
        ("width", "model.layers.1.mlp.down_proj takes 320 values in '{model}', and 512 in the adapter; is it an "
         "adapter of another base model?"),
        ("layers", "it has model.layers.31.mlp.down_proj, but the model has 4 layers; is it an adapter of "
         "another base"),
        ("other weights", "its weights have no lora_A and lora_B"),
        ("r=1024", "its rank is 1024; vLLM takes at most 512"),
        ("r=16", "lora_A.weight has rank 8, but adapter_config.json says 16"),
        ("r=null", "has no rank: `r` is None; it must be a whole number from 1 on"),
        ("use_dora=true", "has use_dora True, which vLLM cannot apply; train it without"),
        ('modules_to_save=["lm_head"]', "has modules_to_save ['lm_head'], which vLLM cannot apply; train it without"),
        ('init_lora_weights="pissa_niter_4"', "has init_lora_weights pissa_niter_4, which changes the base model's "
         "weights too; make a plain adapter of it"),
        ('peft_type="IA3"', "is of type IA3; vLLM takes LORA"),
    ],
)  # fmt: skip
def test_what_is_no_adapter_of_the_model(how: str, message: str, tmp_path: pathlib.Path) -> None:
    wrong_adapter(make_adapter(tmp_path / "a", 1), how)
    with pytest.raises(ModelError) as error:
        find({"sql": str(tmp_path / "a")})
    assert str(error.value).startswith("model.lora: adapter 'sql': ")
    assert message.replace("{model}", str(jobs.MODEL)) in str(error.value)
    assert "\n" not in str(error.value)


def test_an_adapter_of_the_image_encoder(tmp_path: pathlib.Path) -> None:
    module = "model.vision_model.encoder.layers.7"  # the text model has two layers
    folder = make_adapter(tmp_path / "a", 1, modules=("self_attn.q_proj",), layers=(module,),
                          widths={"self_attn.q_proj": (32, 32)})  # fmt: skip
    vision = jobs.ROOT / "sample_data" / "tiny-vision"
    texts = {"path": "prompts.jsonl"}
    images = {**texts, "images_column": "photo", "prompt_template": "<image>"}
    for where, engine, is_refused in ((texts, {}, False), (images, {}, True),
                                      (images, {"enable_tower_connector_lora": True}, False)):  # fmt: skip
        spec = JobSpec(model={"name": str(vision), "lora": str(folder)}, input=where, output={"path": "out"},
                       engine=engine)  # fmt: skip
        if is_refused:
            with pytest.raises(
                ModelError, match=rf"it changes {module}\.self_attn\.q_proj of the image encoder, which"
            ):
                resolve_adapters(spec, resolve(spec.model))
        else:
            [adapter] = resolve_adapters(spec, resolve(spec.model))
            assert adapter.modules == ("q_proj",)


def test_an_adapter_of_the_hub_is_known_by_its_commit(server: Hub, tmp_path: pathlib.Path) -> None:
    folder = make_adapter(tmp_path / "a", 1)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    first, second = "1" * 40, "2" * 40
    server.commits = {first: files, second: files}
    server.refs["org/sql"] = {"main": first}
    [found] = find("org/sql")
    assert (found.fingerprint, found.rank) == (f"org/sql@{first}", 8)
    assert sorted(path.name for path in pathlib.Path(found.path).iterdir()) == sorted(files)
    # A job that goes on keeps its commit, wherever the branch is by now.
    server.refs["org/sql"]["main"] = second
    spec = spec_of("org/sql")
    assert resolve_adapters(spec, resolve(spec.model), f"org/sql@{first}") == (found,)
    assert find("org/sql")[0].fingerprint == f"org/sql@{second}"
    with pytest.raises(ModelError, match=r"^model\.lora: there is no folder 'org/none', nor a model 'org/none'"):
        find("org/none")


# A job with them


def job_of(folder: pathlib.Path, lora: Any, **sections: Any) -> Job:
    model = {"name": str(jobs.MODEL), "lora": lora}
    return open_job(read_spec(jobs.spec_of(folder, model=model, **sections)))


def test_another_adapter_is_another_job(tmp_path: pathlib.Path) -> None:
    one, two = (str(make_adapter(tmp_path / name, seed)) for seed, name in enumerate(("one", "two")))
    shutil.copytree(one, tmp_path / "moved")
    job = job_of(tmp_path, one)
    header, _ = new_header(job, 1, uncut(job.rows), "job")
    check_drift(job_of(tmp_path, str(tmp_path / "moved")), header)
    with pytest.raises(DriftError, match=r"lora: the job has adapters with content \"[0-9a-f]{32}\", now it is "):
        check_drift(job_of(tmp_path, two), header)
    with pytest.raises(DriftError, match=r"lora: the job has adapters with content .*, now it is nothing"):
        check_drift(job_of(tmp_path, None), header)


def test_each_row_names_its_adapter(tmp_path: pathlib.Path) -> None:
    spec = spec_of({"sql": "a", "chat": "b"}, "which")
    builder = PromptBuilder(spec, AutoTokenizer.from_pretrained(jobs.MODEL), None)
    assert builder.columns == ("prompt", "which")
    values: list[dict[str, Any]] = [{"which": "sql"}, {"which": None}, {}, {"which": "chatt"}, {"which": 3}]
    rows = [Row(number, {"prompt": "Once", **own}, None) for number, own in enumerate(values)]
    prompts = builder.build([*rows, Row(5, {"which": "nobody"}, None)], 100)
    assert [prompt.adapter for prompt in prompts] == ["sql", None, None, None, None, None]
    assert [prompt.error and prompt.error.error_type for prompt in prompts] == [
        None, None, None, "unknown_adapter", "unknown_adapter", "missing_column",
    ]  # fmt: skip
    message = "got 'chatt' in column 'which'; the adapters are: chat, sql; null is the plain model"
    assert prompts[3].error == RowError("unknown_adapter", message)


def test_paths_of_adapters_are_expanded(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ADAPTERS", "/data")
    model = {"name": str(jobs.MODEL), "lora": {"sql": "$ADAPTERS/sql", "a.b": "$$x"}}
    path = jobs.spec_of(tmp_path, model=model, input={"adapter_column": "language"})
    spec = read_spec(path).spec
    assert spec.model.lora == {"sql": "/data/sql", "a.b": "$x"}
    path.write_text(dump_spec(spec))
    assert read_spec(path).spec == spec
    path = jobs.spec_of(tmp_path, model={"name": str(jobs.MODEL), "lora": {"sql": "$NOTHING/sql"}})
    with pytest.raises(UserError, match=r"model\.lora\.sql: '?\$NOTHING"):
        read_spec(path)


def test_draws_of_the_script_are_the_adapters_own_through_whole_jobs(tmp_path: pathlib.Path) -> None:
    folders = {name: str(make_adapter(tmp_path / name, seed)) for seed, name in enumerate(("one", "two"))}
    kinds = ["one", "two", None, "three"]
    lines = [json.dumps({"prompt": f"It was {number // 4}", "which": kinds[number % 4]}) for number in range(40)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    path = jobs.spec_of(
        tmp_path,
        model={"name": str(jobs.MODEL), "lora": folders},
        input={"path": str(tmp_path / "rows.jsonl"), "id_column": None, "adapter_column": "which"},
        output={"keep_columns": ["which"]},
        max_error_rate=1.0,
    )
    jobs.finish(path)
    rows = jobs.rows_of(tmp_path / "out")
    assert [row["which"] for row in rows] == kinds * 10
    for first in range(0, 40, 4):
        same_prompt = rows[first : first + 4]
        assert len({tuple(row["token_ids"]) for row in same_prompt[:3]}) == 3
        assert same_prompt[3]["error_type"] == "unknown_adapter"
    assert jobs.state_of(tmp_path / "out").header.identity["lora"].keys() == {"one", "two"}


# Real vLLM


@dataclass
class Running:
    """An engine that has two adapters, and what transformers makes of the model with each of them merged into it."""

    engine: Any
    models: dict[str | None, Any]
    prompts: list[list[int]]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    pytest.importorskip("vllm")
    from batchinf.engines.vllm.engine import VllmEngine

    folder = tmp_path_factory.mktemp("adapters")
    rs = make_adapter(folder / "rs", 2, rank=4, modules=("self_attn.q_proj", "self_attn.o_proj"), use_rslora=True)
    places = {"all": str(make_adapter(folder / "all", 1)), "rs": str(rs)}
    spec = spec_of(places, "which", sampling=GREEDY, engine={"max_model_len": 512, "block_size": 32})
    adapters = resolve_adapters(spec, resolve(spec.model))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        engine = VllmEngine(task_of(spec), str(jobs.MODEL), str(jobs.MODEL), None, adapters)
    engine.warm_up(Request(-1, 0, [1] * 8, GREEDY, max_tokens=4))
    tokenizer = AutoTokenizer.from_pretrained(jobs.MODEL)
    texts = [json.loads(line)["prompt"] for line in jobs.PROMPTS.read_text().splitlines()[:200:40]]
    models = {None: reference(None, 0.0), "all": reference(folder / "all", 16 / 8), "rs": reference(rs, 16 / 4**0.5)}
    # Long enough to fill blocks of the cache.
    yield Running(engine, models, [(tokenizer(text).input_ids * 100)[:70] for text in texts])
    engine.close()


def reference(folder: pathlib.Path | None, scale: float) -> Any:
    """The model in float32, each weight that the adapter speaks of being W + B·A·scale."""
    model = AutoModelForCausalLM.from_pretrained(jobs.MODEL, dtype=torch.float32)
    if folder is not None:
        tensors = load_file(folder / "adapter_model.safetensors")
        for name in [name for name in tensors if "lora_A" in name]:
            module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            weight = model.get_submodule(module).weight
            weight.data += tensors[name.replace("lora_A", "lora_B")] @ tensors[name] * scale
    return model


def run(running: Running, names: list[str | None], sampling: SamplingSpec = GREEDY) -> list[Completion]:
    """All prompts, each with the next of these adapters; in their order."""
    for row, prompt in enumerate(running.prompts):
        running.engine.add(Request(row, 0, prompt, sampling, max_tokens=MAX_TOKENS, adapter=names[row % len(names)]))
    done: list[Completion] = []
    while running.engine.num_unfinished():
        done += running.engine.step()
    return sorted(done, key=lambda completion: completion.request.key)


@pytest.mark.parametrize("names", [[None], ["all"], ["rs"], [None, "all", "rs"], ["rs", None], ["all", None]], ids=str)
@pytest.mark.parametrize("sampling", [GREEDY, SCORED], ids=["cached", "scored"])
def test_rows_are_those_of_the_model_with_the_adapter_merged(
    names: list[str | None], sampling: SamplingSpec, running: Running
) -> None:
    # Each prompt comes with other adapters from one case to the next, so that a cached prefix of another would show.
    for completion in run(running, names, sampling):
        prompt, name = completion.request.prompt_token_ids, completion.request.adapter
        ids = torch.tensor([[*prompt, *completion.token_ids.tolist()]])
        with torch.no_grad():
            logprobs = running.models[name](ids).logits[0].log_softmax(-1)
        steps = logprobs[len(prompt) - 1 : -1]
        assert completion.logprobs is not None
        assert completion.token_ids.tolist() == steps.argmax(-1).tolist()
        top = np.take_along_axis(steps.numpy(), completion.logprobs.token_ids.astype(np.int64), axis=1)
        np.testing.assert_allclose(completion.logprobs.logprobs, top, atol=1e-3)
        if sampling is SCORED:
            assert completion.prompt_logprobs is not None
            wanted = logprobs[range(len(prompt) - 1), prompt[1:]].numpy()
            np.testing.assert_allclose(completion.prompt_logprobs.logprobs[:, 0], wanted, atol=1e-3)


def test_prefixes_are_shared_by_rows_of_one_adapter(running: Running) -> None:
    run(running, ["all"])
    before = running.engine.stats().prefix_cache_hits
    run(running, ["all"])
    assert running.engine.stats().prefix_cache_hits > before


def test_the_adapters_change_what_comes_out(running: Running) -> None:
    outputs = [[tuple(done.token_ids.tolist()) for done in run(running, [name])] for name in (None, "all", "rs")]
    for plain, both, some in zip(*outputs, strict=True):
        assert len({plain, both, some}) == 3


def test_what_vllm_cannot_load_is_said_before_the_first_row(running: Running, tmp_path: pathlib.Path) -> None:
    from batchinf.engines.vllm.arguments import load_adapters, lora_requests

    folder = make_adapter(tmp_path / "a", 3)
    tensors = load_file(folder / "adapter_model.safetensors")
    renamed = {name.replace("up_proj", "upper_proj"): tensor for name, tensor in tensors.items()}
    save_file(renamed, folder / "adapter_model.safetensors")
    requests = lora_requests((Adapter("upper", str(folder), 8, "", modules=()),) * 9)
    with pytest.raises(EngineStartError, match=r"^vLLM cannot load the LoRA adapter 'upper': .*upper_proj"):
        load_adapters(running.engine._engine, {"upper": requests["upper"]})
    assert len(run(running, ["all"])) == len(running.prompts)


def test_engine_arguments_for_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm")
    from batchinf.engines.vllm import arguments

    adapters = tuple(Adapter(str(number), "a", rank, "", modules=()) for number, rank in enumerate([4, 16, 17]))
    assert arguments.lora_arguments((), {}) == {}
    on_cpu = {"enable_lora": True, "max_lora_rank": 32, "max_loras": 4, "max_cpu_loras": 4}
    assert arguments.lora_arguments(adapters, {}) == on_cpu
    monkeypatch.setattr(arguments.current_platform, "is_cpu", lambda: False)
    assert arguments.lora_arguments(adapters, {}) == {"enable_lora": True, "max_lora_rank": 32, "max_loras": 3}
    given = {"enable_lora": True, "max_lora_rank": 64, "max_loras": 1}
    assert arguments.lora_arguments(adapters, given) == {}
