"""One trial: a job of a sample of the rows under some settings."""

import contextlib
import os
import pathlib
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from batchinf.base.errors import BatchinfError, Interrupted
from batchinf.base.text import one_line
from batchinf.coordinator.ending import Summary
from batchinf.tuning.candidates import Settings

# Runs a job with these overrides of the spec, as `batchinf.run` does.
RunJob = Callable[[Mapping[str, Any]], Summary]


@dataclass(frozen=True, slots=True)
class TuneTrial:
    """What some settings did on a sample of the rows. Rates are those while the engines worked."""

    settings: Settings
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
    """Why it could not run; its rates are 0 then."""
    late_s: float = 0.0
    """From the first engine that was up to the last one."""

    @property
    def tokens_per_s(self) -> float:
        """Prompt and output tokens a second."""
        return self.prompt_tokens_per_s + self.output_tokens_per_s

    def gain(self, base: "TuneTrial", num_rows: int) -> float:
        """How many times as fast an input of `num_rows` rows is done as with the settings of `base`.

        Engines of one device start one after the other. Until the last one is up, the job has the speed of `base`.
        """
        base_s = num_rows * base.work_s / base.num_rows
        late_s = min(base_s, max(0.0, self.late_s - base.late_s))
        if not self.rows_per_s:
            return 0.0
        return base_s / (late_s + (base_s - late_s) * base.rows_per_s / self.rows_per_s)


def run_trial(settings: Settings, sample: Settings, *, folder: pathlib.Path, run: RunJob) -> TuneTrial:
    """Run a sample as a job of its own below `folder`, and delete it.

    sample: settings that do not come from the candidate, with `input.limit`. Settings that cannot run make a trial with
    an error. Raises Interrupted.
    """
    place = folder / "trial"
    shutil.rmtree(place, ignore_errors=True)
    num_rows = sample["input.limit"]
    output = {"output.path": os.fspath(place).replace("$", "$$"), "output.work_dir": None}
    whole = {**output, "max_error_rate": 1.0, "retry": None}
    began = time.monotonic()
    try:
        summary = run({**sample, **settings, **whole})
    except Interrupted:
        raise
    except BatchinfError as error:
        return TuneTrial(settings, num_rows, start_s=time.monotonic() - began, error=one_line(error, 300))
    finally:
        shutil.rmtree(place, ignore_errors=True)
        with contextlib.suppress(OSError):  # the user's folder may hold more
            folder.rmdir()
    speed = summary.speed
    assert speed is not None
    return TuneTrial(
        settings,
        num_rows,
        rows_per_s=summary.num_rows / speed.work_s,
        prompt_tokens_per_s=speed.prompt_tokens_per_s,
        output_tokens_per_s=speed.output_tokens_per_s,
        start_s=speed.run_s - speed.work_s,
        work_s=speed.work_s,
        num_devices=speed.num_gpus,
        late_s=speed.late_s,
    )
