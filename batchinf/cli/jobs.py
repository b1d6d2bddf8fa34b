"""The commands that take a spec: each makes, checks, plans or runs a job, and prints the report of it."""

import json
import re
import shlex
import sys
from typing import Annotated

import typer

from batchinf.base.errors import UserError
from batchinf.base.process import collect_as_usual
from batchinf.base.stop_signals import interruptible
from batchinf.base.text import names_in
from batchinf.cli.arguments import (
    AsJson,
    LogFormat,
    Overrides,
    PlanTarget,
    Price,
    SliceText,
    SpecPath,
    new_spec_file,
    path_option,
)
from batchinf.cli.program import app, errors_as, print_json, print_lines, print_report


@app.command("init", epilog="Example: batchinf init job.yaml --for label --data reviews.csv --model Qwen/Qwen3-8B")
def _init(
    path: Annotated[
        str, typer.Argument(metavar="JOB.yaml", help="The file to write.", callback=new_spec_file)
    ] = "job.yaml",
    *,
    purpose: Annotated[
        str,
        typer.Option(
            "--for",
            metavar="label|generate|score|embed|logits|rerank",
            help="What each row gets: one of a few words (label), a text (generate), logprobs of labels or texts "
            "(score), a vector (embed), logits of the next token, or an order of documents (rerank). Pictures may be "
            "in all but logits and rerank.",
        ),
    ],
    model: Annotated[str, typer.Option(metavar="MODEL", help="A Hugging Face id, or the model's folder.")],
    data: Annotated[str, typer.Option(metavar="PATH", help="The rows: a file, a glob, a folder, a URL.")],
    labels: Annotated[
        str, typer.Option(metavar="A,B", help="With --for label or score: the words to choose from.")
    ] = "",
    encoding: Annotated[str | None, typer.Option(help="Of CSV files, such as cp1252. Default: UTF-8.")] = None,
    out: Annotated[
        str | None, typer.Option(help="The output: a folder, or s3://…; default: out/ and the spec's name.")
    ] = None,
) -> None:
    """Write a short commented spec that fits your data."""
    from batchinf.commands.init.init import InitRequest, write_spec

    request = InitRequest(
        path=path, purpose=purpose, data=data, model=model, labels=names_in(labels), encoding=encoding, out=out
    )
    print_lines(write_spec(request))


@app.command("run", epilog="Example: batchinf run job.yaml --set sampling.max_tokens=64")
def _run(
    spec: SpecPath,
    set_: Overrides = None,
    retry: Annotated[
        str | None,
        typer.Option(
            metavar="WHICH",
            help="Run rows of a finished job again and replace them: `errors`, or an SQL expression over the output "
            "columns, such as \"finish_reason = 'length'\". --set may change fields of sampling, and "
            "fields that a resume may change, such as input.images.max_pixels.",
        ),
    ] = None,
    input_: Annotated[
        str | None,
        typer.Option(
            "--input",
            metavar="FILE",
            help="With --retry: take rows that run again from this file, by their ids, in place of those of the input.",
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
    with interruptible(ends_process=True), errors_as(log_format):
        from batchinf import api
        from batchinf.coordinator.display import ProgressDisplay

        collect_as_usual()
        display = ProgressDisplay(is_json=log_format is LogFormat.JSON, is_quiet=is_quiet)
        summary = api.run(
            spec,
            overrides=set_ or (),
            retry=retry,
            input=input_,
            fresh=fresh,
            extend=extend,
            slice=slice_,
            display=display,
        ).summary
    print_lines(summary.lines())


@app.command(
    "run-batch",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    epilog="Example: batchinf run-batch -i batch.jsonl -o answers.jsonl --model Qwen/Qwen3-8B --max-model-len 4096",
)
def _run_batch(
    context: typer.Context,
    input_file: Annotated[
        str, typer.Option("-i", "--input-file", metavar="FILE", help="A file, a glob, a URL, a pipe.")
    ],
    output_file: Annotated[
        str,
        path_option(
            "-o",
            "--output-file",
            metavar="FILE",
            help="The answers, written when the job is done: a path, or s3://…",
            may_be_url=True,
        ),
    ],
    model: Annotated[str, typer.Option("--model", metavar="MODEL", help="A Hugging Face id, or the model's folder.")],
    job: Annotated[
        str | None, path_option("--job", metavar="FOLDER", help="The job's folder; default: beside the answers.")
    ] = None,
) -> None:
    """Run an OpenAI batch file by the flags of `vllm run-batch`. The same command resumes an unfinished one.

    Flags of vLLM that are not listed here are taken too, such as --max-model-len 4096 or --tensor-parallel-size 2.
    """
    with interruptible(ends_process=True):
        from batchinf import api
        from batchinf.commands.run_batch import batch_run, check_lines, write_answers

        collect_as_usual()
        run = batch_run(input_file, output_file, model, context.args, folder=job)
        print_lines(run.notes)
        summary = api.run(run.spec).summary
        exported = write_answers(run, has_rows=summary.has_begun)
    print_lines([*summary.lines(), *exported.lines()])
    check_lines(summary)


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
        found=None if as_json else lambda finding: print_lines(finding.lines()),
    )
    if as_json:
        print_report(report, (), as_json)


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
    price: Price = None,
    output_tokens: Annotated[
        float | None,
        typer.Option(min=1, max=1e9, metavar="N", help="Tokens of an output on average; default: max_tokens."),
    ] = None,
    rows: Annotated[
        int | None,
        typer.Option(min=1, max=10**12, metavar="N", help="As if the input had N rows; it may be missing."),
    ] = None,
    set_: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Show what fits where, at which degrees, and how long a job takes. Needs no GPU, no weights and no engine."""
    from batchinf import api

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
        rows=rows,
        say=(lambda _: None) if as_json else None,
    )
    print_report(report, report.lines(), as_json)


@app.command("tune", epilog="Example: batchinf tune job.yaml --budget 15m")
def _tune(
    spec: SpecPath,
    set_: Overrides = None,
    budget: Annotated[str, typer.Option(metavar="TIME", help="Time of all trials, such as 15m or 2h.")] = "15m",
    num_rows: Annotated[int | None, typer.Option("--rows", min=1, metavar="N", help="Rows of a trial.")] = None,
    tries: Annotated[
        list[str] | None,
        typer.Option(
            "--try",
            metavar="a.b=c,d",
            help="Try these values of a field, and only fields that are named so. May be repeated.",
        ),
    ] = None,
    out: Annotated[
        str | None, path_option(metavar="FOLDER", help="Folder of the running trial; default: OUT-tune.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run samples of the rows under several settings, and find those that make the job fastest."""
    budget_s = _seconds(budget, "--budget")
    with interruptible(ends_process=True):
        from batchinf import api

        collect_as_usual()
        report = api.tune(spec, overrides=set_ or (), budget_s=budget_s, num_rows=num_rows, tries=tries or (), out=out)
    print_report(report, report.lines(), as_json)


def _seconds(text: str, option: str) -> float:
    found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)\s*(s|m|h|)", text.strip())
    if found is None or float(found[1]) <= 0:
        raise UserError(f"{option} {text}: must be a time, such as 90s, 15m or 2h")
    return float(found[1]) * {"s": 1, "m": 60, "h": 3600, "": 1}[found[2]]


@app.command("slurm", epilog="Example: batchinf slurm job.yaml --gpus a100:4 --time 12:00:00 --submit")
def _slurm(
    spec: SpecPath,
    set_: Overrides = None,
    nodes: Annotated[int, typer.Option(min=1, help="Number of nodes; more than 1 runs Ray on them.")] = 1,
    array: Annotated[
        str | None,
        typer.Option(metavar="N[%M]", help="Run N slices as a job array, on a node each; M of them at a time."),
    ] = None,
    max_requeues: Annotated[
        int, typer.Option(min=1, help="Requeues in a row without a new finished row, after which the job ends.")
    ] = 5,
    gpus: Annotated[
        str | None, typer.Option(metavar="[TYPE:]N", help="GPUs of each node, such as 4 or a100:4. 8 cores for each.")
    ] = None,
    time: Annotated[str | None, typer.Option(help="Time limit, such as 12:00:00.")] = None,
    sbatch: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Any option of sbatch, such as mem=200G or exclusive. May be repeated."),
    ] = None,
    submits: Annotated[bool, typer.Option("--submit", help="Submit the script.")] = False,
) -> None:
    """Write an sbatch script that runs a job under Slurm until it is done."""
    from batchinf.api import read_checked
    from batchinf.commands.slurm import SlurmOptions, folder_of, script_of, submit, unsubmitted_lines, write_script

    overrides = tuple(set_ or ())
    file = read_checked(spec, (*overrides, "backend=ray") if nodes > 1 else overrides)
    options = SlurmOptions(
        num_nodes=nodes, array=array, max_requeues=max_requeues, gpus=gpus, time=time, sbatch=tuple(sbatch or ()),
        overrides=overrides, command=shlex.join(["batchinf", *sys.argv[1:]]),
    )  # fmt: skip
    path = folder_of(file) / "job.sbatch"
    write_script(path, script_of(file, options))
    print_lines(submit(path, file, options) if submits else unsubmitted_lines(path, file, options))


@app.command("schema", epilog="Example: batchinf schema > batchinf.schema.json")
def _schema() -> None:
    """Print the JSON schema of a job spec, for editors."""
    import batchinf.tasks.registry  # noqa: F401  # it adds the tasks to the spec
    from batchinf.spec.reference import json_schema

    print_json([json.dumps(json_schema(), indent=2)])
