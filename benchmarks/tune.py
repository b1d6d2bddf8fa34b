"""The settings that batchinf chooses, compared with the fastest that `batchinf tune` finds for the same workload.

    python benchmarks/tune.py small-embed small-score --budget-s 300 --out results       # one GPU, five minutes each
    python benchmarks/tune.py top20 --shape tiny --rows 300 --sample-rows 100 --try engine.max_num_seqs=8,64   # a CPU

Each workload has its own search. Both speeds come from trials on the same rows. The ratio is for the whole input, in
which engines that start late count. The table says how many trials ran, and `tune-WORKLOAD.json` has all of them.
"""

import argparse
import dataclasses
import json
import pathlib

from run import prepare, write_spec
from workloads import WORKLOADS, Workload

from batchinf import api
from batchinf.tuning.tune import TuneReport


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="+", choices=sorted(WORKLOADS), metavar="workload", help="see workloads.py")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("results"))
    parser.add_argument("--budget-s", type=float, default=300.0, help="time of a workload's trials")
    parser.add_argument("--rows", type=int, help="rows of the input")
    parser.add_argument("--sample-rows", type=int, help="rows of a trial")
    parser.add_argument("--try", action="append", dest="tries", default=[], metavar="a.b=c,d", help="as of `tune`")
    parser.add_argument("--shape")
    args = parser.parse_args()
    lines = ["| workload | chosen, tokens/s | fastest, tokens/s | chosen / fastest | fastest settings | trials |"]
    lines += ["| --- | ---: | ---: | ---: | --- | ---: |"]
    for name in args.workloads:
        workload = WORKLOADS[name].sized(args.rows, args.shape)
        lines.append(line_of(workload, found_by_tune(workload, args)))
    print("\n".join(lines))


def found_by_tune(workload: Workload, args: argparse.Namespace) -> TuneReport:
    """What `batchinf tune` finds."""
    model, prompts = prepare(workload, args.out)
    spec, _ = write_spec(workload, args.out / workload.name, model, prompts, name="tune")
    report = api.tune(spec, budget_s=args.budget_s, num_rows=args.sample_rows, tries=args.tries)
    (args.out / f"tune-{workload.name}.json").write_text(json.dumps(dataclasses.asdict(report), indent=1))
    return report


def line_of(workload: Workload, found: TuneReport) -> str:
    """A line of the table. `chosen / fastest` is 1 if no settings gain 2 %."""
    base, best = (
        trial.prompt_tokens_per_s if workload.counts_prompts else trial.output_tokens_per_s
        for trial in (found.trials[0], found.best)
    )
    settings = dict(found.best.settings)
    return (
        f"| {workload.name} | {base:,.0f} | {best:,.0f} | {1 / found.gain:.3f} "
        f"| {json.dumps(settings) if settings else 'those chosen'} | {len(found.trials)} |"
    )


if __name__ == "__main__":
    main()
