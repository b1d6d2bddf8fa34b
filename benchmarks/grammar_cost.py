"""What a grammar costs: a job with structured outputs, beside the same job without them and with as long outputs.

    python benchmarks/grammar_cost.py json --out results --limit-s 520
    python benchmarks/grammar_cost.py choice --shape tiny --rows 200        # anywhere, on a CPU

The first job, `grammar`, tells the length of each row. The second one, `free`, has these lengths in the column
`max_tokens`. The third one, `again`, is as the first. In the table of `run.py`, `first / it` is the speed of the first
job as a share of the second's. `run.py` gets all other arguments.
"""

import argparse
import json
import pathlib
import subprocess
import sys

import pyarrow.parquet as pq

import batchinf

HERE = pathlib.Path(__file__).resolve().parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", choices=("json", "choice"))
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("results"))
    args, others = parser.parse_known_args()
    command = [sys.executable, str(HERE / "run.py"), args.workload, "--rivals", "", "--out", str(args.out), *others]
    subprocess.run([*command, "--compare", "grammar={}"], check=True)
    path = (args.out / "prompts" / f"{args.workload}-lengths.parquet").resolve()
    write_lengths(args.out / args.workload / "batchinf-grammar-1", path)
    free = {
        "input": {"path": str(path)},
        "sampling": {"structured_outputs": None, "ignore_eos": True, "max_tokens": {"column": "max_tokens"}},
    }
    sys.exit(subprocess.run([*command, "--compare", f"free={json.dumps(free)}", "--compare", "again={}"]).returncode)


def write_lengths(job: pathlib.Path, path: pathlib.Path) -> None:
    """Write the job's prompts with the number of output tokens of each row as `max_tokens`."""
    spec = json.loads(job.with_suffix(".yaml").read_text())
    results = batchinf.open(job).table(["id", "num_output_tokens"])
    lengths = dict(zip(*(column.to_pylist() for column in results.columns), strict=True))
    prompts = pq.read_table(spec["input"]["path"])
    longest = spec["sampling"]["max_tokens"]  # of an error row: its text was cut off
    budgets = [lengths[row] or longest for row in prompts["id"].to_pylist()]
    pq.write_table(prompts.append_column("max_tokens", [budgets]), path)


if __name__ == "__main__":
    main()
