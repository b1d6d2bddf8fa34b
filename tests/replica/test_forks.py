"""Work of a replica waits until vLLM has forked."""

import os

import pytest

from batchinf.replica.incarnation import fork_event, num_forks_of_vllm


def fork() -> None:
    if (child := os.fork()) == 0:
        os._exit(0)
    os.waitpid(child, 0)


@pytest.mark.parametrize(("num_forks", "at_once", "after_one"), [(0, True, True), (1, False, True), (2, False, False)])
def test_threads_wait_for_the_forks(num_forks: int, at_once: bool, after_one: bool) -> None:
    has_forked = fork_event(num_forks)
    assert has_forked.is_set() == at_once
    fork()
    assert has_forked.is_set() == after_one


@pytest.mark.parametrize(
    ("in_process", "method", "of_one_device", "of_two_devices"),
    [(None, None, 1, 1), (None, "spawn", 0, 0), ("0", None, 0, 2), ("0", "fork", 0, 2), ("0", "spawn", 0, 0)],
)
def test_how_often_vllm_forks_a_replica(
    in_process: str | None,
    method: str | None,
    of_one_device: int,
    of_two_devices: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in (("VLLM_ENABLE_V1_MULTIPROCESSING", in_process), ("VLLM_WORKER_MULTIPROC_METHOD", method)):
        if value is None:
            monkeypatch.delenv(name, raising=False)  # vLLM sets it in tests that run it in here
        else:
            monkeypatch.setenv(name, value)
    assert (num_forks_of_vllm(1), num_forks_of_vllm(2)) == (of_one_device, of_two_devices)
