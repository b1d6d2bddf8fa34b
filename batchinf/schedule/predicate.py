"""Predicates of users: DuckDB expressions over the columns of the output or the input. Rows match if they are true.

DuckDB evaluates them on one batch of rows at a time, as a table in memory. An expression cannot read files, run
statements or use other rows.
"""

import contextlib
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from batchinf.base.database import duckdb_errors, open_duckdb, register
from batchinf.base.errors import UserError
from batchinf.base.text import list_names

ERRORS_WORD = "errors"
_SHORT = {ERRORS_WORD: "error_type IS NOT NULL"}
_KEY = "row_index"
_NOT_OF_ONE_ROW = {"SUBQUERY": "a query", "WINDOW": "a window over rows", "PARAMETER": "a parameter"}
# Names that SQL reads as functions of the clock unless a column is named so, and functions that use the clock although
# DuckDB calls them consistent.
_CLOCK_WORDS = {"current_date", "current_time", "current_timestamp", "localtime", "localtimestamp"}
_OF_THE_CLOCK = {"ago", "current_localtime", "current_localtimestamp", *_CLOCK_WORDS}
_NO_COLUMN = re.compile('^Binder Error: Referenced column "(.*)" not found in FROM clause!?$')


class PredicateError(UserError):
    """A predicate that is not a condition on one row."""


class Predicate:
    """A checked expression. columns: the columns that `matches` needs, including `key`."""

    def __init__(
        self, text: str, schema: pa.Schema, table: Literal["output", "input"] = "output", *, option: str = "--retry"
    ) -> None:
        """schema: of the table. option: that of the command, for messages about the output.

        Raises PredicateError, which says what is wrong and lists the columns. Rows of the input get one more column,
        `key`, with their positions.
        """
        self.text = text
        self._option = option
        self._table = table
        self._names = schema.names
        self._named = _names_for_duckdb(schema.names)
        self.key = _KEY
        if table == "input":
            self.key = _free_name(schema.names)
            schema = schema.append(pa.field(self.key, pa.int64()))
            self._named[self.key] = self.key
        self._schema = schema
        self._expression = _SHORT.get(text.strip(), text) if table == "output" else text
        self._connection = _connect("input.where" if table == "input" else option)
        self.columns = self._columns_in(self._parse())
        self._check_type()

    def _columns_in(self, nodes: list[dict[str, Any]]) -> list[str]:
        mentioned = {part.lower() for node in nodes for part in node.get("column_names", ())}
        reads_all = any(node.get("class") == "STAR" for node in nodes)
        return [
            name
            for name in self._schema.names
            if reads_all or name == self.key or self._named[name].lower() in mentioned
        ]

    def matches(self, table: pa.Table) -> npt.NDArray[np.int64]:
        """The `key` of the rows for which the expression is true, not null. table: with the columns `self.columns`."""
        return np.asarray(table.column(self.key), np.int64)[self.mask(table)]

    def mask(self, table: pa.Table) -> npt.NDArray[np.bool_]:
        """For each row of the table, whether the expression is true, not null. table: as in `matches`."""
        query = f"SELECT coalesce(({self._expression}\n), false) AS is_true FROM {self._table}"
        is_true: npt.NDArray[np.bool_] = np.asarray(self._ask(query, table.select(self.columns))["is_true"], np.bool_)
        return is_true

    def _check_type(self) -> None:
        # DuckDB casts any value to a boolean, and fails only at a row where it cannot.
        query = f"DESCRIBE SELECT ({self._expression}\n) FROM {self._table} WHERE ({self._expression}\n)"
        types = {str(type) for type in self._ask(query, self._schema.empty_table().select(self.columns))["column_type"]}
        if not types <= {"BOOLEAN", '"NULL"'}:
            raise self._wrong(f"it must be true or false, but is {' and '.join(sorted(types))}")

    def _ask(self, query: str, table: pa.Table) -> Any:
        import duckdb

        try:
            with duckdb_errors(self._wrong):
                fields = [field.with_type(without_half_floats(field.type)) for field in table.schema]
                named = table.cast(pa.schema(fields)).rename_columns([self._named[name] for name in table.column_names])
                register(self._connection, self._table, named)
                return self._connection.execute(query).fetchnumpy()
        finally:
            # After a stop, the interrupted query still holds the connection, so this fails. Only the stop is raised.
            with contextlib.suppress(duckdb.Error):
                self._connection.unregister(self._table)

    def _parse(self) -> list[dict[str, Any]]:
        """All nodes of the expression's tree. Raises PredicateError unless it is one expression about one row."""
        if not self._expression.strip():
            raise self._wrong("it is empty")
        tree = self._tree(self._expression)
        if tree.get("error"):
            raise self._wrong(tree.get("error_message", "it cannot be parsed"))
        expressions = _take_list(tree)
        plain = self._tree("true")
        _take_list(plain)
        # Except for the select list, the statement must equal that of `true`: no FROM, no UNION, no second statement.
        if _without_places(tree) != _without_places(plain) or len(expressions) != 1:
            raise self._wrong("it must be one expression, not a statement")
        nodes = list(_walk(expressions))
        self._check_nodes(nodes)
        if any(name != alias for name, alias in self._named.items()):
            self._rename(nodes)
            [statement] = tree["statements"]
            statement["node"]["select_list"] = expressions
            query = "SELECT json_deserialize_sql(?)"
            [row] = self._connection.execute(query, [json.dumps(tree)]).fetchall()
            self._expression = row[0].removeprefix("SELECT ")
        return nodes

    def _check_nodes(self, nodes: list[dict[str, Any]]) -> None:
        """Raise PredicateError if the value needs other rows, or may differ from one run to the next."""
        for node in nodes:
            if (what := _NOT_OF_ONE_ROW.get(node.get("class", ""))) is not None:
                raise self._wrong(f"it must use the columns of one row only, but it has {what}")
        changing = {*_OF_THE_CLOCK, *self._volatile()} if any(_is_call(node) for node in nodes) else set()
        names = filter(None, (self._changing(node, changing) for node in nodes))
        if (name := next(names, None)) is not None:
            raise self._wrong(
                f"{name} differs from one run to the next, but a run must be able to choose the same rows again; "
                "write a value in its place" + (", or set input.sample" if self._table == "input" else "")
            )

    def _changing(self, node: dict[str, Any], functions: set[str]) -> str | None:
        """The node's function, if its value depends on chance, the clock or the session."""
        name = str(node.get("function_name", "")).lower()
        num_arguments = len(node.get("arguments") or node.get("children") or ())  # DuckDB 2 renamed them
        if name in functions or (name == "age" and num_arguments == 1):
            return f"{name}()"
        path = node.get("column_names", ())
        is_word = len(path) == 1 and path[0].lower() in _CLOCK_WORDS.difference(map(str.lower, self._names))
        return str(path[0]) if is_word else None

    def _volatile(self) -> set[str]:
        query = "SELECT DISTINCT function_name FROM duckdb_functions() WHERE stability <> 'CONSISTENT'"
        return {name for [name] in self._connection.execute(query).fetchall()}

    def _alike(self, name: str) -> list[str]:
        """The column of this name; without one, those whose names differ only in case."""
        return [name] if name in self._named else [other for other in self._named if other.lower() == name.lower()]

    def _rename(self, nodes: list[dict[str, Any]]) -> None:
        for path in (node["column_names"] for node in nodes if node.get("class") == "COLUMN_REF"):
            place = 1 if len(path) > 1 and path[0] == self._table and path[0] not in self._named else 0
            name = path[place]
            alike = self._alike(name)
            if len(alike) > 1:
                raise self._wrong(f"column '{name}' may be {' or '.join(alike)}; write one of these")
            if alike:
                path[place] = self._named[alike[0]]

    def _tree(self, expression: str) -> dict[str, Any]:
        query = "SELECT json_serialize_sql(?)"
        [row] = self._connection.execute(query, [f"SELECT ({expression}\n)"]).fetchall()
        tree: dict[str, Any] = json.loads(row[0])
        return tree

    def _wrong(self, what: str) -> PredicateError:
        # After its first line, DuckDB's message has the statement and suggests similar names.
        reason = re.split(r"\n\n|\nLINE |\s*Candidate bindings:", what)[0].replace("\n", " ").strip()
        missing = None
        if (match := _NO_COLUMN.search(reason)) is not None:
            missing = match[1]
            reason = f"there is no column '{missing}'"
            # In SQL, double quotes are for names. A name on the right of a comparison is more often meant as text.
            if re.search(rf"\"{re.escape(missing)}\"|[=<>]\s*{re.escape(missing)}\b", self.text):
                reason += f"; a text is in single quotes, '{missing}'"
        columns = list_names(self._names, missing)
        if self._table == "input":
            return PredicateError(
                f"got {self.text!r}: {reason}; must be an expression in SQL over the input's columns, such as "
                f"\"language = 'en'\"; columns: {columns}"
            )
        return PredicateError(
            f"{self._option}: got {self.text!r}: {reason}; must be `{ERRORS_WORD}` or an expression in SQL over the "
            f"output's columns, such as \"finish_reason = 'length'\"; columns: {columns}"
        )


def _names_for_duckdb(names: Sequence[str]) -> dict[str, str]:
    """A unique name for each column. For DuckDB, names that differ only in case are the same name."""
    counts = Counter(name.lower() for name in names)
    taken = set(counts)
    named = {}
    for name in names:
        aliases = (f"{name}_{number}" for number in itertools.count(1))
        alias = name
        while counts[name.lower()] > 1 and alias.lower() in taken:
            alias = next(aliases)
        taken.add(alias.lower())
        named[name] = alias
    return named


def _free_name(names: Iterable[str]) -> str:
    taken = {name.lower() for name in names}
    name = _KEY
    while name in taken:
        name = f"_{name}"
    return name


def _connect(needed_by: str) -> Any:
    try:
        # Then an expression can access nothing outside of memory, and it cannot change this.
        return open_duckdb(enable_external_access="false")
    except ImportError:
        raise PredicateError(f"{needed_by} needs DuckDB: pip install duckdb") from None


def _take_list(tree: dict[str, Any]) -> list[Any]:
    nodes = (statement.get("node", {}) for statement in tree.get("statements", ()))
    return [item for node in nodes for item in node.pop("select_list", [])]


def _without_places(tree: Any) -> Any:
    """A statement's tree without the places of its parts in the text: equal statements then have equal trees."""
    if isinstance(tree, dict):
        return {key: _without_places(value) for key, value in tree.items() if not key.startswith("query_location")}
    return [_without_places(item) for item in tree] if isinstance(tree, list) else tree


def _is_call(node: dict[str, Any]) -> bool:
    return node.get("class") == "FUNCTION" and not node.get("is_operator")


def _walk(tree: Any) -> Iterator[dict[str, Any]]:
    if isinstance(tree, dict):
        yield tree
    for item in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ():
        yield from _walk(item)


def without_half_floats(type: pa.DataType) -> pa.DataType:
    """The type with float32 instead of float16, because DuckDB has no float16."""
    if pa.types.is_float16(type):
        return pa.float32()
    if pa.types.is_list(type):
        return pa.list_(type.value_field.with_type(without_half_floats(type.value_type)))
    return type
