"""The commands that take an output folder: each shows, checks, compares or writes what a job made."""

import json
import os
import sys
from typing import Annotated

import typer

from batchinf.base.errors import UserError
from batchinf.base.paths import is_bucket
from batchinf.base.text import names_in, plain, to_json
from batchinf.cli.arguments import (
    AsJson,
    Columns,
    Out,
    Overrides,
    Price,
    SpecOrOut,
    output_folder,
    path_option,
    spec_in,
)
from batchinf.cli.program import app, print_json, print_report, to_reader


@app.command("status", epilog="Example: batchinf status out/job")
def _status(
    out: Out,
    is_watched: Annotated[
        bool, typer.Option("--watch", help="Refresh progress and replicas every second until the job ends.")
    ] = False,
    price: Price = None,
    as_json: AsJson = False,
) -> None:
    """Show the state and the progress of a job: running, stopped or done."""
    from batchinf.commands.status import job_status

    if is_watched:
        from batchinf.commands.watch import watch, why_ended

        report = watch(out, price=price, as_json=as_json)
        print_report(report, [*report.lines(), *why_ended(report)], as_json)
    else:
        report = job_status(out, price)
        print_report(report, report.lines(), as_json)


@app.command("head", epilog="Example: batchinf head out/job -n 20 --columns id,text")
def _head(
    out: Out,
    num_rows: Annotated[int, typer.Option("-n", min=1, help="Number of rows to show.")] = 10,
    columns: Columns = None,
    only_errors: Annotated[bool, typer.Option("--errors", help="Show only error rows.")] = False,
    row: Annotated[
        str | None,
        typer.Option(
            metavar="ID",
            help="Show this row whole, by its id or its position from 0: its prompt, and its "
            "tokens with their logprobs and alternatives.",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object for each row, with all columns.")
    ] = False,
) -> None:
    """Show the first finished rows as a table, or one row whole, while the job runs or after."""
    if row is not None:
        if only_errors or columns:
            other = "--errors" if only_errors else "--columns"
            raise UserError(f"head: got {other} with --row, which shows all of one row; leave out {other}")
        _show_whole(out, row, as_json)
        return
    from batchinf.commands.head import head_table, nothing_line, read_head

    wanted = names_in(",".join(columns or ()))
    found = read_head(out, num_rows, columns=wanted, only_errors=only_errors)
    if not found.rows:
        print(plain(nothing_line(out, only_errors=only_errors)), file=sys.stderr if as_json else sys.stdout)
    elif as_json:
        print_json(to_json(row, ensure_ascii=False) for row in found.rows)
    else:
        from batchinf.commands.screen import console

        screen = console()
        with to_reader():
            for item in head_table(found, wanted, screen.width):
                screen.print(item)


def _show_whole(out: str, row: str, as_json: bool) -> None:
    from batchinf.commands.screen import console
    from batchinf.commands.whole_row import read_whole_row, row_items

    whole = read_whole_row(out, row)
    if as_json:
        print_report(whole, (), as_json)
        return
    screen = console()
    with to_reader():
        for item in row_items(whole):
            screen.print(item)


@app.command("export", epilog="Example: batchinf export out/job -o rows.jsonl --columns id,text")
def _export(
    out: Out,
    path: Annotated[
        str,
        path_option(
            "-o",
            "--output",
            metavar="FILE",
            help="The file to write: a path, `-` for stdout, s3://…; for hf a folder.",
            may_be_url=True,
        ),
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
    from batchinf.commands.export import ExportRequest, export_job
    from batchinf.export.files import STDOUT

    request = ExportRequest(
        path=path,
        to=to,
        num_files=num_files,
        columns=names_in(",".join(columns or ())),
        where=where,
        overwrites=overwrites,
    )
    if path == STDOUT:
        with to_reader():
            print(plain("\n".join(export_job(out, request).lines())), file=sys.stderr)
    else:
        exported = export_job(out, request)
        print_report(exported, exported.lines(), as_json)


@app.command("report", epilog="Example: batchinf report out/job -o report.html")
def _report(
    out: Out,
    file: Annotated[
        str | None,
        path_option("-o", "--out", metavar="FILE", help="Write this file, or `-`: stdout. Default: OUT/report.html."),
    ] = None,
    price: Price = None,
) -> None:
    """Write a page about a job, running or not: speed, replicas, lengths, logprobs, samples, errors."""
    from batchinf.report.page import report_page, write_report

    if file == "-":
        with to_reader():
            sys.stdout.buffer.write(report_page(out, price).encode())
    else:
        print(plain(str(write_report(out, file, price))))


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
    if is_bucket(out):
        from batchinf.commands.check_bucket import check_bucket

        report = check_bucket(out, is_deep=deep, repair=repair)
    else:
        from batchinf.commands.check import check_job

        report = check_job(out, is_deep=deep, repair=repair)
    print_report(report, report.lines(), as_json)
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
    print_report(report, report.lines(), as_json)


@app.command("verify", epilog="Example: batchinf verify out/job -n 16 --device cuda:0")
def _verify(
    target: SpecOrOut,
    set_: Overrides = None,
    num_rows: Annotated[int, typer.Option("-n", min=1, help="Number of random output rows to compare.")] = 64,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the random rows.")] = 0,
    device: Annotated[str, typer.Option(help="Device of transformers, such as `cpu` or `cuda:0`.")] = "cpu",
    tolerance: Annotated[
        float | None, typer.Option(min=0, help="Largest allowed difference. Default: by the engine's dtype.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare finished rows with transformers in float32: generate, score, logits, embed. Exits with 3 beyond the
    tolerance."""
    from batchinf import api
    from batchinf.commands.verify import verify_job

    held = spec_in(target) if os.path.isdir(target) else None
    # The folder may have been moved since the job began.
    place = [] if held is None else [f"output.path={json.dumps(target)}"]
    file = api.read_checked(held or target, [*(set_ or ()), *place])
    report = verify_job(file, num_rows=num_rows, seed=seed, device=device, tolerance=tolerance)
    print_report(report, report.lines(), as_json)
    report.raise_if_beyond()
