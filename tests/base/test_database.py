"""DuckDB gives the same results on every machine: one function opens it, with settings that are the same everywhere."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

import batchinf
from batchinf.base.database import open_duckdb

QUERIES = (
    "SELECT hour(TIMESTAMPTZ '2024-01-01 23:30:00+00')",
    "SELECT (TIMESTAMPTZ '2024-01-01 23:30:00+00')::DATE::VARCHAR",
    "SELECT TIMESTAMPTZ '2024-01-01 23:30:00+00' > '2024-01-01 23:15:00'",
    "SELECT strftime(TIMESTAMPTZ '2024-07-01 23:30:00+00', '%H %Z %B')",
    "SELECT date_trunc('day', TIMESTAMPTZ '2024-01-01 23:30:00+00')::VARCHAR",
    "SELECT TIMESTAMP '2024-01-01 23:30:00' = TIMESTAMPTZ '2024-01-01 23:30:00+00'",
    "SELECT current_setting('threads')::VARCHAR || current_setting('Calendar') || current_setting('default_collation')",
    "SELECT [x FOR x IN list_sort(['b', NULL, 'É', 'a', 'e'])]",
    "SELECT 1.0 / 0, 7 / 2",
)
PROBE = """
import json, sys
from batchinf.base.database import open_duckdb
connection = open_duckdb(enable_external_access="false")
print(json.dumps([connection.execute(query).fetchall() for query in json.loads(sys.argv[1])]))
"""


def test_nothing_else_opens_duckdb() -> None:
    package = pathlib.Path(batchinf.__file__).parent
    opens = re.compile(r"duckdb\.(connect|sql|query|execute|from_|read_|default_connection)")
    found = [path.name for path in package.rglob("*.py") if opens.search(path.read_text())]
    assert found == ["database.py"]


@pytest.mark.parametrize(
    "environment",
    [
        {"TZ": "America/New_York", "LANG": "de_DE.UTF-8", "LC_ALL": "C", "HOME": "/nonexistent", "PYTHONHASHSEED": "1"},
        {"TZ": "Asia/Tokyo", "LC_ALL": "tr_TR.UTF-8", "PYTHONHASHSEED": "2", "PYTHONOPTIMIZE": "1"},
    ],
    ids=["new york", "tokyo"],
)
def test_results_do_not_depend_on_the_environment(environment: dict[str, str]) -> None:
    connection = open_duckdb(enable_external_access="false")
    here = json.loads(json.dumps([connection.execute(query).fetchall() for query in QUERIES]))
    assert here[:3] == [[[23]], [["2024-01-01"]], [[True]]]
    command = [sys.executable, "-c", PROBE, json.dumps(QUERIES)]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == here


def test_no_statement_changes_a_setting() -> None:
    with pytest.raises(Exception, match="locked"):
        open_duckdb().execute("SET TimeZone = 'Asia/Tokyo'")
