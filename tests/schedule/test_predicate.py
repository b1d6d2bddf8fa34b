"""Which rows a predicate means, and that it can do nothing but say so."""

import os
import signal
import threading

import numpy as np
import pyarrow as pa
import pytest

from batchinf.base.database import duckdb_batches
from batchinf.schedule.predicate import Predicate, PredicateError

SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("row_index", pa.int64()),
        ("Language", pa.string()),
        ("finish_reason", pa.string()),
        ("error_type", pa.string()),
        ("num_output_tokens", pa.int32()),
        ("logprobs", pa.list_(pa.float16())),
        ("top_logprobs", pa.list_(pa.list_(pa.float16()))),
        ("meta", pa.struct([("a", pa.int8())])),
    ]
)
ROWS = [
    ("a", 7, "en", "stop", None, 3, [-1.0], [[-1.0]], {"a": 1}),
    ("b", 8, "de", "length", None, 9, [-2.0, -3.0], [[], [-3.0]], {"a": 2}),
    ("it's", 9, "en", None, "refused", None, None, None, None),
]
TABLE = pa.Table.from_pylist([dict(zip(SCHEMA.names, row, strict=True)) for row in ROWS], SCHEMA)


@pytest.mark.parametrize(
    ("text", "rows", "columns"),
    [
        ("errors", [9], {"error_type"}),
        ("finish_reason = 'length'", [8], {"finish_reason"}),
        ("LANGUAGE = 'en' and num_output_tokens is null", [9], {"Language", "num_output_tokens"}),
        ("row_index in (7, 8)", [7, 8], set()),
        ("id = 'it''s' -- a remark", [9], {"id"}),
        ("logprobs[1] < -1 or top_logprobs[1][1] = -1", [7, 8], {"logprobs", "top_logprobs"}),
        ("meta.a = 2", [8], {"meta"}),
        ("null", [], set()),
        ("true", [7, 8, 9], set()),
    ],
)
def test_rows_that_match(text: str, rows: list[int], columns: set[str]) -> None:
    predicate = Predicate(text, SCHEMA)
    assert set(predicate.columns) == {"row_index", *columns}
    table = TABLE.select(predicate.columns)
    assert predicate.matches(table).tolist() == rows
    for index in range(3):
        assert predicate.matches(table.slice(index, 1)).tolist() == [row for row in rows if row == 7 + index]


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "empty"),
        ("num_output_tokens", "true or false, but is INTEGER"),
        ("finish_reson = 'length'", "finish_reson"),
        ("finish_reason = ", "syntax error"),
        ("((", "syntax error"),
        ("finish_reason", "true or false, but is VARCHAR"),
        ("num_output_tokens + meta > 3", None),
        ("true; drop table output", "syntax error"),
        ("1) union select (1", "one expression"),
        ("true) from range(3) where (true", "one expression"),
        ("true, false", None),
        ("true) as a, (false", "one expression"),
        ("?", None),
        ("row_index in (select 7)", "a query"),
        ("exists (from read_text('/etc/hostname'))", "a query"),
        ("(select count(*) from '/etc/hostname') > 0", "a query"),
        ("read_text('/etc/hostname') is not null", None),
        ("count(*) > 1", "aggregate"),
        ("sum(row_index) over () > 1", "a window"),
        ("nextval('x') = 1", None),
        ("random() < 0.5", "random() differs from one run to the next"),
        ("row_index > 3 and list_transform([1], x -> Random())[1] < 0.5", "random() differs"),
        ("uuid()::text < 'a'", "uuid() differs"),
        ("id::timestamp < now()", "now() differs"),
        ("id::timestamp < Current_Timestamp", "Current_Timestamp differs"),
        ("id::date < current_date", "current_date differs"),
        ("id::date < today() - 3", "today() differs"),
        ("id::timestamp < localtimestamp", "localtimestamp differs"),
        ("age(id::timestamp) > interval 3 days", "age() differs"),
        ("id::timestamp < ago(interval 3 days)", "ago() differs"),
    ],
)
def test_what_is_no_expression_about_a_row_is_one_clear_line(text: str, what: str | None) -> None:
    with pytest.raises(PredicateError) as caught:
        Predicate(text, SCHEMA)
    message = str(caught.value)
    assert "\n" not in message
    assert f"got {text!r}" in message
    assert what is None or what in message
    assert ", ".join(SCHEMA.names) in message


def test_rows_from_the_middle_of_a_table_with_structs_in_structs() -> None:
    table = pa.table({"row_index": [7, 8, 9], "meta": [{"a": {"b": 1}}, {"a": {"b": 2}}, None]})
    assert Predicate("meta.a.b >= 2", table.schema).matches(table.slice(1)).tolist() == [8]


def test_a_column_may_have_the_name_of_the_clock() -> None:
    schema = pa.schema({"row_index": pa.int64(), "Current_Date": pa.string(), "random": pa.int64()})
    table = pa.table([[0, 1], ["a", "b"], [7, 8]], schema=schema)
    for text in ("current_date = 'b'", "random = 8 and abs(random) = 8", "age(date '2020-01-02', date '2020-01-01') > "
                 "interval 1 hour and random = 8"):  # fmt: skip
        predicate = Predicate(text, schema)
        assert predicate.matches(table.select(predicate.columns)).tolist() == [1]


def test_a_value_that_does_not_fit_is_one_clear_line() -> None:
    predicate = Predicate("id::int = 3", SCHEMA)
    with pytest.raises(PredicateError, match="'a'"):
        predicate.matches(TABLE.select(predicate.columns))


def test_the_settings_cannot_be_changed_back() -> None:
    predicate = Predicate("true", SCHEMA)
    for statement in ("SET enable_external_access = true", "SELECT * FROM read_text('/etc/hostname')", "FROM TABLE"):
        with pytest.raises(Exception, match=r"(?i)config|disabled|exist|syntax"):
            predicate._connection.execute(statement).fetchall()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_amid_a_query_is_a_stop(number: signal.Signals) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    table = pa.table({"id": np.arange(1 << 14), "row_index": np.arange(1 << 14)})
    slow = Predicate("list_sum(list_transform(range(1500), lambda x: (x * id) % 7)) > 0", table.schema, "input")
    table = table.rename_columns({"row_index": slow.key}).select(slow.columns)
    before = signal.signal(number, interrupt)
    timer = threading.Timer(0.1, os.kill, (os.getpid(), number))
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            slow.matches(table)
    finally:
        timer.join()
        signal.signal(number, before)


def test_columns_that_differ_in_case_alone() -> None:
    schema = pa.schema({"row_index": pa.int64(), "Lang": pa.string(), "lang": pa.string(), "lang_1": pa.int64()})
    table = pa.table([[0, 1], ["en", "de"], ["de", "en"], [7, 8]], schema=schema)

    def rows(text: str) -> list[int]:
        predicate = Predicate(text, schema)
        return predicate.matches(table.select(predicate.columns)).tolist()

    assert (rows("lang = 'en'"), rows("Lang = 'en'"), rows("\"lang\" = 'de'")) == ([1], [0], [0])
    assert (rows("output.Lang = 'de'"), rows("LANG_1 = 8 AND lang = 'en'"), rows("Row_Index = 0")) == ([1], [1], [0])
    with pytest.raises(PredicateError, match="column 'LANG' may be Lang or lang"):
        Predicate("LANG = 'en'", schema)


@pytest.mark.parametrize("name", ["to_arrow_reader", "fetch_arrow_reader"])
def test_results_are_read_under_the_names_of_both_major_versions_of_duckdb(name: str) -> None:
    class Relation:
        pass

    setattr(Relation, name, lambda self, num_rows: TABLE.to_reader(num_rows))
    assert pa.Table.from_batches(duckdb_batches(Relation(), 2)).equals(TABLE)
    assert [batch.num_rows for batch in duckdb_batches(Relation(), 2)] == [2, 1]
