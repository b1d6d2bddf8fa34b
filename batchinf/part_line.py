"""A committed part, as a line of the manifest has it."""

import operator
import sys
from typing import Any, NamedTuple

from batchinf.records import Part


class PartLine(NamedTuple):
    """A committed part, and which replica made it where that is known. About 500 bytes of memory."""

    shard: int
    file: str
    num_rows: int
    num_errors: int
    num_bytes: int
    num_prompt_tokens: int
    num_output_tokens: int
    digest: str
    num_nan_rows: int = 0
    num_inf_rows: int = 0
    num_second_bos: int = 0
    num_answered: int | None = None
    num_right: int = 0
    num_right_per_token: int = 0
    num_right_per_byte: int = 0
    retry: int = 0
    replica: int | None = None
    incarnation: str = ""

    @classmethod
    def of(cls, part: "Part | PartLine", replica: int | None = None, incarnation: str = "") -> "PartLine":
        """A part as its line."""
        return cls._make((*_VALUES(part), replica, incarnation))

    def fields(self) -> dict[str, Any]:
        """As they are written."""
        return without_rare(self._asdict())


# What few jobs have.
_RARE = frozenset("num_second_bos num_answered num_right num_right_per_token num_right_per_byte".split())


def without_rare(fields: dict[str, Any]) -> dict[str, Any]:
    """Fields of a part, without those that few jobs have where there is nothing of them."""
    return {k: v for k, v in fields.items() if k not in _RARE or v != PartLine._field_defaults[k]}


_FIELDS = operator.itemgetter(*PartLine._fields)
_VALUES = operator.attrgetter(*PartLine._fields[:-2])


def part_line(fields: dict[str, Any]) -> PartLine:
    """A line's fields as a part. Raises KeyError where one is missing."""
    line = PartLine(*_FIELDS({**PartLine._field_defaults, **fields}))  # earlier versions said less
    return line._replace(incarnation=sys.intern(line.incarnation))
