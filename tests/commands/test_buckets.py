"""The commands that read a job read it in a bucket, too, and show what they show of a folder."""

import json
import os
import pathlib
import shutil
import time
from typing import Any

import pyarrow.parquet as pq
import pytest
import stores

import jobs
from batchinf.manifest.lock import Holder

pytestmark = [pytest.mark.fewer_rows]


@pytest.fixture
def environment(store: stores.Proxy, tmp_path: pathlib.Path) -> dict[str, str]:
    return {**store.environment, "XDG_CACHE_HOME": str(tmp_path / "cache")}


def _put(url: str, name: str, data: bytes) -> None:
    with stores.file_system().open_output_stream(f"{url.removeprefix('s3://')}/{name}") as file:
        file.write(data)


def _check(url: str, *options: str, code: int, **environment: str) -> dict[str, Any]:
    checked = jobs.run("check", url, "--json", *options, **environment)
    assert checked.returncode == code, checked.stderr
    return json.loads(checked.stdout)


def test_a_whole_job_is_whole(url: str, environment: dict[str, str], tmp_path: pathlib.Path) -> None:
    spec = stores.spec_of(tmp_path, url)
    before = jobs.run("check", url, **environment)
    assert before.returncode == 2 and "holds no job that has begun" in before.stderr
    assert f"\noutput {url}: a new job\n" in jobs.run("validate", spec, **environment).stdout
    # Not at a bundle of the journal: how many there are depends on the time that the job takes.
    killed = jobs.run("run", spec, faults="mirror.after_part:3=kill", **environment)
    assert killed.returncode == -9
    [half] = _check(url, "--deep", code=0, **environment)["jobs"]
    assert half["activity"] == "stopped" and half["num_parts_checked"] == len(stores.committed(url))
    assert {finding["problem"] for finding in half["findings"]} <= {"part_uploaded"}
    jobs.finish(spec, **environment)
    for deep in ((), ("--deep",)):
        [whole] = _check(url, *deep, code=0, **environment)["jobs"]
        assert whole["activity"] == "done" and not whole["findings"]
        assert whole["num_parts_checked"] == whole["num_parts"] == len(stores.names(url, "parts"))
    # Nothing that was fetched to be checked is kept.
    assert not list((tmp_path / "cache").rglob("*.parquet"))


def test_validate_asks_the_bucket_and_not_the_work_folder(
    url: str, environment: dict[str, str], tmp_path: pathlib.Path
) -> None:
    spec = stores.spec_of(tmp_path, url, input={"limit": 30})
    jobs.finish(spec, **environment)
    other_machine = ("--set", f"output.work_dir={tmp_path / 'elsewhere'}")
    for options in ((), other_machine):
        shown = jobs.run("validate", spec, *options, **environment)
        assert f"\noutput {url}: the job there is done" in shown.stdout, shown.stderr
    stores.file_system().delete_dir_contents(url.removeprefix("s3://"))
    stores.spec_of(tmp_path, url, input={"limit": 20})
    for options in ((), other_machine):
        shown = jobs.run("validate", spec, *options, **environment)
        assert f"\noutput {url}: a new job" in shown.stdout, shown.stderr


def test_validate_makes_its_other_checks_if_the_bucket_refuses_it(
    url: str, store: stores.Proxy, environment: dict[str, str], tmp_path: pathlib.Path
) -> None:
    spec = stores.spec_of(tmp_path, url, input={"limit": 30})
    jobs.finish(spec, **environment)
    store.fault = lambda method, path: "403"
    shown = jobs.run("validate", spec, **environment)
    assert shown.returncode == 0, shown.stderr
    [warning] = [line for line in shown.stdout.splitlines() if line.startswith("warning: whether a job has begun in")]
    assert f"{url}/cut.json: " in warning and "check that the key is right" in warning
    assert f"\noutput {url}: a new job\n" in shown.stdout
    assert "\nprompt lengths" in shown.stdout


@pytest.mark.slow
def test_damage_is_found(url: str, environment: dict[str, str], tmp_path: pathlib.Path) -> None:
    spec = stores.spec_of(tmp_path, url)
    jobs.finish(spec, **environment)
    missing, cut, altered, swapped = (f"parts/part-{shard:06d}.parquet" for shard in (2, 4, 6, 8))
    stranger = "parts/part-2.parquet"
    stores.file_system().delete_file(f"{url.removeprefix('s3://')}/{missing}")
    _put(url, cut, stores.read(url, cut)[:-10])
    whole = stores.read(url, altered)
    _put(url, altered, whole[:1000] + bytes([whole[1000] ^ 1]) + whole[1001:])
    num_bytes = len(stores.read(url, swapped))
    _put(url, swapped, stores.read(url, "parts/part-000009.parquet"))
    _put(url, stranger, whole)
    need_deep = {altered} | ({swapped} if len(stores.read(url, swapped)) == num_bytes else set())
    for deep, damaged in (
        ((), {missing, cut, altered, swapped} - need_deep),
        (("--deep",), {missing, cut, altered, swapped}),
    ):
        [job] = _check(url, *deep, code=2, **environment)["jobs"]
        found = sorted((finding["file"], finding["problem"]) for finding in job["findings"])
        assert found == sorted([*((name, "part_damaged") for name in damaged), (stranger, "foreign_file")])
    # The remedies that the lines name make the job whole again.
    assert {finding["file"] for finding in job["findings"] if finding["needs_repair"]} == need_deep
    stores.file_system().delete_file(f"{url.removeprefix('s3://')}/{stranger}")
    _put(url, "lock", Holder.this_process().encode())
    refused = jobs.run("check", url, "--deep", "--repair", **environment)
    assert refused.returncode == 2 and "is being run by pid" in refused.stderr, refused.stderr
    assert altered in {f"parts/{name}" for name in stores.names(url, "parts")}
    _put(url, "lock", b"free")
    broken = stores.read(url, altered)
    [job] = _check(url, "--deep", "--repair", code=2, **environment)["jobs"]
    moved = {finding["file"]: finding["moved_to"] for finding in job["findings"]}
    assert moved == {missing: None, **{name: name.replace("parts", "damaged") for name in (cut, altered, swapped)}}
    assert stores.read(url, moved[altered]) == broken and stores.read(url, "lock") == b"free"
    assert not {cut, altered, swapped} & {f"parts/{name}" for name in stores.names(url, "parts")}
    jobs.finish(spec, **environment)
    assert _check(url, "--deep", code=0, **environment)["is_whole"]
    assert stores.rows(url) == list(jobs.unhurt())
    # The last commits are read by each command, an old one by `check` alone.
    _put(url, "commits/000000003", stores.read(url, "commits/000000003") + b"\n")
    checked = jobs.run("check", url, **environment)
    assert checked.returncode == 2 and "/commits/00000000" in checked.stderr and "is damaged" in checked.stderr


def test_an_uploaded_part_without_a_commit_is_noted(
    url: str, environment: dict[str, str], tmp_path: pathlib.Path
) -> None:
    killed = jobs.run("run", stores.spec_of(tmp_path, url), faults="mirror.after_part:1=kill", **environment)
    assert killed.returncode == -9
    [job] = _check(url, code=0, **environment)["jobs"]
    unnamed = {finding["file"] for finding in job["findings"] if finding["problem"] == "part_uploaded"}
    assert unnamed == {f"parts/{part}" for part in set(stores.names(url, "parts")) - stores.committed(url)} != set()


def test_a_damaged_journal_is_noted(url: str, environment: dict[str, str], tmp_path: pathlib.Path) -> None:
    slow = {"scripted": {"step_s": 0.05}, "parallel": {"data_parallel_size": 1}, "output": {"rows_per_shard": 240}}
    spec = stores.spec_of(tmp_path, url, **slow)
    assert jobs.run("run", spec, faults="mirror.after_bundle:3=kill", **environment).returncode == -9
    bundle = min(stores.names(url, "journal"))
    data = stores.read(url, f"journal/{bundle}")
    _put(url, f"journal/{bundle}", data[:-20] + bytes(20))
    [found] = _check(url, code=0, **environment)["jobs"]
    assert [finding["problem"] for finding in found["findings"]] == ["journal_damaged"]


@pytest.mark.slow
def test_other_commands_show_what_they_show_of_a_folder(
    url: str, store: stores.Proxy, environment: dict[str, str], tmp_path: pathlib.Path
) -> None:
    (tmp_path / "local").mkdir()
    some = {"input": {"sample": 0.5}}
    jobs.finish(jobs.spec_of(tmp_path / "local", **some))
    out = tmp_path / "local" / "out"
    spec = stores.spec_of(tmp_path, url, **some)
    jobs.finish(spec, **environment)
    shutil.rmtree(tmp_path / "work")
    [row] = pq.read_table(out / "parts", columns=["id"]).slice(7, 1)["id"].to_pylist()
    both = [jobs.run("head", where, "--row", row, "--json", **environment) for where in (out, url)]
    assert both[1].returncode == 0, both[1].stderr
    shown = [json.loads(one.stdout) for one in both]
    assert shown[1].pop("folder") == url and shown[0].pop("folder") == str(out)
    assert shown[0]["prompt"] and shown[0] == shown[1]
    # All parts are here by now: none is fetched again.
    store.seen.clear()
    diff = jobs.run("diff", out, url, "--json", **environment)
    assert diff.returncode == 0, diff.stderr
    assert json.loads(diff.stdout)["changes"]["num_changed"] == 0
    assert json.loads(diff.stdout)["changes"]["num_both"] == len(pq.read_table(out / "parts"))
    page = tmp_path / "report.html"
    reported = jobs.run("report", url, "-o", page, **environment)
    assert reported.returncode == 0, reported.stderr
    assert url in page.read_text()
    assert not [path for method, path in store.seen if path.endswith(".parquet")]
    dataset = jobs.run("export", url, "--to", "hf", "-o", tmp_path / "dataset", **environment)
    assert dataset.returncode == 0, dataset.stderr
    assert pq.read_table(tmp_path / "dataset" / "data").num_rows == len(pq.read_table(out / "parts"))


def test_copies_that_nobody_looks_at_are_deleted(url: str, environment: dict[str, str], tmp_path: pathlib.Path) -> None:
    small = {"input": {"limit": 4}, "parallel": {"data_parallel_size": 1}}
    jobs.finish(stores.spec_of(tmp_path, url, **small), **environment)
    assert jobs.run("head", url, **environment).returncode == 0
    [copy] = (tmp_path / "cache" / "batchinf" / "copies").iterdir()
    week_ago = time.time() - 8 * 24 * 3600
    os.utime(copy, (week_ago, week_ago))
    assert jobs.run("status", f"{url}-other", **environment).returncode == 2
    assert not copy.exists()
