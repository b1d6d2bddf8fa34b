"""What a replica of this host finds around it: variables for vLLM and torch, folders for sockets and compiled code."""

import os
import pathlib
import shutil
import tempfile

from batchinf.replica.messages import Launch

_PORTS_A_REPLICA = 40
_FIRST_PORT = 20_000


def engine_environment(slot_devices: tuple[str, ...], num_cpus: int, replica: int) -> dict[str, str]:
    """Environment variables for a replica, to be set before it imports vLLM or torch.

    Values that the user has set are kept, except for the devices.
    """
    wanted = {
        "OMP_NUM_THREADS": str(max(1, num_cpus)),
        "RAYON_NUM_THREADS": str(max(1, min(8, num_cpus))),
        "TOKENIZERS_PARALLELISM": "true",
        "VLLM_NO_USAGE_STATS": "1",
        # vLLM 0.26 picks ports at random and two replicas can race for one: each gets a range of its own.
        "VLLM_PORT": str(_FIRST_PORT + os.getpid() % 500 * _PORTS_A_REPLICA + replica * _PORTS_A_REPLICA),
        # A replica is on one host: what listens in it must not be reached from others. Gloo would take the address
        # that the host's name has, and vLLM that of the interface that leads out.
        "VLLM_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    if not slot_devices:
        wanted |= {
            # The engine core in the replica's own process: starts in a tenth of the time.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "TORCHDYNAMO_DISABLE": "1",
        }
    chosen = {name: value for name, value in wanted.items() if name not in os.environ}
    if slot_devices:
        chosen["CUDA_VISIBLE_DEVICES"] = ",".join(slot_devices)
    return chosen


def sockets_folder(launch: Launch) -> pathlib.Path:
    """An empty folder for vLLM's socket files, which it leaves behind; their paths have a limit of 107 bytes.

    One that an earlier incarnation left, because its coordinator was killed, is removed.
    """
    prefix = _replica_prefix(launch)
    _sweep_sockets(prefix)
    return pathlib.Path(tempfile.mkdtemp(prefix=prefix))


def cache_root() -> pathlib.Path:
    """What batchinf keeps beside what vLLM has compiled."""
    return pathlib.Path(os.environ.get("VLLM_CACHE_ROOT", pathlib.Path.home() / ".cache" / "vllm"), "batchinf")


def _replica_prefix(launch: Launch) -> str:
    return f"{_sockets_prefix(launch.job_id)}{launch.replica}-"


def sweep_sockets(job_id: str) -> None:
    """Remove the folders that replicas of a job left because their coordinator was killed. None of them may run."""
    _sweep_sockets(_sockets_prefix(job_id))


def _sockets_prefix(job_id: str) -> str:
    return f"batchinf-{job_id[:12]}-"


def _sweep_sockets(prefix: str) -> None:
    for folder in (pathlib.Path(tempfile.gettempdir()), cache_root()):
        for leftover in folder.glob(f"{prefix}*"):
            shutil.rmtree(leftover, ignore_errors=True)


def own_cache_folder(launch: Launch) -> pathlib.Path:
    """Where vLLM keeps what one replica compiles, if that is not where it always does."""
    return cache_root() / f"{_replica_prefix(launch)}cache"
