"""The coordinator's handle of a replica on a Ray cluster: its placement group, its actor, their calls, and its end."""

import contextlib
import pathlib
import time
from dataclasses import replace
from typing import Any

from batchinf.base.errors import BatchinfError
from batchinf.engines.protocol import RayGroup
from batchinf.fleet.backend import EndedBy, Ending
from batchinf.fleet.devices import DeviceLook
from batchinf.fleet.local.backend import read_log
from batchinf.fleet.ray.actor import Order, ReplicaActor, Report, unpacked
from batchinf.fleet.ray.cluster import Cluster, ray_cause
from batchinf.replica.incarnation import last_words
from batchinf.replica.messages import Command, Event, Failed, Launch, StartPhase

_LISTEN_S = 1.0
# Ray may keep a group on a node that it does not know to be dead yet. A new group is placed anew.
_PLACE_S = 20.0
# A node that does not answer for so long counts as lost, although Ray has not noticed it.
_SILENCE_S = 90.0
_END_S = 30.0
_AGAIN_S = 0.5
_WAITS = StartPhase("waiting for room in the cluster")


class RayReplica:
    """A replica that runs in an actor of Ray."""

    def __init__(
        self, cluster: Cluster, order: Order, *, name: str, bundles: tuple[dict[str, float], ...], log: pathlib.Path
    ) -> None:
        """name: of the placement groups, before a number. bundles: of each group."""
        self._cluster = cluster
        self._order = order
        self._name = name
        self._bundles = bundles
        self._log = log
        self._log_start = log.stat().st_size if log.exists() else 0
        self._commands: list[Command] = []
        self._events: list[Event] = []
        self._num_taken = self._num_received = 0
        self._node = ""
        self._in_flight: tuple[int, ...] = ()
        self._has_ended = False
        self._lost: tuple[EndedBy, str] | None = None
        self._up_since: float | None = None
        self._num_groups = 0
        self._heard_at = self._retry_at = time.monotonic()
        self.calls: dict[Any, str] = {}
        """Ray's references to the calls that are under way, with the names of the actor's methods."""
        self._num_taking = 0  # commands in the call of `take`
        self._actor: Any = None
        self._group: Any = None
        self._asked_at = 0.0
        self._shortage = ""
        self._nodes: frozenset[str] = frozenset()  # those that the actor uses, once it has started
        self._place()
        self.looks: tuple[DeviceLook, ...] = ()
        self._activity = (0, 0)
        self.is_removed = False
        self._ending: Any = None  # the call of the actor's `end`

    @property
    def incarnation(self) -> str:
        return self._order.launch.incarnation

    @property
    def has_own_cache(self) -> bool:
        """See `ReplicaHandle`. The actor decides in the end, for its host."""
        return self._order.has_own_cache

    @property
    def reference(self) -> dict[str, Any]:
        return {"cluster": self._cluster.address, "group": self._name}

    def _place(self) -> None:
        """Ask for a placement group and for an actor in it, and do not wait for them."""
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        bundles = self._bundles
        self._num_groups += 1
        name = f"{self._name}/{self._num_groups}"
        # Not detached: Ray removes the group and the actor when the coordinator ends.
        group = placement_group(list(bundles), strategy="PACK", name=name)
        order = self._order
        if len(bundles) > 1:
            ranks = RayGroup(self._cluster.address, group.id.hex(), bundles)
            order = replace(order, launch=replace(order.launch, ray_group=ranks))
        self._group = group
        self._actor = (
            self._cluster.ray.remote(ReplicaActor)
            .options(
                num_cpus=0,
                num_gpus=order.num_devices,
                max_restarts=0,
                max_task_retries=0,
                runtime_env=self._cluster.runtime_env,
                max_concurrency=4,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, 0),
            )
            .remote()
        )
        if not self._shortage:
            self._events.append(_WAITS)
        self._asked_at = time.monotonic()
        self.calls = {self._actor.start.remote(order): "start"}

    def send(self, command: Command) -> None:
        self._commands.append(command)
        self._give()

    def renew(self, launch: Launch) -> float:
        now = time.monotonic()
        assert self._up_since is not None
        lifetime_s = now - self._up_since
        self._up_since = now
        self._order = replace(self._order, launch=launch)
        self._log_start = self._log.stat().st_size if self._log.exists() else 0
        self.send(launch)
        return lifetime_s

    def _give(self) -> None:
        """Hand the commands to the actor. One call at a time, so that they arrive in order."""
        if self._commands and not self._is_calling("take") and self._up_since is not None and self._lost is None:
            self._num_taking = len(self._commands)
            self.calls[self._actor.take.remote(self._num_taken, list(self._commands))] = "take"

    def _is_calling(self, method: str) -> bool:
        return method in self.calls.values()

    def hear(self, call: Any) -> None:
        """Take the result of a call that has come back."""
        method = self.calls.pop(call, None)
        if method is None:  # it belongs to an actor that was given up
            return
        exceptions = self._cluster.ray.exceptions
        try:
            result = self._cluster.ray.get(call)
        except exceptions.RayTaskError as error:
            self._fail(error)
        except exceptions.ActorUnavailableError:
            # The actor may live. What is under way is asked for again, until it answers or Ray says that it died.
            self._retry_at = time.monotonic() + _AGAIN_S
            if method == "start":
                self._note_lost("outside", "its actor could not be reached when it started")
        except exceptions.RayError as error:
            self._note_gone(error)
        else:
            self._heard_at = time.monotonic()
            self._note(method, result)

    def _note(self, method: str, result: Any) -> None:
        if method == "start":
            self._note_started(result)
        elif method == "listen":
            self._note_report(result)
        else:
            self._num_taken += self._num_taking
            del self._commands[: self._num_taking]
        self._give()

    def _note_started(self, node: str) -> None:
        from ray.util.placement_group import placement_group_table

        self._node = node
        self._up_since = time.monotonic()
        self._nodes = frozenset(placement_group_table(self._group)["bundles_to_node_id"].values())
        self._listen()

    def _listen(self) -> None:
        self.calls[self._actor.listen.remote(self._num_received, _LISTEN_S)] = "listen"

    def _note_report(self, report: Report) -> None:
        self._events += report.events[max(0, self._num_received - report.first) :]
        self._num_received = max(self._num_received, report.first + len(report.events))
        self._in_flight = self._in_flight if report.in_flight is None else report.in_flight
        self.looks = report.looks
        self._activity = report.start_activity
        self._has_ended = report.has_ended
        if not report.has_ended:
            self._listen()

    def _fail(self, error: Any) -> None:
        """The actor raised an exception: the replica could not start, or its actor has a bug."""
        if isinstance(error.cause, Exception):
            failed = last_words(error.cause)
        else:
            failed = Failed(type(error).__name__, ray_cause(error), 1)
        if not isinstance(error.cause, BatchinfError):
            with contextlib.suppress(OSError), self._log.open("a", encoding="utf-8") as log:
                log.write(f"{error}\n")  # with the traceback on the node
        self._events.append(failed)
        self._has_ended = True

    def _note_gone(self, error: Exception) -> None:
        """Ray says that the actor is dead: with its node, or alone."""
        if self._nodes and not self._nodes <= self._cluster.live_ids():
            self._note_lost("host", self._node_words())
        else:
            self._note_lost("outside", f"the end of its actor: {ray_cause(error)}")

    def _note_lost(self, ended_by: EndedBy, words: str) -> None:
        self._lost = self._lost or (ended_by, words)

    def _node_words(self) -> str:
        return f"the loss of its node {self._node}"

    def tick(self, live: frozenset[str], shortage: str) -> None:
        """Look after calls that do not come back. live: ids of nodes. shortage: why none can hold it; "" if one can."""
        if self._lost is not None or self._has_ended:
            return
        now = time.monotonic()
        if self._up_since is None:
            self._note_shortage(shortage)
            self._place_again(now)
        else:
            self._look_after_calls(now, live)

    def _note_shortage(self, shortage: str) -> None:
        if bool(shortage) != bool(self._shortage):
            self._events.append(StartPhase("waiting for a node", shortage=shortage) if shortage else _WAITS)
        self._shortage = shortage

    def _place_again(self, now: float) -> None:
        """Ask for another placement group if the one of an actor that is starting has no place yet."""
        if self._is_calling("start") and now - self._asked_at > _PLACE_S and not self.is_placed:
            self._remove()
            self._place()

    def _look_after_calls(self, now: float, live: frozenset[str]) -> None:
        if not self._nodes <= live:
            self._note_lost("host", self._node_words())
        elif now - self._heard_at > _SILENCE_S:
            self._note_lost("host", f"the silence of its node {self._node} for {_SILENCE_S:.0f} s")
        elif now >= self._retry_at:
            if not self._is_calling("listen"):
                self._listen()
            self._give()

    @property
    def is_up(self) -> bool:
        """Whether its actor has started."""
        return self._up_since is not None

    @property
    def is_placed(self) -> bool:
        """Whether its placement group has nodes."""
        from ray.util.placement_group import placement_group_table

        return bool(placement_group_table(self._group).get("state") == "CREATED")

    def take_events(self) -> list[Event]:
        """Events that were not returned yet."""
        events = list(self._events)
        self._events.clear()
        return events

    def has_ended(self) -> bool:
        return self._has_ended or self._lost is not None

    def log_tail(self) -> list[str]:
        """See `ReplicaHandle`. The log is on the shared file system."""
        return read_log(self._log, self._log_start)

    def start_activity(self) -> tuple[int, int] | None:
        """See `ReplicaHandle`. The actor reports it."""
        return self._activity if self.is_up or self.is_placed else None

    def begin_end(self) -> None:
        """See `ReplicaHandle`. The actor ends the replica, unless it is lost."""
        if self._up_since is not None and self._lost is None and self._ending is None:
            self._ending = self._actor.end.remote(self._num_received)

    def end(self) -> Ending:
        self.begin_end()
        ending = self._end() if self._up_since is not None and self._lost is None else None
        self._remove()
        self.is_removed = True
        lifetime_s = 0.0 if self._up_since is None else time.monotonic() - self._up_since
        if ending is None:
            ended_by, words = self._lost or ("itself" if self._has_ended else "coordinator", "no room in the cluster")
            ending = Ending(
                ended_by=ended_by,
                description=words,
                events=(),
                in_flight=unpacked(self._in_flight),
                lifetime_s=lifetime_s,
            )
        elif not self._nodes <= self._cluster.live_ids():
            # A rank on another host is gone, and the engine with it.
            ending = replace(ending, ended_by="host", description=self._node_words())
        return replace(ending, events=(*self.take_events(), *ending.events), lifetime_s=lifetime_s)

    def _end(self) -> Ending | None:
        """Let the actor end the replica; None if it is lost."""
        exceptions = self._cluster.ray.exceptions
        try:
            ending: Ending = self._cluster.ray.get(self._ending, timeout=_END_S)
            return ending
        except (exceptions.RayError, TimeoutError) as error:
            self._note_gone(error)
            return None

    def _remove(self) -> None:
        """Give up the actor and its placement group."""
        with contextlib.suppress(self._cluster.ray.exceptions.RayError, ValueError):
            self._cluster.ray.kill(self._actor)
        self._cluster.remove_group(self._group)
