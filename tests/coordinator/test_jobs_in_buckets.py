"""Jobs whose output is in a bucket, on a real S3 server: killed, moved to an empty machine, raced, and cut off."""

import json
import math
import os
import pathlib
import signal
import socket
import threading
import time

import pytest
import stores

import jobs
from batchinf.manifest.events import EVENTS_FILE

pytestmark = [pytest.mark.fewer_rows]

# Steps at which the coordinator is killed. Each test then deletes the work folder and starts again.
STEPS = (
    "cut.before_record",
    "cut.after_record",
    "chain.before_commit:1",
    "chain.after_commit:1",
    "chain.after_commit:4",
    "chain.before_commit:9",
    "chain.after_commit:9",
    "manifest.mid_line:8",
    "mirror.before_part:3",
    "mirror.after_part:3",
    "mirror.before_bundle:2",
    "mirror.after_bundle:2",
    "mirror.before_delete:1",
    "coordinator.before_drop:4",
)
FAST = ("chain.after_commit:9", "mirror.after_part:3")
# A job that takes 2 s at least, so that it sends its journal several times, and parts come one after the other: those
# that come together are one commit.
SLOW = {"scripted": {"step_s": 0.005}}


def _is_whole(url: str) -> None:
    """What any reader finds is what the manifest names, and the rows of an unhurt job."""
    assert set(stores.names(url, "parts")) == stores.committed(url)
    assert stores.rows(url) == list(jobs.unhurt())
    assert not stores.names(url, "journal")
    assert stores.read(url, "lock") == b"free"


def test_a_job_in_a_bucket(url: str, store: stores.Proxy, tmp_path: pathlib.Path) -> None:
    spec = stores.spec_of(tmp_path, url)
    done = jobs.finish(spec, **store.environment)
    assert f"in {url}/parts" in done.stdout
    _is_whole(url)
    assert not list((tmp_path / "work" / "parts").iterdir())
    secret = stores.KEYS["AWS_SECRET_ACCESS_KEY"].encode()
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and secret in path.read_bytes()]
    # Nothing is left to run, also on another machine.
    stores.lose_host(tmp_path)
    num_parts = sum(path.endswith(".parquet") for method, path in store.seen if method == "PUT")
    assert "was already done" in jobs.finish(spec, **store.environment).stdout
    assert sum(path.endswith(".parquet") for method, path in store.seen if method == "PUT") == num_parts


@pytest.mark.parametrize(
    "step", [pytest.param(step, marks=[] if step in FAST else [pytest.mark.slow]) for step in STEPS]
)
def test_killed_and_gone_on_with_on_an_empty_machine(
    step: str, url: str, store: stores.Proxy, tmp_path: pathlib.Path
) -> None:
    spec = stores.spec_of(tmp_path, url, **SLOW)
    killed = jobs.run("run", spec, faults=f"{step}=kill", **store.environment)
    assert killed.returncode == -9, killed.stderr
    stores.lose_host(tmp_path)
    committed = stores.committed(url)
    found = stores.names(url, "parts")
    assert committed <= set(found)
    if found:
        rows = stores.rows(url)
        assert len({row["row_index"] for row in rows}) == len(rows)
        expected = {row["row_index"]: row for row in jobs.unhurt()}
        assert all(row == expected[row["row_index"]] for row in rows)
    before = {name: stores.read(url, f"parts/{name}") for name in found}
    jobs.finish(spec, **store.environment)
    _is_whole(url)
    # Parts are final, those too that were uploaded and not committed.
    assert {name: stores.read(url, f"parts/{name}") for name in found} == before
    assert not [line for line in stores.lines(url) if line["kind"] == "lost"]


@pytest.mark.slow
def test_the_events_of_all_starts_are_in_the_bucket(url: str, store: stores.Proxy, tmp_path: pathlib.Path) -> None:
    spec = stores.spec_of(tmp_path, url, **SLOW)
    work = tmp_path / "work"
    process = jobs.start("run", spec, **store.environment)
    jobs.wait_until(lambda: len(stores.names(url, "parts")) >= 2)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 75, errors
    first = stores.read(url, EVENTS_FILE)
    assert first == (work / EVENTS_FILE).read_bytes()
    # Another machine, whose work folder has the events of another job.
    stores.lose_host(tmp_path)
    work.mkdir()
    (work / EVENTS_FILE).write_bytes(b'{"at": "2020-01-01T00:00:00+00:00", "name": "epoch", "epoch": 9}\n')
    jobs.finish(spec, **store.environment)
    _is_whole(url)
    assert stores.read(url, EVENTS_FILE).startswith(first)
    assert [event["epoch"] for event in stores.events(url, "epoch")] == [1, 2]
    assert jobs.run("report", url, "-o", tmp_path / "page.html", **store.environment).returncode == 0


@pytest.mark.slow
def test_what_a_killed_process_left_of_a_finished_job_goes(
    url: str, store: stores.Proxy, tmp_path: pathlib.Path
) -> None:
    spec = stores.spec_of(tmp_path, url, **SLOW)
    assert jobs.run("run", spec, faults="mirror.after_bundle:1=kill", **store.environment).returncode == -9
    # As of a process that was killed when the job was done: results that are in parts by now, and its lock.
    left = {name: stores.read(url, f"journal/{name}") for name in stores.names(url, "journal")}
    left_lock = stores.read(url, "lock")
    assert left and left_lock != b"free"
    jobs.finish(spec, **store.environment)
    _is_whole(url)
    before = stores.lines(url)
    for name, data in {"lock": left_lock, **{f"journal/{name}": data for name, data in left.items()}}.items():
        with stores.file_system().open_output_stream(f"{url.removeprefix('s3://')}/{name}") as file:
            file.write(data)
    jobs.finish(spec, **store.environment)
    _is_whole(url)
    assert not stores.names(url, "journal") and stores.read(url, "lock") == b"free"
    assert stores.lines(url) == before


def test_requests_in_the_bucket_do_not_run_again(url: str, store: stores.Proxy, tmp_path: pathlib.Path) -> None:
    # One shard is so long that only its checkpoints are stored when the coordinator is killed.
    slow = {"scripted": {"step_s": 0.05}, "parallel": {"data_parallel_size": 1}, "output": {"rows_per_shard": 240}}
    spec = stores.spec_of(tmp_path, url, **slow)
    assert jobs.run("run", spec, faults="mirror.after_bundle:6=kill", **store.environment).returncode == -9
    stores.lose_host(tmp_path)
    assert not stores.names(url, "parts")
    num_stored = stores.num_journalled(url)
    assert len(stores.names(url, "journal")) == 6 and num_stored >= 6
    jobs.finish(stores.spec_of(tmp_path, url, **{**slow, "scripted": {"step_s": 0.0}}), **store.environment)
    _is_whole(url)
    [recovered] = stores.events(url, "recovered")
    assert recovered["num_requests"] == num_stored


@pytest.mark.slow
def test_a_paused_holder_wakes_up(url: str, store: stores.Proxy, tmp_path: pathlib.Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    marker = tmp_path / "held"
    first = jobs.start(
        "run",
        stores.spec_of(tmp_path / "a", url),
        faults=f"chain.before_commit:6=hold {marker}",
        **store.environment,
    )
    jobs.wait_until(lambda: marker.exists() and marker.read_text())
    # A takeover by another machine: after a minute without a heartbeat it swaps the lock.
    with stores.file_system().open_output_stream(f"{url.removeprefix('s3://')}/lock") as file:
        file.write(b"free")
    jobs.finish(stores.spec_of(tmp_path / "b", url), **store.environment)
    before = {name: stores.read(url, f"parts/{name}") for name in stores.names(url, "parts")}
    marker.unlink()
    _, errors = first.communicate(timeout=120)
    assert first.returncode == 2, errors
    assert "is no longer held by this process" in errors
    assert {name: stores.read(url, f"parts/{name}") for name in stores.names(url, "parts")} == before
    # The loser's next run finds the job done, and removes what a request of its first run stored too late.
    assert "was already done" in jobs.finish(tmp_path / "a" / "job.yaml", **store.environment).stdout
    _is_whole(url)


@pytest.mark.slow
def test_a_wall_clock_that_jumps(url: str, store: stores.Proxy, tmp_path: pathlib.Path) -> None:
    # No decision reads the wall clock: not that about a lock, a heartbeat, a bundle or a part.
    jumping = {**store.environment, "QUICK_START_CLOCK": "7200"}
    spec = stores.spec_of(tmp_path, url, **SLOW)
    assert jobs.run("run", spec, faults="mirror.after_bundle:2=kill", **jumping).returncode == -9
    stores.lose_host(tmp_path)
    jobs.finish(spec, **jumping)
    hours = {json.loads(line)["at"][11:13] for line in stores.read(url, EVENTS_FILE).splitlines()}
    assert len(hours) > 1, "the clock did not jump"
    _is_whole(url)


def test_two_at_once(url: str, store: stores.Proxy, tmp_path: pathlib.Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    specs = [stores.spec_of(tmp_path / name, url) for name in ("a", "b")]
    both = [jobs.start("run", spec, **store.environment) for spec in specs]
    ended = [process.communicate(timeout=200)[1] for process in both]
    codes = [process.returncode for process in both]
    assert 0 in codes and set(codes) <= {0, 2}, ended
    _is_whole(url)


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)])
def test_faults_in_a_quarter_of_the_requests(seed: int, url: str, tmp_path: pathlib.Path) -> None:
    with stores.proxy(stores.often(0.25, seed)) as store:
        spec = stores.spec_of(tmp_path, url)
        killed = jobs.run("run", spec, faults="chain.after_commit:8=kill", **store.environment)
        assert killed.returncode == -9, killed.stderr
        stores.lose_host(tmp_path)
        # The killed process could not free its lock, but it ran on this host.
        jobs.finish(spec, **store.environment)
    _is_whole(url)


@pytest.mark.slow
def test_a_store_that_is_absent_for_some_time(url: str, store: stores.Proxy, tmp_path: pathlib.Path) -> None:
    spec = stores.spec_of(tmp_path, url, output={"store_timeout_s": 2})
    absent = []

    def fault(method: str, path: str) -> str:
        if "/commits/000000010" in path:
            absent.append(path)
        return "absent" if absent else ""

    store.fault = fault
    ended = jobs.run("run", spec, **store.environment)
    assert ended.returncode == 2
    assert ended.stderr.count("the store has not taken a request for") == 1, ended.stderr
    assert "Debug source" not in ended.stderr and "secret-of-the-key" not in ended.stderr
    store.fault = lambda method, path: ""
    jobs.finish(spec, **store.environment)
    _is_whole(url)


def test_a_store_that_is_slow_for_some_time(url: str, store: stores.Proxy, tmp_path: pathlib.Path) -> None:
    # Each answer takes at most a third of the time after which the job would end if there were none. SLOW_STORE_S: of
    # all. A request of a small object is given up after 20 s, and sent again.
    slow_s = float(os.environ.get("SLOW_STORE_S", "4"))
    delay_s = min(slow_s / 6, 10)
    since: list[float] = []

    def fault(method: str, path: str) -> str:
        if "/commits/000000006" in path:
            since.append(time.monotonic())
        return f"delay {delay_s}" if since and time.monotonic() - since[0] < slow_s else ""

    store.fault = fault
    done = jobs.finish(stores.spec_of(tmp_path, url, output={"store_timeout_s": slow_s / 2}), **store.environment)
    assert time.monotonic() - since[0] > delay_s and "the store has not taken" not in done.stderr
    _is_whole(url)


# 1.2 MB of parts, and twice as much in the journal, in a second or two.
WIDE = {
    "sampling": {"logprobs": 20, "max_tokens": 200},
    "scripted": {"vary_lengths": False, "max_num_seqs": 64},
    "input": {"limit": 100},
}


@pytest.mark.slow
@pytest.mark.parametrize("bytes_per_s", [500_000, 50_000])
def test_a_slow_link(bytes_per_s: int, url: str, tmp_path: pathlib.Path) -> None:
    spec = {**WIDE, "scripted": {**WIDE["scripted"], "step_s": 0.02}, "output": {"rows_per_shard": 50}}
    jobs.finish(jobs.spec_of(tmp_path, **{**spec, "output": {**spec["output"], "path": str(tmp_path / "out")}}))
    with stores.proxy(bytes_per_s=bytes_per_s) as link:
        process = jobs.start("run", stores.spec_of(tmp_path, url, **spec), **link.environment)
        _, errors = process.communicate()
        assert process.returncode == 0, errors
        assert "has not answered" not in errors
        # A bundle arrives in seconds, beside the parts. Nothing is sent twice, and no content in vain.
        bundles = {path: size for path, size in link.sent if "/journal/" in path}
        assert bundles and max(bundles.values()) < max(10 * bytes_per_s, 400_000)
        large = [path for path, _ in link.sent if "/journal/" in path or "/parts/" in path]
        assert len(large) == len({*large})
        assert link.num_moved["up"] == sum(size for _, size in link.sent)
    assert set(stores.names(url, "parts")) == stores.committed(url) and not stores.names(url, "journal")
    assert stores.rows(url) == jobs.rows_of(tmp_path / "out")


@pytest.mark.slow
def test_a_stop_on_a_slow_link(url: str, tmp_path: pathlib.Path) -> None:
    spec = stores.spec_of(tmp_path, url, **WIDE, checkpoint_interval_s=1)
    with stores.proxy(bytes_per_s=30_000) as link:
        process = jobs.start("run", spec, **link.environment)
        jobs.wait_until(lambda: any("/parts/" in path or "/journal/" in path for _, path in link.seen))
        process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        _, errors = process.communicate(timeout=60)
        assert time.monotonic() - began < 27
        assert process.returncode == 75, errors
        assert f"{url} has " in errors and f"only {tmp_path / 'work'} on this host has " in errors
        link.bytes_per_s = math.inf
        jobs.finish(spec, **link.environment)
    assert stores.table(url).num_rows == 100


def test_a_store_that_answers_again(url: str, store: stores.Proxy, tmp_path: pathlib.Path) -> None:
    num_seen = []

    def fault(method: str, path: str) -> str:
        num_seen.append(path)
        return "absent" if 20 < len(num_seen) < 50 else ""

    store.fault = fault
    jobs.finish(stores.spec_of(tmp_path, url), **store.environment)
    assert len(num_seen) > 50
    _is_whole(url)


def test_slices_on_machines_of_their_own(url: str, store: stores.Proxy, tmp_path: pathlib.Path) -> None:
    for index in (1, 0):
        (tmp_path / str(index)).mkdir()
        spec = stores.spec_of(tmp_path / str(index), url)
        jobs.finish(spec, "--slice", f"{index}/2", **store.environment)
    both = [row for index in (0, 1) for row in stores.rows(f"{url}/slice-{index}")]
    assert both == list(jobs.unhurt())
    refused = jobs.run("run", tmp_path / "0" / "job.yaml", **store.environment)
    assert refused.returncode == 2 and "in 2 slices" in refused.stderr


@pytest.mark.parametrize("others", ["1/2", "1/3"])
def test_slices_that_begin_at_one_moment(others: str, url: str, tmp_path: pathlib.Path) -> None:
    both_are_here = threading.Barrier(2, timeout=120)

    def fault(method: str, path: str) -> str:
        if method == "PUT" and "/cut.json" in path:
            both_are_here.wait()  # both have seen that the bucket has no record of the cut
        return ""

    with stores.proxy(fault) as store:
        processes = []
        for part in ("0/2", others):
            folder = tmp_path / part[0]
            folder.mkdir()
            spec = stores.spec_of(folder, url)
            processes.append(jobs.start("run", spec, "--slice", part, **store.environment))
        ended = [process.communicate(timeout=200)[1] for process in processes]
    codes = [process.returncode for process in processes]
    if others == "1/2":
        assert codes == [0, 0], ended
        both = [row for index in (0, 1) for row in stores.rows(f"{url}/slice-{index}")]
        assert both == list(jobs.unhurt())
    else:  # one of two cuts holds
        assert sorted(codes) == [0, 2], ended
        assert "slices" in ended[codes.index(2)]


@pytest.mark.slow
def test_chosen_rows_survive_the_machine(url: str, store: stores.Proxy, tmp_path: pathlib.Path) -> None:
    some = {"input": {"sample": 0.5, "order": "prefix"}}
    (tmp_path / "local").mkdir()
    jobs.finish(jobs.spec_of(tmp_path / "local", **some))
    spec = stores.spec_of(tmp_path, url, **some)
    assert jobs.run("run", spec, faults="chain.after_commit:8=kill", **store.environment).returncode == -9
    stores.lose_host(tmp_path)
    jobs.finish(spec, **store.environment)
    local = sorted(jobs.rows_of(tmp_path / "local" / "out"), key=lambda row: row["row_index"])
    assert stores.rows(url) == local


@pytest.mark.slow
def test_reading_commands(url: str, store: stores.Proxy, tmp_path: pathlib.Path) -> None:
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    before = jobs.run("status", url, **store.environment, **cache)
    assert before.returncode == 2 and f"{url} holds no job that has begun" in before.stderr
    spec = stores.spec_of(tmp_path, url, **SLOW)
    assert jobs.run("run", spec, faults="chain.after_commit:12=kill", **store.environment).returncode == -9
    part_way = json.loads(jobs.run("status", url, "--json", **store.environment, **cache).stdout)
    committed = [line for line in stores.lines(url) if line["kind"] == "part"]
    assert part_way["jobs"][0]["activity"] == "stopped" and part_way["folder"] == url
    assert part_way["totals"]["num_rows_committed"] == sum(line["num_rows"] for line in committed) > 0
    jobs.finish(spec, **store.environment)
    assert f"{url}: done" in jobs.run("status", f"{url}/", **store.environment, **cache).stdout
    head = jobs.run("head", url, "-n", "5", "--json", **store.environment, **cache)
    expected = list(jobs.unhurt())
    assert [json.loads(line)["id"] for line in head.stdout.splitlines()] == [row["id"] for row in expected[:5]]
    exported = jobs.run(
        "export", url, "-o", tmp_path / "rows.jsonl", "--columns", "id,text", **store.environment, **cache
    )
    assert exported.returncode == 0, exported.stderr
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert rows == [{"id": row["id"], "text": row["text"]} for row in expected]
    # Each part is fetched once for all commands.
    store.seen.clear()
    again = ("export", url, "-o", tmp_path / "again.jsonl", "--columns", "id,text")
    assert jobs.run(*again, **store.environment, **cache).returncode == 0
    assert not [path for method, path in store.seen if path.endswith(".parquet")]


@pytest.mark.parametrize("command", ["report", "slurm --nodes 2", "tune", "run ray"])
def test_commands_that_do_not_work_with_a_bucket(command: str, url: str, tmp_path: pathlib.Path) -> None:
    name, *more = command.split()
    spec = stores.spec_of(tmp_path, url, **({"backend": "ray"} if more == ["ray"] else {}))
    target = url if name == "report" else spec
    more = [] if more == ["ray"] else more
    refused = jobs.run(name, target, *more, AWS_ENDPOINT_URL="http://127.0.0.1:1")
    assert refused.returncode == 2
    assert refused.stderr.count("\n") <= 3 and "bucket" in refused.stderr, refused.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"job.yaml"}


@pytest.mark.parametrize(
    "path", ["s3:/b/x", "s3a://b/x", "https://b/x", "s3://b", "s3://b/../x", "s3://key@b/x", "s3://b/x?key=1", "hf://x"]
)
def test_urls_that_are_no_folder_of_a_bucket(path: str, tmp_path: pathlib.Path) -> None:
    refused = jobs.run("run", jobs.spec_of(tmp_path, output={"path": path}))
    assert refused.returncode == 2 and "output.path" in refused.stderr
    assert "key@" not in refused.stderr and "key=1" not in refused.stderr
    assert {found.name for found in tmp_path.iterdir()} == {"job.yaml"}


def test_without_obstore(url: str, store: stores.Proxy, tmp_path: pathlib.Path) -> None:
    (tmp_path / "obstore.py").write_text("raise ImportError")
    path = f"{tmp_path}:{jobs.quick_start()['PYTHONPATH']}"
    refused = jobs.run("run", stores.spec_of(tmp_path, url), **store.environment, PYTHONPATH=path)
    assert refused.returncode == 2 and "pip install 'batchinf[buckets]'" in refused.stderr


def test_ctrl_c_ends_a_wait_for_the_store(url: str, tmp_path: pathlib.Path) -> None:
    # The connection is taken and never answered.
    with socket.create_server(("127.0.0.1", 0)) as silent:
        environment = {**stores.KEYS, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{silent.getsockname()[1]}"}
        process = jobs.start("run", stores.spec_of(tmp_path, url), **environment)
        connection, _ = silent.accept()
        began = time.monotonic()
        with connection:
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=60)
    assert process.returncode == 75, errors
    assert time.monotonic() - began < 50


@pytest.mark.slow
def test_a_stop_stores_everything_in_the_bucket(url: str, store: stores.Proxy, tmp_path: pathlib.Path) -> None:
    small = {"output": {"rows_per_shard": 12}}
    slow = {"scripted": {"step_s": 0.02}, "checkpoint_interval_s": 100, **small}
    process = jobs.start("run", stores.spec_of(tmp_path, url, **slow), **store.environment)
    jobs.wait_until(lambda: len(stores.names(url, "parts")) >= 3)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 75, errors
    assert set(stores.names(url, "parts")) == stores.committed(url)
    assert stores.read(url, "lock") == b"free"
    stores.lose_host(tmp_path)
    num_stored = stores.num_journalled(url)
    done = jobs.finish(stores.spec_of(tmp_path, url, **small), **store.environment)
    assert f"{num_stored:,} requests finished and kept in the journal" in done.stderr
    _is_whole(url)


def _is_part_way(url: str) -> bool:
    """Whether the bucket has committed parts, and results of a shard without one."""
    parts = set(stores.names(url, "parts"))
    return bool(parts) and parts == stores.committed(url) and stores.num_journalled(url) > 0


@pytest.mark.slow
def test_real_vllm_on_another_machine(url: str, store: stores.Proxy, tmp_path: pathlib.Path) -> None:
    vllm = {
        "scripted": None,
        "engine": {"max_model_len": 512, "max_num_seqs": 8},
        "parallel": {"data_parallel_size": 1},
    }
    # Each row has 32 tokens, so the job has 240 steps. Step 150 comes after 32 rows: two parts, and two rows more.
    vllm |= {"input": {"limit": 60}, "output": {"rows_per_shard": 15}, "sampling": {"ignore_eos": True}}
    (tmp_path / "local").mkdir()
    jobs.finish(jobs.spec_of(tmp_path / "local", **vllm))
    # The input is in the bucket, too, and is read by ranges.
    stores.put(f"{url}/in/a.parquet", stores.prompts_with_pictures())
    vllm["input"] = {"limit": 60, "path": f"{url}/in/*.parquet"}
    spec = stores.spec_of(tmp_path, url, **vllm)
    process = jobs.start("run", spec, faults=f"engine.step:150=hold {tmp_path / 'held'}", **store.environment)
    jobs.wait_until(lambda: process.poll() is not None or _is_part_way(url), 240)
    assert process.poll() is None, process.communicate()[1]
    jobs.kill(jobs.family(process.pid))
    process.communicate()
    stores.lose_host(tmp_path)
    before = {name: stores.read(url, f"parts/{name}") for name in stores.names(url, "parts")}
    num_stored = stores.num_journalled(url)
    jobs.finish(spec, **store.environment)
    assert {name: stores.read(url, f"parts/{name}") for name in before} == before
    assert stores.rows(url) == jobs.rows_of(tmp_path / "local" / "out")
    kept = [event["num_requests"] for event in stores.events(url, "recovered")]
    assert sum(kept) == num_stored > 0
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    verified = jobs.run("verify", spec, "-n", "4", "--json", **store.environment, **cache)
    assert verified.returncode == 0, verified.stderr
    assert json.loads(verified.stdout)["num_rows"] == 4 and json.loads(verified.stdout)["job"] == url


def test_fresh_is_refused(url: str, store: stores.Proxy, tmp_path: pathlib.Path) -> None:
    refused = jobs.run("run", stores.spec_of(tmp_path, url), "--fresh", **store.environment)
    assert refused.returncode == 2
    assert refused.stderr.startswith("error: --fresh cannot rename"), refused.stderr
    assert not store.seen and not (tmp_path / "work").exists()


@pytest.mark.slow
def test_another_job_says_how_to_begin_it_in_the_bucket(url: str, store: stores.Proxy, tmp_path: pathlib.Path) -> None:
    spec = stores.spec_of(tmp_path, url, parallel={"data_parallel_size": 1})
    (tmp_path / "other").mkdir()
    output = {"work_dir": str(tmp_path / "work")}
    other_task = stores.spec_of(tmp_path / "other", url, output=output, task="embed", sampling=None)
    jobs.finish(spec, **store.environment)
    remedy = "give %s job another output.path%s or delete the objects there and the work folder first"
    place = f"error: {url} (work folder {tmp_path / 'work'}) holds "
    another = ("--set", "sampling.max_tokens=3")
    for change in (another, ("--set", "input.limit=9")):
        refused = jobs.run("run", spec, *change, **store.environment)
        assert refused.returncode == 2 and place in refused.stderr, refused.stderr
        assert remedy % ("the new", ";") in refused.stderr and "--fresh" not in refused.stderr
    refused = jobs.run("run", other_task, **store.environment)
    assert refused.returncode == 2 and f"{place}another job: " in refused.stderr, refused.stderr
    assert remedy % ("this", ",") in refused.stderr and "--fresh" not in refused.stderr
    stores.file_system().delete_dir(url.removeprefix("s3://"))
    stores.lose_host(tmp_path)
    jobs.finish(spec, *another, **store.environment)
    assert max(len(row["token_ids"]) for row in stores.rows(url)) == 3


REFUSALS = [
    ("403", "check that the key is right"),
    ("400 ExpiredToken", "check that the key is right, has not expired"),
    ("403 SignatureDoesNotMatch", "check that the key is right"),
    ("404 NoSuchBucket", "make the bucket first"),
    ("404", "the store has not"),
    ("507", "make room"),
    ("403 QuotaExceeded", "make room"),
]


@pytest.mark.slow
def test_a_store_that_refuses(url: str, store: stores.Proxy, tmp_path: pathlib.Path) -> None:
    # In the middle: an expired key, a bucket that is deleted, a full quota. The job goes on after each of them.
    spec = stores.spec_of(tmp_path, url, output={"store_timeout_s": 2})
    for status, words in REFUSALS:
        since: list[str] = []

        def fault(method: str, path: str, status: str = status, since: list[str] = since) -> str:
            # From this commit on, all that is written is refused: parts, heartbeats and the status, too.
            if method == "PUT" and "/commits/000000009" in path:
                since.append(path)
            return status if since and method == "PUT" else ""

        store.fault = fault
        ended = jobs.run("run", spec, **store.environment)
        assert ended.returncode == 2, status
        [line] = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
        assert words in line and "secret" not in line and "Traceback" not in ended.stderr, status
    store.fault = lambda method, path: ""
    jobs.finish(spec, **store.environment)
    _is_whole(url)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("PUT 403 AccessDenied", "may read, list, write and delete there"),  # a key that can only read
        ("GET 403 AccessDenied", "may read, list, write and delete there"),
        ("PUT 403 InvalidAccessKeyId", "check that the key is right"),
        ("PUT 404 NoSuchBucket", "make the bucket first"),
        ("PUT 403 QuotaExceeded", "make room"),
    ],
)
def test_a_store_that_refuses_at_the_start(
    fault: str, words: str, url: str, store: stores.Proxy, tmp_path: pathlib.Path
) -> None:
    method, _, answer = fault.partition(" ")
    store.fault = lambda asked, path: answer if asked == method else ""
    refused = jobs.run("run", stores.spec_of(tmp_path, url), **store.environment)
    assert refused.returncode == 2
    [line] = [line for line in refused.stderr.splitlines() if line.startswith("error: ")]
    assert words in line and url in line and "secret" not in line
    assert "starting" not in refused.stderr  # no engine has started
    assert not stores.names(url, "commits")
