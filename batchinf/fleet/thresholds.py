"""The figures of `engine_defaults.py`, which chooses engine arguments: each with its reason and its measurement."""

from dataclasses import dataclass

from batchinf.model.memory import GIB

MEASUREMENT = 'benchmarks/history/vllm-0.26.md, "Settings where the spec is silent, and several replicas on a device"'
MEASURED_WITH = (0, 26)  # vLLM's version


@dataclass(frozen=True, slots=True)
class Thresholds:
    """For CUDA devices. `MEASUREMENT` names the measurements."""

    large_max_num_seqs: int = 1024
    """vLLM's own choice for offline jobs on a large device. The rules hold for such devices."""
    small_weight_bytes: int = 4 * GIB
    """With smaller weights, the engine's Python may limit the speed, not the GPU."""
    small_max_num_seqs: int = 2048
    """For a small model that generates: a large GPU is faster with a larger batch."""
    shared_utilization: float = 0.88
    """Share of a device's memory for all of its engines together. The rest is for CUDA contexts and graphs."""
    replicas_of_small: int = 2
    """For tasks that only read prompts, two engines make 1.18 times the tokens of one in scores, and 1.32 times in
    embeddings, if a step is not one CUDA graph. If it is, one engine keeps the GPU busy. For tasks that generate, one
    engine of a 1B model leaves its GPU idle for only 1.4 % of a decoding step."""
    cores_per_replica: int = 4
    """An engine's process and the replica's thread keep two cores busy, and tokenising needs more than one for small
    models."""
    least_input_bytes: int = 200 << 20
    """For a second engine on a device. It is up 16 s after the first, or 50 s without compiled kernels. It pays if the
    input keeps one engine busy for more than 2 minutes."""
    least_shared: float = 0.2
    """The prefix cache takes a fifth of an embedding job's speed, in Python. It pays if it saves that share of the
    prompts."""
    dense_graphs: int = 2048
    """From here on, a step that reads prompts has four sizes of graphs between a power of two and the next."""
    graph_steps: tuple[tuple[int, int], ...] = ((8, 64), (16, 128), (32, 512), (64, 1024), (128, 4096))
    """The distance between two batch sizes with a graph, up to a size. Padding costs more in small batches."""


THRESHOLDS = Thresholds()
