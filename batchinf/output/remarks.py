"""Remarks on the committed rows of a job, which follow from their counts. Commands show them."""

from collections.abc import Mapping, Sequence
from typing import Any

from batchinf.manifest.state import State
from batchinf.prompts import encoder
from batchinf.records import PartCounts
from batchinf.tasks.registry import stored_task

INVENTED = "the answers are invented: the spec has `scripted`, so no model ran"


def rules_out_tokens(spec: Mapping[str, Any]) -> bool:
    """Whether tokens may have probability 0, because a structure or the sampling rules them out. spec: as stored."""
    sampling = spec.get("sampling") or {}
    is_processed = str(sampling.get("logprobs_mode")).startswith("processed")
    has_structures = any(name.startswith("structured_outputs") for name in sampling.get("columns") or ())
    return is_processed or has_structures or sampling.get("structured_outputs") is not None


def non_finite_lines(num_nan_rows: int, num_inf_rows: int, *, expects_inf: bool) -> list[str]:
    """Remarks on numbers that are not finite, if any. expects_inf: see `rules_out_tokens`."""
    lines = []
    if num_nan_rows:
        lines.append(
            f"warning: {num_nan_rows:,} output rows have NaN among the model's numbers, because its arithmetic failed "
            "there; they are stored unchanged"
        )
    if num_inf_rows and expects_inf:
        lines.append(
            f"{num_inf_rows:,} output rows have tokens with logprob -inf: the structure or the sampling of the job "
            "rules these tokens out, so nothing is wrong"
        )
    elif num_inf_rows:
        lines.append(
            f"{num_inf_rows:,} output rows have infinite numbers from the model, such as the logprob of a token that "
            "the model rules out; they are stored unchanged"
        )
    return lines


def remarks(states: Sequence[State]) -> list[str]:
    """Remarks on the committed rows of a job, or of all its slices, for people to read."""
    counts = PartCounts.sum(state.counts for state in states)
    specs = [state.header.spec for state in states]
    return [
        *([INVENTED] if specs[0].get("scripted") is not None else []),
        *stored_task(specs[0]).count_lines(counts.num_rows, counts.task_counts or {}),
        *non_finite_lines(
            counts.num_nan_rows,
            counts.num_inf_rows,
            expects_inf=any(rules_out_tokens(spec) for spec in specs),
        ),
        *encoder.second_bos_lines(counts.num_second_bos),
    ]
