"""Makes the fleet of an epoch: backend, devices, engine arguments, messages. Records starts and ends of replicas."""

import contextlib
import functools
import os
import pathlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

from batchinf.base import faults
from batchinf.base.errors import BatchinfError
from batchinf.base.process import say_if_slow
from batchinf.base.slices import source_folder
from batchinf.base.stop_signals import shielded
from batchinf.base.text import counted
from batchinf.fleet.backend import Backend
from batchinf.fleet.devices import Slot, devices_of
from batchinf.fleet.engine_defaults import (
    chosen_arguments,
    lines_of,
    replicas_per_device,
    step_for_images,
    with_most_images,
)
from batchinf.fleet.fleet import OTHER_ARGUMENTS, Ended, Fleet
from batchinf.fleet.local.backend import LocalBackend
from batchinf.fleet.memory.engine_settings import EngineSettings, kept
from batchinf.fleet.parallel import check_devices
from batchinf.fleet.replica import FleetReplica
from batchinf.job.job import Job, PreparedJob, begun_at
from batchinf.manifest.lines import EndedReplica, Lowered, Retry, StartedReplica
from batchinf.manifest.log import Manifest
from batchinf.manifest.state import State
from batchinf.model.memory import fit_of
from batchinf.model.model import check_weights
from batchinf.output.replace import retry_metadata
from batchinf.planning.image_rows import images_of_rows
from batchinf.planning.lengths import shared_share
from batchinf.replica.messages import Launch, Work
from batchinf.spec.job import JobSpec, fingerprint


def choose_backend(spec: JobSpec) -> Backend:
    """The backend of a job. Only this function names a backend."""
    if spec.backend == "ray":
        from batchinf.fleet.ray.backend import RayBackend

        return RayBackend(spec)
    return LocalBackend()


def choose_engines(
    job: PreparedJob, backend: Backend, *, say: Callable[[str], None], by_rows: bool = True
) -> tuple[PreparedJob, EngineSettings, Sequence[Slot]]:
    """The job with what its spec leaves open for the engines, their arguments, and the slots of its replicas.

    by_rows: whether a sample of the input's rows decides, too. Raises UserError if weights are missing or there are too
    few devices.
    """
    # Rows that come later, with `--extend` or from another file, may have more images.
    has_new_images = by_rows and job.spec.input.has_images and job.state is None
    images = images_of_rows(job.file) if has_new_images else None
    share = functools.partial(shared_share, job.file) if by_rows else lambda: None
    if images is not None:
        job = replace(job, spec=with_most_images(job.spec, images, say))
    spec = job.spec
    model = job.model
    if spec.scripted is None:
        check_weights(model, spec.model.load_format)
    slots = backend.slots_for(spec)
    # A hub id has no folder here.
    for line in backend.check_hosts(job.folder.root, path if (path := pathlib.Path(model.path)).is_dir() else None):
        say(line)
    # All devices are assumed to be alike.
    size = backend.device_size(slots[0].devices[0]) if slots[0].devices else (None, "")
    with say_if_slow(say, f"counting the weights of {model.name}"):
        fit = fit_of(model, spec, *size, limits_of=job.task.default_batch_limits)
    if slots[0].devices:
        number = replicas_per_device(spec, fit, job.task, len(devices_of(slots)))
        parallel = spec.parallel.model_copy(update={"replicas_per_device": number})
        spec = spec.model_copy(update={"parallel": parallel})
        job = replace(job, spec=spec)
        slots = backend.slots_for(spec)
    chosen = chosen_arguments(spec, fit, job.task, slots[0].sharers, shared_share=share)
    if images is not None:
        chosen |= step_for_images(spec, model, fit, images)
    for line in lines_of(chosen):
        say(line)
    settings = EngineSettings(spec, fit, _lowered_before(spec, job.state, say), chosen)
    for line in check_devices(spec, fit, len(slots)):
        say(line)
    backend.check_free(settings.engine, slots)
    return job, settings, slots


def _lowered_before(spec: JobSpec, state: State | None, say: Callable[[str], None]) -> dict[str, Any]:
    """The engine arguments that an earlier epoch lowered when memory ran out, if they still apply."""
    record = state.of(Lowered) if state is not None else []
    lowered = kept(spec, record[0]) if record else {}
    if lowered:
        shown = ", ".join(f"engine.{name} {value}" for name, value in lowered.items())
        say(f"continuing with {shown}, because memory ran out before; set another value in the spec to change that")
    return lowered


def new_fleet(
    job: PreparedJob | Job,
    backend: Backend,
    settings: EngineSettings,
    slots: Sequence[Slot],
    *,
    job_id: str,
    epoch: int,
    num_before: int = 0,
) -> Fleet:
    """A fleet with no replica started. num_before: incarnations of this epoch so far."""
    spec = job.spec
    cache_key = functools.partial(_cache_key, job, settings) if devices_of(slots) else None
    return Fleet(
        backend,
        slots,
        launches(job, settings, job_id),
        requests_per_row=job.task.num_rows_per_input,
        epoch=epoch,
        logs=job.folder.path("logs"),
        max_restarts=spec.max_restarts,
        stall_timeout_s=spec.stall_timeout_s,
        start_timeout_s=spec.start_timeout_s,
        settings=settings,
        is_cache_warm=cache_key is None or backend.is_cache_warm(cache_key()),
        cache_key=cache_key,
        num_incarnations=num_before,
    )


def _cache_key(job: PreparedJob | Job, settings: EngineSettings) -> str:
    """The key of engines that compile alike: same model, degrees and arguments."""
    spec = job.spec
    return fingerprint(
        {
            # vLLM's own keys depend on the path too.
            "model": [job.model.path, job.model.fingerprint],
            "engine": settings.engine,
            "parallel": [spec.parallel.tensor_parallel_size, spec.parallel.pipeline_parallel_size],
            "dtype": [spec.model.dtype, spec.model.quantization],
        }
    )


def launches(job: PreparedJob | Job, settings: EngineSettings, job_id: str) -> Callable[[Slot, str], Launch]:
    """What makes the message that starts an incarnation. job: of a retry, with its sampling, or the job itself."""

    def launch(slot: Slot, incarnation: str) -> Launch:
        return Launch(
            replica=slot.replica,
            incarnation=incarnation,
            folder=os.fspath(job.folder.root),
            job_id=job_id,
            spec=settings.launch_spec(incarnation, job.spec),
            model_path=job.model.path,
            tokenizer_path=job.model.tokenizer,
            revision=job.model.commit,
            cpus=slot.cpus if not slot.devices else (),
            adapters=job.adapters,
        )

    return launch


def work_of(job: Job, state: State, retry: Retry | None) -> Work:
    """The message that tells replicas about the rows of a job, or of a retry."""
    metadata = {
        "batchinf.job_id": state.header.job_id,
        "batchinf.fingerprint": state.header.fingerprint,
        "batchinf.model": job.model.name,
        "batchinf.model_commit": job.model.commit or job.model.fingerprint,
        **({} if retry is None else retry_metadata(retry)),
        **({} if job.slice is None else {"batchinf.slice": str(job.slice)}),
    }
    return Work(
        input=job.spec.input.model_dump_json(),
        metadata=metadata,
        source_folder=os.fspath(source_folder(job.folder)),
        taken=job.source.fingerprints,
        extents=state.extents,
        begun_at=begun_at(job, state),
        columns=state.header.columns,
        repairs=() if retry is None else state.repairs(retry.number),
        retry=retry,
    )


def start_due(fleet: Fleet, manifest: Manifest) -> None:
    """Start the replicas that are due, and commit the identities by which a later epoch finds them."""
    replicas = fleet.start_due()
    _note_starts(fleet, replicas, manifest)
    if replicas:
        manifest.commit()


def turn_to(
    fleet: Fleet, manifest: Manifest, *, job: Job, state: State, retry: Retry, say: Callable[[str], None]
) -> None:
    """Give the fleet the rows of a retry, for which engines that are up stay up. job: with the retry's sampling."""
    launch = launches(job, fleet.settings, state.header.job_id)
    with shielded():
        ended = fleet.turn_to(launch, job.spec, retry.number, work_of(job, state, retry))
        faults.point("fleet.turned")
        for end in ended:
            note_end(manifest, end)
        still_up = [replica for replica in fleet.replicas if replica.is_live]
        _note_starts(fleet, still_up, manifest)
        if ended:
            manifest.commit()
    if still_up:
        say(f"{counted(len(still_up), 'engine')} of {len(fleet.replicas):,} stayed up for it")
    if any(end.cause == OTHER_ARGUMENTS for end in ended):
        say(f"the engines start again: {OTHER_ARGUMENTS}")


def _note_starts(fleet: Fleet, replicas: Iterable[FleetReplica], manifest: Manifest) -> None:
    """Add the starts of the running incarnations of these replicas to the manifest's next commit."""
    for replica in replicas:
        handle = fleet.handles[replica.number]
        started = StartedReplica(
            replica.number,
            handle.incarnation,
            fleet.backend.name,
            handle.reference,
            devices=replica.slot.devices,
            num_devices=replica.slot.num_devices,
            started_at=time.time(),
        )
        manifest.record(started)
        manifest.event("replica_started", **asdict(started))


def note_end(manifest: Manifest, end: Ended) -> None:
    """Add the end of an incarnation to the manifest's next commit."""
    slot = end.replica.slot
    ended = EndedReplica(end.incarnation, round(end.lifetime_s * slot.num_devices, 1), bool(slot.devices))
    manifest.record(ended)
    cause = "" if end.was_asked else end.cause
    manifest.event("replica_ended", incarnation=end.incarnation, device_s=ended.device_s, cause=cause)


def end_all(fleet: Fleet, manifest: Manifest) -> None:
    """End the replicas that run, and commit their ends."""
    with shielded():
        for ended in fleet.kill():
            note_end(manifest, ended)
        manifest.commit()


@contextlib.contextmanager
def ending(fleet: Fleet, manifest: Manifest) -> Iterator[None]:
    """When the block ends, all replicas of the fleet have ended."""
    try:
        yield
    except BaseException:
        # Later errors, for example from a full disk, must not hide the first one.
        with contextlib.suppress(BatchinfError, OSError):
            manifest.discard()
            end_all(fleet, manifest)
        raise
    finally:
        fleet.kill()  # those that live still: a second Ctrl-C may have ended the first call
