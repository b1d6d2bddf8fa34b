"""One trial: a job of a sample of the rows under a candidate's settings. A stop loses at most the running trial."""

import json
import os
import pathlib
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from batchinf.base.errors import BatchinfError, Interrupted, OutputError
from batchinf.base.storage import Folder
from batchinf.base.text import one_line
from batchinf.coordinator.ending import Summary
from batchinf.fleet.speed import times_of
from batchinf.manifest.state import read_state
from batchinf.tuning.candidates import Candidate, Settings

# Runs a job with these overrides of the spec, as `batchinf.run` does.
RunJob = Callable[[Mapping[str, Any]], Summary]


@dataclass(frozen=True, slots=True)
class TuneTrial:
    """What a candidate did on a sample of the rows. Rates are those while the engines worked."""

    candidate: Candidate
    num_rows: int
    rows_per_s: float = 0.0
    """Output rows."""
    prompt_tokens_per_s: float = 0.0
    output_tokens_per_s: float = 0.0
    start_s: float = 0.0
    """The time without `work_s`: engine starts, checks and the end."""
    work_s: float = 0.0
    num_devices: int = 0
    """GPUs; 0 on processors."""
    error: str = ""
    """Why the candidate could not run; its rates are 0 then."""
    late_s: float = 0.0
    """From the first engine that was up to the last one."""

    @property
    def tokens_per_s(self) -> float:
        """Prompt and output tokens a second."""
        return self.prompt_tokens_per_s + self.output_tokens_per_s


class TrialRecord:
    """The trials of one spec in a folder, a line of JSON each. They survive a stop of the program."""

    def __init__(self, folder: pathlib.Path, fingerprint: str) -> None:
        """Raises OutputError if the folder holds trials of another spec."""
        self.folder = folder
        self._path = folder / "trials.jsonl"
        self._trials: dict[tuple[str, int], TuneTrial] = {}
        if self._path.exists():
            self._read(fingerprint)
        else:
            folder.mkdir(parents=True, exist_ok=True)
            self._append({"fingerprint": fingerprint})

    def _read(self, fingerprint: str) -> None:
        # The last line is torn if the program was killed while it wrote it.
        lines = self._path.read_bytes().split(b"\n")[:-1]
        values = [json.loads(line) for line in lines]
        if not values or values[0].get("fingerprint") != fingerprint:
            raise OutputError(f"{self.folder} holds trials of another spec or input; delete it, or give another --out")
        for value in values[1:]:
            trial = TuneTrial(**{**value, "candidate": Candidate(value["candidate"]["settings"])})
            self._trials[trial.candidate.key, trial.num_rows] = trial
        os.truncate(self._path, sum(len(line) + 1 for line in lines))

    @property
    def spent_s(self) -> float:
        """The time of all trials."""
        return sum(trial.start_s + trial.work_s for trial in self._trials.values())

    def find(self, candidate: Candidate, num_rows: int) -> TuneTrial | None:
        """The trial of an earlier run of the program."""
        return self._trials.get((candidate.key, num_rows))

    def add(self, trial: TuneTrial) -> None:
        """Keep a trial, durably."""
        self._trials[trial.candidate.key, trial.num_rows] = trial
        self._append(asdict(trial))

    def _append(self, value: dict[str, Any]) -> None:
        with self._path.open("ab") as file:
            file.write(json.dumps(value).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())


def run_trial(
    candidate: Candidate,
    num_rows: int,
    *,
    kept: Settings,
    share: float | None,
    folder: pathlib.Path,
    run: RunJob,
) -> TuneTrial:
    """Run a sample as a job of its own below `folder`; its output is deleted.

    kept: settings that do not come from the candidate. share: of the rows that the sample is drawn from; None: the
    first rows. A candidate that cannot run is a trial with an error. Raises Interrupted.
    """
    place = folder / "trial"
    shutil.rmtree(place, ignore_errors=True)
    sample = {"input.limit": num_rows, **({} if share is None else {"input.sample": share})}
    output = {"output.path": os.fspath(place).replace("$", "$$"), "output.work_dir": None, "max_error_rate": 1.0}
    began = time.monotonic()
    try:
        summary = run({**kept, **candidate.settings, **sample, **output})
        state = read_state(Folder(place))
    except Interrupted:
        raise
    except BatchinfError as error:
        return TuneTrial(candidate, num_rows, start_s=time.monotonic() - began, error=one_line(error, 300))
    finally:
        shutil.rmtree(place, ignore_errors=True)
    speed = summary.speed
    assert speed is not None and state is not None
    up = times_of(state.events, "ready")
    return TuneTrial(
        candidate,
        num_rows,
        rows_per_s=summary.num_rows / speed.work_s,
        prompt_tokens_per_s=speed.prompt_tokens_per_s,
        output_tokens_per_s=speed.output_tokens_per_s,
        start_s=speed.run_s - speed.work_s,
        work_s=speed.work_s,
        num_devices=speed.num_gpus,
        late_s=max(up) - min(up),
    )
