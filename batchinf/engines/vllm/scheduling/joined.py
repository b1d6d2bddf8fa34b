"""The results of all prompts of a step, sent to the front end as those of the first. There each request gets its own.

vLLM packs and unpacks one tensor for each vector, and three for the logprobs of each prompt. For steps of 128 scored
prompts, that took a third of the time of a thread in each of the two processes (`benchmarks/profile_job.py
small-score`), and all threads of a process share the interpreter lock.
"""

import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from vllm.v1.outputs import LogprobsTensors

from batchinf.base.text import one_line
from batchinf.engines.vllm.known_sources import allowed

_COST = "results of prompts are sent one by one"
# Numbers of all prompts of a step that are joined, which copies them. Rows of a whole vocabulary have more.
_MOST_NUMBERS = 1 << 22

# The schedulers of this process, by the id of their engine.
_schedulers: "weakref.WeakValueDictionary[str, Any]" = weakref.WeakValueDictionary()


class JoiningMixin:
    """In front of a scheduler: joins the results of a step after `start_joining`. Until then it changes nothing."""

    vllm_config: Any
    joins_results = False

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        _schedulers[self.vllm_config.instance_id] = self

    def update_from_output(self, *arguments: Any, **named: Any) -> dict[int, Any]:
        """See vLLM."""
        messages: dict[int, Any] = super().update_from_output(*arguments, **named)  # type: ignore[misc]
        for message in messages.values() if self.joins_results else ():
            join_scores(message.outputs)
            join_vectors(message.outputs)
        return messages


def start_joining(config: Any) -> bool:
    """Let an engine's scheduler join results. False if it is not in this process. The front end must call `split`.

    config: vLLM's, of the engine.
    """
    scheduler = _schedulers.get(config.instance_id)
    if scheduler is None or not allowed("join"):
        return False
    scheduler.joins_results = True
    return True


def is_right(longest: int, width: int) -> bool:
    """Whether random results are the same after they were joined, sent and split. Prints why not.

    longest: tokens of the longest prompt. width: logprobs of each of its positions.
    """
    try:
        from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
        from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

        for parts, join in _checked_results(min(longest, _MOST_NUMBERS // 4 // width), width):
            is_vector = join is join_vectors
            expected = [([], None, part) if is_vector else ([place], part, None) for place, part in enumerate(parts)]
            outputs = [
                EngineCoreOutput(str(place), token_ids, new_prompt_logprobs_tensors=scores, pooling_output=vector)
                for place, (token_ids, scores, vector) in enumerate(expected)
            ]
            join(outputs)
            encoded = MsgpackEncoder().encode(EngineCoreOutputs(outputs=outputs))
            decoded = MsgpackDecoder(EngineCoreOutputs).decode([bytearray(part) for part in encoded]).outputs
            for arrived in (decoded, outputs):
                split(arrived)
                found = [
                    (each.new_token_ids, each.new_prompt_logprobs_tensors, each.pooling_output) for each in arrived
                ]
                torch.testing.assert_close(found, expected, rtol=0, atol=0)
    except Exception as error:  # another version may fail in any way, and each result is sent alone then
        print(f"{_COST}: {one_line(f'{type(error).__name__}: {error}', 1000)}", flush=True)
        return False
    return True


def _checked_results(longest: int, width: int) -> Iterator[tuple[list[Any], Callable[[list[Any]], None]]]:
    """Results of the prompts of several steps, and what joins them. None is a prompt that is not finished."""

    def scores(num: int, width: int = width, dtype: torch.dtype = torch.float32) -> Any:
        ids = torch.randint(1 << 31, (num, width))
        return LogprobsTensors(ids.int(), torch.randn(num, width).to(dtype), torch.randint(1 << 31, (num,)))

    lengths = [place % 40 + 1 for place in range(100)]
    lengths[50] = longest
    several = [None if place % 7 == 3 else scores(length) for place, length in enumerate(lengths)]
    yield [None, *several], join_scores
    yield [scores(3), None, scores(5, dtype=torch.float16)], join_scores
    yield [scores(3), scores(4, width + 1)], join_scores
    yield [None, scores(2), None], join_scores
    vectors = [None if place % 7 == 3 else torch.randn(64) for place in range(100)]
    yield [None, *vectors], join_vectors
    yield [torch.randn(4), None, torch.randn(4).half()], join_vectors
    yield [torch.randn(5), torch.randn(4), torch.randn(0)], join_vectors


def join_scores(outputs: list[Any]) -> None:
    """Move the logprobs of all prompts to the first output that has some. outputs: EngineCoreOutput, of one message."""
    found = [(place, output.new_prompt_logprobs_tensors) for place, output in enumerate(outputs)
             if output.new_prompt_logprobs_tensors is not None]  # fmt: skip
    kinds = {(part.logprobs.shape[1], *(tensor.dtype for tensor in part[:3])) for _, part in found}
    is_plain = len(kinds) == 1 and all(part.cu_num_generated_tokens is None for _, part in found)
    if len(found) < 2 or not is_plain or sum(part.logprobs.numel() for _, part in found) > _MOST_NUMBERS:
        return
    # vLLM has no use for this field in logprobs of prompts. Here it has each output's place and number of rows.
    places = list(itertools.chain.from_iterable((place, len(part.logprobs)) for place, part in found))
    tensors = zip(*(part[:3] for _, part in found), strict=True)
    for place, _ in found:
        outputs[place].new_prompt_logprobs_tensors = None
    outputs[places[0]].new_prompt_logprobs_tensors = LogprobsTensors(*(torch.cat(each) for each in tensors), places)


def join_vectors(outputs: list[Any]) -> None:
    """Move the vectors of all prompts to the first output that has one. outputs: EngineCoreOutput, of one message."""
    places = [place for place, output in enumerate(outputs) if output.pooling_output is not None]
    vectors = [outputs[place].pooling_output for place in places]
    kinds = {(vector.shape, vector.dtype) for vector in vectors}
    is_plain = len(kinds) == 1 and vectors[0].dim() == 1 and not any(output.new_token_ids for output in outputs)
    if len(places) < 2 or not is_plain or len(vectors) * len(vectors[0]) > _MOST_NUMBERS:
        return
    for place in places:
        outputs[place].pooling_output = None
    first = outputs[places[0]]
    # A request for a vector has no tokens. Here the field has the places of the outputs that a vector is for.
    first.pooling_output, first.new_token_ids = torch.stack(vectors), places


def split(outputs: list[Any]) -> None:
    """Undo `join_scores` and `join_vectors`."""
    for output in outputs:
        scores, vectors = output.new_prompt_logprobs_tensors, output.pooling_output
        if scores is not None:
            _split_scores(outputs, scores)
            break
        if vectors is not None:
            places, output.new_token_ids = output.new_token_ids, []
            for place, vector in zip(places, vectors, strict=True) if places else ():
                outputs[place].pooling_output = vector
            break


def _split_scores(outputs: list[Any], scores: Any) -> None:
    if scores.cu_num_generated_tokens is None:
        return
    places, lengths = scores.cu_num_generated_tokens[::2], scores.cu_num_generated_tokens[1::2]
    tensors = zip(*(tensor.split(lengths) for tensor in scores[:3]), strict=True)
    for place, each in zip(places, tensors, strict=True):
        outputs[place].new_prompt_logprobs_tensors = LogprobsTensors(*each)


def splitting(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Replaces `OutputProcessor.process_outputs` of vLLM's front end."""

    def process_outputs(outputs: list[Any], *arguments: Any, **named: Any) -> Any:
        split(outputs)
        return theirs(outputs, *arguments, **named)

    return process_outputs
