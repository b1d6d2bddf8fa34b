"""What replicas of a job are started with, whatever its rows are; what they are told of these; how that is recorded."""

import os
import pathlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from batchinf.base.slices import source_folder
from batchinf.base.storage import Folder
from batchinf.fleet.devices import Slot, check_free, device_size, own_cpus, place, visible_devices
from batchinf.fleet.fleet import Ended, Fleet, Member
from batchinf.fleet.local import cache_root
from batchinf.fleet.out_of_memory import EngineSettings, kept
from batchinf.job.open import Job, begun_at
from batchinf.manifest.lock import Holder, process_start
from batchinf.manifest.log import Manifest
from batchinf.manifest.names import Retry
from batchinf.manifest.state import State
from batchinf.model.identity import Model, check_weights
from batchinf.model.lora import Adapter
from batchinf.model.memory import fit_of
from batchinf.output.replace import retry_metadata
from batchinf.replica.messages import Launch, Work
from batchinf.spec.job import JobSpec, fingerprint
from batchinf.tasks.registry import task_of


@dataclass(frozen=True, slots=True)
class Launcher:
    """Model, devices and engine arguments of one life of a job. spec: resolved, but maybe for its `input`."""

    spec: JobSpec
    model: Model
    adapters: tuple[Adapter, ...]
    folder: Folder
    epoch: int
    slots: Sequence[Slot]
    settings: EngineSettings

    @classmethod
    def of(
        cls,
        spec: JobSpec,
        model: Model,
        adapters: tuple[Adapter, ...],
        folder: Folder,
        epoch: int,
        state: State | None,
        say: Callable[[str], None],
    ) -> "Launcher":
        """state: of the job that is gone on with. Raises UserError if weights are missing, or the devices do not do."""
        if spec.scripted is None:
            check_weights(model, spec.model.load_format)
        slots = place(spec, visible_devices(), own_cpus())
        settings = _settings(spec, model, slots, state, say)
        check_free(spec.model_copy(update={"engine": settings.engine}), slots)
        return cls(spec, model, adapters, folder, epoch, slots, settings)

    @property
    def devices(self) -> list[str]:
        """Those of all replicas; none on a CPU."""
        return [device for slot in self.slots for device in slot.devices]

    def fleet(self, job_id: str, spec: JobSpec | None = None, retry: int = 0) -> Fleet:
        """Replicas that have yet to start. spec: a retry's, whose sampling is another."""
        return Fleet(
            self.slots,
            task_of(self.spec).num_rows_per_input,
            lambda slot, incarnation: self._launch(slot, incarnation, job_id, spec or self.spec),
            self.epoch,
            self.folder.path("logs"),
            self.spec.max_restarts,
            self.spec.stall_timeout_s,
            is_cache_warm=not self.devices or self._compile_marker().exists(),
            settings=self.settings,
            retry=retry,
        )

    def _launch(self, slot: Slot, incarnation: str, job_id: str, spec: JobSpec) -> Launch:
        return Launch(
            slot.replica,
            incarnation,
            os.fspath(self.folder.root),
            job_id,
            self.settings.launch_spec(incarnation, spec),
            self.model.path,
            self.model.tokenizer,
            self.model.commit,
            slot.cpus if not slot.devices else (),
            self.adapters,
            (self.model.max_model_len, self.model.vocab_size),
        )

    def note_warm(self, fleet: Fleet) -> None:
        """Remember, for later jobs, where an engine of the fleet has compiled what others can take over."""
        if self.devices and fleet.is_cache_warm:
            marker = self._compile_marker()
            marker.parent.mkdir(parents=True, exist_ok=True)
            marker.touch()

    def _compile_marker(self) -> pathlib.Path:
        """A file in vLLM's cache: engines of this model, degrees and arguments have compiled on this machine."""
        spec = self.spec
        shape = fingerprint(
            {
                # vLLM's own keys hang on the path too.
                "model": [self.model.path, self.model.fingerprint],
                "engine": spec.engine,
                "parallel": [spec.parallel.tensor_parallel_size, spec.parallel.pipeline_parallel_size],
                "dtype": [spec.model.dtype, spec.model.quantization],
            }
        )
        return cache_root() / shape


def _settings(
    spec: JobSpec, model: Model, slots: Sequence[Slot], state: State | None, say: Callable[[str], None]
) -> EngineSettings:
    """The spec's engine arguments, and those that were lowered when memory ran out in an earlier epoch."""
    device_bytes, device_name = device_size(slots[0].devices[0]) if slots[0].devices else (None, "")
    lowered = kept(spec, state.lowered) if state is not None else {}
    if lowered:
        shown = ", ".join(f"engine.{name} {value}" for name, value in lowered.items())
        say(f"going on with {shown}, as memory ran out before; give another value in the spec to change that")
    fit = fit_of(model, spec, device_bytes, device_name, task_of(spec).default_batch_limits)
    return EngineSettings(spec, fit, lowered)


def work_of(job: Job, state: State, retry: Retry | None = None) -> Work:
    """What replicas are told of the job's rows, or of those of a retry."""
    metadata = {
        "batchinf.job_id": state.header.job_id,
        "batchinf.fingerprint": state.header.fingerprint,
        "batchinf.model": job.model.name,
        "batchinf.model_commit": job.model.commit or job.model.fingerprint,
        **({} if retry is None else retry_metadata(retry)),
        **({} if job.slice is None else {"batchinf.slice": str(job.slice)}),
    }
    return Work(
        job.spec.input.model_dump_json(),
        metadata,
        os.fspath(source_folder(job.folder, job.slice)),
        job.source.fingerprints,
        state.extents,
        begun_at(job, state.header),
    )


def note_started(manifest: Manifest, members: Sequence[Member]) -> None:
    """Commit to the manifest which processes have been started."""
    me = Holder.this_process()
    for member in members:
        assert member.replica is not None
        manifest.event(
            "replica_started",
            replica=member.slot.replica,
            incarnation=member.replica.launch.incarnation,
            host=me.host,
            boot_id=me.boot_id,
            pgid=member.replica.pid,
            pid_start_time=process_start(member.replica.pid) or 0,
            devices=list(member.slot.devices),
        )
    if members:
        manifest.commit()


def note_end(manifest: Manifest, end: Ended) -> None:
    """Say in the manifest's next commit that an incarnation is over."""
    device_s = round(end.lifetime_s * end.member.slot.num_devices, 1)
    cause = "" if end.was_asked else end.cause
    manifest.event("replica_ended", incarnation=end.incarnation, device_s=device_s, cause=cause)
