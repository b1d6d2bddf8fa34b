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
from batchinf.base.errors import BatchinfError, Interrupted, SpecError, UserError, memory_words
from batchinf.base.stop_signals import interruptible

if TYPE_CHECKING:
    from batchinf.spec.file import SpecFile

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Offline batch inference with vLLM: a job spec in, Parquet with logprobs out. Jobs can be resumed.",
)

SpecPath = Annotated[str, typer.Argument(metavar="JOB.yaml", help="The job spec.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="a.b=c", help="Set a field of the spec. May be repeated.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def _job_folder(context: typer.Context, path: str) -> str:
    """Return the argument. Raises UserError for a file, because people give the spec in place of the folder."""
    if not os.path.isfile(path):
        return path
    takes = f"{path} is a file; batchinf {context.info_name} takes a job's output folder"
    try:
        import batchinf.tasks.registry  # noqa: F401  # it adds the tasks to the spec
        from batchinf.spec.file import read_spec

        raise UserError(f"{takes}: the output.path of this spec is {read_spec(path).spec.output.path}")
    except SpecError:
        raise UserError(takes) from None


Out = Annotated[str, typer.Argument(metavar="OUT", help="The output folder of a job.", callback=_job_folder)]


_NOT_EXTENDED = {
    "--fresh": "the one goes on with a job, the other begins it anew: give one of them",
    "--retry": "the one runs rows that are new, the other those that are done: give one after the other",
    "--slice": "a job in slices has the rows that it began with: give the new ones a job of their own, with "
    "input.exclude",
}

SliceText = Annotated[
    str | None,
    typer.Option("--slice", metavar="i/N", help="Run only slice i of N, counted from 0, in OUT/slice-i."),
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
            help="Run rows of a finished job again and replace them: `errors`, or an SQL expression over the output "
            "columns, such as \"finish_reason = 'length'\". --set may change fields of sampling.",
        ),
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Rename the old output folder, if there is one, and start a new job.")
    ] = False,
    slice_: SliceText = None,
    extend: Annotated[
        bool,
        typer.Option(
            "--extend",
            help="Also run new files and rows of the input, and a raised input.limit.",
        ),
    ] = False,
) -> None:
    """Run a job, or resume an unfinished one."""
    _check_run_options(retry, fresh, slice_, extend)
    with interruptible():
        from batchinf.base.slices import Slice, job_folder
        from batchinf.fleet.launcher import choose_backend
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
    num_rows: Annotated[int, typer.Option("-n", min=1, help="Number of rows to show.")] = 2,
    rows: Annotated[
        list[str] | None,
        typer.Option(
            "--row",
            metavar="ID",
            help="Show this row: its id or, without id_column, its position from 0. May be repeated.",
        ),
    ] = None,
    is_random: Annotated[bool, typer.Option("--random", help="Show random rows, not the first ones.")] = False,
    seed: Annotated[int | None, typer.Option("--seed", min=0, help="Show the rows of an earlier --random.")] = None,
    as_json: AsJson = False,
) -> None:
    """Check spec, input, model and prompts, and show rows as they will run. Needs no engine and no GPU."""
    if rows and (is_random or seed is not None):
        raise UserError("got --row with --random; the one names rows, the other draws them: give one of them")
    from batchinf.commands.text.validate import finding_lines
    from batchinf.commands.validate import RowsToShow, ValidateReport, validate_job

    if is_random and seed is None:
        seed = random.randrange(100_000)
    findings = validate_job(_read(spec, set_), RowsToShow(num_rows, tuple(rows or ()), seed))
    if as_json:
        _show(ValidateReport.of(findings), (), as_json)
    else:
        _print(line for finding in findings for line in finding_lines(finding))


@app.command()
def status(out: Out, as_json: AsJson = False) -> None:
    """Show the state and the progress of a job: running, stopped or done."""
    from batchinf.commands.status import job_status
    from batchinf.commands.text.status import status_lines

    report = job_status(out)
    _show(report, status_lines(report), as_json)


@app.command()
def head(out: Out, num_rows: Annotated[int, typer.Option("-n", min=1, help="Number of rows to show.")] = 5) -> None:
    """Show the first finished rows as JSON lines, while the job runs or after."""
    from batchinf.commands.status import head_rows

    _print(json.dumps(row, ensure_ascii=False, default=str) for row in head_rows(out, num_rows))


@app.command()
def check(
    out: Out,
    deep: Annotated[bool, typer.Option("--deep", help="Read every byte, not only sizes and footers.")] = False,
    repair: Annotated[
        bool, typer.Option("--repair", help="Move damaged files aside. The next run makes their rows again.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Find missing and damaged files of a job: parts, manifest and journal. The job may be running."""
    from batchinf.commands.check import check_job
    from batchinf.commands.text.status import check_lines, raise_if_wrong

    report = check_job(out, is_deep=deep, repair=repair)
    _show(report, check_lines(report), as_json)
    raise_if_wrong(report)


@app.command()
def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="The output folder of a job.", callback=_job_folder)],
    b: Annotated[
        str,
        typer.Argument(metavar="B", help="The output folder of another job over the same rows.", callback=_job_folder),
    ],
    on: Annotated[
        str | None,
        typer.Option(
            "--on",
            metavar="KEY",
            help="Join rows by `row_index` or `id`. Default: `row_index` for equal inputs, else `id`.",
        ),
    ] = None,
    to: Annotated[
        str | None,
        typer.Option("--out", metavar="FILE.parquet", help="Also write the differences of each row to a file."),
    ] = None,
    num_rows: Annotated[int, typer.Option("-n", min=0, help="Number of changed rows to show.")] = 3,
    as_json: AsJson = False,
) -> None:
    """Compare two jobs of one task over the same rows: outputs, errors, logprobs or other numbers."""
    from batchinf.commands.diff import diff_jobs
    from batchinf.commands.text.compare import diff_lines

    report = diff_jobs(a, b, on, to, num_rows)
    _show(report, diff_lines(report, to), as_json)


@app.command()
def verify(
    spec: SpecPath,
    set_: Overrides = None,
    num_rows: Annotated[int, typer.Option("-n", min=1, help="Number of random output rows to compare.")] = 64,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the random rows.")] = 0,
    dtype: Annotated[
        str, typer.Option("--dtype", help="Type in which transformers computes: float32, bfloat16 or float16.")
    ] = "float32",
    device: Annotated[str, typer.Option("--device", help="Device of transformers, such as `cpu` or `cuda:0`.")] = "cpu",
    tolerance: Annotated[
        float | None,
        typer.Option("--tolerance", min=0, help="Largest allowed difference. Default: by the engine's dtype."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare finished rows with transformers: logprobs, logits or vectors. Exits with 3 beyond the tolerance."""
    from batchinf.commands.text.compare import raise_if_beyond, verify_lines
    from batchinf.commands.verify import Wanted, verify_job

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
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # rows may have characters that the terminal cannot show
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
    except (OSError, MemoryError, RuntimeError) as error:
        if (words := memory_words(error)) is not None:
            print(f"error: {words}", file=sys.stderr)
            sys.exit(UserError.exit_code)
        if not isinstance(error, OSError):
            raise
        from batchinf.base.storage import disk_error

        print(f"error: {_plain(disk_error(error))}", file=sys.stderr)
        sys.exit(UserError.exit_code)
    sys.exit(0)


def _show(report: object, lines: Iterable[str], as_json: bool) -> None:
    from batchinf.base.text import to_json

    _print([to_json(report)] if as_json else lines)


def _print(lines: Iterable[str]) -> None:
    for line in lines:
        print(_plain(line))


def _plain(text: str) -> str:
    """Escape control characters, which a terminal would obey: names of columns and files come from other people."""
    return re.sub("[\0-\b\v-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]", lambda match: f"\\u{ord(match[0]):04x}", text)
