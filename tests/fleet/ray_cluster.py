"""A Ray cluster of several nodes on this host, for tests: a head without processors, and nodes for one replica each."""

import contextlib
import os
import pathlib
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import psutil

import jobs

# A dead node is noticed within seconds, and Ray sends no report of its use.
SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_DISABLE_IMPORT_WARNING": "1",
}
# In the environment of the clusters of this process, and so of their actors. Other files, and other runs of the tests,
# have clusters of their own on this host at the same time.
_OURS = ("TESTS_CLUSTERS_OF", str(os.getpid()))
_NODE = {
    "object_store_memory": 80 << 20,
    "setup_worker_path": str(pathlib.Path(__file__).with_name("ray_setup_worker.py")),
}
SLOT = {"slot": 1.0}


class TestCluster:
    """A running cluster. Each of its nodes has one CPU and one `slot`, so it holds one replica."""

    __test__ = False

    def __init__(self, num_nodes: int, num_cpus: int = 0) -> None:
        """num_cpus: of the head."""
        from ray.cluster_utils import Cluster

        os.environ.update(SETTINGS)
        os.environ.update([_OURS])
        head = {"num_cpus": num_cpus, "include_dashboard": False, "include_log_monitor": False, "no_monitor": True}
        with _quick():
            self._cluster = Cluster(initialize_head=True, head_node_args={**_NODE, **head})
        self.address: str = self._cluster.address
        self.nodes: list[Any] = []
        for _ in range(num_nodes):
            self.add()

    def add(self, **options: Any) -> Any:
        """Add a node, and return it."""
        given = {"num_cpus": 1, "resources": dict(SLOT), **_NODE, **options}
        with _quick():
            self.nodes.append(self._cluster.add_node(**given))
        return self.nodes[-1]

    def kill(self, node: Any) -> None:
        """Kill a node with its actors, as if its host had failed."""
        self.nodes.remove(node)
        self._cluster.remove_node(node, allow_graceful=False)

    def node_of(self, replica: psutil.Process) -> Any:
        """The node that a replica runs on."""
        pid = int(replica.environ()["RAY_RAYLET_PID"])
        return next(node for node in self.nodes if node.all_processes["raylet"][0].process.pid == pid)

    def restore(self, num_nodes: int) -> None:
        """Add nodes until there are `num_nodes`."""
        while len(self.nodes) < num_nodes:
            self.add()

    def close(self) -> None:
        """End all nodes."""
        self._cluster.shutdown()

    def ray(self, **fields: Any) -> dict[str, Any]:
        """The section `ray` of a spec that runs a job here."""
        section: dict[str, Any] = self.section(**fields)["ray"]
        return section

    def section(self, **fields: Any) -> dict[str, Any]:
        """The sections of a spec that run a job here."""
        return section_of(self.address, **{"resources": dict(SLOT), **fields})


def section_of(address: str, **fields: Any) -> dict[str, Any]:
    """The sections of a spec that run a job on the cluster at an address. Its replicas start as fast as those here."""
    quick = {name: value for name, value in jobs.quick_start().items() if name != "PYTHONPATH"}
    return {"backend": "ray", "ray": {"address": address, "env_vars": quick, **fields}}


@contextlib.contextmanager
def running(num_nodes: int, num_cpus: int = 0) -> Iterator[TestCluster]:
    """A cluster of a head and `num_nodes` nodes. num_cpus: of the head."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cluster = TestCluster(num_nodes, num_cpus)
        try:
            yield cluster
        finally:
            cluster.close()


def _quick() -> Any:
    """Lets the processes of Ray that find `quick/sitecustomize.py`, by the environment of their job, start faster."""
    return mock.patch.dict(os.environ, QUICK_START=jobs.quick_start()["QUICK_START"])


def actors() -> list[psutil.Process]:
    """The processes of all actors and replicas of Ray in this process's clusters."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            command = " ".join(process.cmdline())
            if "ReplicaActor" in command or ("batchinf.fleet.local.process" in command and _of_ray(process)):
                found.append(process)
    return [process for process in found if _is_ours(process)]


def _of_ray(process: psutil.Process) -> bool:
    return "RAY_RAYLET_PID" in process.environ()


def _is_ours(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.environ().get(_OURS[0]) == _OURS[1]
    return False


def spec_of(folder: pathlib.Path, cluster: TestCluster, **sections: Any) -> pathlib.Path:
    """A spec like that of `jobs.spec_of`, on a cluster."""
    return jobs.spec_of(folder, **{**cluster.section(), **sections})
