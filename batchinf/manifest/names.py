"""The names of parts, staged parts and incarnations, as the manifest uses them; and names that are not batchinf's."""

import re
import time
from collections.abc import Sequence

from batchinf.base.storage import Folder
from batchinf.base.text import clip
from batchinf.records import Part

TELEMETRY_FOLDER = "telemetry"
_PART_NAME = re.compile(r"part-(\d{6,})\.parquet")
_STAGING = re.compile(r"(\d{6,})-([0-9a-f]{32})\.parquet")
_RENAME_S = 0.05  # that a coordinator needs from a part's line to its name in `parts/`


def part_name(shard: int) -> str:
    """The name in `parts/` of a shard's part."""
    return f"part-{shard:06d}.parquet"


def parse_part_name(name: str) -> int | None:
    """The shard of a name in `parts/`; None for a name that is not ours."""
    match = _PART_NAME.fullmatch(name)
    return int(match[1]) if match and name == part_name(int(match[1])) else None


def staging_name(shard: int, digest: str) -> str:
    """The name in `staging/` of a shard's part. digest: of all its bytes."""
    return f"{shard:06d}-{digest}.parquet"


def parse_staging_name(name: str) -> tuple[int, str] | None:
    """The shard and the digest of a name in `staging/`; None for a name that is not ours."""
    match = _STAGING.fullmatch(name)
    return (int(match[1]), match[2]) if match else None


def published_file(part: Part) -> str:
    """The file of a part in `parts/`."""
    return f"parts/{part_name(part.shard)}"


def staged_file(part: Part) -> str:
    """The file of a part in `staging/`, where it stands until its line is committed."""
    return f"staging/{staging_name(part.shard, part.digest)}"


def readable_file(folder: Folder, part: Part) -> str:
    """The file in which readers find a committed part; if its coordinator was killed, it may not be in `parts/` yet."""
    published = published_file(part)
    staged = staged_file(part)
    if not folder.exists(published) and folder.exists(staged):
        time.sleep(_RENAME_S)  # a coordinator that lives is about to rename it
        if not folder.exists(published):
            return staged
    return published


_INCARNATION = re.compile(r"\d+\.r(\d+)\.\d+")


def incarnation_name(epoch: int, number: int, retry: int) -> str:
    """The name of a replica's incarnation. Its segments have it too, so each retry has its own."""
    return f"{epoch:06d}.r{retry:06d}.{number:04d}" if retry else f"{epoch:06d}.{number:04d}"


def retry_of(incarnation: str) -> int:
    """The retry that an incarnation works for; 0 for the job's first run."""
    match = _INCARNATION.fullmatch(incarnation)
    return int(match[1]) if match else 0


PUSH_FOLDER = "hub"  # in the output folder: what is being pushed to the hub

# All that a job or a command makes in an output folder by itself, and files of systems: NFS, macOS.
_KNOWN = re.compile(
    r"(manifest|parts|staging|journal|images|damaged|retry|repairs|selection|source|logs|telemetry|hub|(old-)?slice-\d+(\.\d+)?)"
    r"|(job\.yaml|cut\.json|files\.json|status\.json|events\.jsonl|report\.html|lock(\.stale-.*)?|\.(tmp-|batchinf-|nfs|fuse_hidden).*|\.DS_Store)"
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
