"""Classify, and reward: what a classification head says of each prompt."""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from batchinf.spec import JobSpec
from batchinf.tasks.columns import strings
from batchinf.tasks.pooled import Pooled, Values, check_shapes, vector_array, vector_of

_FLOAT = np.dtype(np.float32)


class Classify(Pooled):
    """`label` string and its `score` float32; `probabilities` (or `logits`) fixed_size_list<float32>[num_labels].

    The label is the class with the highest value, the first of equals; null where all of a row's values are NaN.
    """

    def __init__(self, spec: JobSpec) -> None:
        self._labels = np.array(spec.pooling.labels or (), np.object_)
        self._column = "logits" if spec.pooling.use_activation is False else "probabilities"
        super().__init__(spec)

    def vector_fields(self) -> list[tuple[str, pa.DataType]]:
        """See `Pooled`."""
        return [("label", pa.string()), ("score", pa.float32()), (self._column, vector_of(_FLOAT, self.width))]

    def vector_columns(self, values: Sequence[Values | None], num_tokens: Sequence[int]) -> dict[str, pa.Array]:
        """See `Pooled`."""
        vectors = vector_array(values, _FLOAT, self.width)
        best = [None if value is None or np.isnan(value).all() else int(np.nanargmax(value)) for value in values]
        labels = [None if place is None else str(self._labels[place]) for place in best]
        scores = [
            None if value is None or place is None else float(value[0, place])
            for value, place in zip(values, best, strict=True)
        ]
        return {"label": strings(labels), "score": pa.array(scores, pa.float32()), self._column: vectors}


class Reward(Pooled):
    """`reward`: float32, or fixed_size_list<float32>[width] where the model's head has several outputs."""

    def vector_fields(self) -> list[tuple[str, pa.DataType]]:
        """See `Pooled`."""
        return [("reward", pa.float32() if self.width == 1 else vector_of(_FLOAT, self.width))]

    def vector_columns(self, values: Sequence[Values | None], num_tokens: Sequence[int]) -> dict[str, pa.Array]:
        """See `Pooled`."""
        if self.width > 1:
            return {"reward": vector_array(values, _FLOAT, self.width)}
        check_shapes(values, self.width)
        return {"reward": pa.array([None if value is None else float(value[0, 0]) for value in values], pa.float32())}
