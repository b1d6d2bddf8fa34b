"""How long a job's start takes: with one replica and several, cold and warm caches, a short and a long input.

    python benchmarks/start_up.py --replicas 1,2 --input-gb 6 --out results             # 8B shape, on GPUs
    python benchmarks/start_up.py --replicas 1,2 --shape tiny --input-gb 0.5 --out results     # anywhere, on a CPU

    python benchmarks/start_up.py --weights --out results                               # 16 GB of weights, one GPU

Each job has a few rows. For each number of replicas a first job runs with empty caches of vLLM, Triton and
TorchInductor, and a second one with the caches of the first. Then, with warm caches, the long input is scanned without
a job and by a job. `first_request_s` counts from the command to the first admitted request, and `process_s` to the
first process of a replica. `start_s` is each replica's time from its process to its ready engine. `end_s` counts from
the last commit to the end of the command.

With `--weights`, the model has random weights on the disk of `--out`, and three jobs start with one replica: with no
weights in memory and no digests in the user's cache, with the weights in memory, and with digests too. `identified_s`
counts from the command to the durable digests, `up_s` to the first engine that is up. `disk_gb` is what the job's
processes read from the disk, and `cpu_s` their processor time, as far as their parents waited for them.
"""

import argparse
import datetime
import json
import os
import pathlib
import resource
import shutil
import subprocess
import sys
import time
from typing import Any

from run import write_spec
from shapes import make_model, make_weights
from workloads import WORKLOADS

from batchinf.source.files import InputLocation
from batchinf.source.rows import open_source

_ROWS = 64
_PADDING = "all work and no play " * 50_000  # a megabyte


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("results"))
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--replicas", default="1,2")
    parser.add_argument("--input-gb", type=float, default=6.0)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--weights", action="store_true")
    args = parser.parse_args()
    folder = args.out / "start_up"
    shutil.rmtree(folder, ignore_errors=True)
    model = make_model(args.shape, folder / "model")
    if args.weights:
        identify(folder, model, args)
        return
    short, long = write_rows(folder / "short.jsonl", _ROWS, ""), None
    for number in map(int, args.replicas.split(",")):
        for caches in ("cold", "warm"):
            show(f"{number} replica(s), {caches} caches", job(folder, model, short, number, args))
    if args.input_gb:
        long = write_rows(folder / "long.jsonl", round(args.input_gb * 1000), _PADDING)
        began = time.monotonic()
        open_source(InputLocation(str(long), "jsonl"), folder / "scan").close()
        show(f"scan of {long.stat().st_size / 1e9:.1f} GB alone", {"seconds": round(time.monotonic() - began, 1)})
        show(f"{number} replica(s), warm caches, the long input", job(folder, model, long, number, args))


def identify(folder: pathlib.Path, model: pathlib.Path, args: argparse.Namespace) -> None:
    """Start jobs on weights of the disk, and show when they are identified."""
    print(f"{make_weights(args.shape, model) / 1e9:.1f} GB of weights", flush=True)
    rows = write_rows(folder / "short.jsonl", _ROWS, "")
    digests = folder / "caches-1" / "user" / "batchinf" / "digests"
    for path in model.glob("*.safetensors"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    time.sleep(3)  # digests of files that have just changed are not kept
    show("weights on the disk, no digests", job(folder, model, rows, 1, args))
    shutil.rmtree(digests)
    show("weights in memory, no digests", job(folder, model, rows, 1, args))
    show("weights in memory, digests in the cache", job(folder, model, rows, 1, args))


def write_rows(path: pathlib.Path, num_rows: int, padding: str) -> pathlib.Path:
    """Write prompts, and a column of padding that the job does not use."""
    with path.open("w") as file:
        for number in range(num_rows):
            file.write(json.dumps({"id": number, "prompt": f"{number} " * 32, "padding": padding}) + "\n")
    return path


def job(
    folder: pathlib.Path, model: pathlib.Path, rows: pathlib.Path, num_replicas: int, args: argparse.Namespace
) -> dict[str, Any]:
    """Run a job to its end. Returns the time until the first request, and figures from its manifest."""
    workload = WORKLOADS["top5"].sized(None, args.shape, num_replicas)
    own = folder / "job"
    shutil.rmtree(own, ignore_errors=True)
    own.mkdir()
    spec, out = write_spec(workload, own, model, rows)
    given = json.loads(spec.read_text())
    given["model"]["dtype"], given["sampling"]["max_tokens"] = args.dtype, 8
    if args.weights:
        given["model"]["load_format"] = "auto"
    spec.write_text(json.dumps(given))
    caches = folder / f"caches-{num_replicas}"
    names = {"VLLM_CACHE_ROOT": "vllm", "TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
    names["XDG_CACHE_HOME"] = "user"
    environment = {**os.environ, **{name: str((caches / below).resolve()) for name, below in names.items()}}
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.time()
    with (own / "job.log").open("wb") as log:
        command = [sys.executable, "-m", "batchinf", "run", str(spec)]
        subprocess.run(command, stdout=log, stderr=log, env=environment, check=True)
    ended, used = time.time(), resource.getrusage(resource.RUSAGE_CHILDREN)
    lines = [json.loads(line) for log in (out / "manifest").glob("*.jsonl") for line in log.open()]
    at = {line["name"]: time_of(line) for line in lines if "name" in line}
    started = min(time_of(line) for line in lines if line.get("name") == "replica_started")
    return {
        "process_s": round(started - began, 2),
        "first_request_s": round(at["first_request"] - began, 1),
        "identified_s": [round(time_of(line) - began, 1) for line in lines if line["kind"] == "files"],
        "up_s": round(min(time_of(line) for line in lines if line.get("name") == "ready") - began, 1),
        "start_s": [line["start_s"] for line in lines if line.get("name") == "ready"],
        "end_s": round(ended - at["all_committed"], 2),
        "wall_s": round(ended - began, 1),
        "disk_gb": round((used.ru_inblock - before.ru_inblock) * 512 / 1e9, 1),
        "cpu_s": round(used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime, 1),
    }


def time_of(line: dict[str, Any]) -> float:
    """Of an event, in seconds since 1970."""
    return datetime.datetime.fromisoformat(line["at"]).timestamp()


def show(what: str, figures: dict[str, Any]) -> None:
    print(f"{what}: {figures}", flush=True)


if __name__ == "__main__":
    main()
