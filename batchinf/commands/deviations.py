"""How far stored numbers are from a reference's. `verify` adds them up over all rows, in bounded memory."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from batchinf.tasks.verification import StoredLogprobs, StoredVectors

# Ranks are compared over at most so many of a position's tokens, where these are the likeliest,
_MOST_RANKED = 64
# and, over whole rows of a vocabulary, at so many positions of a row, evenly spaced: 20 ms each for 128,256.
_RANKED_ROWS = 16


@dataclass(slots=True, kw_only=True)
class _Deviations:
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
class LogprobDeviations(_Deviations):
    """Deviations of one kind of logprobs (`output`, `prompt`, `scored`), over all rows.

    Of the tokens themselves but for max_abs_delta_top, which is of the top k beside them. Correlations are of one
    position's top k each or, where fewer than two are stored, of one row's tokens each.
    """

    max_abs_delta_top: float = 0.0

    @property
    def worst(self) -> float:
        """The number that must be within the tolerance."""
        return max(self.max_abs_delta, self.max_abs_delta_top)


@dataclass(slots=True, kw_only=True)
class VectorDeviations(_Deviations):
    """Deviations of one column of vectors, over all rows.

    With has_direction: max_relative, the largest ‖Δ‖ / ‖reference‖, which must be within the tolerance, and min_cosine.
    For others correlations are over a position's numbers or, where it has but one, over a row's positions.
    """

    has_direction: bool = False
    max_relative: float = 0.0
    min_cosine: float = 1.0

    @property
    def worst(self) -> float:
        """The number that must be within the tolerance."""
        return self.max_relative if self.has_direction else self.max_abs_delta


def add_logprobs(
    to: LogprobDeviations, stored: StoredLogprobs, values: npt.NDArray[np.float32], best: npt.NDArray[np.int64]
) -> tuple[int, float]:
    """Add a row's logprobs, given the reference's values of `stored.wanted` and its likeliest tokens.

    Returns the place of the worst token in its prompt or output, from 0, and how far off it is: infinitely where a
    value is missing.
    """
    own = stored.values.astype(np.float64)
    is_nan = np.isnan(own)
    with np.errstate(invalid="ignore"):
        delta = np.abs(own - values)
    delta[own == values] = 0.0  # both may be -inf
    delta[is_nan] = np.inf
    to.num_positions += len(own)
    to.num_values += own.size
    to.num_nan += int(is_nan.sum())
    known = delta[:, 0][~is_nan[:, 0]]
    to.max_abs_delta = max(to.max_abs_delta, float(known.max(initial=0.0)))
    to.sum_abs_delta += float(known.sum())
    if own.shape[1] > 1:
        known_top = delta[:, 1:][~is_nan[:, 1:]]
        to.max_abs_delta_top = max(to.max_abs_delta_top, float(known_top.max(initial=0.0)))
    if stored.has_top and own.shape[1] > 1:
        to.num_ranked += len(own)
        to.num_agreeing += int((stored.wanted[:, 1] == best).sum())
    if own.shape[1] > 2:
        to.correlate(own[:, 1 : _MOST_RANKED + 1], values[:, 1 : _MOST_RANKED + 1])
    else:
        to.correlate(own[None, :, 0], values[None, :, 0])
    worst = delta.max(axis=1)
    place = int(worst.argmax())
    return place + (stored.first if stored.kind == "prompt" else 0), float(worst[place])


def add_vectors(
    to: VectorDeviations, stored: StoredVectors, pieces: Iterable[npt.NDArray[np.float32]]
) -> tuple[int, float]:
    """Add a row's vectors. pieces: the reference's [n, width] in their order, some at a time.

    Returns which of the vectors is the worst, from 0, and how far off it is: infinitely where a number is NaN.
    """
    step = max(1, -(-len(stored.values) // _RANKED_ROWS))
    start, found, singles = 0, np.zeros(0), []
    for expected in pieces:
        own = stored.values[start : start + len(expected)]
        found = np.concatenate([found, _add(to, own, expected.astype(np.float64))])
        if not to.has_direction and own.shape[1] > 1:
            best = np.take_along_axis(own, expected.argmax(axis=1)[:, None], axis=1)[:, 0]
            to.num_ranked += len(own)
            # The highest of several that rounding has made equal is all of them.
            to.num_agreeing += int((best == own.max(axis=1)).sum())
            places = slice(-start % step, None, step)
            to.correlate(own[places], expected[places])
        elif not to.has_direction:
            singles.append(expected[:, 0])
        start += len(expected)
    if singles:
        to.correlate(stored.values[None, :, 0], np.concatenate(singles)[None])
    place = int(found.argmax())
    return place, float(found[place])


def _add(to: VectorDeviations, stored: npt.NDArray[Any], expected: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """[n]: how far off each row is."""
    is_nan = np.isnan(stored)
    with np.errstate(invalid="ignore", over="ignore"):
        delta = np.abs(stored.astype(np.float64) - expected)
        # Both may be -inf; and what the stored type cannot hold is stored as infinity.
        delta[np.isinf(stored) & (stored == expected.astype(stored.dtype))] = 0.0
    delta[is_nan] = np.inf
    known = delta[~is_nan]
    to.num_positions += len(stored)
    to.num_values += stored.size
    to.num_nan += int(is_nan.sum())
    to.max_abs_delta = max(to.max_abs_delta, float(known.max(initial=0.0)))
    to.sum_abs_delta += float(known.sum())
    if not to.has_direction:
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
    to.max_relative = max(to.max_relative, float(relative.max(initial=0.0)))
    to.min_cosine = min(to.min_cosine, float(cosines[~np.isnan(cosines)].min(initial=1.0)))
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
