"""The connection to a Ray cluster: its nodes, calls on each node, and placement groups by name."""

import contextlib
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any

from batchinf.base.errors import UserError
from batchinf.base.stop_signals import STOP_SIGNALS
from batchinf.base.text import one_line
from batchinf.fleet.ray.placement import Node
from batchinf.spec.job import RaySpec

NAMESPACE = "batchinf"
_CONNECT_S = 10.0
# A worker process has to start on each node and to import batchinf, from a shared disk perhaps.
_CALL_S = 120.0
# By Ray's health checks a dead node is noticed after 15 s to a minute.
_NOTICED_S = 60.0
_ADDRESS = "RAY_ADDRESS"
# Jobs on several threads share a connection. Users are counted only if batchinf made it.
_connecting = threading.Lock()
_num_users = 0


class Cluster:
    """A connected cluster. Ray allows one in a process."""

    def __init__(self, spec: RaySpec) -> None:
        """Connect as a driver. Raises UserError if Ray is not installed or no cluster answers."""
        self.ray = _import_ray()
        path = spec.env_vars.get("PYTHONPATH") or os.environ.get("PYTHONPATH")
        self.runtime_env = {"env_vars": {} if not path else {"PYTHONPATH": path}}
        """The environment in which Ray starts a worker, so that it finds batchinf. Ray shows it to its users."""
        self._is_ours = _connect(self.ray, _address(spec))
        self.address: str = self.ray.get_runtime_context().gcs_address

    def close(self) -> None:
        """Disconnect when the last user of a connection that batchinf made is done."""
        global _num_users
        with _connecting:
            if self._is_ours:
                self._is_ours = False
                _num_users -= 1
                if not _num_users:
                    with _own_signals():
                        self.ray.shutdown()

    def nodes(self) -> list[Node]:
        """The nodes that are alive, by name."""
        # Public functions give only sums over all nodes.
        from ray._private.state import available_resources_per_node

        free = available_resources_per_node()
        nodes = [
            Node(node["NodeID"], _name(node), node["Resources"], free.get(node["NodeID"], {}))
            for node in self.ray.nodes()
            if node["Alive"]
        ]
        return sorted(nodes, key=lambda node: (node.name, node.id))

    def live_ids(self) -> frozenset[str]:
        """The ids of the nodes that are alive, as far as the cluster knows."""
        return frozenset(node["NodeID"] for node in self.ray.nodes() if node["Alive"])

    def call_on_each(
        self, nodes: Sequence[Node], function: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]
    ) -> dict[str, Any]:
        """Call a function of a module on all nodes at the same time, and return the results by the nodes' ids.

        arguments: for each node. A node that is lost meanwhile has no result. Raises UserError with the node's name if
        another node cannot run it.
        """
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        remote = self.ray.remote(function)
        calls = [
            remote.options(
                num_cpus=0,
                max_retries=0,
                runtime_env=self.runtime_env,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False),
            ).remote(*node_arguments)
            for node, node_arguments in zip(nodes, arguments, strict=True)
        ]
        results = {}
        for node, call in zip(nodes, calls, strict=True):
            try:
                results[node.id] = self.ray.get(call, timeout=_CALL_S)
            except self.ray.exceptions.RayError as error:
                if self._is_lost(node, error):
                    continue
                raise UserError(
                    f"node {node.name} of the Ray cluster cannot run batchinf: {ray_cause(error)}; install the same "
                    "versions of batchinf, Ray and vLLM there, or remove the node"
                ) from error
        return results

    def _is_lost(self, node: Node, error: Exception) -> bool:
        """Whether a call failed because its node is lost. Ray may notice that a while after its workers have ended."""
        exceptions = self.ray.exceptions
        if isinstance(error, exceptions.RayTaskError | exceptions.RuntimeEnvSetupError):
            return False
        deadline = time.monotonic() + (0.0 if isinstance(error, exceptions.GetTimeoutError) else _NOTICED_S)
        while node.id in self.live_ids():
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.5)
        return True

    def groups(self, names: Container[str]) -> list[Any]:
        """The existing placement groups whose names are one of these and a number."""
        from ray.util.placement_group import PlacementGroup, placement_group_table

        return [
            PlacementGroup(self.ray.PlacementGroupID(bytes.fromhex(group["placement_group_id"])))
            for group in placement_group_table().values()
            if group["name"].rpartition("/")[0] in names and group["state"] != "REMOVED"
        ]

    def remove_group(self, group: Any) -> None:
        """Remove a placement group, and with it the actors in it."""
        from ray.util.placement_group import remove_placement_group

        with contextlib.suppress(self.ray.exceptions.RayError, ValueError):
            remove_placement_group(group)


def ray_cause(error: Exception) -> str:
    """Ray's error in one line. Of an exception on a node, it is the last line."""
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    return one_line(lines[-1] if lines else type(error).__name__, 300)


def _import_ray() -> Any:
    # Ray reports its use over the network unless it is told not to.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Silences a warning about a default that does not matter here: actors without GPUs do not use CUDA.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
    except ImportError as error:
        raise UserError(
            f"backend: got ray, but Ray cannot be imported ({one_line(str(error), 100)}); install it on all hosts: "
            "pip install 'batchinf[ray]'"
        ) from error
    return ray


def _address(spec: RaySpec) -> str:
    """The address to connect to. Never a default: a job on a shared host could join another user's cluster."""
    address = spec.address or os.environ.get(_ADDRESS)
    if not address:
        raise UserError(
            f"ray.address: is not set, and neither is {_ADDRESS}; give the address that `ray start --head` printed, "
            "such as 10.0.0.1:6379, or auto for the cluster that this host belongs to"
        )
    if "://" in address:
        raise UserError(
            f"{_ADDRESS}: got {address!r}, the address of a Ray Client or a dashboard; batchinf runs on a host of the "
            "cluster: give host:port of its head, or auto, in ray.address"
        )
    return address


def _connect(ray: Any, address: str) -> bool:
    """Connect, unless this process is connected to that cluster. Returns whether batchinf made the connection."""
    global _num_users
    with _connecting:
        if not ray.is_initialized():
            _begin(ray, address)
            _num_users = 0
            is_ours = True
        else:
            _check_same(ray, address)
            is_ours = _num_users > 0
        _num_users += is_ours
        return is_ours


def _check_same(ray: Any, address: str) -> None:
    """Raise UserError if the process is connected to another cluster than the one at an address."""
    connected: str = ray.get_runtime_context().gcs_address
    if address != "auto" and _endpoints(address).isdisjoint(_endpoints(connected)):
        raise UserError(
            f"ray.address: got {address}, but this Python process is connected to the Ray cluster at {connected}, and "
            "Ray allows one in a process: call ray.shutdown() first, or give that address"
        )


def _endpoints(address: str) -> set[tuple[Any, ...]]:
    """All IP addresses, with the port, that a host and port stand for. Those of loopback stand for this host."""
    from ray._private.services import resolve_ip_for_localhost

    host, _, port = address.rpartition(":")
    host = resolve_ip_for_localhost(host.strip("[]") or "127.0.0.1")
    try:
        return {info[4][:2] for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
    except OSError:
        return {(host, port)}


def _begin(ray: Any, address: str) -> None:
    _check_answers(address)
    try:
        with _own_signals():
            ray.init(
                address=address,
                namespace=NAMESPACE,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
    except (ConnectionError, ValueError, TimeoutError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "mismatch" in str(error):
            words = one_line(str(error), 300)
            raise UserError(
                f"the Ray cluster at {address} has another version of Ray or Python: {words}; use the same on all hosts"
            ) from error
        raise _no_cluster(address, str(error)) from error


def _check_answers(address: str) -> None:
    """Raise UserError if nothing listens at an address. Ray itself would try for a minute."""
    host, _, port = address.rpartition(":")
    if not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]") or "127.0.0.1", int(port)), _CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise _no_cluster(address, str(error)) from error


def _no_cluster(address: str, words: str) -> UserError:
    return UserError(
        f"ray.address: no Ray cluster answers at {address} ({one_line(words, 200)}); "
        "start one with `ray start --head`, or give the address of its head"
    )


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """Keep this process's signal handlers. Ray replaces the one for SIGTERM."""
    if threading.current_thread() is not threading.main_thread():
        yield  # no other thread can set a handler, and Ray sets none there
        return
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _name(node: Mapping[str, Any]) -> str:
    # On one host, as in tests, only the id tells nodes apart.
    return f"{node['NodeManagerAddress']} ({node['NodeManagerHostname']}, {node['NodeID'][:8]})"
