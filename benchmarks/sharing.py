"""How much sooner a job ends on two replicas than on one, by its number of rows.

    python benchmarks/sharing.py --out results --rows 1024,2048,6144

Each job is a process: Llama-3.1-8B's shape, 256 tokens in, 128 out, top-20 logprobs. The time of a job is that from the
engine that is up last to the last committed part, so that the starts do not count. It runs without a GPU with
`--shape tiny`; the model needs a GPU, or vLLM's CPU build.
"""

import argparse
import json
import pathlib
import shutil
import subprocess
import sys
from typing import Any

from run import write_spec
from shapes import make_model, make_prompts
from workloads import Workload

from batchinf.base.storage import Folder
from batchinf.fleet.speed import times_of
from batchinf.manifest.state import read_state


def run_job(args: argparse.Namespace, model: pathlib.Path, num_rows: int, replicas: int) -> dict[str, Any]:
    """Run one job. Returns its seconds, its output tokens a second, and the rows and the busy share of each replica."""
    workload = Workload(
        f"share-{num_rows}",
        shape=args.shape,
        num_rows=num_rows,
        logprobs=20,
        data_parallel_size=replicas,
        own_engine={},
    )
    folder = args.out / f"{num_rows}-{replicas}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    prompts = make_prompts(args.out / f"prompts-{num_rows}.parquet", args.shape, num_rows, workload.prompt_tokens)
    sections = {"engine": {"max_model_len": 2048, "enable_prefix_caching": False, **args.engine}}
    spec, out = write_spec(workload, folder, model, prompts, sections)
    with (folder / "log").open("wb") as log:
        command = [sys.executable, "-m", "batchinf", "run", str(spec)]
        code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False).returncode
    if code:
        sys.exit((folder / "log").read_text()[-3000:])
    state = read_state(Folder(out))
    assert state is not None
    ready, ended = times_of(state.events, "ready"), times_of(state.events, "all_committed")
    seconds = ended[-1] - max(ready)
    shares = () if state.speed is None else state.speed.replicas
    return {
        "rows": num_rows,
        "replicas": replicas,
        "seconds": round(seconds, 2),
        "output_tokens_per_s": round(state.counts.num_output_tokens / seconds),
        "skew_s": round(max(ready) - min(ready), 2),
        "rows_by_replica": [share.num_rows for share in shares],
        "busy": [share.busy for share in shares],
        "files": len(state.parts),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--rows", default="1024,2048,6144")
    parser.add_argument("--replicas", default="2,1")
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--engine", type=json.loads, default={}, help="more engine arguments, as JSON")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    model = make_model(args.shape, args.out / "model")
    found: list[dict[str, Any]] = []
    for replicas in map(int, args.replicas.split(",")):
        for num_rows in map(int, args.rows.split(",")):
            found.append(run_job(args, model, num_rows, replicas))
            print(json.dumps(found[-1]), flush=True)
            (args.out / "sharing.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
