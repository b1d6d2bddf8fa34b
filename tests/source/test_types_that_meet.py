"""Columns whose types differ between two files: a value comes out as it is, or its row is named, or all is refused."""

import decimal
import itertools
import math
import pathlib
import tempfile
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batchinf.base.errors import InputError
from batchinf.source.files import InputLocation
from batchinf.source.rows import open_source

PLAIN = [
    pa.null(), pa.bool_(), pa.string(), pa.large_string(), pa.binary(), pa.large_binary(), pa.binary(3),
    pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64(),
    pa.float16(), pa.float32(), pa.float64(), pa.decimal128(5, 2), pa.decimal128(38, 0), pa.decimal128(20, 20),
    pa.decimal256(60, 30), pa.date32(), pa.date64(), pa.time32("s"), pa.time32("ms"), pa.time64("us"), pa.time64("ns"),
    *(pa.timestamp(unit, zone) for unit in ("s", "ms", "us", "ns") for zone in (None, "UTC")),
    *(pa.duration(unit) for unit in ("s", "ms", "us", "ns")),
]  # fmt: skip
NESTS: list[Callable[[pa.DataType], pa.DataType]] = [
    lambda type: type,
    lambda type: pa.list_(type),
    lambda type: pa.large_list(type),
    lambda type: pa.struct([("a", type), ("b", pa.string())]),
    lambda type: pa.dictionary(pa.int32(), type),
    lambda type: pa.map_(pa.string(), type),
    lambda type: pa.list_(pa.struct([("a", type)])),
]
UNIT_NS = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}
DAY_NS = 86_400 * 10**9


def numbers(type: pa.DataType) -> st.SearchStrategy[Any]:
    """Stored numbers of a type whose values are integers, those at the limits of others among them."""
    if pa.types.is_date64(type):  # in milliseconds, and only whole days are valid
        return numbers(pa.date32()).map(lambda days: days * 86_400_000)
    num_bits = type.bit_width
    is_unsigned = pa.types.is_unsigned_integer(type)
    least, most = (0, 2**num_bits - 1) if is_unsigned else (-(2 ** (num_bits - 1)), 2 ** (num_bits - 1) - 1)
    if pa.types.is_time(type):
        least, most = 0, DAY_NS // UNIT_NS[type.unit] - 1
    edges = [sign * 2**power + by for power in (0, 7, 8, 11, 24, 31, 53, 63) for by in (-1, 0, 1) for sign in (1, -1)]
    return st.sampled_from([edge for edge in [*edges, least, most] if least <= edge <= most]) | st.integers(least, most)


def values(type: pa.DataType, num_rows: int) -> st.SearchStrategy[pa.Array]:
    """Arrays of a type."""
    if pa.types.is_null(type):
        return st.just(pa.nulls(num_rows))
    items = [st.lists(single(type), min_size=num_rows, max_size=num_rows)]
    return st.tuples(*items).map(lambda found: array(found[0], type))


def single(type: pa.DataType) -> st.SearchStrategy[Any]:
    if pa.types.is_dictionary(type):
        return single(type.value_type)
    if pa.types.is_map(type):
        return st.lists(st.tuples(st.text(max_size=2), single(type.item_type)), max_size=2, unique_by=lambda i: i[0])
    if pa.types.is_struct(type):
        return st.fixed_dictionaries({field.name: single(field.type) for field in type})
    if pa.types.is_list(type) or pa.types.is_large_list(type):
        return st.lists(single(type.value_type), max_size=3)
    return st.none() | leaf(type)


def leaf(type: pa.DataType) -> st.SearchStrategy[Any]:
    if pa.types.is_null(type):
        return st.none()
    if pa.types.is_boolean(type):
        return st.booleans()
    if pa.types.is_string(type) or pa.types.is_large_string(type):
        return st.text(st.characters(exclude_categories=["Cs"]), max_size=4)
    if pa.types.is_fixed_size_binary(type) and not pa.types.is_decimal(type):
        return st.binary(min_size=3, max_size=3)
    if pa.types.is_binary(type) or pa.types.is_large_binary(type):
        return st.binary(max_size=4)
    if pa.types.is_floating(type):
        return st.floats(width=type.bit_width)
    if pa.types.is_decimal(type):
        most = 10**type.precision - 1
        return st.integers(-most, most).map(lambda n: decimal.Decimal(f"{n}e{-type.scale}"))
    return numbers(type)


def array(found: list[Any], type: pa.DataType) -> pa.Array:
    """An array of these values; of temporal types they are the stored integers."""
    if pa.types.is_dictionary(type):
        return array(found, type.value_type).dictionary_encode().cast(type)
    if pa.types.is_temporal(type):
        return pa.array(found, pa.int32() if type.bit_width == 32 else pa.int64()).view(type)
    if pa.types.is_struct(type):
        columns = [array([row and row[field.name] for row in found], field.type) for field in type]
        return pa.StructArray.from_arrays(columns, fields=list(type))
    if pa.types.is_map(type):
        items = [pair for row in found for pair in row]
        offsets = [0, *map(int, itertools.accumulate(map(len, found)))]
        keys, parts = pa.array([key for key, _ in items], pa.string()), array([v for _, v in items], type.item_type)
        return pa.MapArray.from_arrays(offsets, keys, parts)
    if pa.types.is_list(type) or pa.types.is_large_list(type):
        offsets = [0, *map(int, itertools.accumulate(map(len, found)))]
        items = array([item for row in found for item in row], type.value_type)
        make = pa.ListArray if pa.types.is_list(type) else pa.LargeListArray
        return make.from_arrays(pa.array(offsets, pa.int32() if pa.types.is_list(type) else pa.int64()), items)
    return pa.array(found, type)


def exact(column: pa.Array) -> list[Any]:
    """Each value so that equal ones compare equal, whatever their types are."""
    type = column.type
    if pa.types.is_dictionary(type):
        return exact(column.cast(type.value_type))
    if pa.types.is_map(type) or pa.types.is_list(type) or pa.types.is_large_list(type):
        return [None if not row.is_valid else exact(row.values) for row in column]
    if pa.types.is_struct(type):
        fields = {field.name: exact(column.field(i)) for i, field in enumerate(type)}
        rows = [{name: items[i] for name, items in fields.items() if items[i] is not None} for i in range(len(column))]
        return [row if valid else None for row, valid in zip(rows, column.is_valid().to_pylist(), strict=True)]
    if pa.types.is_temporal(type):
        unit_ns = DAY_NS if pa.types.is_date32(type) else UNIT_NS[getattr(type, "unit", "ms")]
        stored = column.view(pa.int32() if type.bit_width == 32 else pa.int64()).to_pylist()
        return [None if value is None else value * unit_ns for value in stored]
    return [_exact(value) for value in column.to_pylist()]


def _exact(value: Any) -> Any:
    if value is None or isinstance(value, bool | bytes):
        return value
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return Fraction(value)


@st.composite
def pairs(draw: st.DrawFn) -> list[pa.Array]:
    """Two arrays of different types, the second often a relative of the first."""
    nest, other = draw(st.sampled_from(NESTS)), draw(st.sampled_from(NESTS))
    types = draw(st.sampled_from(PLAIN)), draw(st.sampled_from(PLAIN))
    second = (nest if draw(st.integers(0, 3)) else other)(types[1])
    return [draw(values(type, 3)) for type in (nest(types[0]), second)]


def is_written(column: pa.Array, path: pathlib.Path) -> bool:
    """Write a file with this column; False if Parquet has no such type or value."""
    table = pa.table({"x": column})
    try:
        if path.suffix == ".parquet":
            pq.write_table(table, path)
        else:
            with pa.ipc.new_file(path, table.schema) as writer:
                writer.write_table(table)
    except (pa.ArrowNotImplementedError, pa.ArrowInvalid):
        return False
    return True


def check(arrays: list[pa.Array], folder: pathlib.Path, ending: str) -> None:
    if not all(is_written(column, folder / f"{number}{ending}") for number, column in enumerate(arrays)):
        return
    try:
        source = open_source(InputLocation(str(folder)), folder / ".cache")
    except InputError as error:
        assert "column 'x' is " in str(error)  # noqa: PT017
        return
    given, lost = [value for column in arrays for value in exact(column)], dict[int, str]()
    found = source.read_columns(0, len(given), ["x"], lost)
    stored = exact(found.column("x").combine_chunks())
    for row, (value, now) in enumerate(zip(given, stored, strict=True)):
        assert row in lost or now == value, (source.schema, row)
        assert row not in lost or (now is None and "column 'x' has" in lost[row])
    if lost:
        with pytest.raises(InputError, match="column 'x' has"):
            source.read_columns(0, len(given), ["x"])
    source.close()


def run_pairs(num_examples: int, ending: str) -> None:
    @settings(max_examples=num_examples, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(pairs())
    def each(arrays: list[pa.Array]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            check(arrays, pathlib.Path(folder), ending)

    each()


def test_a_dictionary_without_values_fits_every_type(tmp_path: pathlib.Path) -> None:
    nothing = pa.DictionaryArray.from_arrays(pa.array([None, None], pa.int32()), pa.nulls(0))
    for nest in (lambda column: column, lambda column: pa.ListArray.from_arrays([0, 1, 2], column)):
        check([nest(pa.array([["a"], []])), nest(nothing)], tmp_path, ".arrow")


def test_no_pair_of_types_changes_a_value() -> None:
    run_pairs(40, ".arrow")


# A scan of Parquet starts a process, which takes half a second.
@pytest.mark.slow
@pytest.mark.parametrize(("num_examples", "ending"), [(200, ".arrow"), (10, ".parquet")])
def test_no_pair_of_types_changes_a_value_at_length(num_examples: int, ending: str) -> None:
    run_pairs(num_examples, ending)
