"""What a backend must do: the protocol between the fleet and the place in which its replicas run.

The coordinator decides what replicas do; a backend decides where they run and how messages reach them. `fleet/local/`
runs them as processes of one host. `choose.py` is the one module that names a backend. A backend starts
`replica.incarnation.Incarnation` for each replica and gives it a port to the coordinator.
"""

import pathlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from batchinf.fleet.devices import DeviceLook, Slot
from batchinf.model.identity import Model
from batchinf.records import StartedReplica
from batchinf.replica.messages import Command, Event, Launch
from batchinf.replica.worker import InFlightRequest
from batchinf.spec.job import JobSpec

# `itself`: it exited or crashed, which its log may explain. `outside`: it was killed, by a signal or with its host.
# `coordinator`: it was still running, and `ReplicaHandle.end` ended it.
EndedBy = Literal["itself", "outside", "coordinator"]


@dataclass(frozen=True, slots=True)
class Ending:
    """How an incarnation ended, as its backend saw it.

    description: in a few words, such as "exit code 1" or "its node was lost".
    events: what it said last, which no `poll` has returned.
    in_flight: requests that were in its engine, oldest first. Empty if the backend knows that none of them can be the
    cause, such as when a host was lost: then its rows do not count as tried.
    lifetime_s: for how long it occupied its devices.
    """

    ended_by: EndedBy
    description: str
    events: tuple[Event, ...]
    in_flight: tuple[InFlightRequest, ...]
    lifetime_s: float


class ReplicaHandle(Protocol):
    """One incarnation of a replica that a backend has started."""

    @property
    def incarnation(self) -> str:
        """The name that `Launch` gave it."""

    @property
    def has_own_cache(self) -> bool:
        """Whether what it compiles is lost with it, because it does not write the cache that others share."""

    @property
    def identity(self) -> dict[str, Any]:
        """JSON values by which `Backend.end_leftovers` finds it in a later life of the job.

        They go into the manifest, and only this backend reads them: a process group, the name of an actor.
        """

    def send(self, command: Command) -> None:
        """Deliver a command after those before it. Does not wait, and does not raise if the replica is gone."""

    def has_ended(self) -> bool:
        """Whether it is gone, for whatever reason. Its last events may not have been polled yet."""

    def log_tail(self) -> list[str]:
        """The last lines that it and its engine printed, about 1 MiB at most. Also after its end; empty if lost."""

    def end(self) -> Ending:
        """End it with everything that it started, and wait until its devices are free. Called once.

        It may have ended already. Whatever it said before its end is in the answer, unless `poll` has returned it.
        """


class DeviceWatch(Protocol):
    """Looks at devices in the background."""

    def looks(self) -> tuple[DeviceLook, ...]:
        """The latest look at each device; empty before the first, or where devices tell nothing. Does not wait."""

    def close(self) -> None:
        """Stop looking."""


class Backend(Protocol):
    """Where replicas run. One object serves a coordinator from its start to its end.

    All methods are called from the coordinator's thread. A replica never outlives its coordinator for long: a backend
    makes sure of that by itself, as the coordinator may be killed. Rows never pass through a backend: replicas read the
    input and write parts on a file system that they share with the coordinator.
    """

    @property
    def name(self) -> str:
        """Stands in the manifest beside each identity."""

    def devices(self) -> tuple[str, ...]:
        """The devices that jobs may use; empty where engines run on processors."""

    def device_size(self, device: str) -> tuple[int | None, str]:
        """A device's memory in bytes (None where that is not known) and its model's name."""

    def place(self, spec: JobSpec) -> list[Slot]:
        """One slot for each replica of a job, numbered from 0. Raises SpecError if its degrees do not fit."""

    def check_free(self, spec: JobSpec, slots: Sequence[Slot]) -> None:
        """Raise UserError, in one line, if other programs occupy the memory that the slots' engines will ask for."""

    def watch_devices(self, devices: Sequence[str]) -> DeviceWatch:
        """Look at devices for the telemetry."""

    def read_ahead(self, model: Model, load_format: str) -> None:
        """Begin to read a model's weights to where engines will load them from, if that helps. Waits for nothing."""

    def start(self, launch: Launch, slot: Slot, log: pathlib.Path, *, has_own_cache: bool = False) -> ReplicaHandle:
        """Start an incarnation in a slot, which is free, and return without waiting for it.

        log: the file to which its output is appended. has_own_cache: let it compile to a cache of its own, which ends
        with it, because another replica is filling the shared one.
        """

    def poll(self, wait_s: float) -> Sequence[tuple[ReplicaHandle, Event]]:
        """What replicas have said, after at most `wait_s` seconds; of each replica in the order in which it did.

        An event comes once. An event of an incarnation that was ended does not come any more.
        """

    def end_leftovers(self, replicas: Sequence[StartedReplica], job_id: str | None) -> None:
        """End what an earlier coordinator of this job left running, and remove its files outside the job's folder.

        replicas: those that the manifest does not know to have ended, of any backend: those of another backend, and
        those that cannot be told from somebody else's processes, are passed over. job_id: None if no replica of the job
        was ever started. Waits until their devices are free.
        """

    def is_cache_warm(self, key: str) -> bool:
        """Whether engines of this shape have compiled before, into the cache that replicas share."""

    def note_cache_warm(self, key: str) -> None:
        """Remember that for later jobs."""
