"""The end of a run: each kind of error with an example, the speed, and what a stop has kept."""

import dataclasses
import json
import pathlib
import re
import signal
import threading
import time
from typing import Any

import pytest
import yaml

import batchinf
import jobs
from batchinf.base import process
from batchinf.base.slices import job_folders
from batchinf.base.stop_signals import StopRequests
from batchinf.base.storage import Folder
from batchinf.base.text import ErrorGroup, counted, without_numbers
from batchinf.commands.status import _job_state
from batchinf.coordinator.ending import _image_folder, finished
from batchinf.fleet import launch
from batchinf.manifest.lines import Platform, record_line
from batchinf.manifest.lock import Holder
from batchinf.manifest.state import read_state
from batchinf.model.memory import Fit, fit_of
from batchinf.output import journal
from batchinf.report.page import write_report
from batchinf.spec.file import read_spec
from batchinf.spec.input import InputSpec

pytestmark = pytest.mark.usefixtures("quick_replicas")

MODEL = str(jobs.MODEL)
QUICK = {"scripted": {"step_s": 0.0}, "parallel": {"data_parallel_size": 1}}


def test_the_folder_of_relative_paths_is_named_if_a_path_was_not_found(tmp_path: pathlib.Path) -> None:
    (tmp_path / "rows.jsonl").touch()
    where = InputSpec(path=str(tmp_path / "rows.jsonl"))
    messages = ("'https://host/a.png' does not exist: the server answered with status 404", "'a.png' does not exist")
    of_url, of_path = (ErrorGroup("image_not_found", 1, 0, f"image 1: {message}") for message in messages)
    assert [_image_folder(where, errors) for errors in ([of_url], [of_url, of_path])] == [None, str(tmp_path)]


def test_each_kind_of_error_is_told_with_one_example(tmp_path: pathlib.Path) -> None:
    texts = ["Once", "", "A" * 100_000, "B" * 200_000, *["Once upon a time"] * 40]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"prompt": text}) for text in texts))
    where = {"path": str(tmp_path / "rows.jsonl"), "id_column": None}
    output = {"keep_columns": [], "path": str(tmp_path / "my out")}
    sections = {"input": where, "output": output, "max_error_rate": 0.5, **QUICK}
    spec = yaml.safe_load(jobs.spec_of(tmp_path, **sections).read_text())
    seen: list[batchinf.JobStatus] = []
    summary = batchinf.run(spec, quiet=True, progress=seen.append).summary
    # The rate counts the last rows, also of a job of less than a second.
    assert (seen[-1].state, (seen[-1].output_tokens_per_s or 0) > 0) == ("done", True)
    assert [(one.error_type, one.num_rows, one.first_row) for one in summary.errors] == [
        ("prompt_too_long", 2, 2),
        ("empty_prompt", 1, 1),
    ]
    lines = summary.lines()
    assert lines[-3].startswith("2 × prompt_too_long: got 100,000 characters")
    assert lines[-2] == "1 × empty_prompt: the prompt is an empty string (as in row_index 1)"
    assert lines[-1] == f"next: batchinf head '{tmp_path}/my out' --errors"
    again = batchinf.run(tmp_path / "job.yaml", quiet=True).summary
    assert again.lines()[-2:] == [
        lines[-1],
        f"run the error rows again: batchinf run {tmp_path}/job.yaml --retry errors",
    ]
    assert summary.speed is not None
    tokens = (summary.speed.prompt_tokens_per_s, summary.speed.output_tokens_per_s)
    assert 0 < summary.speed.work_s < summary.speed.run_s
    assert [round(rate * summary.speed.work_s) for rate in tokens] == [
        summary.num_prompt_tokens,
        summary.num_output_tokens,
    ]
    again = batchinf.run(spec, quiet=True).summary
    assert (again.was_done, again.speed, again.errors) == (True, None, summary.errors)
    with pytest.raises(batchinf.ErrorRateExceeded, match="2 × prompt_too_long: got 100,000"):
        batchinf.run(spec, overrides={"max_error_rate": 0}, quiet=True)


def test_a_start_that_counts_weights_for_long_says_so(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def slowly(*arguments: Any, **named: Any) -> Fit:
        time.sleep(0.3)
        return fit_of(*arguments, **named)

    monkeypatch.setattr(launch, "fit_of", slowly)
    spec = yaml.safe_load(jobs.spec_of(tmp_path, input={"limit": 2}, **QUICK).read_text())
    batchinf.run(spec)
    words = f"counting the weights of {MODEL} …"
    assert words not in capsys.readouterr().err
    monkeypatch.setattr(process, "_SLOW_S", 0.1)
    batchinf.run(spec, overrides=[f"output.path={tmp_path / 'other'}"])
    assert words in capsys.readouterr().err


def test_no_row_is_told_under_the_reason_of_another(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A type of error has many reasons: `unsupported_request` is a field, or another, of a batch file."""
    others = ("suffix", "stream", "echo", "suffixes")
    bodies = [
        *({"prompt": {"text": number}} for number in range(5)),
        *({"prompt": "a", "ignore_eos": value} for value in ("two", "'3", "é")),
        *({"prompt": "a", "top_p": value} for value in ("x", "y")),
        *({"prompt": "a", field: True} for field in others),
    ]
    lines = [{"custom_id": f"{place}", "method": "POST", "url": "/v1/completions", "body": {"model": MODEL, **body}}
             for place, body in enumerate([*bodies, {"prompt": "a"}])]  # fmt: skip
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    where = {"path": str(tmp_path / "rows.jsonl"), "id_column": None, "format": "openai"}
    sections = {"input": where, "output": {"keep_columns": []}, "max_error_rate": 1, "sampling": None, **QUICK}
    spec = jobs.spec_of(tmp_path, **sections)
    summary = batchinf.run(spec, quiet=True).summary
    rows = {row["row_index"]: row["error_message"] or "" for row in batchinf.open(summary.folder).table().to_pylist()}
    told = {one.first_row: one.num_rows for one in summary.errors}
    assert told == {0: 5, 5: 3, 8: 2, 10: 1, 11: 1, 12: 1, 13: 1}
    assert sum(told.values()) == len(bodies) == summary.num_errors
    for place, field in enumerate([*["body.prompt"] * 5, *["body.ignore_eos"] * 3, *["top_p"] * 2, *others]):
        assert f"{field}:" in rows[place], rows[place]
    shown = [line for line in summary.lines() if " × " in line]
    assert [line.split(" (as in ")[-1] for line in shown[:4]] == [f"row_index {place})" for place in (0, 5, 8, 10)]
    assert shown[4:] == ["3 × unsupported_request for 3 other reasons"]
    checked = str(batchinf.validate(spec))
    assert "\n    5 unsupported_request, first row 0: body.prompt" in checked
    assert "\n    3 × unsupported_request for 3 other reasons" in checked
    page = write_report(str(tmp_path / "out"), None).read_text()
    assert page.count("<td>unsupported_request</td>") == 6


@pytest.mark.parametrize(
    ("drain_s", "is_long"), [(0.0, True), pytest.param(30.0, False, marks=(pytest.mark.slow, pytest.mark.fewer_rows))]
)
def test_a_stop_says_what_is_kept(
    drain_s: float, is_long: bool, tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]
) -> None:
    scripted = {"max_num_seqs": 4, "step_s": 0.02}
    sections = {"scripted": scripted, "parallel": {"data_parallel_size": 1}, "drain_timeout_s": drain_s}
    spec, stop = yaml.safe_load(jobs.spec_of(tmp_path, **sections).read_text()), threading.Event()

    def tell(status: batchinf.JobStatus) -> None:
        if status.num_rows_done > 20:
            stop.set()

    with pytest.raises(batchinf.Interrupted) as raised:
        batchinf.run(spec, stop=stop, quiet=True, progress=tell)
    first, kept, again, left = str(raised.value).splitlines()
    out, state = tmp_path / "out", jobs.state_of(tmp_path / "out")
    assert first == "stopped on request"
    in_parts = rf"  kept: (\d+) of {jobs.num_fewer} output rows: (\d+) in (\d+) parts?"
    found = re.fullmatch(in_parts + r", and (\d+) finished requests? in the journal", kept)
    assert found is not None, kept
    num_all, num_rows, num_parts, num_kept = map(int, found.groups())
    assert (num_rows, num_parts) == (state.counts.num_rows, len(list((out / "parts").glob("*.parquet"))))
    assert num_kept == journal.num_results(Folder(out), {})
    stored = {row["row_index"] for row in batchinf.open(out).table(["row_index"]).to_pylist()}
    before = state.counts.num_rows + num_kept
    assert num_all == before
    assert len(stored) == state.counts.num_rows and before > 20
    if is_long:
        assert re.fullmatch(r"  runs again: [1-9] requests? .*; drain_timeout_s leaves them 0 s: a larger .*", again)
    else:
        assert again == "  runs again: nothing; no request was cut off"
    assert left == f"  still to run: {jobs.num_fewer - before:,} output rows"
    # `status` says the same, and nothing of replicas that have ended.
    report = batchinf.status(out)
    assert (report.jobs[0].num_journalled, report.jobs[0].replicas) == (num_kept, ())
    in_journal = f"{counted(num_kept, 'request')} finished and kept in the journal"
    # The journal is empty if the job was stopped just when it had committed a part.
    assert (f"not committed yet: {in_journal}" in str(report)) == (num_kept > 0)
    assert json.loads((out / "status.json").read_text())["num_rows_done"] == before
    summary = batchinf.run(spec, overrides={"scripted.step_s": 0.0}).summary
    in_parts = [f"{counted(num_rows, 'output row')} in parts"] if num_rows else []
    from_journal = [f"{counted(num_kept, 'row')} from the journal"] if num_kept else []
    assert summary.remarks[:1] == (f"from earlier runs: {', '.join([*in_parts, *from_journal])}",)
    assert not [line for line in batchinf.run(spec, quiet=True).summary.lines() if "earlier runs" in line]
    assert (f" of them done, {in_journal}; " in capfd.readouterr().err) == (num_kept > 0)
    recovered = sum(event["num_requests"] for event in jobs.events_of(out, "recovered"))
    assert recovered == num_kept


def test_a_stop_of_a_retry_says_what_is_kept_of_the_retry(tmp_path: pathlib.Path) -> None:
    sections = {"parallel": {"data_parallel_size": 1}, "drain_timeout_s": 0.0}
    spec, stop = yaml.safe_load(jobs.spec_of(tmp_path, **sections).read_text()), threading.Event()
    batchinf.run(spec, overrides={"scripted.step_s": 0.0}, quiet=True)
    chosen = batchinf.open(tmp_path / "out").array("num_output_tokens") > 5

    def tell(status: batchinf.JobStatus) -> None:
        if status.num_rows_done > 20:
            stop.set()

    slow = {"scripted.step_s": 0.02}
    with pytest.raises(batchinf.Interrupted) as raised:
        batchinf.run(spec, overrides=slow, retry="num_output_tokens > 5", stop=stop, quiet=True, progress=tell)
    _, kept, _, left = str(raised.value).splitlines()
    pattern = (
        r"  kept: (\d+) of (\d+) output rows that retry 1 has to run: (\d+) in (\d+) replaced parts?, "
        r"and (\d+) finished requests? in the journal"
    )
    found = re.fullmatch(pattern, kept)
    assert found is not None, kept
    num_all, num_chosen, num_in_parts, num_parts, num_kept = map(int, found.groups())
    assert num_chosen == chosen.sum()
    assert num_all == num_in_parts + num_kept > 20
    assert left == f"  still to run: {num_chosen - num_all} output rows"
    replaced = [shard for shard, part in jobs.state_of(tmp_path / "out").parts.items() if part.retry == 1]
    job = batchinf.status(tmp_path / "out").jobs[0]
    assert (len(replaced), job.num_journalled) == (num_parts, num_kept)
    assert job.retries[-1].num_parts_replaced == num_parts
    # The next run takes them from the journal. If it is stopped before its engine is up, it has kept the same.
    stop.set()
    with pytest.raises(batchinf.Interrupted):
        batchinf.run(spec, overrides={"scripted.start_s": 9.0}, stop=stop, quiet=True)
    assert batchinf.status(tmp_path / "out").jobs[0].num_journalled == num_kept


def test_a_stop_before_the_engine_is_up_counts_the_journal(tmp_path: pathlib.Path) -> None:
    sections = {"parallel": {"data_parallel_size": 1}, "output": {"rows_per_shard": 200}}
    spec, stop = yaml.safe_load(jobs.spec_of(tmp_path, **sections).read_text()), threading.Event()

    def stop_after(status: batchinf.JobStatus) -> None:
        if status.state == "starting" if stop_at_start else status.num_rows_done > 20:
            stop.set()

    stop_at_start = False
    with pytest.raises(batchinf.Interrupted) as raised:
        batchinf.run(spec, overrides={"scripted.step_s": 0.02}, stop=stop, quiet=True, progress=stop_after)
    kept = str(raised.value).splitlines()[1]
    assert " 0 in 0 parts, and " in kept
    stop_at_start = True
    stop.clear()
    with pytest.raises(batchinf.Interrupted) as raised:
        batchinf.run(spec, overrides={"scripted.start_s": 60.0}, stop=stop, quiet=True, progress=stop_after)
    assert str(raised.value).splitlines()[1] == kept


@pytest.mark.parametrize(
    ("drain_s", "heard", "words"),
    [
        (20, [signal.SIGINT], "drain_timeout_s leaves them 20 s: a larger value keeps more"),
        (600, [signal.SIGTERM], "SIGTERM leaves them 20 s; after SIGINT or SIGUSR1, drain_timeout_s leaves them 600 s"),
        (5, [signal.SIGTERM], "drain_timeout_s leaves them 5 s: a larger value keeps more"),
        (20, [signal.SIGTERM, signal.SIGINT], "a second Ctrl-C loses them, and the results since the last "
         "checkpoint; after one Ctrl-C, drain_timeout_s leaves them 20 s"),
    ],
)  # fmt: skip
def test_which_setting_would_have_kept_more(drain_s: float, heard: list[int], words: str) -> None:
    requests = StopRequests(drain_s)
    for number in heard:
        requests.note(number)
    assert requests.advice == words


def test_a_job_killed_when_it_was_done_is_tidied_up_by_the_next_start(tmp_path: pathlib.Path) -> None:
    """The process is killed while it frees the lock, before it writes its own, or while it takes another's away."""
    spec, out = yaml.safe_load(jobs.spec_of(tmp_path, input={"limit": 20}, **QUICK).read_text()), tmp_path / "out"
    batchinf.run(spec, quiet=True)
    dead = dataclasses.replace(Holder.this_process(), pid=2**22 + 1).encode()
    for left in (
        {"lock": dead, "journal/000000-000001.0001-00001": b"left", ".tmp-1-status.json": b"{}"},
        {"lock.stale-1": dead},
        {"lock.stale-1": dead, ".tmp-fresh/rows": b"left"},
        {".tmp-1-lock": dead},
        {"staging/000000": b"left"},
        {"manifest/.tmp-1-000001.jsonl": b"left"},
    ):
        for name, content in left.items():
            (out / name).parent.mkdir(exist_ok=True)
            (out / name).write_bytes(content)
        assert batchinf.run(spec, quiet=True).summary.was_done
        assert not [name for name in left if (out / name).exists()]
    assert not (out / ".tmp-fresh").exists()


def test_nothing_is_tidied_up_while_a_process_may_hold_the_job(tmp_path: pathlib.Path) -> None:
    spec, out = yaml.safe_load(jobs.spec_of(tmp_path, input={"limit": 20}, **QUICK).read_text()), tmp_path / "out"
    batchinf.run(spec, quiet=True)
    elsewhere = dataclasses.replace(Holder.this_process(), host="elsewhere")
    left = {"lock": elsewhere.encode(), "staging/000000": b"left", ".tmp-1-status.json": b"{}"}
    for name, content in left.items():
        (out / name).write_bytes(content)
    assert batchinf.run(spec, quiet=True).summary.was_done
    assert {name: (out / name).read_bytes() for name in left} == left


def test_what_engines_did_without_is_told_in_the_closing_lines_and_by_status(tmp_path: pathlib.Path) -> None:
    """A scripted engine has all it needs. So the job's last epoch gets the record of an engine of vLLM here."""
    spec = jobs.spec_of(tmp_path, **QUICK)
    jobs.finish(spec)
    file = read_spec(str(spec), ())
    state = read_state(Folder(tmp_path / "out"))
    assert state is not None and state.slower == ()
    lines = ["vLLM 0.32.9: the loops are off; steps take longer", "vLLM 0.32.9: the kernel is off; steps take longer"]
    for device in ("a", "b"):  # two replicas on different devices
        state.apply(record_line(Platform(device, {}, {"slower": lines}, state.last_epoch)))
    told = finished(file, state).lines()
    assert [line for line in told if "0.32.9" in line] == lines
    assert not any("0.32.9" in line for line in finished(file, state, was_done=True).lines())  # no engine ran
    [folder] = job_folders(str(tmp_path / "out"))
    job = _job_state(folder, state)
    assert (job.slower, [line for line in job.lines(None) if "0.32.9" in line]) == (tuple(lines), lines)
    state.last_epoch += 1
    assert state.slower == ()


def test_errors_of_images_are_one_reason_whatever_their_names() -> None:
    gone = [without_numbers(f"image {n}: '{name}' does not exist") for n, name in ((1, "a.png"), (2, "b/c d.jpg"))]
    folder = without_numbers("image 1: 'a.png' is a folder, not a file")
    assert len({*gone}) == 1 and folder not in gone
