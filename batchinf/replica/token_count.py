"""Counts the tokens of an engine, those of unfinished requests included."""

from collections.abc import Sequence

from batchinf.records import Completion, Request


class TokenCount:
    """Tokens that an engine has run and generated, while their requests are unfinished too.

    A finished request counts with the tokens that it has. Tokens of unfinished requests are estimated: a step gives a
    token to each running request, in a pipeline only to those of one stage. So at each step, each unfinished request
    counts the same share of a token: the share of the unfinished requests that run, divided by the number of stages.
    """

    def __init__(self, *, counts_output: bool, pipeline_parallel_size: int = 1) -> None:
        self._counts_output = counts_output
        self._num_stages = pipeline_parallel_size
        # The tokens of a request that began with the first step, now and when each request began.
        self._tokens_of_all = 0.0
        self._at_first: dict[tuple[int, int], float] = {}
        self._sum_at_first = 0.0
        self._num_prompt_tokens = self._num_finished_tokens = 0
        self.latest = (0, 0)  # prompt and output tokens; other threads read it

    def step(self, begun: Sequence[Request], finished: Sequence[Completion], num_running: int) -> None:
        """Count a step. begun: unfinished requests whose first token came. num_running: as the engine says."""
        for completion in finished:
            first = self._at_first.pop(completion.request.key, None)
            self._sum_at_first -= first or 0.0
            self._num_prompt_tokens += len(completion.request.prompt_token_ids) if first is None else 0
            self._num_finished_tokens += len(completion.token_ids)
        if self._at_first:
            self._tokens_of_all += min(1.0, num_running / len(self._at_first)) / self._num_stages
        for request in begun:
            self._num_prompt_tokens += len(request.prompt_token_ids)
            self._at_first[request.key] = self._tokens_of_all - 1
            self._sum_at_first += self._tokens_of_all - 1
        num_unfinished_tokens = round(len(self._at_first) * self._tokens_of_all - self._sum_at_first)
        num_output_tokens = self._num_finished_tokens + num_unfinished_tokens if self._counts_output else 0
        self.latest = self._num_prompt_tokens, num_output_tokens
