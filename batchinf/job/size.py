"""How large a job's output will be, estimated before it begins, and refused where that is more than is allowed."""

import numpy as np

from batchinf.model.identity import Model
from batchinf.prompts.encoder import load_tokenizer
from batchinf.records import Prompt
from batchinf.source.rows import Source
from batchinf.tasks.base import Task

_NUM_SAMPLED = 256


def objection(task: Task, model: Model, source: Source, rows: range, num_rows: int) -> str | None:
    """The error if the output is estimated above `output.max_output_bytes`; else None.

    task: of the resolved spec. rows: the `num_rows` that are run are among them.
    """
    given, per_row = task.spec.output.max_output_bytes, task.num_rows_per_input * task.estimated_bytes_per_row()
    limit = task.default_max_output_bytes if given is None else given
    if limit is None:
        return None
    # An estimate without prompts is never off by more.
    if task.sizes_by_prompts and len(rows) and num_rows * per_row > limit // 64:
        per_row = task.estimated_bytes_per_row(_sample(task, model, source, rows))
    if num_rows * per_row <= limit:
        return None
    default = "" if given else ", which holds where the spec is silent"
    remedies = ", ".join(["take fewer rows (input.limit)", *task.size_remedies])
    estimate = f"{_in_units(num_rows * per_row)} ({_in_units(per_row)} each)"
    return (
        f"the output of {num_rows:,} rows is estimated at {estimate}, more than {_in_units(limit)}{default}; "
        f"{remedies}, or raise it to {_round_up(num_rows * per_row)}"
    )


def _sample(task: Task, model: Model, source: Source, rows: range) -> list[Prompt]:
    """Prompts without errors from all over the input."""
    places = np.unique(np.linspace(rows.start, rows.stop - 1, min(len(rows), _NUM_SAMPLED)).astype(np.int64))
    tokenizer = load_tokenizer(model.tokenizer, task.spec.model.trust_remote_code)
    builder = task.prompt_builder(tokenizer, model.vocab_size)
    prompts = builder.build(source.read_rows(places, builder.columns), model.max_model_len)
    return [prompt for prompt in prompts if prompt.error is None]


def _in_units(num_bytes: int) -> str:
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if num_bytes >= size:
            return f"{num_bytes / size:,.1f} {unit}"
    return f"{num_bytes} bytes"


def _round_up(num_bytes: int) -> int:
    digits = 10 ** max(0, len(str(num_bytes)) - 2)
    return int(-(-num_bytes // digits) * digits)
