"""What a job over some of the rows says of all of them: how long they would take, and how much they would write."""

import datetime

from batchinf.job_state import EventLine, State

CHOSEN = "chosen"  # an event: how many rows were chosen, of how many


def forecast(state: State) -> list[str]:
    """A line for people, where `input.sample` or `limit` made a finished job smaller; else none.

    Device time is that of all attempts but for that before engines had rows, as far as the manifest still tells it.
    """
    given, event = state.header.spec["input"], state.kept.get(CHOSEN)
    is_part = given.get("sample") is not None or given.get("limit") is not None
    if event is None or not is_part or not state.extents or not event.fields["num_rows"]:
        return []
    num_input_rows = event.fields["num_input_rows"]
    num_run = sum(extent.num_rows for extent in state.extents)
    whose, num_all = f"all {num_input_rows:,} rows", num_input_rows
    named = [name for name in ("where", "exclude") if given.get(name) is not None]
    if named:
        num_considered = state.extents[-1].stop_row - state.extents[0].first_row
        num_all = round(num_run / num_considered / (given.get("sample") or 1.0) * num_input_rows)
        whose = f"all rows that {' and '.join(named)} would leave, about {num_all:,},"
    factor = num_all / num_run
    device = "GPU" if _has_devices(state) else "device"
    hours = max(0.0, state.device_s - _starting_s(state)) * factor / 3600
    return [
        f"at this rate {whose} take {_amount(hours)} {device}-hours and {_amount(state.num_bytes * factor / 1e9)} GB"
    ]


def _has_devices(state: State) -> bool:
    return any(event.fields.get("devices") for event in state.events if event.name == "replica_started")


def _starting_s(state: State) -> float:
    """Device time in which engines had no rows: while they started, and where they then waited for the input."""
    starting: dict[str, EventLine] = {}
    total = 0.0
    for event in state.events:
        if event.name == "replica_started":
            starting[event.fields["incarnation"]] = event
        elif event.name == "ready":
            started = _last_of(starting, event.fields.get("replica", 0))
            total += 0.0 if started is None else _device_s(started, event)
        elif event.name == "replica_ended" and starting.pop(event.fields["incarnation"], None) is not None:
            total += event.fields["device_s"]
    return total


def _last_of(starting: dict[str, EventLine], replica: int) -> EventLine | None:
    """The start of a replica's incarnation, taken out; None where the manifest tells of it no longer."""
    names = [name for name, event in starting.items() if event.fields.get("replica", 0) == replica]
    return starting.pop(names[-1]) if names else None


def _device_s(start: EventLine, end: EventLine) -> float:
    passed = datetime.datetime.fromisoformat(end.at) - datetime.datetime.fromisoformat(start.at)
    return max(0.0, passed.total_seconds()) * max(1, len(start.fields.get("devices", ())))


def _amount(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
