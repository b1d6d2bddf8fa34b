"""Jobs from Python: `batchinf.run`, `validate`, `plan`, `tune`, `status` and `open`, as on the command line.

    try:
        results = batchinf.run({"model": "my-model", "input": {"path": "rows.jsonl"}, "output": {"path": "out/rows"}})
    except batchinf.Interrupted:
        ...                                   # the same call resumes the job
    texts = results.table(["id", "text"]).to_pandas()

A spec is the path of a YAML file, a mapping with the same fields, or a `JobSpec`. Errors are the exceptions of
`batchinf.base.errors`.
"""

import contextlib
import functools
import io
import json
import os
import random as random_numbers
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from batchinf.base.errors import UserError
from batchinf.base.parquet import absolute
from batchinf.base.paths import check_caches, check_is_here, is_bucket
from batchinf.base.slices import Slice
from batchinf.base.stop_signals import interruptible
from batchinf.base.text import name_type
from batchinf.commands.plan.plan import PlanOptions, make_plan
from batchinf.commands.plan.report import PlanReport
from batchinf.commands.push import check_push, push_output
from batchinf.commands.status import StatusReport, job_status
from batchinf.commands.validate.findings import ValidateFinding, ValidateReport
from batchinf.commands.validate.validate import validate_job
from batchinf.coordinator.display import ProgressDisplay
from batchinf.coordinator.ending import Summary
from batchinf.coordinator.run import run_job
from batchinf.engines.installed import (
    check_engine_types,
    check_sampling_fields,
    check_structures_config,
    engine_argument_names,
)
from batchinf.fleet.launch import choose_backend
from batchinf.fleet.status import JobStatus
from batchinf.results import Results, open
from batchinf.spec.file import Overrides, SpecFile, SpecSource, check_engine_arguments, list_of, read_spec
from batchinf.spec.job import JobSpec
from batchinf.tasks import registry as _tasks  # noqa: F401  # it adds the tasks to the spec
from batchinf.tuning.tune import TuneReport, tune_job

__all__ = [
    "JobSpec",
    "JobStatus",
    "PlanReport",
    "Results",
    "RunResults",
    "StatusReport",
    "Summary",
    "TuneReport",
    "ValidateReport",
    "open",
    "plan",
    "run",
    "status",
    "tune",
    "validate",
]

# Options that exclude each other, and why.
_EXCLUDED = {
    ("--fresh", "--retry"): "--fresh starts a new job, --retry runs finished rows again: give one of them",
    ("--extend", "--fresh"): "--extend continues the job with new rows, --fresh starts a new job: give one of them",
    ("--extend", "--retry"): "--extend runs new rows, --retry runs finished rows again: use one after the other",
    ("--input", "--slice"): "a slice takes no repaired rows: run them as a job of their own, with another output.path",
    ("--extend", "--slice"): "a slice takes no new rows: give them to a new job, with input.exclude",
}


def run(
    spec: SpecSource,
    *,
    overrides: Overrides = (),
    retry: str | None = None,
    input: str | os.PathLike[str] | None = None,
    fresh: bool = False,
    extend: bool = False,
    slice: str | None = None,
    progress: Callable[[JobStatus], None] | None = None,
    quiet: bool = False,
    stop: threading.Event | None = None,
    display: ProgressDisplay | None = None,
) -> "RunResults":
    """Run a job, or resume an unfinished one. Returns its output when all rows are done.

    spec: a YAML file, a mapping, or a `JobSpec`. overrides: fields to set, as `{"sampling.max_tokens": 64}`, or as
    texts like those of `--set`. retry: `errors`, or an SQL expression over the output columns; these rows of a finished
    job run again. input: a file from which the retry takes rows in place of those of the job's input. fresh: rename the
    old output folder and start a new job. extend: also run new rows of the input. slice: run only this slice, such as
    `3/8`.

    progress: called about once a second with a `JobStatus`, instead of a progress bar, on the thread of this call. An
    exception in it ends the job. quiet: print nothing. stop: an event; once it is set, the job stops as by Ctrl-C.
    display: shows the progress in place of both.

    On the main thread, Ctrl-C (also the interruption of a notebook's cell), SIGTERM, SIGHUP and SIGUSR1 stop the job,
    unless the program has its own handler for them: running requests have `drain_timeout_s` to finish, and a second
    Ctrl-C stops at once. On other threads only `stop` does. No process of the job is left after the call.

    Raises UserError or one of its subclasses; Interrupted after a stop; ErrorRateExceeded if all rows are done, but
    more of them failed than `max_error_rate`.
    """
    _check_text("retry", retry, "`errors`, or an SQL expression")
    _check_text("slice", slice, "text such as '3/8'")
    given = {
        "--fresh": fresh,
        "--retry": retry is not None,
        "--input": input is not None,
        "--slice": bool(slice),
        "--extend": extend,
    }
    for (option, other), why in _EXCLUDED.items():
        if given[option] and given[other]:
            raise UserError(f"got {option} with {other}; {why}")
    if input is not None and retry is None:
        raise UserError(
            "got --input without --retry; it repairs rows of a finished job, as with --retry errors. The rows of a new "
            "job are in the spec: --set input.path=PATH"
        )
    parsed = None if slice is None else Slice.parse(slice)
    display = display or _Display(progress, quiet)
    with interruptible(stop):
        file = read_checked(spec, overrides, parsed)
        with contextlib.closing(choose_backend(file.spec)) as backend:
            summary = run_job(
                file,
                backend,
                display,
                retry,
                extends=extend,
                fresh=fresh,
                input=None if input is None else os.fspath(input),
                check_id=functools.partial(check_push, file),
            )
        return RunResults(push_output(file, summary, display.say, stop))


class RunResults(Results):
    """The output of a run, as of `batchinf.open`, with the run's summary. `print`, and a notebook, show its lines.

    The output is read when it is first used. Then, without rows in the input, OutputError says that there is no job.
    """

    def __init__(self, summary: Summary) -> None:
        self.summary = summary
        # A program may change its folder before it reads.
        self._out = summary.folder if is_bucket(summary.folder) else absolute(summary.folder)

    def __getattr__(self, name: str) -> Any:  # Python asks it for names that `Results` has not set yet
        if name.startswith("_") or "parts" in vars(self):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        super().__init__(self._out)
        return getattr(self, name)

    def __repr__(self) -> str:
        return "\n".join(self.summary.lines())


def validate(
    spec: SpecSource,
    *,
    overrides: Overrides = (),
    num_rows: int = 2,
    rows: Sequence[str | int] = (),
    random: bool = False,
    seed: int | None = None,
    found: Callable[[ValidateFinding], None] | None = None,
) -> ValidateReport:
    """Check spec, input, model and prompts, and report rows as they will run. Needs no engine and no GPU.

    spec, overrides: see `run`. num_rows: number of rows to report. rows: the ids of the rows to report; without
    `id_column`, their positions from 0. random: report random rows. seed: report the random rows of this seed. found:
    called with each finding as soon as it is made.

    Raises UserError or one of its subclasses at the first check that fails.
    """
    if rows and (random or seed is not None):
        raise UserError("got --row with --random; --row names the rows, --random draws them: give one of them")
    if random and seed is None:
        seed = random_numbers.randrange(100_000)
    findings = []
    named = [str(row) for row in list_of(rows)]
    for finding in validate_job(read_checked(spec, overrides), num_rows=num_rows, named=named, seed=seed):
        findings.append(finding)
        if found is not None:
            found(finding)
    return ValidateReport.of(findings)


def plan(
    target: SpecSource,
    *,
    overrides: Overrides = (),
    gpu: str | Sequence[str] = (),
    gpus: int | None = None,
    nodes: int = 1,
    free_gib: float | None = None,
    context: int | None = None,
    price: float | None = None,
    output_tokens: float | None = None,
    rows: int | None = None,
    say: Callable[[str], None] | None = None,
) -> PlanReport:
    """What fits where, at which degrees, and how long a job takes. Needs no GPU, no weights and no engine.

    target: a spec as in `run`, or a model: a hub id, a folder or a config.json. gpu: a name such as `h100-80`, or
    several; default: all of the table. gpus: of each node. free_gib: memory of each GPU that other programs leave.
    context: tokens of the longest sequence. price: of one GPU for an hour; default: that of the spec. output_tokens: of
    an output, on average; default: `max_tokens`. rows: as if the input had so many rows; those that are there stand for
    them. say: called with what it does if it takes more than 2 s, instead of printing it.

    Raises UserError or one of its subclasses.
    """
    names = (gpu,) if isinstance(gpu, str) else tuple(gpu)
    options = PlanOptions(
        gpus=names,
        gpus_per_node=gpus,
        num_nodes=nodes,
        free_gib=free_gib,
        context=context,
        price=price,
        output_tokens=output_tokens,
        num_rows=rows,
    )
    return make_plan(target, overrides, options, say or (lambda line: print(line, file=sys.stderr)))


def tune(
    spec: SpecSource,
    *,
    overrides: Overrides = (),
    budget_s: float = 900.0,
    num_rows: int | None = None,
    tries: Sequence[str] = (),
    out: str | None = None,
    say: Callable[[str], None] | None = None,
    stop: threading.Event | None = None,
) -> TuneReport:
    """Run samples of a job under several settings, and find those that make it fastest. The output stays the same.

    spec, overrides, stop: see `run`. budget_s: time of all trials. num_rows: of a trial; default: enough to fill the
    largest batch. tries: values to try, as `["engine.max_num_seqs=256,512"]`; default: settings that the spec leaves
    open. out: folder of the running trial; default: the job's output folder with `-tune` behind its name. say: called
    with a line for each trial, instead of printing it.

    Raises UserError or one of its subclasses; Interrupted after a stop.
    """

    def run_sample(settings: Mapping[str, Any]) -> Summary:
        if isinstance(overrides, Mapping):
            more: Overrides = {**overrides, **settings}
        else:
            more = [*list_of(overrides), *map(_as_text, settings.items())]
        display = _Display(None, quiet=True)
        with interruptible(stop):
            trial = read_checked(spec, more)
            with contextlib.closing(choose_backend(trial.spec)) as backend:
                return run_job(trial, backend, display, None, extends=False, fresh=True, begins_together=True)

    if out is not None:
        check_is_here(out, "out", "give a folder here")
    file = read_checked(spec, overrides)
    say = say or (lambda line: print(line, file=sys.stderr))
    with contextlib.closing(choose_backend(file.spec)) as backend:
        return tune_job(
            file,
            backend,
            run=run_sample,
            say=say,
            budget_s=budget_s,
            num_rows=num_rows,
            tries=list_of(tries),
            out=out,
        )


def _as_text(setting: tuple[str, Any]) -> str:
    return f"{setting[0]}={json.dumps(setting[1])}"


def status(out: str | os.PathLike[str], *, price: float | None = None) -> StatusReport:
    """The state and the progress of a job: running, stopped or done. It may run in another process or on another host.

    out: the job's output folder, or its URL in a bucket. price: of one GPU for an hour; default: that of the spec.
    Raises OutputError if there is no job in it.
    """
    return job_status(out, price)


def _check_text(name: str, value: str | None, words: str) -> None:
    """Raise UserError for a value that is no text. words: how it is written."""
    if value is not None and not isinstance(value, str):
        raise UserError(f"{name}: got {name_type(value)}; must be {words}")


def read_checked(spec: SpecSource, overrides: Overrides, slice: Slice | None = None) -> SpecFile:
    """The spec, with engine arguments that the installed vLLM has. Raises SpecError."""
    check_caches()
    file = read_spec(spec, overrides)
    if file.spec.scripted is None:
        check_engine_arguments(file, engine_argument_names())
        check_engine_types(file)
        check_sampling_fields(file)
    check_structures_config(file)
    return SpecFile(file.spec, file.locations, file.path, slice)


class _Display(ProgressDisplay):
    """Calls a function with the progress in place of a bar, or prints nothing."""

    def __init__(self, progress: Callable[[JobStatus], None] | None, quiet: bool) -> None:
        super().__init__(io.StringIO() if quiet else sys.stderr, is_quiet=quiet)
        self._progress = progress
        self._has_failed = False

    def show(self, status: JobStatus) -> None:
        if self._progress is None:
            super().show(status)
        elif not self._has_failed:
            # If it raises, the job is ended, and shows its end: not with another call.
            self._has_failed = True
            self._progress(status)
            self._has_failed = False
