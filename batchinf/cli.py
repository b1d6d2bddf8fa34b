"""The command line: each command is one function, each error one clear line and an exit code (see `errors`)."""

import contextlib
import dataclasses
import functools
import io
import json
import os
import pathlib
import re
import shlex
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, NoReturn, TypeVar

import typer

from batchinf.arguments import (
    App,
    AsJson,
    Columns,
    LogFormat,
    Out,
    Overrides,
    PlanTarget,
    SliceText,
    SpecPath,
    new_spec_file,
    output_folder,
    path_option,
)
from batchinf.base.errors import BatchinfError, Interrupted, UserError, out_of_memory_message
from batchinf.base.process import collect_as_usual
from batchinf.base.stop_signals import interruptible
from batchinf.base.text import names_in, plain, to_json, wrapped
from batchinf.version import __version__

app = App(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Offline batch inference with vLLM: a job spec in, Parquet with logprobs out. Jobs can be resumed.",
)


_Found = TypeVar("_Found")
_PURPOSES = "label, generate, score, logits or embed"


@app.command("init", epilog="Example: batchinf init job.yaml --for label --data reviews.csv --model Qwen/Qwen3-8B")
def _init(
    path: Annotated[
        str, typer.Argument(metavar="JOB.yaml", help="The file to write.", callback=new_spec_file)
    ] = "job.yaml",
    purpose: Annotated[
        str | None, typer.Option("--for", metavar="WHAT", help=f"What the job is for: {_PURPOSES}.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="A Hugging Face id, or the model's folder.")] = None,
    data: Annotated[str | None, typer.Option(help="The rows: a file, a glob, a folder, a URL.")] = None,
    labels: Annotated[
        str | None, typer.Option(metavar="A,B", help="With --for label: the words to choose from.")
    ] = None,
    out: Annotated[str | None, path_option(help="The output folder; default: out/ and the spec's name.")] = None,
) -> None:
    """Write a short commented spec that fits your data. Asks for what no option gives."""
    from batchinf.commands.init import check_purpose, has_chat_template, labels_in, look_at, write
    from batchinf.tasks.starters import StarterWanted

    purpose, _ = _asked(purpose, "--for", f"What is the job for ({_PURPOSES})?", check_purpose)
    look = functools.partial(look_at, labels=labels_in(labels or ""))
    data, found = _asked(data, "--data", "Where are the rows (a file, a glob, a folder)?", look)
    question = "Which model (a Hugging Face id or a folder)?"
    model, has_template = _asked(model, "--model", question, has_chat_template)
    if purpose == "label" and not labels and sys.stdin.isatty():
        of_column = ", ".join(found.labels) if found.labelled is not None else None
        said, words = _asked(None, "--labels", "Which labels (with commas between them)?", labels_in, default=of_column)
        if said != of_column:
            found = dataclasses.replace(found, labels=words or found.labels, labelled=None)
    where = out or f"out/{os.path.splitext(os.path.basename(path))[0]}"
    write(path, purpose, found, StarterWanted(model, has_template is not False, where))
    text = "an OpenAI batch file" if found.is_batch else f"text from the column {found.text!r}"
    _print([f"{path}: rows from {data} ({found.num_rows:,}), {text}"])
    if purpose == "label":
        source = "" if found.labelled is None else f", the words of the column {found.labelled!r}"
        _print([f"labels: {', '.join(found.labels)}{source}; change them in {path} if they are not yours"])
    if has_template is None:
        _print([f"the model {model} is not here yet; the spec assumes that it has a chat template"])
    _print([f"next: batchinf validate {path}"])


def _asked(
    value: str | None, option: str, question: str, check: Callable[[str], _Found], *, default: str | None = None
) -> tuple[str, _Found]:
    """The option's value, or the user's answer, and what `check` says of it. A wrong answer is asked for again."""
    if value is not None:
        return value, check(value)
    if not sys.stdin.isatty():
        raise UserError(f"{option}: missing. {question} Give it as {option}")
    while True:
        answer = str(typer.prompt(question, default))
        try:
            return answer, check(answer)
        except UserError as error:
            _print_error(error)


@app.command("run", epilog="Example: batchinf run job.yaml --set sampling.max_tokens=64")
def _run(
    spec: SpecPath,
    set_: Overrides = None,
    retry: Annotated[
        str | None,
        typer.Option(
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
        bool, typer.Option("--extend", help="Also run new files and rows of the input, and a raised input.limit.")
    ] = False,
    is_quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Show only warnings, errors and the closing lines.")
    ] = False,
    log_format: Annotated[
        LogFormat, typer.Option("--log-format", help="Format of what is shown on stderr while the job runs.")
    ] = LogFormat.TEXT,
) -> None:
    """Run a job, or resume an unfinished one."""
    with interruptible(ends_process=True), _errors_as(log_format):
        from batchinf import api
        from batchinf.coordinator.display import ProgressDisplay

        collect_as_usual()
        display = ProgressDisplay(is_json=log_format is LogFormat.JSON, is_quiet=is_quiet)
        summary = api.run(
            spec, overrides=set_ or (), retry=retry, fresh=fresh, extend=extend, slice=slice_, display=display
        )
    _print(summary.lines())


@contextlib.contextmanager
def _errors_as(log_format: LogFormat) -> Iterator[None]:
    """Report an error that a user can correct in the format of the other lines, and end the command."""
    try:
        yield
    except BatchinfError as error:
        if log_format is LogFormat.TEXT or error.exit_code == 1:
            raise
        from batchinf.coordinator.display import json_line

        print(json_line("error", str(error)), file=sys.stderr)
        raise typer.Exit(error.exit_code) from None


@app.command("validate", epilog="Example: batchinf validate job.yaml -n 5 --random")
def _validate(
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
    seed: Annotated[int | None, typer.Option(min=0, help="Show the rows of an earlier --random.")] = None,
    as_json: AsJson = False,
) -> None:
    """Check spec, input, model and prompts, and show rows as they will run. Needs no engine and no GPU."""
    from batchinf import api

    report = api.validate(
        spec,
        overrides=set_ or (),
        num_rows=num_rows,
        rows=rows or (),
        random=is_random,
        seed=seed,
        found=None if as_json else lambda finding: _print(finding.lines()),
    )
    if as_json:
        _show(report, (), as_json)


@app.command("plan", epilog="Example: batchinf plan job.yaml --gpu h100-80 --gpus 8")
def _plan(
    target: PlanTarget,
    gpu: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A GPU, such as h100-80 or h100-80:3g (MIG). May be repeated."),
    ] = None,
    gpus: Annotated[int | None, typer.Option(min=1, max=1024, help="GPUs of each node.")] = None,
    nodes: Annotated[int, typer.Option(min=1, max=10_000, help="Number of nodes.")] = 1,
    free: Annotated[
        float | None,
        typer.Option(min=0.1, max=10_000, metavar="GIB", help="Memory that others leave free on each GPU."),
    ] = None,
    context: Annotated[
        int | None, typer.Option(min=1, metavar="TOKENS", help="Tokens of the longest sequence.")
    ] = None,
    price: Annotated[float | None, typer.Option(min=0, metavar="PRICE", help="Price of one GPU for an hour.")] = None,
    output_tokens: Annotated[
        float | None,
        typer.Option(min=1, max=1e9, metavar="N", help="Tokens of an output on average; default: max_tokens."),
    ] = None,
    plot: Annotated[str | None, path_option(metavar="FILE.svg", help="Draw the degrees, or a model's memory.")] = None,
    set_: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Show what fits where, at which degrees, and how long a job takes. Needs no GPU, no weights and no engine."""
    from batchinf import api
    from batchinf.commands.plan_chart import check_file, write_chart

    if plot is not None:
        check_file(plot)
    report = api.plan(
        target,
        overrides=set_ or (),
        gpu=gpu or (),
        gpus=gpus,
        nodes=nodes,
        free_gib=free,
        context=context,
        price=price,
        output_tokens=output_tokens,
    )
    if plot is not None:
        write_chart(report, plot)
    _show(report, report.lines(), as_json)


@app.command("tune", epilog="Example: batchinf tune job.yaml --budget 15m --write")
def _tune(
    spec: SpecPath,
    set_: Overrides = None,
    budget: Annotated[str, typer.Option(metavar="TIME", help="Time of all trials, such as 15m or 2h.")] = "15m",
    num_rows: Annotated[
        int | None, typer.Option("--rows", min=1, metavar="N", help="Rows of a trial of the first round.")
    ] = None,
    tries: Annotated[
        list[str] | None,
        typer.Option(
            "--try",
            metavar="a.b=c,d",
            help="Try these values of a field, and only fields that are named so. May be repeated.",
        ),
    ] = None,
    out: Annotated[str | None, path_option(metavar="FOLDER", help="Folder of the trials; default: OUT-tune.")] = None,
    writes: Annotated[bool, typer.Option("--write", help="Put the fastest settings into the spec.")] = False,
    as_json: AsJson = False,
) -> None:
    """Run samples of the rows under several settings, and find those that make the job fastest."""
    budget_s = _seconds(budget, "--budget")
    with interruptible(ends_process=True):
        from batchinf import api
        from batchinf.tuning.text import tune_lines

        collect_as_usual()
        report = api.tune(
            spec, overrides=set_ or (), budget_s=budget_s, num_rows=num_rows, tries=tries or (), out=out, write=writes
        )
    _show(report, tune_lines(report), as_json)


def _seconds(text: str, option: str) -> float:
    found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)\s*(s|m|h|)", text.strip())
    if found is None or float(found[1]) <= 0:
        raise UserError(f"{option} {text}: must be a time, such as 90s, 15m or 2h")
    return float(found[1]) * {"s": 1, "m": 60, "h": 3600, "": 1}[found[2]]


@app.command("status", epilog="Example: batchinf status out/job")
def _status(
    out: Out,
    is_watched: Annotated[
        bool, typer.Option("--watch", help="Refresh progress and replicas every second until the job ends.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show the state and the progress of a job: running, stopped or done."""
    from batchinf.commands.status import job_status

    if is_watched:
        from batchinf.commands.watch import watch, why_ended

        report = watch(out, as_json=as_json)
        _show(report, [*report.lines(), *why_ended(report)], as_json)
    else:
        report = job_status(out)
        _show(report, report.lines(), as_json)


@app.command("head", epilog="Example: batchinf head out/job -n 20 --columns id,text")
def _head(
    out: Out,
    num_rows: Annotated[int, typer.Option("-n", min=1, help="Number of rows to show.")] = 10,
    columns: Columns = None,
    only_errors: Annotated[bool, typer.Option("--errors", help="Show only error rows.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object for each row, with all columns.")
    ] = False,
) -> None:
    """Show the first finished rows as a table, while the job runs or after."""
    from batchinf.commands.head import head_table, nothing_line, read_head

    wanted = names_in(",".join(columns or ()))
    found = read_head(out, num_rows, columns=wanted, only_errors=only_errors)
    if not found.rows:
        print(plain(nothing_line(out, only_errors=only_errors)), file=sys.stderr if as_json else sys.stdout)
    elif as_json:
        _print_json(to_json(row, ensure_ascii=False) for row in found.rows)
    else:
        from batchinf.commands.screen import console

        screen = console()
        for item in head_table(found, wanted, screen.width):
            screen.print(item)


@app.command("export", epilog="Example: batchinf export out/job -o rows.jsonl --columns id,text")
def _export(
    out: Out,
    path: Annotated[
        str, path_option("-o", "--output", metavar="FILE", help="The file to write, `-` for stdout; for hf a folder.")
    ],
    to: Annotated[
        str | None,
        typer.Option(
            "--to", metavar="FORMAT", help="jsonl, csv, parquet, hf or openai-batch; default: by the file's ending."
        ),
    ] = None,
    num_files: Annotated[int, typer.Option("--files", min=1, help="Number of files.")] = 1,
    columns: Columns = None,
    where: Annotated[
        str | None,
        typer.Option("--where", metavar="SQL", help="Export rows for which this expression over the columns is true."),
    ] = None,
    overwrites: Annotated[bool, typer.Option("--overwrite", help="Replace files that are there already.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write the output in another format, in the order of the input: JSON lines, CSV, Parquet, a dataset, a batch."""
    from batchinf.commands.export import STDOUT, ExportRequest, export_job

    request = ExportRequest(
        path=path,
        to=to,
        num_files=num_files,
        columns=names_in(",".join(columns or ())),
        where=where,
        overwrites=overwrites,
    )
    exported = export_job(out, request)
    if path == STDOUT:
        print(plain("\n".join(exported.lines())), file=sys.stderr)
    else:
        _show(exported, exported.lines(), as_json)


@app.command("inspect", epilog="Example: batchinf inspect out/job review-17 --html row.html")
def _inspect(
    out: Out,
    wanted: Annotated[
        str | None, typer.Argument(metavar="ROW", help="The row's id, or its position from 0.", show_default=False)
    ] = None,
    row: Annotated[str | None, typer.Option(metavar="ID", help="The same as ROW.")] = None,
    html: Annotated[str | None, path_option(metavar="FILE", help="Write a page instead.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show one row whole: its prompt, and its tokens with their logprobs and alternatives."""
    from batchinf.commands.inspect import inspect_row

    given = [text for text in (wanted, row) if text is not None]
    if len(given) != 1:
        got = f"got {' and '.join(given)}" if given else "got no row"
        raise UserError(f"inspect: {got}; name one, by its id or its position from 0: batchinf inspect {out} ROW")
    [named] = given
    report = inspect_row(out, named)
    if as_json:
        _show(report, (), as_json)
        return
    from batchinf.commands.inspect import row_items
    from batchinf.commands.screen import console
    from batchinf.report.html import write_page

    if html is not None:
        write_page(report, html)
        _print([f"row {named} of {out} is in {html}"])
        return
    screen = console()
    for item in row_items(report):
        screen.print(item)


@app.command("report", epilog="Example: batchinf report out/job -o report.html")
def _report(
    out: Out,
    file: Annotated[
        str | None, path_option("-o", "--out", metavar="FILE.html", help="Write this file. Default: OUT/report.html.")
    ] = None,
) -> None:
    """Write an HTML page about a job, running or not: speed, replicas, lengths, logprobs, errors."""
    from batchinf.report.page import write_report

    print(plain(str(write_report(out, file))))


@app.command("check", epilog="Example: batchinf check out/job --deep")
def _check(
    out: Out,
    deep: Annotated[bool, typer.Option("--deep", help="Read every byte, not only sizes and footers.")] = False,
    repair: Annotated[
        bool, typer.Option("--repair", help="Move damaged files aside. The next run makes their rows again.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Find missing and damaged files of a job: parts, manifest and journal. The job may be running."""
    from batchinf.commands.check import check_job

    report = check_job(out, is_deep=deep, repair=repair)
    _show(report, report.lines(), as_json)
    report.raise_if_wrong()


@app.command("diff", epilog="Example: batchinf diff out/base out/other --out changes.parquet")
def _diff(
    a: Annotated[str, typer.Argument(metavar="A", help="The output folder of a job.", callback=output_folder)],
    b: Annotated[
        str,
        typer.Argument(
            metavar="B", help="The output folder of another job over the same rows.", callback=output_folder
        ),
    ],
    on: Annotated[
        str | None,
        typer.Option(
            metavar="KEY", help="Join rows by `row_index` or `id`. Default: `row_index` for equal inputs, else `id`."
        ),
    ] = None,
    to: Annotated[
        str | None,
        path_option("--out", metavar="FILE.parquet", help="Also write the differences of each row to a file."),
    ] = None,
    num_rows: Annotated[int, typer.Option("-n", min=0, help="Number of changed rows to show.")] = 3,
    as_json: AsJson = False,
) -> None:
    """Compare two jobs of one task over the same rows: outputs, errors, logprobs or other numbers."""
    from batchinf.commands.diff import diff_jobs

    report = diff_jobs(a, b, on=on, to=to, num_examples=num_rows)
    _show(report, report.lines(), as_json)


@app.command("verify", epilog="Example: batchinf verify job.yaml -n 16 --device cuda:0")
def _verify(
    spec: SpecPath,
    set_: Overrides = None,
    num_rows: Annotated[int, typer.Option("-n", min=1, help="Number of random output rows to compare.")] = 64,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the random rows.")] = 0,
    dtype: Annotated[
        str, typer.Option(help="Type in which transformers computes: float32, bfloat16 or float16.")
    ] = "float32",
    device: Annotated[str, typer.Option(help="Device of transformers, such as `cpu` or `cuda:0`.")] = "cpu",
    tolerance: Annotated[
        float | None, typer.Option(min=0, help="Largest allowed difference. Default: by the engine's dtype.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare finished rows with transformers: logprobs, logits or vectors. Exits with 3 beyond the tolerance."""
    from batchinf import api
    from batchinf.commands.verify import verify_job

    file = api.read_checked(spec, set_ or ())
    report = verify_job(file, num_rows=num_rows, seed=seed, dtype=dtype, device=device, tolerance=tolerance)
    _show(report, report.lines(), as_json)
    report.raise_if_beyond()


@app.command("slurm", epilog="Example: batchinf slurm job.yaml --gpus a100:4 --time 12:00:00 --submit")
def _slurm(
    spec: SpecPath,
    set_: Overrides = None,
    nodes: Annotated[int, typer.Option(min=1, help="Number of nodes; more than 1 runs Ray on them.")] = 1,
    array: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Run N slices as a job array, on a node each.")
    ] = None,
    gpus: Annotated[
        str | None, typer.Option(metavar="[TYPE:]N", help="GPUs of each node, such as 4 or a100:4.")
    ] = None,
    cpus: Annotated[int | None, typer.Option(min=1, help="CPU cores of each node. Default: 8 for each GPU.")] = None,
    mem: Annotated[str | None, typer.Option(help="Memory of each node, such as 200G.")] = None,
    time: Annotated[str | None, typer.Option(help="Time limit, such as 12:00:00.")] = None,
    partition: Annotated[str | None, typer.Option(help="Partition of the nodes.")] = None,
    account: Annotated[str | None, typer.Option(help="Account that pays for the time.")] = None,
    constraint: Annotated[str | None, typer.Option(help="Features of the nodes.")] = None,
    modules: Annotated[list[str] | None, typer.Option("--module", help="A module to load. May be repeated.")] = None,
    venv: Annotated[str | None, path_option(help="A virtual environment to activate.")] = None,
    container: Annotated[str | None, typer.Option(help="An Apptainer image with batchinf.")] = None,
    directives: Annotated[
        list[str] | None,
        typer.Option(
            "--sbatch", metavar="OPTION", help="A further option of sbatch, as --sbatch=--qos=high. May be repeated."
        ),
    ] = None,
    script: Annotated[
        str | None, path_option(metavar="FILE", help="Write here. Default: OUT.slurm/job.sbatch.")
    ] = None,
    submits: Annotated[
        bool, typer.Option("--submit", help="Submit the script, if `sbatch --test-only` accepts it.")
    ] = False,
) -> None:
    """Write an sbatch script that runs a job under Slurm until it is done."""
    from batchinf.api import read_checked
    from batchinf.commands.slurm import SlurmOptions, folder_of, script_of, submit, unsubmitted_lines, write_script

    file = read_checked(spec, set_ or ())
    options = SlurmOptions(
        num_nodes=nodes, num_slices=array, gpus=gpus, cpus=cpus, mem=mem, time=time, partition=partition,
        account=account, constraint=constraint, modules=tuple(modules or ()), directives=tuple(directives or ()),
        venv=venv, container=container, overrides=tuple(set_ or ()), command=shlex.join(["batchinf", *sys.argv[1:]]),
    )  # fmt: skip
    path = pathlib.Path(script) if script is not None else folder_of(file) / "job.sbatch"
    write_script(path, script_of(file, options), file)
    _print(submit(path, file, options) if submits else unsubmitted_lines(path, file, options))


@app.command("schema", epilog="Example: batchinf schema > batchinf.schema.json")
def _schema() -> None:
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


def main() -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # rows may have characters that the terminal cannot show
    try:
        app(prog_name="batchinf")
    except BatchinfError as error:
        _print_error(error)
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


def _print_error(error: BatchinfError) -> None:
    prefix = "" if isinstance(error, Interrupted) else "error: "
    for line in plain(f"{prefix}{error}").split("\n"):
        print(wrapped(line, sys.stderr), file=sys.stderr)


def _show(report: object, lines: Iterable[str], as_json: bool) -> None:
    if as_json:
        _print_json([to_json(report)])
    else:
        _print(lines)


def _print(lines: Iterable[str]) -> None:
    for line in lines:
        print(wrapped(plain(line), sys.stdout))


def _print_json(lines: Iterable[str]) -> None:
    for line in lines:
        print(plain(line))
