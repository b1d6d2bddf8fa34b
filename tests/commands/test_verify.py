"""`batchinf verify`: a real job is found good, and one whose stored logprobs were altered by hand is found out."""

import json
import pathlib
import shutil
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from adapters import make_adapter

import jobs
from batchinf.base.errors import DriftError, OutputError, UserError
from batchinf.commands import verify
from batchinf.commands.reference import Reference
from batchinf.commands.verify import Deviations, StoredNumbers, stored_numbers
from batchinf.job import begun
from batchinf.manifest.lines import Platform, record_line
from batchinf.model.model import resolve
from batchinf.records import Prompt, Request, Scoring, Span
from batchinf.results import Results
from batchinf.spec.file import read_spec
from batchinf.spec.job import JobSpec, ModelSpec
from batchinf.tasks.registry import task_of

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
    assert head.split()[:2] == ["numbers", "of"]
    stored = [row for row in jobs.rows_of(made / "out") if row["error_type"] is None]
    counts = {"output": sum(len(row["token_ids"]) for row in stored),
              "prompt": sum(row["num_prompt_tokens"] - 1 for row in stored)}  # fmt: skip
    for line, kind in ((output, "output"), (prompt, "prompt")):
        assert line.split()[:2] == [kind, f"{counts[kind]:,}"]
    assert max(float(line.split()[3]) for line in (output, prompt)) < 1e-3
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
    assert report.verdict == "beyond"
    assert report.deviations[kind].worst == (row_index, sample_index, place)
    assert report.deviations[kind].max_abs_delta == max(it.max_abs_delta for it in report.deviations.values())
    if place == 3:
        done = jobs.run("verify", job, "-n", "100", "--json")
        assert done.returncode == 3
        assert done.stderr.startswith("error: the stored numbers are beyond the tolerance of 0.001; ")
        found = json.loads(done.stdout, parse_constant=lambda text: pytest.fail(text))
        assert (found["verdict"], found["deviations"][kind]["worst"][0], found["num_rows"]) == ("beyond", row_index, 22)


@pytest.mark.parametrize(("device", "dtype", "tolerance"), [
    ("cpu", "float32", 1e-3), ("NVIDIA H200", "float32", 0.1), ("NVIDIA H200", "bfloat16", 0.75),
])  # fmt: skip
def test_float32_on_a_gpu_is_computed_as_tf32(device: str, dtype: str, tolerance: float, job: pathlib.Path) -> None:
    file = read_spec(job)
    with begun.open_begun(file, file.spec.output.path) as (opened, state):
        [platform] = state.of(Platform)
        state.kept = {}
        state.apply(record_line(replace(platform, device=device)))
        assert verify._tolerance(opened, state, Results(file.spec.output.path), dtype) == tolerance


def test_another_adapter_order_is_found(job: pathlib.Path) -> None:
    # The rows' adapters exchanged in the input is another input; the reference without its adapter is another model.
    file = read_spec(job)
    good = verify.verify_job(file, num_rows=6, seed=3)
    again = verify.verify_job(file, num_rows=6, seed=3)
    assert good.verdict == "within" and good == again
    assert verify.verify_job(file, num_rows=6, seed=4).deviations != good.deviations


def test_an_input_that_has_grown_is_verified_as_it_was(job: pathlib.Path, tmp_path: pathlib.Path) -> None:
    spec = json.loads(job.read_text())
    path = tmp_path / "rows.jsonl"
    rows = pathlib.Path(spec["input"]["path"]).read_text()
    path.write_text(rows + rows.splitlines()[-1] + "\n")
    report = verify.verify_job(read_spec(job, [f"input.path={path}"]), num_rows=2)
    assert report.verdict == "within"


def test_what_cannot_be_verified(job: pathlib.Path, made: pathlib.Path, tmp_path: pathlib.Path) -> None:
    rows = (made / "rows.jsonl").read_text()
    (tmp_path / "rows.jsonl").write_text(rows.replace("a", "b"))
    with pytest.raises(UserError, match="input"):
        verify.verify_job(read_spec(job, [f"input.path={tmp_path / 'rows.jsonl'}"]), num_rows=2)
    with pytest.raises(DriftError, match=r"sampling\.max_tokens: the job has 10, now it is 11"):
        verify.verify_job(read_spec(job, ["sampling.max_tokens=11"]), num_rows=2)
    with pytest.raises(OutputError, match="holds no job: there is no such folder"):
        verify.verify_job(read_spec(job, [f"output.path={tmp_path / 'nothing'}"]), num_rows=2)
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


def stored(values: Any, *, is_embedding: bool = False, dtype: Any = np.float32) -> StoredNumbers:
    own = np.array(values, dtype)
    places = np.arange(len(own)) + 3
    return StoredNumbers(
        kind="column", token_ids=[0] * 9, positions=None if is_embedding else places, places=places, values=own
    )


def deviations_of(numbers: StoredNumbers, *pieces: Any) -> Deviations:
    found = Deviations()
    start = 0
    for piece in pieces:
        found.add((7, 1), numbers, np.array(piece, np.float32), start)
        start += len(piece)
    return found


def test_how_rows_of_numbers_are_counted() -> None:
    numbers = stored([[1.0, 3.0, 2.0], [np.nan, 5.0, 4.0], [1.0, 1.0, 0.5], [7.0, 7.0, 7.0]])
    # In pieces, as a reference gives them.
    says = [[[1.0, 2.5, 2.0]], [[0.0, 5.0, 5.5], [1.0, 1.25, 0.5], [7.0, 7.0, 7.0]]]
    found = deviations_of(numbers, *says)
    assert (found.num_positions, found.num_values, found.num_missing) == (4, 12, 1)
    assert (found.max_abs_delta, found.worst) == (np.inf, (7, 1, 4))
    assert (found.sum_abs_delta, found.num_summed) == (0.5 + 1.5 + 0.25, 11)
    # The second row's likeliest is another; the third has two highest, of which the reference's is one.
    assert found.num_agreeing == 3
    assert found.line("column").split() == ["column", "4", "12", "inf", "2.05e-01", "75.00%", "-"]


@pytest.mark.parametrize(("values", "says", "largest"), [
    ([[np.inf], [3.0], [2.0]], [[70000.0], [3.0], [2.5]], 0.5),  # float16 cannot hold the first
    ([[np.inf], [3.0]], [[60000.0], [3.0]], np.inf),
    ([[-np.inf], [3.0]], [[-np.inf], [3.0]], 0.0),
])  # fmt: skip
def test_infinities_of_float16(values: Any, says: Any, largest: float) -> None:
    assert deviations_of(stored(values, dtype=np.float16), says).max_abs_delta == largest


@pytest.mark.parametrize(("values", "says", "relative", "cosine"), [
    ([3.0, 4.0], [3.0, 4.5], 0.5 / np.hypot(3, 4.5), 0.9985),
    ([0.0, 1.0], [1.0, 0.0], 2**0.5, 0.0),
    ([6.0, 9.0], [3.0, 4.5], 1.0, 1.0),  # the right direction is not enough
    ([0.0, 0.0], [0.0, 0.0], 0.0, 0.0),
    ([0.0, 0.0], [0.0, 2.0], 1.0, 0.0),
    ([np.nan, 4.5], [3.0, 4.5], np.inf, None),
])  # fmt: skip
def test_how_embeddings_are_counted(values: Any, says: Any, relative: float, cosine: float | None) -> None:
    found = deviations_of(stored([values], is_embedding=True), [says])
    assert found.max_abs_delta == pytest.approx(relative)
    if cosine is not None:
        assert found.min_cosine == pytest.approx(cosine, abs=1e-3)


SCORE = JobSpec.model_validate(
    {"model": "m", "task": "score", "input": {"path": "in", "text_column": "text"}, "output": {"path": "out"}}
)


def scored(spans: list[tuple[list[int], int]], **row: Any) -> list[tuple[list[int], Any, Any, Any]]:
    prompt = Prompt(0, [], None, None, scoring=Scoring(tuple(Span(ids, start, 1) for ids, start in spans)))
    found = stored_numbers(task_of(SCORE), pa.Table.from_pylist([row]), prompt, [Request(0, 0, [0], SCORE.sampling)])
    return [(it.token_ids, it.positions.tolist(), it.tokens.tolist(), it.values.tolist()) for it in found]


def test_what_a_scored_row_has_stored() -> None:
    # Two windows of a text, the second filled up with tokens of the first.
    windows = scored([([0, 5, 6, 7], 1), ([6, 7, 8, 9], 2)], logprobs=[-1.0, -2.0, -3.0, -4.0, -5.0])
    assert windows == [
        ([0, 5, 6, 7], [0, 1, 2], [[5], [6], [7]], [[-1.0], [-2.0], [-3.0]]),
        ([6, 7, 8, 9], [1, 2], [[8], [9]], [[-4.0], [-5.0]]),
    ]
    # A continuation with its context, of whose first token nothing is known, and with the likeliest beside each.
    [whole] = scored(
        [([0, 5, 6], 2)], logprobs=[None, -1.0, -2.0], top_token_ids=[[], [4], [6]], top_logprobs=[[], [-0.5], [-2.0]]
    )
    assert whole == ([0, 5, 6], [0, 1], [[5, 4], [6, 6]], [[-1.0, -0.5], [-2.0, -2.0]])
    choices = scored([([0, 5], 1), ([0, 6, 7], 1)], choice_logprobs=[[-1.0], [-2.0, -3.0]])
    assert choices == [([0, 5], [0], [[5]], [[-1.0]]), ([0, 6, 7], [0, 1], [[6], [7]], [[-2.0], [-3.0]])]


@pytest.mark.parametrize("name", ["classify", "reward", "hidden_states", "rerank"])
def test_tasks_that_are_not_verified(name: str) -> None:
    spec = JobSpec.model_validate(
        {"model": "m", "task": name, "input": {"path": "in", **RERANK.get(name, {})}, "output": {"path": "out"}}
    )
    reason = task_of(spec).why_unverified(resolve(ModelSpec(name=str(jobs.MODEL))))
    assert reason == f"task {name} cannot be verified, only generate, score, logits and embed can"


RERANK = {"rerank": {"query_column": "q", "document_column": "d"}}


def embedding_job(model: pathlib.Path) -> JobSpec:
    return JobSpec.model_validate(
        {"model": str(model), "task": "embed", "input": {"path": "in"}, "output": {"path": "out"},
         "pooling": {"width": 128}}
    )  # fmt: skip


def test_embeddings_that_cannot_be_verified(tmp_path: pathlib.Path) -> None:
    spec = embedding_job(jobs.MODEL)
    reference = Reference(task_of(spec), resolve(spec.model), "cpu")
    with pytest.raises(UserError, match=r"^the engine pooled by STEP; LAST, MEAN, CLS can be verified$"):
        reference.embedding([5, 6], "STEP", None)
    with pytest.raises(UserError, match=r"^the job's rows have 64 numbers each, transformers' 128: they cannot be ver"):
        deviations_of(stored([[0.0] * 64], is_embedding=True), reference.embedding([5, 6], "CLS", None))
    folder = tmp_path / "model"
    shutil.copytree(jobs.MODEL, folder)
    (folder / "modules.json").write_text('[{"type": "sentence_transformers.models.Dense", "path": "2_Dense"}]')
    (folder / "2_Dense").mkdir()
    (folder / "2_Dense" / "config.json").write_text('{"out_features": 128}')
    spec = embedding_job(folder)
    reason = task_of(spec).why_unverified(resolve(spec.model))
    assert reason == f"'{folder}' has a dense layer behind it (modules.json), which transformers does not apply"
