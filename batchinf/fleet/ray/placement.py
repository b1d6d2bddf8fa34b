"""What a replica asks of a Ray cluster, and how many replicas fit. Pure functions; Ray chooses the nodes.

A replica that one host can hold asks for one bundle with all its GPUs, because a Ray actor gets the devices of one
bundle only. A replica over several hosts asks for one bundle for each GPU, as vLLM's Ray executor wants it. vLLM sorts
the bundles by node, so tensor parallelism stays within hosts whose GPUs are a multiple of `tensor_parallel_size`.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from batchinf.base.errors import SpecError
from batchinf.spec.job import JobSpec

GPU = "GPU"
CPU = "CPU"
Resources = Mapping[str, float]
_RANK: Resources = {GPU: 1.0, CPU: 1.0}  # what each device of a replica over several hosts asks for


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
class Demand:
    """What each replica of a job asks for."""

    bundles: tuple[dict[str, float], ...]
    """More than one if no host can hold the replica."""
    num_devices: int
    """GPUs; 0 for an engine on processors."""

    @classmethod
    def of(cls, spec: JobSpec, nodes: Sequence[Node]) -> "Demand":
        """The demand of a job in this cluster."""
        others = spec.ray.resources
        if not has_gpus(spec, nodes):
            return cls((_bundle({CPU: 1}, others),), 0)
        degree = math.prod(spec.parallel.sizes)
        whole = _bundle({GPU: degree, CPU: degree}, others)
        if degree == 1 or any(_num_fitting(whole, node.total) for node in nodes):
            return cls((whole,), degree)
        return cls((_bundle(_RANK, others), *[_bundle(_RANK, {})] * (degree - 1)), degree)

    def count(self, nodes: Sequence[Resources]) -> int:
        """How many replicas have room at once. nodes: the resources of each."""
        number = sum(_num_fitting(self.bundles[0], node) for node in nodes)
        num_ranks = sum(_num_fitting(self.bundles[-1], node) for node in nodes)
        return min(number, num_ranks // len(self.bundles))

    def __str__(self) -> str:
        """For people."""
        counts = Counter(_text(bundle) for bundle in self.bundles)
        return " and ".join(text if number == 1 else f"{number} × ({text})" for text, number in counts.items())


def _text(bundle: Resources) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in sorted(bundle.items()))


def has_gpus(spec: JobSpec, nodes: Sequence[Node]) -> bool:
    """Whether the engines of a job run on GPUs in this cluster."""
    return spec.scripted is None and any(node.total.get(GPU) for node in nodes)


def _bundle(devices: Resources, others: Resources) -> dict[str, float]:
    return {name: float(amount) for name, amount in {**devices, **others}.items() if amount}


def _num_fitting(bundle: Resources, node: Resources) -> int:
    """How many of these bundles a node can hold. Ray counts in steps of 0.0001."""
    return min((int(node.get(name, 0.0) / amount + 1e-6) for name, amount in bundle.items()), default=0)


def num_replicas(spec: JobSpec, nodes: Sequence[Node], lost: Sequence[Node] = ()) -> int:
    """The replicas of a job. Raises SpecError if the cluster could never hold them, or has no room for one now.

    lost: nodes that were lost just now. Replicas for which only they have room wait for others.
    """
    demand = Demand.of(spec, [*nodes, *lost])
    if not demand.num_devices and spec.scripted is None and spec.parallel.sizes[1] > 1:
        raise SpecError(
            f"parallel.pipeline_parallel_size: got {spec.parallel.sizes[1]}, but the cluster has no GPU, and on a "
            "processor vLLM runs no pipeline; use tensor_parallel_size"
        )
    most = demand.count([node.total for node in [*nodes, *lost]])
    number = spec.parallel.data_parallel_size
    if number == "auto":
        free = [node.free for node in nodes]
        # An engine on processors uses all cores of its replica: one on each node.
        number = demand.count(free) if demand.num_devices else sum(demand.count([each]) > 0 for each in free)
        if not number and demand.count([node.total for node in nodes]):
            raise SpecError(
                "parallel.data_parallel_size: got auto, but the cluster has no room for a replica now: it asks for "
                f"{demand}; `ray status` shows what is free. Start the job again when other jobs have ended, or give "
                "the number of replicas: the job then waits for room"
            )
        number = number or 1
    if number > most:
        raise SpecError(
            f"parallel: {number} replica(s) can never be placed: each asks for {demand}, and `ray status` shows what "
            "the nodes have; lower a degree or ray.resources, or add nodes"
        )
    return number
