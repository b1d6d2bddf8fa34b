"""Names of part files and of incarnations, and the record of a retry, which decides whose files are whose."""

import re
from dataclasses import dataclass
from typing import Any

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


_INCARNATION = re.compile(r"\d+\.r(\d+)\.\d+")


@dataclass(frozen=True, slots=True)
class Retry:
    """A retry that has begun.

    overrides: the sampling fields that are other than the job's, by dotted name, JSON values; fingerprint: of these.
    num_rows, num_shards: input rows that were chosen, and shards that hold them. selection: digest of the file that
    says which.
    """

    number: int
    predicate: str
    overrides: dict[str, Any]
    fingerprint: str
    num_rows: int
    num_shards: int
    selection: str

    def __str__(self) -> str:
        changes = "".join(f", {name} {value}" for name, value in self.overrides.items())
        return f"retry {self.number} ({self.predicate}{changes})"


def incarnation_name(epoch: int, number: int, retry: int) -> str:
    """The name of a replica's incarnation, and so of its segments and staged parts."""
    return f"{epoch:06d}.r{retry:06d}.{number:04d}" if retry else f"{epoch:06d}.{number:04d}"


def retry_of(incarnation: str) -> int:
    """The retry that an incarnation works for; 0 for the job's first run."""
    match = _INCARNATION.fullmatch(incarnation)
    return int(match[1]) if match else 0
