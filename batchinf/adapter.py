"""A LoRA adapter, as far as all that handle one need to know it. `lora` finds it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter, found: the name that rows call it by, its folder, its rank, a fingerprint of its content.

    modules: the last names of the modules that it changes, such as `q_proj`; empty where its file does not tell.
    """

    name: str
    path: str
    rank: int
    fingerprint: str
    modules: tuple[str, ...] = ()
