"""`--extend`: what came to the input since is taken in, wherever a crash strikes, and nothing that was there moves."""

import atexit
import functools
import json
import os
import pathlib
import shutil
import tempfile
from typing import Any

import datasets
import pytest

import jobs
from batchinf.base.storage import Folder
from batchinf.commands import check
from batchinf.manifest.state import read_state
from batchinf.schedule.shards import Extent, total_rows, total_shards
from batchinf.source.cache import load_entries


def write(path: pathlib.Path, *numbers: int, **columns: object) -> None:
    path.parent.mkdir(exist_ok=True)
    rows = ({"id": number, "prompt": f"prompt {number}", "language": "en", **columns} for number in numbers)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def spec_over(folder: pathlib.Path, **sections: Any) -> pathlib.Path:
    """A quick job over the files in `folder/data`."""
    defaults: dict[str, Any] = {
        "input": {"path": str(folder / "data"), **sections.pop("input", {})},
        "sampling": {"max_tokens": 4},
        "parallel": {"data_parallel_size": 1},
        "output": {"rows_per_shard": 8, **sections.pop("output", {})},
        "scripted": {"max_num_seqs": 64, "step_s": 0.0},
    }
    return jobs.spec_of(folder, **{**defaults, **sections})


def ids_of(out: pathlib.Path) -> list[tuple[int, int]]:
    return [(row["row_index"], row["id"]) for row in jobs.rows_of(out)]


def outputs_of(out: pathlib.Path) -> dict[int, tuple[object, ...]]:
    """What was made of each row, by its id. A greedy row's output is its prompt's alone."""
    return {row["id"]: (row["text"], row["token_ids"], row["logprobs"]) for row in jobs.rows_of(out)}


FIRST, MORE = range(40), range(40, 67)


def begin(folder: pathlib.Path, **sections: Any) -> pathlib.Path:
    """A finished job over two files, to which three more have come: in front, between and behind."""
    shutil.copytree(finished(json.dumps(sections)), folder, dirs_exist_ok=True)
    come(folder)
    return spec_over(folder, **sections)


@functools.cache
def finished(sections: str) -> pathlib.Path:
    """A job that is done, made once and copied by each test."""
    folder = pathlib.Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder)
    write(folder / "data" / "b.jsonl", *FIRST[:25])
    write(folder / "data" / "d.jsonl", *FIRST[25:])
    jobs.finish(spec_over(folder, **json.loads(sections)))
    return folder


def come(folder: pathlib.Path) -> None:
    write(folder / "data" / "a.jsonl", *MORE[:10])
    write(folder / "data" / "c.jsonl", *MORE[10:11])
    write(folder / "data" / "e.jsonl", *MORE[11:])


EXPECTED = list(enumerate((*FIRST, *MORE)))


def test_new_files_without_rows_are_nothing_new(tmp_path: pathlib.Path) -> None:
    """`--extend` does not take them in, so a resume must not ask for it."""
    shutil.copytree(finished("{}"), tmp_path, dirs_exist_ok=True)
    spec, data = spec_over(tmp_path), tmp_path / "data"
    (data / "a.jsonl").touch()
    (data / "c.jsonl").write_text("\n\n")
    assert "was already done" in jobs.finish(spec).stdout
    jobs.finish(spec, "--retry", "row_index = 3")
    assert "--extend: the input has no new files and no new rows" in jobs.finish(spec, "--extend").stderr
    write(data / "c.jsonl", *MORE[:1])
    (data / "e.jsonl").write_text("{")  # a damaged row is a row
    assert "2 files are new: c.jsonl, e.jsonl; use --extend" in jobs.run("run", spec).stderr


def test_new_files_come_behind_and_earlier_parts_stay_as_they_are(tmp_path: pathlib.Path) -> None:
    spec = begin(tmp_path)
    out = tmp_path / "out"
    before = {path.name: (path.stat().st_ino, path.read_bytes()) for path in (out / "parts").iterdir()}
    cuts = jobs.state_of(out).extents
    refused = jobs.run("run", spec)
    assert refused.returncode == 2
    assert refused.stderr.endswith(
        "has more than the job in the output folder knows: 3 files are new: a.jsonl, c.jsonl, e.jsonl; "
        "use --extend to run the new rows too, or move the new data away\n"
    )
    assert jobs.state_of(out).is_done
    jobs.finish(spec, "--extend")
    assert ids_of(out) == EXPECTED
    after = {path.name: (path.stat().st_ino, path.read_bytes()) for path in (out / "parts").iterdir()}
    assert {name: after[name] for name in before} == before
    state = jobs.state_of(out)
    assert state.extents[:1] == cuts and len(state.extents) == 2
    assert state.is_done

    again = jobs.run("run", spec, "--extend")
    assert again.returncode == 0 and "was already done" in again.stdout
    assert "--extend: the input has no new files and no new rows" in again.stderr
    assert len(jobs.state_of(out).extents) == 2
    assert "was already done" in jobs.run("run", spec).stdout

    status = jobs.run("status", out)
    assert "committed: 67 of 67 output rows" in status.stdout
    assert "rows came in 2 times: 40, 27" in status.stdout
    assert jobs.run("check", out, "--deep").returncode == 0
    assert len(jobs.run("head", out, "--json", "-n", "60").stdout.splitlines()) == 60

    # A new job over all of it has the same of each row, wherever it stands.
    other = tmp_path / "other"
    other.mkdir()
    os.rename(tmp_path / "data", other / "data")
    jobs.finish(spec_over(other))
    assert [id for _, id in ids_of(other / "out")] != [id for _, id in EXPECTED]
    assert outputs_of(other / "out") == outputs_of(out)


FAULTS = [
    "input_version.before_record:1=kill",
    "manifest.mid_line:1=kill",
    "coordinator.before_publish:2=kill",
    *jobs.slowly(
        "input_version.after_record:1=kill",
        "storage.write.before_rename:2=kill",
        "extend.before_line:1=kill",
        "extend.after_line:1=kill",
    ),
]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_crash_at_any_point_changes_nothing(fault: str, tmp_path: pathlib.Path) -> None:
    spec = begin(tmp_path)
    out = tmp_path / "out"
    killed = jobs.start("run", spec, "--extend", faults=fault)
    everyone = jobs.family(killed.pid)
    killed.communicate(timeout=60)
    assert killed.returncode == -9
    assert jobs.are_gone(everyone)
    state = jobs.state_of(out)
    is_taken_in = len(state.extents) == 2
    assert is_taken_in == (fault.startswith(("extend.after", "coordinator")))
    assert state.is_done != is_taken_in
    # What is in the manifest goes on by itself; what is not has not begun.
    jobs.finish(spec, *([] if is_taken_in else ["--extend"]))
    assert ids_of(out) == EXPECTED
    assert len(jobs.state_of(out).extents) == 2


def test_a_job_that_is_not_done_takes_in_more_and_finishes_both(tmp_path: pathlib.Path) -> None:
    write(tmp_path / "data" / "b.jsonl", *FIRST[:25])
    write(tmp_path / "data" / "d.jsonl", *FIRST[25:])
    spec = spec_over(tmp_path)
    killed = jobs.start("run", spec, faults="coordinator.after_publish:2=kill")
    killed.communicate(timeout=60)
    assert killed.returncode == -9
    come(tmp_path)
    os.rename(tmp_path / "data" / "b.jsonl", tmp_path / "data" / "z.jsonl")
    with (tmp_path / "data" / "d.jsonl").open("a") as file:
        file.write(json.dumps({"id": 100, "prompt": "prompt 100", "language": "en"}) + "\n")
    jobs.finish(spec, "--extend")
    new = [*MORE[:11], 100, *MORE[11:]]
    assert ids_of(tmp_path / "out") == list(enumerate((*FIRST, *new)))


def test_a_file_that_comes_while_the_job_runs_moves_no_row(tmp_path: pathlib.Path) -> None:
    """A replica that is started again opens the input as the job has taken it in."""
    write(tmp_path / "data" / "b.jsonl", *range(300))
    spec = spec_over(tmp_path, scripted={"max_num_seqs": 4, "step_s": 0.01}, checkpoint_interval_s=0.1)
    process = jobs.start("run", spec)
    jobs.wait_until(lambda: jobs.snapshot_of(tmp_path / "out").get("num_rows_done", 0) > 20)
    write(tmp_path / "data" / "a.jsonl", *range(1000, 1050))
    jobs.kill(jobs.replicas_of(process.pid))
    code, _, errors = jobs.end(process)
    assert code == 0, errors
    assert jobs.events_of(tmp_path / "out", "ready")[1:]
    assert ids_of(tmp_path / "out") == list(enumerate(range(300)))
    jobs.finish(spec, "--extend")
    assert ids_of(tmp_path / "out") == list(enumerate((*range(300), *range(1000, 1050))))


def test_what_cannot_be_taken_in_is_named_and_changes_nothing(tmp_path: pathlib.Path) -> None:
    spec = begin(tmp_path)
    out = tmp_path / "out"
    for arguments, message in [
        (["--fresh"], "got --extend with --fresh; --extend continues the job with new rows, --fresh starts"),
        (["--retry", "errors"], "got --extend with --retry; --extend runs new rows, --retry runs finished rows again"),
        (["--slice", "0/2"], "got --extend with --slice; a slice takes no new rows: give them to a new job"),
        (["--set", "sampling.max_tokens=5"], "sampling.max_tokens: the job has 4, now it is 5"),
        (["--set", "input.path=" + str(jobs.PROMPTS)], "2 files are gone: b.jsonl, d.jsonl; restore these"),
    ]:
        refused = jobs.run("run", spec, "--extend", *arguments)
        assert refused.returncode == 2
        assert message in refused.stderr
    write(tmp_path / "data" / "b.jsonl", 7)
    os.remove(tmp_path / "data" / "d.jsonl")
    refused = jobs.run("run", spec, "--extend")
    assert refused.returncode == 2
    assert "1 file is changed: b.jsonl; 1 file is gone: d.jsonl; restore these to continue the job" in refused.stderr
    write(tmp_path / "data" / "b.jsonl", *FIRST[:25])
    write(tmp_path / "data" / "d.jsonl", *FIRST[25:])
    with (tmp_path / "data" / "a.jsonl").open("a") as file:
        file.write(json.dumps({"id": "text", "prompt": "p", "language": "en"}) + "\n")
    refused = jobs.run("run", spec, "--extend")
    assert refused.returncode == 2
    assert "'id' is int64 in the job's output, but of mixed types with the new rows" in refused.stderr
    assert len(jobs.state_of(out).extents) == 1
    assert jobs.state_of(out).is_done


@pytest.mark.slow
def test_rows_that_come_to_a_saved_dataset(tmp_path: pathlib.Path) -> None:
    data = tmp_path / "data"
    rows = [{"id": n, "prompt": f"prompt {n}", "language": "en"} for n in range(12)]
    datasets.Dataset.from_list(rows[:8]).save_to_disk(data, num_shards=2)
    shutil.copytree(data, tmp_path / "files")
    for name, path in (("out", data), ("arrow", tmp_path / "files" / "*.arrow")):
        jobs.finish(spec_over(tmp_path, input={"path": str(path)}, output={"path": str(tmp_path / name)}))
    shutil.rmtree(data)
    datasets.Dataset.from_list(rows).save_to_disk(data)
    refused = jobs.run("run", spec_over(tmp_path), "--extend")
    assert refused.returncode == 2 and f"`input.exclude: {{job: {tmp_path / 'out'}, on: id}}`" in refused.stderr
    exclude = {"job": str(tmp_path / "out"), "on": "id"}
    jobs.finish(spec_over(tmp_path, input={"exclude": exclude}, output={"path": str(tmp_path / "more")}))
    assert ids_of(tmp_path / "more") == [(n, n) for n in range(8, 12)]
    # The Arrow files of a dataset are an input that grows by files.
    datasets.Dataset.from_list(rows[8:]).save_to_disk(tmp_path / "new")
    shutil.copy(tmp_path / "new" / "data-00000-of-00001.arrow", tmp_path / "files" / "more.arrow")
    places = {"input": {"path": str(tmp_path / "files" / "*.arrow")}, "output": {"path": str(tmp_path / "arrow")}}
    jobs.finish(spec_over(tmp_path, **places), "--extend")
    assert ids_of(tmp_path / "arrow") == [(n, n) for n in range(12)]


def test_a_column_of_texts_takes_in_other_values(tmp_path: pathlib.Path) -> None:
    """The rows that are done stay as they are, because a text is itself beside other values too."""
    spec = begin(tmp_path)
    before = [row["language"] for row in jobs.rows_of(tmp_path / "out")]
    write(tmp_path / "data" / "a.jsonl", *MORE[:10], language=7)
    done = jobs.finish(spec, "--extend")
    assert "warning: the column 'language' holds values of several types" in done.stderr
    after = [row["language"] for row in jobs.rows_of(tmp_path / "out")]
    assert after[:40] == before
    assert after[40:50] == ["7"] * 10


def test_a_damaged_manifest_is_made_anew_with_all_extents(tmp_path: pathlib.Path) -> None:
    spec = begin(tmp_path)
    out = tmp_path / "out"
    jobs.finish(spec, "--extend")
    folder = Folder(out)
    before = jobs.state_of(out)
    check.rebuild_manifest(folder, before.last_epoch + 1)
    state = read_state(folder)
    assert state is not None
    assert (state.extents, state.source_fingerprints, state.limits) == (
        before.extents,
        before.source_fingerprints,
        before.limits,
    )
    jobs.finish(spec)
    assert ids_of(out) == EXPECTED


def test_a_url_is_run_and_gone_on_with_offline(tmp_path: pathlib.Path) -> None:
    from test_remote_files import Served

    write(tmp_path / "data" / "b.jsonl", *FIRST)
    served = Served(tmp_path / "data")
    try:
        spec = spec_over(tmp_path, input={"path": f"{served.url}/"})
        killed = jobs.start("run", spec, faults="coordinator.after_publish:2=kill")
        killed.communicate(timeout=60)
        assert killed.returncode == -9
        assert served.fetched == ["/b.jsonl"]
        served.handler.asked.clear()
        served.close()
        os.rename(tmp_path / "data", tmp_path / "elsewhere")
        jobs.finish(spec)
        assert ids_of(tmp_path / "out") == list(enumerate(FIRST))
        assert load_entries(Folder(tmp_path / "out" / "source"))["b.jsonl"].path.startswith("http://127.0.0.1:")
    finally:
        served.close()
    refused = jobs.run("run", spec, "--extend")
    assert refused.returncode == 2
    assert "check the URL, the network, and credentials in the environment" in refused.stderr
    assert "Traceback" not in refused.stderr


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("ftp://me:hunter2@host/a.jsonl", "got a URL with a password in it, which would be recorded"),
        ("zip://a.jsonl::sftp://me:hunter2@host/x.zip", "got a URL with a password in it, which would be recorded"),
        ("https://host/a.jsonl?X-Amz-Signature=hunter2", "got a signed URL, whose signature would be recorded"),
    ],
)
def test_a_url_with_a_secret_is_refused_and_not_repeated(url: str, message: str, tmp_path: pathlib.Path) -> None:
    from batchinf.base.errors import SpecError
    from batchinf.spec.file import read_spec

    with pytest.raises(SpecError) as raised:
        read_spec(str(spec_over(tmp_path, input={"path": url})))
    assert message in str(raised.value)
    assert "hunter2" not in str(raised.value)


def test_extents_without_rows_are_passed_over() -> None:
    extents = (Extent(0, 5, 2, 0, 0, 5), Extent(5, 0, 2, 4, 5, 5), Extent(5, 3, 2, 4, 5, 8))
    assert total_rows(extents) == 8
    from batchinf.schedule.positions import RunOrder

    order = RunOrder(Folder("nowhere"), extents)
    rows = [int(row) for rows in order.shards() for row in rows.positions()]
    assert rows == list(range(8))
    assert total_shards(extents) == len(list(order.shards()))


@pytest.mark.slow
def test_a_limit_is_raised_over_what_the_job_chooses(tmp_path: pathlib.Path) -> None:
    sections = {"input": {"where": "id % 2 = 0", "limit": 15}}
    shutil.copytree(finished(json.dumps(sections)), tmp_path, dirs_exist_ok=True)
    spec = spec_over(tmp_path, **sections)
    out = tmp_path / "out"
    even = [(row, id) for row, id in EXPECTED if id % 2 == 0]
    assert ids_of(out) == even[:15]
    for arguments in (["--set", "input.limit=18"], ["--extend", "--set", "input.limit=14"]):
        refused = jobs.run("run", spec, *arguments)
        assert refused.returncode == 2
        assert "input.limit: the job has 15, now it is" in refused.stderr
        assert "with --extend, input.limit may be raised, but not lowered" in refused.stderr
    come(tmp_path)
    # The files are taken in, though there is no room for their rows yet.
    jobs.finish(spec, "--extend")
    assert ids_of(out) == even[:15]
    jobs.finish(spec, "--extend", "--set", "input.limit=25")
    assert ids_of(out) == even[:25]
    refused = jobs.run("run", spec)
    assert refused.returncode == 2
    assert "input.limit: the job has 25, now it is 15" in refused.stderr
    # What the job says of itself runs it again.
    given = json.loads(spec.read_text())
    places = [f"input.path={given['input']['path']}", f"output.path={out}"]
    again = jobs.finish(out / "job.yaml", *[word for place in places for word in ("--set", place)])
    assert "was already done" in again.stdout
    jobs.finish(spec, "--extend", "--set", "input.limit=")
    assert ids_of(out) == even
    assert "was already done" in jobs.finish(spec, "--set", "input.limit=").stdout
    assert [extent.num_rows for extent in jobs.state_of(out).extents] == [15, 0, 10, len(even) - 25]
    assert jobs.run("check", out, "--deep").returncode == 0


def test_what_is_done_is_validated_as_it_is(tmp_path: pathlib.Path) -> None:
    spec = begin(tmp_path)
    shown = jobs.run("validate", spec)
    assert shown.returncode == 0, shown.stderr
    assert f"input {tmp_path / 'data'}: 40 rows" in shown.stdout
    assert "the job there is done" in shown.stdout
    refused = jobs.run("run", spec)
    assert refused.returncode == 2
    assert f"warning: `run` is refused: {refused.stderr.strip().removeprefix('error: ')}" in shown.stdout
