"""Bounds the lengths of outputs that can only be one of their choices (`structured_outputs.choice`)."""

from batchinf.job.job import Job
from batchinf.prompts.encoder import load_tokenizer
from batchinf.spec.sampling import SamplingSpec
from batchinf.tasks.base import Task


class ChoiceLengths:
    """The lengths of one job's choices."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._tokens: dict[tuple[str, ...], int] = {}
        self.are_all = job.task.draws_tokens
        """Whether all outputs so far were bounded."""

    def bound(self, sampling: SamplingSpec | None, output: int) -> int:
        """Of an output of at most so many tokens: the tokens of its longest choice and of the end, if that is less.

        sampling: the row's own; None: the job's.
        """
        structure = (sampling or self._job.spec.sampling).structured_outputs or {}
        choices = structure.get("choice")
        # A reasoning parser leaves the reasoning before the choice free.
        if not choices or not self._job.task.draws_tokens or self._job.spec.model.reasoning_parser is not None:
            self.are_all = False
            return output
        texts = tuple(choices)
        if texts not in self._tokens:
            model = self._job.model
            tokenizer = load_tokenizer(model.tokenizer, self._job.spec.model.trust_remote_code)
            self._tokens[texts] = 1 + max(len(tokenizer.encode(text, add_special_tokens=False)) for text in texts)
        return min(output, self._tokens[texts])


def task_of_length(job: Job, max_tokens: int) -> Task:
    """The job's task with outputs of at most so many tokens, for estimates of its size."""
    sampling = job.spec.sampling.model_copy(update={"max_tokens": max_tokens})
    return job.task.over(job.spec.model_copy(update={"sampling": sampling}))
