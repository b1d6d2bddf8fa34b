"""Arguments that several commands take, with the checks of their values."""

import enum
import os
from typing import Annotated

import typer

from batchinf.base.errors import SpecError, UserError


def _spec_file(context: typer.Context, path: str) -> str:
    """Return the argument. Raises UserError for a folder, because people give the job's output folder."""
    if not os.path.isdir(path):
        return path
    takes = f"{path} is a folder; batchinf {context.info_name} takes a job's spec, a YAML file"
    held = os.path.join(path, "job.yaml")
    raise UserError(f"{takes}: the spec of the job in this folder is {held}" if os.path.isfile(held) else takes)


# Of a flag: typer would show <bool>, as if a value had to follow.
NO_VALUE = " "

SpecPath = Annotated[str, typer.Argument(metavar="JOB.yaml", help="The job spec.", callback=_spec_file)]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="a.b=c", help="Set a field of the spec. May be repeated.")
]
AsJson = Annotated[bool, typer.Option("--json", metavar=NO_VALUE, help="Print one JSON object.")]


def plan_target(context: typer.Context, target: str) -> str:
    """Return the argument, or raise UserError for a job's output folder. A folder may be a model's."""
    return _spec_file(context, target) if os.path.isfile(os.path.join(target, "job.yaml")) else target


def new_spec_file(path: str) -> str:
    """Return the argument, or raise UserError for a folder."""
    if os.path.isdir(path):
        raise UserError(f"{path} is a folder; batchinf init writes a job's spec, a YAML file: give the file's name")
    return path


def output_folder(context: typer.Context, path: str) -> str:
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


class LogFormat(enum.StrEnum):
    """Of the lines on stderr."""

    TEXT = "text"
    JSON = "json"


Out = Annotated[str, typer.Argument(metavar="OUT", help="The output folder of a job.", callback=output_folder)]


SliceText = Annotated[
    str | None,
    typer.Option("--slice", metavar="i/N", help="Run only slice i of N, counted from 0, in OUT/slice-i."),
]
