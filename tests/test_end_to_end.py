"""Whole jobs on real vLLM on the CPU, held against `LLM.generate` and against each other."""

import json
import pathlib
import signal
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

import jobs
from batchinf.commands.head import read_head

pytest.importorskip("vllm")
pytestmark = pytest.mark.timeout(900)  # an engine core in a process of its own takes half a minute to start

NUM_ROWS = 40
STOPS = ["e.", "\n\n"]
SAMPLING = {"temperature": 0.0, "max_tokens": 24, "logprobs": 5, "stop": STOPS}
ENGINE = {"max_model_len": 512, "max_num_seqs": 16}


@pytest.fixture(scope="module")
def rows_in(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    # Not splitlines(): the prompts hold U+2028 and its like.
    lines = jobs.PROMPTS.read_text(encoding="utf-8").strip().split("\n")
    path = tmp_path_factory.mktemp("input") / "prompts.jsonl"
    path.write_text("\n".join(lines[:: len(lines) // NUM_ROWS][:NUM_ROWS]) + "\n", encoding="utf-8")
    return path


def real_job(folder: pathlib.Path, rows_in: pathlib.Path, **sections: Any) -> pathlib.Path:
    base: dict[str, Any] = {
        "input": {"path": str(rows_in)},
        "sampling": SAMPLING,
        "engine": ENGINE,
        "parallel": {"data_parallel_size": 1},
        "scripted": None,
        "output": {"include_prompt": True, "rows_per_shard": 8},
    }
    return jobs.spec_of(folder, **{**base, **sections})


@pytest.fixture(scope="module")
def alone_spec(tmp_path_factory: pytest.TempPathFactory, rows_in: pathlib.Path) -> pathlib.Path:
    """A finished job of one replica on one device: its spec."""
    spec = real_job(tmp_path_factory.mktemp("alone"), rows_in)
    jobs.finish(spec)
    return spec


@pytest.fixture(scope="module")
def alone(alone_spec: pathlib.Path) -> list[dict[str, Any]]:
    """The rows of one replica on one device."""
    return jobs.rows_of(alone_spec.parent / "out")


@pytest.mark.slow
def test_rows_are_those_of_llm_generate(
    alone: list[dict[str, Any]], rows_in: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    prompts = [json.loads(line)["prompt"] for line in rows_in.read_text(encoding="utf-8").strip().split("\n")]
    # top_p is the generation_config's, which greedy decoding does not look at.
    arguments = [json.dumps(prompts), json.dumps(SAMPLING), str(tmp_path / "reference.json"), str(jobs.MODEL)]
    jobs.run_vllm("llm_generate", *arguments)
    expected = json.loads((tmp_path / "reference.json").read_text())
    assert len(alone) == len(expected) == NUM_ROWS
    assert {row["finish_reason"] for row in alone} == {"stop", "length"}
    for row, reference in zip(alone, expected, strict=True):
        for name in ("text", "token_ids", "finish_reason", "stop_reason", "prompt_token_ids"):
            assert row[name] == reference[name], name
        assert row["cumulative_logprob"] == pytest.approx(reference["cumulative_logprob"], abs=1e-4)
        for position, token in enumerate(row["token_ids"]):
            entries = reference["logprobs"][position]
            assert row["logprobs"][position] == pytest.approx(entries[str(token)][0], abs=1e-4)
            assert row["ranks"][position] == entries[str(token)][1]
            top = dict(zip(row["top_token_ids"][position], row["top_logprobs"][position], strict=True))
            assert len(top) == 5
            for top_token, logprob in top.items():
                assert logprob == pytest.approx(entries[str(top_token)][0], abs=1e-4)


@pytest.mark.slow
def test_degrees_do_not_change_rows(alone: list[dict[str, Any]], rows_in: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Tensor parallel, and its logits, of which each worker has all and one sends them: tokens and logprobs are those
    of the text from one device, and go on where a stop string ended that. Two replicas are killed, and give the rows
    of one, below.
    """
    sections = {"task": "logits", "logits": {"positions": "generated", "dtype": "float32"}}
    parallel = {"data_parallel_size": 1, "tensor_parallel_size": 2}
    sampling = {"temperature": 0.0, "max_tokens": SAMPLING["max_tokens"], "logprobs": None}
    jobs.finish(real_job(tmp_path, rows_in, **sections, sampling=sampling, parallel=parallel))
    rows = jobs.rows_of(tmp_path / "out")
    assert len(rows) == NUM_ROWS
    for row, expected in zip(rows, alone, strict=True):
        num_tokens = len(expected["token_ids"])
        assert row["token_ids"][:num_tokens] == expected["token_ids"]
        logits = np.array(row["logits"], np.float64)
        assert logits.shape == (len(row["token_ids"]), 1536)
        found = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        sampled = found[np.arange(num_tokens), expected["token_ids"]]
        np.testing.assert_allclose(sampled, expected["logprobs"], atol=1e-4)
        for position, (token_ids, logprobs) in enumerate(
            zip(expected["top_token_ids"], expected["top_logprobs"], strict=True)
        ):
            np.testing.assert_allclose(found[position, token_ids], logprobs, atol=1e-4)


@pytest.mark.slow
def test_a_signal_to_all_processes_engine_core_included(
    alone: list[dict[str, Any]], rows_in: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """As Slurm ends a job. What the signal cuts short, which vLLM gives back as `abort`, is run again."""
    out = tmp_path / "out"
    output = {"include_prompt": True, "rows_per_shard": 4}
    # Few at a time, so that there is work left, and requests in the engine, when the first part is there.
    spec = real_job(tmp_path, rows_in, engine={**ENGINE, "max_num_seqs": 4}, output=output)
    process = jobs.start("run", spec, VLLM_ENABLE_V1_MULTIPROCESSING="1")
    jobs.wait_until(lambda: list((out / "parts").glob("*.parquet")) or process.poll() is not None, wait_s=540)
    everyone = jobs.family(process.pid)
    assert len(jobs.engine_cores_of(process.pid)) == 1
    for one in everyone:
        one.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 75, errors
    assert "Traceback" not in errors
    assert jobs.are_gone(everyone)
    state = jobs.state_of(out)
    assert not state.committed.all()
    assert not any(event["cause"] for event in jobs.events_of(out, "replica_ended"))
    stopped = read_head(str(out), 1000).rows
    assert {row["finish_reason"] for row in stopped} <= {"stop", "length"}
    assert len(stopped) < NUM_ROWS
    jobs.finish(spec)
    assert_close(jobs.rows_of(out), alone)
    assert {row["attempts"] for row in jobs.table_of(out).select(["attempts"]).to_pylist()} <= {1, 2}


@pytest.mark.slow
def test_an_engine_core_that_alone_stands_still(
    alone: list[dict[str, Any]], rows_in: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """SIGSTOP to the core: the replica lives and waits for it. The stall timeout ends both, also the stopped one."""
    out, output = tmp_path / "out", {"include_prompt": True, "rows_per_shard": 4}
    engine = {**ENGINE, "max_num_seqs": 4}
    # A step takes a small part of that, also on a busy machine.
    spec = real_job(tmp_path, rows_in, engine=engine, output=output, stall_timeout_s=20)
    process = jobs.start("run", spec, VLLM_ENABLE_V1_MULTIPROCESSING="1")
    jobs.wait_until(lambda: list((out / "parts").glob("*.parquet")) or process.poll() is not None, wait_s=540)
    cores = jobs.engine_cores_of(process.pid)
    assert len(cores) == 1
    cores[0].suspend()
    _, errors = process.communicate(timeout=540)
    assert process.returncode == 0, errors
    assert jobs.are_gone(cores)
    causes = [event["cause"] for event in jobs.events_of(out, "replica_ended") if event["cause"]]
    assert len(causes) == 1 and "no step" in causes[0], causes
    assert_close(jobs.rows_of(out), alone)


@pytest.mark.slow
def test_seeded_samples_repeat_on_two_replicas_killed_and_resumed_on_one(
    rows_in: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    sampling = {"temperature": 0.9, "n": 3, "max_tokens": 12, "seed": 7, "logprobs": 3}
    found = []
    for degree in (1, 2):
        folder = tmp_path / str(degree)
        folder.mkdir()
        # Few at a time on two, so that there is work left when the first part is there.
        engine = {**ENGINE, "max_num_seqs": 16 // degree**2}
        spec = real_job(folder, rows_in, sampling=sampling, engine=engine, parallel={"data_parallel_size": degree})
        if degree == 2:
            kill_once_a_part_is_there(spec)
        jobs.finish(spec, "--set", "parallel.data_parallel_size=1")
        found.append(jobs.rows_of(folder / "out"))
    assert_close(found[1], found[0])
    assert [(row["row_index"], row["sample_index"]) for row in found[0]] == [
        (row, sample) for row in range(NUM_ROWS) for sample in range(3)
    ]
    texts = [tuple(row["text"] for row in found[0][start : start + 3]) for start in range(0, 3 * NUM_ROWS, 3)]
    assert sum(len(set(samples)) == 3 for samples in texts) > NUM_ROWS * 3 // 4


def kill_once_a_part_is_there(spec: pathlib.Path) -> None:
    """Kill a job of two replicas amid its work."""
    out = spec.parent / "out"
    process = jobs.start("run", spec)
    jobs.wait_until(lambda: list((out / "parts").glob("*.parquet")), wait_s=540)
    everyone = jobs.family(process.pid)
    assert len(jobs.replicas_of(process.pid)) == 2
    jobs.kill(everyone)
    process.communicate(timeout=240)
    assert process.returncode == -9
    assert jobs.are_gone(everyone)
    assert not jobs.state_of(out).is_done


def test_finished_job_starts_no_engine_and_says_what_made_it(alone_spec: pathlib.Path) -> None:
    out = alone_spec.parent / "out"
    started = len(jobs.events_of(out, "replica_started"))
    assert "already done" in jobs.finish(alone_spec).stdout
    assert len(jobs.events_of(out, "replica_started")) == started
    for path in (out / "parts").glob("*.parquet"):
        metadata = {key.decode(): value.decode() for key, value in pq.read_metadata(path).metadata.items()}
        assert metadata["batchinf.version.vllm"].startswith("0.")
        assert metadata["batchinf.model"] == str(jobs.MODEL)
        assert len(metadata["batchinf.fingerprint"]) == 32


def assert_close(rows: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Equal but for the last digits of logprobs, which may depend on how sums are split."""
    assert len(rows) == len(expected)
    for row, reference in zip(rows, expected, strict=True):
        for name, value in reference.items():
            if name in ("logprobs", "cumulative_logprob"):
                assert row[name] == pytest.approx(value, abs=1e-4)
            elif name == "top_logprobs":
                for found, wanted in zip(row[name], value, strict=True):
                    assert found == pytest.approx(wanted, abs=1e-4)
            elif name not in ("ranks", "top_token_ids"):
                assert row[name] == value, name
