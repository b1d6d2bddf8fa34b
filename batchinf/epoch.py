"""One life of a coordinator, from the lock to the last line: open, recover, run what is left, finish."""

import os
import pathlib
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass

from batchinf.coordinator import Committed, Coordinator, on_stop_signals
from batchinf.errors import ErrorRateExceeded, Interrupted, OutputError
from batchinf.fleet import Fleet
from batchinf.job import Job, check_drift, new_header, open_job
from batchinf.lock import JobLock
from batchinf.manifest import Header, Manifest, State, last_epoch, read_state
from batchinf.placement import Slot, check_free, own_cpus, place, visible_devices
from batchinf.progress import ProgressDisplay
from batchinf.records import Launch
from batchinf.recovery import end_process_groups, note_ended, recover
from batchinf.shards import Pending, total_shards
from batchinf.spec import fingerprint
from batchinf.spec_file import SpecFile, dump_spec
from batchinf.status import count, duration, read_status
from batchinf.storage import Folder

FOLDERS = ("manifest", "parts", "staging", "journal", "logs", "source")


@dataclass(frozen=True, slots=True)
class Summary:
    """What a finished job comes to; the closing lines."""

    folder: str
    num_rows: int
    num_errors: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_parts: int
    num_bytes: int
    device_s: float
    was_done: bool

    def lines(self) -> list[str]:
        """For people."""
        verb = "was already done" if self.was_done else "done"
        return [
            f"{verb}: {self.num_rows:,} output rows, {self.num_errors:,} of them errors; "
            f"{count(self.num_prompt_tokens)} prompt and {count(self.num_output_tokens)} output tokens",
            f"{self.num_parts:,} Parquet files, {self.num_bytes / 2**20:,.1f} MiB, in {self.folder}/parts; "
            f"{self.device_s / 3600:.3f} device-hours ({duration(self.device_s)}) over all attempts",
        ]


def run_job(file: SpecFile, display: ProgressDisplay) -> Summary:
    """Run a job, or what is left of it.

    Raises UserError, Interrupted, or ErrorRateExceeded once all is done but too much of it errors.
    """
    folder = Folder(file.spec.output.path)
    state = read_state(folder) if folder.exists("manifest") else None
    if state is not None and state.is_done:
        check_drift(open_job(file), state.header)
        return _finished(file, state, was_done=True)
    folder.make(*FOLDERS)
    signals: list[int] = []

    def interrupt(number: int) -> None:
        signals.append(number)
        # Not an Exception, which a library may catch and pass over.
        raise KeyboardInterrupt

    # Before and after the coordinator, which drains, a signal ends all at once.
    with on_stop_signals(interrupt):
        try:
            _hold_and_run(file, folder, state, display)
        except KeyboardInterrupt:
            raise Interrupted(f"stopped on {signal.Signals(signals[0]).name}") from None
    done = read_state(folder)
    assert done is not None
    return _finished(file, done, was_done=False)


def _hold_and_run(file: SpecFile, folder: Folder, state: State | None, display: ProgressDisplay) -> None:
    lock = JobLock(folder)
    epoch = lock.acquire(lambda: last_epoch(folder), on_wait=display.say)
    try:
        _run_epoch(file, folder, read_state(folder, state), lock, epoch, display)
    finally:
        lock.release()
        display.close()


def _run_epoch(
    file: SpecFile, folder: Folder, state: State | None, lock: JobLock, epoch: int, display: ProgressDisplay
) -> None:
    display.say("opening model and input")
    job = open_job(file)
    if state is not None:
        check_drift(job, state.header)
        end_process_groups(state)
    slots = place(job.spec, visible_devices(), own_cpus())
    check_free(job.spec, slots)
    manifest = Manifest(folder, epoch, lock, state)
    if state is None:
        state = _begin(job, manifest, len(slots))
    else:
        note_ended(state, read_status(folder), manifest)
    found = recover(job, state.extents, state, manifest)
    manifest.event("epoch", epoch=epoch, adopted=len(found.adopted), lost=list(found.lost))
    manifest.commit()
    for shard in found.lost:
        display.say(f"warning: part {shard} is gone or altered; its rows run again")
    _say_what(job, state, slots, display)
    if not state.committed.all():
        _run_rest(job, state, manifest, lock, slots, epoch, display)
    manifest.done()
    manifest.commit()
    manifest.close()
    _tidy(folder)


def _begin(job: Job, manifest: Manifest, num_replicas: int) -> State:
    if job.folder.list("parts"):
        raise OutputError(
            f"{job.folder.root} holds parts of a job whose manifest is gone: give the new job another output.path, or "
            "delete them yourself"
        )
    header, extent = new_header(job, num_replicas)
    job.folder.write_atomic("job.yaml", dump_spec(job.spec).encode())
    manifest.header(header)
    manifest.extent(extent, job.source.fingerprint)
    manifest.commit()
    state = read_state(job.folder)
    assert state is not None
    return state


def _run_rest(
    job: Job,
    state: State,
    manifest: Manifest,
    lock: JobLock,
    slots: list[Slot],
    epoch: int,
    display: ProgressDisplay,
) -> None:
    warm = compile_marker(job)
    fleet = Fleet(
        slots,
        job.spec.sampling.n,
        launcher(job, state.header),
        epoch,
        job.folder.path("logs"),
        job.spec.max_restarts,
        job.spec.stall_timeout_s,
        is_cache_warm=not slots[0].devices or warm.exists(),
    )
    committed = Committed(int(state.committed.sum()), state.num_rows, state.num_errors)
    num_shards = total_shards(state.extents)
    num_rows = job.source.num_rows * job.spec.sampling.n
    pending = Pending(state.extents, state.committed)
    said = [event.fields["versions"] for event in state.events if event.name == "ready"]
    versions = said[-1] if said else {}
    Coordinator(job, manifest, lock, fleet, pending, display, num_rows, num_shards, committed, versions).run()
    if slots[0].devices:
        warm.parent.mkdir(parents=True, exist_ok=True)
        warm.touch()


def compile_marker(job: Job) -> pathlib.Path:
    """A file in vLLM's cache that says: engines of this model, degrees and arguments have compiled on this machine."""
    spec = job.spec
    shape = fingerprint(
        {
            "model": job.model.fingerprint,
            "engine": spec.engine,
            "parallel": [spec.parallel.tensor_parallel_size, spec.parallel.pipeline_parallel_size],
            "dtype": [spec.model.dtype, spec.model.quantization],
        }
    )
    root = os.environ.get("VLLM_CACHE_ROOT", pathlib.Path.home() / ".cache" / "vllm")
    return pathlib.Path(root, "batchinf", shape)


def launcher(job: Job, header: Header) -> Callable[[Slot, str], Launch]:
    """What each new incarnation of a replica is told."""
    spec = job.spec.model_dump_json()
    metadata = {
        "batchinf.job_id": header.job_id,
        "batchinf.fingerprint": header.fingerprint,
        "batchinf.model": job.model.name,
        "batchinf.model_commit": job.model.commit or job.model.fingerprint,
    }

    def launch(slot: Slot, incarnation: str) -> Launch:
        return Launch(
            slot.replica,
            incarnation,
            os.fspath(job.folder.root),
            spec,
            job.model.path,
            job.model.tokenizer,
            job.model.commit,
            metadata,
            slot.cpus if not slot.devices else (),
        )

    return launch


def _say_what(job: Job, state: State, slots: list[Slot], display: ProgressDisplay) -> None:
    sampling = ", ".join(
        f"{name} {getattr(job.spec.sampling, name)}" + ("" if origin == "spec" else f" ({origin})")
        for name, origin in job.origins.items()
    )
    display.say(f"sampling: {sampling}")
    done, shards = int(state.committed.sum()), len(state.committed)
    display.say(
        f"{job.source.num_rows:,} rows in {shards:,} shards, {done:,} of them done; {len(slots)} replica(s) on "
        + (", ".join("+".join(slot.devices) for slot in slots) if slots[0].devices else "this machine's processor")
    )


def _tidy(folder: Folder) -> None:
    """Work in progress is empty once the job is done."""
    for name in ("staging", "journal"):
        shutil.rmtree(folder.path(name), ignore_errors=True)
        folder.make(name)


def _finished(file: SpecFile, state: State, *, was_done: bool) -> Summary:
    summary = Summary(
        folder=file.spec.output.path,
        num_rows=state.num_rows,
        num_errors=state.num_errors,
        num_prompt_tokens=state.num_prompt_tokens,
        num_output_tokens=state.num_output_tokens,
        num_parts=len(state.parts),
        num_bytes=state.num_bytes,
        device_s=state.device_s,
        was_done=was_done,
    )
    rate = summary.num_errors / max(1, summary.num_rows)
    if rate > file.spec.max_error_rate:
        raise ErrorRateExceeded(
            f"{rate:.1%} of the rows are errors, more than max_error_rate {file.spec.max_error_rate:.1%}; "
            "see the columns error_type and error_message\n" + "\n".join(summary.lines())
        )
    return summary
