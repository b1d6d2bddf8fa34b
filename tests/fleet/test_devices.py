"""A mix of devices or versions within a job: told, or refused before any of its rows is committed."""

import pathlib

import pyarrow.parquet as pq
import pytest

import jobs
from batchinf.base.errors import DriftError
from batchinf.fleet.devices import platform_warning
from batchinf.manifest.lines import Platform

VERSIONS = {"batchinf": "0.1.0", "python": "3.11.7", "vllm": "0.32.0", "torch": "2.13.0", "transformers": "5.1.0",
            "cuda": "13.0", "driver": "580.1"}  # fmt: skip
TOLD = "warning: replica 1 runs on another device or with other versions than earlier rows of this job: "
REFUSED = "same_device is true, but replica 1 is on another device or version than earlier rows of this job: "


def engine(device: str = "NVIDIA H100 80GB HBM3", **versions: str) -> Platform:
    return Platform(device, {**VERSIONS, **versions}, {}, 1)


def warning(now: Platform, *earlier: Platform, same_device: bool = False) -> str | None:
    return platform_warning(1, now, {platform.key: platform for platform in earlier}, same_device=same_device)


@pytest.mark.parametrize("wanted", [False, True])
def test_all_alike_is_nothing_to_say(wanted: bool) -> None:
    assert warning(engine(), same_device=wanted) is None
    assert warning(engine(), engine(), engine(), same_device=wanted) is None


@pytest.mark.parametrize(
    ("now", "changes"),
    [
        (engine("NVIDIA H200"), "device NVIDIA H100 80GB HBM3 -> NVIDIA H200"),
        (engine(vllm="0.33.0"), "vllm 0.32.0 -> 0.33.0"),
        (engine(torch="2.14.0", cuda="13.1"), "cuda 13.0 -> 13.1, torch 2.13.0 -> 2.14.0"),
        (engine("NVIDIA H200", transformers="5.2.0"),
         "device NVIDIA H100 80GB HBM3 -> NVIDIA H200, transformers 5.1.0 -> 5.2.0"),
        (Platform("none", {"batchinf": "0.1.0", "engine": "scripted"}, {}, 1),
         "device NVIDIA H100 80GB HBM3 -> none, cuda 13.0 -> absent, engine absent -> scripted, "
         "torch 2.13.0 -> absent, transformers 5.1.0 -> absent, vllm 0.32.0 -> absent"),
    ],
)  # fmt: skip
def test_another_is_told_once_or_refused(now: Platform, changes: str) -> None:
    said = warning(now, engine())
    assert said is not None
    assert said.startswith(TOLD)
    if "python" in now.versions:
        assert said == f"{TOLD}{changes}; `same_device: true` would refuse that"
    assert warning(now, engine(), now) is None
    with pytest.raises(DriftError) as refused:
        warning(now, engine(), same_device=True)
    assert str(refused.value) == f"{REFUSED}{changes}; run the job where it began, or set same_device to false"


def test_what_cannot_change_values_is_told_and_let_in() -> None:
    now = engine(driver="590.1", python="3.12.1")
    said = f"{TOLD}driver 580.1 -> 590.1, python 3.11.7 -> 3.12.1"
    assert warning(now, engine()) == said
    assert warning(now, engine(), same_device=True) == said


def test_a_job_that_is_mixed_already_is_refused_wherever_it_goes_on() -> None:
    for now in (engine(), engine("NVIDIA H200")):
        with pytest.raises(DriftError):
            warning(now, engine(), engine("NVIDIA H200"), same_device=True)


def devices_of(out: pathlib.Path) -> dict[str, str]:
    """By part, the device in its metadata."""
    paths = sorted((out / "parts").glob("*.parquet"))
    return {path.name: pq.read_metadata(path).metadata[b"batchinf.device"].decode() for path in paths}


@pytest.mark.slow
def test_a_resume_on_another_device(tmp_path: pathlib.Path) -> None:
    out = tmp_path / "out"
    spec = jobs.spec_of(tmp_path, output={"rows_per_shard": 50}, same_device=True,
                        scripted={"step_s": 0.004, "device": "old"})  # fmt: skip
    process = jobs.start("run", spec)
    jobs.wait_until(lambda: len(list((out / "parts").glob("*.parquet"))) >= 2)
    jobs.kill(jobs.family(process.pid))
    jobs.end(process)
    elsewhere = ("--set", "scripted.device=new", "--set", "scripted.step_s=0")
    refused = jobs.run("run", spec, *elsewhere)
    assert refused.returncode == 2
    errors = [line for line in refused.stderr.splitlines() if line.startswith("error: ")]
    said = "replica {} is on another device or version than earlier rows of this job: device old -> new; "
    assert [line.replace("replica 1", "replica 0") for line in errors] == [
        f"error: same_device is true, but {said.format(0)}run the job where it began, or set same_device to false"
    ]
    # What was staged before may have been adopted; nothing of the new device's is there, in parts or in work.
    assert set(devices_of(out).values()) == {"old"}
    assert not any(event["device"] == "new" for event in jobs.events_of(out, "ready"))
    jobs.finish(spec, *elsewhere, "--set", "same_device=false", "--set", "output.path=" + str(out))
    assert set(devices_of(out).values()) == {"old", "new"}
    assert tuple(jobs.rows_of(out)) == jobs.unhurt()
