"""The seed of a request, which tasks that draw tokens give it."""

import hashlib


def seed_of(job_seed: int, row_index: int, request_index: int) -> int:
    """A request's own seed, in [0, 2**63).

    With 31 bits, one row of 1,000 samples in 4,300 would have two equal seeds. A seed is not negative, because vLLM
    takes -1 for no seed. vLLM stores seeds as int64; CUDA generators use all bits, CPU generators the low 32.
    """
    digest = hashlib.blake2b(f"{job_seed},{row_index},{request_index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
