"""The program `batchinf`: its options, the errors of its commands and their exit codes, and how reports are printed."""

import contextlib
import io
import os
import sys
import traceback
import warnings
from collections.abc import Iterable, Iterator
from typing import Annotated, NoReturn

import typer

from batchinf.base.errors import BatchinfError, Interrupted, UserError, out_of_memory_message
from batchinf.base.stop_signals import is_interruption
from batchinf.base.text import plain, to_json, wrapped
from batchinf.cli.arguments import (
    App,
    LogFormat,
)
from batchinf.version import __version__

app = App(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Offline batch inference with vLLM: a job spec in, Parquet with logprobs out. Jobs can be resumed.",
    epilog="Begin: batchinf init job.yaml --for generate --model MODEL --data rows.jsonl. All pages: docs/ of the "
    "repository; `make docs` there makes a site of them.",
)


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


def main() -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # rows may have characters that the terminal cannot show
    # Pillow warns of odd pictures, with a line of its source. What counts is in the rows and in messages of ours.
    warnings.filterwarnings("ignore", module=r"PIL\.")
    try:
        app(prog_name="batchinf")
    except BatchinfError as error:
        print_error(error)
        if isinstance(error, Interrupted):
            print("run the same command again to go on", file=sys.stderr)
        elif not isinstance(error, UserError) and error.exit_code == 1:
            traceback.print_exc()
        sys.exit(error.exit_code)
    except (OSError, MemoryError, RuntimeError) as error:
        words = out_of_memory_message(error)
        if words is None:
            if not isinstance(error, OSError):
                raise
            from batchinf.base.storage import disk_error

            words = plain(disk_error(error))
        print(f"error: {words}", file=sys.stderr)
        sys.exit(UserError.exit_code)
    sys.exit(0)


@contextlib.contextmanager
def errors_as(log_format: LogFormat) -> Iterator[None]:
    """Report an error that a user can correct in the format of the other lines, and end the command."""
    try:
        yield
    except BatchinfError as error:
        if log_format is LogFormat.TEXT or error.exit_code == 1 or is_interruption(error):
            raise
        from batchinf.coordinator.display import json_line

        print(json_line("error", str(error)), file=sys.stderr)
        raise typer.Exit(error.exit_code) from None


def print_error(error: BatchinfError) -> None:
    prefix = "" if isinstance(error, Interrupted) else "error: "
    for line in plain(f"{prefix}{error}").split("\n"):
        print(wrapped(line, sys.stderr), file=sys.stderr)


def print_report(report: object, lines: Iterable[str], as_json: bool) -> None:
    if as_json:
        print_json([to_json(report)])
    else:
        print_lines(lines)


def print_lines(lines: Iterable[str]) -> None:
    for line in lines:  # which may be made by checks: these go on, and their exit code counts
        with to_reader():
            print(wrapped(plain(line), sys.stdout))


def print_json(lines: Iterable[str]) -> None:
    for line in lines:
        with to_reader():
            print(plain(line))


@contextlib.contextmanager
def to_reader() -> Iterator[None]:
    """End the block, but not the command, when the reader of stdout, such as `head`, wants no more."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
