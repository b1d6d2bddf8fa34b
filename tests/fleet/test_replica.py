"""The state machine of a replica: what each event does in each state, without processes and clocks."""

import math
from dataclasses import replace

import pytest

from batchinf.base.errors import EngineDeadError, UserError
from batchinf.engines.protocol import EngineInfo, EngineStats
from batchinf.fleet.devices import Slot
from batchinf.fleet.memory.engine_settings import Verdict
from batchinf.fleet.replica import FleetReplica
from batchinf.records import Lease, Part
from batchinf.replica.messages import (
    Event,
    Failed,
    LeaseBegun,
    LeaseDone,
    Progress,
    Ready,
    Revoked,
    StartPhase,
    Stopped,
    Tried,
)

WHOLE = Lease(3, 30, 40)
CUT = Lease(4, 40, 45, is_whole=False)
STALL_S = 60.0
START_S = 300.0
READY = Ready(EngineInfo(16, 10, 16, "none", versions={}), 1.0)
FAILED = Failed(EngineDeadError.__name__, "the cause", 1)
PART = Part(shard=3, num_rows=10, num_bytes=1, digest="")


def progress(num_rows: int = 0, steps: int = 1, in_flight: int = 1, errors: int = 0) -> Progress:
    return Progress(
        num_rows=num_rows,
        errors={"refused": errors} if errors else {},
        num_prompt_tokens=0,
        num_output_tokens=0,
        steps=steps,
        in_flight=in_flight,
        stalled_by_disk_s=0.0,
        engine=EngineStats(num_running=in_flight),
    )


def replica_in(state: str) -> FleetReplica:
    """A replica in a state at the time 0. While it is live, it holds a whole shard and a piece of another one."""
    replica = FleetReplica(Slot(0, (), ()), requests_per_row=1)
    if state == "waiting":
        return replica
    replica.start("000001.0001", 0.0)
    events: list[Event] = {
        "starting": [],
        "up": [READY],
        "failed at its start": [FAILED],
        "failed": [READY, FAILED],
        "stopped": [READY, Stopped()],
        "restarting": [],
        "given up": [],
    }[state]
    for event in events:
        replica.hear(event, now=0.0, at=1000.0)
    replica.give([WHOLE, CUT])
    if state in ("restarting", "given up"):
        replica.end("the cause", None, now=0.0, max_restarts=0 if state == "given up" else 1)
    return replica


LIVE = ("starting", "up", "failed at its start", "failed", "stopped")
OVER = ("waiting", "restarting", "given up")
# state: is_live, is_running, whether it is due at once, the state for people
STATES = {
    "waiting": (False, False, True, "waiting"),
    "starting": (True, False, False, "starting"),
    "up": (True, True, False, "running"),
    "failed at its start": (True, False, False, "starting"),
    "failed": (True, False, False, "running"),
    "stopped": (True, True, False, "ended"),
    "restarting": (False, False, False, "restarting"),
    "given up": (False, False, False, "given up"),
}


@pytest.mark.parametrize("state", STATES)
def test_what_others_see_of_each_state(state: str) -> None:
    replica = replica_in(state)
    seen = (replica.is_live, replica.is_running, replica.is_due(0.0), replica.state)
    assert seen == STATES[state]
    assert set(STATES) == {*LIVE, *OVER}


def finished(lease: Lease, num_rows: int, part: Part | None = None) -> LeaseDone:
    made = None if part is None else replace(part, replica=0, incarnation="000001.0001")
    return LeaseDone(lease, num_rows, {"refused": 1}, made)


# event: the action in a state in which the replica holds its leases, the action in the other states, and the state
# for people afterwards, if it changes
PASSES_ON = "the event itself"
EVENTS: dict[str, tuple[Event, object, object, str | None]] = {
    "phase": (StartPhase("loading", "host"), None, None, "loading"),
    "no place": (StartPhase("waiting", shortage="each asks for 1 GPU"), PASSES_ON, PASSES_ON, "waiting"),
    "ready": (READY, PASSES_ON, PASSES_ON, "running"),
    "progress": (progress(5), None, None, None),
    "begun": (LeaseBegun(WHOLE.key, 2, 1), PASSES_ON, PASSES_ON, None),
    "stored": (LeaseDone(CUT, 5, {"refused": 1}), finished(CUT, 5), None, None),
    "stored, of another": (LeaseDone(Lease(9, 90, 95), 5, {"refused": 1}), None, None, None),
    "closed": (LeaseDone(WHOLE, 10, {"refused": 1}, PART), finished(WHOLE, 10, PART), None, None),
    "closed, not held whole": (LeaseDone(Lease(4, 40, 50), 10, {}, replace(PART, shard=4)), None, None, None),
    "revoked": (Revoked((CUT, Lease(9, 90, 95))), Revoked((CUT,)), Revoked(()), None),
    "tried": (Tried((1,)), PASSES_ON, PASSES_ON, None),
    "failed": (FAILED, None, None, None),
    "stopped": (Stopped(), PASSES_ON, PASSES_ON, "ended"),
}


@pytest.mark.parametrize("state", [*LIVE, "restarting", "given up"])
@pytest.mark.parametrize("name", EVENTS)
def test_what_each_event_does_in_each_state(name: str, state: str) -> None:
    event, action, without_leases, after = EVENTS[name]
    replica = replica_in(state)
    before = replica.state
    expected = action if state in LIVE else without_leases
    assert replica.hear(event, now=1.0, at=1001.0) == (event if expected is PASSES_ON else expected)
    assert replica.state == (after or before)
    assert replica.heard_at == 1001.0


def test_a_late_message_about_a_part_of_a_shard_is_not_about_the_whole() -> None:
    """A lease was given back and stored by another replica; then this one was given the shard, to make its part."""
    replica = replica_in("up")
    first = Lease(WHOLE.index, WHOLE.start, WHOLE.start + 4, is_whole=False)
    for event in (LeaseBegun(first.key, 4, 4), LeaseDone(first, 4)):
        replica.hear(event, now=1.0, at=1001.0)
    assert WHOLE in replica.current.leases.values()
    assert WHOLE in replica.unbegun
    assert replica.hear(LeaseDone(WHOLE, 10, {"refused": 1}, PART), now=1.0, at=1001.0) == finished(WHOLE, 10, PART)


@pytest.mark.parametrize("event", [LeaseDone(WHOLE, 10, {}), LeaseDone(WHOLE, 10, {}, PART)])
def test_a_lease_is_finished_once(event: Event) -> None:
    replica = replica_in("up")
    assert replica.hear(event, now=1.0, at=0.0) is not None
    assert replica.hear(event, now=1.0, at=0.0) is None
    assert list(replica.current.leases) == [CUT.key]


def test_rows_and_errors_of_a_finished_lease_are_no_longer_open() -> None:
    replica = replica_in("up")
    assert replica.outstanding_rows == 15
    replica.hear(progress(12, errors=3), now=1.0, at=0.0)
    assert (replica.num_open_rows, replica.outstanding_rows, replica.open_errors.total()) == (12, 3, 3)
    replica.hear(LeaseDone(WHOLE, 10, {"refused": 1}, PART), now=1.0, at=0.0)
    assert (replica.num_open_rows, replica.outstanding_rows, replica.open_errors.total()) == (2, 3, 2)


def test_only_leases_that_have_not_begun_can_be_taken_back() -> None:
    replica = replica_in("up")
    other = Lease(5, 50, 60)
    replica.give([other])
    replica.hear(LeaseBegun(WHOLE.key, 0, 0), now=1.0, at=0.0)
    assert replica.unbegun == (CUT, other)
    assert replica.ask_back([CUT]) == (CUT.key,)
    assert replica.unbegun == (other,)
    assert replica.ask_back([other]) == (CUT.key, other.key)
    assert replica.outstanding_rows == 10
    # It had begun the first one when it was asked.
    assert replica.hear(Revoked((other,)), now=1.0, at=0.0) == Revoked((other,))
    assert replica.unbegun == (CUT,)
    assert list(replica.current.leases) == [WHOLE.key, CUT.key]


def why_end(replica: FleetReplica, now: float) -> str | None:
    return replica.why_end(now, stall_timeout_s=STALL_S, start_timeout_s=START_S)


# state: why it has to be ended 0, 2, 11, 61 and 301 s later
STALLED = "no step for 60 s (stall_timeout_s)"
HANGS = (
    "its start made no progress for 300 s (start_timeout_s): no message, no line in its log and nothing read while "
    "starting"
)
ENDS: dict[str, tuple[str | None, ...]] = {
    "waiting": (None, None, None, None, None),
    "starting": (None, None, None, None, HANGS),
    "up": (None, None, None, STALLED, STALLED),
    "failed at its start": (None, None, "", "", ""),
    "failed": (None, None, "", "", ""),
    "stopped": (None, "", "", "", ""),
    "restarting": (None, None, None, None, None),
}


@pytest.mark.parametrize("state", ENDS)
def test_when_an_incarnation_has_to_be_ended(state: str) -> None:
    assert tuple(why_end(replica_in(state), now) for now in (0.0, 2.0, 11.0, 61.0, 301.0)) == ENDS[state]


def test_a_start_that_makes_progress_or_waits_for_a_host_goes_on() -> None:
    replica = replica_in("starting")
    for now, activity in ((200.0, (10, 0)), (400.0, (10, 5)), (500.0, (10, 5)), (1000.0, None), (2000.0, None)):
        replica.note_start_activity(activity, now)
    assert [why_end(replica, now) is None for now in (2300.0, 2301.0)] == [True, False]
    replica.hear(StartPhase("compiling"), now=2301.0, at=0.0)
    replica.note_start_detail("capturing graphs 1/9")
    assert why_end(replica, 2601.0) is None
    assert str(why_end(replica, 2602.0)).endswith("nothing read while compiling (capturing graphs 1/9)")


@pytest.mark.parametrize(("steps", "in_flight", "is_stalled"), [(1, 1, True), (2, 1, False), (1, 0, False)])
def test_an_engine_stalls_if_it_has_requests_and_makes_no_step(steps: int, in_flight: int, is_stalled: bool) -> None:
    replica = replica_in("up")
    replica.hear(progress(steps=1, in_flight=1), now=1.0, at=0.0)
    replica.hear(progress(steps=steps, in_flight=in_flight), now=50.0, at=0.0)
    assert (why_end(replica, 70.0) is not None) == is_stalled


AGAIN, DIED, GIVEN_UP = (Verdict(action, "") for action in ("again", "died", "given up"))


@pytest.mark.parametrize(
    ("num_rows", "exit_code", "verdict", "after"),
    [
        # state afterwards, failures, restarts, seconds until the next start
        (0, 1, None, ("restarting", 2, 2, 2.0)),
        (5, 1, None, ("restarting", 1, 2, 1.0)),
        (0, UserError.exit_code, None, ("given up", 2, 1, math.inf)),
        (0, 1, AGAIN, ("restarting", 1, 2, 1.0)),
        (0, UserError.exit_code, AGAIN, ("restarting", 1, 2, 1.0)),
        (0, 1, DIED, ("restarting", 2, 2, 2.0)),
        (0, UserError.exit_code, DIED, ("restarting", 2, 2, 2.0)),
        (5, 1, GIVEN_UP, ("given up", 1, 1, math.inf)),
    ],
)
def test_what_follows_from_an_end(
    num_rows: int, exit_code: int, verdict: Verdict | None, after: tuple[str, int, int, float]
) -> None:
    replica = replica_in("restarting")
    replica.start("000001.0002", 10.0)
    replica.hear(READY, now=10.0, at=0.0)
    replica.hear(LeaseBegun(WHOLE.key, 3, 3), now=10.0, at=0.0)
    replica.hear(progress(3 + num_rows), now=10.0, at=0.0)
    replica.hear(Failed("UserError", "the cause", exit_code), now=10.0, at=0.0)
    replica.end("the cause", verdict, now=10.0, max_restarts=2)
    state, failures, restarts, wait_s = after
    assert (replica.state, replica.failures, replica.restarts, replica.cause) == (
        state,
        failures,
        restarts,
        "the cause",
    )
    if wait_s < math.inf:
        assert not replica.is_due(10.0 + wait_s - 0.1)
    assert replica.is_due(10.0 + min(wait_s, 1000.0)) == (wait_s < math.inf)
    assert not replica.current.leases
    assert replica.num_open_rows == 0


def test_after_as_many_restarts_as_allowed_it_is_given_up_and_an_excuse_brings_it_back() -> None:
    replica = replica_in("given up")
    replica.excuse(now=5.0, max_restarts=0)
    assert (replica.state, replica.is_given_up, replica.restarts) == ("restarting", False, 1)
    assert [replica.is_due(now) for now in (5.9, 6.0)] == [False, True]
    replica.start("000001.0002", 6.0)
    replica.stop()
    replica.end("", None, now=7.0, max_restarts=0)
    replica.excuse(now=7.0, max_restarts=9)
    assert (replica.state, replica.is_given_up) == ("ended", True)


def lose_hosts(replica: FleetReplica, number: int, num_rows: int = 0) -> None:
    for _ in range(number):
        replica.start("000001.0002", 0.0)
        replica.hear(progress(num_rows), now=0.0, at=0.0)
        replica.end("the loss of its node", None, now=0.0, max_restarts=3, was_host_lost=True)


def test_lost_hosts_are_no_failures_and_have_a_bound_of_their_own() -> None:
    replica = replica_in("restarting")
    lose_hosts(replica, 20)
    assert (replica.state, replica.failures, replica.host_losses) == ("restarting", 1, 20)
    lose_hosts(replica, 1)
    assert replica.is_given_up
    # The search for a row that kills its host makes progress: the loss does not count.
    replica.excuse(now=0.0, max_restarts=3, was_host_lost=True)
    assert (replica.state, replica.failures, replica.host_losses) == ("restarting", 1, 20)
    lose_hosts(replica, 30, num_rows=1)
    assert (replica.state, replica.failures, replica.host_losses) == ("restarting", 0, 1)


@pytest.mark.parametrize("state", STATES)
def test_a_stop_ends_at_once_only_engines_that_are_not_up(state: str) -> None:
    replica = replica_in(state)
    assert replica.stop() == (state in ("starting", "failed at its start"))
    assert replica.is_given_up == (state in OVER)
    if replica.is_live:
        replica.end("", AGAIN, now=1.0, max_restarts=9)
    assert not replica.is_due(1000.0)


def test_of_the_last_messages_only_parts_count_for_leases() -> None:
    replica = replica_in("up")
    events = (
        progress(15),
        LeaseDone(CUT, 5),
        Revoked((CUT,)),
        LeaseDone(WHOLE, 10, {"refused": 1}, PART),
        FAILED,
    )
    assert replica.hear_last(events, now=1.0, at=0.0) == (finished(WHOLE, 10, PART),)
    assert list(replica.current.leases) == [CUT.key]
    assert replica.num_open_rows == 5
    assert replica.current.failed == FAILED


def test_an_incarnation_knows_nothing_of_the_one_before() -> None:
    replica = replica_in("up")
    replica.hear(replace(progress(15), num_answered=12), now=1.0, at=1003.0)
    assert replica.status().busy == 0.0
    replica.end("", None, now=1.0, max_restarts=9)
    replica.start("000001.0002", 3.0)
    assert (replica.is_up, replica.state, replica.status().busy) == (False, "starting", None)
    assert (replica.num_open_rows, replica.window_rows) == (0, 1)
    assert replica.status().num_rows == 12  # of all incarnations
    # For the speed of the run: the engine may start again when the last part is committed.
    assert (replica.last_engine, replica.ready_at) == (READY.engine, [0.0])
