"""How often vLLM's scheduler computes rows again where the cache limits a job, with and without its `watermark`.

    VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 python benchmarks/preempted.py

All rows wait at the start, as in a job. The tokens are made up, so there is no model, no device and no time: the script
counts steps, preempted requests and tokens. The cache has an eighth of the tokens that an 8B model's has on an H200.
"""

import argparse
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from scheduler_steps import arguments, request
from vllm.v1.outputs import ModelRunnerOutput

from batchinf.engines.vllm.scheduling.scheduler import scheduler

_BLOCKS = 6800  # of 16 tokens
_STEP_TOKENS = 16_384
_MOST_SEQS = 1024


@dataclass(frozen=True, slots=True)
class Lengths:
    """Rows of a job. outputs: draws the tokens of an output, of which there are at most `most`."""

    name: str
    num_rows: int
    prompt_tokens: int
    most: int
    outputs: Callable[[random.Random], float]

    def draw(self) -> tuple[list[int], list[int]]:
        """The tokens of prompts and of outputs."""
        chance = random.Random(1)
        outputs = [max(1, min(self.most, int(self.outputs(chance)))) for _ in range(self.num_rows)]
        return [max(8, int(self.prompt_tokens * chance.lognormvariate(0, 0.3))) for _ in outputs], outputs


JOBS = [
    Lengths("1,024 in, about 600 out", 500, 1024, 2048, lambda chance: chance.lognormvariate(6.2, 0.8)),
    Lengths("200 in, about 1,800 out", 250, 200, 8192, lambda chance: chance.lognormvariate(7.2, 0.8)),
    Lengths("1,024 in, 2,048 out", 200, 1024, 2048, lambda chance: 2048),
    Lengths("4,000 in, about 300 out", 200, 4000, 1024, lambda chance: chance.lognormvariate(5.5, 0.6)),
]


def drive(watermark: float, prompts: Sequence[int], outputs: Sequence[int]) -> str:
    """Run all rows. Returns cells of the table."""
    made_of = arguments(_BLOCKS, _MOST_SEQS, True, False, max(prompts) + max(outputs) + 16)
    made_of["vllm_config"].scheduler_config.max_num_batched_tokens = _STEP_TOKENS
    made_of["vllm_config"].scheduler_config.watermark = watermark
    made = scheduler(**made_of)
    for row, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        made.add_request(request(f"row {row}", [1] * prompt, False, max_tokens=output, ignore_eos=True))
    num_tokens = num_preempted = num_running = num_steps = 0
    flying: deque[tuple[Any, set[str]]] = deque()
    while made.requests:
        step = made.schedule()
        num_tokens += step.total_num_scheduled_tokens
        num_preempted += len(step.preempted_req_ids or ())
        num_running += len(step.num_scheduled_tokens)
        num_steps += bool(step.num_scheduled_tokens)
        flying.append((step, {name for name in step.num_scheduled_tokens if not made.requests[name].is_prefill_chunk}))
        if len(flying) == 2:
            step, ready = flying.popleft()
            names = list(step.num_scheduled_tokens)
            tokens = [[5] if name in ready else [] for name in names]
            places = {name: place for place, name in enumerate(names)}
            given = ModelRunnerOutput(req_ids=names, req_id_to_index=places, sampled_token_ids=tokens)
            made.update_from_output(step, given)
    again = (num_tokens - sum(prompts) - sum(outputs)) / sum(outputs)
    return f"{num_preempted:,} | {max(0.0, again):.2f} | {num_running / num_steps:.1f} | {num_steps:,}"


def main() -> None:
    argparse.ArgumentParser(description=__doc__.split("\n")[0]).parse_args()
    print("| job | watermark | preempted | computed again, of the outputs | rows in a step | steps |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for job in JOBS:
        for watermark in (0.0, 0.02, 0.05, 0.1):
            print(f"| {job.name} | {watermark} | {drive(watermark, *job.draw())} |", flush=True)


if __name__ == "__main__":
    main()
