"""The speed of a run as text for people. A separate module, because `status` needs nothing else of `speed`."""

from collections.abc import Iterator, Sequence

from batchinf.base.text import counted, short_count, time_taken
from batchinf.manifest.lines import ReplicaShare, Speed

_NAMES = {
    "memory": "the cache",
    "sequences": "max_num_seqs",
    "input": "the input",
    "images": "the images",
    "processor": "the engine's Python",
    "compute": "compute",
}


def speed_lines(speed: Speed) -> Iterator[str]:
    """The speed for people, and what limited it."""
    tokens = tokens_text(speed.prompt_tokens_per_s, speed.output_tokens_per_s)
    each = "" if (rate := speed.tokens_per_s_per_gpu) is None else f", {short_count(rate)} tokens/s per GPU"
    yield (
        f"this run took {time_taken(speed.run_s)}, and its engines worked {time_taken(speed.work_s)} of it: "
        f"{tokens}/s{each}"
    )
    yield from _share_lines(speed.replicas)
    if (bottleneck := speed.bottleneck) is not None:
        yield f"limited by {_NAMES[bottleneck.kind]}: {bottleneck.reason}; to try: {bottleneck.change}"


_MOST_NAMED = 8


def _share_lines(replicas: Sequence[ReplicaShare]) -> Iterator[str]:
    """How the replicas shared the rows, and a line if some had none."""
    if not replicas:
        return
    numbers = [replica.num_rows for replica in replicas]
    busy = [replica.busy for replica in replicas]
    rows = ", ".join(f"{number:,}" for number in numbers)
    if len(replicas) > _MOST_NAMED:
        rows = f"{min(numbers):,} to {max(numbers):,} for each of {len(replicas):,}"
    time = f"{min(busy):.0%}" if min(busy) == max(busy) else f"{min(busy):.0%} to {max(busy):.0%}"
    yield f"rows by replica: {rows}; each had requests for {time} of the time"
    if num_idle := numbers.count(0):
        yield f"{num_idle:,} of {len(replicas):,} replicas had no rows: {counted(sum(numbers), 'row')} ran in all"


def tokens_text(prompt: float, output: float) -> str:
    """Numbers of tokens, without output tokens if the task generates none."""
    return f"{short_count(prompt)} prompt {f'and {short_count(output)} output ' if output else ''}tokens"
