"""How far stored values are from a reference's: counted over all claims of one kind, in bounded memory."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from batchinf.commands.verify.claims import Claim, RowsClaim

# Ranks are compared over at most so many of a position's tokens, where these are the likeliest,
_MOST_RANKED = 64
# and, over whole rows of a vocabulary, at so many positions of a claim, evenly spaced: 20 ms each for 128,256.
_RANKED_ROWS = 16

# A table's columns, each with its width.
Head = tuple[tuple[str, int], ...]
_MEASURES: Head = (("max |Δ|", 9), ("mean |Δ|", 9))
_SHARES: Head = (("top-1 agreement", 16), ("rank correlation", 16))
_TOKEN_HEAD: Head = (("tokens of", 9), ("positions", 10), *_MEASURES, ("max |Δ| of top k", 16), *_SHARES)
_ROW_HEAD: Head = (("rows of", 13), ("positions", 10), ("numbers", 13), *_MEASURES, *_SHARES)
_VECTOR_HEAD: Head = (
    ("vectors of", 16), ("positions", 10), ("numbers", 13), *_MEASURES, ("max ‖Δ‖ / ‖reference‖", 21),
    ("lowest cosine", 13),
)  # fmt: skip


@dataclass(slots=True, kw_only=True)
class _Counts:
    """num_values: numbers that were stored, of which num_nan are none. num_agreeing: of num_ranked positions, those
    whose highest number is the reference's. sum_correlation: of num_correlated of Spearman's.
    """

    num_positions: int = 0
    num_values: int = 0
    num_nan: int = 0
    max_abs_delta: float = 0.0
    sum_abs_delta: float = 0.0
    num_ranked: int = 0
    num_agreeing: int = 0
    num_correlated: int = 0
    sum_correlation: float = 0.0

    def correlate(self, stored: npt.NDArray[Any], expected: npt.NDArray[Any]) -> None:
        """Count Spearman's of each row of the two [n, k], where there is one."""
        found = spearman(stored, expected)
        found = found[~np.isnan(found)]
        self.num_correlated += len(found)
        self.sum_correlation += float(found.sum())


@dataclass(slots=True, kw_only=True)
class Tally(_Counts):
    """What is counted of one kind of claim (`output`, `prompt`), over all rows.

    Of the tokens themselves but for max_abs_delta_top, which is of the top k beside them. Correlations are of one
    position's top k each or, where fewer than two are stored, of one row's tokens each.
    """

    max_abs_delta_top: float = 0.0

    @property
    def worst(self) -> float:
        """What is held against the tolerance."""
        return max(self.max_abs_delta, self.max_abs_delta_top)


@dataclass(slots=True, kw_only=True)
class RowsTally(_Counts):
    """What is counted of rows of numbers (a column), over all rows of the job that are compared.

    For vectors: max_relative, the largest ‖Δ‖ / ‖reference‖, which is held against the tolerance, and min_cosine. For
    others correlations are over a position's numbers or, where it has but one, over a row's positions.
    """

    is_vector: bool = False
    max_relative: float = 0.0
    min_cosine: float = 1.0

    @property
    def worst(self) -> float:
        """What is held against the tolerance."""
        return self.max_relative if self.is_vector else self.max_abs_delta


def count_claim(
    tally: Tally, claim: Claim, values: npt.NDArray[np.float32], best: npt.NDArray[np.int64]
) -> tuple[int, float]:
    """Add a claim to its tally, given the reference's values of `claim.wanted` and its likeliest tokens.

    Returns the place of the worst token in its prompt or output, from 0, and how far off its row is: infinitely where
    a value is missing.
    """
    stored = claim.values.astype(np.float64)
    is_nan = np.isnan(stored)
    with np.errstate(invalid="ignore"):
        delta = np.abs(stored - values)
    delta[stored == values] = 0.0  # both may be -inf
    delta[is_nan] = np.inf
    tally.num_positions += len(stored)
    tally.num_values += stored.size
    tally.num_nan += int(is_nan.sum())
    known = delta[:, 0][~is_nan[:, 0]]
    tally.max_abs_delta = max(tally.max_abs_delta, float(known.max(initial=0.0)))
    tally.sum_abs_delta += float(known.sum())
    if stored.shape[1] > 1:
        known_top = delta[:, 1:][~is_nan[:, 1:]]
        tally.max_abs_delta_top = max(tally.max_abs_delta_top, float(known_top.max(initial=0.0)))
    if claim.has_top and stored.shape[1] > 1:
        tally.num_ranked += len(stored)
        tally.num_agreeing += int((claim.wanted[:, 1] == best).sum())
    if stored.shape[1] > 2:
        tally.correlate(stored[:, 1 : _MOST_RANKED + 1], values[:, 1 : _MOST_RANKED + 1])
    else:
        tally.correlate(stored[None, :, 0], values[None, :, 0])
    worst = delta.max(axis=1)
    place = int(worst.argmax())
    return place + (claim.first if claim.kind == "prompt" else 0), float(worst[place])


def count_rows_claim(
    tally: RowsTally, claim: RowsClaim, pieces: Iterable[npt.NDArray[np.float32]]
) -> tuple[int, float]:
    """Add a claim to its tally. pieces: the reference's rows [n, width] in their order, some at a time.

    Returns which of the claim's rows is the worst, from 0, and how far off that is: infinitely where a number is NaN.
    """
    step = max(1, -(-len(claim.values) // _RANKED_ROWS))
    start, found, singles = 0, np.zeros(0), []
    for expected in pieces:
        stored = claim.values[start : start + len(expected)]
        found = np.concatenate([found, _add(tally, stored, expected.astype(np.float64))])
        if not tally.is_vector and stored.shape[1] > 1:
            best = np.take_along_axis(stored, expected.argmax(axis=1)[:, None], axis=1)[:, 0]
            tally.num_ranked += len(stored)
            # The highest of several that rounding has made equal is all of them.
            tally.num_agreeing += int((best == stored.max(axis=1)).sum())
            places = slice(-start % step, None, step)
            tally.correlate(stored[places], expected[places])
        elif not tally.is_vector:
            singles.append(expected[:, 0])
        start += len(expected)
    if singles:
        tally.correlate(claim.values[None, :, 0], np.concatenate(singles)[None])
    place = int(found.argmax())
    return place, float(found[place])


def _add(tally: RowsTally, stored: npt.NDArray[Any], expected: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """[n]: how far off each row is."""
    is_nan = np.isnan(stored)
    with np.errstate(invalid="ignore", over="ignore"):
        delta = np.abs(stored.astype(np.float64) - expected)
        # Both may be -inf; and what the stored type cannot hold is stored as infinity.
        delta[np.isinf(stored) & (stored == expected.astype(stored.dtype))] = 0.0
    delta[is_nan] = np.inf
    known = delta[~is_nan]
    tally.num_positions += len(stored)
    tally.num_values += stored.size
    tally.num_nan += int(is_nan.sum())
    tally.max_abs_delta = max(tally.max_abs_delta, float(known.max(initial=0.0)))
    tally.sum_abs_delta += float(known.sum())
    if not tally.is_vector:
        worst: npt.NDArray[np.float64] = delta.max(axis=1)
        return worst
    values = stored.astype(np.float64)
    norms, lengths = np.linalg.norm(values, axis=1), np.linalg.norm(expected, axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        cosines = (values * expected).sum(axis=1) / (norms * lengths)
        relative: npt.NDArray[np.float64] = np.linalg.norm(delta, axis=1) / lengths
    # Two vectors of nothing but zeros are the same; what else is no number is off without end.
    relative[(norms == 0) & (lengths == 0)] = 0.0
    relative[np.isnan(relative)] = np.inf
    tally.max_relative = max(tally.max_relative, float(relative.max(initial=0.0)))
    tally.min_cosine = min(tally.min_cosine, float(cosines[~np.isnan(cosines)].min(initial=1.0)))
    return relative


def spearman(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """[n]: Spearman's rank correlation of each row of a and b [n, k], equal values sharing their mean rank.

    NaN where fewer than two values are there, where all are equal, or where one is NaN.
    """
    x, y = (ranks(np.asarray(values, np.float64)) for values in (a, b))
    x, y = x - x.mean(axis=1, keepdims=True), y - y.mean(axis=1, keepdims=True)
    with np.errstate(invalid="ignore", divide="ignore"):
        correlation: npt.NDArray[np.float64] = (x * y).sum(axis=1) / np.sqrt((x * x).sum(axis=1) * (y * y).sum(axis=1))
    correlation[np.isnan(a).any(axis=1) | np.isnan(b).any(axis=1)] = np.nan
    return correlation


def ranks(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The rank of each value in its row, from 1; equal ones share their mean rank."""
    result = np.empty(values.shape)
    for row, own in zip(values, result, strict=True):
        _, inverse, counts = np.unique(row, return_inverse=True, return_counts=True)
        own[:] = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    return result


def table_lines(tallies: Mapping[str, Tally | RowsTally]) -> Iterator[str]:
    """For people: a line for each kind of claim, below the heads of its columns."""
    last: Head = ()
    for kind, tally in tallies.items():
        if isinstance(tally, Tally):
            head, cells = _TOKEN_HEAD, _token_cells(tally)
        else:
            head, cells = (_VECTOR_HEAD, _vector_cells(tally)) if tally.is_vector else (_ROW_HEAD, _row_cells(tally))
        if head != last:
            yield _line(head, [name for name, _ in head])
        last = head
        yield _line(head, [kind, f"{tally.num_positions:,}", *cells])


def _token_cells(tally: Tally) -> list[str]:
    return [
        f"{tally.max_abs_delta:.2e}",
        f"{tally.sum_abs_delta / max(1, tally.num_positions):.2e}",
        f"{tally.max_abs_delta_top:.2e}" if tally.num_values > tally.num_positions else "-",
        *_shares(tally),
    ]


def _row_cells(tally: RowsTally) -> list[str]:
    return [*_deltas(tally), *_shares(tally)]


def _vector_cells(tally: RowsTally) -> list[str]:
    return [*_deltas(tally), f"{tally.max_relative:.2e}", f"{tally.min_cosine:.7f}"]


def _deltas(tally: RowsTally) -> list[str]:
    mean = tally.sum_abs_delta / max(1, tally.num_values - tally.num_nan)
    return [f"{tally.num_values:,}", f"{tally.max_abs_delta:.2e}", f"{mean:.2e}"]


def _shares(tally: Tally | RowsTally) -> list[str]:
    return [
        f"{tally.num_agreeing / tally.num_ranked:.2%}" if tally.num_ranked else "-",
        f"{tally.sum_correlation / tally.num_correlated:.5f}" if tally.num_correlated else "-",
    ]


def _line(head: Head, cells: Sequence[str]) -> str:
    widths = [width for _, width in head]
    return "  ".join([cells[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(cells[1:], widths[1:], strict=True))])
