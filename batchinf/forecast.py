"""What a job over some of the rows says of all of them: how long they would take, and how much they would write."""

from batchinf.job_state import State

CHOSEN = "chosen"  # an event: how many rows were chosen, of how many


def forecast(state: State) -> list[str]:
    """A line for people, where `input.sample` or `limit` made a finished job smaller; else none.

    Device time is that of all attempts but for the starting of engines, as far as the manifest still tells it.
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
    """Device time that engines took to start."""
    num_devices: dict[int, int] = {}
    total = 0.0
    for event in state.events:
        if event.name == "replica_started":
            num_devices[event.fields["replica"]] = max(1, len(event.fields.get("devices", ())))
        elif event.name == "ready":
            total += event.fields.get("start_s", 0.0) * num_devices.get(event.fields.get("replica", 0), 1)
    return total


def _amount(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
