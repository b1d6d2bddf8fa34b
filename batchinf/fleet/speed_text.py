"""The speed of a run as text for people. A separate module, because `status` needs nothing else of `speed`."""

from collections.abc import Iterator

from batchinf.base.text import short_count, time_taken
from batchinf.records import ExpectedSpeed, Speed

_NAMES = {
    "memory": "the cache",
    "sequences": "max_num_seqs",
    "input": "the input",
    "processor": "the engine's Python",
    "compute": "compute",
}


def speed_lines(speed: Speed) -> Iterator[str]:
    """The speed for people: measured, predicted, and what limited it."""
    tokens = tokens_text(speed.prompt_tokens_per_s, speed.output_tokens_per_s)
    each = "" if (rate := speed.tokens_per_s_per_gpu) is None else f", {short_count(rate)} tokens/s per GPU"
    took, work = time_taken(speed.run_s), time_taken(speed.work_s)
    yield f"this run took {took}, and its engines worked {work} of it: {tokens}/s{each}"
    if (expected := speed.expected) is not None:
        share = speed.tokens_per_s / max(1e-9, expected.prompt_tokens_per_s + expected.output_tokens_per_s)
        cache = "" if speed.cache_tokens is None else f", and {speed.cache_tokens:,} tokens of cache"
        yield f"{expected_line(expected)}; measured: {share:.2f} times the tokens/s{cache}"
    if (found := speed.bottleneck) is not None:
        yield f"limited by {_NAMES[found.kind]}: {found.reason}; to try: {found.change}"


def tokens_text(prompt: float, output: float) -> str:
    """Numbers of tokens, without output tokens if the task generates none."""
    return f"{short_count(prompt)} prompt {f'and {short_count(output)} output ' if output else ''}tokens"


def expected_line(expected: ExpectedSpeed) -> str:
    """The prediction for people."""
    return (
        f"predicted: {tokens_text(expected.prompt_tokens_per_s, expected.output_tokens_per_s)}/s, "
        f"{time_taken(expected.work_s)}, "
        f"{expected.cache_tokens:,} tokens of cache"
    )
