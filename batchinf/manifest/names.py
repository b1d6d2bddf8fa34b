"""The names of parts, staged parts and incarnations, as the manifest uses them; and names that are not batchinf's."""

import re
from collections.abc import Sequence

from batchinf.base.storage import Folder
from batchinf.base.text import clip

TELEMETRY_FOLDER = "telemetry"
_PART_NAME = re.compile(r"part-(\d{6,})\.parquet")
_STAGING = re.compile(r"(\d{6,})-[A-Za-z0-9._-]+\.parquet")


def part_name(shard: int) -> str:
    """The name in `parts/` of a shard's part."""
    return f"part-{shard:06d}.parquet"


def parse_part_name(name: str) -> int | None:
    """The shard of a name in `parts/`; None for a name that is not ours."""
    match = _PART_NAME.fullmatch(name)
    return int(match[1]) if match else None


def staging_name(shard: int, incarnation: str) -> str:
    """The name in `staging/` of a shard's part."""
    return f"{shard:06d}-{incarnation}.parquet"


def parse_staging_name(name: str) -> int | None:
    """The shard of a name in `staging/`; None for a name that is not ours."""
    match = _STAGING.fullmatch(name)
    return int(match[1]) if match else None


_INCARNATION = re.compile(r"\d+\.r(\d+)\.\d+")


def incarnation_name(epoch: int, number: int, retry: int) -> str:
    """The name of a replica's incarnation. Its segments and staged parts have it too, so each retry has its own."""
    return f"{epoch:06d}.r{retry:06d}.{number:04d}" if retry else f"{epoch:06d}.{number:04d}"


def retry_of(incarnation: str) -> int:
    """The retry that an incarnation works for; 0 for the job's first run."""
    match = _INCARNATION.fullmatch(incarnation)
    return int(match[1]) if match else 0


# All that a job or a command makes in an output folder by itself, and files of systems: NFS, macOS.
_KNOWN = re.compile(
    r"(manifest|parts|staging|journal|images|damaged|retry|repairs|selection|source|logs|telemetry|(old-)?slice-\d+(\.\d+)?)"
    r"|(job\.yaml|cut\.json|files\.json|status\.json|report\.html|lock(\.stale-.*)?|\.(tmp-|batchinf-|nfs|fuse_hidden).*|\.DS_Store)"
)
_MOST_SHOWN = 3


def other_names(folder: Folder) -> list[str]:
    """Names in an output folder that are not batchinf's, sorted."""
    try:
        return [name for name in folder.list("") if not _KNOWN.fullmatch(name)]
    except NotADirectoryError:
        return []


def say_names(names: Sequence[str]) -> str:
    """The first three names, and the number of the others."""
    more = f" and {len(names) - _MOST_SHOWN:,} more" if len(names) > _MOST_SHOWN else ""
    return ", ".join(map(clip, names[:_MOST_SHOWN])) + more


def others_note(folder: Folder) -> str | None:
    """A line for people who give a job a folder with other files in it; None if there are none."""
    if not (names := other_names(folder)):
        return None
    return f"note: {folder.root} holds other files, which the job leaves alone: {say_names(names)}"
