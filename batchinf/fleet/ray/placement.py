"""Decides what a replica asks of a Ray cluster, how many replicas fit, and on which nodes. Pure functions.

A replica that one host can hold asks for one bundle with all its GPUs, because a Ray actor gets the devices of one
bundle only. A replica over several hosts asks for one bundle for each GPU, as vLLM's Ray executor wants it. Each
pipeline stage is then pinned to one node, so that tensor parallelism stays within a host if a host can hold a stage.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from batchinf.base.errors import SpecError
from batchinf.spec.job import JobSpec

GPU = "GPU"
CPU = "CPU"
Resources = Mapping[str, float]
_SHOWN_NODES = 8
_RANK: dict[str, float] = {GPU: 1.0, CPU: 1.0}  # what each device of a replica over several hosts asks for
# Every node has these; they say nothing about its size.
_NOT_SHOWN = ("node:", "object_store_memory", "memory", "accelerator_type:")


@dataclass(frozen=True, slots=True)
class Node:
    """A node of the cluster that is alive."""

    id: str
    name: str
    """Address and host name."""
    total: Resources
    """By Ray's names of resources."""
    free: Resources


@dataclass(frozen=True, slots=True)
class Group:
    """The placement group of one replica."""

    bundles: tuple[dict[str, float], ...]
    strategy: str
    nodes: tuple[str, ...] | None = None
    """For each bundle the node that it is pinned to; None: Ray chooses."""

    @property
    def spans_hosts(self) -> bool:
        """Whether the engine's ranks are actors of their own."""
        return len(self.bundles) > 1


@dataclass(frozen=True, slots=True)
class Demand:
    """What each replica of a job asks for."""

    has_gpus: bool
    """Whether engines run on GPUs."""
    tensor: int
    pipeline: int
    others: Resources
    """Asked for on each host."""

    @classmethod
    def of(cls, spec: JobSpec, nodes: Sequence[Node]) -> "Demand":
        """The demand of a job in this cluster."""
        has_gpus = spec.scripted is None and any(node.total.get(GPU) for node in nodes)
        return cls(has_gpus, *spec.parallel.sizes, spec.ray.resources)

    @property
    def degree(self) -> int:
        """Devices of a replica."""
        return self.tensor * self.pipeline

    def bundle(self, num_devices: int) -> dict[str, float]:
        """The bundle of this many devices, the first one on its host."""
        devices: dict[str, float] = {GPU: num_devices, CPU: num_devices} if self.has_gpus else {CPU: 1}
        return {name: float(amount) for name, amount in {**devices, **self.others}.items() if amount}

    def group(self, nodes: Sequence[Node]) -> Group | None:
        """The group of the next replica, given what is free on the nodes; None if there is no room."""
        whole = self.bundle(self.degree)
        if any(_fits(whole, node.free) for node in nodes):
            return Group((whole,), "STRICT_PACK")
        if not self.has_gpus or self.is_small(nodes):
            return None
        if self.tensor > max((node.total.get(GPU, 0) for node in nodes), default=0):
            # No host holds a stage. Ray spreads the devices over as few hosts as possible.
            spread = Group((self.bundle(1), *[_RANK] * (self.degree - 1)), "PACK")
            return None if _after(nodes, spread) is None else spread
        return self._pinned_group(nodes)

    def _pinned_group(self, nodes: Sequence[Node]) -> Group | None:
        """One bundle for each device, and each stage on one node; nodes with many free GPUs come first."""
        bundles: list[dict[str, float]] = []
        pinned: list[str] = []
        for node in sorted(nodes, key=lambda node: -node.free.get(GPU, 0)):
            free = dict(node.free)
            first = self.bundle(1)
            while len(pinned) < self.degree:
                stage = [first, *[_RANK] * (self.tensor - 1)]
                if not _fits(_sum(stage), free):
                    break
                free = _less(free, _sum(stage))
                first = _RANK
                bundles += stage
                pinned += [node.id] * self.tensor
        return Group(tuple(bundles), "PACK", tuple(pinned)) if len(pinned) == self.degree else None

    def is_small(self, nodes: Sequence[Node]) -> bool:
        """Whether one host of the cluster can hold a replica, if nothing else runs there."""
        return any(_fits(self.bundle(self.degree), node.total) for node in nodes)

    def count(self, nodes: Sequence[Node], most: int | None = None) -> int:
        """How many replicas have room at once, at most `most`. Without GPUs one on each node counts."""
        if not self.has_gpus and most is None:
            return sum(_fits(self.bundle(1), node.free) for node in nodes)
        number = 0
        left: Sequence[Node] | None = nodes
        while left is not None and (most is None or number < most) and (group := self.group(left)) is not None:
            number += 1
            left = _after(left, group)
        return number


def as_empty(nodes: Sequence[Node]) -> list[Node]:
    """The nodes as if nothing ran on them."""
    return [replace(node, free=node.total) for node in nodes]


def shortage(demand: Demand, nodes: Sequence[Node]) -> str:
    """What a replica asks for, and what the nodes have, for people."""
    return f"each asks for {_asked(demand)}, and the cluster has {_show(nodes)}"


def num_replicas(spec: JobSpec, nodes: Sequence[Node], lost: Sequence[Node] = ()) -> int:
    """The replicas of a job. Raises SpecError if the cluster could never hold them, or has no room for one now.

    lost: nodes that were lost just now. Replicas for which only they have room wait for others.
    """
    demand = Demand.of(spec, [*nodes, *lost])
    data_parallel_size = spec.parallel.data_parallel_size
    if not demand.has_gpus and spec.scripted is None and demand.pipeline > 1:
        raise SpecError(
            f"parallel.pipeline_parallel_size: got {demand.pipeline}, but the cluster has no GPU, and on a processor "
            "vLLM runs no pipeline; use tensor_parallel_size"
        )
    empty = as_empty([*nodes, *lost])
    if data_parallel_size == "auto":
        if number := _auto_number(demand, nodes, empty):
            return number
    elif demand.count(empty, data_parallel_size) == data_parallel_size:
        return data_parallel_size
    number = 1 if data_parallel_size == "auto" else data_parallel_size
    raise SpecError(
        f"parallel: {number} replica(s) can never be placed: {shortage(demand, nodes)}; lower a degree or "
        "ray.resources, or add nodes"
    )


def _auto_number(demand: Demand, nodes: Sequence[Node], empty: Sequence[Node]) -> int:
    """The replicas that have room now; 0 if the cluster could never hold one. Raises SpecError if it only waits.

    empty: the nodes with those that were lost just now, as if nothing ran on them. If only a lost one could hold a
    replica, the number is 1.
    """
    if number := demand.count(nodes):
        return number
    if not demand.count(empty):
        return 0
    if not demand.count(as_empty(nodes)):
        return 1
    raise SpecError(
        "parallel.data_parallel_size: got auto, but the cluster has no room for a replica now: it asks for "
        f"{_asked(demand)}, and free are {_show(nodes, is_free=True)}; wait until other jobs end, or give "
        "a number to wait for room"
    )


def _asked(demand: Demand) -> str:
    degrees = f" (tensor_parallel_size {demand.tensor} x pipeline_parallel_size {demand.pipeline})"
    return _words(demand.bundle(demand.degree)) + (degrees if demand.has_gpus else "")


def _show(nodes: Sequence[Node], *, is_free: bool = False) -> str:
    shown = [f"{node.name}: {_words(node.free if is_free else node.total)}" for node in nodes[:_SHOWN_NODES]]
    more = [f"{len(nodes) - _SHOWN_NODES} more nodes"] if len(nodes) > _SHOWN_NODES else []
    return "; ".join([*shown, *more]) or "no node"


def _words(resources: Resources) -> str:
    named = {name: amount for name, amount in sorted(resources.items()) if not name.startswith(_NOT_SHOWN)}
    return ", ".join(f"{amount:g} {name}" for name, amount in named.items()) or "nothing"


def _fits(asked: Resources, free: Resources) -> bool:
    return all(free.get(name, 0.0) >= amount for name, amount in asked.items())


def _sum(bundles: Sequence[Resources]) -> dict[str, float]:
    names = dict.fromkeys(name for bundle in bundles for name in bundle)
    return {name: sum(bundle.get(name, 0.0) for bundle in bundles) for name in names}


def _less(free: Resources, taken: Resources) -> dict[str, float]:
    return {name: amount - taken.get(name, 0.0) for name, amount in free.items()}


def _after(nodes: Sequence[Node], group: Group) -> list[Node] | None:
    """The nodes after Ray has placed a group in the best way; None if a bundle has no place."""
    places: list[Any] = list(group.nodes or [None] * len(group.bundles))
    left = {node.id: node for node in nodes}
    for bundle, place in zip(group.bundles, places, strict=True):
        chosen = left[place] if place else next((node for node in left.values() if _fits(bundle, node.free)), None)
        if chosen is None:
            return None
        left[chosen.id] = replace(chosen, free=_less(chosen.free, bundle))
    return list(left.values())
