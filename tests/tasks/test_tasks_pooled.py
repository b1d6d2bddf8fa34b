"""The tasks that make vectors: columns held against numpy, widths found in configs, jobs that are killed and go on."""

import contextlib
import json
import pathlib
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

import jobs
from batchinf.base.errors import BatchinfError, RowError, SpecError
from batchinf.base.ragged import to_matrix, to_ragged
from batchinf.commands.diff import diff_jobs
from batchinf.engines.scripted import ScriptedPooling
from batchinf.job.open import open_job
from batchinf.model.model import resolve
from batchinf.output.counts import count_non_finite_rows, number_columns, row_bytes
from batchinf.records import Completion, Prompt, Result
from batchinf.replica.worker import num_bytes
from batchinf.results import Results
from batchinf.source.rows import Row
from batchinf.spec.file import read_spec
from batchinf.spec.job import JobSpec
from batchinf.tasks.registry import task_of, task_type

LENGTHS = (3, 1, 5, 2)
CASES: list[tuple[str, dict[str, Any], int]] = [  # task, pooling, width of what the engine gives
    ("embed", {"width": 6}, 6),
    ("embed", {"width": 6, "dtype": "float16", "dimensions": 4}, 4),
    ("classify", {"labels": ["no", "yes", "perhaps"]}, 3),
    ("classify", {"labels": ["no", "yes"], "use_activation": False}, 2),
    ("reward", {"width": 1}, 1),
    ("reward", {"width": 3}, 3),
    ("hidden_states", {"width": 6}, 6),
    ("hidden_states", {"width": 4, "positions": "all", "layers": [0, 2, 7], "dtype": "float16"}, 12),
]


def spec_of(task: str, **sections: Any) -> JobSpec:
    least = {"model": "m", "task": task, "input": {"path": "in"}, "output": {"path": "out"}}
    return JobSpec.model_validate({**least, **sections})


def results_of(spec: JobSpec, width: int) -> tuple[list[Result], list[np.ndarray | None]]:
    """Results with random values, an error among them."""
    random, results, values = np.random.default_rng(1), [], []
    task = task_of(spec)
    for row, length in enumerate(LENGTHS):
        prompt = Prompt(row, list(range(row, row + length)), None, None)
        [request] = task.expand(prompt, 64)
        num_positions = length if spec.pooling.positions == "all" else 1
        value = random.standard_normal((num_positions, width), np.float32)
        values.append(None if row == 1 else value)
        if row == 1:
            results.append(Result(Prompt(row, [], None, None), 0, 1, None, None, RowError("refused", "no"), 1))
        else:
            completion = Completion(request, np.zeros(0, np.int32), "stop", values=value)
            assert num_bytes(completion) >= value.nbytes
            results.append(Result(prompt, 0, 1, completion, None, None, 1))
    return results, values


@pytest.mark.parametrize(("task", "pooling", "width"), CASES)
def test_columns(task: str, pooling: dict[str, Any], width: int, tmp_path: pathlib.Path) -> None:
    """As they were given, through Parquet and back; a row that failed has null vectors."""
    spec = spec_of(task, pooling=pooling)
    results, values = results_of(spec, width)
    made = task_of(spec)
    batch = made.encode(results)
    assert (batch.slice(2, 2).num_rows, row_bytes(batch.slice(2, 2)).tolist()) == (2, row_bytes(batch).tolist()[2:])
    table = made.reduce(None, pa.Table.from_batches([batch]))
    pq.write_table(table, tmp_path / "part.parquet", **made.parquet_options(table.schema))
    stored = pq.read_table(tmp_path / "part.parquet")
    assert stored.equals(table)
    assert stored.schema.equals(made.output_schema([]))
    rows = stored.to_pylist()
    for row, value, length in zip(rows, values, LENGTHS, strict=True):
        assert row["num_output_tokens"] == (None if value is None else 0)
        assert row["num_prompt_tokens"] == (None if value is None else length)
        assert_row(spec, row, value, length)


def assert_row(spec: JobSpec, row: dict[str, Any], value: np.ndarray | None, length: int) -> None:
    pooling, dtype = spec.pooling, spec.pooling.dtype
    match spec.task:
        case "embed":
            assert row["embedding"] == (None if value is None else value[0].astype(dtype).tolist())
        case "classify":
            name = "logits" if pooling.use_activation is False else "probabilities"
            assert row[name] == (None if value is None else value[0].tolist())
            assert row["score"] == (None if value is None else value.max())
            assert row["label"] == (None if value is None else (pooling.labels or ())[int(value.argmax())])
        case "reward":
            assert row["reward"] == (None if value is None else value[0].tolist() if value.size > 1 else value.item())
        case "hidden_states":
            first = 0 if pooling.positions == "all" else length - 1
            assert row["positions"] == (None if value is None else list(range(first, length)))
            names = [f"hidden_states_{layer}" for layer in pooling.layers or ()] or ["hidden_states"]
            for number, name in enumerate(names):
                own = slice(number * pooling.vector_width, (number + 1) * pooling.vector_width)
                assert row[name] == (None if value is None else value[:, own].astype(dtype).tolist())


def test_another_shape_is_no_row() -> None:
    spec = spec_of("embed", pooling={"width": 5})
    results, _ = results_of(spec, 6)
    with pytest.raises(BatchinfError, match=r"^the engine gave values of the shape \(1, 6\) where \(1, 5\) were expec"):
        task_of(spec).encode(results)


def test_a_label_of_nothing_but_nan_is_null() -> None:
    spec = spec_of("classify", pooling={"labels": ["a", "b"]})
    results, _ = results_of(spec, 2)
    values = results[0].completion.values  # type: ignore[union-attr]
    values[:] = np.nan  # type: ignore[index]
    results[2].completion.values[0, 1] = np.nan  # type: ignore[union-attr, index]
    batch = task_of(spec).encode(results)
    assert batch["label"].to_pylist()[:3] == [None, None, "a"]
    table = pa.Table.from_batches([batch])
    assert count_non_finite_rows(table, number_columns(table.schema)) == (2, 0)
    assert count_non_finite_rows(table.slice(1), number_columns(table.schema)) == (1, 0)


@pytest.mark.parametrize("positions", ["last", "all"])
def test_non_finite_states_are_counted_by_row(positions: str) -> None:
    spec = spec_of("hidden_states", pooling={"width": 3, "positions": positions, "layers": [1, 2]})
    results, _ = results_of(spec, 6)
    results[2].completion.values[-1, 5] = np.inf  # type: ignore[union-attr, index]
    table = pa.Table.from_batches([task_of(spec).encode(results)])
    names = number_columns(table.schema)
    assert names == ("hidden_states_1", "hidden_states_2")
    assert [count_non_finite_rows(table.slice(start), names) for start in range(4)] == [(0, 1), (0, 1), (0, 1), (0, 0)]


def test_arrays_of_vectors() -> None:
    flat = np.arange(12, dtype=np.float32)
    array = pa.FixedSizeListArray.from_arrays(pa.array(flat), 3)
    view = to_matrix(array.slice(1, 2))
    assert view.tolist() == [[3, 4, 5], [6, 7, 8]]
    assert np.shares_memory(view, array.values.to_numpy())
    with_null = pa.FixedSizeListArray.from_arrays(pa.array(flat), 3, mask=pa.array([False, True, False, False]))
    np.testing.assert_array_equal(to_matrix(with_null)[:2], [[0, 1, 2], [np.nan] * 3])
    lists = pa.ListArray.from_arrays(pa.array([0, 1, 1, 4], pa.int32()), array)
    ragged = to_ragged(lists.slice(1))
    assert ragged.values.shape == (3, 3)
    assert [ragged[0].tolist(), ragged[1].tolist()] == [[], flat[3:].reshape(3, 3).tolist()]


# -- what a model's config says ---------------------------------------------------------------------------------------


def model_of(folder: pathlib.Path, **config: Any) -> pathlib.Path:
    """The sample model with another config."""
    folder.mkdir(exist_ok=True)
    for path in jobs.MODEL.iterdir():
        if path.name != "config.json" and not (folder / path.name).exists():
            (folder / path.name).symlink_to(path)
    own = json.loads((jobs.MODEL / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**own, **config}))
    return folder


def resolved(task: str, folder: pathlib.Path, **sections: Any) -> JobSpec:
    spec = spec_of(task, **{"model": str(folder), **sections})
    return task_type(spec).resolve(spec, resolve(spec.model))


def test_widths_and_labels(tmp_path: pathlib.Path) -> None:
    classes = {"architectures": ["LlamaForSequenceClassification"], "id2label": {"1": "yes", "0": "no", "10": "so"}}
    folder = model_of(tmp_path / "model", **classes)
    assert resolved("embed", folder).pooling.vector_width == 128
    spec = resolved("classify", folder)
    assert spec.pooling.labels == ("no", "yes", "so")
    assert task_of(spec).describe() == "task classify: probabilities of 3 labels: no, yes, so"
    assert JobSpec.model_validate(spec.model_dump(mode="json")) == spec
    assert resolved("classify", folder, pooling={"labels": ["a", "b", "c"]}).pooling.labels == ("a", "b", "c")
    assert resolved("reward", model_of(folder, **classes, num_labels=1)).pooling.width == 3
    del classes["id2label"]
    assert resolved("reward", model_of(folder, **classes, num_labels=1)).pooling.width == 1
    assert resolved("classify", model_of(folder, **classes)).pooling.labels == ("LABEL_0", "LABEL_1")
    # A dense layer behind the model, as sentence-transformers has it, is part of what vLLM gives.
    modules = [{"type": "sentence_transformers.models.Transformer", "path": ""},
               {"type": "sentence_transformers.models.Dense", "path": "2_Dense"}]  # fmt: skip
    before = resolve(spec.model).fingerprint
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "2_Dense").mkdir()
    (folder / "2_Dense" / "config.json").write_text('{"in_features": 128, "out_features": 48}')
    assert resolved("embed", folder).pooling.width == 48
    assert resolved("hidden_states", folder).pooling.width == 128
    assert resolve(spec.model).fingerprint != before


@pytest.mark.parametrize(
    ("config", "pooling", "words"),
    [
        ({"num_labels": 2}, {}, []),
        ({"num_labels": 1}, {}, ["the model has one class, so that each row has the label 'LABEL_0'"]),
        ({"num_labels": 2, "problem_type": "regression"}, {}, ["the model's config has problem_type regression"]),
        ({"num_labels": 2, "problem_type": "regression"}, {"use_activation": False}, []),
    ],
)
def test_classes_that_may_not_be_meant(
    config: dict[str, Any], pooling: dict[str, Any], words: list[str], tmp_path: pathlib.Path
) -> None:
    model = model_of(tmp_path / "model", architectures=["LlamaForSequenceClassification"], **config)
    where = {"apply_chat_template": False}
    sections = {"sampling": None, "input": where, "output": {"keep_columns": []}, "pooling": pooling}
    job = open_job(read_spec(jobs.spec_of(tmp_path, task="classify", model=str(model), **sections)))
    with contextlib.closing(job.source):
        found = list(job.task.prompt_warnings(job.model, job.source))
    assert len(found) == len(words)
    assert all(line.startswith(f"warning: {start}") for line, start in zip(found, words, strict=True))


def test_sizes_are_estimated() -> None:
    sizes = [
        task_of(resolved(task, jobs.MODEL, pooling=pooling)).estimated_bytes_per_row()
        for task, pooling in (
            ("embed", {}),
            ("embed", {"dtype": "float16"}),
            ("hidden_states", {"positions": "all", "layers": [1, 2]}),
        )
    ]
    assert sizes == [100 + 512, 100 + 256, 100 + 2 * 512 * 256]


@pytest.mark.parametrize(
    ("task", "sections", "error"),
    [
        ("reward", {}, "model.name: LlamaForCausalLM of '{model}' has no classification head, which task reward needs"),
        ("hidden_states", {"pooling": {"layers": [2, 5]}}, "pooling.layers: got 5; must be from 0, the embedding,"),
        ("embed", {"pooling": {"dimensions": 64}}, "pooling.dimensions: got 64, but the model's config does not say"),
        (
            "embed",
            {"pooling": {"dimensions": 256}, "engine": {"hf_overrides": {"is_matryoshka": True}}},
            "pooling.dimensions: got 256; must be at most 128",
        ),
        (
            "hidden_states",
            {"pooling": {"layers": [1]}, "parallel": {"pipeline_parallel_size": 2}},
            "pooling.layers: vLLM gives states between layers with pipeline_parallel_size 1 alone; got 2",
        ),
    ],
)
def test_what_a_model_cannot_give(task: str, sections: dict[str, Any], error: str) -> None:
    with pytest.raises(SpecError) as caught:
        resolved(task, jobs.MODEL, **sections)
    assert str(caught.value).startswith(error.format(model=jobs.MODEL))


def test_a_prompt_may_be_as_long_as_the_model_takes() -> None:
    tokenizer = AutoTokenizer.from_pretrained(jobs.MODEL)
    for task, most in (("embed", 9), ("generate", 8)):
        spec = spec_of(task, input={"path": "in", "token_ids_column": "ids"})
        builder = task_of(spec).prompt_builder(tokenizer, 1536)
        rows = [Row(number, {"ids": [5] * number}, None) for number in (most, most + 1)]
        fits, longer = builder.build(rows, 9)
        assert (fits.error, len(fits.token_ids)) == (None, most)
        assert longer.error == RowError("prompt_too_long", f"got {most + 1} tokens; at most {most} fit max_model_len=9")
        cutting = spec_of(task, input={"path": "in", "token_ids_column": "ids", "on_overlong": "truncate_right"})
        cut = task_of(cutting).prompt_builder(tokenizer, 1536).build(rows, 9)
        assert [len(prompt.token_ids) for prompt in cut] == [most, most]


# -- whole jobs -------------------------------------------------------------------------------------------------------

JOBS: dict[str, tuple[dict[str, Any], str]] = {
    "embed": ({}, "journal.before_fsync"),
    "classify": ({"use_activation": False}, "parts.before_rename"),
    "reward": ({}, "writer.checkpoint:3"),
    "hidden_states": ({"positions": "all", "layers": [1, 4]}, "parts.after_rename"),
}


@pytest.mark.parametrize("task", JOBS)
def test_killed_and_run_again(task: str, tmp_path: pathlib.Path) -> None:
    """The rows are those that the scripted engine gives of each prompt, here in this process."""
    pooling, fault = JOBS[task]
    heads = {"architectures": ["LlamaForSequenceClassification"], "num_labels": 1 if task == "reward" else 3}
    model = model_of(tmp_path / "model", **(heads if task in ("classify", "reward") else {}))
    texts = [f"Once upon a time there were {number} foxes" for number in range(120)]
    texts[7] = "fox " * 40
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps({"id": n, "prompt": text}) + "\n" for n, text in enumerate(texts)))
    path = jobs.spec_of(
        tmp_path,
        task=task,
        model=str(model),
        input={"path": str(source)},
        sampling=None,
        pooling=pooling,
        parallel={"data_parallel_size": 1},
        scripted={"max_num_seqs": 4, "step_s": 0.005, "max_model_len": 40},
        output={"path": str(tmp_path / "out"), "keep_columns": [], "rows_per_shard": 40},
        checkpoint_interval_s=0.01,
        max_error_rate=1.0,
    )
    once = tmp_path / "once"
    once.mkdir()
    # The replica dies and is started again, and then all of it dies.
    faults = f"{fault}=kill,coordinator.after_publish:2=kill"
    assert jobs.run("run", path, faults=faults, BATCHINF_FAULTS_ONCE=str(once)).returncode == -9
    jobs.finish(path)
    assert len(list(once.iterdir())) == 2
    spec = resolved(task, model, pooling=pooling, scripted={"max_model_len": 40})
    tokenizer = AutoTokenizer.from_pretrained(model)
    made = task_of(spec)
    engine = ScriptedPooling(made, spec.scripted, len(tokenizer))
    rows = [Row(number, {"prompt": text}, None) for number, text in enumerate(texts)]
    results = []
    for prompt in made.prompt_builder(tokenizer, None).build(rows, 40):
        completion = None if prompt.error else engine.complete(made.expand(prompt, 40)[0])
        results.append(Result(prompt, 0, 1, completion, None, prompt.error, 1))
    expected = made.reduce(None, pa.Table.from_batches([made.encode(results)])).drop_columns(["attempts"])
    found = jobs.table_of(tmp_path / "out").drop_columns(["attempts", "id"])
    assert found.to_pylist() == expected.to_pylist()
    assert found["error_type"].to_pylist().count(None) == len(texts) - 1
    lines = list(diff_jobs(str(tmp_path / "out"), str(tmp_path / "out"), num_examples=3).lines())
    assert "rows: 120 in both, by row_index" in lines and lines[0].startswith("outputs: 0 of 120 changed (0.00%), by ")
    if task == "hidden_states":
        ragged = Results(tmp_path / "out").ragged("hidden_states_4")
        assert ragged.values.shape == (sum(len(r.prompt.token_ids) for r in results), 128)
        assert ragged.is_null.nonzero()[0].tolist() == [7]
