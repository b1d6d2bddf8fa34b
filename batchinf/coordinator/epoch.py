"""One start of a coordinator on a job: what its parts share while the rows run."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from batchinf.coordinator.content_gate import ContentGate
from batchinf.coordinator.display import ProgressDisplay
from batchinf.coordinator.repair import RepairFile
from batchinf.fleet.fleet import Fleet
from batchinf.job.job import Job
from batchinf.manifest.lines import Speed
from batchinf.manifest.lock import JobLock
from batchinf.manifest.log import Manifest
from batchinf.manifest.state import State
from batchinf.output.mirror import Mirror
from batchinf.schedule.predicate import Predicate


@dataclass(slots=True)
class Epoch:
    """One start of a coordinator on a job, whose rows can run."""

    job: Job
    state: State
    lock: JobLock
    manifest: Manifest
    fleet: Fleet
    """Knows its work. No replica runs if all shards are committed. For a retry, it turns to other work."""
    content_gate: ContentGate
    """Lets replicas store results."""
    display: ProgressDisplay
    retry: Predicate | None
    """Chooses the rows of a retry to begin."""
    overrides: Mapping[str, Any]
    """The sampling of that retry."""
    given: RepairFile | None = None
    """The file from which it takes rows."""
    mirror: Mirror | None = None
    """Of a job in a bucket."""
    speed: Speed | None = None
    """Of the rows, or of the first retry if no rows were left."""
    stops: list[str] = field(default_factory=list)
    """Requests to stop that came when all rows of a coordinator were done: no retry runs any more."""
