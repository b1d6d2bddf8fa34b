"""What is said of a job's output beside its counts: accuracy, numbers that are not finite, a second BOS."""

from collections.abc import Sequence

from batchinf import accuracy, non_finite, second_bos
from batchinf.accuracy import Accuracy
from batchinf.job_state import State
from batchinf.storage import Folder


def remarks(jobs: Sequence[tuple[Folder, State]]) -> list[str]:
    """For people, of what is committed of a job, or of all slices of one: each with its folder."""
    parts = [part for _, state in jobs for part in state.parts.values()]
    return [
        *accuracy.lines(_accuracy(jobs)),
        *non_finite.lines(sum(part.num_nan_rows for part in parts), sum(part.num_inf_rows for part in parts)),
        *second_bos.lines(sum(part.num_second_bos for part in parts)),
    ]


def _accuracy(jobs: Sequence[tuple[Folder, State]]) -> Accuracy | None:
    total = Accuracy()
    for folder, state in jobs:
        if state.header.spec.get("input", {}).get("answer_column") is None:
            return None
        if (found := accuracy.of_parts(folder, state.parts.values())) is None:
            return None
        total += found
    return total
