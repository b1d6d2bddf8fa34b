"""The specs of jobs/gpu/, with the sample model and the scripted engine in place of theirs."""

import pathlib
from typing import Any

import datasets
import pytest
import yaml

import batchinf
import jobs
from batchinf.commands.diff import diff_jobs

GPU = jobs.ROOT / "jobs" / "gpu"
NAMES = sorted(path.name for path in GPU.glob("*.yaml"))
QUICK = {"model.name": str(jobs.MODEL), "scripted": {}, "parallel.data_parallel_size": 1, "input.limit": 20}


def overrides_of(name: str, folder: pathlib.Path) -> dict[str, Any]:
    """The sample model for that of the spec, few rows, and a dataset that is here for the one of the hub."""
    changes = {**QUICK, "output.path": str(folder / "out")}
    if name == "hub_dataset.yaml":
        texts = [f"Document {number}. {'It is about foxes. ' * (number % 3 * 60)}" for number in range(40)]
        rows = [
            {
                "id": f"{number}-{question}",
                "context": text,
                "question": f"What is {question}?",
                "answers": {"text": ["a"]},
            }
            for question in range(10)
            for number, text in enumerate(texts)
        ]
        datasets.Dataset.from_list(rows).save_to_disk(folder / "data")
        changes |= {"input.path": str(folder / "data"), "input.split": None}
    return changes


@pytest.mark.parametrize("name", NAMES)
def test_validate_has_no_warning(name: str, tmp_path: pathlib.Path) -> None:
    report = batchinf.validate(GPU / name, overrides=overrides_of(name, tmp_path))
    assert not [remark.text for remark in report.remarks if remark.text.startswith("warning")]
    assert not report.prompt_lengths.errors
    assert report.output.warning is None


@pytest.mark.slow
@pytest.mark.usefixtures("quick_replicas")
@pytest.mark.parametrize("name", NAMES)
def test_the_job_runs(name: str, tmp_path: pathlib.Path) -> None:
    path, changes = GPU / name, overrides_of(name, tmp_path)
    summary = batchinf.run(path, overrides=changes, quiet=True).summary
    assert (summary.num_rows, summary.num_errors) == (20, 0)
    if name == "hub_dataset.yaml":
        rows = jobs.rows_of(tmp_path / "out")
        assert {"question", "answers"} <= rows[0].keys()
        # Document 2 of each three is too long for `where`.
        assert {int(row["id"].partition("-")[0]) % 3 for row in rows} <= {0, 1}
        assert jobs.state_of(tmp_path / "out").header.layout["order"] == "prefix"


@pytest.mark.slow
@pytest.mark.usefixtures("quick_replicas")
def test_the_twins_are_compared(tmp_path: pathlib.Path) -> None:
    outs = []
    for name in ("bf16_twin", "awq"):
        folder = tmp_path / name
        folder.mkdir()
        path = GPU / f"{name}.yaml"
        outs.append(batchinf.run(path, overrides=overrides_of(f"{name}.yaml", folder), quiet=True).folder)
    report = diff_jobs(*outs, num_examples=2)
    assert (report.changes.num_both, report.num_only_a, report.num_only_b, report.identity_changes) == (20, 0, 0, ())


def test_the_twins_differ_in_the_model_alone() -> None:
    first, second = (yaml.safe_load((GPU / f"{name}.yaml").read_text()) for name in ("awq", "bf16_twin"))
    assert {name for name in first.keys() | second.keys() if first.get(name) != second.get(name)} == {"model", "output"}
