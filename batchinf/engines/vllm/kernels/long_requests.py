"""Steps that only decode, in which one request has a large part of all tokens.

The kernel reads a request's tokens in one program, one after the other. FlashAttention reads a long request faster, and
keeps such a step. A step that only decodes runs as one CUDA graph, which has the kernel, as it was captured before the
lengths were known. Here such a step runs as vLLM runs steps with prompts: in a graph for each piece between two layers
of attention, and FlashAttention beside the graphs.

Written for the sources of vLLM 0.32.0 and 0.33.0.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from vllm.distributed.parallel_state import get_tp_group

# The kernel reads a request's tokens in 34 ns each for an 8B model on an H200, and all tokens of a batch in 1 ns each.
# FlashAttention needs 1.3 ns for each. With 8 heads of keys, a request with more than 1/26 of all tokens takes longer
# than FlashAttention takes for all; here the limit is 1/32. `benchmarks/long_requests.py` compares whole steps.
_PARTS_OF_LONGEST = 256
# What chooses the graph of a step in vLLM's V2 and V1 runners, and the arguments for a step that may also read prompts.
_CHOOSERS = ("cudagraph_manager", "cudagraph_dispatcher")
_OF_ANY_STEP = {"uniform_token_count": None, "max_query_len": None, "uniform_decode": False}


class GraphChoice:
    """Keeps steps with one very long request out of the CUDA graphs of decoding.

    pays: whether the kernel runs for so many requests that decode, with so many heads of keys. `has_long_request` is
    about the step that runs. `leaves_graphs`: whether all ranks choose another graph for such steps.
    """

    has_long_request = False
    leaves_graphs = False

    def __init__(self, num_key_heads: int, pays: Callable[[int, int], bool]) -> None:
        self._num_key_heads, self._pays = num_key_heads, pays

    def install(self, runner: Any) -> bool:
        """Change how vLLM's runner chooses the graph of a step. False if it chooses in a way that is not known."""
        known_parts = (getattr(runner, name, None) for name in _CHOOSERS)
        chooser: Any = next((part for part in known_parts if hasattr(part, "dispatch")), None)
        if chooser is None:
            return False
        known = inspect.signature(chooser.dispatch).parameters
        of_any_step = {name: value for name, value in _OF_ANY_STEP.items() if name in known}
        chooser.dispatch = self._choosing(chooser.dispatch, of_any_step)
        return bool(of_any_step)

    def look(self, scheduler_output: Any) -> None:
        """Read the lengths of the requests of a step that comes next."""
        lengths = scheduler_output.scheduled_cached_reqs.num_computed_tokens
        num = len(lengths)
        only_decodes = num == scheduler_output.total_num_scheduled_tokens == len(scheduler_output.num_scheduled_tokens)
        self.has_long_request = (
            only_decodes
            and self._pays(num, self._num_key_heads)
            and (max(lengths) + 1) * _PARTS_OF_LONGEST > (sum(lengths) + num) * self._num_key_heads
        )

    def _choosing(self, theirs: Callable[..., Any], of_any_step: Mapping[str, Any]) -> Callable[..., Any]:
        @functools.wraps(theirs)
        def dispatch(*arguments: Any, **named: Any) -> Any:
            if not (self.has_long_request and self.leaves_graphs):
                return theirs(*arguments, **named)
            given = inspect.signature(theirs).bind(*arguments, **named)
            given.arguments.update(of_any_step)
            return theirs(*given.args, **given.kwargs)

        return dispatch


def all_agree(is_so: bool) -> bool:
    """Whether it is so in all tensor parallel ranks. Each rank must call this.

    All ranks must run the same graph in a step. The all-reduce in a graph reads the buffers that the other ranks had
    when they captured that graph.
    """
    group = get_tp_group()
    if group.world_size == 1:
        return is_so
    answer = torch.tensor(is_so, dtype=torch.int32)
    torch.distributed.all_reduce(answer, torch.distributed.ReduceOp.MIN, group.cpu_group)
    return bool(answer)
