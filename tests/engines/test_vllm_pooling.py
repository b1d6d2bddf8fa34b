"""Vectors on real vLLM, in float32: held against transformers, position by position."""

import contextlib
import gc
import json
import pathlib
import shutil
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from conftest import MODEL
from held import held
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, LlamaConfig

import jobs
from batchinf.base.errors import RowFailed, SpecError, VerificationFailed
from batchinf.commands.verify import verify_job
from batchinf.model.model import resolve
from batchinf.records import Prompt, Request, Result
from batchinf.results import Results
from batchinf.spec.file import read_spec
from batchinf.spec.job import JobSpec
from batchinf.spec.sampling import SamplingSpec
from batchinf.tasks.registry import task_of, task_type

vllm = pytest.importorskip("vllm")
from vllm.outputs import PoolingOutput  # noqa: E402

from batchinf.engines.vllm.layers import give_layers  # noqa: E402
from batchinf.engines.vllm.pooling import VllmPooling, wanted_of  # noqa: E402
from batchinf.engines.vllm.scheduling import joined  # noqa: E402
from batchinf.engines.vllm.scheduling.joined import JoiningMixin  # noqa: E402
from batchinf.engines.vllm.scheduling.pooling_scheduler import POOLING_SCHEDULER  # noqa: E402

MAX_MODEL_LEN = 256
NUM_LAYERS = 4
LABELS = ("bad", "neither", "good")


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Of one token, of some, and of as many as the model takes."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    lines = jobs.PROMPTS.read_text(encoding="utf-8").splitlines()[:60:10]
    found = [tokenizer(json.loads(line)["prompt"]).input_ids for line in lines]
    return [[7], *found, (found[0] * MAX_MODEL_LEN)[:MAX_MODEL_LEN]]


@pytest.fixture(scope="module")
def states(prompts: list[list[int]]) -> dict[str, list[np.ndarray]]:
    """transformers, one prompt at a time: after each layer [num_tokens, hidden_size], and with the final norm."""
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    before_norm: list[torch.Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda _, inputs: before_norm.append(inputs[0]))
    with torch.no_grad():
        found = [model(torch.tensor([ids]), output_hidden_states=True).hidden_states for ids in prompts]
    layers = {str(layer): [each[layer][0].numpy() for each in found] for layer in range(NUM_LAYERS)}
    return {
        **layers,
        str(NUM_LAYERS): [it[0].numpy() for it in before_norm],
        "out": [it[-1][0].numpy() for it in found],
    }


def classifier(folder: pathlib.Path, num_labels: int) -> pathlib.Path:
    """A small Llama with a classification head, all weights random, and the sample model's tokenizer."""
    torch.manual_seed(num_labels)
    names = {"id2label": dict(enumerate(LABELS))} if num_labels == len(LABELS) else {"num_labels": num_labels}
    config = LlamaConfig(
        vocab_size=1536, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=512, bos_token_id=0, eos_token_id=1, pad_token_id=2, **names,
    )  # fmt: skip
    model = AutoModelForSequenceClassification.from_config(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL / name, folder)
    return folder


def logits_of(folder: pathlib.Path, prompts: list[list[int]]) -> np.ndarray:
    """[num_prompts, num_labels] by transformers."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return np.stack([model(torch.tensor([ids])).logits[0].numpy() for ids in prompts])


def resolved(model: pathlib.Path, task: str, **sections: Any) -> JobSpec:
    spec = JobSpec.model_validate(
        {
            "model": {"name": str(model), "dtype": "float32"},
            "task": task,
            "input": {"path": "in"},
            "output": {"path": "out"},
            "engine": {"max_model_len": MAX_MODEL_LEN},
            **sections,
        }
    )
    return task_type(spec).resolve(spec, resolve(spec.model))


@contextlib.contextmanager
def engine_of(spec: JobSpec) -> Iterator[VllmPooling]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        engine = VllmPooling(task_of(spec), spec.model.name, spec.model.name)
    try:
        engine.warm_up(task_of(spec).warm_up_request())
        yield engine
    finally:
        engine.close()
        del engine
        gc.collect()


def rows(engine: VllmPooling, spec: JobSpec, prompts: list[list[int]]) -> list[dict[str, Any]]:
    """What the job would journal of these prompts."""
    task, completions = task_of(spec), []
    for row, ids in enumerate(prompts):
        [request] = task.expand(Prompt(row, ids, None, None), MAX_MODEL_LEN)
        engine.add(request)
    while engine.num_unfinished():
        completions += engine.step()
    engine.begun()
    completions.sort(key=lambda completion: completion.request.row_index)
    assert all(completion.finish_reason == "stop" and not len(completion.token_ids) for completion in completions)
    results = [Result(Prompt(row, ids, None, None), 0, 1, completion, None, None, 1)
               for (row, ids), completion in zip(enumerate(prompts), completions, strict=True)]  # fmt: skip
    return task.encode(results).to_pylist()


def off(spec: JobSpec, prompts: list[list[int]], found: list[dict[str, Any]], pooling: str) -> float:
    """How far `batchinf verify` finds the embeddings off."""
    results = pa.Table.from_pylist(found, task_of(spec).result_schema)
    made = [Prompt(row, ids, None, None) for row, ids in enumerate(prompts)]
    return held(spec, results, made, pooling)["embedding"].max_abs_delta


def test_layers_and_the_last_one_before_its_norm(
    prompts: list[list[int]], states: dict[str, list[np.ndarray]], tmp_path: pathlib.Path
) -> None:
    layers = [0, 1, 3, 4]
    spec = resolved(MODEL, "hidden_states", pooling={"positions": "all", "layers": layers})
    with engine_of(spec) as engine:
        found = rows(engine, spec, prompts)
        with pytest.raises(RowFailed, match=f"{MAX_MODEL_LEN + 1} tokens; at most {MAX_MODEL_LEN} fit"):
            engine.add(task_of(spec).expand(Prompt(0, [1] * (MAX_MODEL_LEN + 1), None, None), MAX_MODEL_LEN)[0])
    for number, row in enumerate(found):
        assert row["positions"] == list(range(len(prompts[number])))
        for layer in layers:
            np.testing.assert_allclose(row[f"hidden_states_{layer}"], states[str(layer)][number], atol=1e-3)
    # They are not all the same: each layer adds to what it is given.
    assert np.abs(states["3"][1] - states["4"][1]).max() > 0.1


@pytest.mark.slow
def test_the_last_layer_without_the_final_norm(
    prompts: list[list[int]], states: dict[str, list[np.ndarray]], tmp_path: pathlib.Path
) -> None:
    spec = resolved(MODEL, "hidden_states", pooling={"final_norm": False})
    with engine_of(spec) as engine:
        found = rows(engine, spec, prompts)
    for number, row in enumerate(found):
        assert row["positions"] == [len(prompts[number]) - 1]
        np.testing.assert_allclose(row["hidden_states"], states["4"][number][-1:], atol=1e-3)
    assert np.abs(states["out"][1] - states["4"][1]).max() > 0.1


def test_the_models_output_and_its_mean_cut_short(
    prompts: list[list[int]], states: dict[str, list[np.ndarray]], tmp_path: pathlib.Path
) -> None:
    pooling = {"pooling_type": "mean", "normalize": False, "dimensions": 48}
    arguments = {"max_model_len": MAX_MODEL_LEN, "hf_overrides": {"is_matryoshka": True}}
    spec = resolved(MODEL, "embed", pooling=pooling, engine=arguments)
    with engine_of(spec) as engine:
        means = rows(engine, spec, prompts)
        assert off(spec, prompts, means, "MEAN") < 1e-4
        assert off(spec, prompts, means, "LAST") > 0.1
        # The same engine, asked for the other thing that its pooler gives: starting one takes seconds.
        spec = resolved(MODEL, "hidden_states", pooling={"positions": "all"})
        engine._task, engine._wanted = task_of(spec), wanted_of(task_of(spec))
        engine._pooling_params = engine._choose_params()
        engine.warm_up(task_of(spec).warm_up_request())
        found = rows(engine, spec, prompts)
    for number, (row, mean) in enumerate(zip(found, means, strict=True)):
        expected = states["out"][number]
        assert row["positions"] == list(range(len(prompts[number])))
        np.testing.assert_allclose(row["hidden_states"], expected, atol=1e-3)
        np.testing.assert_allclose(mean["embedding"], expected.mean(axis=0)[:48], atol=1e-3)


@pytest.mark.slow
def test_prompts_in_pieces(
    prompts: list[list[int]], states: dict[str, list[np.ndarray]], monkeypatch: pytest.MonkeyPatch
) -> None:
    num_joined: list[int] = []
    theirs = joined.join_vectors

    def join_vectors(outputs: list[Any]) -> None:
        theirs(outputs)
        num_joined.extend(len(output.new_token_ids) for output in outputs)

    monkeypatch.setattr(joined, "join_vectors", join_vectors)
    arguments = {"max_model_len": MAX_MODEL_LEN, "max_num_batched_tokens": 96, "enable_prefix_caching": False}
    spec = resolved(MODEL, "embed", pooling={"pooling_type": "last", "normalize": False}, engine=arguments)
    with engine_of(spec) as engine:
        made = engine._engine.engine_core.engine_core.scheduler
        assert isinstance(made, JoiningMixin)
        assert engine._engine.vllm_config.scheduler_config.scheduler_cls == POOLING_SCHEDULER
        found = rows(engine, spec, prompts * 3)
    assert sum(num_joined) >= len(prompts)  # vectors of a step travel together
    for row, expected in zip(found, states["out"] * 3, strict=True):
        np.testing.assert_allclose(row["embedding"], expected[-1], atol=1e-3)


def test_classes_by_name(prompts: list[list[int]], tmp_path: pathlib.Path) -> None:
    folder = classifier(tmp_path, len(LABELS))
    spec = resolved(folder, "classify")
    with engine_of(spec) as engine:
        found = rows(engine, spec, prompts)
    logits = torch.tensor(logits_of(folder, prompts))
    assert len(set(logits.argmax(-1).tolist())) > 1
    for row, expected in zip(found, logits.softmax(-1).numpy(), strict=True):
        np.testing.assert_allclose(row["probabilities"], expected, atol=1e-3)
        assert row["label"] == LABELS[int(expected.argmax())]
        assert row["score"] == max(row["probabilities"])


@pytest.mark.slow
def test_rewards_are_raw(prompts: list[list[int]], tmp_path: pathlib.Path) -> None:
    folder = classifier(tmp_path, 1)
    spec = resolved(folder, "reward")
    with engine_of(spec) as engine:
        found = rows(engine, spec, prompts)
        engine._task = task_of(resolved(folder, "reward", pooling={"width": 2}))
        engine._wanted = wanted_of(engine._task)
        with pytest.raises(
            SpecError,
            match=r"^pooling\.width: got 2 numbers in a vector, but the model gives 1; set pooling\.width to 1$",
        ):
            engine.warm_up(task_of(spec).warm_up_request())
    np.testing.assert_allclose([row["reward"] for row in found], logits_of(folder, prompts)[:, 0], atol=1e-3)


def test_a_model_without_states_between_its_layers() -> None:
    with pytest.raises(ValueError, match=r"^vLLM's Linear gives no states between layers: leave out pooling\.layers"):
        give_layers(torch.nn.Linear(2, 2), [1])


def test_a_whole_job(tmp_path: pathlib.Path) -> None:
    """Through the command line, with chat and rows that fail: cosine with transformers' last hidden state."""
    texts = ["Once upon a time", "", "x " * 400, "Der Wald", None, "La forêt était sombre."]
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps({"id": n, "text": text}) + "\n" for n, text in enumerate(texts)))
    spec = jobs.spec_of(
        tmp_path,
        task="embed",
        model={"name": str(MODEL), "dtype": "float32"},
        input={"path": str(source), "id_column": "id", "messages": [{"role": "user", "content": "{{ text }}"}]},
        sampling=None,
        pooling={"dtype": "float32"},
        parallel={"data_parallel_size": 1},
        engine={"max_model_len": MAX_MODEL_LEN},
        output={"path": str(tmp_path / "out"), "keep_columns": ["text"]},
        scripted=None,
        max_error_rate=1.0,
    )
    done = jobs.run("run", spec, VLLM_ENABLE_V1_MULTIPROCESSING="0")
    assert done.returncode == 0, done.stderr
    found = jobs.rows_of(tmp_path / "out")
    assert [row["error_type"] for row in found] == [None, None, "prompt_too_long", None, "null_prompt", None]
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    vectors = Results(tmp_path / "out").array("embedding")
    assert vectors.shape == (len(texts), 128)
    report = verify_job(read_spec(spec))
    assert (report.verdict, report.num_rows, [*report.deviations]) == ("within", 4, ["embedding"])
    with pytest.raises(VerificationFailed, match=r"^the stored numbers are beyond the tolerance of 1e-09"):
        verify_job(read_spec(spec), tolerance=1e-9).raise_if_beyond()
    for row, vector in zip(found, vectors, strict=True):
        if row["error_type"] is not None:
            assert row["embedding"] is None
            assert np.isnan(vector).all()
            continue
        chat = [{"role": "user", "content": row["text"]}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        with torch.no_grad():
            expected = model.model(ids["input_ids"]).last_hidden_state[0, -1].numpy()
        assert row["num_prompt_tokens"] == ids["input_ids"].shape[1]
        assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-5)
        assert vector @ expected / np.linalg.norm(expected) >= 0.9999


def test_a_vector_that_was_cut_short_is_no_completion() -> None:
    ended = types.SimpleNamespace(request_id="0-0", outputs=PoolingOutput(torch.zeros(0)))
    engine: Any = object.__new__(VllmPooling)
    engine._engine = types.SimpleNamespace(has_unfinished_requests=lambda: True, step=lambda: [ended])
    engine._death, engine._live = None, {"0-0": Request(0, 0, [5], SamplingSpec())}
    assert engine.step() == []
    assert engine.num_unfinished() == 1
