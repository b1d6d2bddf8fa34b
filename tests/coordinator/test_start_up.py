"""Replicas that start together: each compiles to where no other writes, and nothing of that is left."""

import pathlib
import shutil

import psutil
import pytest
from fleets import fleet_of

import jobs
from batchinf.base.storage import Folder
from batchinf.engines.protocol import EngineInfo
from batchinf.fleet import launch
from batchinf.fleet.devices import Slot
from batchinf.fleet.fleet import Fleet
from batchinf.fleet.local.backend import LocalBackend, LocalReplica
from batchinf.fleet.local.environment import cache_root, sweep_sockets
from batchinf.fleet.memory.engine_settings import EngineSettings
from batchinf.fleet.memory.out_of_memory import OutOfMemory
from batchinf.job.job import PreparedJob
from batchinf.model.memory import fit_of
from batchinf.model.model import resolve
from batchinf.replica.messages import Launch, Ready
from batchinf.spec.file import SpecFile
from batchinf.spec.job import JobSpec


def make_fleet(folder: pathlib.Path, *, is_cache_warm: bool) -> Fleet:
    def launch(slot: Slot, incarnation: str) -> Launch:
        # A spec that is none: the replicas end before they import anything heavy.
        return Launch(slot.replica, incarnation, str(folder), "start-up-job", "{}", "m", "t", None)

    slots = [Slot(number, (), ()) for number in range(3)]
    return fleet_of(LocalBackend(), slots, launch, folder, is_cache_warm=is_cache_warm)


def caches(fleet: Fleet) -> list[str]:
    """Where each replica's vLLM would keep what it compiles."""
    found = []
    for handle in fleet.handles.values():
        assert isinstance(handle, LocalReplica)
        process = psutil.Process(handle.process.pid)
        jobs.wait_until(lambda process=process: "VLLM_CACHE_ROOT" in process.environ())
        found.append(process.environ()["VLLM_CACHE_ROOT"])
    return found


def test_with_a_cold_cache_all_start_at_once_and_one_fills_it(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    fleet = make_fleet(tmp_path, is_cache_warm=False)
    try:
        assert len(fleet.start_due()) == 3
        [first, *others] = caches(fleet)
        assert first == str(tmp_path / "cache")
        assert len({first, *others}) == 3
        # On the same file system, as compiled code has to be run from there.
        assert all(pathlib.Path(other).parent == cache_root() for other in others)
        for other in others:
            pathlib.Path(other, "compiled").mkdir(parents=True)
    finally:
        fleet.kill()
    assert list(cache_root().iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(("number", "is_warm"), [(0, True), (2, False)])
def test_the_cache_is_warm_once_the_engine_that_fills_it_is_up(
    number: int, is_warm: bool, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    fleet = make_fleet(tmp_path, is_cache_warm=False)
    try:
        fleet.start_due()
        fleet.replicas[number].hear(Ready(EngineInfo(16, 16, 16, "none", versions={}), 1.0), now=0.0, at=0.0)
        # What it says next brings the fleet up to date: here, why it ends.
        jobs.wait_until(lambda: any(replica is fleet.replicas[number] for replica, _ in fleet.poll(0.05)))
        assert fleet.is_cache_warm == is_warm
    finally:
        fleet.kill()


def test_with_a_warm_cache_all_share_it(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    fleet = make_fleet(tmp_path, is_cache_warm=True)
    try:
        assert len(fleet.start_due()) == 3
        assert set(caches(fleet)) == {str(tmp_path / "cache")}
    finally:
        fleet.kill()


def test_what_a_killed_coordinator_left_is_swept(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    own = cache_root() / "batchinf-start-up-job-1-cache"
    others = cache_root() / "batchinf-another-1-cache"
    for folder in (own, others):
        folder.mkdir(parents=True)
    sweep_sockets("start-up-job")
    assert list(cache_root().iterdir()) == [others]


def new_fleet(folder: pathlib.Path, model: pathlib.Path, **engine: int) -> Fleet:
    """Of a job on one device, which nothing here touches."""
    given = {"model": {"name": str(model)}, "input": {"path": "in"}, "output": {"path": "out"}, "engine": engine}
    spec = JobSpec.model_validate(given)
    found = resolve(spec.model)
    job = PreparedJob(
        file=SpecFile(spec, {}, "job.yaml"),
        spec=spec,
        origins={},
        folder=Folder(folder),
        model=found,
        adapters=(),
        state=None,
        new="refuse",
        limit=None,
    )
    settings = EngineSettings(spec, fit_of(found, spec, None, ""))
    return launch.new_fleet(job, LocalBackend(), settings, [Slot(0, ("0",), ())], job_id="job", epoch=1)


def test_a_later_job_finds_the_cache_warm_with_the_same_model_at_the_same_place(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    elsewhere = tmp_path / "model"
    shutil.copytree(jobs.MODEL, elsewhere)
    fleet = new_fleet(tmp_path, jobs.MODEL)
    assert not fleet.is_cache_warm
    fleet.note_cache_warm()
    assert not new_fleet(tmp_path, jobs.MODEL).is_cache_warm
    fleet.is_cache_warm = True
    fleet.note_cache_warm()
    assert new_fleet(tmp_path, jobs.MODEL).is_cache_warm
    assert not new_fleet(tmp_path, elsewhere).is_cache_warm
    assert not new_fleet(tmp_path, jobs.MODEL, max_num_seqs=7).is_cache_warm


def test_engines_that_were_lowered_make_the_cache_warm_for_lowered_ones(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    fleet = new_fleet(tmp_path, jobs.MODEL, max_num_seqs=64)
    fleet.settings.launch_spec("000001.0001")
    verdict = fleet.settings.judge(0, "000001.0001", OutOfMemory("batch", "CUDA out of memory"), was_up=False)
    assert verdict.step_down
    fleet.is_cache_warm = True
    fleet.note_cache_warm()
    lowered = fleet.settings.engine["max_num_seqs"]
    assert lowered < 64
    assert new_fleet(tmp_path, jobs.MODEL, **fleet.settings.engine).is_cache_warm
    assert not new_fleet(tmp_path, jobs.MODEL, max_num_seqs=64).is_cache_warm
