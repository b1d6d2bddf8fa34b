"""`batchinf verify`: a real job is found good, and one whose stored logprobs were altered by hand is found out."""

import json
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from adapters import make_adapter

import jobs
from batchinf.base.errors import DriftError, OutputError, UserError
from batchinf.commands import verify
from batchinf.job import begun
from batchinf.model.identity import resolve
from batchinf.records import Prompt, Scoring, Span
from batchinf.spec.file import read_spec
from batchinf.spec.job import JobSpec
from batchinf.tasks.deviations import LogprobDeviations, VectorDeviations, spearman, table_lines
from batchinf.tasks.generate.compare import TextVerification
from batchinf.tasks.registry import task_of
from batchinf.tasks.score.compare import ScoreVerification
from batchinf.tasks.verification import ReferenceWanted, StoredLogprobs, StoredRow, StoredVectors

NUM_ROWS = 12


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder with a job on real vLLM, in float32, half of its rows through a LoRA adapter, one of them an error."""
    pytest.importorskip("vllm")
    folder = tmp_path_factory.mktemp("verified")
    lines = jobs.PROMPTS.read_text(encoding="utf-8").strip().split("\n")[: 3 * NUM_ROWS : 3]
    rows = [
        {"prompt": json.loads(line)["prompt"], "adapter": "own" if number % 2 else None}
        for number, line in enumerate(lines)
    ]
    rows[4]["prompt"] = None
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = jobs.spec_of(
        folder,
        model={"name": str(jobs.MODEL), "lora": {"own": str(make_adapter(folder / "own", 1))}},
        input={"path": str(folder / "rows.jsonl"), "id_column": None, "adapter_column": "adapter"},
        sampling={"temperature": 1.0, "n": 2, "max_tokens": 10, "logprobs": 4, "prompt_logprobs": 0},
        parallel={"data_parallel_size": 1},
        engine={"max_model_len": 512, "max_num_seqs": 16},
        output={"keep_columns": [], "rows_per_shard": 4},
        max_error_rate=1.0,
        scripted=None,
    )
    jobs.finish(path, VLLM_ENABLE_V1_MULTIPROCESSING="0")
    return folder


@pytest.fixture
def job(made: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
    """A copy of the job that a test may hurt: its spec."""
    shutil.copytree(made / "out", tmp_path / "out")
    spec = json.loads((made / "job.yaml").read_text())
    spec["output"]["path"] = str(tmp_path / "out")
    path = tmp_path / "job.yaml"
    path.write_text(json.dumps(spec))
    return path


def alter(out: pathlib.Path, column: str, row: int, change: Callable[[Any], Any]) -> tuple[int, int]:
    """Change a value of the last part that holds it; its row's `row_index` and `sample_index`."""
    path = sorted((out / "parts").glob("*.parquet"))[-1]
    table = pq.read_table(path)
    values = table[column].to_pylist()
    values[row] = change(values[row])
    place = table.schema.get_field_index(column)
    pq.write_table(table.set_column(place, table.field(column), pa.array(values, table.field(column).type)), path)
    return table["row_index"][row].as_py(), table["sample_index"][row].as_py()


def test_a_job_of_the_real_engine_is_within_a_thousandth(made: pathlib.Path) -> None:
    done = jobs.run("verify", made / "job.yaml", "-n", "100")
    assert done.returncode == 0, done.stderr
    _, first, head, prompt, output = done.stdout.splitlines()[:5]
    assert ": 22 of 24 rows (--seed 0), engine in float32, against transformers " in first
    assert head.split()[:2] == ["tokens", "of"]
    stored = [row for row in jobs.rows_of(made / "out") if row["error_type"] is None]
    counts = {"output": sum(len(row["token_ids"]) for row in stored),
              "prompt": sum(row["num_prompt_tokens"] - 1 for row in stored)}  # fmt: skip
    for line, kind in ((output, "output"), (prompt, "prompt")):
        assert line.split()[:2] == [kind, f"{counts[kind]:,}"]
    assert max(float(line.split()[2]) for line in (output, prompt)) < 1e-3
    assert done.stdout.splitlines()[0] == "verdict: within the tolerance of 0.001"


def test_a_folder_that_was_moved_is_verified(job: pathlib.Path) -> None:
    out = job.parent / "it's: moved"
    (job.parent / "out").rename(out)
    job.unlink()
    done = jobs.run("verify", out, "-n", "1")
    assert done.stdout.splitlines()[1].startswith(f"{out}: 1 of 24 rows"), done.stderr


@pytest.mark.parametrize(
    ("column", "change", "kind", "place"),
    [
        ("logprobs", lambda values: [*values[:3], values[3] - 0.002, *values[4:]], "output", 3),
        ("top_logprobs", lambda rows: [*rows[:2], [*rows[2][:3], rows[2][3] + 0.01], *rows[3:]], "output", 2),
        ("prompt_logprobs", lambda values: [*values[:2], values[2] + 0.5, *values[3:]], "prompt", 2),
        ("logprobs", lambda values: [float("nan"), *values[1:]], "output", 0),
        ("logprobs", lambda values: [float("-inf"), *values[1:]], "output", 0),
    ],
    ids=["own", "top", "prompt", "NaN", "-inf"],
)
def test_what_was_altered_is_found(
    column: str, change: Callable[[Any], Any], kind: str, place: int, job: pathlib.Path
) -> None:
    row_index, sample_index = alter(job.parent / "out", column, -1, change)
    report = verify.verify_job(read_spec(job), num_rows=100)
    assert not report.is_within
    worst = report.worst[0]
    assert (worst.row_index, worst.sample_index, worst.kind, worst.place) == (row_index, sample_index, kind, place)
    if place == 3:
        done = jobs.run("verify", job, "-n", "100", "--json")
        assert done.returncode == 3
        assert done.stderr.startswith("error: the stored logprobs are beyond the tolerance of 0.001; ")
        found = json.loads(done.stdout, parse_constant=lambda text: pytest.fail(text))
        assert (found["verdict"], found["worst"][0]["row_index"], found["num_rows"]) == ("beyond", row_index, 22)


@pytest.mark.parametrize(("device", "dtype", "tolerance"), [
    ("cpu", "float32", 1e-3), ("NVIDIA H200", "float32", 0.1), ("NVIDIA H200", "bfloat16", 0.75),
])  # fmt: skip
def test_float32_on_a_gpu_is_computed_as_tf32(device: str, dtype: str, tolerance: float, job: pathlib.Path) -> None:
    file = read_spec(job)
    with begun.open_begun(file, file.spec.output.path) as (opened, state):
        event = next(event for event in state.events if "device" in event.fields)
        event.fields["device"] = device
        assert verify._tolerance(opened, state, opened.task.verification(opened.spec), dtype) == tolerance


def test_another_adapter_order_is_found(job: pathlib.Path) -> None:
    # The rows' adapters exchanged in the input is another input; the reference without its adapter is another model.
    file = read_spec(job)
    good = verify.verify_job(file, num_rows=6, seed=3)
    again = verify.verify_job(file, num_rows=6, seed=3)
    assert good.is_within and good == again
    assert verify.verify_job(file, num_rows=6, seed=4).worst != good.worst
    bfloat16 = verify.verify_job(file, num_rows=6, seed=3, dtype="bfloat16")
    assert max(found.max_abs_delta for found in bfloat16.deviations.values()) > 0.001


def test_an_input_that_has_grown_is_verified_as_it_was(job: pathlib.Path, tmp_path: pathlib.Path) -> None:
    spec = json.loads(job.read_text())
    path = tmp_path / "rows.jsonl"
    rows = pathlib.Path(spec["input"]["path"]).read_text()
    path.write_text(rows + rows.splitlines()[-1] + "\n")
    report = verify.verify_job(read_spec(job, [f"input.path={path}"]), num_rows=2)
    assert report.is_within


def test_what_cannot_be_verified(job: pathlib.Path, made: pathlib.Path, tmp_path: pathlib.Path) -> None:
    rows = (made / "rows.jsonl").read_text()
    (tmp_path / "rows.jsonl").write_text(rows.replace("a", "b"))
    with pytest.raises(UserError, match="input"):
        verify.verify_job(read_spec(job, [f"input.path={tmp_path / 'rows.jsonl'}"]), num_rows=2)
    with pytest.raises(DriftError, match=r"sampling\.max_tokens: the job has 10, now it is 11"):
        verify.verify_job(read_spec(job, ["sampling.max_tokens=11"]), num_rows=2)
    with pytest.raises(OutputError, match="holds no job: there is no such folder"):
        verify.verify_job(read_spec(job, [f"output.path={tmp_path / 'nothing'}"]), num_rows=2)
    with pytest.raises(UserError, match=r"^--dtype: got 'int8'; must be float32, float16, bfloat16$"):
        verify.verify_job(read_spec(job), dtype="int8")
    alter(job.parent / "out", "prompt_hash", -1, lambda value: value + 1)
    with pytest.raises(DriftError, match=r"^row 11 has other prompt tokens now than in the run: "):
        verify.verify_job(read_spec(job), num_rows=100)


def test_a_job_without_a_model_or_without_logprobs(tmp_path: pathlib.Path) -> None:
    lines = jobs.PROMPTS.read_text(encoding="utf-8").split("\n")[:4]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    sections: dict[str, Any] = {"input": {"path": str(tmp_path / "rows.jsonl")}, "sampling": {"logprobs": None}}
    path = jobs.spec_of(tmp_path, **sections)
    done = jobs.run("verify", path)
    assert (done.returncode, done.stdout) == (2, "")
    jobs.finish(path)
    with pytest.raises(UserError, match=r"^the job was run by the scripted engine: there is no model to verify$"):
        verify.verify_job(read_spec(path))
    schema = pa.schema([("row_index", pa.int64())])
    with pytest.raises(UserError, match=r"^the job stored no logprobs to verify; run one with"):
        TextVerification(read_spec(path).spec).check(schema)
    with pytest.raises(UserError, match=r"^the job stored no token_ids, whose logprobs could be verified; run one"):
        TextVerification(read_spec(path).spec).check(pa.schema([("logprobs", pa.list_(pa.float32()))]))


def spearmanr(one: Any, other: Any) -> Any:
    """Scipy's. Each process of pytest reads this file, and only one runs it: the import takes 1.5 s."""
    from scipy.stats import spearmanr

    return spearmanr(one, other)


@pytest.mark.parametrize("num_values", [1, 2, 5, 30])
def test_spearman_is_scipys(num_values: int) -> None:
    random = np.random.default_rng(num_values)
    # Few different values, so that many are equal.
    a, b = (random.integers(0, 9, (20, num_values)).astype(np.float64) for _ in range(2))
    found = spearman(a, b)
    for one, other, correlation in zip(a, b, found, strict=True):
        if len(set(one)) < 2 or len(set(other)) < 2:
            assert np.isnan(correlation)
        else:
            assert correlation == pytest.approx(spearmanr(one, other).statistic)


def test_how_logprobs_are_counted() -> None:
    stored = np.array([[-1.0, -1.0, -2.0, -3.0], [-3.0, -1.0, -2.0, np.nan]], np.float32)
    wanted = np.array([[5, 5, 6, 7], [8, 5, 6, 7]])
    says = np.array([[-1.1, -1.1, -2.0, -3.4], [-3.0, -2.0, -1.0, -4.0]], np.float32)
    found = LogprobDeviations()
    stored_logprobs = StoredLogprobs(kind="output", token_ids=[0] * 4, first=2, tokens=wanted, values=stored)
    place, most = found.add(stored_logprobs, says, np.array([5, 6]))
    assert (place, most) == (1, np.inf)
    assert (found.num_positions, found.num_values, found.num_nan, found.num_ranked, found.num_agreeing) == (
        2,
        8,
        1,
        2,
        1,
    )
    assert (found.max_abs_delta, found.max_abs_delta_top) == (pytest.approx(0.1), pytest.approx(1.0))
    assert found.sum_abs_delta == pytest.approx(0.1)
    assert (found.num_correlated, found.sum_correlation) == (1, pytest.approx(1.0))


SCORE = JobSpec.model_validate(
    {"model": "m", "task": "score", "input": {"path": "in", "text_column": "text"}, "output": {"path": "out"}}
)


def scored(spans: list[tuple[list[int], int]], **row: Any) -> list[tuple[list[int], int, list[list[int]], list[Any]]]:
    prompt = Prompt(0, [], None, None, scoring=Scoring(tuple(Span(ids, start, 1) for ids, start in spans)))
    found = ScoreVerification(SCORE).stored(
        StoredRow(values=row, columns=(), part=pathlib.Path(), group=0, place=0), prompt, ()
    )
    return [(it.token_ids, it.first, it.tokens.tolist(), it.values.tolist()) for it in found]


def test_what_a_scored_row_has_stored() -> None:
    # Two windows of a text, the second filled up with tokens of the first.
    windows = scored([([0, 5, 6, 7], 1), ([6, 7, 8, 9], 2)], logprobs=[-1.0, -2.0, -3.0, -4.0, -5.0])
    assert windows == [
        ([0, 5, 6, 7], 1, [[5], [6], [7]], [[-1.0], [-2.0], [-3.0]]),
        ([6, 7, 8, 9], 2, [[8], [9]], [[-4.0], [-5.0]]),
    ]
    # A continuation with its context, of whose first token nothing is known, and with the likeliest beside each.
    [whole] = scored(
        [([0, 5, 6], 2)], logprobs=[None, -1.0, -2.0], top_token_ids=[[], [4], [6]], top_logprobs=[[], [-0.5], [-2.0]]
    )
    assert whole == ([0, 5, 6], 1, [[5, 4], [6, 6]], [[-1.0, -0.5], [-2.0, -2.0]])
    choices = scored([([0, 5], 1), ([0, 6, 7], 1)], choice_logprobs=[[-1.0], [-2.0, -3.0]])
    assert choices == [([0, 5], 1, [[5]], [[-1.0]]), ([0, 6, 7], 1, [[6], [7]], [[-2.0], [-3.0]])]


def stored_vectors(values: Any, has_direction: bool = False, dtype: Any = np.float32) -> StoredVectors:
    own = np.array(values, dtype)
    return StoredVectors(
        kind="column",
        token_ids=[0] * 9,
        positions=np.arange(len(own)) + 3,
        values=own,
        has_direction=has_direction,
    )


def test_how_rows_of_numbers_are_counted() -> None:
    stored = stored_vectors([[1.0, 3.0, 2.0], [np.nan, 5.0, 4.0], [1.0, 1.0, 0.5], [7.0, 7.0, 7.0]])
    says = np.array([[1.0, 2.5, 2.0], [0.0, 5.0, 5.5], [1.0, 1.25, 0.5], [7.0, 7.0, 7.0]], np.float32)
    found = VectorDeviations()
    # In pieces, as a reference gives them.
    assert found.add(stored, iter([says[:1], says[1:]])) == (1, np.inf)
    assert (found.num_positions, found.num_values, found.num_nan) == (4, 12, 1)
    assert (found.max_abs_delta, found.sum_abs_delta, found.worst) == (1.5, 0.5 + 1.5 + 0.25, 1.5)
    # The second row's likeliest is another; the third has two highest, of which the reference's is one.
    assert (found.num_ranked, found.num_agreeing) == (4, 3)
    assert found.num_correlated == 2
    assert found.sum_correlation == pytest.approx(1.0 + spearmanr([1, 1, 0.5], [1, 1.25, 0.5]).statistic)


def test_one_number_a_row_and_what_float16_cannot_hold() -> None:
    stored = stored_vectors([[np.inf], [3.0], [2.0]], dtype=np.float16)
    found = VectorDeviations()
    assert found.add(stored, [np.array([[70000.0], [3.0], [2.5]], np.float32)]) == (2, 0.5)
    assert (found.num_ranked, found.num_correlated, found.sum_correlation) == (0, 1, pytest.approx(1.0))
    finite = VectorDeviations()
    assert finite.add(stored, [np.array([[60000.0], [3.0], [2.0]], np.float32)]) == (0, np.inf)
    assert finite.worst == np.inf


def test_how_vectors_are_counted() -> None:
    stored = stored_vectors([[3.0, 4.0], [0.0, 0.0], [0.0, 1.0], [0.0, 0.0]], has_direction=True)
    found = VectorDeviations(has_direction=True)
    says = np.array([[3.0, 4.5], [0.0, 0.0], [1.0, 0.0], [0.0, 2.0]], np.float32)
    assert found.add(stored, [says]) == (2, pytest.approx(2**0.5))
    assert (found.min_cosine, found.max_relative) == (0.0, found.worst)
    again = VectorDeviations(has_direction=True)
    assert again.add(stored_vectors([[3.0, 4.0]], has_direction=True), [says[:1]])[1] == pytest.approx(
        0.5 / np.hypot(3, 4.5)
    )
    # The right direction is not enough, and NaN is nothing at all.
    twice = VectorDeviations(has_direction=True).add(stored_vectors([[6.0, 9.0]], True), [says[:1]])
    assert twice[1] == pytest.approx(1.0)
    lost = VectorDeviations(has_direction=True)
    assert lost.add(stored_vectors([[np.nan, 4.5]], has_direction=True), [says[:1]])[1] == np.inf
    assert (lost.num_nan, lost.worst) == (1, np.inf)
    # Nothing where something should be.
    nothing = VectorDeviations(has_direction=True).add(stored_vectors([[0.0, 0.0]], True), [says[3:]])
    assert nothing[1] == 1.0


def test_ranks_of_many_positions_are_compared_at_some(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(3)
    values = random.standard_normal((100, 7)).astype(np.float32)
    found = VectorDeviations()
    found.add(stored_vectors(values), [values[:40], values[40:50], values[50:]])
    assert (found.num_correlated, found.sum_correlation) == (15, pytest.approx(15.0))  # every seventh


def test_the_table_has_a_head_for_each_kind_of_line() -> None:
    deviations: dict[str, LogprobDeviations | VectorDeviations] = {
        "output": LogprobDeviations(num_positions=3, num_values=3),
        "prompt": LogprobDeviations(num_positions=4, num_values=8),
        "logits": VectorDeviations(num_positions=2, num_values=2000),
        "embedding": VectorDeviations(has_direction=True, num_positions=1, num_values=5),
    }
    lines = [line.split() for line in table_lines(deviations)]
    assert [line[0] for line in lines] == ["tokens", "output", "prompt", "rows", "logits", "vectors", "embedding"]
    assert lines[4] == ["logits", "2", "2k", "0.00e+00", "0.00e+00", "-", "-"]
    assert lines[6][-1] == "1.0000000"


def reference_of(spec: JobSpec, pooling_type: str) -> Any:
    wanted = ReferenceWanted(
        model=resolve(spec.model), adapters=(), dtype="float32", device="cpu", pooling_type=pooling_type
    )
    verification = task_of(spec).verification
    assert verification is not None
    return verification(spec).reference(wanted)


def pooling_job(model: pathlib.Path, task: str, **sections: Any) -> JobSpec:
    pooling = {"labels": ["a", "b"]} if task == "classify" else {"width": 128}
    return JobSpec.model_validate(
        {"model": str(model), "task": task, "input": {"path": "in"}, "output": {"path": "out"}, "pooling": pooling}
        | sections
    )


@pytest.mark.parametrize(
    ("task", "sections", "config", "error"),
    [
        ("embed", {}, {}, "the engine pooled by STEP; LAST, MEAN, CLS can be verified"),
        ("classify", {"pooling": {"pooling_type": "mean"}}, {},
         "pooling.pooling_type is mean, which transformers' head does not take: it cannot be verified"),
        ("reward", {"engine": {"pooler_config": {"logit_mean": 1.0}}}, {},
         "engine.pooler_config is {'logit_mean': 1.0}, which transformers' head does not take: it cannot be verified"),
        ("classify", {}, {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"},
         "'{model}' names an activation of its own, which transformers does not apply; a job with "
         "pooling.use_activation: false can be verified"),
        ("classify", {}, {}, "transformers finds no score.weight in '{model}': its head is made by vLLM, and cannot be "
         "verified"),
    ],
    ids=["pooled otherwise", "pooling_type", "pooler_config", "activation", "no head"],
)  # fmt: skip
def test_vectors_that_cannot_be_verified(
    task: str, sections: dict[str, Any], config: dict[str, Any], error: str, tmp_path: pathlib.Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(jobs.MODEL, folder)
    own = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**own, **config}))
    spec = pooling_job(folder, task, **sections)
    with pytest.raises(UserError) as caught:
        reference_of(spec, "STEP")
    assert str(caught.value) == error.replace("{model}", str(folder))


def test_embeddings_behind_a_dense_layer_and_vectors_of_another_width(tmp_path: pathlib.Path) -> None:
    stored = StoredVectors(
        kind="embedding",
        token_ids=[5, 6],
        positions=None,
        values=np.zeros((1, 64), np.float32),
        has_direction=True,
    )
    spec = pooling_job(jobs.MODEL, "embed")
    reference = reference_of(spec, "CLS")
    with pytest.raises(UserError, match=r"^the job's rows have 64 numbers each, transformers' 128: they cannot be ver"):
        next(reference.vectors(stored, None))
    folder = tmp_path / "model"
    shutil.copytree(jobs.MODEL, folder)
    (folder / "modules.json").write_text('[{"type": "sentence_transformers.models.Dense", "path": "2_Dense"}]')
    (folder / "2_Dense").mkdir()
    (folder / "2_Dense" / "config.json").write_text('{"out_features": 128}')
    spec = pooling_job(folder, "embed")
    with pytest.raises(UserError, match=r"has a dense layer behind it \(modules\.json\), which transformers does not"):
        reference_of(spec, "LAST")
