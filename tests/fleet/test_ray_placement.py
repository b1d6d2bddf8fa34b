"""What replicas ask of a Ray cluster, how many fit, and on which nodes their bundles go."""

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
    assert Demand.of(spec, nodes) == Demand(({"GPU": 2.0, "CPU": 3.0},), 2)
    # Of b's four, others hold three.
    assert num_replicas(spec, nodes) == 2
    # They may end: a number is refused only if it could never be placed.
    assert num_replicas(spec_of(tensor=2, data=4), nodes) == 4
    with pytest.raises(SpecError, match=r"5 replica\(s\) can never be placed: each asks for 2 CPU, 2 GPU, and"):
        num_replicas(spec_of(tensor=2, data=5), nodes)


def test_a_replica_over_several_hosts_has_a_bundle_for_each_gpu() -> None:
    nodes = [node(name, GPU=3, CPU=8, slot=1) for name in "abc"]
    demand = Demand.of(spec_of(tensor=2, pipeline=2, ray={"resources": {"slot": 1.0}}), nodes)
    first, other = {"GPU": 1.0, "CPU": 1.0, "slot": 1.0}, {"GPU": 1.0, "CPU": 1.0}
    assert demand == Demand((first, other, other, other), 4)
    assert str(demand) == "1 CPU, 1 GPU, 1 slot and 3 × (1 CPU, 1 GPU)"
    assert demand.count([each.total for each in nodes]) == 2
    assert demand.count([{**each.total, "slot": 0} for each in nodes]) == 0
    nodes = [node(name, GPU=2, CPU=8) for name in "ab"]
    assert num_replicas(spec_of(tensor=4), nodes) == 1
    with pytest.raises(SpecError, match=r"asks for 5 × \(1 CPU, 1 GPU\)"):
        num_replicas(spec_of(tensor=5), nodes)
    # Their GPUs are free and their processors are not.
    full = [Node(name, name, {"GPU": 2, "CPU": 8}, {"GPU": 2, "CPU": 0}) for name in "ab"]
    assert Demand.of(spec_of(tensor=4), full).count([each.free for each in full]) == 0
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
    with pytest.raises(SpecError, match=r"no room for a replica now: it asks for 1 CPU, 1 GPU; `ray status` shows"):
        num_replicas(spec_of(), nodes)


def test_shares_of_a_resource_fit_as_ray_counts_them() -> None:
    tenth = spec_of(data=10, ray={"resources": {"slot": 0.1}})
    assert num_replicas(tenth, [node("a", CPU=64, slot=1)]) == 10
    # 0.7 / 0.1 is 6.999999999999999.
    assert Demand.of(tenth, []).count([{"CPU": 64, "slot": 0.7}]) == 7


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
    degree = tensor * pipeline
    demand = Demand.of(spec_of(tensor, pipeline), nodes)
    count = demand.count([each.total for each in nodes])
    if not sum(sizes):  # on processors
        assert demand == Demand(({"CPU": 1.0},), 0)
    elif max(sizes) >= degree:
        assert count == sum(size // degree for size in sizes)
    else:
        assert count == sum(sizes) // degree
