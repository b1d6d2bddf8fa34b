"""Results of an engine in the test's own process, held against transformers as `batchinf verify` does with a job's."""

import pathlib
from collections.abc import Sequence

import pyarrow as pa
import pyarrow.parquet as pq

from batchinf.commands.verify.claims import CLAIMS, RowsClaim
from batchinf.commands.verify.rows import StoredRow
from batchinf.commands.verify.tallies import RowsTally, count_rows_claim
from batchinf.model.identity import resolve
from batchinf.records import Prompt
from batchinf.spec.job import JobSpec
from batchinf.tasks.registry import task_of


def held(
    spec: JobSpec, results: pa.Table, prompts: Sequence[Prompt], folder: pathlib.Path, pooling_type: str = "LAST"
) -> dict[str, RowsTally]:
    """By column, how far the task's results are off, one for each of the prompts. spec: the resolved one."""
    from batchinf.commands.verify.reference import HeadReference, Reference, StatesReference

    path, model, task = folder / "part.parquet", resolve(spec.model), task_of(spec)
    pq.write_table(results, path)
    if spec.task in ("embed", "hidden_states"):
        reference: Reference = StatesReference(spec, model, (), "float32", "cpu", pooling_type)
    else:
        reference = (Reference if task.pooling is None else HeadReference)(spec, model, (), "float32", "cpu")
    claims = CLAIMS[spec.task]
    are_logits = spec.logits is not None and spec.logits.values == "logits"
    tallies: dict[str, RowsTally] = {}
    small = results.select([name for name in ("row_index", *claims.columns) if name in results.column_names])
    for place, (row, prompt) in enumerate(zip(small.to_pylist(), prompts, strict=True)):
        stored = StoredRow(row, claims.rows(spec), path, 0, place)
        for claim in claims.of(stored, prompt, task.expand(prompt, 512)):
            assert isinstance(claim, RowsClaim)
            tally = tallies.setdefault(claim.kind, RowsTally(is_vector=claim.is_vector))
            count_rows_claim(tally, claim, reference.rows(claim, None, are_logits))
    return tallies
