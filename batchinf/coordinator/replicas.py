"""The replicas of one epoch: `start` starts them beside the scan of the input, and the manifest records their ends."""

import contextlib
from dataclasses import replace
from types import TracebackType

from batchinf.base.errors import BatchinfError
from batchinf.base.stop_signals import shielded
from batchinf.fleet.launcher import Launcher, note_end, note_started
from batchinf.manifest.log import Manifest
from batchinf.spec.job import JobSpec


class Replicas:
    """A context manager. When the block ends, all replicas have ended; after an error, the manifest has it too."""

    def __init__(self, launcher: Launcher, manifest: Manifest, job_id: str) -> None:
        self.launcher = launcher
        self.fleet = launcher.fleet(job_id)
        self._manifest = manifest
        self._job_id = job_id

    def __len__(self) -> int:
        return len(self.launcher.slots)

    def start(self) -> None:
        """Start the replicas that are due, and commit that to the manifest."""
        with shielded():
            note_started(self._manifest, self.launcher.backend, self.fleet.start_due())

    def end(self) -> None:
        """End the replicas that run, and commit their ends."""
        with shielded():
            for ended in self.fleet.kill():
                note_end(self._manifest, ended)
            self._manifest.commit()

    def match(self, spec: JobSpec) -> None:
        """Make the replicas fit the job, now that its input is known.

        If only later rows show that the input is a batch file, the replicas end, and those that start later have
        engines with other arguments.
        """
        if spec.input.format == self.launcher.spec.input.format:
            return
        self.end()
        self.launcher = replace(self.launcher, spec=spec)
        self.fleet = self.launcher.fleet(self._job_id, num_before=self.fleet.num_incarnations)

    def __enter__(self) -> "Replicas":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if error is not None:
                # Later errors, for example from a full disk, must not hide the first one.
                with contextlib.suppress(BatchinfError, OSError):
                    self._manifest.discard()
                    self.end()
        finally:
            self.fleet.kill()  # those that live still: a second Ctrl-C may have ended the first call
