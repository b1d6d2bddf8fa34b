"""The same rows, prompts and reports in every environment: time zone, language, home, umask, hashes, -O and cores."""

import datetime
import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import jobs

WHERE = (
    "hour(seen) >= 20",
    "seen::DATE = '2024-03-31'",
    "seen > '2024-03-31 01:30:00'",
    "date_trunc('day', seen) = TIMESTAMPTZ '2024-03-30 00:00:00+00'",
    "extract(dow FROM seen) = 6 OR strftime(seen, '%p') = 'PM'",
    "plain > '2024-03-31 12:00' OR plain::TIMESTAMPTZ < seen",
    "upper(name) = 'ID-3' OR name < 'id-2' OR lower(name) LIKE '%I'",
    "monthname(seen) = 'March' AND number / 2 > 10",
)
TEMPLATES = (
    "{{ seen }} {{ plain }} {{ seen.isoformat() }}",
    "{{ plain.strftime('%A %d %B %Y, %H:%M') }}",
    "{{ name | upper }} {{ '%.2f' | format(number) }} {{ {'b': 1, 'a': name} | tojson }}",
    "{{ plain.timestamp() }}",
    "{{ seen.astimezone() }}",
    "{{ seen.now() }}",
    "{{ plain.strftime('%s') }}",
    "{{ name.upper }}",
)
# Every command that reads or chooses rows; what it prints and the code that it exits with.
COMMANDS = (
    ("validate", "{folder}/where.yaml", "-n", "3", "--json"),
    ("validate", "{folder}/job.yaml", "-n", "2"),
    ("head", "{folder}/out", "--json"),
    ("head", "{folder}/out", "--row", "id-3", "--json"),
    ("diff", "{folder}/out", "{folder}/out", "--json"),
    ("status", "{folder}/out", "--json"),
    ("check", "{folder}/out", "--deep"),
)
PROBE = """
import contextlib, io, json, os, pathlib, sys, tempfile
os.umask(int(sys.argv[3], 8))
folder, (where, templates, commands) = pathlib.Path(sys.argv[1]), json.loads(sys.argv[2])
from batchinf.base.storage import Folder
from batchinf.cli import app
from batchinf.job.choose import choose
from batchinf.job.open import open_job
from batchinf.prompts.encoder import load_tokenizer
from batchinf.spec.file import read_spec
import batchinf
found = []
with tempfile.TemporaryDirectory() as scratch:
    for text in where:
        file = read_spec(folder / "job.yaml", [f"input.where={json.dumps(text)}", f"output.path={scratch}/out"])
        job = open_job(file, folder / "cache")
        choice = choose(job, range(job.source.num_rows), Folder(scratch), limit=None)
        found.append(list(choice))
    file = read_spec(folder / "job.yaml", ["input.sample=0.5", f"output.path={scratch}/out"])
    found.append(list(choose(job, range(job.source.num_rows), Folder(scratch), limit=None)))
for text in templates:
    job = open_job(read_spec(folder / "job.yaml", [f"input.prompt_template={json.dumps(text)}"]), folder / "cache")
    builder = job.task.prompt_builder(load_tokenizer(job.model.tokenizer, False), None)
    prompts = builder.build(job.source.read(0, 3, builder.columns), 512)
    found.append([[prompt.token_ids, prompt.error and prompt.error.error_message] for prompt in prompts])
for command in commands:
    out = io.StringIO()
    code = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        try:
            app([word.format(folder=folder) for word in command], standalone_mode=False)
        except SystemExit as error:
            code = error.code
    found.append([command[0], code, out.getvalue()])
found.append(str(batchinf.open(folder / "out").table(["id", "text", "seen", "row_index"]).to_pydict()))
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A finished job over times with and without a zone."""
    folder = tmp_path_factory.mktemp("environments")
    start = datetime.datetime(2024, 3, 30, 12, tzinfo=datetime.UTC)
    times = [start + datetime.timedelta(hours=hour) for hour in range(48)]
    table = pa.table(
        {
            "name": [f"id-{i}" if i % 5 else "İSTANBUL i" for i in range(48)],
            "prompt": [f"Say {i}." for i in range(48)],
            "seen": pa.array(times, pa.timestamp("us", "Europe/Berlin")),
            "plain": pa.array([time.replace(tzinfo=None) for time in times], pa.timestamp("us")),
            "number": list(range(48)),
        }
    )
    pq.write_table(table, folder / "rows.parquet")
    input = {"path": str(folder / "rows.parquet"), "id_column": "name"}
    given = {"output": {"keep_columns": ["seen"]}, "parallel": {"data_parallel_size": 1}, "scripted": {"step_s": 0.0}}
    jobs.spec_of(folder, input={**input, "where": WHERE[0]}, **given).rename(folder / "where.yaml")
    jobs.finish(jobs.spec_of(folder, input=input, **given))
    return folder


def found_in(folder: pathlib.Path, *options: str, umask: str = "022", **environment: str) -> list[Any]:
    probed = json.dumps([WHERE, TEMPLATES, COMMANDS])
    command = [sys.executable, *options, "-c", PROBE, str(folder), probed, umask]
    env = {**jobs.inherited(), **jobs.quick_start(), "TZ": "UTC", **environment}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: list[Any] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def here(folder: pathlib.Path) -> list[Any]:
    return found_in(folder)


@pytest.mark.slow
def test_what_is_found(here: list[Any]) -> None:
    """The table compares something: rows are chosen and prompts made, and what depends on the machine is an error."""
    assert [len(rows) for rows in here[:4]] == [8, 24, 34, 12]
    prompts = here[len(WHERE) + 1 :][: len(TEMPLATES)]
    assert [prompt[0][1] is None for prompt in prompts] == [True] * 3 + [False] * 5
    assert all("depends on the machine" in prompt[0][1] for prompt in prompts[3:7])
    assert "prints the method 'upper'" in prompts[7][0][1]
    assert [code for _, code, _ in here[-len(COMMANDS) - 1 : -1]] == [0] * len(COMMANDS)


OTHERS: dict[str, dict[str, Any]] = {
    "all at once": {
        "TZ": "Asia/Tokyo", "LANG": "tr_TR.UTF-8", "LC_ALL": "tr_TR.UTF-8", "HOME": "/nonexistent", "umask": "077",
        "PYTHONHASHSEED": "1", "PYTHONOPTIMIZE": "1", "OMP_NUM_THREADS": "1",
    },
    "new york, german": {
        "TZ": "America/New_York", "LANG": "de_DE.UTF-8", "LC_ALL": "de_DE.UTF-8", "umask": "000",
        "PYTHONHASHSEED": "4711",
    },
    "half an hour, posix": {"TZ": "Asia/Kolkata", "LANG": "C", "LC_ALL": "POSIX", "HOME": "/nonexistent"},
    "no such zone": {"TZ": "Mars/Base"},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("other", list(OTHERS))
def test_an_environment_changes_nothing(other: str, folder: pathlib.Path, here: list[Any]) -> None:
    assert found_in(folder, **OTHERS[other]) == here


@pytest.mark.slow
def test_neither_do_dash_o_and_other_cores(folder: pathlib.Path, here: list[Any]) -> None:
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert found_in(folder, "-OO") == here
    finally:
        os.sched_setaffinity(0, before)
