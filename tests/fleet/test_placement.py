"""Which replica gets which devices and cores, and what is said of a device that somebody else holds."""

import contextlib
import getpass
import os
import pathlib
import re
import subprocess
import sys
import types
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import jobs
from batchinf.base.errors import SpecError, UserError
from batchinf.commands.validate.validate import validate_job
from batchinf.engines.installed import cuda_of_build
from batchinf.fleet.devices import Slot
from batchinf.fleet.local.backend import LocalBackend
from batchinf.fleet.local.devices import (
    check_driver,
    check_free,
    own_cpus,
    share_cpus,
    slots_on,
    slots_on_processor,
    visible_devices,
)
from batchinf.spec.file import read_spec
from batchinf.spec.job import JobSpec

GIB = 2**30


def spec_of(**sections: Any) -> JobSpec:
    return JobSpec.model_validate(
        {"model": {"name": "m"}, "input": {"path": "prompts.jsonl"}, "output": {"path": "out"}, **sections}
    )


def degrees(tensor: int = 1, pipeline: int = 1, data: int | str = "auto") -> dict[str, Any]:
    return {
        "tensor_parallel_size": tensor,
        "pipeline_parallel_size": pipeline,
        "data_parallel_size": data,
    }


class Nvml(types.ModuleType):
    """What this package asks of pynvml: 80 GiB a device, `held` GiB of it by the processes `pids`."""

    class NVMLError(Exception):
        pass

    def __init__(self, num_devices: int, held: dict[int, float], pids: list[int]) -> None:
        super().__init__("pynvml")
        self.num_devices, self.held, self.pids = num_devices, held, pids

    def nvmlInit(self) -> None:  # noqa: N802
        if not self.num_devices:
            raise self.NVMLError("no driver")

    def nvmlShutdown(self) -> None:  # noqa: N802
        pass

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return self.num_devices

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:  # noqa: N802
        return 12_080

    def nvmlSystemGetDriverVersion(self) -> str:  # noqa: N802
        return "570.86.15"

    def nvmlDeviceGetName(self, handle: int) -> str:  # noqa: N802
        return "NVIDIA H100 80GB HBM3"

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:  # noqa: N802
        return int(uuid[-1])

    nvmlMemory_v2 = 0x02000028  # noqa: N815

    def nvmlDeviceGetMemoryInfo(self, handle: int, version: int | None = None) -> Any:  # noqa: N802
        held = int(self.held.get(handle, 0) * GIB)
        # The driver keeps half a GiB. Only the second version of the function says so.
        reserved = {} if version is None else {"reserved": GIB // 2}
        return types.SimpleNamespace(total=80 * GIB + GIB // 2, free=80 * GIB - held, used=held, **reserved)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[Any]:  # noqa: N802
        held = self.held.get(handle, 0) * GIB
        return [types.SimpleNamespace(pid=pid, usedGpuMemory=held) for pid in self.pids if held]


def install(monkeypatch: pytest.MonkeyPatch, num_devices: int, held: Any = None, pids: Any = ()) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Nvml(num_devices, held or {}, list(pids)))


@given(st.lists(st.integers(0, 300), unique=True, min_size=1, max_size=64), st.integers(1, 16))
def test_cores_are_shared_out_equally(cpus: list[int], num_replicas: int) -> None:
    shares = share_cpus(cpus, num_replicas)
    assert len(shares) == num_replicas
    if len(cpus) < num_replicas:
        assert shares == [tuple(cpus)] * num_replicas
    else:
        dealt = [cpu for share in shares for cpu in share]
        assert dealt == cpus[: len(dealt)]
        assert len({len(share) for share in shares}) == 1
        assert len(cpus) - len(dealt) < num_replicas


@pytest.mark.parametrize(
    ("parallel", "num_devices", "expected"),
    [
        (degrees(), 4, [("0",), ("1",), ("2",), ("3",)]),
        (degrees(2), 8, [("0", "1"), ("2", "3"), ("4", "5"), ("6", "7")]),
        (degrees(2), 5, [("0", "1"), ("2", "3")]),
        (degrees(2, 2), 8, [("0", "1", "2", "3"), ("4", "5", "6", "7")]),
        (degrees(2, 1, 1), 8, [("0", "1")]),
        (degrees(), 0, [(), ()]),
        (degrees(data=3), 0, [(), (), ()]),
    ],
)
def test_devices_are_dealt_out_in_order(parallel: dict[str, Any], num_devices: int, expected: list[Any]) -> None:
    slots = slots_on(spec_of(parallel=parallel).parallel, [str(i) for i in range(num_devices)], range(16))
    assert [slot.devices for slot in slots] == expected
    assert [slot.replica for slot in slots] == list(range(len(expected)))
    assert [slot.num_devices for slot in slots] == [max(1, len(devices)) for devices in expected]
    assert len({cpu for slot in slots for cpu in slot.cpus}) == sum(len(slot.cpus) for slot in slots)


@pytest.mark.parametrize(
    ("parallel", "needed"), [(degrees(8), "8"), (degrees(2, 1, 3), "6"), (degrees(2, 4), "8"), (degrees(1, 1, 5), "5")]
)
def test_degrees_that_do_not_fit_are_refused(parallel: dict[str, Any], needed: str) -> None:
    with pytest.raises(SpecError, match=rf"need {needed} devices, but 4 are visible \(0, 1, 2, 3\)"):
        slots_on(spec_of(parallel=parallel).parallel, ["0", "1", "2", "3"], range(16))


@pytest.mark.parametrize(
    ("parallel", "expected"),
    [
        ({"devices": [3, 1]}, [("3",), ("1",)]),
        ({"devices": ["1", 2], "tensor_parallel_size": 2}, [("1", "2")]),
        ({"devices": [0, 1, 2], "data_parallel_size": 1}, [("0",)]),
        ({"devices": ["GPU-b"]}, [("GPU-b",)]),
    ],
)
def test_a_job_takes_the_devices_that_it_names(parallel: dict[str, Any], expected: list[Any]) -> None:
    visible = ["GPU-a", "GPU-b"] if "GPU-b" in parallel["devices"] else ["0", "1", "2", "3"]
    assert [slot.devices for slot in slots_on(spec_of(parallel=parallel).parallel, visible, range(16))] == expected
    assert LocalBackend().slots_for(spec_of(parallel=parallel, scripted={}))[0].devices == ()


@pytest.mark.parametrize(
    ("devices", "visible", "message"),
    [
        ([1, 9, "GPU-a"], ["0", "1"], "got 9, GPU-a, but only 0, 1 can be seen"),
        ([0], [], "got 0, but no CUDA device can be seen"),
        ([3], ["4"], r"got 3, but only 4 can be seen \(CUDA_VISIBLE_DEVICES is '4'\)"),
    ],
)
def test_devices_that_cannot_be_seen_are_refused(
    devices: list[Any], visible: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible == ["4"]:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4")
    with pytest.raises(SpecError, match=f"^parallel.devices: {message}.*; name devices that can be seen$"):
        slots_on(spec_of(parallel={"devices": devices}).parallel, visible, range(4))


def test_too_few_devices_for_the_degrees_are_refused() -> None:
    with pytest.raises(SpecError, match=r"need 4 devices, but 2 are in parallel.devices \(0, 3\); .* add devices$"):
        slots_on(
            spec_of(parallel={"tensor_parallel_size": 4, "devices": [0, 3]}).parallel, ["0", "1", "2", "3"], range(4)
        )


def test_a_pipeline_needs_devices() -> None:
    wrong = r"^parallel\.pipeline_parallel_size: got 2, but no CUDA device is visible, .*; use tensor_parallel_size$"
    with pytest.raises(SpecError, match=wrong):
        slots_on(spec_of(parallel=degrees(1, 2)).parallel, [], range(4))
    assert len(slots_on(spec_of(parallel=degrees(2, 1)).parallel, [], range(5))) == 2
    assert len(LocalBackend().slots_for(spec_of(parallel=degrees(1, 2), scripted={}))) == 2


def test_few_cores_have_one_engine_unless_the_spec_says_more() -> None:
    assert [len(slots_on(spec_of().parallel, [], range(cores))) for cores in (1, 4, 5)] == [1, 1, 2]
    assert len(slots_on(spec_of(parallel={"data_parallel_size": 2}).parallel, [], range(4))) == 2


def test_the_scripted_engine_takes_no_device() -> None:
    parallel = spec_of(scripted={}).parallel
    assert slots_on_processor(parallel, range(4)) == [Slot(0, (), (0, 1)), Slot(1, (), (2, 3))]


def test_cores_are_those_of_the_affinity() -> None:
    cpu = max(os.sched_getaffinity(0))
    code = (
        f"import os; os.sched_setaffinity(0, [{cpu}]); from batchinf.fleet.local.devices import own_cpus; "
        "print(own_cpus())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"({cpu},)"
    assert own_cpus() == tuple(sorted(os.sched_getaffinity(0)))


@pytest.mark.parametrize(
    ("allowed", "expected"),
    [
        (None, ("0", "1", "2")),
        ("", ()),
        ("2,0", ("2", "0")),
        (" 1 , 2 ", ("1", "2")),
        ("0,-1,1", ("0",)),
        ("0,7,1", ("0",)),
        ("-1", ()),
        ("GPU-a0,MIG-b1", ("GPU-a0", "MIG-b1")),
    ],
)
def test_visible_devices_are_those_that_cuda_shows(
    allowed: str | None, expected: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, 3)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if allowed is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", allowed)
    assert visible_devices() == expected


def test_without_a_driver_there_are_no_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, 0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert visible_devices() == ()


@pytest.mark.parametrize("device", ["1", "GPU-1"])
def test_a_held_device_is_named_with_its_holder(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, 2, {1: 20.0}, [os.getpid()])
    with pytest.raises(UserError) as raised:
        check_free({}, [Slot(0, ("0",), ()), Slot(1, (device,), ())])
    words = str(raised.value)
    assert f"device {device} is held by pid {os.getpid()} of {getpass.getuser()} (20.0 GiB)" in words
    assert "60.0 of 80.0 GiB are free" in words
    assert "0.92 needs 73.6" in words


def test_a_holder_that_cannot_be_seen_holds_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, 1, {0: 20.0})
    with pytest.raises(UserError, match="cannot be seen"):
        check_free({}, [Slot(0, ("0",), ())])


def test_a_device_with_room_enough_may_be_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, 1, {0: 20.0}, [os.getpid()])
    check_free({"gpu_memory_utilization": 0.7}, [Slot(0, ("0",), ())])


@pytest.mark.parametrize(("build", "is_refused"), [((13, 0), True), ((12, 9), False), ((12, 4), False), (None, False)])
def test_a_driver_that_is_too_old_is_refused(
    build: tuple[int, int] | None, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, 1)
    wrong = r"^the NVIDIA driver 570\.86\.15 runs .* CUDA 12\.8, .* built for CUDA 13\.0; install driver 580 or newer"
    with pytest.raises(UserError, match=wrong) if is_refused else contextlib.nullcontext():
        check_driver(build)
    install(monkeypatch, 0)
    check_driver((13, 0))  # a login node


def test_the_cuda_version_of_pytorch(tmp_path: pathlib.Path) -> None:
    for text, expected in (("cuda: Optional[str] = '13.0'\n", (13, 0)), ("cuda: Optional[str] = None\n", None)):
        (tmp_path / "version.py").write_text(f"__version__ = '2.13.0'\ndebug = False\n{text}hip = None\n")
        assert cuda_of_build(tmp_path) == expected
    assert cuda_of_build(tmp_path / "none") is None


@pytest.mark.parametrize(
    ("parallel", "field"),
    [
        ({"data_parallel_size": 9}, "data_parallel_size: got 9; 9 replica"),
        (
            {"tensor_parallel_size": 2, "data_parallel_size": 1, "devices": [0]},
            "tensor_parallel_size: got 2; 1 replica",
        ),
    ],
)
def test_validate_names_the_field_of_too_many_devices(
    parallel: dict[str, Any], field: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    install(monkeypatch, 4)
    path = jobs.spec_of(tmp_path, scripted=None, parallel=parallel, model={"name": str(jobs.MODEL), "dtype": "auto"})
    with pytest.raises(SpecError, match=rf"^{re.escape(str(path))}:\d+:\d+: parallel\.{re.escape(field)}") as raised:
        list(validate_job(read_spec(path), num_rows=1))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("is_cpu_build", [False, True])
def test_a_login_node_gets_a_note(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, is_cpu_build: bool) -> None:
    monkeypatch.setattr("batchinf.commands.validate.validate.is_cpu_build", lambda: is_cpu_build)
    path = jobs.spec_of(tmp_path, scripted=None)
    install(monkeypatch, 0)
    assert visible_devices() == ()
    lines = [line for finding in validate_job(read_spec(path), num_rows=1) for line in finding.lines()]
    assert any("no GPU is visible here" in line for line in lines) is not is_cpu_build


def test_validate_does_not_ask_a_ray_cluster_and_says_so(tmp_path: pathlib.Path) -> None:
    path = jobs.spec_of(tmp_path, scripted=None, backend="ray")
    lines = [line for finding in validate_job(read_spec(path), num_rows=1) for line in finding.lines()]
    assert any(line.startswith("note: the Ray cluster is not asked") for line in lines)
