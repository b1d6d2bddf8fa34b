"""Time jobs with and without single pieces of the engine layer, on one GPU: what each piece is worth today.

    python benchmarks/pieces.py small-score --out results --limit-s 520      # all pieces that this workload has
    python benchmarks/pieces.py small-score --pieces joined,scores --repeat 5
    python benchmarks/pieces.py bare-small-top20 --pieces attention \
        --job-engine '{"worker_cls": "batchinf.engines.vllm.kernels.attention.DecodingWorker"}'

A piece is left out by `step_hook`, and vLLM's own code does its work. In a single round, the job with all pieces runs
first and last, as `all` and `again`; in several, each round has the opposite order of the one before. In the table of
`run.py`, `first / it` says how much faster the job with all pieces is. `run.py` gets all other arguments.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
# The pieces of `step_hook` that may change the speed of a workload.
PIECES = {
    "bare-top20": ("attention", "token_loops", "holding", "scores"),
    "bare-small-top20": ("token_loops", "holding", "scores"),
    "bare-fp8": ("attention", "token_loops", "holding"),
    "uneven": ("attention", "graph_choice"),
    "small-score": ("whole_steps", "joined", "scores"),
    "small-embed": ("whole_steps", "joined"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", choices=PIECES)
    parser.add_argument("--pieces", help="names with commas between them; default: all of the workload")
    args, others = parser.parse_known_args()
    pieces = args.pieces.split(",") if args.pieces else PIECES[args.workload]
    known = sorted(set().union(*PIECES.values()))
    if unknown := {*pieces}.difference(known):
        parser.error(f"--pieces: got {', '.join(unknown)}; there are {', '.join(known)}")
    path = os.pathsep.join([str(HERE / "step_hook"), *filter(None, [os.environ.get("PYTHONPATH")])])
    left_out = {piece: {"environment": {"STEP_WITHOUT": piece, "PYTHONPATH": path}} for piece in pieces}
    jobs = {"all": {}, **{f"without-{piece}": sections for piece, sections in left_out.items()}}
    if "--repeat" not in others:
        jobs["again"] = {}
    compared = [f"--compare={name}={json.dumps(sections)}" for name, sections in jobs.items()]
    command = [sys.executable, str(HERE / "run.py"), args.workload, "--rivals", "", *compared, *others]
    sys.exit(subprocess.run(command).returncode)


if __name__ == "__main__":
    main()
