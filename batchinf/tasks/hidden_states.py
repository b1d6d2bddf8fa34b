"""Hidden states: what a model's layers make of a prompt's last token, or of each of them."""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from batchinf.spec import JobSpec
from batchinf.tasks.columns import id_lists, list_of
from batchinf.tasks.pooled import Pooled, Values, check_shapes, vector_lists, vector_of


class HiddenStates(Pooled):
    """`positions` list<int32>, from 0 in the prompt, and a list of as many vectors: `hidden_states`, the model's
    output, or for each of the spec's layers a column `hidden_states_8`: list<fixed_size_list<float>[width]>.
    """

    def __init__(self, spec: JobSpec) -> None:
        layers = spec.pooling.layers
        self._names = ["hidden_states"] if layers is None else [f"hidden_states_{layer}" for layer in layers]
        self._has_all = spec.pooling.positions == "all"
        super().__init__(spec)

    def vector_fields(self) -> list[tuple[str, pa.DataType]]:
        """See `Pooled`."""
        vectors = list_of(vector_of(self.dtype, self.width))
        return [("positions", list_of(pa.int32())), *((name, vectors) for name in self._names)]

    def vector_columns(self, values: Sequence[Values | None], num_tokens: Sequence[int]) -> dict[str, pa.Array]:
        """See `Pooled`. The engine gives the layers' vectors side by side, in the order of the spec."""
        width, firsts = self.width, [0 if self._has_all else count - 1 for count in num_tokens]
        lengths = [count - first for first, count in zip(firsts, num_tokens, strict=True)]
        check_shapes(values, width * len(self._names), lengths)
        places = [
            None if value is None else np.arange(first, count, dtype=np.int32)
            for value, first, count in zip(values, firsts, num_tokens, strict=True)
        ]
        columns = {
            name: vector_lists(
                [None if value is None else value[:, number * width : (number + 1) * width] for value in values],
                self.dtype,
                width,
            )
            for number, name in enumerate(self._names)
        }
        return {"positions": id_lists(places), **columns}
