"""The protocol of a backend, which runs the fleet's replicas. `fleet/local/` runs them as processes of one host,
`fleet/ray/` on the nodes of a Ray cluster.

The coordinator decides what replicas do; a backend decides where they run and how messages reach them. Only the backend
knows process ids, sockets, shared memory, ports and NVML. It runs an `Incarnation` (`replica/incarnation.py`) for each
replica and gives it a port to the coordinator and memory for the record of requests in flight.
"""

import pathlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from batchinf.fleet.devices import DeviceLook, Slot
from batchinf.manifest.lines import StartedReplica
from batchinf.model.model import Model
from batchinf.replica.messages import Command, Event, InFlightRequest, Launch
from batchinf.spec.job import JobSpec

# `itself`: it exited or crashed; its log may say why. `outside`: it was killed, for example by a signal. `host`: its
# host was lost. `coordinator`: it was still running, and `ReplicaHandle.end` ended it.
EndedBy = Literal["itself", "outside", "host", "coordinator"]


@dataclass(frozen=True, slots=True)
class Ending:
    """How an incarnation ended, as its backend saw it."""

    ended_by: EndedBy
    description: str
    """In a few words, such as "exit code 1" or "its node was lost"."""
    events: tuple[Event, ...]
    """Its last events that no `poll` has returned."""
    in_flight: tuple[InFlightRequest, ...]
    """Requests that were in its engine, oldest first. Empty if the backend knows that no row is the cause; then none of
    them is suspected. If its host was lost, those of its last report; they count as not tried."""
    lifetime_s: float
    """How long it occupied its devices."""


class ReplicaHandle(Protocol):
    """One incarnation of a replica that a backend has started, and those that follow with the same engine."""

    @property
    def incarnation(self) -> str:
        """The name that `Launch` gave it."""

    @property
    def has_own_cache(self) -> bool:
        """Whether it compiles into its own cache, which is deleted with it, and not into the shared one."""

    @property
    def reference(self) -> dict[str, Any]:
        """JSON values by which `Backend.end_leftovers` finds it after the coordinator has died.

        They go into the manifest, and only this backend reads them: a process group, the name of an actor.
        """

    def send(self, command: Command) -> None:
        """Deliver a command after those before it. Does not wait, and does not raise if the replica is gone."""

    def renew(self, launch: Launch) -> float:
        """Let the replica go on as another incarnation, whose name and lifetime are the handle's from now on.

        The replica has sent `Stopped` and waits. Its `reference` stays. Returns how long the incarnation before
        occupied its devices.
        """

    def has_ended(self) -> bool:
        """Whether it is gone, for whatever reason. Its last events may not have been polled yet."""

    def log_tail(self) -> list[str]:
        """The last lines that it and its engine printed, about 1 MiB at most. Also after its end; empty if lost."""

    def start_activity(self) -> tuple[int, int] | None:
        """Bytes that it has printed, and MiB that its processes have read, or as far as the backend knows.

        A start in which neither changes makes no progress. None while it waits for a host.
        """

    def begin_end(self) -> None:
        """Begin to `end` it, and do not wait: devices need up to a second to be free, several at one time."""

    def end(self) -> Ending:
        """End it with everything that it started, and wait until its devices are free.

        Called once, and again only if an interruption ended the first call.

        It may have ended already. `Ending.events` has all its events that `poll` has not returned.
        """


class Backend(Protocol):
    """Where replicas run. One object serves a coordinator from its start to its end.

    All methods are called from the coordinator's thread. The backend must make replicas end soon after their
    coordinator, even if it is killed. Rows never pass through a backend: replicas read the input and write parts on a
    file system that they share with the coordinator.
    """

    @property
    def name(self) -> str:
        """The name that the manifest stores beside each reference."""

    @property
    def processors(self) -> str:
        """The place of replicas without devices, for people."""

    def devices(self) -> tuple[str, ...]:
        """The devices that jobs may use; empty if engines run on processors."""

    def device_size(self, device: str) -> tuple[int | None, str]:
        """A device's memory in bytes (None if unknown) and its model's name."""

    def slots_for(self, spec: JobSpec) -> list[Slot]:
        """One slot for each replica of a job, numbered from 0. Raises SpecError if its degrees do not fit."""

    def check_hosts(self, output: pathlib.Path, model: pathlib.Path | None) -> Sequence[str]:
        """Raise UserError if a host has other software, or does not share the folder of the output or of the model.

        Returns warnings about hosts that were lost meanwhile, and are left out.
        """

    def check_free(self, engine: Mapping[str, Any], slots: Sequence[Slot]) -> None:
        """Raise UserError if other programs occupy memory that engines with these arguments will ask for."""

    def device_looks(self, devices: Sequence[str]) -> tuple[DeviceLook, ...]:
        """The latest look at each of the job's devices, for the telemetry. Does not wait.

        Empty before the first look, or if devices give no data. Looks are taken in the background from the first call
        on.
        """

    def read_ahead(self, model: Model, load_format: str) -> None:
        """Begin to read a model's weights ahead, if engines then load them faster. Does not wait."""

    def start(self, launch: Launch, slot: Slot, log: pathlib.Path, *, has_own_cache: bool = False) -> ReplicaHandle:
        """Start an incarnation in a slot, which is free, and return without waiting for it.

        log: the file to which its output is appended. has_own_cache: let it compile into its own cache, which is
        deleted with it, because another replica is filling the shared one.
        """

    def poll(self, wait_s: float) -> Sequence[tuple[ReplicaHandle, Event]]:
        """Events of replicas, after at most `wait_s` seconds; those of one replica in the order of sending.

        Each event is returned once. Events of an incarnation that was ended are not returned.
        """

    def end_leftovers(self, replicas: Sequence[StartedReplica], job_id: str | None) -> None:
        """End replicas that an earlier coordinator of this job left running, and delete files outside the job's folder.

        replicas: those without an end in the manifest. Replicas of another backend are ignored, and so are those that
        could be another program's processes. job_id: None if no replica of the job was ever started. Waits until
        their devices are free.
        """

    def is_cache_warm(self, key: str) -> bool:
        """Whether an engine of this shape has compiled into the shared cache before."""

    def note_cache_warm(self, key: str) -> None:
        """Remember for later jobs that the cache is warm."""

    def close(self) -> None:
        """Free what the backend holds in this process. None of its replicas runs any more."""
