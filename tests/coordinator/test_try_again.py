"""The section `retry`: rows run again in the same run, as `--retry` by hand would run them, whatever is killed."""

import itertools
import json
import os
import pathlib
import signal
from typing import Any

import psutil
import pyarrow.parquet as pq
import pytest
import stores

import jobs
from batchinf.manifest.lines import StartedReplica
from batchinf.spec.file import read_spec

pytestmark = [pytest.mark.fewer_rows]

# The scripted engine ignores the structure: a text that reaches `max_tokens` fails. A row fails if one of its samples
# does. Its length depends on the seed.
BASE: dict[str, Any] = {
    "sampling": {"temperature": 1.0, "max_tokens": 9, "n": 2, "logprobs": 1, "structured_outputs": {"regex": "a+"}},
    "parallel": {"data_parallel_size": 1},
    "output": {"rows_per_shard": 60},
    "scripted": {"step_s": 0.0},
    "max_error_rate": 1.0,
}
RETRY = {"attempts": 2, "set": {"sampling.temperature": 0.7}}
BY_HAND = ("--retry", "errors", "--set", "sampling.temperature=0.7")
Rows = list[dict[str, Any]]


def rows_of(out: pathlib.Path) -> Rows:
    """All rows; for two runs that nothing hurts, `attempts` is the same, too."""
    return jobs.table_of(out).to_pylist()


def without_attempts(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != "attempts"}


def num_errors(rows: Rows) -> int:
    return sum(row["error_type"] is not None for row in rows)


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> tuple[Rows, Rows, Rows]:
    """The rows of a job without the section: at first, and after each of two retries by hand."""
    folder = tmp_path_factory.mktemp("by-hand")
    spec = jobs.spec_of(folder, **BASE)
    found = []
    for words in ((), BY_HAND, BY_HAND):
        jobs.finish(spec, *words)
        found.append(rows_of(folder / "out"))
    assert [retry.attempt for retry in jobs.state_of(folder / "out").retries.values()] == [1, 2]
    first, second, third = found
    return first, second, third


@pytest.mark.slow
def test_rows_are_those_of_retries_by_hand(steps: tuple[Rows, Rows, Rows], tmp_path: pathlib.Path) -> None:
    first, second, third = steps
    assert num_errors(first) > num_errors(second) > num_errors(third) > 0
    two = {"parallel": {"data_parallel_size": 2}}
    rate = num_errors(third) / len(third)
    # The first rows alone would be too many errors.
    spec = jobs.spec_of(tmp_path, **{**BASE, **two, "retry": RETRY, "max_error_rate": rate})
    done = jobs.finish(spec)
    assert rows_of(tmp_path / "out") == third
    retries = [*jobs.state_of(tmp_path / "out").retries.values()]
    assert [(retry.attempt, retry.is_automatic, retry.overrides) for retry in retries] == [
        (1, True, {"sampling.temperature": 0.7}),
        (2, True, {"sampling.temperature": 0.7}),
    ]
    chosen = [{row["row_index"] for row in rows if row["error_type"] is not None} for rows in steps]
    assert [(retry.num_rows, retry.num_mended) for retry in retries] == [
        (len(before), len(before) - len(after)) for before, after in itertools.pairwise(chosen)
    ]
    for retry in retries:
        assert f"{retry.num_mended:,} of {retry.num_rows:,} input rows mended" in done.stdout
        assert (
            f"{retry.num_mended:,} of {retry.num_rows:,} input rows mended"
            in jobs.run("status", tmp_path / "out").stdout
        )
    assert jobs.run("report", tmp_path / "out").returncode == 0
    assert "input rows mended" in (tmp_path / "out" / "report.html").read_text()
    footer = pq.read_metadata(next((tmp_path / "out" / "parts").iterdir())).metadata
    assert json.loads(footer[b"batchinf.retry.1"])["attempt"] == 1
    assert "was already done" in jobs.finish(spec).stdout
    assert len(jobs.state_of(tmp_path / "out").retries) == 2


def num_processes(out: pathlib.Path) -> int:
    """How many processes with an engine the job has had."""
    return len({json.dumps(start["identity"], sort_keys=True) for start in jobs.events_of(out, "replica_started")})


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_engines_start_once(num_replicas: int, steps: tuple[Rows, Rows, Rows], tmp_path: pathlib.Path) -> None:
    # The rows take so long that the second engine is up before they are done.
    slow = {"scripted": {"step_s": 0.05, "max_num_seqs": 16}} if num_replicas > 1 else {}
    parallel = {"data_parallel_size": num_replicas}
    spec, out = jobs.spec_of(tmp_path, **{**BASE, "retry": RETRY, "parallel": parallel, **slow}), tmp_path / "out"
    jobs.finish(spec)
    assert rows_of(out) == steps[2]
    assert num_processes(out) == num_replicas
    # Each attempt has incarnations of its own, of which each is accounted for.
    names = [start["incarnation"] for start in jobs.events_of(out, "replica_started")]
    assert len({*names}) == len(names) == 3 * num_replicas
    state = jobs.state_of(out)
    assert not state.of(StartedReplica)


def test_a_retry_by_hand_of_a_job_that_is_not_done_keeps_its_engine(
    steps: tuple[Rows, Rows, Rows], tmp_path: pathlib.Path
) -> None:
    spec, out = jobs.spec_of(tmp_path, **BASE), tmp_path / "out"
    assert jobs.run("run", spec, faults="coordinator.after_publish=kill").returncode == -9
    num_before = num_processes(out)
    jobs.finish(spec, *BY_HAND)
    assert jobs.rows_of(out) == [without_attempts(row) for row in steps[1]]
    assert num_processes(out) - num_before == 1


def test_engines_start_again_for_other_arguments(tmp_path: pathlib.Path) -> None:
    """Reasoning parsers of engines depend on whether there are structures."""
    sampling = {"temperature": 1.0, "max_tokens": 9, "logprobs": None}
    retry = {"attempts": 2, "where": "row_index < 9", "set": {"sampling.structured_outputs": {"regex": "a+"}}}
    spec = jobs.spec_of(tmp_path, **{**BASE, "sampling": sampling, "input": {"limit": 30}, "retry": retry})
    done = jobs.finish(spec)
    assert num_processes(tmp_path / "out") == 2  # the second attempt needs what the first one needs
    assert done.stderr.count("needs other engine arguments") == 1


@pytest.mark.parametrize("num_replicas", [1, 2])
@pytest.mark.parametrize("fault", ["replica.again=kill", "replica.again=die", "replica.open:2=kill"])
def test_a_replica_that_dies_at_the_hand_over(
    fault: str, num_replicas: int, steps: tuple[Rows, Rows, Rows], tmp_path: pathlib.Path
) -> None:
    spec = jobs.spec_of(tmp_path, **{**BASE, "retry": RETRY, "parallel": {"data_parallel_size": num_replicas}})
    (tmp_path / "once").mkdir()
    jobs.finish(spec, faults=fault, BATCHINF_FAULTS_ONCE=str(tmp_path / "once"))
    assert list((tmp_path / "once").iterdir())
    assert jobs.rows_of(tmp_path / "out") == [without_attempts(row) for row in steps[2]]
    assert num_processes(tmp_path / "out") > 1


def test_an_engine_that_dies_while_it_waits(steps: tuple[Rows, Rows, Rows], tmp_path: pathlib.Path) -> None:
    spec, out = jobs.spec_of(tmp_path, **{**BASE, "retry": RETRY}), tmp_path / "out"
    marker = tmp_path / "held"
    process = jobs.start("run", spec, faults=f"retry.after_line=hold {marker}")
    jobs.wait_until(lambda: marker.exists() and marker.read_text())
    os.kill(jobs.events_of(out, "replica_started")[-1]["identity"]["pgid"], signal.SIGKILL)
    marker.unlink()
    code, _, errors = jobs.end(process)
    assert code == 0, errors
    assert jobs.rows_of(out) == [without_attempts(row) for row in steps[2]]
    assert num_processes(out) == 2


def test_many_attempts_leave_no_open_file(tmp_path: pathlib.Path) -> None:
    retry = {"attempts": 6, "where": "row_index < 60"}
    spec, out = jobs.spec_of(tmp_path, **{**BASE, "retry": retry, "input": {"limit": 90}}), tmp_path / "out"
    marker = tmp_path / "held"
    process = jobs.start("run", spec, faults=f"retry.after_line:6=hold {marker}")
    jobs.wait_until(lambda: marker.exists() and marker.read_text())
    replica = psutil.Process(jobs.events_of(out, "replica_started")[-1]["identity"]["pgid"])
    paths = [pathlib.Path(file.path) for file in replica.open_files()]
    marker.unlink()
    code, _, errors = jobs.end(process)
    assert code == 0, errors
    assert [path.name for path in paths if path.parent == out / "retry"] in ([], ["000005.positions"])


def test_the_speed_is_that_of_all_rows(steps: tuple[Rows, Rows, Rows], tmp_path: pathlib.Path) -> None:
    jobs.finish(jobs.spec_of(tmp_path, **BASE, retry=RETRY))
    speed = jobs.state_of(tmp_path / "out").speed
    assert speed is not None
    num_tokens = sum(len(row["token_ids"] or ()) for row in steps[0])
    assert speed.output_tokens_per_s * speed.work_s >= 0.99 * num_tokens
    assert speed.run_s > speed.work_s


def test_an_attempt_has_other_seeds(tmp_path: pathlib.Path) -> None:
    """With the same sampling, a row that runs again has another text; without a temperature, the same."""
    for temperature, is_other in ((1.0, True), (0.0, False)):
        folder = tmp_path / str(temperature)
        folder.mkdir()
        sampling = {"temperature": temperature, "max_tokens": 30}
        more = {"sampling": sampling, "input": {"limit": 20}, "retry": {"where": "row_index < 10"}}
        spec = jobs.spec_of(folder, **{**BASE, **more, "max_error_rate": 0.0})
        done = jobs.finish(spec)
        assert ("rows that run again give the same results" in done.stderr) == (not is_other)
        plain = jobs.spec_of(folder, **{**BASE, **more, "retry": None, "output": {"path": str(folder / "plain")}})
        jobs.finish(plain)
        pairs = list(zip(jobs.rows_of(folder / "out"), jobs.rows_of(folder / "plain"), strict=True))
        assert [a["text"] == b["text"] for a, b in pairs] == [not is_other] * 10 + [True] * 10


def test_the_exit_code_is_that_of_the_end(steps: tuple[Rows, Rows, Rows], tmp_path: pathlib.Path) -> None:
    rate = num_errors(steps[2]) / len(steps[2])
    spec = jobs.spec_of(tmp_path, **{**BASE, "retry": RETRY, "max_error_rate": rate - 1e-6})
    failed = jobs.run("run", spec)
    assert failed.returncode == 3, failed.stderr
    assert rows_of(tmp_path / "out") == steps[2]
    # Attempts that were made are not made again. More of them do not change a finished job.
    again = jobs.run("run", spec, "--set", "retry.attempts=5")
    assert again.returncode == 3
    assert len(jobs.state_of(tmp_path / "out").retries) == 2
    # A retry by hand is an attempt, and those that are left follow it.
    jobs.run("run", spec, "--set", "retry.attempts=5", *BY_HAND)
    retries = jobs.state_of(tmp_path / "out").retries.values()
    assert [(retry.attempt, retry.is_automatic) for retry in retries][:3] == [(1, True), (2, True), (3, False)]
    assert all(retry.is_automatic for retry in list(retries)[3:]) and len(retries) <= 5


@pytest.mark.parametrize("words", [(), *jobs.slowly(("--set", "parallel.data_parallel_size=2"))])
def test_killed_at_every_step(words: tuple[str, ...], steps: tuple[Rows, Rows, Rows], tmp_path: pathlib.Path) -> None:
    spec, out = jobs.spec_of(tmp_path, **{**BASE, "retry": RETRY}), tmp_path / "out"
    allowed = [dict[tuple[int, int], list[dict[str, Any]]]()]
    for rows in steps:
        for row in rows:
            allowed[0].setdefault((row["row_index"], row["sample_index"]), []).append(without_attempts(row))

    def killed(where: str) -> None:
        died = jobs.run("run", spec, *words, faults=f"{where}=kill")
        assert died.returncode == -9, died.stderr
        found = jobs.rows_of(out)
        assert len(found) == len(steps[0]) or not jobs.state_of(out).retries
        assert all(row in allowed[0][row["row_index"], row["sample_index"]] for row in found)
        assert not jobs.state_of(out).is_done

    killed("retry.before_line")
    assert not jobs.state_of(out).retries
    killed("retry.after_line")
    killed("fleet.turned")
    killed("coordinator.before_publish")
    killed("coordinator.after_publish")
    killed("retry.before_count")
    killed("retry.before_line")
    assert [retry.num_mended is None for retry in jobs.state_of(out).retries.values()] == [False]
    killed("retry.after_line")
    killed("fleet.turned")
    killed("coordinator.after_publish")
    killed("retry.before_count")
    jobs.finish(spec, *words)
    assert jobs.rows_of(out) == [without_attempts(row) for row in steps[2]]
    retries = jobs.state_of(out).retries.values()
    assert [(retry.attempt, retry.num_mended is None) for retry in retries] == [(1, False), (2, False)]


@pytest.mark.parametrize("step", ["retry.before_line", "retry.after_line", "fleet.turned", "retry.before_count"])
def test_a_stop_between_the_attempts(step: str, steps: tuple[Rows, Rows, Rows], tmp_path: pathlib.Path) -> None:
    spec, out = jobs.spec_of(tmp_path, **{**BASE, "retry": RETRY}), tmp_path / "out"
    marker = tmp_path / "held"
    process = jobs.start("run", spec, faults=f"{step}=hold {marker}")
    jobs.wait_until(lambda: marker.exists() and marker.read_text())
    process.send_signal(signal.SIGINT)
    marker.unlink()
    code, _, errors = jobs.end(process)
    assert code == 75, errors
    assert not jobs.state_of(out).of(StartedReplica)
    assert not [
        start for start in jobs.events_of(out, "replica_started") if psutil.pid_exists(start["identity"]["pgid"])
    ]
    jobs.finish(spec)
    assert jobs.rows_of(out) == [without_attempts(row) for row in steps[2]]


def test_each_slice_tries_its_own_rows(steps: tuple[Rows, Rows, Rows], tmp_path: pathlib.Path) -> None:
    spec = jobs.spec_of(tmp_path, **{**BASE, "retry": RETRY})
    rows = []
    for number in range(2):
        jobs.finish(spec, "--slice", f"{number}/2")
        rows += rows_of(tmp_path / "out" / f"slice-{number}")
    assert rows == steps[2]


@pytest.mark.slow
def test_an_extension_tries_only_its_rows(tmp_path: pathlib.Path) -> None:
    base = {**BASE, "sampling": {**BASE["sampling"], "max_tokens": 5}, "retry": RETRY}
    (tmp_path / "whole").mkdir()
    jobs.finish(jobs.spec_of(tmp_path / "whole", **base))
    half = len(jobs.prompts().read_text().splitlines()) // 2
    spec, out = jobs.spec_of(tmp_path, **base, input={"limit": half}), tmp_path / "out"
    jobs.finish(spec)
    before = rows_of(out)
    assert num_errors(before)
    killed = jobs.run("run", spec, "--extend", "--set", "input.limit=null", faults="retry.after_line=kill")
    assert killed.returncode == -9, killed.stderr
    for file in (out / "retry").iterdir():  # the choice is made again
        file.unlink()
    jobs.finish(spec, "--set", "input.limit=null")
    assert rows_of(out)[: len(before)] == before
    assert jobs.rows_of(out) == jobs.rows_of(tmp_path / "whole" / "out")
    assert [retry.attempt for retry in jobs.state_of(out).retries.values()] == [1, 2, 1, 2]


@pytest.mark.slow
def test_in_a_bucket(steps: tuple[Rows, Rows, Rows], url: str, store: stores.Proxy, tmp_path: pathlib.Path) -> None:
    spec = stores.spec_of(tmp_path, url, **{**BASE, "retry": RETRY})
    for step in ("retry.after_line", "mirror.after_part:6", "retry.before_count"):
        killed = jobs.run("run", spec, faults=f"{step}=kill", **store.environment)
        assert killed.returncode == -9, killed.stderr
        stores.lose_host(tmp_path)
    jobs.finish(spec, **store.environment)
    assert stores.rows(url) == [without_attempts(row) for row in steps[2]]


def test_attempts_without_rows_end_the_job(tmp_path: pathlib.Path) -> None:
    more = {"retry": {"attempts": 3, "where": "text = 'never'"}, "input": {"limit": 10}}
    spec = jobs.spec_of(tmp_path, **{**BASE, **more})
    done = jobs.finish(spec)
    assert done.stderr.count("no row matches text = 'never'") == 1
    state = jobs.state_of(tmp_path / "out")
    assert state.is_done and not state.retries


def test_attempts_that_mend_nothing_count(tmp_path: pathlib.Path) -> None:
    more = {"retry": {"attempts": 2, "where": "row_index < 3"}, "input": {"limit": 10}}
    spec = jobs.spec_of(tmp_path, **{**BASE, **more})
    assert "0 of 3 input rows mended" in jobs.finish(spec).stdout
    retries = jobs.state_of(tmp_path / "out").retries.values()
    assert [(retry.num_rows, retry.num_mended) for retry in retries] == [(3, 0)] * 2
    assert [row["attempts"] for row in rows_of(tmp_path / "out")][::2] == [3] * 3 + [1] * 7


def test_a_row_with_a_seed_of_its_line_repeats(tmp_path: pathlib.Path) -> None:
    body = {"model": str(jobs.MODEL), "prompt": "Once", "max_tokens": 40, "temperature": 1.0}
    lines = [{"custom_id": str(n), "method": "POST", "url": "/v1/completions", "body": body} for n in range(2)]
    lines[0]["body"] = {**body, "seed": 5}
    (tmp_path / "batch.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    more = {"input": {"path": str(tmp_path / "batch.jsonl"), "id_column": None}, "sampling": None}
    texts = []
    for name, retry in (("plain", None), ("tried", {"where": "true"})):
        out = {"output": {"path": str(tmp_path / name), "keep_columns": []}}
        jobs.finish(jobs.spec_of(tmp_path, **{**BASE, **more, **out, "retry": retry}))
        texts.append([row["text"] for row in jobs.rows_of(tmp_path / name)])
    assert [a == b for a, b in zip(*texts, strict=True)] == [True, False]


def test_a_job_of_before_keeps_its_seeds(tmp_path: pathlib.Path) -> None:
    more = {"sampling": {"max_tokens": 30, "n": 1}, "input": {"limit": 5}, "rules": 2}
    spec = jobs.spec_of(tmp_path, **{**BASE, **more})
    jobs.finish(spec)
    before = jobs.rows_of(tmp_path / "out")
    jobs.finish(spec, "--retry", "true")
    assert jobs.rows_of(tmp_path / "out") == before


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"attempts": 0}, ["retry.attempts", "0", "at least 1"]),
        ({"where": "eror_type = 'x'"}, ["retry.where", "eror_type", "columns: "]),
        ({"where": "text"}, ["retry.where", "true or false"]),
        ({"set": {"sampling.n": 3}}, ["retry.set", "sampling.n", "but not n"]),
        ({"set": {"sampling.logprobs": 3}}, ["retry.set", "sampling.logprobs"]),
        ({"set": {"max_error_rate": 0.5}}, ["retry.set", "max_error_rate", "sampling.temperature"]),
        ({"set": {"sampling": {"temperature": 0.7}}}, ["retry.set", "dotted name"]),
        ({"set": {"sampling.temperature": 7}}, ["retry.set", "sampling.temperature", "2"]),
        ({"set": {"sampling.temperature": None}}, ["retry.set", "sampling.temperature", "null"]),
        ({"set": {"sampling.max_tokens": {"column": "id"}}}, ["retry.set", "sampling.max_tokens", "all rows"]),
        ({"set": {"sampling.min_tokens": 50}}, ["retry.set", "min_tokens", "max_tokens 9"]),
        ({"set": {"sampling.stop_token_ids": [10**6]}}, ["retry.set", "stop_token_ids"]),
    ],
)
def test_what_has_no_effect_is_one_clear_line(
    section: dict[str, Any], words: list[str], tmp_path: pathlib.Path
) -> None:
    spec = jobs.spec_of(tmp_path, **{**BASE, "retry": section})
    for command in ("validate", "run"):
        refused = jobs.run(command, spec)
        assert refused.returncode == 2, refused.stderr
        assert refused.stderr.count("error: ") == 1 and "Traceback" not in refused.stderr
        for word in words:
            assert word in refused.stderr
    assert not list((tmp_path / "out").glob("parts/*"))


def test_a_structure_of_the_section_may_be_in_a_file(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    pathlib.Path("schema.json").write_text('{"type": "object"}')
    structure = {"json": {"file": "schema.json"}}
    retry = {"set": {"sampling.structured_outputs": structure}}
    found = read_spec(jobs.spec_of(tmp_path, **{**BASE, "retry": retry})).spec
    assert found.retry is not None
    assert found.retry.sampling_of(found.sampling).structured_outputs == {"json": '{"type": "object"}'}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_many_rows_of_which_some_fail(tmp_path: pathlib.Path) -> None:
    """5,000 rows of which 7 % fail, on two replicas, killed at a random part of each attempt."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"id": str(n), "prompt": f"Row {n}"}) + "\n" for n in range(5000)))
    more = {
        "sampling": {**BASE["sampling"], "n": 1, "max_tokens": 12},
        "input": {"path": str(prompts)},
        "output": {"rows_per_shard": 200, "keep_columns": []},
        "parallel": {"data_parallel_size": 2},
    }
    found = {}
    for name in ("by-hand", "tried"):
        (tmp_path / name).mkdir()
        spec, out = jobs.spec_of(tmp_path / name, **{**BASE, **more}), tmp_path / name / "out"
        if name == "by-hand":
            for words in ((), BY_HAND, BY_HAND):
                jobs.finish(spec, *words)
                found[f"{name} {len(found)}"] = num_errors(rows_of(out))
        else:
            spec = jobs.spec_of(tmp_path / name, **{**BASE, **more, "retry": RETRY})
            for step in ("coordinator.after_publish:30", "coordinator.after_publish:9"):
                assert jobs.run("run", spec, faults=f"{step}=kill").returncode == -9
            jobs.finish(spec)
    first, second, third = found.values()
    assert 250 < first < 450 and second < first / 4 and third <= second
    assert jobs.rows_of(tmp_path / "tried" / "out") == jobs.rows_of(tmp_path / "by-hand" / "out")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_json_that_was_cut_is_mended_on_vllm(tmp_path: pathlib.Path) -> None:
    """Real vLLM: texts that end in the middle of their JSON are whole with more tokens."""
    pytest.importorskip("vllm")
    properties = {"stars": {"type": "integer", "minimum": 1, "maximum": 5}}
    schema = {"type": "object", "properties": properties, "required": ["stars"], "additionalProperties": False}
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"id": str(n), "prompt": f"Review {n}:"}) + "\n" for n in range(24)))
    spec = jobs.spec_of(
        tmp_path,
        scripted=None,
        input={"path": str(prompts)},
        output={"keep_columns": []},
        model={"name": str(jobs.MODEL), "dtype": "float32"},
        engine={"max_model_len": 256, "enforce_eager": True},
        parallel={"data_parallel_size": 1},
        sampling={"temperature": 1.0, "max_tokens": 6, "logprobs": None, "structured_outputs": {"json": schema}},
        retry={"attempts": 1, "where": "error_type = 'invalid_json'", "set": {"sampling.max_tokens": 200}},
        max_error_rate=1.0,
    )
    jobs.finish(spec)
    assert num_processes(tmp_path / "out") == 1
    [retry] = jobs.state_of(tmp_path / "out").retries.values()
    rows = jobs.table_of(tmp_path / "out").to_pylist()
    tried = [row for row in rows if row["attempts"] == 2]
    assert 0 < retry.num_rows == len(tried)
    assert retry.num_mended == sum(row["error_type"] is None for row in tried) > 0
    for row in tried:
        assert row["error_type"] is not None or 1 <= json.loads(row["text"])["stars"] <= 5
