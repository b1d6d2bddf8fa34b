"""Parts, manifest and journal under attack: what is wrong is named, and the same command again gives the unhurt rows.

Each attack is done to a copy of a job that really ran: one that is finished, one that was killed half-way.
"""

import contextlib
import os
import pathlib
import random
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import jobs
from batchinf.base.errors import OutputError
from batchinf.base.storage import Folder
from batchinf.commands.check import check_job
from batchinf.manifest.commit_log import encode_commits, whole_lines
from batchinf.manifest.names import parse_part_name, parse_staging_name
from batchinf.manifest.state import State, read_state
from batchinf.output import proof
from batchinf.output.journal import Journal
from batchinf.output.proof import PartsOfJob, changed_parts
from batchinf.schedule.positions import RunOrder, ShardRows
from batchinf.schedule.shards import shard_at
from batchinf.spec.job import JobSpec
from batchinf.tasks.registry import task_of

SETTINGS: dict[str, Any] = {
    "output": {"rows_per_shard": 3}, "parallel": {"data_parallel_size": 1}, "scripted": {"step_s": 0.0}
}  # fmt: skip
AGAIN = "run the job again: its rows run again"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The output folder of a finished job; to be copied."""
    folder = tmp_path_factory.mktemp("finished")
    jobs.finish(jobs.spec_of(folder, **SETTINGS))
    return folder / "out"


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A finished job with the same spec, but another one."""
    folder = tmp_path_factory.mktemp("other")
    jobs.finish(jobs.spec_of(folder, **SETTINGS))
    return folder / "out"


@pytest.fixture(scope="module")
def halved(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A job that was killed with parts committed and a journal beside them."""
    folder = tmp_path_factory.mktemp("halved")
    path = jobs.spec_of(folder, output={"rows_per_shard": 40}, scripted={"step_s": 0.02}, checkpoint_interval_s=0.05)
    process = jobs.start("run", path)
    out = folder / "out"
    jobs.wait_until(lambda: len(list(out.glob("parts/*"))) >= 4 and len(list(out.glob("journal/0*"))) >= 8)
    everyone = jobs.family(process.pid)
    jobs.kill(everyone)
    process.communicate(timeout=60)
    assert jobs.are_gone(everyone)
    assert len(jobs.state_of(out).parts) >= 2
    assert not jobs.state_of(out).is_done
    return out


@pytest.fixture
def copy(tmp_path: pathlib.Path) -> Callable[[pathlib.Path], pathlib.Path]:
    def copied(out: pathlib.Path) -> pathlib.Path:
        shutil.copytree(out, tmp_path / "out")
        return tmp_path / "out"

    return copied


@pytest.fixture
def out(finished: pathlib.Path, copy: Callable[[pathlib.Path], pathlib.Path]) -> pathlib.Path:
    """A copy of the finished job."""
    return copy(finished)


def part(out: pathlib.Path, shard: int) -> pathlib.Path:
    return out / "parts" / f"part-{shard:06d}.parquet"


def flip(path: pathlib.Path, place: int, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1 << bit
    path.write_bytes(data)


def look(out: pathlib.Path, *, is_deep: bool = False, repair: bool = False) -> tuple[str, str]:
    """What `check` says, without a process of its own: its lines, and the error that it ends with, '' for none."""
    report = check_job(str(out), is_deep=is_deep, repair=repair)
    said = "".join(f"{line}\n" for line in report.lines())
    assert ("wrong: " in said) == (not report.is_whole)
    try:
        report.raise_if_wrong()
    except OutputError as error:
        return said, str(error)
    return said, ""


def check(out: pathlib.Path, *options: str) -> "subprocess.CompletedProcess[str]":
    """The command itself."""
    done = jobs.run("check", out, *options)
    assert "Traceback" not in done.stderr, done.stderr
    assert done.returncode == (2 if "wrong: " in done.stdout else 0), done
    assert done.stderr.count("error: ") == (done.returncode == 2), done.stderr
    return done


def assert_goes_on(out: pathlib.Path) -> str:
    """The same command gives the unhurt rows, and a folder with nothing wrong; what it printed."""
    settings = {**SETTINGS, "output": {"rows_per_shard": jobs.state_of(out).header.layout["rows_per_shard"]}}
    done = jobs.finish(jobs.spec_of(out.parent, **settings))
    assert jobs.rows_of(out) == list(jobs.unhurt())
    assert look(out, is_deep=True)[1] == ""
    return done.stdout + done.stderr


def assert_refused(out: pathlib.Path, *words: str) -> None:
    """`run` ends with one clear line, and changes no part."""
    before = {path.name: path.read_bytes() for path in (out / "parts").iterdir()}
    refused = jobs.run("run", jobs.spec_of(out.parent, **SETTINGS))
    assert refused.returncode == 2
    assert "Traceback" not in refused.stderr
    [line] = [line for line in refused.stderr.splitlines() if line.startswith("error: ")]
    assert all(word in line for word in words), line
    assert {path.name: path.read_bytes() for path in (out / "parts").iterdir()} == before


# -- nothing is wrong --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [(), ("--deep",)])
def test_a_finished_job_is_whole(options: tuple[str, ...], finished: pathlib.Path) -> None:
    done = check(finished, *options)
    num_parts, num_rows = len(list((finished / "parts").iterdir())), len(jobs.unhurt())
    assert done.returncode == 0
    assert f"checked {num_parts} of {num_parts} parts, {num_rows} of {num_rows} output rows" in done.stdout
    assert done.stdout.endswith("0 wrong, 0 notes; the job is done\n")


def test_a_killed_job_is_whole_and_not_done(halved: pathlib.Path) -> None:
    said, error = look(halved, is_deep=True)
    assert error == ""
    assert "the job is not done; run it again to go on" in said
    # A repair has the lock itself.
    assert "the job is not done; run it again to go on" in look(halved, repair=True)[0]


def test_a_job_at_work_is_whole(tmp_path: pathlib.Path) -> None:
    marker = tmp_path / "held"
    path = jobs.spec_of(tmp_path, output={"rows_per_shard": 20}, scripted={"step_s": 0.02})
    process = jobs.start("run", path, faults=f"coordinator.before_publish:3=hold {marker}")
    out, looks = tmp_path / "out", 0
    jobs.wait_until(lambda: marker.exists() and marker.read_text())
    said, error = look(out)
    # The manifest names a part that still stands in `staging/`.
    assert len(jobs.state_of(out).parts) > len(list((out / "parts").iterdir()))
    assert error == ""
    assert "0 wrong, 0 notes; the job is at work" in said
    marker.unlink()
    while process.poll() is None:
        said, error = look(out, is_deep=True)
        assert error == "", said
        looks += 1
        time.sleep(0.1)
    assert looks > 1
    assert process.communicate()[0].startswith("done")


@pytest.mark.parametrize("is_there", [True, False])
def test_no_job_at_all(is_there: bool, tmp_path: pathlib.Path) -> None:
    done = jobs.run("check", tmp_path if is_there else tmp_path / "none")
    assert done.returncode == 2
    assert "holds no job" in done.stderr


# -- parts -------------------------------------------------------------------------------------------------------------


def _missing(out: pathlib.Path, other: pathlib.Path) -> dict[int, str]:
    part(out, 3).unlink()
    part(out, 40).unlink()
    return {3: "is missing", 40: "is missing"}


def _cut(out: pathlib.Path, other: pathlib.Path) -> dict[int, str]:
    os.truncate(part(out, 2), 5000)
    part(out, 4).write_bytes(b"")
    return {2: "has 5,000 bytes", 4: "has 0 bytes"}


def _grown(out: pathlib.Path, other: pathlib.Path) -> dict[int, str]:
    with part(out, 6).open("ab") as file:
        file.write(b"\0" * 9)
    return {6: f"has {part(out, 6).stat().st_size:,} bytes, "}


def _swapped(out: pathlib.Path, other: pathlib.Path) -> dict[int, str]:
    """Two parts of one size: nothing but what they state tells them apart."""
    sizes: dict[int, list[int]] = {}
    for shard, line in jobs.state_of(out).parts.items():
        sizes.setdefault(line.num_bytes, []).append(shard)
    first, second = next(shards for shards in sizes.values() if len(shards) > 1)[:2]
    part(out, first).rename(out / "aside")
    part(out, second).rename(part(out, first))
    (out / "aside").rename(part(out, second))
    return {first: f"is the part of shard {second}", second: f"is the part of shard {first}"}


def _foreign(out: pathlib.Path, other: pathlib.Path) -> dict[int, str]:
    """Of the same size, shard, spec and model: only the job is another."""
    assert part(out, 5).stat().st_size == part(other, 5).stat().st_size
    shutil.copy(part(other, 5), part(out, 5))
    return {5: f"is a part of another job, {jobs.state_of(other).header.job_id}"}


def _not_parquet(out: pathlib.Path, other: pathlib.Path) -> dict[int, str]:
    part(out, 7).write_bytes(os.urandom(part(out, 7).stat().st_size))
    return {7: "is altered: it has no footer"}


@pytest.mark.parametrize("attack", [_missing, _cut, _grown, _swapped, _foreign, _not_parquet])
def test_a_part_that_is_not_the_one_committed_is_named(
    attack: Callable[..., dict[int, str]], out: pathlib.Path, other: pathlib.Path
) -> None:
    assert_named(out, attack(out, other), look(out)[0])


def assert_named(out: pathlib.Path, hurt: dict[int, str], said: str) -> None:
    """`check` names the parts that were hurt, and no others; a resume sees them too."""
    wrong = [line for line in said.splitlines() if line.startswith("wrong: ")]
    assert len(wrong) == len(hurt)
    for line, (shard, words) in zip(wrong, sorted(hurt.items()), strict=True):
        assert line.startswith(f"wrong: parts/part-{shard:06d}.parquet {words}")
        assert line.endswith(AGAIN)
    assert changed_parts(Folder(out), jobs.state_of(out)) == sorted(hurt)


def test_a_done_job_runs_again_what_it_has_lost(out: pathlib.Path, other: pathlib.Path) -> None:
    hurt = {}
    for attack in (_swapped, _missing, _cut, _grown, _foreign, _not_parquet):
        hurt |= attack(out, other)
    done = check(out)
    assert done.returncode == 2
    assert_named(out, hurt, done.stdout)
    assert f"{len(hurt)} things are wrong, see above" in done.stderr
    said = assert_goes_on(out)
    assert "already done" not in said
    assert all(f"part {shard} is gone or altered" in said for shard in hurt)
    assert "was already done" in assert_goes_on(out)


def parts_of(folder: Folder, state: State) -> PartsOfJob:
    order, schema = RunOrder(folder, state.extents), state.header.columns.part_schema
    return PartsOfJob(folder=folder, job_id=state.header.job_id, order=order, num_samples=1, schema=schema)


def test_one_flipped_bit_anywhere_in_a_part_is_found(out: pathlib.Path) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance, state, folder = random.Random(seed), jobs.state_of(out), Folder(out)
    path, place, line, parts = part(out, 8), shard_at(state.extents, 8), state.parts[8], parts_of(folder, state)
    data, num_plain = path.read_bytes(), 0
    size, footer = len(data), int.from_bytes(data[-8:-4], "little") + 8
    places = [*range(8), *range(size - 8, size), *chance.sample(range(size), 100)]
    places += chance.sample(range(size - footer, size), 100)
    for byte in places:
        bit = chance.randrange(8)
        flip(path, byte, bit)
        flaw = parts.flaw(place, line, is_deep=True)
        assert flaw is not None, f"seed {seed}: byte {byte}, bit {bit}"
        assert flaw.what
        num_plain += flaw.is_seen_by_run
        assert (changed_parts(folder, state) == [8]) == flaw.is_seen_by_run, f"seed {seed}: byte {byte}, bit {bit}"
        path.write_bytes(data)
    assert 0 < num_plain < len(places)
    assert parts.flaw(place, line, is_deep=True) is None


def test_a_bit_that_a_resume_cannot_see_is_repaired(out: pathlib.Path) -> None:
    flip(part(out, 9), 100, 3)
    hurt = part(out, 9).read_bytes()
    assert look(out)[1] == ""  # its size and its footer are as they were
    found, _ = look(out, is_deep=True)
    assert "wrong: parts/part-000009.parquet is altered: its bytes are not those that were written" in found
    assert f"check --deep --repair moves it aside; then {AGAIN}" in found
    repaired = check(out, "--deep", "--repair")
    assert f"moved to damaged/part-000009.parquet; {AGAIN}" in repaired.stdout
    assert "1 moved aside: run the job again" in repaired.stderr
    assert (out / "damaged" / "part-000009.parquet").read_bytes() == hurt
    assert not (out / "lock").exists()
    assert "part 9 is gone or altered" in assert_goes_on(out)


def test_a_repair_that_is_killed_is_no_done_job(out: pathlib.Path) -> None:
    for shard in range(10):
        part(out, shard).unlink()
    spec = jobs.spec_of(out.parent, **SETTINGS)
    assert jobs.run("run", spec, faults="coordinator.after_publish:3=kill").returncode == -9
    state = jobs.state_of(out)
    assert not state.is_done
    assert 0 < state.committed.sum() < len(state.committed)
    assert "stopped before its end" in jobs.run("status", out).stdout
    assert look(out)[1] == ""
    assert_goes_on(out)


def test_a_file_that_readers_would_take_for_a_part_is_named(out: pathlib.Path) -> None:
    for name in ("extra.parquet", "part-999999.parquet", "part-0000003.parquet"):
        shutil.copy(part(out, 3), out / "parts" / name)
    (out / "parts" / "notes.txt").write_text("of no harm")
    wrong = [line for line in look(out)[0].splitlines() if line.startswith("wrong")]
    assert len(wrong) == 3
    for name, line in zip(("extra", "part-0000003", "part-999999"), wrong, strict=True):
        what = "is not a part of this job, but readers would read it as one; move it away"
        assert line == f"wrong: parts/{name}.parquet {what}"


def test_a_spec_that_is_gone_is_written_again(out: pathlib.Path) -> None:
    before = (out / "job.yaml").read_text()
    (out / "job.yaml").unlink()
    assert "job.yaml is missing" in look(out)[0]
    assert "note: job.yaml was missing; it is written again" in look(out, repair=True)[0]
    assert (out / "job.yaml").read_text() == before


def test_a_part_that_states_all_and_is_another_is_found(out: pathlib.Path) -> None:
    state = jobs.state_of(out)
    line, place = state.parts[1], shard_at(state.extents, 1)
    parts = parts_of(Folder(out), state)
    found = parts.flaw(place, replace(line, digest="0" * 32), is_deep=True)
    assert found == proof.Flaw("is altered: its bytes are not those that were written", is_seen_by_run=False)
    found = parts.flaw(place, replace(line, num_output_tokens=1), is_deep=False)
    assert found is not None
    assert "its footer has num_output_tokens" in found.what
    found = replace(parts, num_samples=2).flaw(place, line, is_deep=False)
    assert found == proof.Flaw("has 3 rows, but must have 6", is_seen_by_run=False)


@pytest.mark.parametrize(
    ("rows", "samples", "words"),
    [
        ([5, 5, 6, 6], [0, 1, 0, 1], None),
        ([5, 5, 5, 6], [0, 1, 1, 0], "has row 5, sample 1 in the place of row 6, sample 0"),
        ([5, 6, 5, 6], [0, 0, 1, 1], "has row 6, sample 0 in the place of row 5, sample 1"),
        ([5, 5, 6], [0, 1, 0], "ends with row 6, sample 0, but must have all 2 rows"),
        ([5, 5, 6, 6, 7], [0, 1, 0, 1, 0], "has row 7, sample 0 after its last row"),
    ],
)
def test_each_key_stands_once(rows: list[int], samples: list[int], words: str | None, tmp_path: pathlib.Path) -> None:
    table = pa.table({"row_index": pa.array(rows, pa.int64()), "sample_index": pa.array(samples, pa.int32())})
    pq.write_table(table, tmp_path / "part", row_group_size=2)
    assert proof._key_flaw(tmp_path / "part", ShardRows(5, 7), 2) == words


# -- the manifest ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def log_of(out: pathlib.Path) -> Iterator[tuple[pathlib.Path, bytes]]:
    [name] = Folder(out).list("manifest")  # without what the kill left half written
    path = out / "manifest" / name
    yield path, path.read_bytes()


def committed(state: State | None) -> dict[int, Any]:
    return {} if state is None else dict(state.parts)


def states_of(data: bytes, folder: Folder, path: pathlib.Path) -> list[dict[int, Any]]:
    """What was committed after each commit."""
    states, ends = [{}], [i + 1 for i, byte in enumerate(data) if byte == 10]
    for end in ends:
        path.write_bytes(data[:end])
        if committed(read_state(folder)) != states[-1]:
            states.append(committed(read_state(folder)))
    path.write_bytes(data)
    return states


def test_a_manifest_cut_at_any_byte_says_less_and_nothing_else(halved: pathlib.Path, copy: Any) -> None:
    out = copy(halved)
    folder = Folder(out)
    with log_of(out) as (path, data):
        states = states_of(data, folder, path)
        seen = 0
        for end in [*range(0, len(data), 11), len(data)]:
            path.write_bytes(data[:end])
            found = committed(read_state(folder))
            seen = max(seen, states.index(found))
            assert found == states[seen]
    assert seen == len(states) - 1 > 1


def test_a_manifest_with_a_flipped_bit_is_damaged_or_lacks_its_last_commit(halved: pathlib.Path, copy: Any) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance, out = random.Random(seed), copy(halved)
    folder = Folder(out)
    errors = []
    with log_of(out) as (path, data):
        whole = jobs.state_of(out)
        last = data.rindex(b'"commit"', 0, data.rindex(b'"commit"'))
        for byte in range(chance.randrange(40), len(data), 40):
            flip(path, byte, chance.randrange(8))
            try:
                state = read_state(folder)
            except OutputError as error:
                errors.append(str(error))
            else:
                assert byte > last, f"seed {seed}: byte {byte}"
                assert committed(state).items() <= whole.parts.items()
            path.write_bytes(data)
    assert len(errors) >= last // 40 - 1
    assert all("manifest/000001.jsonl is damaged: line " in error for error in errors)


@pytest.mark.parametrize("part_of_it", [0.4, 0.97])
def test_a_finished_job_whose_manifest_is_cut_goes_on(part_of_it: float, out: pathlib.Path) -> None:
    with log_of(out) as (path, data):
        path.write_bytes(data[: int(len(data) * part_of_it)])
    num_parts, num_committed = len(list((out / "parts").iterdir())), len(jobs.state_of(out).parts)
    said, error = look(out)
    assert error.endswith("wrong, see above")
    assert said.count("is a part of this job that the manifest does not name") == num_parts - num_committed > 0
    # A manifest that is older than its parts, as in a backup.
    assert_refused(out, "is a part of this job that the manifest does not name", "--repair` takes such parts in")
    before = {path.name: path.stat().st_mtime_ns for path in (out / "parts").iterdir()}
    said, error = look(out, repair=True)
    assert error == ""
    assert said.count("the manifest names it now") == num_parts - num_committed
    assert len(jobs.state_of(out).parts) == num_parts
    assert_goes_on(out)
    assert {path.name: path.stat().st_mtime_ns for path in (out / "parts").iterdir()} == before


@pytest.mark.parametrize("what", ["emptied", "of zeros", "gone"])
def test_a_manifest_that_says_nothing_is_refused(what: str, out: pathlib.Path) -> None:
    with log_of(out) as (path, data):
        path.write_bytes({"emptied": b"", "of zeros": bytes(len(data)), "gone": b""}[what])
        if what == "gone":
            shutil.rmtree(out / "manifest")
    assert "wrong: manifest/ lacks the lines about the job" in look(out)[0]
    assert "cannot be repaired" in look(out, repair=True)[1]
    assert_refused(out, "without its manifest", "another output.path")


def test_a_manifest_that_is_damaged_inside_is_named_and_made_anew(out: pathlib.Path) -> None:
    with log_of(out) as (path, data):
        flip(path, len(data) // 2, 2)
        hurt = path.read_bytes()
    line = hurt[: len(data) // 2].count(b"\n") + 1
    words = f"manifest/000001.jsonl is damaged: line {line} is not as it was written"
    assert words in look(out)[0]
    assert_refused(out, words, "restore it from a backup")
    before = {path.name: path.stat().st_mtime_ns for path in (out / "parts").iterdir()}
    repaired = check(out, "--repair")
    assert "its damaged manifest was replaced; the old one is damaged/000001.jsonl" in repaired.stderr
    assert (out / "damaged" / "000001.jsonl").read_bytes() == hurt
    state = jobs.state_of(out)
    assert (len(state.parts), state.is_done) == (len(before), False)
    assert state.device_s > 0
    part(out, 2).write_bytes(b"hurt too")
    assert_goes_on(out)
    after = {path.name: path.stat().st_mtime_ns for path in (out / "parts").iterdir()}
    assert {name for name in after if after[name] != before[name]} == {"part-000002.parquet"}


def test_a_later_format_is_left_alone(out: pathlib.Path) -> None:
    with log_of(out) as (path, _):
        lines = list(whole_lines(Folder(out), "manifest/000001.jsonl"))
        assert "header" in {line["kind"] for line in lines}
        later = [{**line, "format_version": 4} if line["kind"] == "header" else line for line in lines]
        changed = encode_commits([later])
        path.write_bytes(changed)
        words = "was written by a newer batchinf, 0.1.0, in format version 4; this one reads versions 2 to 3: use"
        assert words in look(out)[0]
        assert words in look(out, repair=True)[1]
        assert_refused(out, words)
        assert path.read_bytes() == changed


def test_the_manifest_of_another_job_is_refused(out: pathlib.Path, other: pathlib.Path) -> None:
    shutil.copy(other / "manifest" / "000001.jsonl", out / "manifest" / "000001.jsonl")
    foreign = jobs.state_of(other).header.job_id
    mine = pq.read_metadata(part(out, 0)).metadata[b"batchinf.job_id"].decode()
    assert f"wrong: manifest/ belongs to job {foreign}, but the parts belong to job {mine}" in look(out)[0]
    assert_refused(out, foreign, mine, "restore the right manifest")


def test_a_log_of_another_job_is_named_and_moved_aside(out: pathlib.Path, other: pathlib.Path) -> None:
    shutil.copy(other / "manifest" / "000001.jsonl", out / "manifest" / "000002.jsonl")
    words = f"000002.jsonl is damaged: it is a log of another job, {jobs.state_of(other).header.job_id}"
    assert words in look(out)[0]
    assert_refused(out, words)
    job_id = pq.read_metadata(part(out, 0)).metadata[b"batchinf.job_id"].decode()
    assert "its damaged manifest was replaced" in look(out, repair=True)[1]
    assert jobs.state_of(out).header.job_id == job_id
    assert_goes_on(out)


def test_a_later_log_of_another_job_is_named(out: pathlib.Path, other: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """A second start's log has no header of its own."""
    again = tmp_path / "again"
    shutil.copytree(other, again / "out")
    part(again / "out", 3).unlink()
    jobs.finish(jobs.spec_of(again, **SETTINGS))
    shutil.copy(again / "out" / "manifest" / "000002.jsonl", out / "manifest" / "000002.jsonl")
    assert "000002.jsonl is damaged: it is a log of another job" in look(out)[0]


# -- the journal -------------------------------------------------------------------------------------------------------


def test_a_damaged_journal_is_named_and_its_rows_run_again(halved: pathlib.Path, copy: Any) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance, out = random.Random(seed), copy(halved)
    # A resume needs no journal of shards with a part, even if the kill came before the part's line in the manifest.
    in_parts = {shard for name in Folder(out).list("parts") if (shard := parse_part_name(name)) is not None}
    in_parts |= {found[0] for name in Folder(out).list("staging") if (found := parse_staging_name(name)) is not None}
    names = Folder(out).list("journal")  # without what the kill left half written
    segments = [out / "journal" / name for name in names if int(name[:6]) not in in_parts]
    assert len(segments) >= 2
    hurt = chance.sample(segments, len(segments) - 1)
    for number, path in enumerate(hurt):
        size = path.stat().st_size
        if number % 2:
            os.truncate(path, chance.randrange(size))
        else:
            flip(path, chance.randrange(size), chance.randrange(8))
    said, error = look(out)
    assert error == ""
    for path in segments:
        line = f"note: journal/{path.name} is damaged; its results run again, unless a part has them"
        assert (line in said) == (path in hurt), f"seed {seed}"
    before = {path.name: path.read_bytes() for path in hurt}
    said = assert_goes_on(out)
    for name in before:
        line = f"warning: journal/{name} is damaged; it is kept as damaged/{name}, and its results run again\n"
        assert said.count(line) == 1, f"seed {seed}"
    assert {path.name: path.read_bytes() for path in (out / "damaged").iterdir()} == before
    events = jobs.events_of(out, "journal_damaged")
    assert {(event["segment"], event["moved_to"]) for event in events} == {
        (f"journal/{name}", f"damaged/{name}") for name in before
    }


def test_the_journal_of_a_part_that_the_manifest_does_not_name_is_not_needed(tmp_path: pathlib.Path) -> None:
    spec, out = jobs.spec_of(tmp_path, **SETTINGS), tmp_path / "out"
    assert jobs.run("run", spec, faults="manifest.mid_line:9=kill").returncode == -9
    shard, _ = [found for name in Folder(out).list("staging") if (found := parse_staging_name(name))][-1]
    assert shard not in jobs.state_of(out).parts
    name = f"{shard:06d}-000000.0001-00000"
    (out / "journal" / name).write_bytes(b"damaged")
    said, error = look(out)
    assert f"note: journal/{name} is damaged; its results run again, unless a part has them\n" in said
    assert error == ""
    assert "damaged" not in assert_goes_on(out)
    assert not (out / "damaged").exists()


def test_a_segment_torn_or_flipped_at_any_byte_is_left_out(halved: pathlib.Path, copy: Any) -> None:
    chance, out = random.Random(7), copy(halved)
    header = jobs.state_of(out).header
    journal = Journal(Folder(out), "test", task_of(JobSpec.model_validate(header.spec)).result_schema)
    names = Folder(out).list("journal")  # without what the kill left half written
    path = min((out / "journal" / name for name in names), key=lambda path: path.stat().st_size)
    shard, data = int(path.name[:6]), path.read_bytes()
    for others in (out / "journal").iterdir():
        if others != path:
            others.unlink()
    places = [*range(80), *chance.sample(range(len(data)), min(len(data), 200))]
    for place in places:
        path.write_bytes(data[:place])
        assert path.name in journal.recover(shard)[1]
        path.write_bytes(data)
        flip(path, place, chance.randrange(8))
        # The header's eight spare bytes are under its checksum as well.
        assert path.name in journal.recover(shard)[1]
        path.write_bytes(data)
    assert path.name not in journal.recover(shard)[1]


def test_a_journal_without_a_manifest_is_nobodys(halved: pathlib.Path, copy: Any) -> None:
    """Results of an earlier job with other settings must not become rows of a new one."""
    out = copy(halved)
    shutil.rmtree(out / "manifest")
    shutil.rmtree(out / "parts")
    settings = {"output": {"rows_per_shard": 60}, "sampling": {"max_tokens": 5}, "scripted": {"step_s": 0.0}}
    jobs.finish(jobs.spec_of(out.parent, **settings))
    assert max(row["num_output_tokens"] for row in jobs.rows_of(out)) == 5
