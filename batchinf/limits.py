"""An engine's limits as far as they are known before it is up. Prompts are made by them meanwhile, and made anew where
the engine has others.
"""

from collections.abc import Sized
from dataclasses import dataclass

from batchinf.spec import JobSpec

# What vLLM runs at once on devices of 70 GiB and more; on others it is 256.
_LIKELY_SEQS = 1024


@dataclass(frozen=True, slots=True)
class Limits:
    """max_num_seqs: a likely one where the spec names none; nothing that is stored depends on it."""

    max_model_len: int
    vocab_size: int
    max_num_seqs: int


def expected_limits(
    spec: JobSpec, max_model_len: int | None, vocab_size: int | None, tokenizer: Sized
) -> Limits | None:
    """The limits of the engine that `spec` asks for; None where they cannot be told.

    max_model_len, vocab_size: as the model's config has them. The engine may have others all the same.
    """
    if spec.scripted is not None:
        return Limits(spec.scripted.max_model_len, len(tokenizer), spec.scripted.max_num_seqs)
    given = spec.engine.get("max_model_len", max_model_len)
    if not isinstance(given, int) or given <= 0 or vocab_size is None:  # as where vLLM takes what fits its memory
        return None
    most = spec.engine.get("max_num_seqs")
    return Limits(given, vocab_size, most if isinstance(most, int) and most > 0 else _LIKELY_SEQS)
