"""The Arrow types of columns: inferred in one pass over JSON or CSV values, simplified, and merged over all files.

A type is None if no Arrow type holds all values unchanged. `MixedTypes` says what such a column becomes.
"""

import enum
import itertools
import json
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import IO, Any

import pyarrow as pa
import pyarrow.compute as pc

from batchinf.base.errors import InputError
from batchinf.base.text import list_names
from batchinf.source.cache import FURTHER_COLUMNS, Scratch, further_line

MAX_COLUMNS = 4096  # of JSON lines: further columns are in the schema only if they are asked for by their names
MAX_NESTED = 256  # fields within one column; more is kept as JSON
MAX_JSON_DEPTH = 16
_JSON_KEY = b"batchinf:json"
_ODD_KEY = b"batchinf:odd"
_EXTENSION_KEY = b"batchinf:extension"
_REMARK_KEY = b"batchinf:remark"
_TWINS_KEY = b"batchinf:twins"
JSON_MARK = {_JSON_KEY: b"1"}

_WRITTEN_MARK = {b"batchinf:written": b"1"}

_NULL = pa.null()  # the type of a column without any value so far


def _json_field(name: str, odd: str) -> pa.Field:
    """A column of values of several types: a text stays as it is, and any other value is its JSON text.

    odd: which row or file has the first value of another type, in words.
    """
    return pa.field(name, pa.string(), metadata={**JSON_MARK, _ODD_KEY: odd.encode(errors="replace")})


def is_json_column(field: pa.Field) -> bool:
    """Whether a column holds values of several types: texts as they are, and others as their JSON text."""
    return _JSON_KEY in (field.metadata or {})


def odd_value(field: pa.Field) -> str:
    """Which row or file of such a column has the first value of another type, in words."""
    return str((field.metadata or {}).get(_ODD_KEY, b"").decode())


def extension_of(field: pa.Field) -> str | None:
    """The name of the extension type that a column has in its file, at any depth; its rows are read without it."""
    name = (field.metadata or {}).get(_EXTENSION_KEY)
    if name is not None:
        return str(name.decode())
    extensions = (type for type in _and_inner(field.type) if isinstance(type, pa.BaseExtensionType))
    return next((str(type.extension_name) for type in extensions), None)


def _and_inner(type: pa.DataType) -> Iterator[pa.DataType]:
    """The type, and those within it at any depth."""
    yield type
    is_dictionary = isinstance(type, pa.DictionaryType)
    for inner in [type.value_type] if is_dictionary else [type.field(i).type for i in range(type.num_fields)]:
        yield from _and_inner(inner)


def _plain_field(field: pa.Field, type: pa.DataType) -> pa.Field:
    name = extension_of(field)
    return pa.field(field.name, type, metadata=None if name is None else {_EXTENSION_KEY: name.encode()})


def with_remark(schema: pa.Schema, remark: str) -> pa.Schema:
    """The columns of a file, with what users are told about how the file was read; empty: nothing."""
    return schema.with_metadata({_REMARK_KEY: remark.encode()}) if remark else schema


def remark_of(schema: pa.Schema) -> str:
    """See `with_remark`."""
    return str((schema.metadata or {}).get(_REMARK_KEY, b"").decode())


def with_twins(schema: pa.Schema, names: Sequence[str]) -> pa.Schema:
    """The columns of a file, with the names that several columns have, which are left out."""
    return schema.with_metadata({**(schema.metadata or {}), _TWINS_KEY: json.dumps(names)}) if names else schema


def refuse_named_twins(schema: pa.Schema, named: Collection[str], file_name: str) -> None:
    """Raise `InputError` if a job names a column that is left out of a file; see `with_twins`."""
    for name in json.loads((schema.metadata or {}).get(_TWINS_KEY, b"[]")):
        if name in named:
            raise _two_columns(name, file_name)


def is_text(type: pa.DataType) -> bool:
    """Whether a column of this type holds text."""
    return bool(pa.types.is_string(type) or pa.types.is_large_string(type))


def as_written(field: pa.Field) -> pa.Field:
    """A column of floats as text, each number as it stands in the file; any other column as it is."""
    return pa.field(field.name, pa.string(), metadata=_WRITTEN_MARK) if pa.types.is_floating(field.type) else field


def is_as_written(field: pa.Field) -> bool:
    """Whether a field is one that `as_written` made text."""
    return bool((field.metadata or {}).items() >= _WRITTEN_MARK.items())


class WrittenNumber(float):
    """A number of a CSV file. It is printed as it stands there; in arithmetic and comparisons it is a float."""

    __slots__ = ("_field",)
    _field: str

    def __new__(cls, field: str) -> "WrittenNumber":
        """Make a number of a field."""
        number = super().__new__(cls, field)
        number._field = field
        return number

    def __repr__(self) -> str:
        return self._field

    __str__ = __repr__


class MixedTypes(enum.Enum):
    """What a column becomes if no Arrow type holds all its values."""

    JSON = "texts as they are, any other value as its JSON text"
    STRING = "each value as it stands in the file"
    REFUSED = "an error"


# -- over all files --------------------------------------------------------------------------------------------------


def settled_schema(schemas: Iterable[tuple[str, pa.Schema]], mixed: MixedTypes) -> pa.Schema:
    """The columns of all files. If types differ, a column gets a type that holds both; without one `mixed` decides.

    schemas: each with the name of its file.
    """
    types: dict[str, pa.DataType | None] = {}
    first_files: dict[str, str] = {}
    odd: dict[str, str] = {}
    extended: dict[str, pa.Field] = {}
    for file, field in ((file, field) for file, schema in schemas for field in schema):
        name = field.name
        type = None if is_json_column(field) else field.type
        if extension_of(field) is not None:
            extended.setdefault(name, field)
        known = types.get(name, type)
        types[name] = _merge(known, type, by_value=mixed is MixedTypes.REFUSED)
        if type is None or not pa.types.is_null(type):
            first_files.setdefault(name, file)
        if types[name] is None and known is not None:
            other = first_files.get(name, file)
            if mixed is MixedTypes.REFUSED:
                both_types = f"{known} in {other} and {type} in {file}"
                raise InputError(f"column {name!r} is {both_types}; write the files with one type")
            odd[name] = f"{_words(type)} in {file}, but {_words(known)} in {other}"
        if type is None:
            odd.setdefault(name, ", ".join(filter(None, [f"in {file}", odd_value(field)])))
    settled = [_settled_field(name, type, mixed, odd.get(name, "")) for name, type in types.items()]
    return pa.schema([_plain_field(extended[field.name], field.type) if field.name in extended else field
                      for field in settled])  # fmt: skip


def _settled_field(name: str, type: pa.DataType | None, mixed: MixedTypes, odd: str) -> pa.Field:
    # Parquet cannot hold a struct without fields.
    if mixed is MixedTypes.JSON and (type is None or any(map(_is_empty_struct, _and_inner(type)))):
        return _json_field(name, odd or "a mapping without keys")
    leaves = _SETTLED if mixed is MixedTypes.REFUSED else {**_SETTLED, _NARROW: pa.int64()}
    return pa.field(name, pa.string() if type is None else _plain(type, leaves))


def _is_empty_struct(type: pa.DataType) -> bool:
    return bool(pa.types.is_struct(type)) and not type.num_fields


def _merge(a: pa.DataType | None, b: pa.DataType | None, *, by_value: bool = False) -> pa.DataType | None:
    """A type that holds all values of both (null fits any type, structs join their fields), or None.

    by_value: floats may stand for wide integers, and nanoseconds for all times, because each value is checked when it
    is cast.
    """
    if a is None or b is None:
        return None
    if a.equals(b):
        return b
    schemas = [pa.schema([("", a)]), pa.schema([("", b)])]
    try:
        both = pa.unify_schemas(schemas, promote_options="permissive").field(0).type
    except pa.ArrowException:
        return None
    return both if all(_holds(both, promoted, by_value=by_value) for promoted in (a, b)) else None


def _holds(type: pa.DataType, promoted: pa.DataType, *, by_value: bool) -> bool:
    """Whether a type holds the values of one that Arrow promotes to it. Arrow makes int64 of uint64, for example."""
    if promoted.equals(type) or pa.types.is_null(promoted):
        return True
    if not promoted.num_fields:
        return _holds_numbers(type, promoted, by_value=by_value)
    places = [field.name for field in promoted] if pa.types.is_struct(promoted) else range(promoted.num_fields)
    return all(_holds(type.field(at).type, promoted.field(at).type, by_value=by_value) for at in places)


def _holds_digits(type: pa.DataType, promoted: pa.DataType) -> bool:
    """Whether a decimal type has all digits of a whole number or another decimal."""
    num_digits, scale = _DIGITS.get(promoted) or (promoted.precision - promoted.scale, promoted.scale)
    return bool(type.precision - type.scale >= num_digits and type.scale >= scale)


def _holds_numbers(type: pa.DataType, promoted: pa.DataType, *, by_value: bool) -> bool:
    is_integer = pa.types.is_integer(promoted)
    if pa.types.is_decimal(type) and (is_integer or pa.types.is_decimal(promoted)):
        return _holds_digits(type, promoted)
    if is_integer and pa.types.is_integer(type):
        num_bits = promoted.bit_width + (pa.types.is_signed_integer(type) and pa.types.is_unsigned_integer(promoted))
        return bool(type.bit_width >= num_bits)
    if pa.types.is_floating(type):
        return by_value or promoted.bit_width < 64 if is_integer else pa.types.is_floating(promoted)
    return True


def refuse_twins(names: Sequence[str], file_name: str) -> None:
    """Raise `InputError` if two columns of a file have one name."""
    if len(set(names)) < len(names):
        raise _two_columns(next(name for name in names if names.count(name) > 1), file_name)


def _two_columns(name: str, file_name: str) -> InputError:
    return InputError(f"{file_name} has two columns named {name!r}; rename one of them")


# -- plain types -----------------------------------------------------------------------------------------------------


_PLAIN = {pa.string_view(): pa.string(), pa.binary_view(): pa.binary()}
_SETTLED = {**_PLAIN, _NULL: pa.string()}
# In the schema of one file without types: integers that float64 holds, too. Wider ones are int64.
_NARROW = pa.int32()
_NARROW_MAX = 2**53
# Decimal digits before and behind the point.
_DIGITS = {
    pa.int8(): (3, 0), pa.int16(): (5, 0), pa.int32(): (10, 0), pa.int64(): (19, 0),
    pa.uint8(): (3, 0), pa.uint16(): (5, 0), pa.uint32(): (10, 0), pa.uint64(): (20, 0),
}  # fmt: skip


def plain_schema(schema: pa.Schema) -> pa.Schema:
    """The columns with their plain types, without metadata, and a remark on times in nanoseconds."""
    names = [field.name for field in schema if pa.time64("ns") in _and_inner(field.type)]
    words = f"times in nanoseconds ({list_names(names)}) are read to the microsecond" if names else ""
    return with_remark(pa.schema([_plain_field(field, _plain(field.type)) for field in schema]), words)


def _plain(type: pa.DataType, leaves: Mapping[pa.DataType, pa.DataType] = _PLAIN) -> pa.DataType:
    """The type without dictionaries and extension types, and with other types for `leaves`."""
    if isinstance(type, pa.DictionaryType):
        return _plain(type.value_type, leaves)
    if isinstance(type, pa.BaseExtensionType):
        return _plain(type.storage_type, leaves)
    if isinstance(type, pa.ListType):
        return pa.list_(_plain(type.value_type, leaves))
    if isinstance(type, pa.LargeListType):
        return pa.large_list(_plain(type.value_type, leaves))
    if isinstance(type, pa.StructType):
        return pa.struct([pa.field(field.name, _plain(field.type, leaves)) for field in type])
    return leaves.get(type, type)


def cast_column(column: Any, type: pa.DataType) -> Any:
    """An array in another type. Raises `pa.ArrowInvalid` if a value would change."""
    if column.type.equals(type):
        return column
    # In steps: Arrow casts a dictionary to its own values, but not to every other type, and not if they are views.
    first = column.type
    if isinstance(first, pa.DictionaryType):
        first = pa.dictionary(first.index_type, _plain(first.value_type))
    for step in (first, _plain(column.type), type):
        column = column if column.type.equals(step) else column.cast(step)
    return column


Lost = dict[int, str]  # by row: why the output cannot have a value of the row as it is


def cast_each(column: pa.ChunkedArray, cast: Callable[[Any], Any], type: pa.DataType) -> tuple[Any, dict[int, Any]]:
    """A column in another type, with null for values that would change, and these by their places."""
    chunks = []
    lost = {}
    for place in range(len(column)):
        value = column.slice(place, 1)
        try:
            chunks += cast(value).chunks
        except pa.ArrowInvalid:
            chunks.append(pa.nulls(1, type))
            lost[place] = value[0]
    return pa.chunked_array(chunks, type), lost


# -- JSON ------------------------------------------------------------------------------------------------------------


class JsonTypes:
    """The types of a file's JSON values, found from batches of records. A column that is mixed once stays JSON."""

    def __init__(self, scratch: Scratch) -> None:
        """scratch: gets an artifact with the columns beyond `MAX_COLUMNS`."""
        self.remark = ""
        """See `with_remark`."""
        self._types: dict[str, pa.DataType | None] = {}
        self._odd: dict[str, str] = {}
        self._scratch = scratch
        self._further: IO[bytes] | None = None

    def add(self, records: Sequence[Mapping[str, object]], rows: Callable[[], Sequence[int]]) -> None:
        """Merge the types of a batch of records with those before. rows: makes the records' numbers in the file."""
        further: list[pa.Field] = []
        for name, values in _by_name(records).items():
            if not is_utf8(name):
                continue
            if name not in self._types and len(self._types) >= MAX_COLUMNS:
                further.append(_json_or(name, _merge_values(_NULL, values)))
                continue
            known = self._types.get(name, _NULL)
            self._types[name] = None if known is None else _merge_values(known, values)
            if known is not None and self._types[name] is None:
                self._odd[name] = _first_odd(known, [record.get(name) for record in records], rows())
        if further:
            self._further = self._further or self._scratch.create(FURTHER_COLUMNS)
            self._further.write(further_line(pa.schema(further)))

    def schema(self) -> pa.Schema:
        """The columns in the order in which they first appeared."""
        fields = [_json_or(name, type, self._odd.get(name, "")) for name, type in self._types.items()]
        return with_remark(pa.schema(fields), self.remark)


def _json_or(name: str, type: pa.DataType | None, odd: str = "") -> pa.Field:
    return _json_field(name, odd) if type is None else pa.field(name, type)


def _merge_values(known: pa.DataType, values: Iterable[object]) -> pa.DataType | None:
    settled = _merge(known, _settle(values))
    return None if settled is None or sum(1 for _ in _and_inner(settled)) > MAX_NESTED else settled


def _first_odd(known: pa.DataType, values: Sequence[object], rows: Sequence[int]) -> str:
    """The first value that fits no type which holds those before it, in words."""
    for row, value in zip(rows, values, strict=True):
        both = _merge_values(known, [value])
        if both is None:
            before = "" if pa.types.is_null(known) else f", where earlier rows have {_words(known)}"
            return f"row {row:,} has {_words(_settle([value]), value)}{before}"
        known = both
    return f"up to row {rows[-1]:,}"  # no value is odd by itself: numbers that only together need more digits


def _words(type: pa.DataType | None, value: object = None) -> str:
    """A type of JSON values in words. value: one of this type."""
    if type is None:
        if isinstance(value, int):
            return "an integer of more than 64 bits"
        kind = "a list" if isinstance(value, list) else "a mapping" if isinstance(value, dict) else "values"
        return f"{kind} of several types"
    if pa.types.is_null(type):
        return "null"
    if pa.types.is_boolean(type):
        return "true or false"
    if is_text(type):
        return "a text"
    if pa.types.is_list(type):
        return f"a list ({type})"
    return f"a mapping ({type})" if pa.types.is_struct(type) else "a number"


def _by_name(records: Iterable[Mapping[str, object]]) -> Mapping[str, list[object]]:
    columns: defaultdict[str, list[object]] = defaultdict(list)
    for record in records:
        for name, value in record.items():
            columns[name].append(value)
    return columns


def is_utf8(text: str) -> bool:
    """Whether a text has no lone surrogates, which Arrow cannot hold."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


_OF_KIND: dict[type | None, pa.DataType] = {str: pa.string(), bool: pa.bool_()}


def _settle(values: Iterable[object], depth: int = 0) -> pa.DataType | None:
    """The type that holds all these JSON values unchanged, or None."""
    present: list[Any] = [value for value in values if value is not None]
    kinds = set(map(type, present))
    if kinds <= {int, float} and kinds:
        return _settle_numbers(present, kinds)
    if len(kinds) > 1 or depth > MAX_JSON_DEPTH:
        return None
    if kinds == {dict}:
        return _settle_struct(present, depth)
    if kinds == {list}:
        item = _settle(itertools.chain.from_iterable(present), depth + 1)
        return None if item is None else pa.list_(item)
    return _OF_KIND.get(next(iter(kinds), None), _NULL)


def _settle_numbers(numbers: list[Any], kinds: set[type]) -> pa.DataType | None:
    integers = numbers if kinds == {int} else [number for number in numbers if type(number) is int]
    least = min(integers, default=0)
    most = max(integers, default=0)
    if max(-least, most) <= _NARROW_MAX:
        return _NARROW if kinds == {int} else pa.float64()
    return pa.int64() if kinds == {int} and max(-least - 1, most) < 2**63 else None


def _settle_struct(records: Sequence[Mapping[str, object]], depth: int) -> pa.DataType | None:
    columns = _by_name(records)
    if len(columns) > MAX_NESTED or not all(map(is_utf8, columns)):
        return None
    fields = []
    for name, values in columns.items():
        if (settled := _settle(values, depth + 1)) is None:
            return None
        fields.append(pa.field(name, settled))
    return pa.struct(fields)


# -- CSV -------------------------------------------------------------------------------------------------------------

_INTEGER = r"^(0|-?[1-9][0-9]*)$"  # texts that str(int(v)) leaves as they are: 007 is a code, not a number
_NUMBER = r"^-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?$"
_EXACT_DIGITS = 15  # float64 holds every integer of so many digits exactly


class CsvTypes:
    """The types of CSV columns: int64 or float64 if that holds each non-empty value exactly, else string.

    As with JSON, `settled_schema` makes int64 of all integers.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._kinds: dict[str, set[str]] = {name: set() for name in names}

    def add(self, columns: Mapping[str, pa.StringArray]) -> None:
        """Merge the types of a batch of rows with those before."""
        for name, column in columns.items():
            if "string" not in self._kinds[name]:
                self._kinds[name] |= _csv_kinds(column.filter(pc.not_equal(column, "")))

    def schema(self) -> pa.Schema:
        """The columns in the order of the header."""
        return pa.schema([(name, _csv_type(kinds)) for name, kinds in self._kinds.items()])


def _csv_kinds(values: pa.StringArray) -> set[str]:
    if len(values) == 0:
        return set()
    is_integer = pc.match_substring_regex(values, _INTEGER)
    integers = values.filter(is_integer)
    kinds = {"integer"} if len(integers) else set()
    if len(integers) and pc.max(pc.binary_length(integers)).as_py() > _EXACT_DIGITS:
        kinds.add("long integer")
        try:
            integers.cast(pa.int64())
        except pa.ArrowInvalid:
            return {"string"}
    if len(integers) < len(values):
        is_number = pc.all(pc.match_substring_regex(values, _NUMBER)).as_py()
        # A larger number than any float would become an infinity.
        is_number = is_number and pc.all(pc.is_finite(values.cast(pa.float64()))).as_py()
        kinds.add("number" if is_number else "string")
    return kinds


def _csv_type(kinds: set[str]) -> pa.DataType:
    if not kinds:
        return pa.null()
    if kinds <= {"integer", "long integer"}:
        return _NARROW if kinds == {"integer"} else pa.int64()
    return pa.float64() if kinds <= {"integer", "number"} else pa.string()
