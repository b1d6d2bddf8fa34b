"""The names of parts, staged parts and incarnations, as the manifest uses them."""

import re

_PART_NAME = re.compile(r"part-(\d{6,})\.parquet")
_STAGING = re.compile(r"(\d{6,})-[A-Za-z0-9._-]+\.parquet")


def part_name(shard: int) -> str:
    """The name in `parts/` of a shard's part."""
    return f"part-{shard:06d}.parquet"


def parse_part_name(name: str) -> int | None:
    """The shard of a name in `parts/`; None for a name that is not ours."""
    match = _PART_NAME.fullmatch(name)
    return int(match[1]) if match else None


def staging_name(shard: int, incarnation: str) -> str:
    """The name in `staging/` of a shard's part."""
    return f"{shard:06d}-{incarnation}.parquet"


def parse_staging_name(name: str) -> int | None:
    """The shard of a name in `staging/`; None for a name that is not ours."""
    match = _STAGING.fullmatch(name)
    return int(match[1]) if match else None


_INCARNATION = re.compile(r"\d+\.r(\d+)\.\d+")


def incarnation_name(epoch: int, number: int, retry: int) -> str:
    """The name of a replica's incarnation. Its segments and staged parts have it too, so each retry has its own."""
    return f"{epoch:06d}.r{retry:06d}.{number:04d}" if retry else f"{epoch:06d}.{number:04d}"


def retry_of(incarnation: str) -> int:
    """The retry that an incarnation works for; 0 for the job's first run."""
    match = _INCARNATION.fullmatch(incarnation)
    return int(match[1]) if match else 0
