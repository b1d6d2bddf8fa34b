"""The command line: each command is one function, each error one clear line and an exit code (see `errors`)."""

import dataclasses
import io
import json
import os
import random
import re
import sys
import traceback
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from batchinf import __version__
from batchinf.base.errors import BatchinfError, Interrupted, SpecError, UserError
from batchinf.base.stop_signals import interruptible

if TYPE_CHECKING:
    from batchinf.spec.file import SpecFile

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Offline batch inference with vLLM: a job spec in, Parquet with logprobs out, resumable.",
)

SpecPath = Annotated[str, typer.Argument(metavar="JOB.yaml", help="The job spec.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="a.b=c", help="Override a field of the spec; may be repeated.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def _job_folder(context: typer.Context, path: str) -> str:
    """The argument, unless it is a file: people give the spec in the place of the job's folder."""
    if not os.path.isfile(path):
        return path
    takes = f"{path} is a file; batchinf {context.info_name} takes a job's output folder"
    try:
        from batchinf.spec.file import read_spec

        raise UserError(f"{takes}: the output.path of this spec is {read_spec(path).spec.output.path}")
    except SpecError:
        raise UserError(takes) from None


Out = Annotated[str, typer.Argument(metavar="OUT", help="A job's output folder.", callback=_job_folder)]


_NOT_EXTENDED = {
    "--fresh": "the one goes on with a job, the other begins it anew: give one of them",
    "--retry": "the one runs rows that are new, the other those that are done: give one after the other",
    "--slice": "a job in slices has the rows that it began with: give the new ones a job of their own, with "
    "input.exclude",
}

SliceText = Annotated[
    str | None,
    typer.Option("--slice", metavar="i/N", help="Run the i-th of N slices of the rows, from 0, in OUT/slice-i."),
]


@app.command()
def run(
    spec: SpecPath,
    set_: Overrides = None,
    retry: Annotated[
        str | None,
        typer.Option(
            "--retry",
            metavar="WHICH",
            help="Run these rows of a job again and replace them: `errors`, or an expression in SQL over the output's "
            "columns, such as \"finish_reason = 'length'\". Here --set may change sampling.",
        ),
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Move the job's output folder aside, if there is one, and begin anew.")
    ] = False,
    slice_: SliceText = None,
    extend: Annotated[
        bool,
        typer.Option(
            "--extend",
            help="Take in files and rows that have come to the input since, and a raised input.limit; then go on.",
        ),
    ] = False,
) -> None:
    """Run a job, or go on with one that was interrupted."""
    _check_run_options(retry, fresh, slice_, extend)
    with interruptible():
        from batchinf.base.slices import Slice, job_folder
        from batchinf.fleet.choose import choose_backend
        from batchinf.run.epoch import check_input_is_there, move_job_aside, run_job
        from batchinf.run.progress import ProgressDisplay

        wanted = None if slice_ is None else Slice.parse(slice_)
        file, display = dataclasses.replace(_read(spec, set_), slice=wanted), ProgressDisplay()
        if fresh:
            check_input_is_there(file)
            move_job_aside(str(job_folder(file.spec.output.path, wanted).root), display)
        summary = run_job(file, choose_backend(), display, retry, extends=extend)
    _print(summary.lines())


def _check_run_options(retry: str | None, fresh: bool, slice_: str | None, extend: bool) -> None:
    if fresh and retry is not None:
        raise UserError("got --fresh with --retry; the one begins anew, the other goes on: give one of them")
    if extend and (other := "--fresh" if fresh else "--retry" if retry is not None else "--slice" if slice_ else ""):
        raise UserError(f"got --extend with {other}; {_NOT_EXTENDED[other]}")


@app.command()
def validate(
    spec: SpecPath,
    set_: Overrides = None,
    num_rows: Annotated[int, typer.Option("-n", min=1, help="Rows to show, with their prompts as rendered.")] = 2,
    rows: Annotated[
        list[str] | None,
        typer.Option(
            "--row",
            metavar="ID",
            help="Show this row: its id or, where the job has no id_column, its position from 0; may be repeated.",
        ),
    ] = None,
    is_random: Annotated[bool, typer.Option("--random", help="Show rows drawn at random, not the first.")] = False,
    seed: Annotated[int | None, typer.Option("--seed", min=0, help="Draw the rows of an earlier --random.")] = None,
    as_json: AsJson = False,
) -> None:
    """Check spec, input, columns, model and prompts, and show rows as they will run, without an engine or a GPU."""
    if rows and (is_random or seed is not None):
        raise UserError("got --row with --random; the one names rows, the other draws them: give one of them")
    from batchinf.commands.text.validate import finding_lines
    from batchinf.commands.validate import RowsToShow, ValidateReport
    from batchinf.commands.validate import validate as validate_job

    if is_random and seed is None:
        seed = random.randrange(100_000)
    findings = validate_job(_read(spec, set_), RowsToShow(num_rows, tuple(rows or ()), seed))
    if as_json:
        _show(ValidateReport.of(findings), (), as_json)
    else:
        _print(line for finding in findings for line in finding_lines(finding))


@app.command()
def status(out: Out, as_json: AsJson = False) -> None:
    """Say how a job stands, live, dead or done, from its files alone."""
    from batchinf.commands.status import job_status
    from batchinf.commands.text.status import status_lines

    report = job_status(out)
    _show(report, status_lines(report), as_json)


@app.command()
def head(out: Out, num_rows: Annotated[int, typer.Option("-n", min=1, help="Rows to show.")] = 5) -> None:
    """Show the first finished rows, as JSON lines, while the job runs or after."""
    from batchinf.commands.status import head_rows

    _print(json.dumps(row, ensure_ascii=False, default=str) for row in head_rows(out, num_rows))


@app.command()
def check(
    out: Out,
    deep: Annotated[bool, typer.Option("--deep", help="Read every byte, not sizes and footers alone.")] = False,
    repair: Annotated[
        bool, typer.Option("--repair", help="Move what is damaged aside, so that the next run makes it anew.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Say whether the parts, the manifest and the journal are whole, and what is wrong; live, dead or done."""
    from batchinf.commands.check import check_job
    from batchinf.commands.text.status import check_lines, raise_if_wrong

    report = check_job(out, is_deep=deep, repair=repair)
    _show(report, check_lines(report), as_json)
    raise_if_wrong(report)


@app.command()
def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="A job's output folder.", callback=_job_folder)],
    b: Annotated[
        str, typer.Argument(metavar="B", help="That of another job over the same rows.", callback=_job_folder)
    ],
    on: Annotated[
        str | None,
        typer.Option("--on", metavar="KEY", help="Join rows by `row_index` or `id`; default: by what fits the inputs."),
    ] = None,
    to: Annotated[
        str | None, typer.Option("--out", metavar="FILE.parquet", help="Also write a row for each row of both.")
    ] = None,
    num_rows: Annotated[int, typer.Option("-n", min=0, help="Changed rows to show.")] = 3,
    as_json: AsJson = False,
) -> None:
    """Say what changed between two jobs of one task over the same rows: outputs, errors, logprobs or other numbers."""
    from batchinf.commands.diff import DiffWanted, diff_jobs
    from batchinf.commands.text.compare import diff_lines

    report = diff_jobs(a, b, DiffWanted(on, to, num_rows))
    _show(report, diff_lines(report, to), as_json)


@app.command()
def verify(
    spec: SpecPath,
    set_: Overrides = None,
    num_rows: Annotated[int, typer.Option("-n", min=1, help="Output rows to compare, drawn at random.")] = 64,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Draw other rows.")] = 0,
    dtype: Annotated[
        str, typer.Option("--dtype", help="What the reference computes in: float32, bfloat16 or float16.")
    ] = "float32",
    device: Annotated[str, typer.Option("--device", help="Where it computes, such as `cpu` or `cuda:0`.")] = "cpu",
    tolerance: Annotated[
        float | None,
        typer.Option("--tolerance", min=0, help="The most that a number may be off; default: by the engine's dtype."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Hold some finished rows against transformers: logprobs, logits or vectors. Exit 3 beyond the tolerance."""
    from batchinf.commands.text.compare import raise_if_beyond, verify_lines
    from batchinf.commands.verify import Wanted
    from batchinf.commands.verify import verify as verify_job

    report = verify_job(_read(spec, set_), Wanted(num_rows, seed, dtype, device, tolerance))
    _show(report, verify_lines(report), as_json)
    raise_if_beyond(report)


@app.command()
def schema() -> None:
    """Print the JSON schema of a job spec, for editors."""
    import batchinf.tasks.registry  # noqa: F401  # it adds the tasks to the spec
    from batchinf.spec.job import json_schema

    print(json.dumps(json_schema(), indent=2))


def _version(wanted: bool) -> None:
    if wanted:
        print(f"batchinf {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def _read(path: str, overrides: list[str] | None) -> "SpecFile":
    from batchinf.engines.installed import engine_argument_names
    from batchinf.spec.file import check_engine_arguments, read_spec

    file = read_spec(path, overrides or ())
    if file.spec.scripted is None:
        check_engine_arguments(file, engine_argument_names())
    return file


def main() -> NoReturn:
    """Run the command line and exit."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # whatever a row holds, and whatever the terminal takes
    try:
        app()
    except BatchinfError as error:
        prefix = "" if isinstance(error, Interrupted) else "error: "
        print(f"{prefix}{_plain(str(error))}", file=sys.stderr)
        if isinstance(error, Interrupted):
            print("run the same command again to go on", file=sys.stderr)
        elif not isinstance(error, UserError) and error.exit_code == 1:
            traceback.print_exc()
        sys.exit(error.exit_code)
    except OSError as error:
        from batchinf.base.storage import disk_error

        print(f"error: {_plain(disk_error(error))}", file=sys.stderr)
        sys.exit(UserError.exit_code)
    sys.exit(0)


def _show(report: object, lines: Iterable[str], as_json: bool) -> None:
    """Print a report, as lines or as one JSON object."""
    from batchinf.base.text import to_json

    _print([to_json(report)] if as_json else lines)


def _print(lines: Iterable[str]) -> None:
    for line in lines:
        print(_plain(line))


def _plain(text: str) -> str:
    """Text without what a terminal would obey: names of columns and files may be strangers'."""
    return re.sub("[\0-\b\v-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]", lambda match: f"\\u{ord(match[0]):04x}", text)
