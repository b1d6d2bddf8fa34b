"""Embed: a vector for each prompt."""

from collections.abc import Sequence

import pyarrow as pa

from batchinf.tasks.pooled import Pooled, Values, vector_array, vector_of


class Embed(Pooled):
    """`embedding`: fixed_size_list<float32 or float16>[width], of length 1 unless the spec says otherwise."""

    def vector_fields(self) -> list[tuple[str, pa.DataType]]:
        """See `Pooled`."""
        return [("embedding", vector_of(self.dtype, self.width))]

    def vector_columns(self, values: Sequence[Values | None], num_tokens: Sequence[int]) -> dict[str, pa.Array]:
        """See `Pooled`."""
        return {"embedding": vector_array(values, self.dtype, self.width)}
