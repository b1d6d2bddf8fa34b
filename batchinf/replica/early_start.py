"""What may begin before the engine is up: by which limits requests are made, and when this process may be forked."""

import os
import threading
from collections.abc import Callable, Sized
from dataclasses import dataclass
from typing import ClassVar

from batchinf.spec.job import JobSpec

# What vLLM runs at once on devices of 70 GiB and more; on others it is 256.
_LIKELY_SEQS = 1024


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """max_num_seqs: a likely one where the spec names none; nothing that is stored depends on it."""

    max_model_len: int
    vocab_size: int
    max_num_seqs: int


def expected_limits(
    spec: JobSpec, max_model_len: int | None, vocab_size: int | None, tokenizer: Sized
) -> EngineLimits | None:
    """The limits of the engine that `spec` asks for; None where they cannot be told.

    max_model_len, vocab_size: as the model's config has them. The engine may have others all the same.
    """
    if spec.scripted is not None:
        return EngineLimits(spec.scripted.max_model_len, len(tokenizer), spec.scripted.max_num_seqs)
    given = spec.engine.get("max_model_len", max_model_len)
    if not isinstance(given, int) or given <= 0 or vocab_size is None:  # as where vLLM takes what fits its memory
        return None
    most = spec.engine.get("max_num_seqs")
    return EngineLimits(given, vocab_size, most if isinstance(most, int) and most > 0 else _LIKELY_SEQS)


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
