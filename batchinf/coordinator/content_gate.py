"""Withholds results from the disk until the digests of the model's files are durable, so that no job mixes models.

Weights are digested while engines load them. Replicas run rows meanwhile and hold the results in memory.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from batchinf.base import faults
from batchinf.base.slices import share_files
from batchinf.base.text import size_text
from batchinf.fleet.fleet import Fleet
from batchinf.fleet.replica import FleetReplica
from batchinf.job.choose import Say
from batchinf.job.drift import drift_error
from batchinf.job.job import Job
from batchinf.manifest.lines import ModelFiles
from batchinf.manifest.log import Manifest
from batchinf.model.content import Contents, check_unchanged
from batchinf.replica.messages import MayStore


@dataclass(kw_only=True, eq=False)
class ContentGate:
    """Records the digests in the manifest, and then tells replicas that they may store results."""

    contents: Contents
    job: Job
    before: Mapping[str, str]
    """The digests that the manifest has; empty if it has none."""
    manifest: Manifest
    say: Say
    is_open: bool = field(default=False, init=False)
    _has_said: bool = field(default=False, init=False)

    def look(self, fleet: Fleet) -> None:
        """If all digests are known by now, make them durable and tell the fleet. Raises DriftError for another file."""
        if self.is_open or not self.contents.is_known:
            return
        self._record()
        self.is_open = True
        for replica in fleet.replicas:
            if replica.is_running:
                fleet.send(replica, MayStore())

    def admit(self, fleet: Fleet, replica: FleetReplica) -> None:
        """Check, for a replica whose engine is up, that no file has changed since before the engine loaded it."""
        check_unchanged(self.contents.stamps)
        if self.is_open:
            fleet.send(replica, MayStore())
        elif not self._has_said:
            self._has_said = True
            num_read = size_text(self.contents.num_bytes_read)
            self.say(
                f"results wait in memory until all bytes of the model's files are read: {num_read} of "
                f"{size_text(self.contents.num_bytes)} so far"
            )

    def _record(self) -> None:
        job = self.job
        digests = self.contents.digests
        if lines := self.contents.differences(self.before):
            raise drift_error(f"{job.folder.root} holds a job", files=lines)
        if not digests:
            return
        faults.point("identity.before_line")
        if job.slice is not None:
            output = job.spec.output
            if lines := self.contents.differences(share_files(output.folder, digests, output.bucket())):
                raise drift_error(f"{output.path} holds slices of a job", files=lines)
        if self.before:
            return
        self.manifest.record(ModelFiles(dict(digests)))
        self.manifest.commit()
        faults.point("identity.after_line")
