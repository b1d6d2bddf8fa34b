"""A job's engine steps next to the raw engine's: how many of each kind, and how long they take.

    python benchmarks/steps.py top20 --rows 6144 --out results
    python benchmarks/steps.py top20 --shape tiny --rows 400 --dtype float32 --out results     # anywhere, on a CPU

Runs the workload as `run.py` does, first the job and then its ceiling. A hook in vLLM's scheduler (`step_hook`) records
the beginning of each step. If both have the same steps, they differ only in how long a step takes.
"""

import argparse
import os
import pathlib
import subprocess
import sys

import numpy as np
import numpy.typing as npt

HERE = pathlib.Path(__file__).resolve().parent
# The run begins before the first step with this share of the most tokens, after an empty step or a pause this long.
_SHARE, _PAUSE_S = 0.9, 1.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("results"))
    args, others = parser.parse_known_args()
    for kind, options in (("batchinf", ["--rivals", ""]), ("ceiling", ["--rivals", "ceiling", "--no-jobs"])):
        log = args.out / f"steps-{kind}"
        for old in args.out.glob(f"{log.name}-*.txt"):
            old.unlink()
        path = os.pathsep.join(filter(None, (str(HERE / "step_hook"), os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, "PYTHONPATH": path, "STEP_LOG": str(log.resolve())}
        command = [sys.executable, str(HERE / "run.py"), args.workload, "--out", str(args.out), *others, *options]
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
        for found in sorted(args.out.glob(f"{log.name}-*.txt")):
            print("\n".join([f"\n{kind}", *table(np.loadtxt(found, ndmin=2))]), flush=True)


def table(steps: npt.NDArray[np.float64]) -> list[str]:
    """Lines for a run. steps: float64 [n, ≥ 3]: seconds, tokens, requests.

    The warm-up ends with an empty step, which vLLM makes because it schedules ahead of the device.
    """
    first = int(np.flatnonzero(steps[:, 1] >= _SHARE * steps[:, 1].max())[0])
    begun = first
    while begun and steps[begun - 1, 1] and steps[begun, 0] - steps[begun - 1, 0] < _PAUSE_S:
        begun -= 1
    filling_s = steps[first, 0] - steps[begun, 0]
    run = steps[begun:]
    seconds, tokens, requests = np.diff(run[:, 0]), run[:-1, 1], run[:-1, 2]
    decodes, most = tokens == requests, requests.max()
    kinds = {
        "decoding, nearly full": decodes & (requests >= 0.97 * most),
        "decoding, other": decodes & (requests < 0.97 * most) & (tokens > 0),
        "with prefill": ~decodes,
        "empty": tokens == 0,
    }
    lines = [f"{filling_s:.3f} s and {first - begun} steps before the first full one", "| steps | number | s | ms |"]
    for name, chosen in kinds.items():
        if chosen.any():
            sum_s, mean_ms = seconds[chosen].sum(), 1e3 * seconds[chosen].mean()
            lines.append(f"| {name} | {chosen.sum()} | {sum_s:.2f} | {mean_ms:.2f} |")
    return lines


if __name__ == "__main__":
    main()
