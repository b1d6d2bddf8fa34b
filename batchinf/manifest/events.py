"""`events.jsonl`: what happened to a job, for people and displays. No run decides by it, and a crash may tear it."""

import contextlib
import datetime
import json
import os
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from batchinf.base.json_types import JsonText, Time
from batchinf.base.storage import Folder, adapter, open_log
from batchinf.manifest.commit_log import Fields, whole_lines
from batchinf.manifest.state import list_logs

EVENTS_FILE = "events.jsonl"


class EventLine(NamedTuple):
    """Something that happened, at a UTC time in ISO format."""

    name: JsonText
    at: Time
    fields: Fields

    @property
    def time(self) -> float:
        """When it happened, in seconds since 1970."""
        return datetime.datetime.fromisoformat(self.at).timestamp()


def append_events(folder: Folder, events: Sequence[EventLine]) -> None:
    """Write events, without fsync: a power cut, or a disk that fails, costs only lines of this file."""
    path = folder.path(EVENTS_FILE)
    data = b"".join(
        json.dumps({"at": event.at, "name": event.name, **event.fields}).encode() + b"\n" for event in events
    )
    with contextlib.suppress(OSError), open_log(path) as file:
        file.write(b"\n" + data if _is_torn(path) else data)


def _is_torn(path: pathlib.Path) -> bool:
    """Whether a crash has torn the last line."""
    with path.open("rb") as file:
        num_bytes = file.seek(0, os.SEEK_END)
        file.seek(max(0, num_bytes - 1))
        return file.read() not in (b"", b"\n")


def read_events(folder: Folder) -> list[EventLine]:
    """The events of a job, in order. Broken lines are left out. A job in format version 2 has them in its manifest."""
    if folder.exists(EVENTS_FILE):
        with folder.path(EVENTS_FILE).open("rb") as file:
            return [*_whole_events(file)]
    logs = [name for _, name in list_logs(folder)]
    lines = (fields for name in logs for fields in whole_lines(folder, name))
    return [*_whole_events(fields for fields in lines if fields.get("kind") in ("event", "counted_event"))]


def _whole_events(lines: Iterable[bytes | Fields]) -> Iterable[EventLine]:
    for line in lines:
        with contextlib.suppress(ValueError, RecursionError, LookupError, TypeError):
            fields: Any = json.loads(line) if isinstance(line, bytes) else line
            yield adapter(EventLine).validate_python((fields["name"], fields["at"], fields))
