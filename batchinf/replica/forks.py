"""Lets the work of a replica wait until vLLM has forked its engine core from the replica's process.

A fork copies the locks that other threads hold, and the child waits for them forever. So nothing but the start of the
engine runs before the fork.
"""

import os
from collections import deque
from collections.abc import Callable


def forks_engine_core() -> bool:
    """Whether vLLM will fork its engine core from this process, by its environment variables."""
    is_apart = os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING", "1") != "0"
    return is_apart and os.environ.get("VLLM_WORKER_MULTIPROC_METHOD", "fork") == "fork"


def forks_workers(num_devices: int) -> bool:
    """Whether vLLM will fork its workers, one after the other, from this process, which has the engine core in it."""
    is_inside = os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING", "1") == "0"
    return is_inside and num_devices > 1 and os.environ.get("VLLM_WORKER_MULTIPROC_METHOD", "fork") == "fork"


class FirstFork:
    """Calls that wait for the first fork of this process, or for `release` where several forks are to come."""

    def __init__(self, *, is_expected: bool, are_several: bool = False) -> None:
        """is_expected: one fork is to come. are_several: more than one. If none is to come, calls do not wait."""
        self._is_over = not (is_expected or are_several)
        self._waiting: deque[Callable[[], object]] = deque()
        if are_several:
            os.register_at_fork(after_in_child=self._forget)
        elif is_expected:
            os.register_at_fork(after_in_parent=self.release, after_in_child=self._forget)

    def after(self, call: Callable[[], object]) -> None:
        """Run `call` once there has been a fork; at once if that has happened. Called from any thread."""
        self._waiting.append(call)
        if self._is_over:
            self.release()

    def release(self) -> None:
        """Wait no longer: there has been a fork, or none comes."""
        self._is_over = True
        while True:
            try:
                call = self._waiting.popleft()
            except IndexError:  # another thread may have taken the last one
                return
            call()

    def _forget(self) -> None:
        # The calls belong to the parent, even if the child is forked in turn.
        self._waiting.clear()
        # Tokenizers read it at each call. With "true" they would wait for threads that only the parent has.
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
