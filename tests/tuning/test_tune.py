"""`batchinf tune` as a whole, on the scripted engine."""

import json
import pathlib
from collections.abc import Mapping
from typing import Any

import pytest

import jobs
from batchinf import api
from batchinf.base.errors import Interrupted, OutputError, UserError
from batchinf.tuning import tune
from batchinf.tuning.text import tune_lines
from batchinf.tuning.trial import TuneTrial

pytestmark = pytest.mark.usefixtures("quick_replicas")


class Said(Exception):
    """The first line that is said; it ends a search before its first trial."""


def say(line: str) -> None:
    raise Said(line)


def spec_of(folder: pathlib.Path, **scripted: Any) -> pathlib.Path:
    return jobs.spec_of(folder, scripted={"step_s": 0.02, **scripted}, parallel={"data_parallel_size": 1})


@pytest.mark.slow
def test_the_faster_batch_is_found_and_a_stop_loses_one_trial(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    path = spec_of(tmp_path)
    options: dict[str, Any] = {"num_rows": 60, "tries": ["scripted.max_num_seqs=1,64"], "say": said.append}
    run = api.run_job

    def stop_at_the_third(*given: Any, **more: Any) -> Any:
        if sum(line.startswith("round") for line in said) == 3:
            raise Interrupted("stopped")
        return run(*given, **more)

    monkeypatch.setattr(api, "run_job", stop_at_the_third)
    with pytest.raises(Interrupted):
        api.tune(path, **options)
    monkeypatch.setattr(api, "run_job", run)
    first, said[:] = len(said), []
    report = api.tune(path, **options)
    assert first == 6
    few = (
        "warning: with 60 rows the engines are never full, as they run up to 64 requests at once; so the trials say "
        "little about the whole input; give more --rows"
    )
    assert said[0] == report.warning == few
    assert [line for line in said if line.startswith("round")] == ["round 1, 2 of 2: scripted.max_num_seqs 64, 60 rows"]
    assert report.found.best.candidate.settings == {"scripted.max_num_seqs": 64}
    assert report.found.gain > 1.5
    assert [(trial.num_rows, trial.num_devices, trial.error) for trial in report.found.trials] == [(60, 0, "")] * 3
    folder = pathlib.Path(report.folder)
    assert folder == tmp_path / "out-tune"
    assert sorted(item.name for item in folder.iterdir()) == ["trials.jsonl", "tune.svg"]
    assert "scripted.max_num_seqs 64" in (folder / "tune.svg").read_text()
    assert not (tmp_path / "out").exists()
    shown = "\n".join(tune_lines(report))
    assert few in shown
    assert "best: scripted.max_num_seqs 64: " in shown
    assert f"next: batchinf run {path} --set scripted.max_num_seqs=64" in shown
    # A torn last line is a trial that is run again; trials of another spec are not taken for this one's.
    record = folder / "trials.jsonl"
    record.write_bytes(record.read_bytes()[:-20])
    said.clear()
    api.tune(path, **options)
    assert sum(line.startswith("round") for line in said) == 1
    with pytest.raises(OutputError, match="trials of another spec"):
        api.tune(path, **options, overrides={"sampling.max_tokens": 4})


def test_an_input_that_does_not_fill_the_engines(tmp_path: pathlib.Path) -> None:
    said: list[str] = []
    sampling = {"temperature": 1.0, "n": 2}
    one = {"data_parallel_size": 1}
    path = jobs.spec_of(tmp_path, input={"limit": 20}, sampling=sampling, scripted={"max_num_seqs": 64}, parallel=one)
    report = api.tune(path, tries=["scripted.max_num_seqs=16"], say=said.append)
    few = (
        "warning: with 20 rows the engines are never full, as they run up to 64 requests at once; so the trials say "
        "little about a larger input"
    )
    assert said[0] == report.warning == few
    options: dict[str, Any] = {"overrides": {"sampling.n": 4}, "out": tmp_path / "more"}
    with pytest.raises(Said, match=r"^round 1: the spec as it is, 20 rows$"):
        api.tune(path, tries=["scripted.max_num_seqs=16"], say=say, **options)


def test_the_first_trials_fill_all_engines(tmp_path: pathlib.Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"id": {number}, "prompt": "the cat", "language": "en"}}\n' for number in range(5000)))
    path = jobs.spec_of(tmp_path, input={"path": str(rows)}, scripted={"max_num_seqs": 400})  # two engines
    for options, expected in (({}, 3200), ({"overrides": {"sampling.n": 2, "sampling.temperature": 1.0}}, 1600)):
        with pytest.raises(Said, match=f"^round 1: the spec as it is, {expected:,} rows$"):
            api.tune(path, tries=["scripted.max_num_seqs=300"], out=tmp_path / f"{expected}", say=say, **options)


def test_wrong_calls(tmp_path: pathlib.Path) -> None:
    path = spec_of(tmp_path)
    spec: Mapping[str, Any] = json.loads(path.read_text())
    with pytest.raises(UserError, match="--write: spec is not a file"):
        api.tune(spec, write=True)
    with pytest.raises(UserError, match="--try seed: must be field=value,value"):  # one text, and not its letters
        api.tune(path, tries="seed")
    with pytest.raises(UserError, match="leaves nothing open to tune"):
        api.tune({**spec, "input": {**spec["input"], "order": "input"}})
    done = jobs.run("tune", path, "--budget", "soon")
    assert (done.returncode, done.stdout) == (2, "")
    assert "--budget soon: must be a time, such as 90s, 15m or 2h" in done.stderr


@pytest.mark.all_rows
def test_a_search_that_has_used_its_budget_is_the_same_the_next_time(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[tuple[str, int]] = []

    def run_trial(candidate: Any, num_rows: int, **_: Any) -> TuneTrial:
        ran.append((candidate.name, num_rows))
        speed = 10.0 + len(candidate.name)
        return TuneTrial(candidate, num_rows, rows_per_s=speed, start_s=10.0, work_s=10.0)

    monkeypatch.setattr(tune, "run_trial", run_trial)
    options: dict[str, Any] = {"num_rows": 600, "tries": ["scripted.max_num_seqs=1,64,32,16"], "say": lambda _: None}
    path = spec_of(tmp_path)
    first = api.tune(path, budget_s=65.0, **options)
    assert (len(ran), first.found.num_left_out) == (3, 2)
    assert api.tune(path, budget_s=65.0, **options) == first
    assert len(ran) == 3
    # With more time it goes on.
    assert api.tune(path, budget_s=130.0, **options).found.num_left_out == 1
    assert len(ran) == len(set(ran)) == 3 + 1 + 2
