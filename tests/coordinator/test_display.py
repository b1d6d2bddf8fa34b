"""The display of a running job: its bar at every width, its lines, errors by kind, and starting engines."""

import io
import json
from collections.abc import Callable
from typing import Any

import pytest
from rich.cells import cell_len
from tqdm.utils import disp_len

import batchinf
import jobs
from batchinf.base.text import QUOTE, wrapped
from batchinf.coordinator import display as shown
from batchinf.coordinator.display import ProgressDisplay, figures, fit, status_line
from batchinf.fleet.status import JobStatus, ReplicaStatus


class Terminal(io.StringIO):
    """A terminal; it may be gone."""

    is_gone = False

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if self.is_gone:
            raise BrokenPipeError(32, "Broken pipe")
        return super().write(text)


def status_with(**fields: Any) -> JobStatus:
    first: dict[str, Any] = {
        "state": "running",
        "num_rows": 100,
        "num_rows_done": 40,
        "num_errors": 3,
        "errors": {"empty_prompt": 2, "refused": 1},
        "num_shards": 10,
        "num_shards_done": 4,
        "num_prompt_tokens": 5000,
        "num_output_tokens": 7000,
        "prompt_tokens_per_s": 120.0,
        "output_tokens_per_s": 340.0,
        "left_s": 75.0,
        "stalled_by_disk_s": 0.0,
        "replicas": (replica(0),),
        "devices": (),
        "updated_at": 0.0,
    }
    return JobStatus(**{**first, **fields})


def replica(number: int, state: str = "running", detail: str = "") -> ReplicaStatus:
    return ReplicaStatus(number, state, "", detail, (), "", 1024, 900, 124, 0.5, None, 0, None)


LONG = {
    "num_rows": 12_345_678,
    "num_rows_done": 1_234_567,
    "num_errors": 14_321,
    "errors": {"prompt_too_long": 14_000, "invalid_sampling": 200, "empty_prompt": 100},
    "num_prompt_tokens": 98_765_432,
    "num_output_tokens": 123_456_789,
    "prompt_tokens_per_s": 123_456.0,
    "output_tokens_per_s": 98_765.0,
    "left_s": 36_000.0,
    "stalled_by_disk_s": 200.0,
    "replicas": tuple(replica(number) for number in range(8)),
}


def lines_at(width: int, monkeypatch: pytest.MonkeyPatch, **fields: Any) -> tuple[str, str]:
    """The bar's line and the line below it."""
    monkeypatch.setattr(shown, "terminal_width", lambda stream: width)
    terminal = Terminal()
    display = ProgressDisplay(terminal)
    display.show(status_with(**fields))
    texts = [text.strip("\r") for text in terminal.getvalue().replace("\x1b[A", "\n").split("\n")]
    display.close()
    below = [text for text in texts if "in flight" in text or "replica" in text or "the engines" in text]
    return next(text for text in reversed(texts) if "%|" in text), below[-1]


@pytest.mark.parametrize("width", [60, 80, 100, 160])
@pytest.mark.parametrize("fields", [{}, LONG, {**LONG, "state": "stopping"}])
def test_a_bar_of_ten_cells_and_no_word_cut(width: int, fields: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    bar, below = lines_at(width, monkeypatch, **fields)
    cells = bar.split("|")[1]
    assert disp_len(bar) <= width
    assert disp_len(below) <= width
    assert len(cells) >= 10
    whole = {text for figure in figures(status_with(**fields)) for text in figure}
    assert set(below.split(" · ")) <= whole
    rows = f"{status_with(**fields).num_rows_done:,}/"
    assert rows in bar
    assert "in flight" in below


def test_the_echo_of_ctrl_c_fits_behind_the_bar_and_is_erased(monkeypatch: pytest.MonkeyPatch) -> None:
    bar, _ = lines_at(80, monkeypatch, **LONG)
    assert disp_len(bar) + len("^C^C") <= 80
    assert "]\x1b[K" in bar
    terminal = Terminal()
    display = ProgressDisplay(terminal)
    display.show(status_with())
    display.say("SIGINT: finishing")
    display.close()
    assert "\x1b[KSIGINT: finishing\n" in terminal.getvalue()


def test_more_is_shown_where_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    _, narrow = lines_at(80, monkeypatch, **LONG)
    bar, wide = lines_at(160, monkeypatch, **LONG)
    assert "10h00m left" in bar
    kinds = "14,321 errors: 14,000 prompt_too_long, 200 invalid_sampling, 100 empty_prompt, 21 before"
    assert kinds in wide
    assert kinds not in narrow
    assert "14,321 errors, mostly prompt_too_long" in narrow


def test_what_is_known_before_a_row_is_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    # Each row of a scored job has several requests.
    of_requests = lines_at(400, monkeypatch, num_errors=2, errors={"image_not_found": 4})[1]
    assert "2 errors, in requests: 4 image_not_found" in of_requests
    none_done = {"num_rows_done": 0, "num_errors": 0, "errors": {}, "left_s": None}
    bar, below = lines_at(80, monkeypatch, **none_done)
    assert "0/100 output rows" in bar
    assert "left" not in bar
    assert below.startswith("1,024 in flight · out 340 tok/s · 0 errors")


def test_starting_engines_say_what_they_do(monkeypatch: pytest.MonkeyPatch) -> None:
    three = (
        replica(0, "starting the engine", "loading weights 57/191"),
        replica(1, "starting the engine", "compiling"),
        replica(2, "starting the engine", "compiling"),
    )
    _, below = lines_at(80, monkeypatch, state="starting", replicas=three, num_errors=0, errors={})
    assert below == "replica 0: loading weights 57/191 · replicas 1, 2: compiling"
    running = status_with(replicas=(replica(0), three[1]))
    assert "· 3 errors: 2 empty_prompt, 1 refused · replica 1: compiling · 7k tokens" in status_line(running)
    many = tuple(replica(number, "starting") for number in range(8))
    assert "8 replicas: starting" in fit(figures(status_with(state="starting", replicas=many)))


def test_engines_that_end_have_no_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    bar, below = lines_at(80, monkeypatch, state="ending", num_rows_done=100)
    assert bar.startswith("ending: 100%|")
    assert below == "ending the engines · 3 errors: 2 empty_prompt, 1 refused"
    stopped = fit(figures(status_with(state="ending")))
    assert stopped.startswith("writing the last rows and ending the engines · 3 errors")


def test_a_dead_replica_is_seen_at_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    one_dead = (replica(0), replica(1, "given up"))
    _, below = lines_at(80, monkeypatch, **{**LONG, "replicas": one_dead})
    assert "· 1/2 replicas up ·" in below
    bar, below = lines_at(80, monkeypatch, state="starting", replicas=(replica(0, "restarting"),))
    assert below == "replica 0: restarting · 3 errors: 2 empty_prompt, 1 refused"
    assert "left" not in bar


def test_the_bar_stays_below_other_lines() -> None:
    terminal = Terminal()
    display = ProgressDisplay(terminal)
    display.show(status_with())
    display.say("a line that stays")
    display.close()
    text = terminal.getvalue()
    assert "a line that stays\n" in text
    assert text.rindex("40/100") > text.index("a line that stays")
    display.say("without a bar")
    assert terminal.getvalue().endswith("\nwithout a bar\n")


def test_long_lines_break_between_words() -> None:
    terminal = Terminal()
    ProgressDisplay(terminal).say("word " * 40)
    lines = terminal.getvalue().splitlines()
    assert len(lines) == 3
    assert {word for line in lines for word in line.split()} == {"word"}
    terminal = Terminal()
    ProgressDisplay(terminal).say("漢字 " * 20 + "\x1b[2J\u202e")
    lines = terminal.getvalue().splitlines()
    assert max(map(cell_len, lines)) <= 80
    assert lines[-1].endswith("\\u001b[2J\\u202e")
    assert wrapped(f"  {QUOTE}" + "漢" * 50, Terminal()).splitlines() == ["  │ " + "漢" * 38, "  │ " + "漢" * 12]


@pytest.mark.parametrize("make", [Terminal, io.StringIO])
def test_a_display_that_is_gone_ends_no_job(make: Callable[[], io.StringIO], monkeypatch: pytest.MonkeyPatch) -> None:
    stream = make()
    display = ProgressDisplay(stream)
    display.show(status_with())
    monkeypatch.setattr(stream, "write", Terminal.write.__get__(_gone()))
    display.show(status_with(state="stopping"))
    display.say("nobody hears this")
    display.close()


def _gone() -> Terminal:
    terminal = Terminal()
    terminal.is_gone = True
    return terminal


def test_a_plain_line_for_each_state_and_each_half_minute() -> None:
    stream = io.StringIO()
    display = ProgressDisplay(stream)
    for state in ("starting", "running", "running", "done"):
        display.show(status_with(state=state))
    display._next_line = 0.0
    display.show(status_with(state="done"))
    lines = stream.getvalue().splitlines()
    assert [line.partition(":")[0] for line in lines] == ["starting", "running", "done", "done"]
    assert lines[1] == (
        "running: 40/100 output rows · 1m15s left · 1,024 in flight · out 340 tok/s · "
        "3 errors: 2 empty_prompt, 1 refused · 7k tokens generated · in 120 tok/s · 1/1 replicas up"
    )


def test_a_terminal_without_unicode_gets_commas() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    assert shown._separator(stream) == ", "


def test_quiet_shows_warnings_alone() -> None:
    terminal = Terminal()
    display = ProgressDisplay(terminal, is_quiet=True)
    display.say("a note")
    display.show(status_with())
    display.say("warning: a warning")
    display.close()
    assert terminal.getvalue() == "warning: a warning\n"


def test_json_lines(tmp_path: Any) -> None:
    path = jobs.spec_of(tmp_path, input={"limit": 20}, parallel={"data_parallel_size": 1})
    done = jobs.finish(path, "--log-format", "json")
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert {line["level"] for line in lines} <= {"info", "warning"}
    progress = [line["progress"] for line in lines if "progress" in line]
    assert progress[-1]["state"] == "done"
    assert progress[-1]["num_rows_done"] == 20
    refused = jobs.run("run", path, "--log-format", "json", "--set", "sampling.max_tokens=3")
    [error] = [json.loads(line) for line in refused.stderr.splitlines()]
    assert refused.returncode == 2
    assert error["level"] == "error"
    assert "sampling.max_tokens" in error["message"]


@pytest.mark.slow
@pytest.mark.usefixtures("quick_replicas")
def test_errors_are_counted_by_kind_though_a_replica_dies(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"id": str(i), "prompt": "" if i % 10 == 0 else "word " * (900 if i % 10 == 1 else 2)} for i in range(100)]
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    sections = {
        "input": {"path": str(data)},
        "output": {"keep_columns": []},
        "scripted": {"max_model_len": 512, "step_s": 0.02},
        "parallel": {"data_parallel_size": 1},
        "max_error_rate": 1.0,
    }
    path = jobs.spec_of(tmp_path, **sections)
    for name, value in {"FAULTS": "engine.step:150=kill", "FAULTS_ONCE": str(tmp_path)}.items():
        monkeypatch.setenv(f"BATCHINF_{name}", value)
    shown: list[JobStatus] = []
    batchinf.run(path, progress=shown.append)
    assert len(jobs.events_of(tmp_path / "out", "replica_started")) == 2
    errors = [row["error_type"] for row in jobs.rows_of(tmp_path / "out") if row["error_type"]]
    assert shown[-1].errors == {"empty_prompt": 10, "prompt_too_long": 10}
    assert shown[-1].num_errors == len(errors) == 20
    # While the job runs, an error counts once: as one of an open part, and then as one of a closed part.
    running = [status for status in shown if status.state == "running"]
    assert any(status.errors and 0 < status.num_shards_done < status.num_shards for status in running)
    for status in shown:
        assert sum(status.errors.values()) == status.num_errors
        assert max(status.errors.values(), default=0) <= 10
