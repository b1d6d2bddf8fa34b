"""How far stored logprobs and vectors are from the reference's, summed over rows; `verify` shows it as a table."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from batchinf.base.text import short_count
from batchinf.tasks.compare import delta
from batchinf.tasks.verification import StoredLogprobs, StoredVectors

# Ranks of a position's likeliest tokens are compared for at most this many tokens.
_MOST_RANKED = 64
# Ranks over a whole vocabulary are compared at this many positions of a row: one takes 20 ms for 128,256 tokens.
_RANKED_ROWS = 16
# The titles of a table's columns, with their widths. All columns together fit a terminal of 80.
_Head = tuple[tuple[str, int], ...]
_MEASURES: _Head = (("max |Δ|", 8), ("mean |Δ|", 8))
_SHARES: _Head = (("top-1", 7), ("rank corr.", 10))
_TOKEN_HEAD: _Head = (("tokens of", 9), ("positions", 9), *_MEASURES, ("max |Δ| of top k", 16), *_SHARES)
_ROW_HEAD: _Head = (("rows of", 13), ("positions", 9), ("numbers", 7), *_MEASURES, *_SHARES)
_VECTOR_HEAD: _Head = (
    ("vectors of", 16), ("positions", 9), ("numbers", 7), *_MEASURES, ("relative Δ", 10), ("min cosine", 10),
)  # fmt: skip


@dataclass(slots=True, kw_only=True)
class Deviations:
    """Deviations of one kind of logprobs, or of one column of vectors, over all rows."""

    num_positions: int = 0
    num_values: int = 0
    """Stored numbers, with those that are NaN."""
    num_nan: int = 0
    max_abs_delta: float = 0.0
    sum_abs_delta: float = 0.0
    num_ranked: int = 0
    num_agreeing: int = 0
    """Those of num_ranked positions whose highest number is also the reference's."""
    num_correlated: int = 0
    sum_correlation: float = 0.0
    """The sum of num_correlated rank correlations (Spearman)."""

    @property
    def worst(self) -> float:
        """The number that must be within the tolerance."""
        return self.max_abs_delta

    def _count(self, is_nan: npt.NDArray[np.bool_], known: npt.NDArray[Any]) -> None:
        """is_nan: of the stored numbers, a row for each position. known: deviations of those that are compared."""
        self.num_positions += len(is_nan)
        self.num_values += is_nan.size
        self.num_nan += int(is_nan.sum())
        self.max_abs_delta = max(self.max_abs_delta, float(known.max(initial=0.0)))
        self.sum_abs_delta += float(known.sum())

    def _correlate(self, stored: npt.NDArray[Any], expected: npt.NDArray[Any]) -> None:
        """Add the rank correlation of each row of the two [n, k], if it is defined."""
        correlations = spearman(stored, expected)
        correlations = correlations[~np.isnan(correlations)]
        self.num_correlated += len(correlations)
        self.sum_correlation += float(correlations.sum())


@dataclass(slots=True, kw_only=True)
class LogprobDeviations(Deviations):
    """Deviations of one kind of logprobs (`output`, `prompt`, `scored`).

    They concern the tokens of the sequence. A correlation is over the top k of one position, or over the tokens of one
    row if fewer than two are stored.
    """

    max_abs_delta_top: float = 0.0
    """Of the k other tokens of a position."""

    @property
    def worst(self) -> float:
        return max(self.max_abs_delta, self.max_abs_delta_top)

    def add(
        self, stored: StoredLogprobs, values: npt.NDArray[np.float32], best: npt.NDArray[np.int64]
    ) -> tuple[int, float]:
        """Add a row's logprobs. values: the reference's, for `stored.tokens`. best: the reference's likeliest tokens.

        Returns the place of the worst token in its prompt or output, from 0, and its deviation, which is infinite if a
        value is missing.
        """
        read = np.arange(len(stored.values)) if stored.is_unread is None else np.flatnonzero(~stored.is_unread)
        if not len(read):
            return stored.first, 0.0
        tokens = stored.tokens[read]
        values = values[read]
        numbers = stored.values[read].astype(np.float64)
        is_nan = np.isnan(numbers)
        deltas = np.abs(delta(numbers, values))
        deltas[is_nan] = np.inf
        self._count(is_nan, deltas[:, 0][~is_nan[:, 0]])
        if numbers.shape[1] > 1:
            known_top = deltas[:, 1:][~is_nan[:, 1:]]
            self.max_abs_delta_top = max(self.max_abs_delta_top, float(known_top.max(initial=0.0)))
            self.num_ranked += len(numbers)
            self.num_agreeing += int((tokens[:, 1] == best[read]).sum())
        if numbers.shape[1] > 2:
            self._correlate(numbers[:, 1 : _MOST_RANKED + 1], values[:, 1 : _MOST_RANKED + 1])
        else:
            self._correlate(numbers[None, :, 0], values[None, :, 0])
        worst = deltas.max(axis=1)
        place = int(worst.argmax())
        return int(read[place]) + (stored.first if stored.kind == "prompt" else 0), float(worst[place])


@dataclass(slots=True, kw_only=True)
class VectorDeviations(Deviations):
    """Deviations of one column of vectors.

    Vectors without a direction have correlations: over a position's numbers, or over a row's positions with one number
    each.
    """

    has_direction: bool = False
    max_relative: float = 0.0
    """The largest ‖Δ‖ / ‖reference‖; of vectors with a direction."""
    min_cosine: float = 1.0
    """Of vectors with a direction."""

    @property
    def worst(self) -> float:
        return self.max_relative if self.has_direction else self.max_abs_delta

    def add(self, stored: StoredVectors, pieces: Iterable[npt.NDArray[np.float32]]) -> tuple[int, float]:
        """Add a row's vectors. pieces: the reference's vectors [n, width] in order, in several pieces.

        Returns the index of the worst vector and its deviation, which is infinite if a number is NaN.
        """
        step = max(1, -(-len(stored.values) // _RANKED_ROWS))
        start = 0
        deviations = []
        singles = []
        for expected in pieces:
            numbers = stored.values[start : start + len(expected)]
            deviations.append(self._add(numbers, expected.astype(np.float64)))
            if not self.has_direction and numbers.shape[1] > 1:
                best = np.take_along_axis(numbers, expected.argmax(axis=1)[:, None], axis=1)[:, 0]
                self.num_ranked += len(numbers)
                # Rounding may make several numbers equal. All of them then count as the highest.
                self.num_agreeing += int((best == numbers.max(axis=1)).sum())
                places = slice(-start % step, None, step)
                self._correlate(numbers[places], expected[places])
            elif not self.has_direction:
                singles.append(expected[:, 0])
            start += len(expected)
        if singles:
            self._correlate(stored.values[None, :, 0], np.concatenate(singles)[None])
        of_rows = np.concatenate(deviations)
        place = int(of_rows.argmax())
        return place, float(of_rows[place])

    def _add(self, stored: npt.NDArray[Any], expected: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """[n]: the deviation of each row."""
        values = stored.astype(np.float64)
        is_nan = np.isnan(stored)
        with np.errstate(invalid="ignore", over="ignore"):
            deltas = np.abs(values - expected)
            # Both may be -inf. A number that the stored type cannot hold is stored as infinity.
            deltas[np.isinf(stored) & (stored == expected.astype(stored.dtype))] = 0.0
        deltas[is_nan] = np.inf
        self._count(is_nan, deltas[~is_nan])
        if not self.has_direction:
            worst: npt.NDArray[np.float64] = deltas.max(axis=1)
            return worst
        norms = np.linalg.norm(values, axis=1)
        lengths = np.linalg.norm(expected, axis=1)
        with np.errstate(invalid="ignore", divide="ignore"):
            cosines = (values * expected).sum(axis=1) / (norms * lengths)
            relative: npt.NDArray[np.float64] = np.linalg.norm(deltas, axis=1) / lengths
        # Two zero vectors are equal. Any other NaN counts as an infinite deviation.
        relative[(norms == 0) & (lengths == 0)] = 0.0
        relative[np.isnan(relative)] = np.inf
        self.max_relative = max(self.max_relative, float(relative.max(initial=0.0)))
        self.min_cosine = min(self.min_cosine, float(cosines[~np.isnan(cosines)].min(initial=1.0)))
        return relative


def spearman(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """[n]: Spearman's rank correlation of each row of a and b [n, k]. Equal values share their mean rank.

    NaN for fewer than two values, if all values are equal, or if one is NaN.
    """
    x, y = (_centred_ranks(np.asarray(values, np.float64)) for values in (a, b))
    with np.errstate(invalid="ignore", divide="ignore"):
        correlation: npt.NDArray[np.float64] = (x * y).sum(axis=1) / np.sqrt((x * x).sum(axis=1) * (y * y).sum(axis=1))
    correlation[np.isnan(a).any(axis=1) | np.isnan(b).any(axis=1)] = np.nan
    return correlation


def _centred_ranks(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The rank of each value in its row, minus the mean rank. Equal values share their mean rank."""
    ranks: npt.NDArray[np.float64] = np.empty(values.shape)
    for row, row_ranks in zip(values, ranks, strict=True):
        _, inverse, counts = np.unique(row, return_inverse=True, return_counts=True)
        row_ranks[:] = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    ranks -= (values.shape[1] + 1) / 2
    return ranks


def table_lines(by_kind: Mapping[str, LogprobDeviations | VectorDeviations]) -> Iterator[str]:
    """A header, then a line for each kind of logprobs or each column of vectors."""
    last: _Head = ()
    for kind, deviations in by_kind.items():
        head, cells = _head_and_cells(deviations)
        if head != last:
            yield _line(head, [name for name, _ in head])
        last = head
        yield _line(head, [kind, f"{deviations.num_positions:,}", *cells])


def _head_and_cells(deviations: LogprobDeviations | VectorDeviations) -> tuple[_Head, list[str]]:
    shares = [
        f"{deviations.num_agreeing / deviations.num_ranked:.2%}" if deviations.num_ranked else "-",
        f"{deviations.sum_correlation / deviations.num_correlated:.5f}" if deviations.num_correlated else "-",
    ]
    if isinstance(deviations, LogprobDeviations):
        has_top = deviations.num_values > deviations.num_positions
        top = f"{deviations.max_abs_delta_top:.2e}" if has_top else "-"
        return _TOKEN_HEAD, [*_deltas(deviations, deviations.num_positions), top, *shares]
    cells = [short_count(deviations.num_values), *_deltas(deviations, deviations.num_values - deviations.num_nan)]
    if deviations.has_direction:
        return _VECTOR_HEAD, [*cells, f"{deviations.max_relative:.2e}", f"{deviations.min_cosine:.7f}"]
    return _ROW_HEAD, [*cells, *shares]


def _deltas(deviations: Deviations, num_compared: int) -> list[str]:
    return [f"{deviations.max_abs_delta:.2e}", f"{deviations.sum_abs_delta / max(1, num_compared):.2e}"]


def _line(head: _Head, cells: Sequence[str]) -> str:
    widths = [width for _, width in head]
    return "  ".join([cells[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(cells[1:], widths[1:], strict=True))])
