"""How large a job's output will be, estimated before it begins, and refused where that is more than is allowed."""

import numpy as np

from batchinf.model.identity import Model
from batchinf.prompts.builder import PromptBuilder
from batchinf.prompts.encoder import load_tokenizer
from batchinf.source.rows import Source
from batchinf.spec.job import JobSpec

# What an output of logits may have where nothing is said: a full disk is a late answer, and a terabyte a clear one.
MOST_LOGITS_BYTES = 10**12
# A guess at a text's length, and at a prompt's, where nothing says more.
LIKELY_TOKENS = 256
_LIKELY_POSITIONS = 4
_NUM_SAMPLED = 256


def bytes_per_row(spec: JobSpec, num_positions: float | None = None) -> int:
    """A row's size in a part of task logits. num_positions: on the average, where it is known."""
    logits = spec.logits
    assert logits is not None
    if num_positions is None:
        num_positions = {
            "last": 1,
            "all": LIKELY_TOKENS,
            "generated": spec.sampling.max_tokens or LIKELY_TOKENS,
        }.get(logits.positions if isinstance(logits.positions, str) else "", _LIKELY_POSITIONS)
    return 100 + int(num_positions * (4 + logits.width * logits.item_bytes))


def objection(spec: JobSpec, model: Model, source: Source, rows: range, num_rows: int, per_row: int) -> str | None:
    """What to say where the output is estimated above `output.max_output_bytes`; None where it is not.

    rows: among which the `num_rows` that are run are. per_row: the estimate of a row for other tasks than logits, whose
    positions are counted here, in some prompts, where it matters.
    """
    limit = spec.output.max_output_bytes
    if spec.task == "logits":
        limit = MOST_LOGITS_BYTES if limit is None else limit
        if num_rows * per_row > limit // 64:  # else no estimate is so far off
            per_row = bytes_per_row(spec, _positions_per_row(spec, model, source, rows))
    if limit is None or num_rows * per_row <= limit:
        return None
    given = "" if spec.output.max_output_bytes else ", which holds where the spec is silent"
    return (
        f"the output of {num_rows:,} rows is estimated at {_shown(num_rows * per_row)} ({_shown(per_row)} each), more "
        f"than {_shown(limit)}{given}; {_remedy(spec)}raise it to {_round_up(num_rows * per_row)}"
    )


def _remedy(spec: JobSpec) -> str:
    if spec.logits is None:
        return "take fewer rows (input.limit), store less of each, or "
    fewer = "" if spec.logits.positions == "last" else "fewer positions (logits.positions), "
    chosen = "only some tokens (logits.tokens), " if spec.logits.is_full else ""
    half = "" if spec.logits.dtype == "float16" else "float16 (logits.dtype), "
    return f"take fewer rows (input.limit), {chosen}{fewer}{half}or "


def _positions_per_row(spec: JobSpec, model: Model, source: Source, rows: range) -> float | None:
    """Of a prompt, on the average of some rows all over the input; None where the spec says it all."""
    logits = spec.logits
    assert logits is not None
    if logits.positions in ("last", "generated") or not len(rows):
        return None
    places = np.unique(np.linspace(rows.start, rows.stop - 1, min(len(rows), _NUM_SAMPLED)).astype(np.int64))
    tokenizer = load_tokenizer(model.tokenizer, spec.model.trust_remote_code)
    builder = PromptBuilder(spec, tokenizer, model.vocab_size)
    prompts = builder.build(source.read_rows(places, builder.columns), model.max_model_len)
    counts = [len(p.token_ids) if p.positions is None else len(p.positions) for p in prompts if p.error is None]
    return float(np.mean(counts)) if counts else 0.0


def _shown(num_bytes: int) -> str:
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if num_bytes >= size:
            return f"{num_bytes / size:,.1f} {unit}"
    return f"{num_bytes} bytes"


def _round_up(num_bytes: int) -> int:
    digits = 10 ** max(0, len(str(num_bytes)) - 2)
    return int(-(-num_bytes // digits) * digits)
