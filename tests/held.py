"""Compares results of an engine in the test's process with transformers, as `batchinf verify` does for a job."""

from collections.abc import Sequence

import pyarrow as pa

from batchinf.commands.reference import Reference
from batchinf.commands.verify import Deviations, expected_numbers, stored_numbers
from batchinf.model.model import resolve
from batchinf.records import Prompt
from batchinf.spec.job import JobSpec
from batchinf.tasks.registry import task_of


def held(spec: JobSpec, results: pa.Table, prompts: Sequence[Prompt], pooling_type: str = "") -> dict[str, Deviations]:
    """The deviations of a task's results by column. results: one for each prompt. spec: resolved."""
    task = task_of(spec)
    reference = Reference(task, resolve(spec.model), "cpu")
    found: dict[str, Deviations] = {}
    names = ("logits", "logprobs", "embedding", "positions", "token_ids", "value_token_ids")
    rows = results.select([name for name in names if name in results.column_names])
    for place, prompt in enumerate(prompts):
        for stored in stored_numbers(task, rows.slice(place, 1), prompt, task.expand(prompt, 512)):
            deviations = found.setdefault(stored.kind, Deviations())
            start = 0
            for expected in expected_numbers(task, reference, stored, pooling_type):
                deviations.add((prompt.row_index, 0), stored, expected, start)
                start += len(expected)
    return found
