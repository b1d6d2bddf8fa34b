"""Disks that are full, read-only, slow or failing: the job stops with one clear line, and goes on once they are mended.

The disks are real where this system lets tests mount some: a tmpfs for room and inodes, an ext4 image for a disk that
fails under a job at work. Where it does not, and for quotas, the same errors are raised at fault points; a limit on
the size of files is real everywhere.
"""

import contextlib
import errno
import fcntl
import os
import pathlib
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
import stores

import jobs
from batchinf.base.bucket import Bucket
from batchinf.base.errors import OutputError
from batchinf.base.storage import Folder, create, disk_error
from batchinf.manifest.names import part_name, readable_file
from batchinf.manifest.state import read_state
from batchinf.output.journal import Journal
from batchinf.spec.job import JobSpec
from batchinf.tasks.registry import task_of

ONE_REPLICA = {"data_parallel_size": 1}
# Of ext4: from now on every access to its disk is an error, as with one that was pulled out.
EXT4_IOC_SHUTDOWN, NO_LOG_FLUSH = 0x8004587D, 2


def command(*arguments: object) -> None:
    subprocess.run([str(argument) for argument in arguments], check=True, capture_output=True)


@contextlib.contextmanager
def mounted(folder: pathlib.Path, *arguments: object) -> Iterator[pathlib.Path]:
    """Something mounted on a folder, which must be free again at the end: no process may have it open."""
    folder.mkdir(exist_ok=True)
    command("mount", *arguments, folder)
    try:
        yield folder
    except BaseException:
        subprocess.run(["umount", "-l", folder], check=False)
        raise
    else:
        command("umount", folder)


def remounted(folder: pathlib.Path, options: str) -> bool:
    return (
        subprocess.run(["mount", "-o", f"remount,{options}", folder], check=False, capture_output=True).returncode == 0
    )


def can_mount(*arguments: object, image: bool = False) -> bool:
    """Whether this system lets a test mount this."""
    with tempfile.TemporaryDirectory() as scratch:
        try:
            made = [ext4_image(pathlib.Path(scratch))] if image else []
            with mounted(pathlib.Path(scratch, "mounted"), *arguments, *made):
                return True
        except (OSError, subprocess.CalledProcessError):
            return False


def ext4_image(folder: pathlib.Path) -> pathlib.Path:
    image = folder / "image"
    with image.open("wb") as file:
        file.truncate(64 << 20)
    command("mkfs.ext4", "-q", "-F", image)
    return image


TMPFS = ("-t", "tmpfs", "-o", "size=1m", "tmpfs")
EXT4 = ("-o", "loop,errors=remount-ro")
needs_tmpfs = pytest.mark.skipif(not can_mount(*TMPFS), reason="no tmpfs may be mounted; see the tests of faults")
needs_ext4 = pytest.mark.skipif(
    not can_mount(*EXT4, image=True), reason="no image may be mounted; see the tests of faults"
)


def stops(
    done: "subprocess.CompletedProcess[str]", out: pathlib.Path, words: str, left: list[pathlib.Path] | None = None
) -> None:
    """The one line that a user gets, and what must not be left behind, save what was `left` there before."""
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    [line] = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert str(out) in line
    assert words in line
    assert "run the same command again" in line
    assert "all finished parts are kept" in line
    assert leftovers(out) == (left or [])


def leftovers(out: pathlib.Path) -> list[pathlib.Path]:
    """Half-written files."""
    return list(out.rglob(".tmp-*")) if out.exists() else []


def parts_of(out: pathlib.Path) -> dict[str, bytes]:
    """Committed parts, also those that have no name in `parts/` yet, by their names there."""
    folder = Folder(out)
    if (state := read_state(folder)) is None:
        return {}
    return {part_name(part.shard): (out / readable_file(folder, part)).read_bytes() for part in state.parts.values()}


def finished_unhurt(spec: pathlib.Path, out: pathlib.Path, before: dict[str, bytes] | None = None) -> None:
    """The same command again ends well, with the rows of an unhurt run and without touching what was committed."""
    jobs.finish(spec)
    assert jobs.rows_of(out) == list(jobs.unhurt())
    after = {path.name: path.read_bytes() for path in (out / "parts").iterdir()}
    assert (before or {}).items() <= after.items()
    assert leftovers(out) == []


# -- no room -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@needs_tmpfs
@pytest.mark.parametrize(
    ("limits", "words"),
    [
        (["size=8k", "size=72k", "size=180k", "size=340k"], "no space left on device; make room there"),
        (["nr_inodes=9", "nr_inodes=14", "nr_inodes=31"], "no space left on device; "),
    ],
    ids=["bytes", "inodes"],
)
def test_a_disk_with_too_little_room(limits: list[str], words: str, tmp_path: pathlib.Path) -> None:
    """Less than the lock needs, than the source's cache, than a replica's log, than a segment, than all parts."""
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", limits[0], "tmpfs") as disk:
        out = disk / "out"
        spec = jobs.spec_of(tmp_path, output={"path": str(out), "rows_per_shard": 40})
        before: dict[str, bytes] = {}
        for limit in limits:
            command("mount", "-o", f"remount,{limit}", disk)
            # On a slow machine, segments that are written each 0.2 s would take all the room before there is a part.
            pace = 600 if limit == limits[-1] else 0.2
            failed = jobs.run("run", spec, "--set", f"checkpoint_interval_s={pace}")
            stops(failed, out, words)
            kept = parts_of(out)
            assert before.items() <= kept.items()
            before = kept
        assert before
        assert "warning: " in failed.stderr
        command("mount", "-o", "remount,size=64m,nr_inodes=10000", disk)
        finished_unhurt(spec, out, before)


@pytest.mark.slow
@pytest.mark.all_rows
def test_a_limit_on_the_size_of_files(tmp_path: pathlib.Path) -> None:
    out = tmp_path / "out"
    one = {"data_parallel_size": 1}
    spec = jobs.spec_of(tmp_path, output={"rows_per_shard": 600}, checkpoint_interval_s=600, parallel=one)
    limited = 'ulimit -f 64; exec "$@"'
    failed = subprocess.run(
        ["bash", "-c", limited, "bash", sys.executable, "-m", "batchinf", "run", str(spec)],
        capture_output=True, text=True, cwd=jobs.ROOT, check=False, timeout=240,
        env={**os.environ, **jobs.quick_start()},
    )  # fmt: skip
    stops(failed, out, "file too large; raise the limit on the size of files")
    finished_unhurt(spec, out)


@pytest.mark.fewer_rows
@pytest.mark.parametrize("limit", jobs.slowly(16, 24, 40, 64))
def test_a_limit_on_open_files(limit: int, tmp_path: pathlib.Path) -> None:
    (tmp_path / "in").mkdir()
    for number, line in enumerate(jobs.prompts().read_text().rstrip("\n").split("\n")):
        (tmp_path / "in" / f"{number:03}.jsonl").write_text(line + "\n")
    spec, out = jobs.spec_of(tmp_path, input={"path": str(tmp_path / "in")}), tmp_path / "out"
    limited = f'ulimit -n {limit}; exec "$@"'
    done = jobs.run("run", spec, prefix=("bash", "-c", limited, "bash"))
    if done.returncode != 0:
        assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
        [line] = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        assert "too many open files; raise the limit on open files (ulimit -n)" in line
    assert limit < 64 or done.returncode == 0, done.stderr
    finished_unhurt(spec, out)


# What is written, and by whom: each is refused once.
REFUSALS = {
    "the lock": "storage.create.before_fsync",
    "the lock's heartbeat": "lock.beat",
    "the source's cache": "source.before_fsync",
    "the source's record": "storage.write.before_fsync",
    "job.yaml": "storage.write.before_rename:2",
    "the first commit": "manifest.before_write",
    "half a commit": "manifest.mid_line:3",
    "a commit's fsync": "manifest.after_write:4",
    "a part's new name": "storage.publish.before_rename:2",
    "a replica's start": "replica.start",
    "a segment": "journal.before_fsync",
    "a part": "parts.before_fsync:2",
    "a part's name": "parts.before_rename",
}
NUMBERS = {
    errno.ENOSPC: "no space left on device; make room there",
    errno.EDQUOT: "disk quota exceeded; free space within the quota",
    errno.EROFS: "read-only file system; make it writable again",
}


@pytest.mark.fewer_rows
@pytest.mark.parametrize("number", [errno.ENOSPC, *jobs.slowly(errno.EDQUOT, errno.EROFS)], ids=errno.errorcode.get)
def test_each_write_may_be_refused(number: int, tmp_path: pathlib.Path) -> None:
    out, before = tmp_path / "out", {}
    spec = jobs.spec_of(tmp_path, output={"rows_per_shard": 16})
    # Each number meets a third of them, so that this takes seconds.
    for what in list(REFUSALS)[list(NUMBERS).index(number) :: len(NUMBERS)]:
        failed = jobs.run("run", spec, faults=f"{REFUSALS[what]}=raise {number}")
        words = NUMBERS[number]
        if what == "a replica's start":  # of no file
            assert failed.returncode == 2
            assert f"error: {words}" in failed.stderr
        else:
            stops(failed, out, words)
        assert not (out / "lock").exists(), what
        assert before.items() <= parts_of(out).items()
        before = parts_of(out)
    finished_unhurt(spec, out, before)


def test_what_is_only_for_looking_at_ends_no_job(tmp_path: pathlib.Path) -> None:
    spec = jobs.spec_of(tmp_path)
    jobs.finish(spec, faults=f"status.before_fsync=raise {errno.ENOSPC},status.before_rename:2=raise {errno.EDQUOT}")
    assert jobs.rows_of(tmp_path / "out") == list(jobs.unhurt())
    assert leftovers(tmp_path / "out") == []


# -- a disk that cannot be written any more ----------------------------------------------------------------------------


@needs_tmpfs
def test_a_read_only_folder_at_the_start(tmp_path: pathlib.Path) -> None:
    with mounted(tmp_path / "disk", *TMPFS[:-1], "tmpfs") as disk:
        out = disk / "out"
        spec = jobs.spec_of(tmp_path, output={"path": str(out), "rows_per_shard": 40})
        command("mount", "-o", "remount,ro,size=64m", disk)
        stops(jobs.run("run", spec), out, "read-only file system; make it writable again")
        command("mount", "-o", "remount,rw", disk)
        assert jobs.run("run", spec, faults="coordinator.after_publish:3=kill").returncode == -9
        before = parts_of(out)
        # Until the replicas have ended, their logs are open.
        jobs.wait_until(lambda: remounted(disk, "ro"))
        # What a killed process was just writing can be removed once the disk may be written again.
        left = leftovers(out)
        stops(jobs.run("run", spec), out, "read-only file system; make it writable again", left)
        assert jobs.run("status", out).returncode == 0
        command("mount", "-o", "remount,rw", disk)
        finished_unhurt(spec, out, before)


@pytest.mark.fewer_rows
@needs_ext4
@pytest.mark.parametrize("harm", ["gone", *jobs.slowly("read-only")])
def test_a_disk_that_fails_under_a_job_at_work(harm: str, tmp_path: pathlib.Path) -> None:
    image, marker, folder = ext4_image(tmp_path), tmp_path / "held", tmp_path / "disk"
    out = folder / "out"
    spec = jobs.spec_of(tmp_path, output={"path": str(out), "rows_per_shard": 40}, max_restarts=1)
    with mounted(folder, *EXT4, image):
        process = jobs.start("run", spec, faults=f"coordinator.after_publish:5=hold {marker}")
        jobs.wait_until(lambda: marker.exists() or process.poll() is not None)
        before = parts_of(out)
        hurt(folder, harm)
        marker.unlink()
        code, printed, errors = jobs.end(process)
    words = {"read-only": "read-only file system", "gone": "input/output error"}[harm]
    assert code == 2, errors
    assert "Traceback" not in errors + printed
    [line] = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert str(out) in line
    assert words in line
    assert "run the same command again: all finished parts are kept" in line
    checked = subprocess.run(["e2fsck", "-fy", image], check=False, capture_output=True)
    assert checked.returncode in (0, 1), checked.stdout
    assert before
    with mounted(folder, *EXT4, image):
        finished_unhurt(spec, out, before)


def hurt(folder: pathlib.Path, harm: str) -> None:
    if harm == "gone":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            fcntl.ioctl(descriptor, EXT4_IOC_SHUTDOWN, struct.pack("I", NO_LOG_FLUSH))
        finally:
            os.close(descriptor)
        return
    # What ext4 does when it finds that it is damaged: from now on nobody writes.
    device = os.lstat(folder).st_dev
    name = os.path.basename(os.readlink(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}"))
    pathlib.Path(f"/sys/fs/ext4/{name}/trigger_fs_error").write_text("1")


@pytest.mark.fewer_rows
@pytest.mark.parametrize(
    "where", ["journal.before_fsync", *jobs.slowly("parts.before_rename", "feeder.read:2", "writer.store:2")]
)
def test_a_disk_that_fails_once(where: str, tmp_path: pathlib.Path) -> None:
    out, once = tmp_path / "out", tmp_path / "once"
    once.mkdir()
    # One replica: beside another, the job may be done before the one that died is started again.
    spec = jobs.spec_of(tmp_path, output={"rows_per_shard": 40}, parallel=ONE_REPLICA)
    jobs.finish(spec, faults=f"{where}=raise {errno.EIO}", BATCHINF_FAULTS_ONCE=str(once))
    assert jobs.rows_of(out) == list(jobs.unhurt())
    assert len(jobs.events_of(out, "replica_started")) == 2
    [cause] = [event["cause"] for event in jobs.events_of(out, "replica_ended") if event["cause"]]
    assert "input/output error" in cause.lower()
    assert leftovers(out) == []


def test_a_disk_that_goes_on_failing(tmp_path: pathlib.Path) -> None:
    out = tmp_path / "out"
    spec = jobs.spec_of(tmp_path, max_restarts=0, parallel=ONE_REPLICA)
    failed = jobs.run("run", spec, faults=f"journal.before_fsync=raise {errno.EIO}")
    stops(failed, out, "input/output error; check the disk")
    finished_unhurt(spec, out)


# -- a slow disk -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.real_starts
def test_a_crash_while_a_part_is_written_slowly(tmp_path: pathlib.Path) -> None:
    """A whole shard that waits for its part is in the journal when the interval is over."""
    out, marker = tmp_path / "out", tmp_path / "held"
    # None of its rows is journalled before it is whole: the first checkpoint finds it waiting.
    spec = jobs.spec_of(tmp_path, parallel=ONE_REPLICA, output={"rows_per_shard": 40}, checkpoint_interval_s=6)
    process = jobs.start("run", spec, faults=f"parts.before_fsync=hold {marker}")
    jobs.wait_until(lambda: marker.exists() or process.poll() is not None, 120)
    jobs.wait_until(lambda: num_journalled(out, 0) == 40 or process.poll() is not None)
    everyone = jobs.family(process.pid)
    jobs.kill(everyone)
    process.communicate()
    assert jobs.are_gone(everyone)
    marker.unlink()
    assert not jobs.state_of(out).parts
    kept = sum(num_journalled(out, shard) for shard in range(24))
    finished_unhurt(spec, out)
    recovered = {event["shard"]: event["num_requests"] for event in jobs.events_of(out, "recovered")}
    assert recovered[0] == 40
    assert sum(recovered.values()) == kept


def num_journalled(out: pathlib.Path, shard: int) -> int:
    state = jobs.state_of(out)
    journal = Journal(Folder(out), "test", task_of(JobSpec.model_validate(state.header.spec)).result_schema)
    return sum(segment.table().num_rows for segment in journal.recover(shard)[0])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_slow_disk_is_waited_for_and_reported(tmp_path: pathlib.Path) -> None:
    out, marker = tmp_path / "out", tmp_path / "held"
    sampling = {"n": 4, "temperature": 0.8, "max_tokens": 512, "logprobs": 20}
    sections: dict[str, Any] = {
        "sampling": sampling,
        "parallel": ONE_REPLICA,
        "scripted": {"max_num_seqs": 256, "step_s": 0.0, "vary_lengths": False},
        "checkpoint_interval_s": 1,
    }
    spec = jobs.spec_of(tmp_path, **sections)
    process = jobs.start("run", spec, faults=f"journal.before_fsync=hold {marker}")
    # The queue to the disk holds 96 MiB: then the engine has to wait.
    jobs.wait_until(lambda: jobs.snapshot_of(out).get("stalled_by_disk_s", 0) > 1 or process.poll() is not None, 600)
    assert process.poll() is None
    seen = jobs.run("status", out).stdout
    marker.unlink()
    code, _, errors = jobs.end(process)
    assert code == 0, errors
    assert "for the disk" in seen
    assert jobs.snapshot_of(out)["stalled_by_disk_s"] > 1
    (tmp_path / "other").mkdir()
    other = jobs.spec_of(tmp_path / "other", **sections)
    jobs.finish(other)
    assert without_attempts(out).equals(without_attempts(tmp_path / "other" / "out"))


def without_attempts(out: pathlib.Path) -> pa.Table:
    return jobs.table_of(out).drop_columns(["attempts"]).combine_chunks()


# -- before the start --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_samples", [1, 16_384])
def test_a_job_that_will_not_fit_is_warned_of(num_samples: int, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "many.jsonl"
    path.write_text("".join(f'{{"id": "{row}", "prompt": "Say {row}."}}\n' for row in range(20_000)))
    sampling = {"temperature": 1.0, "n": num_samples, "logprobs": 20, "max_tokens": 64}
    spec = jobs.spec_of(tmp_path, input={"path": str(path)}, sampling=sampling, output={"keep_columns": []})
    done = jobs.run("validate", spec)
    assert done.returncode == 0, done.stderr
    warnings = [line for line in done.stdout.splitlines() if line.startswith("warning: ") and "GiB" in line]
    assert len(warnings) == (num_samples > 1)
    for warning in warnings:
        free = shutil.disk_usage(tmp_path).free / 2**30
        said = float(warning.rpartition(" GiB are free")[0].rpartition(" ")[2].replace(",", ""))
        assert said == pytest.approx(free, rel=0.5)
        assert "make room and run the same command again" in warning


@needs_tmpfs
def test_a_disk_without_inodes_is_warned_of(tmp_path: pathlib.Path) -> None:
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=64m,nr_inodes=20", "tmpfs") as disk:
        done = jobs.run("validate", jobs.spec_of(tmp_path, output={"path": str(disk / "out")}))
        assert done.returncode == 0, done.stderr
        assert "files will be made, it can hold 19 more" in done.stdout


# -- the pieces --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("durable", [True, False])
def test_a_write_that_finds_no_room_leaves_nothing(durable: bool, tmp_path: pathlib.Path) -> None:
    script = (
        "import resource, sys; from batchinf.base.storage import Folder, disk_error; folder = Folder(sys.argv[1])\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        f"for write in (lambda: folder.write_atomic('a', bytes(2000), durable={durable}),"
        " lambda: folder.create_exclusive('b', bytes(2000))):\n"
        "    try:\n        write()\n    except OSError as error:\n        print(disk_error(error))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(jobs.ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", script, tmp_path], env=environment, capture_output=True, text=True, check=False
    )
    lines = done.stdout.splitlines()
    assert [line.partition(";")[0] for line in lines] == [f"{tmp_path}/{name}: file too large" for name in "ab"]
    assert list(tmp_path.iterdir()) == []


def test_without_hard_links_half_a_file_does_not_count(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Folder(tmp_path)
    monkeypatch.setattr(os, "link", refuse(errno.EPERM))
    assert folder.create_exclusive("a", b"first")
    assert not folder.create_exclusive("a", b"second")
    assert folder.read("a") == b"first"
    monkeypatch.setattr(os, "fsync", refuse(errno.EDQUOT))
    monkeypatch.setattr(
        folder, "create_exclusive", lambda name, data: folder._create_without_links(tmp_path / name, data)
    )
    with pytest.raises(OSError, match="quota") as caught:
        folder.create_exclusive("b", b"half")
    assert caught.value.filename == str(tmp_path / "b")
    assert folder.list("") == ["a"]


def refuse(number: int) -> Any:
    def refusing(*arguments: object, **options: object) -> None:
        raise OSError(number, os.strerror(number))

    return refusing


def test_words_about_a_disk(tmp_path: pathlib.Path) -> None:
    assert disk_error(OSError(errno.ENOSPC, "No space left on device", "a/b")) == (
        "a/b: no space left on device; make room there, then run the same command again: all finished parts are kept"
    )
    assert (
        disk_error(FileNotFoundError(errno.ENOENT, "No such file or directory", "a")) == "a: no such file or directory"
    )
    assert disk_error(OSError("odd")) == "odd"
    with pytest.raises(FileExistsError) as caught:
        create(tmp_path)
    assert caught.value.filename == str(tmp_path)
    (tmp_path / "a").write_text("a file")
    with pytest.raises(OutputError, match=r"cannot create the output folder .*/a: file exists"):
        Folder(tmp_path / "a" / "b").make()


@needs_tmpfs
@pytest.mark.slow
def test_a_full_folder_for_temporary_files(tmp_path: pathlib.Path) -> None:
    """Nothing of a job depends on the room in TMPDIR: what is large lies in the output folder."""
    (tmp_path / "tmp").mkdir()
    with mounted(tmp_path / "tmp", "-t", "tmpfs", "-o", "size=16k", "tmpfs") as full:
        with contextlib.suppress(OSError):
            (full / "x").write_bytes(bytes(1 << 20))
        assert os.statvfs(full).f_bavail == 0
        where = {"order": "prefix", "where": "language = 'en'", "limit": 60}
        spec = jobs.spec_of(tmp_path, input=where, parallel={"data_parallel_size": 1})
        jobs.finish(spec, TMPDIR=str(full))
        jobs.finish(spec, "--retry", "row_index < 50", TMPDIR=str(full))
        assert jobs.state_of(tmp_path / "out").is_done and len(jobs.rows_of(tmp_path / "out")) == 60
        for command in ("head", "report", "check"):
            assert jobs.run(command, tmp_path / "out", TMPDIR=str(full)).returncode == 0


@needs_tmpfs
@pytest.mark.usefixtures("store_of_this_process")
def test_an_object_for_which_the_disk_has_no_room(url: str, store: stores.Proxy, tmp_path: pathlib.Path) -> None:
    bucket = Bucket(url, patience_s=600)
    bucket.put("object", bytes(2 << 20))
    store.seen.clear()
    with mounted(tmp_path / "disk", *TMPFS) as disk:
        with pytest.raises(OSError, match="No space left") as raised:
            bucket.download("object", disk / "object")
        assert disk_error(raised.value).startswith(f"{disk}/object: no space left on device; make room there, then run")
        assert [*disk.iterdir()] == []
    assert len(store.seen) == 1


@needs_tmpfs
def test_parts_on_another_file_system(tmp_path: pathlib.Path) -> None:
    (tmp_path / "out").mkdir()
    spec = jobs.spec_of(tmp_path, parallel=ONE_REPLICA, input={"limit": 5})
    with mounted(tmp_path / "out" / "parts", *TMPFS):
        failed = jobs.run("run", spec)
    assert failed.returncode == 2
    assert "invalid cross-device link; files are renamed between the folders of a job" in failed.stderr
    jobs.finish(spec)
