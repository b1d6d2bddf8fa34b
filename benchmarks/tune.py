"""The settings that batchinf chooses, compared with the fastest that `batchinf tune` finds for the same workload.

    python benchmarks/tune.py small-embed small-score --budget 5m --out results       # one GPU, five minutes each
    python benchmarks/tune.py top20 --shape tiny --rows 300 --first-rows 100 --try engine.max_num_seqs=8,64   # a CPU

Each workload has its own search. Both figures of a ratio come from trials of the search's last round, on the same rows.
The table says how many trials ran, and `tune-WORKLOAD.json` has all of them. A search that was stopped goes on from
its last trial.
"""

import argparse
import json
import pathlib
import subprocess
import sys
from typing import Any

from run import prepare, write_spec
from workloads import WORKLOADS, Workload


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="+", choices=sorted(WORKLOADS), metavar="workload", help="see workloads.py")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("results"))
    parser.add_argument("--budget", default="5m", help="time of a workload's trials")
    parser.add_argument("--rows", type=int, help="rows of the input")
    parser.add_argument("--first-rows", type=int, help="rows of a trial of the first round")
    parser.add_argument("--try", action="append", dest="tries", default=[], metavar="a.b=c,d", help="as of `tune`")
    parser.add_argument("--shape")
    args = parser.parse_args()
    lines = ["| workload | chosen, tokens/s | fastest, tokens/s | chosen / fastest | fastest settings | trials |"]
    lines += ["| --- | ---: | ---: | ---: | --- | ---: |"]
    for name in args.workloads:
        workload = WORKLOADS[name].sized(args.rows, args.shape)
        lines.append(line_of(workload, found_by_tune(workload, args)))
    print("\n".join(lines))


def found_by_tune(workload: Workload, args: argparse.Namespace) -> dict[str, Any]:
    """What `batchinf tune --json` prints."""
    model, prompts = prepare(workload, args.out)
    spec, _ = write_spec(workload, args.out / workload.name, model, prompts, name="tune")
    command = [sys.executable, "-m", "batchinf", "tune", str(spec), "--budget", args.budget, "--json"]
    command += ["--rows", str(args.first_rows)] if args.first_rows else []
    command += [word for text in args.tries for word in ("--try", text)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    (args.out / f"tune-{workload.name}.json").write_text(json.dumps(found, indent=1))
    return found


def line_of(workload: Workload, report: dict[str, Any]) -> str:
    """A line of the table. `chosen / fastest` is 1 if no settings gain 2 %."""
    found = report["found"]
    base, best = found["base"], found["best"]
    kind = "prompt_tokens_per_s" if workload.counts_prompts else "output_tokens_per_s"
    settings = json.dumps(best["candidate"]["settings"]) if best["candidate"]["settings"] else "those chosen"
    return (
        f"| {workload.name} | {base[kind]:,.0f} | {best[kind]:,.0f} | {base['rows_per_s'] / best['rows_per_s']:.3f} "
        f"| {settings} | {len(found['trials'])} |"
    )


if __name__ == "__main__":
    main()
