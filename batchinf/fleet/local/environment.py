"""What a replica's process needs of this host: environment variables, ports, and folders for sockets and caches."""

import contextlib
import os
import pathlib
import re
import shutil
import socket
import tempfile

from batchinf.base.errors import EngineStartError
from batchinf.base.process import python_path
from batchinf.engines.protocol import DEVICE_LOCK
from batchinf.fleet.devices import Slot
from batchinf.replica.messages import Launch

_PORTS_A_REPLICA = 40
_FIRST_PORT = 20_000
_PORT_RANGE = pathlib.Path("/proc/sys/net/ipv4/ip_local_port_range")
_MODEL_CLASSES = "modelinfos"


def claim_ports() -> socket.socket:
    """Claim ports for one replica: the 39 after the one that the socket is bound to.

    The kernel lets one process of the host bind a port, so the claim holds until the last copy of the socket is closed.
    """
    low, high = map(int, _PORT_RANGE.read_text().split())
    firsts = range(_FIRST_PORT, 65_536 - _PORTS_A_REPLICA, _PORTS_A_REPLICA)
    # The kernel gives ports from `low` to `high` to any program: they come last.
    for first in sorted(firsts, key=lambda first: low - _PORTS_A_REPLICA < first <= high):
        claim = socket.socket()
        try:
            claim.bind(("127.0.0.1", first))
        except OSError:
            claim.close()
        else:
            return claim
    raise EngineStartError("found no free ports for a replica; set VLLM_PORT to the first of 40 free ones")


def engine_environment(slot_devices: tuple[str, ...], num_cpus: int) -> dict[str, str]:
    """Variables to set before vLLM or torch is imported. Values of the user stay, except for the devices."""
    defaults = {
        "RAYON_NUM_THREADS": str(max(1, min(8, num_cpus))),
        "TOKENIZERS_PARALLELISM": "true",
        "VLLM_NO_USAGE_STATS": "1",
        # A replica is on one host, so its ports must not be reachable from others. By default Gloo takes the address
        # of the host's name, and vLLM that of the outgoing interface.
        "VLLM_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    if slot_devices:
        # vLLM takes one thread if OMP_NUM_THREADS is not set: threads that wait for work slow structured outputs 2 to 6
        # times (vllm#49013).
        # Without it, PyTorch puts vLLM's Triton kernels into the folder of the model that it compiles, and vLLM looks
        # for them elsewhere when it loads the compiled model. So a second start would compile them again, for 15 s.
        defaults["TRITON_CACHE_DIR"] = os.fspath(cache_root() / "triton")
    else:
        defaults |= {
            "OMP_NUM_THREADS": str(max(1, num_cpus)),
            # The engine core in the replica's own process starts in a tenth of the time.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "TORCHDYNAMO_DISABLE": "1",
        }
    variables = {name: value for name, value in defaults.items() if name not in os.environ}
    if slot_devices:
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(slot_devices)
    return variables


def sockets_folder(launch: Launch) -> pathlib.Path:
    """A new folder for vLLM's sockets, whose paths have at most 107 bytes. Deletes an earlier incarnation's."""
    sweep_sockets(launch.job_id, launch.replica)
    return pathlib.Path(tempfile.mkdtemp(prefix=_prefix(launch.job_id, launch.replica)))


def cache_root() -> pathlib.Path:
    """batchinf's folder in vLLM's cache."""
    return pathlib.Path(os.environ.get("VLLM_CACHE_ROOT", pathlib.Path.home() / ".cache" / "vllm"), "batchinf")


def sweep_sockets(job_id: str, replica: int | None = None) -> None:
    """Delete folders of a job's replicas, or of one, whose coordinator was killed. None of them may still run."""
    for folder in (pathlib.Path(tempfile.gettempdir()), cache_root()):
        for leftover in folder.glob(f"{_prefix(job_id, replica)}*"):
            shutil.rmtree(leftover, ignore_errors=True)


def _prefix(job_id: str, replica: int | None) -> str:
    of_replica = "" if replica is None else f"{replica}-"
    return f"batchinf-{job_id[:12]}-{of_replica}"


def make_own_cache(launch: Launch) -> pathlib.Path:
    """Make vLLM's cache folder for one replica, with the list of model classes, which saves 18 s of the start."""
    folder = cache_root() / f"{_prefix(launch.job_id, launch.replica)}cache"
    known = cache_root().parent / _MODEL_CLASSES
    if known.is_dir():
        with contextlib.suppress(OSError):  # another process may change it meanwhile, and vLLM can do without it
            shutil.copytree(known, folder / _MODEL_CLASSES, dirs_exist_ok=True)
    return folder


def _device_lock(slot: Slot) -> pathlib.Path:
    """The file that replicas on the same device lock while their engine starts."""
    name = re.sub(r"[^0-9A-Za-z-]", "-", "-".join(slot.devices))
    folder = pathlib.Path(tempfile.gettempdir(), f"batchinf-devices-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise EngineStartError(f"{folder} belongs to another user; set TMPDIR to a folder of your own")
    return folder / f"{name}.lock"


def process_environment(
    slot: Slot, *, sockets: pathlib.Path, own_cache: pathlib.Path | None, port: int
) -> dict[str, str]:
    """All environment variables of a replica's process. port: the first of its own."""

    return {
        "VLLM_PORT": str(port),
        **os.environ,
        "PYTHONPATH": python_path(),
        "PYTHONUNBUFFERED": "1",
        "VLLM_RPC_BASE_PATH": str(sockets),
        **engine_environment(slot.devices, len(slot.cpus)),
        **({} if own_cache is None else {"VLLM_CACHE_ROOT": str(own_cache)}),
        **({DEVICE_LOCK: str(_device_lock(slot))} if slot.sharers > 1 else {}),
    }
