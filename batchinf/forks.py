"""When a process may be forked: not while another thread reads or tokenises.

vLLM forks its engine core out of a replica (0.26 to 0.33, unless `VLLM_WORKER_MULTIPROC_METHOD` says otherwise), while
the feeder is at work there. A lock that a library holds at that moment would be held for ever in the child, and the
tokenizers' threads, on which the child would wait, are not in it.
"""

import os
import threading

# Held by who must not be forked under; a fork waits for it.
UNFORKED = threading.RLock()


def guard_forks() -> None:
    """Let forks of this process wait for `UNFORKED`. To be called once."""
    os.register_at_fork(before=UNFORKED.acquire, after_in_parent=UNFORKED.release, after_in_child=_in_child)


def _in_child() -> None:
    UNFORKED.release()
    # Read at each call; "true" would have tokenizers wait for threads that are the parent's alone.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
