"""What logprobs cost between vLLM's engine core and its front end in a step, and what it costs to hold them back.

    python benchmarks/wire.py --requests 1024 --logprobs 20 --tokens 8000

Prints processor milliseconds a step, with vLLM's own wire format and arrays like those of its runner, and how much
memory the scheduler takes for outputs of `--tokens`. Needs no device.
"""

import argparse
import functools
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import psutil
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import LogprobsLists
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from batchinf.engines.vllm.logprobs import LogprobRows
from batchinf.engines.vllm.scheduling.scheduler import HoldingMixin

_REPEAT = 100
_FINISHED_TOKENS = 128


class _Requests:
    """The parts of vLLM's scheduler that are needed here."""

    def __init__(self) -> None:
        self.requests: dict[str, Any] = {}

    def add_request(self, request: Any) -> None:
        """Does nothing."""


class _Holding(HoldingMixin, _Requests):
    """Only our part of the scheduler."""


class _Request:
    def __init__(self, name: str, k: int) -> None:
        self.request_id = name
        kind = RequestOutputKind.FINAL_ONLY
        self.sampling_params = SamplingParams(logprobs=k, detokenize=False, output_kind=kind)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--requests", type=int, default=1024)
    parser.add_argument("--logprobs", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=8000)
    args = parser.parse_args()
    num, k = args.requests, args.logprobs
    names = [f"{row}-0-0123abcd" for row in range(num)]
    shape = (max(num, _FINISHED_TOKENS), k + 1)
    step = LogprobsLists(np.ones(shape, np.int64), np.ones(shape, np.float32), np.ones(shape[0], np.int64))
    bare = [EngineCoreOutput(name, [5]) for name in names]
    full = [EngineCoreOutput(name, [5], step.slice_request(row, 1)) for row, name in enumerate(names)]
    num_finished = max(1, num // _FINISHED_TOKENS)
    whole = [
        EngineCoreOutput(name, [5] * _FINISHED_TOKENS, step.slice_request(0, _FINISHED_TOKENS))
        for name in names[:num_finished]
    ]
    encoder, decoder = MsgpackEncoder(), MsgpackDecoder(EngineCoreOutputs)
    lines = ["| of a step | core | front end |", "| --- | ---: | ---: |"]
    for title, outputs in (
        ("a token of each request, no logprobs", bare),
        (f"a token of each request, top {k}", full),
        (f"{num_finished} whole outputs of {_FINISHED_TOKENS} tokens, top {k}", whole),
    ):
        message = EngineCoreOutputs(outputs=outputs)
        frames = [bytes(frame) for frame in encoder.encode(message)]
        packing = cpu_ms(functools.partial(encoder.encode, message))
        unpacking = cpu_ms(functools.partial(decoder.decode, frames))
        lines.append(f"| {title}: packing and unpacking | {packing:.2f} | {unpacking:.2f} |")
    lines.append(
        f"| slicing each request's rows | {cpu_ms(lambda: [step.slice_request(i, 1) for i in range(num)]):.2f} | |"
    )
    rows = [LogprobRows(k) for _ in names]

    def keep() -> None:
        for kept, output in zip(rows, full, strict=True):
            kept.extend(*output.new_logprobs[:3])

    lines.append(f"| keeping them token by token | | {cpu_ms(keep):.2f} |")
    holding = _Holding()
    for name in names:
        holding.add_request(_Request(name, k))
    index = {name: row for row, name in enumerate(names)}

    def hold() -> None:
        for output in bare:  # it is changed where it leaves
            output.new_token_ids = [5]
        holding._hold(bare, index, step, {store: ([], []) for store in holding._stores.values()})

    lines.append(f"| holding them back in the scheduler | {cpu_ms(hold):.2f} | |")
    print("\n".join(lines))
    process = psutil.Process()
    before = process.memory_info().rss
    for _ in range(args.tokens):
        hold()
    grown = (process.memory_info().rss - before) / 2**20
    unbounded = num * args.tokens * (8 * (k + 1) + 4) / 2**20
    print(f"\nheld for {num:,} outputs of {args.tokens:,} tokens: {grown:,.0f} MiB; all of them: {unbounded:,.0f} MiB")


def cpu_ms(work: Callable[[], Any]) -> float:
    """Mean processor milliseconds of one call."""
    work()
    began = time.process_time()
    for _ in range(_REPEAT):
        work()
    return (time.process_time() - began) / _REPEAT * 1e3


if __name__ == "__main__":
    main()
