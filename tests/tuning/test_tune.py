"""`batchinf tune` as a whole, on the scripted engine."""

import json
import pathlib
from collections.abc import Mapping
from typing import Any

import pytest

import jobs
from batchinf import api
from batchinf.base.errors import Interrupted, UserError

pytestmark = pytest.mark.usefixtures("quick_replicas")


class Said(Exception):
    """The first line that is said; it ends a search before its first trial."""


def say(line: str) -> None:
    raise Said(line)


def spec_of(folder: pathlib.Path, **scripted: Any) -> pathlib.Path:
    return jobs.spec_of(folder, scripted={"step_s": 0.02, **scripted}, parallel={"data_parallel_size": 1})


@pytest.mark.slow
def test_the_faster_batch_is_found(tmp_path: pathlib.Path) -> None:
    said: list[str] = []
    path = spec_of(tmp_path)
    report = api.tune(path, num_rows=60, tries=["scripted.max_num_seqs=1,64"], say=said.append)
    few = (
        "warning: with 60 rows the engines are never full, as they run up to 64 requests at once; so the trials say "
        "little about the whole input; give more --rows"
    )
    assert said[0] == report.warning == few
    assert [line for line in said if line.startswith("trial")] == [
        "trial 1 of at most 3: the spec as it is, 60 rows",
        "trial 2 of at most 3: scripted.max_num_seqs 1, 60 rows",
        "trial 3 of at most 3: scripted.max_num_seqs 64, 60 rows",
    ]
    assert report.best.settings == {"scripted.max_num_seqs": 64}
    assert report.gain > 1.5
    assert [(trial.num_rows, trial.num_devices, trial.error) for trial in report.trials] == [(60, 0, "")] * 3
    assert {item.name for item in tmp_path.iterdir()} == {path.name}  # the trials leave nothing behind
    shown = "\n".join(report.lines())
    assert few in shown
    assert "best: scripted.max_num_seqs 64: " in shown
    assert f"next: batchinf run {path} --set scripted.max_num_seqs=64" in shown


def test_a_stop_ends_the_search(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: Any, **__: Any) -> None:
        raise Interrupted("stopped")

    monkeypatch.setattr(api, "run_job", stop)
    with pytest.raises(Interrupted):
        api.tune(spec_of(tmp_path), num_rows=60, tries=["scripted.max_num_seqs=1"], say=lambda _: None)


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
    with pytest.raises(Said, match=r"^trial 1 of at most 2: the spec as it is, 20 rows$"):
        api.tune(path, tries=["scripted.max_num_seqs=16"], say=say, **options)


def test_the_first_trials_fill_all_engines(tmp_path: pathlib.Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"id": {number}, "prompt": "the cat", "language": "en"}}\n' for number in range(5000)))
    path = jobs.spec_of(tmp_path, input={"path": str(rows)}, scripted={"max_num_seqs": 400})  # two engines
    for options, expected in (({}, 3200), ({"overrides": {"sampling.n": 2, "sampling.temperature": 1.0}}, 1600)):
        with pytest.raises(Said, match=f"^trial 1 of at most 2: the spec as it is, {expected:,} rows$"):
            api.tune(path, tries=["scripted.max_num_seqs=300"], out=tmp_path / f"{expected}", say=say, **options)


def test_wrong_calls(tmp_path: pathlib.Path) -> None:
    path = spec_of(tmp_path)
    spec: Mapping[str, Any] = json.loads(path.read_text())
    with pytest.raises(UserError, match="--try seed: must be field=value,value"):  # one text, and not its letters
        api.tune(path, tries="seed")
    with pytest.raises(UserError, match="leaves nothing open to tune"):
        api.tune({**spec, "input": {**spec["input"], "order": "input"}})
    done = jobs.run("tune", path, "--budget", "soon")
    assert (done.returncode, done.stdout) == (2, "")
    assert "--budget soon: must be a time, such as 90s, 15m or 2h" in done.stderr


def test_a_budget_without_time_for_a_second_trial(tmp_path: pathlib.Path) -> None:
    with pytest.raises(
        UserError, match=r"one trial of 20 rows took .* so that the budget of 1s has no time for a second"
    ):
        api.tune(spec_of(tmp_path), num_rows=20, tries=["scripted.max_num_seqs=1"], budget_s=1.0, say=lambda _: None)
