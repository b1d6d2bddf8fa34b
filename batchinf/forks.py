"""When a process may be forked: before another thread reads or tokenises, or at least not while it does.

vLLM forks its engine core out of a replica (0.26 to 0.33), and where it runs the core in the replica itself, the
workers of several devices. A lock that a library holds at that moment would be held for ever in the child, and the
tokenizers' threads, on which the child would wait, are not in it.
"""

import os
import threading
from collections.abc import Callable
from typing import ClassVar

# Held by who must not be forked under; a fork waits for it.
UNFORKED = threading.RLock()


class _Forks:
    """What this process knows of its own forks; changed under `UNFORKED` alone."""

    is_guarded = False
    have_been = False  # since they are guarded
    waiting: ClassVar[list[Callable[[], object]]] = []


def guard_forks() -> None:
    """Let forks of this process wait for `UNFORKED`; nothing more where they do."""
    with UNFORKED:
        if not _Forks.is_guarded:
            _Forks.is_guarded = True
            os.register_at_fork(before=UNFORKED.acquire, after_in_parent=_in_parent, after_in_child=_in_child)


def forks_engine_core() -> bool:
    """Whether vLLM, in this process, is going to fork its engine core, as far as its variables say."""
    is_apart = os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING", "1") != "0"
    return is_apart and os.environ.get("VLLM_WORKER_MULTIPROC_METHOD", "fork") == "fork"


def after_first_fork(call: Callable[[], object]) -> None:
    """Call this once, in this process, when it has been forked for the first time since `guard_forks`: at once where
    that has happened.
    """
    with UNFORKED:
        if not _Forks.have_been:
            _Forks.waiting.append(call)
            return
    call()


def _in_parent() -> None:
    _Forks.have_been = True
    calls = [*_Forks.waiting]
    _Forks.waiting.clear()
    UNFORKED.release()
    for call in calls:
        call()


def _in_child() -> None:
    # The calls are the parent's affair, even if the child is forked in turn.
    _Forks.waiting.clear()
    UNFORKED.release()
    # Read at each call; "true" would have tokenizers wait for threads that are the parent's alone.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
