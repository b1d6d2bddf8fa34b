"""The names of parts, published and staged, and which shard each is of."""

import re

_PART = re.compile(r"part-(\d{6,})\.parquet")
_STAGING = re.compile(r"(\d{6,})-[A-Za-z0-9._-]+\.parquet")


def part_name(shard: int) -> str:
    """The name in `parts/` of a shard's part."""
    return f"part-{shard:06d}.parquet"


def parse_part_name(name: str) -> int | None:
    """The shard of a name in `parts/`; None for a name that is not ours."""
    match = _PART.fullmatch(name)
    return int(match[1]) if match else None


def staging_name(shard: int, incarnation: str) -> str:
    """The name in `staging/` of a shard's part."""
    return f"{shard:06d}-{incarnation}.parquet"


def parse_staging_name(name: str) -> int | None:
    """The shard of a name in `staging/`; None for a name that is not ours."""
    match = _STAGING.fullmatch(name)
    return int(match[1]) if match else None
