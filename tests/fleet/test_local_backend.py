"""Local replicas: ports that no other replica of the host has, threads, and the end of a process group."""

import contextlib
import itertools
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import psutil
import pytest
import test_placement
from fleets import fleet_of

import jobs
from batchinf.fleet.devices import Slot
from batchinf.fleet.fleet import Ended
from batchinf.fleet.local.backend import LocalBackend, LocalReplica
from batchinf.fleet.local.environment import engine_environment
from batchinf.fleet.local.process_group import end_process_group, members
from batchinf.replica.messages import Failed, Launch, Stopped

NUM_PORTS = 40
HANGS = (
    "its start made no progress for 2 s (start_timeout_s): no message, no line in its log and nothing read while "
    "starting"
)


@pytest.fixture
def start(tmp_path: pathlib.Path) -> Iterator[Callable[..., LocalReplica]]:
    """Starts a replica of a job of its own, in a slot, which stands still."""
    replicas: list[LocalReplica] = []

    def started(number: int, slot: Slot = Slot(0, (), ()), *, has_own_cache: bool = False) -> LocalReplica:  # noqa: B008
        launch = Launch(0, "000001.0001", str(tmp_path), f"job{number}", "", "", "", None)
        log = tmp_path / f"{number}.log"
        replicas.append(LocalBackend().start(launch, slot, log, has_own_cache=has_own_cache))
        replicas[-1].process.send_signal(signal.SIGSTOP)
        return replicas[-1]

    yield started
    for replica in replicas:
        if replica.process.returncode is None:
            replica.end()


# What the processes of a start do, and whether that is progress.
STARTS = {
    "it stands still": ("sleep 600", False),
    "it spins, as NCCL does": ("while :; do :; done", False),
    "it reads weights slowly": ("while :; do head -c 700000 /dev/zero | tail -c 1 > /dev/null; sleep 0.2; done", True),
    "its log moves": ("while :; do echo loading; sleep 0.2; done", True),
}


@pytest.mark.parametrize("name", STARTS)
def test_a_start_without_progress_is_ended(name: str, tmp_path: pathlib.Path) -> None:
    command, makes_progress = STARTS[name]

    class Starts(LocalBackend):
        def start(self, *arguments: Any, **options: Any) -> LocalReplica:
            replica = super().start(*arguments, **options)
            replica.process.send_signal(signal.SIGKILL)
            replica.process.wait()
            with replica.log.open("ab") as log:
                replica.process = subprocess.Popen(["sh", "-c", command], stdout=log, start_new_session=True)
            return replica

    launch = Launch(0, "000001.0001", str(tmp_path), "job", "", "", "", None)
    fleet = fleet_of(Starts(), [Slot(0, (), ())], lambda slot, name: launch, tmp_path, start_timeout_s=2.0)
    fleet.start_due()
    deadline = time.monotonic() + 5.0
    ended: list[Ended] = []
    while not ended and time.monotonic() < deadline:
        ended = fleet.reap()
        time.sleep(0.05)
    assert [end.cause for end in ended] == ([] if makes_progress else [HANGS])
    fleet.kill()


class Dies(LocalReplica):
    """It has ended when it is asked the second time."""

    num_asked = 0

    def has_ended(self) -> bool:
        self.num_asked += 1
        return self.num_asked > 1


class Breaks(LocalReplica):
    """The coordinator is interrupted when it lets it go on."""

    def renew(self, launch: Launch) -> float:
        raise KeyboardInterrupt


@pytest.mark.parametrize("kind", [Dies, Breaks])
def test_no_replica_stays_of_those_that_were_to_go_on(kind: type[LocalReplica], tmp_path: pathlib.Path) -> None:
    """One dies just when its engine is found to have other arguments; or a second Ctrl-C comes."""
    launch = Launch(0, "000001.0001", str(tmp_path), "job", "", "", "", None)
    settings = mock.MagicMock(fits=lambda *_: kind is Breaks)
    slots = [Slot(number, (), ()) for number in range(2)]
    fleet = fleet_of(LocalBackend(), slots, lambda slot, name: launch, tmp_path, settings=settings)
    replicas: list[Any] = fleet.start_due()
    for replica in replicas:
        replica.current.info = mock.MagicMock()
        replica.stop(keeps_engine=True)
        replica.hear(Stopped(), now=time.monotonic(), at=time.time())
    handles: list[Any] = list(fleet.handles.values())
    for handle in handles:
        handle.__class__ = kind
    with contextlib.suppress(KeyboardInterrupt):
        fleet.turn_to(lambda slot, name: launch, mock.MagicMock(), 1, mock.MagicMock())
    fleet.kill()
    assert not fleet.handles and all(handle.process.poll() is not None for handle in handles)


def test_a_start_on_a_shared_device_waits_for_its_neighbour(tmp_path: pathlib.Path) -> None:
    slots = [Slot(number, ("0",), (), sharers=2) for number in range(2)]
    launch = Launch(0, "000001.0001", str(tmp_path), "job", "", "", "", None)
    fleet = fleet_of(LocalBackend(), slots, lambda slot, name: launch, tmp_path)
    fleet.start_due()
    for handle in fleet.handles.values():
        assert isinstance(handle, LocalReplica)
        handle.process.send_signal(signal.SIGSTOP)
    fleet.reap()
    time.sleep(0.1)
    before = [replica.current.start_moved_at for replica in fleet.replicas]
    with (tmp_path / "replica-0.log").open("a") as log:
        log.write("loading weights\n")
    fleet.start_timeout_s, fleet._next_look_at_starts = 600.0, 0.0
    fleet.reap()
    assert [replica.current.start_moved_at > at for replica, at in zip(fleet.replicas, before, strict=True)] == [
        True
    ] * 2
    fleet.kill()


def test_a_replica_that_does_not_read_its_launch_holds_up_no_other(tmp_path: pathlib.Path) -> None:
    backend = LocalBackend()
    replicas = []
    for number in range(3):
        launch = Launch(number, "000001.0001", str(tmp_path), "job", "x" * 3_000_000, "", "", None)
        replicas.append(backend.start(launch, Slot(number, (), ()), tmp_path / f"{number}.log"))
        replicas[-1].process.send_signal(signal.SIGSTOP)
    for replica in replicas:
        replica.process.send_signal(signal.SIGCONT)
    # Each reads it whole, and says that it is no spec.
    jobs.wait_until(lambda: all(replica.has_ended() for replica in replicas), 60)
    assert all(isinstance(replica.end().events[-1], Failed) for replica in replicas)


def environment_of(replica: LocalReplica) -> dict[str, str]:
    process = psutil.Process(replica.process.pid)
    jobs.wait_until(process.environ)  # it is empty until the new program has begun
    return process.environ()


def port_of(replica: LocalReplica) -> int:
    return int(environment_of(replica)["VLLM_PORT"])


def test_replicas_of_several_jobs_have_ports_of_their_own(
    start: Callable[[int], LocalReplica], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_PORT", raising=False)
    low, _ = map(int, pathlib.Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    replicas = [start(number) for number in range(3)]
    ports = sorted(port_of(replica) for replica in replicas)
    assert all(second - first >= NUM_PORTS for first, second in itertools.pairwise(ports))
    # The kernel gives the ports from `low` on to any program.
    assert 1024 < ports[0] <= ports[-1] + NUM_PORTS <= low
    replicas[0].end()
    assert port_of(start(3)) not in {port_of(replica) for replica in replicas[1:]}


def test_the_port_that_a_user_sets_is_kept(
    start: Callable[[int], LocalReplica], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_PORT", "31000")
    assert port_of(start(0)) == 31000


def test_a_cache_of_its_own_begins_with_what_vllm_knows_of_models(
    start: Callable[..., LocalReplica], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    (tmp_path / "cache" / "modelinfos").mkdir(parents=True)
    (tmp_path / "cache" / "modelinfos" / "llama.json").write_text("{}")
    (tmp_path / "cache" / "torch_compile_cache").mkdir()
    shared, own = (start(number, has_own_cache=number == 1) for number in range(2))
    assert environment_of(shared)["VLLM_CACHE_ROOT"] == str(tmp_path / "cache")
    cache = pathlib.Path(environment_of(own)["VLLM_CACHE_ROOT"])
    assert cache != tmp_path / "cache"
    assert [path.relative_to(cache).as_posix() for path in cache.rglob("*.json")] == ["modelinfos/llama.json"]
    assert not (cache / "torch_compile_cache").exists()
    own.end()
    assert not cache.exists()


def test_jobs_on_disjoint_devices_run_side_by_side(
    start: Callable[..., LocalReplica], monkeypatch: pytest.MonkeyPatch
) -> None:
    test_placement.install(monkeypatch, 8)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,4,5,6")
    first, second = (
        test_placement.spec_of(parallel={"tensor_parallel_size": 2, "devices": devices}) for devices in ([4, 5], [7, 6])
    )
    slots = [slot for spec in (first, second) for slot in LocalBackend().slots_for(spec)]
    replicas = [start(number, slot) for number, slot in enumerate(slots)]
    assert [environment_of(replica)["CUDA_VISIBLE_DEVICES"] for replica in replicas] == ["4,5", "7,6"]
    assert port_of(replicas[0]) != port_of(replicas[1])


def test_the_shared_memory_of_a_killed_group_is_deleted() -> None:
    shares = (
        "from multiprocessing.shared_memory import SharedMemory as M; print(M(create=True, size=1).name, flush=True)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", f"{shares}; import time; time.sleep(600)"],
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        shared = pathlib.Path("/dev/shm", process.stdout.readline().decode().strip())
        assert shared.exists()
        jobs.wait_until(lambda: any("resource_tracker" in " ".join(one.cmdline()) for one in members(process.pid)))
        end_process_group(process.pid)
    assert process.returncode == -signal.SIGKILL
    assert members(process.pid) == []
    assert not shared.exists()


def test_threads_of_a_replica_on_gpus_are_those_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert "OMP_NUM_THREADS" not in engine_environment(("0",), 6)
    assert engine_environment((), 6)["OMP_NUM_THREADS"] == "6"
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert "OMP_NUM_THREADS" not in engine_environment(("0",), 6)
    assert "OMP_NUM_THREADS" not in engine_environment((), 6)


def test_all_engines_of_a_host_share_one_cache_of_triton_kernels(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    assert engine_environment(("0",), 6)["TRITON_CACHE_DIR"] == str(tmp_path / "batchinf" / "triton")
    assert "TRITON_CACHE_DIR" not in engine_environment((), 6)  # engines on processors compile none
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "own"))
    assert "TRITON_CACHE_DIR" not in engine_environment(("0",), 6)
