"""The checks of a run that take milliseconds and write nothing. `epoch` and `fresh` make them first."""

from dataclasses import replace

import pyarrow as pa

from batchinf.base.errors import SpecError
from batchinf.coordinator.retry import as_begun
from batchinf.engines.installed import is_cpu_build
from batchinf.fleet.parallel import check_processor
from batchinf.job.drift import check_drift
from batchinf.job.job import PreparedJob
from batchinf.job.open import location_of, over_rows, placing, prepare_job
from batchinf.manifest.state import State
from batchinf.model.content import Contents
from batchinf.schedule.predicate import Predicate, PredicateError
from batchinf.source.rows import first_rows
from batchinf.spec.file import SpecFile


def prepare_run(
    file: SpecFile, state: State | None, retry: str | None = None, *, extends: bool = False
) -> tuple[PreparedJob, Contents]:
    """Check spec, model, settings of the job in the folder, files, and first rows.

    Returns the job, and the model's local files as they are before an engine starts. state: of the job in the folder.
    retry: a predicate for the rows that run again. extends: take in new rows of the input. Raises UserError.
    """
    prepared = prepare_job(file, state, "take" if extends and state is not None else "refuse")
    contents = Contents(prepared.model, prepared.spec.model, prepared.adapters)
    if state is None:
        return _over_first_rows(prepared), contents
    differences = contents.differences(state.files)
    prepared = replace(prepared, retry=retry, has_rows=not state.committed.all())
    if retry is None:
        check_drift(prepared, state.header, files=differences)
        return prepared, contents
    if is_cpu_build():  # the launcher checks the sampling that the job began with
        with placing(file):
            check_processor(prepared.spec, prepared.spec.length_limit(prepared.model.max_model_len))
    return as_begun(prepared, state.header, differences), contents


def _over_first_rows(prepared: PreparedJob) -> PreparedJob:
    """The new job over an input whose first rows are those of its input."""
    where = prepared.file.spec.input.where
    with placing(prepared.file):
        rows = first_rows(location_of(prepared.file.spec))
    if rows is None:
        return prepared
    try:
        prepared = over_rows(prepared, rows)
        if where is not None:
            Predicate(where, pa.schema({name: pa.null() for row in rows for name in row}.items()), "input")
    except (SpecError, PredicateError):
        # Later rows may be other ones: the scan decides, and replicas wait for it.
        return replace(prepared, has_rows=False)
    return prepared
