"""The smallest `Backend`: it runs replicas as threads of the coordinator's process.

`python in_process.py JOB.yaml` runs a job on it. The replica that the environment variable LOSES names is lost when it
begins its second shard, as if it had been killed. The first LOSES_HOSTS replicas are lost with their hosts when they
begin their first shard. With DEVICE, the only replica has a device of that name and 140 GiB,
which its engine does not use.
"""

import contextlib
import os
import pathlib
import queue
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

from batchinf.base.errors import BatchinfError
from batchinf.base.stop_signals import interruptible
from batchinf.coordinator.display import ProgressDisplay
from batchinf.coordinator.run import run_job
from batchinf.fleet.backend import Backend, EndedBy, Ending, ReplicaHandle
from batchinf.fleet.devices import DeviceLook, Slot
from batchinf.manifest.lines import StartedReplica
from batchinf.model.model import Model
from batchinf.replica.in_flight import RECORD_BYTES, InFlightRecord
from batchinf.replica.incarnation import Incarnation, last_words
from batchinf.replica.messages import Command, Event, Launch, LeaseBegun, Stop
from batchinf.spec.file import read_spec
from batchinf.spec.job import JobSpec


class ThreadReplica:
    """A replica on a thread: the coordinator's handle and the replica's port."""

    has_own_cache = False

    def __init__(
        self, launch: Launch, has_events: threading.Condition, *, is_lost_later: bool, loses_host: bool = False
    ) -> None:
        self.incarnation = launch.incarnation
        self.reference: dict[str, Any] = {"thread": launch.incarnation}
        self.is_closed = False
        self.events: list[Event] = []
        self._launch, self._has_events = launch, has_events
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._memory = bytearray(RECORD_BYTES[0])
        self._log: list[str] = []
        self._num_begun, self._is_lost_later, self._is_lost = 0, is_lost_later or loses_host, False
        self._loses_host = loses_host
        self._started = time.monotonic()
        self._thread = threading.Thread(target=self._run, name=launch.incarnation, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        port = _Port(self)
        try:
            replica = Incarnation(self._launch, port, InFlightRecord(self._memory), lambda: None)
            threading.Thread(target=replica.listen, args=([],), daemon=True).start()
            replica.run()
        except BaseException as error:
            self._log += traceback.format_exc().splitlines()
            port.send(last_words(error))
        finally:
            self.is_closed = True

    def hear(self, event: Event) -> None:
        """Take an event of the thread, unless the replica is lost."""
        self._num_begun += isinstance(event, LeaseBegun)
        if self._is_lost_later and self._num_begun == (1 if self._loses_host else 2) and not self._is_lost:
            self._is_lost = True
            self.send(Stop(0.0))
        if not self._is_lost:
            with self._has_events:
                self.events.append(event)
                self._has_events.notify()

    def commands(self, wait_s: float | None) -> list[Command]:
        """The coordinator's commands."""
        with contextlib.suppress(queue.Empty):
            return [self._commands.get(timeout=wait_s)]
        return []

    def send(self, command: Command) -> None:
        self._commands.put(command)

    def renew(self, launch: Launch) -> float:
        now = time.monotonic()
        lifetime_s = now - self._started
        self.incarnation, self._started = launch.incarnation, now
        self.send(launch)
        return lifetime_s

    def has_ended(self) -> bool:
        return (self._loses_host and self._is_lost) or not self._thread.is_alive()

    def log_tail(self) -> list[str]:
        return self._log

    def start_activity(self) -> tuple[int, int]:
        return 0, 0

    def begin_end(self) -> None:
        """A thread ends within milliseconds."""

    def end(self) -> Ending:
        lifetime_s, is_alive = time.monotonic() - self._started, self._thread.is_alive()
        self.send(Stop(0.0))
        self._thread.join(60)
        assert not self._thread.is_alive()
        events, self.events = tuple(self.events), []
        if self._is_lost:
            # A lost host is not the fault of a row.
            ended_by: EndedBy = "host" if self._loses_host else "outside"
            return Ending(ended_by, "the loss of its thread", events, (), lifetime_s)
        in_flight = tuple(InFlightRecord(self._memory).requests())
        return Ending("coordinator" if is_alive else "itself", "the end of its thread", events, in_flight, lifetime_s)


class _Port:
    """The replica's side of a `ThreadReplica`."""

    def __init__(self, replica: ThreadReplica) -> None:
        self._replica = replica
        self.send, self.receive = replica.hear, replica.commands

    @property
    def is_closed(self) -> bool:
        return self._replica.is_closed


class InProcessBackend:
    """loses: name of the incarnation that is lost when it begins its second shard. device: of the only replica.

    num_hosts_lost: incarnations that are lost with their hosts when they begin their first shard.
    """

    name = "in-process"
    processors = "this machine's processor"

    def __init__(self, loses: str = "", device: str = "", num_hosts_lost: int = 0) -> None:
        self._loses, self._device, self._num_hosts_lost = loses, device, num_hosts_lost
        self._has_events = threading.Condition()
        self._replicas: list[ThreadReplica] = []

    def devices(self) -> tuple[str, ...]:
        return ("0",) if self._device else ()

    def device_size(self, device: str) -> tuple[int | None, str]:
        return (140 << 30, self._device) if self._device else (None, "")

    def slots_for(self, spec: JobSpec) -> list[Slot]:
        if self._device:
            return [Slot(0, ("0",), ())]
        wanted = spec.parallel.data_parallel_size
        return [Slot(number, (), ()) for number in range(2 if wanted == "auto" else wanted)]

    def check_hosts(self, output: pathlib.Path, model: pathlib.Path | None) -> Sequence[str]:
        return ()

    def check_free(self, engine: Mapping[str, Any], slots: Sequence[Slot]) -> None:
        pass

    def device_looks(self, devices: Sequence[str]) -> tuple[DeviceLook, ...]:
        return ()

    def read_ahead(self, model: Model, load_format: str) -> None:
        pass

    def start(self, launch: Launch, slot: Slot, log: pathlib.Path, *, has_own_cache: bool = False) -> ReplicaHandle:
        replica = ThreadReplica(
            launch,
            self._has_events,
            is_lost_later=launch.incarnation == self._loses,
            loses_host=len(self._replicas) < self._num_hosts_lost,
        )
        self._replicas.append(replica)
        return replica

    def poll(self, wait_s: float) -> Sequence[tuple[ReplicaHandle, Event]]:
        with self._has_events:
            self._has_events.wait_for(lambda: any(replica.events for replica in self._replicas), wait_s)
            found = [(replica, event) for replica in self._replicas for event in replica.events]
            for replica in self._replicas:
                replica.events = []
        return found

    def end_leftovers(self, replicas: Sequence[StartedReplica], job_id: str | None) -> None:
        """Threads end with their coordinator."""

    def is_cache_warm(self, key: str) -> bool:
        return True

    def note_cache_warm(self, key: str) -> None:
        pass

    def close(self) -> None:
        pass


def main() -> None:
    from transformers import PreTrainedTokenizerFast  # noqa: F401 -- two threads cannot import it at once

    backend: Backend = InProcessBackend(
        os.environ.get("LOSES", ""), os.environ.get("DEVICE", ""), int(os.environ.get("LOSES_HOSTS", "0"))
    )
    try:
        with interruptible(ends_process=True):
            run_job(read_spec(sys.argv[1], ()), backend, ProgressDisplay(), extends=False, fresh=False, retry=None)
    except BatchinfError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
