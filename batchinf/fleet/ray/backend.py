"""The Ray backend: each replica is an actor of a Ray cluster, in a placement group of its own.

The coordinator is the driver, on a host of the cluster. Messages pass through Ray's calls. Rows do not: replicas read
and write them on the shared file system. Ray restarts nothing; the fleet does.
"""

import os
import pathlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from batchinf.base import faults
from batchinf.fleet.devices import DeviceLook, Slot
from batchinf.fleet.local.environment import sweep_sockets
from batchinf.fleet.ray.actor import Order, forwarded
from batchinf.fleet.ray.cluster import Cluster
from batchinf.fleet.ray.handle import RayReplica
from batchinf.fleet.ray.hosts import HostReport, check_model, check_output, check_versions, host_report
from batchinf.fleet.ray.placement import CPU, GPU, Demand, Node, has_gpus, num_replicas
from batchinf.manifest.lines import StartedReplica
from batchinf.model.model import Model
from batchinf.replica.messages import Event, Launch
from batchinf.spec.job import JobSpec

_TICK_S = 1.0
# Ray removes the groups of a dead coordinator by itself, a moment after its death.
_LEFTOVERS_S = 20.0


class RayBackend:
    """See `Backend`, whose methods are described there. It connects to the cluster when it first needs it."""

    name = "ray"
    processors = "the cluster's processors"

    def __init__(self, spec: JobSpec) -> None:
        self._spec = spec
        self._replicas: dict[str, tuple[RayReplica, Slot]] = {}
        self._read_ahead: tuple[Model, str] | None = None
        self._cache_key: str | None = None
        self._ticked_at = 0.0
        # Of the cluster as it was when the slots were made.
        self._demand = Demand((), 0)
        self._lost: list[Node] = []
        """Nodes that were alive when the job began to look at the cluster, and did not answer any more."""

    @cached_property
    def _cluster(self) -> Cluster:
        return Cluster(self._spec.ray)

    @cached_property
    def _software(self) -> HostReport:
        return host_report()

    @cached_property
    def _reports(self) -> list[tuple[Node, HostReport]]:
        """The nodes that may hold a replica, and what they have."""
        able = self._able_nodes()
        faults.point("ray.nodes_seen")
        reports = self._cluster.call_on_each(able, host_report, [()] * len(able))
        self._lost = [node for node in able if node.id not in reports]
        return [(node, reports[node.id]) for node in able if node.id in reports]

    def _able_nodes(self) -> list[Node]:
        nodes = self._cluster.nodes()
        needed = GPU if has_gpus(self._spec, nodes) else CPU
        return [node for node in nodes if node.total.get(needed)]

    def devices(self) -> tuple[str, ...]:
        """See `Backend`. Ray chooses the devices of a replica when it places it."""
        return ()

    def device_size(self, device: str) -> tuple[int | None, str]:
        """See `Backend`. All devices of the cluster are assumed to be alike."""
        return next((report.device for _, report in self._reports if report.device[0] is not None), (None, ""))

    def slots_for(self, spec: JobSpec) -> list[Slot]:
        """See `Backend`. Devices have names of the job: `gpu-0` is the first one of the first replica."""
        assert self._reports is not None  # first, as it finds the nodes that are lost
        nodes = [node for node in self._cluster.nodes() if node.id not in {lost.id for lost in self._lost}]
        number = num_replicas(spec, nodes, self._lost)
        self._demand = Demand.of(spec, [*nodes, *self._lost])
        degree = self._demand.num_devices
        return [Slot(at, tuple(f"gpu-{at * degree + rank}" for rank in range(degree)), ()) for at in range(number)]

    def check_hosts(self, output: pathlib.Path, model: pathlib.Path | None) -> Sequence[str]:
        """See `Backend`. Asks every node that may hold a replica."""
        check_versions(self._software, [(node.name, report) for node, report in self._reports])
        nodes = [node for node, _ in self._reports]
        check_output(self._cluster, nodes, output)
        if model is not None:
            check_model(self._cluster, nodes, model)
        return [f"warning: node {node.name} of the cluster was lost just now; it is left out" for node in self._lost]

    def check_free(self, engine: Mapping[str, Any], slots: Sequence[Slot]) -> None:
        """See `Backend`. The actors check it, when they know their devices."""

    def device_looks(self, devices: Sequence[str]) -> tuple[DeviceLook, ...]:
        """See `Backend`. The actors look at their devices; these are the looks that they reported last."""
        return tuple(
            replace(look, device=device)
            for replica, slot in list(self._replicas.values())
            if len(slot.devices) == len(replica.looks)
            for device, look in zip(slot.devices, replica.looks, strict=True)
        )

    def read_ahead(self, model: Model, load_format: str) -> None:
        """See `Backend`. The actors read, each on its host."""
        self._read_ahead = model, load_format

    def start(self, launch: Launch, slot: Slot, log: pathlib.Path, *, has_own_cache: bool = False) -> RayReplica:
        """See `Backend`. The replica waits until the cluster has room for it."""
        spec = self._spec
        bundles = self._demand.bundles
        order = Order(
            launch=launch,
            log=os.fspath(log.absolute()),
            software=self._software,
            num_devices=len(slot.devices) if len(bundles) == 1 else 0,
            num_cpus=max(1, int(sum(bundle.get(CPU, 0) for bundle in bundles))),
            environment=forwarded(dict(os.environ)),
            env_vars=dict(spec.ray.env_vars),
            folder=os.fspath(pathlib.Path.cwd()),
            umask=_umask(),
            has_own_cache=has_own_cache,
            read_ahead=self._read_ahead,
            cache_key=self._cache_key if slot.devices else None,
        )
        name = f"batchinf-{launch.job_id}-{launch.incarnation}"
        replica = RayReplica(self._cluster, order, name=name, bundles=bundles, log=log)
        self._replicas[launch.incarnation] = replica, slot
        return replica

    def poll(self, wait_s: float) -> list[tuple[RayReplica, Event]]:
        by_call = {call: replica for replica in self._live() for call in replica.calls}
        if by_call:
            self._hear(by_call, wait_s)
        else:
            time.sleep(wait_s)
        self._tick()  # after what has come: the coordinator may not have polled for minutes, as between two attempts
        return [(replica, event) for replica in self._live() for event in replica.take_events()]

    def _hear(self, by_call: "dict[object, RayReplica]", wait_s: float) -> None:
        calls = list(by_call)
        ready, _ = self._cluster.ray.wait(calls, num_returns=1, timeout=wait_s)
        if ready:
            ready, _ = self._cluster.ray.wait(calls, num_returns=len(calls), timeout=0)
        for call in ready:
            by_call[call].hear(call)

    def _tick(self) -> None:
        if self._replicas and time.monotonic() - self._ticked_at >= _TICK_S:
            self._ticked_at = time.monotonic()
            live = self._cluster.live_ids()
            lacking = self._lacking()
            shortage = f"each asks for {self._demand}, and `ray status` shows what the nodes have"
            for replica in self._live():
                replica.tick(live, shortage if replica in lacking else "")

    def _lacking(self) -> list[RayReplica]:
        """The replicas for which the nodes have no room beside the others, even if nothing else ran on them."""
        replicas = [replica for replica in self._live() if not replica.has_ended()]
        if all(replica.is_up for replica in replicas):
            return []
        most = self._demand.count([node.total for node in self._cluster.nodes()])
        if most >= len(replicas):
            return []
        waiting = [replica for replica in replicas if not replica.is_up and not replica.is_placed]
        return waiting if len(replicas) - len(waiting) >= most else []

    def _live(self) -> list[RayReplica]:
        for name in [name for name, (replica, _) in self._replicas.items() if replica.is_removed]:
            del self._replicas[name]
        return [replica for replica, _ in self._replicas.values()]

    def end_leftovers(self, replicas: Sequence[StartedReplica], job_id: str | None) -> None:
        """See `Backend`. Ray itself removes what a dead coordinator left; this waits for it, and removes the rest."""
        names = {str(replica.identity.get("group")) for replica in replicas if replica.backend == self.name}
        if not names:
            return
        deadline = time.monotonic() + _LEFTOVERS_S
        while left := self._cluster.groups(names):
            if time.monotonic() > deadline:
                for group in left:
                    self._cluster.remove_group(group)
                break
            time.sleep(0.2)
        if job_id is not None:
            nodes = self._able_nodes()
            self._cluster.call_on_each(nodes, sweep_sockets, [(job_id,)] * len(nodes))

    def is_cache_warm(self, key: str) -> bool:
        """See `Backend`. Each host has its own cache, so its actors decide which of them compiles into it."""
        self._cache_key = key
        return False

    def note_cache_warm(self, key: str) -> None:
        """See `Backend`. The actors have noted it, each on its host."""

    def close(self) -> None:
        if "_cluster" in self.__dict__:
            self._cluster.close()


def _umask() -> int:
    umask = os.umask(0o077)
    os.umask(umask)
    return umask
