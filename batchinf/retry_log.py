"""What the manifest says of retries, and how the files of one are told from those of another.

A retry runs some rows of a finished job again and puts new parts in the place of old ones. `part.retry` is the last
retry that a part has been through, 0 for none; retries of a shard come in the order of their numbers.
"""

import re
from dataclasses import dataclass
from typing import Any

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
