"""Groups errors of rows by type and reason, so that no row is counted under the message of a row that failed otherwise.

A reason is a message without its numbers and without the value after `got`.
"""

import re
from collections import Counter
from collections.abc import Iterable
from typing import Protocol, TypeVar

# DuckDB reads it too.
VARYING = r"""got (?:'[^']*'|"[^"]*")|[0-9][0-9,.]*"""
COMPARED_CHARS = 400
_SHOWN_OF_A_TYPE = 3


class ErrorGroup(Protocol):
    """Error rows of one type and one reason."""

    @property
    def error_type(self) -> str: ...
    @property
    def num_rows(self) -> int: ...


_Group = TypeVar("_Group", bound=ErrorGroup)


def reason(message: str) -> str:
    """The message, but equal for rows that failed for one reason."""
    return re.sub(VARYING, "#", message[:COMPARED_CHARS])


def most_frequent(groups: Iterable[_Group]) -> tuple[list[_Group], list[str]]:
    """At most three groups of each type, the most frequent first; then a line for each type with the rest."""
    num_groups = Counter[str]()
    num_rows = Counter[str]()  # of the groups that are not shown
    shown: list[_Group] = []
    for group in sorted(groups, key=lambda group: -group.num_rows):
        num_groups[group.error_type] += 1
        if num_groups[group.error_type] <= _SHOWN_OF_A_TYPE:
            shown.append(group)
        else:
            num_rows[group.error_type] += group.num_rows
    rest = []
    for error_type, number in num_rows.most_common():
        num_others = num_groups[error_type] - _SHOWN_OF_A_TYPE
        reasons = "another reason" if num_others == 1 else f"{num_others:,} other reasons"
        rest.append(f"{number:,} × {error_type} for {reasons}")
    return shown, rest
