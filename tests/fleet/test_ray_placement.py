"""What replicas ask of a Ray cluster, how many fit, and on which nodes their bundles go."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchinf.base.errors import SpecError
from batchinf.fleet.ray.placement import Demand, Node, num_replicas
from batchinf.spec.job import JobSpec


def node(name: str, used: float = 0, **total: float) -> Node:
    """A node. used: GPUs of it that others hold."""
    return Node(name, name, total, {**total, "GPU": total.get("GPU", 0) - used})


def spec_of(tensor: int = 1, pipeline: int = 1, data: int | str = "auto", **sections: object) -> JobSpec:
    parallel = {"tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline, "data_parallel_size": data}
    base = {"model": {"name": "m"}, "input": {"path": "x"}, "output": {"path": "y"}}
    return JobSpec.model_validate({**base, "parallel": parallel, "backend": "ray", **sections})


def test_a_replica_that_one_host_holds_has_one_bundle() -> None:
    nodes = [node("a", GPU=4, CPU=8), node("b", used=3, GPU=4, CPU=8), node("head", CPU=2)]
    spec = spec_of(tensor=2, ray={"resources": {"CPU": 3}})
    group = Demand.of(spec, nodes).group(nodes)
    assert group is not None
    assert (group.bundles, group.strategy, group.nodes) == (({"GPU": 2.0, "CPU": 3.0},), "STRICT_PACK", None)
    assert not group.spans_hosts
    # Of b's four, others hold three.
    assert num_replicas(spec, nodes) == 2
    # They may end: a number is refused only if it could never be placed.
    assert num_replicas(spec_of(tensor=2, data=4), nodes) == 4
    with pytest.raises(SpecError, match=r"5 replica\(s\) can never be placed: each asks for 2 CPU, 2 GPU .* b: 8 CPU"):
        num_replicas(spec_of(tensor=2, data=5), nodes)


def test_a_replica_over_several_hosts_has_its_stages_within_hosts() -> None:
    nodes = [node(name, GPU=3, CPU=8, slot=1) for name in "abc"]
    demand = Demand.of(spec_of(tensor=2, pipeline=2, ray={"resources": {"slot": 1.0}}), nodes)
    group = demand.group(nodes)
    assert group is not None
    assert group.spans_hosts
    first, second = {"GPU": 1.0, "CPU": 1.0, "slot": 1.0}, {"GPU": 1.0, "CPU": 1.0}
    assert group.bundles == (first, second, first, second)
    assert (group.strategy, group.nodes) == ("PACK", ("a", "a", "b", "b"))
    assert demand.count(nodes) == 1  # one node has no partner


def test_tensor_parallelism_crosses_hosts_only_if_no_host_is_large_enough() -> None:
    nodes = [node(name, GPU=2, CPU=8) for name in "ab"]
    group = Demand.of(spec_of(tensor=4), nodes).group(nodes)
    assert group is not None
    assert (len(group.bundles), group.strategy, group.nodes) == (4, "PACK", None)
    with pytest.raises(SpecError, match="asks for 5 CPU, 5 GPU"):
        num_replicas(spec_of(tensor=5), nodes)
    # Their GPUs are free and their processors are not.
    full = [Node(name, name, {"GPU": 2, "CPU": 8}, {"GPU": 2, "CPU": 0}) for name in "ab"]
    assert Demand.of(spec_of(tensor=4), full).count(full) == 0
    with pytest.raises(SpecError, match="no room for a replica now"):
        num_replicas(spec_of(tensor=4), full)
    # All nodes are gone.
    assert num_replicas(spec_of(tensor=4), [], nodes) == 1


def test_without_gpus_each_node_with_a_processor_has_one_replica() -> None:
    nodes = [node("a", CPU=64), node("b", CPU=2), node("head")]
    assert num_replicas(spec_of(), nodes) == 2
    assert num_replicas(spec_of(data=66), nodes) == 66
    with pytest.raises(SpecError, match="vLLM runs no pipeline"):
        num_replicas(spec_of(pipeline=2), nodes)
    # A scripted engine takes no GPU.
    gpus = [node("a", GPU=8, CPU=8)]
    assert num_replicas(spec_of(tensor=8, scripted={}), gpus) == 1


def test_auto_in_a_cluster_that_is_full_now() -> None:
    nodes = [node("a", used=8, GPU=8, CPU=8)]
    with pytest.raises(SpecError, match=r"no room for a replica now: it asks for 1 CPU, 1 GPU .* a: 8 CPU, 0 GPU"):
        num_replicas(spec_of(), nodes)


def test_nodes_that_were_lost_just_now_are_waited_for() -> None:
    left, lost = [node("a", GPU=4, CPU=8)], [node("b", GPU=4, CPU=8)]
    assert num_replicas(spec_of(tensor=4, data=2), left, lost) == 2
    assert num_replicas(spec_of(tensor=4), left, lost) == 1
    # Only both nodes together hold it.
    assert num_replicas(spec_of(tensor=4, pipeline=2), left, lost) == 1
    with pytest.raises(SpecError, match=r"3 replica\(s\) can never be placed"):
        num_replicas(spec_of(tensor=4, data=3), left, lost)


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=6),
    st.integers(1, 4),
    st.integers(1, 4),
)
def test_replicas_never_ask_for_more_than_there_is(sizes: list[int], tensor: int, pipeline: int) -> None:
    nodes = [node(f"n{at}", GPU=size, CPU=100) for at, size in enumerate(sizes)]
    demand = Demand(True, tensor, pipeline, {})
    count = demand.count(nodes)
    assert count * demand.degree <= sum(sizes)
    if max(sizes) >= demand.degree:
        # Each host by itself; what is left of several hosts may hold more.
        assert count >= sum(size // demand.degree for size in sizes)
    elif max(sizes) >= tensor:
        assert count == math.floor(sum(size // tensor for size in sizes) / pipeline)
