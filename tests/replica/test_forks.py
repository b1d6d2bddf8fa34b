"""Work of a replica waits until vLLM has forked."""

import os

import pytest

from batchinf.replica.incarnation import FirstFork, forks_workers


def fork() -> None:
    if (child := os.fork()) == 0:
        os._exit(0)
    os.waitpid(child, 0)


@pytest.mark.parametrize(
    ("options", "at_once", "after_one"),
    [
        ({"is_expected": False}, True, True),
        ({"is_expected": True}, False, True),
        ({"is_expected": False, "are_several": True}, False, False),
    ],
)
def test_a_call_waits_for_the_forks(options: dict[str, bool], at_once: bool, after_one: bool) -> None:
    ran: list[int] = []
    forks = FirstFork(**options)
    forks.after(lambda: ran.append(1))
    assert bool(ran) == at_once
    fork()
    assert bool(ran) == after_one
    forks.release()
    assert ran == [1]


def test_workers_are_forked_here_only_if_the_core_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.delenv("VLLM_WORKER_MULTIPROC_METHOD", raising=False)  # vLLM sets it in tests that run it in here
    assert forks_workers(2)
    assert not forks_workers(1)
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    assert not forks_workers(2)
    monkeypatch.delenv("VLLM_WORKER_MULTIPROC_METHOD")
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    assert not forks_workers(2)
