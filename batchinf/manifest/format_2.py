"""Translates the lines of format version 2, whose events were state and history at once.

Only finished jobs of that version are read. So events that only a run needs are left out.
"""

from collections.abc import Iterator
from typing import Any

from batchinf.manifest.commit_log import Fields

_KINDS = {"beginning": "beginning", "lost": "lost", "replica_started": "started", "replica_ended": "ended"}


class OldLines:
    """Translates lines in their order. Lines of later versions stay as they are."""

    def __init__(self) -> None:
        self._header: Fields = {}
        self._epoch = 0
        self._speed: Any = None

    def translated(self, line: Fields) -> Iterator[Fields]:
        """Raises LookupError for a missing field."""
        match line["kind"]:
            case "header":
                self._header = line
                yield line
            case "snapshot":
                yield line
                if "device_s" in line:
                    yield {"kind": "ended", "incarnation": "", "device_s": line["device_s"]}
            case "done":
                yield {"speed": self._speed, **line}
            case "event" | "counted_event" | "kept_event" as kind:
                name = str(line["name"])
                if kind == "event" and name in _KINDS:  # the snapshot has the sums of the other two kinds
                    yield {**line, "kind": _KINDS[name]}
                yield from self._event(name, line)
            case _:
                yield line

    def _event(self, name: str, line: Fields) -> Iterator[Fields]:
        match name:
            case "replica_started" if line.get("devices"):
                yield {"kind": "ended", "incarnation": "", "device_s": 0.0, "has_devices": True}
            case "epoch":
                self._epoch = line["epoch"]
            case "ready":
                yield {"device": "", "settings": {}, **line, "kind": "platform", "epoch": self._epoch}
            case "input_job":
                yield {**self._header, "input_job": line["input_job"]}
            case "speed" | "forgotten" if line["kept_as"] == "speed":
                self._speed = line.get("speed")
