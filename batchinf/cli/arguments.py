"""Arguments that several commands take, with the checks of their values."""

import enum
import os
from collections.abc import Callable, Iterator
from typing import Annotated, Any, TypeVar

import typer
import typer.core

from batchinf.base.errors import Interrupted, SpecError, UserError
from batchinf.base.paths import check_is_here, folder_name, is_bucket
from batchinf.base.stop_signals import StopAskedFor, request_name
from batchinf.cli.hints import command_hint, option_hint


def _spec_file(context: typer.Context, path: str) -> str:
    """Return the argument. Raises UserError for a folder, because people give the job's output folder."""
    if not os.path.isdir(path):
        return path
    takes = f"{path} is a folder; batchinf {context.info_name} takes a job's spec, a YAML file"
    held = spec_in(path)
    raise UserError(takes if held is None else f"{takes}: the spec of the job in this folder is {held}")


def spec_in(folder: str) -> str | None:
    """The spec of the job, or of a slice, in an output folder; None without one."""
    from batchinf.base.slices import job_folders

    found = (os.fspath(job.path("job.yaml")) for job in job_folders(folder))
    return next(filter(os.path.isfile, found), None)


def _spec_or_folder(context: typer.Context, path: str) -> str:
    """Return the argument. Raises UserError for a folder without a job."""
    if not os.path.isdir(path):
        return path
    if spec_in(path) is None:
        raise UserError(
            f"{path} is a folder without a job; batchinf {context.info_name} takes a job's spec, a YAML file, or a "
            "job's output folder"
        )
    return folder_name(path)


Price = Annotated[
    float | None,
    typer.Option(min=0, metavar="PRICE", help="Price of one GPU for an hour. Default: price_per_gpu_hour of the spec."),
]
_F = TypeVar("_F", bound=Callable[..., Any])


class _Plain:
    """Help without types that say nothing: a flag has no value, and any number is N."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        from typer import rich_utils

        rich_utils.RANGE_STRING = ""  # the message for a wrong number has the range
        super().format_help(ctx, formatter)  # type: ignore[misc]

    def get_params(self, ctx: Any) -> list[Any]:
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            if getattr(param, "is_flag", False):
                param.metavar = " "
            elif param.metavar is None and (getattr(param, "min", None), getattr(param, "max", None)) != (None, None):
                param.metavar = "N"
        return params


class _Command(_Plain, typer.core.TyperCommand):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        all_args = [*args]
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            if type(error).__name__ == "MissingParameter":  # it names the first alone
                ctx.fail(f"Missing: {', '.join(self._missing(ctx, all_args))}. {self.epilog}")
            option = getattr(error, "option_name", None)  # of an option that the command does not have
            takes_fields = any("--set" in param.opts for param in self.params)
            if hint := option and option_hint(str(ctx.info_name), option, takes_fields=takes_fields):
                error.message = f"No such option: {option}; {hint}."  # type: ignore[attr-defined]
                error.possibilities = None  # type: ignore[attr-defined]
            raise

    def _missing(self, ctx: Any, args: list[str]) -> Iterator[str]:
        """What is needed and not among the arguments, with the values that it takes."""
        given = self.make_parser(ctx).parse_args(args=args)[0]
        for param in self.params:
            if param.required and given.get(str(param.name)) is None:
                yield " ".join((*(name for name in param.opts[-1:] if name.startswith("-")), str(param.metavar)))


class _Group(_Plain, typer.core.TyperGroup):
    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] not in self.commands and (hint := command_hint(args[0])):
            ctx.fail(f"No such command '{args[0]}'; {hint}.")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except StopAskedFor as stop:
            # The signal came when `interruptible` had its handlers but not yet its block.
            raise Interrupted(f"stopped on {request_name(*stop.args)}") from None


# Of the commands in the list of `--help`.
_GROUPS = {
    **dict.fromkeys(("init", "validate", "plan", "schema"), "Begin"),
    **dict.fromkeys(("run", "run-batch", "slurm", "tune"), "Run"),
    **dict.fromkeys(("status", "head", "export", "report"), "Look at the output"),
    **dict.fromkeys(("check", "diff", "verify"), "Check and compare"),
}


class App(typer.Typer):
    """An app whose commands have plain help, in groups."""

    def __init__(self, **options: Any) -> None:
        super().__init__(cls=_Group, **options)

    def command(self, *names: Any, **options: Any) -> Callable[[_F], _F]:
        return super().command(*names, cls=_Command, rich_help_panel=_GROUPS[names[0]], **options)


SpecPath = Annotated[str, typer.Argument(metavar="JOB.yaml", help="The job spec.", callback=_spec_file)]
SpecOrOut = Annotated[
    str,
    typer.Argument(
        metavar="JOB.yaml|OUT", help="The job spec, or the output folder of the job.", callback=_spec_or_folder
    ),
]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="a.b=c", help="Set a field of the spec. May be repeated.")
]
Columns = Annotated[
    list[str] | None, typer.Option("--columns", metavar="A,B", help="Only these columns. May be repeated.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def local_path(param: typer.CallbackParam, path: str | None) -> str | None:
    """Return the option. Raises UserError for a place on another machine."""
    if path is not None:
        check_is_here(path, str(max(param.opts, key=len)), "give a path here")
    return path


def path_option(*names: str, help: str, metavar: str | None = None, may_be_url: bool = False) -> Any:
    """An option that takes a path of this host. may_be_url: or a URL, which the command itself checks."""
    return typer.Option(*names, help=help, metavar=metavar, callback=None if may_be_url else local_path)


def _plan_target(context: typer.Context, target: str) -> str:
    """Return the argument, or raise UserError for a job's output folder. A folder may be a model's."""
    return _spec_file(context, target) if os.path.isfile(os.path.join(target, "job.yaml")) else target


PlanTarget = Annotated[
    str,
    typer.Argument(
        metavar="JOB.yaml|MODEL", help="A job spec; or a model: hub id, folder or config.json.", callback=_plan_target
    ),
]


def new_spec_file(path: str) -> str:
    """Return the argument, or raise UserError if it is there already."""
    check_is_here(path, "the spec", "give a path here")
    if os.path.isdir(path):
        raise UserError(f"{path} is a folder; batchinf init writes a job's spec, a YAML file: give the file's name")
    if os.path.lexists(path):
        raise UserError(f"{path} is there already; give another name, or delete it yourself")
    return path


def output_folder(context: typer.Context, path: str) -> str:
    """Return the argument. Raises UserError for a file, because people give the spec in place of the folder."""
    if is_bucket(path):
        return path
    if not os.path.isfile(path):
        return folder_name(path)
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
    str | None, typer.Option("--slice", metavar="i/N", help="Run only slice i of N, counted from 0, in OUT/slice-i.")
]
