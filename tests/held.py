"""Compares results of an engine in the test's process with transformers, as `batchinf verify` does for a job."""

import pathlib
from collections.abc import Sequence

import pyarrow as pa
import pyarrow.parquet as pq

from batchinf.model.identity import resolve
from batchinf.records import Prompt
from batchinf.spec.job import JobSpec
from batchinf.tasks.deviations import VectorDeviations
from batchinf.tasks.registry import task_of
from batchinf.tasks.verification import ReferenceWanted, StoredRow, StoredVectors


def held(
    spec: JobSpec, results: pa.Table, prompts: Sequence[Prompt], folder: pathlib.Path, pooling_type: str = "LAST"
) -> dict[str, VectorDeviations]:
    """The deviations of a task's results by column. results: one for each prompt. spec: resolved."""
    path, task = folder / "part.parquet", task_of(spec)
    pq.write_table(results, path)
    assert task.verification is not None
    verification = task.verification(spec)
    wanted = ReferenceWanted(
        model=resolve(spec.model),
        adapters=(),
        dtype="float32",
        device="cpu",
        are_logits=task.logprobs_mode == "raw_logits",
        pooling_type=pooling_type,
    )
    reference = verification.reference(wanted)
    found: dict[str, VectorDeviations] = {}
    small = results.select([name for name in ("row_index", *verification.columns) if name in results.column_names])
    for place, (row, prompt) in enumerate(zip(small.to_pylist(), prompts, strict=True)):
        row_of = StoredRow(values=row, columns=verification.vector_columns, part=path, group=0, place=place)
        for stored in verification.stored(row_of, prompt, task.expand(prompt, 512)):
            assert isinstance(stored, StoredVectors)
            deviations = found.setdefault(stored.kind, VectorDeviations(has_direction=stored.has_direction))
            deviations.add(stored, reference.vectors(stored, None))
    return found
