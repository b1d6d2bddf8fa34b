"""Tokens that a spec names, held against the model's vocabulary: texts become ids, and ids must be in it."""

from collections.abc import Sequence
from typing import Any

from batchinf.encoder import load_tokenizer
from batchinf.errors import SpecError
from batchinf.model import Model
from batchinf.spec import JobSpec
from batchinf.spec_logits import LogitsSpec

_MOST_SHOWN = 6


def with_vocabulary(spec: JobSpec, model: Model) -> JobSpec:
    """The spec with the ids of its tokens and the size of its vocabulary filled in. Raises SpecError, in one line."""
    _check_ids("sampling.logprob_token_ids", spec.sampling.logprob_token_ids, model)
    if spec.task != "logits":
        return spec
    logits = spec.logits or LogitsSpec()
    if logits.positions != "generated":  # a limit out of the model's generation_config: nothing is generated
        spec = spec.model_copy(update={"sampling": spec.sampling.model_copy(update={"max_tokens": None})})
    _check_ids("logits.token_ids", logits.token_ids, model)
    if not isinstance(logits.positions, str) and spec.input.on_overlong != "error":
        raise SpecError("input.on_overlong: positions of a prompt mean others once it is cut; leave it out")
    if logits.tokens:
        ids = _ids_of(logits.tokens, load_tokenizer(model.tokenizer, spec.model.trust_remote_code))
        if logits.token_ids and logits.token_ids != ids:
            raise SpecError(
                f"logits.token_ids: got {list(logits.token_ids)}, but logits.tokens are {list(ids)}; leave out one of "
                "them"
            )
        return spec.model_copy(update={"logits": logits.model_copy(update={"token_ids": ids})})
    if logits.token_ids:
        return spec.model_copy(update={"logits": logits})
    if model.vocab_size is None and logits.vocab_size is None:
        raise SpecError("logits.vocab_size: missing, and the model's config does not say it; give it")
    if None not in (model.vocab_size, logits.vocab_size) and model.vocab_size != logits.vocab_size:
        raise SpecError(f"logits.vocab_size: got {logits.vocab_size}; the model's is {model.vocab_size}: leave it out")
    size = logits.vocab_size or model.vocab_size
    return spec.model_copy(update={"logits": logits.model_copy(update={"vocab_size": size})})


def _ids_of(tokens: Sequence[str], tokenizer: Any) -> tuple[int, ...]:
    found = []
    for number, text in enumerate(tokens):
        ids = tokenizer.encode(text, add_special_tokens=False)
        if len(ids) != 1:
            shown = ", ".join(f"{tokenizer.decode([id])!r} ({id})" for id in ids[:_MOST_SHOWN])
            more = f" and {len(ids) - _MOST_SHOWN} more" if len(ids) > _MOST_SHOWN else ""
            raise SpecError(f"logits.tokens[{number}]: got {text!r}, which is {len(ids)} tokens: {shown}{more}; "
                            "must be one token, perhaps with a space before it")  # fmt: skip
        if ids[0] in found:
            raise SpecError(
                f"logits.tokens[{number}]: got {text!r}, which is the same token as another; name each once"
            )
        found.append(int(ids[0]))
    return tuple(found)


def _check_ids(field: str, ids: Sequence[int], model: Model) -> None:
    if model.vocab_size is not None and ids and max(ids) >= model.vocab_size:
        raise SpecError(f"{field}: got {max(ids)}; the model's vocabulary ends at {model.vocab_size - 1}")
