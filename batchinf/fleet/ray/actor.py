"""The actor of one replica, on a node of the cluster: runs the replica with the local backend and relays its messages.

The replica is a child process of the actor, for four reasons. The record of requests in flight outlives the child, so
the actor can read it. One signal ends the child's process group with all engine processes. vLLM would choose Ray as its
executor in a process that Ray has started. The child's environment is set before anything of it imports vLLM. The child
ends itself when the actor is gone.
"""

import contextlib
import fcntl
import json
import os
import pathlib
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import IO

import psutil

from batchinf.base.errors import EngineStartError, UserError
from batchinf.engines.installed import cuda_of_build
from batchinf.fleet.backend import Ending
from batchinf.fleet.devices import DeviceLook, Slot
from batchinf.fleet.local import devices
from batchinf.fleet.local.backend import LocalBackend, LocalReplica
from batchinf.fleet.local.environment import cache_root
from batchinf.fleet.ray.hosts import HostReport, check_versions, host_report
from batchinf.model.model import Model
from batchinf.replica.in_flight import InFlightRecord
from batchinf.replica.messages import Command, Event, InFlightRequest, Launch, Ready, StartPhase

_POLL_S = 0.05
_RECORD_EVERY_S = 1.0
_ACTIVITY_EVERY_S = 5.0
_FEW = 8
# The processes of a lost incarnation end within a second; their memory comes back a little later.
_FREE_WITHIN_S = 20.0
_ONE_HOST = ("VLLM_HOST_IP", "VLLM_PORT", "VLLM_RPC_BASE_PATH")
# Read by vLLM and its libraries; the replica gets the coordinator's value if the node has none.
_FORWARDED = ("BATCHINF_", "HF_", "NCCL_", "OMP_", "TOKENIZERS_", "TORCH", "TRANSFORMERS_", "VLLM_")


@dataclass(frozen=True, slots=True)
class Order:
    """All that an actor needs to start its replica."""

    launch: Launch
    log: str
    software: HostReport
    """Of the coordinator's host."""
    num_devices: int
    """GPUs of the actor; 0 for an engine on processors, or on several hosts."""
    num_cpus: int
    """For its threads."""
    environment: dict[str, str]
    """Variables of the coordinator that the replica gets if the node has none."""
    env_vars: dict[str, str]
    """Variables that override the node's."""
    folder: str
    """The coordinator's current folder."""
    umask: int
    """The coordinator's."""
    has_own_cache: bool
    read_ahead: tuple[Model, str] | None
    """The model whose weights are read ahead, and its load format."""
    cache_key: str | None
    """Of engines that compile alike; None on a processor."""


@dataclass(frozen=True, slots=True)
class Report:
    """Events of a replica, and its state."""

    first: int
    """The number of the first event."""
    events: tuple[Event, ...]
    in_flight: tuple[int, ...] | None
    """Requests in its engine, `packed`; None if the last report had them."""
    looks: tuple[DeviceLook, ...]
    """At its devices."""
    start_activity: tuple[int, int]
    """See `ReplicaHandle`; without the ranks on other hosts."""
    has_ended: bool
    """It is gone, and this has its last events."""


def forwarded(environment: dict[str, str]) -> dict[str, str]:
    """The variables of the coordinator's environment that replicas on other hosts get."""
    return {name: value for name, value in environment.items() if name.startswith(_FORWARDED) and name not in _ONE_HOST}


def packed(requests: Sequence[InFlightRequest]) -> tuple[int, ...]:
    """Requests as numbers: a thousand of them stay below the size that Ray puts into its object store."""
    return tuple(2 * request.row_index + request.has_output for request in requests)


def unpacked(numbers: Sequence[int]) -> tuple[InFlightRequest, ...]:
    """The requests that `packed` made numbers of."""
    return tuple(InFlightRequest(number // 2, bool(number % 2)) for number in numbers)


class ReplicaActor:
    """Runs one incarnation. Ray calls its methods on several threads."""

    def __init__(self) -> None:
        self._backend = LocalBackend()
        self._lock = threading.Lock()
        self._events: list[Event] = []
        self._first = self._num_taken = 0
        self._replica: LocalReplica | None = None
        self._record: InFlightRecord | None = None
        self._ending: Ending | None = None
        self._is_up = False
        self._told: tuple[int, ...] = ()
        self._told_at = 0.0
        self._activity = (0, 0)
        self._next_activity_at = 0.0
        self._cache_lock: IO[bytes] | None = None
        self._cache_key: str | None = None
        self._gpus: tuple[str, ...] = ()

    def start(self, order: Order) -> str:
        """Start the replica on this host. Returns the node's name, for people.

        Raises UserError if the host cannot run it, for example because others hold the memory of the devices.
        """
        import ray

        context = ray.get_runtime_context()
        node = f"{ray.util.get_node_ip_address()} ({socket.gethostname()}, {context.get_node_id()[:8]})"
        gpus = tuple(context.get_accelerator_ids().get("GPU", ()))
        # The node may have joined the cluster after the coordinator has checked all nodes.
        check_versions(order.software, [(node, host_report())])
        _set_environment(order)
        with contextlib.suppress(OSError):
            # For relative paths. If all paths are absolute, the folder need not exist here.
            os.chdir(order.folder)
        os.umask(order.umask)
        launch = order.launch
        if launch.ray_group is not None:
            _reach_other_hosts()
            os.environ.pop("CUDA_VISIBLE_DEVICES", None)
            gpus = devices.visible_devices()
        elif len(gpus) != order.num_devices:
            raise EngineStartError(
                f"Ray gave {len(gpus)} devices on node {node}, but {order.num_devices} were asked for"
            )
        slot = Slot(launch.replica, gpus, devices.own_cpus()[: order.num_cpus])
        if gpus and launch.ray_group is None:
            _wait_until_free(launch, slot)
        if order.read_ahead is not None:
            self._backend.read_ahead(*order.read_ahead)
        has_own_cache = order.has_own_cache and launch.ray_group is None and not self._may_fill_cache(order.cache_key)
        with self._lock:
            self._cache_key = order.cache_key if not has_own_cache else None
            log = pathlib.Path(order.log)
            self._replica = self._backend.start(launch, slot, log, has_own_cache=has_own_cache)
            self._record = InFlightRecord(self._replica.memory)
            self._events.append(StartPhase(f"starting on {node}"))
        self._gpus = gpus
        return node

    def take(self, first: int, commands: Sequence[Command]) -> None:
        """Give commands to the replica, in this order. first: number of the first one; a call may be repeated."""
        with self._lock:
            for command in commands[max(0, self._num_taken - first) :]:
                self._num_taken += 1
                if self._replica is not None and self._ending is None:
                    self._is_up &= not isinstance(command, Launch)
                    self._replica.send(command)

    def listen(self, num_received: int, wait_s: float) -> Report:
        """Events from the number `num_received` on, after at most `wait_s` seconds. Earlier ones are forgotten.

        A call that got lost may be repeated.
        """
        deadline = time.monotonic() + wait_s
        while True:
            with self._lock:
                has_ended = self._look()
                del self._events[: max(0, num_received - self._first)]
                self._first = max(self._first, num_received)
                events = tuple(self._events)
                in_flight = self._new_in_flight()
                looks = self._backend.device_looks(self._gpus)  # the first call starts a thread
            if events or has_ended or in_flight is not None or time.monotonic() >= deadline:
                break
            time.sleep(_POLL_S)
        return Report(
            first=self._first,
            events=events,
            in_flight=in_flight,
            looks=looks,
            start_activity=self._activity,
            has_ended=has_ended,
        )

    def _look(self) -> bool:
        """Take what the replica has sent. Returns whether it has ended."""
        if self._replica is None or self._ending is not None:
            return self._ending is not None
        has_ended = self._replica.has_ended()
        if not self._is_up and time.monotonic() >= self._next_activity_at:
            self._next_activity_at = time.monotonic() + _ACTIVITY_EVERY_S
            self._activity = self._replica.start_activity()
        events = [event for _, event in self._backend.poll(0)]
        self._events += events
        self._is_up |= any(isinstance(event, Ready) for event in events)
        if self._cache_key is not None and self._is_up:
            self._backend.note_cache_warm(self._cache_key)
            self._cache_key = None
        return has_ended

    def _new_in_flight(self) -> tuple[int, ...] | None:
        """The requests in the engine if the coordinator has to know: once a second, or at once if there are few.

        If a row kills its host, it is alone in the engine when it is tried, and may not be there for a second.
        """
        if self._record is None:
            return None
        requests = packed(self._record.requests())
        is_due = len(requests) <= _FEW or time.monotonic() - self._told_at >= _RECORD_EVERY_S
        if not is_due or requests == self._told:
            return None
        self._told = requests
        self._told_at = time.monotonic()
        return requests

    def end(self, num_received: int) -> Ending:
        """End the replica with everything that it started. `events` begin with the number `num_received`."""
        with self._lock:
            assert self._replica is not None
            if self._ending is None:
                self._record = None
                self._ending = self._replica.end()
            events = (*self._events[max(0, num_received - self._first) :], *self._ending.events)
            return replace(self._ending, events=events)

    def _may_fill_cache(self, key: str | None) -> bool:
        """Whether this replica may compile into the host's cache: it is warm, or no other replica fills it now.

        The lock holds until the actor ends.
        """
        if key is None or self._backend.is_cache_warm(key):
            return True
        with contextlib.suppress(OSError):
            cache_root().mkdir(parents=True, exist_ok=True)
            self._cache_lock = (cache_root() / "filling.lock").open("wb")
            fcntl.flock(self._cache_lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        return False


def _set_environment(order: Order) -> None:
    if "OMP_NUM_THREADS" not in order.environment:
        # Ray sets it to the actor's CPUs.
        os.environ.pop("OMP_NUM_THREADS", None)
    for name, value in order.environment.items():
        os.environ.setdefault(name, value)
    os.environ.update(order.env_vars)


def _reach_other_hosts() -> None:
    """Set the address and the interface of this node for an engine over several hosts, unless the user has."""
    import ray.util

    address = ray.util.get_node_ip_address()
    os.environ.setdefault("VLLM_HOST_IP", address)
    for name, addresses in psutil.net_if_addrs().items():
        if any(interface.address == address for interface in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def _wait_until_free(launch: Launch, slot: Slot) -> None:
    devices.check_driver(cuda_of_build())
    engine = json.loads(launch.spec)["engine"]
    deadline = time.monotonic() + _FREE_WITHIN_S
    while True:
        try:
            devices.check_free(engine, [slot])
        except UserError:
            if time.monotonic() > deadline:
                raise
            time.sleep(1.0)
        else:
            return
