"""A manifest that cannot be read any more, made anew from those of its lines that are whole.

Which parts are committed is not taken from it. Each part proves itself whole and the job's, and the next run adopts
those that do; so a line that is lost costs no more than reading the parts.
"""

import datetime
from collections import Counter

from batchinf.base.errors import OutputError
from batchinf.base.storage import Folder
from batchinf.manifest.commit_log import Fields, encode_commits, whole_lines
from batchinf.manifest.lines import EventLine
from batchinf.manifest.log import snapshot_commits
from batchinf.manifest.names import parse_part_name
from batchinf.manifest.state import State, check_version, list_logs
from batchinf.output.proof import job_of
from batchinf.records import Extent

DAMAGED = "damaged"
_KINDS = {"header", "extent", "event", "snapshot", "counted_event"}
_PARTS_TO_ASK = 100


def rebuild_manifest(folder: Folder, epoch: int) -> list[str]:
    """Write a log of `epoch`, which is the lock's, and move the others to `damaged/`; what they are called there.

    Raises OutputError, with nothing changed, if what the job is cannot be told any more, or if it is of a newer format.
    """
    logs = [name for _, name in list_logs(folder)]
    lines = {name: list(_useful_lines(folder, name)) for name in logs}
    owner = _owner(folder, lines)
    state = State()
    for name in logs:
        if any(fields.get("job_id", owner) != owner for fields in lines[name]):
            continue
        for fields in lines[name]:
            _apply(folder, state, fields)
    if not state.has_header or not state.extents:
        raise OutputError(
            f"{folder.path('manifest')} cannot be repaired: the lines that say what the job is are damaged; put back a "
            "whole copy of it, or give the job another output.path"
        )
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
    state.events.append(EventLine("rebuilt", now, {"replaces": logs}))
    state.event_counts["rebuilt"] += 1
    data = encode_commits(snapshot_commits(state, logs))
    if not folder.create_exclusive(f"manifest/{epoch:06d}.jsonl", data):
        raise OutputError(f"another process has begun epoch {epoch} of {folder.root}; run this again")
    return [move_file_aside(folder, name) for name in logs]


def move_file_aside(folder: Folder, name: str) -> str:
    """Move a file to `damaged/`, under a name that is free there; the name. Nothing is ever deleted."""
    folder.make(DAMAGED)
    base, number = f"{DAMAGED}/{name.rpartition('/')[2]}", 0
    target = base
    while folder.exists(target):
        number += 1
        target = f"{base}.{number}"
    folder.publish(name, target)
    return target


def _useful_lines(folder: Folder, name: str) -> list[Fields]:
    lines = []
    for fields in whole_lines(folder, name):
        check_version(folder, fields)
        if fields.get("kind") in _KINDS:
            lines.append(fields)
    return lines


def _owner(folder: Folder, lines: dict[str, list[Fields]]) -> str | None:
    """Of several jobs' logs in one folder, the job whose parts lie there too."""
    stated = {fields["job_id"] for log in lines.values() for fields in log if "job_id" in fields}
    if len(stated) < 2:
        return next(iter(stated), None)
    names = [name for name in folder.list("parts") if parse_part_name(name) is not None]
    owners = Counter(job_of(folder, f"parts/{name}") for name in names[:_PARTS_TO_ASK])
    known = [owner for owner, _ in owners.most_common() if owner in stated]
    if not known:
        raise OutputError(
            f"{folder.path('manifest')} holds logs of several jobs, {', '.join(sorted(stated))}, and no part tells "
            "which of them is this one: move the others away"
        )
    return known[0]


def _is_same(extent: Extent, fields: Fields) -> bool:
    # An extent may be without rows, and the next one then begins where it does.
    return all(getattr(extent, name) == fields[name] for name in ("start", "num_rows", "first_row"))


def _apply(folder: Folder, state: State, fields: Fields) -> None:
    if fields["kind"] == "extent" and any(_is_same(extent, fields) for extent in state.extents):
        return  # a snapshot says it again
    try:
        state.apply(fields)
    except (LookupError, ValueError) as error:
        raise OutputError(
            f"{folder.path('manifest')} cannot be repaired: a line that says how rows are cut is damaged; put back a "
            "whole copy of it, or give the job another output.path"
        ) from error
