"""What a job over a sample says of all rows."""

import json
import pathlib
import re

import pytest

import jobs
from batchinf.base.text import size_text, time_text
from batchinf.coordinator.ending import _idle_s
from batchinf.manifest.events import EVENTS_FILE, EventLine


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "1 s"), (75, "75 s"), (100, "2 min"), (5400, "90 min"), (7000, "1.9 h"), (412 * 3600, "412.0 h")],
)
def test_times_are_in_one_unit(seconds: float, text: str) -> None:
    assert time_text(seconds) == text


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(10, "10 bytes"), (230_400, "230.4 kB"), (2_140_000, "2.1 MB"), (96.4e9, "96.4 GB"), (1.25e13, "12.5 TB")],
)
def test_sizes_are_in_one_unit(num_bytes: float, text: str) -> None:
    assert size_text(num_bytes) == text


def test_engines_that_start_or_end_run_no_rows() -> None:
    # Half a device each: 10 s to start, 5 s of rows, 3 s and 4 s to end; then one that dies while it starts.
    def at(second: int, name: str, **fields: object) -> EventLine:
        return EventLine(name, f"2026-01-01T00:00:{second:02d}+00:00", fields)

    devices: dict[str, object] = {"devices": ["0"], "num_devices": 0.5}
    events = [
        at(0, "replica_started", replica=0, incarnation="a", **devices),
        at(0, "replica_started", replica=1, incarnation="b", **devices),
        at(10, "ready", replica=0),
        at(10, "ready", replica=1),
        at(15, "all_committed"),
        at(18, "replica_ended", incarnation="a", device_s=9.0),
        at(19, "replica_ended", incarnation="b", device_s=9.5),
        at(20, "replica_started", replica=0, incarnation="c", **devices),
        at(27, "replica_ended", incarnation="c", device_s=3.5),
    ]
    assert 9.0 + 9.5 + 3.5 - _idle_s(events) == 2 * 0.5 * 5.0


def test_it_says_what_it_rests_on(tmp_path: pathlib.Path) -> None:
    rows = [json.loads(line) for line in jobs.PROMPTS.read_text(encoding="utf-8").strip().split("\n")[:80]]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({**row, "padding": "x" * (1 << 17)}) + "\n" for row in rows))
    scripted = {"max_num_seqs": 64}
    given = {"path": str(path), "sample": 0.25}
    spec = jobs.spec_of(tmp_path, input=given, parallel={"data_parallel_size": 1}, scripted=scripted)
    # The engine is up long before there are rows.
    done = jobs.finish(spec, faults="start.replicas=sleep 8")
    state = jobs.state_of(tmp_path / "out")
    assert state.device_s > 8
    num_run = state.counts.num_rows
    found = re.search(
        rf"^forecast from {num_run} input rows, which took (\d) s of replica time: all 80 input rows take at most "
        r"(\d+) s and [\d.]+ [kM]B, plus the start of the engines$",
        done.stdout,
        re.MULTILINE,
    )
    assert found is not None, done.stdout
    assert int(found[1]) <= max(1, state.device_s - 7.5)
    assert "do not fill the engines, which run 64 requests at once" in done.stdout
    # It is for people: without its events, only the forecast is missing.
    (tmp_path / "out" / EVENTS_FILE).unlink()
    again = jobs.finish(spec)
    assert "forecast" not in again.stdout
    assert again.stdout.startswith(f"was already done: {num_run} output rows")
