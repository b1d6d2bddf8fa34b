"""A job whose output is a bucket, beside the same job in a folder: the time, and the requests to the store by kind.

    python benchmarks/buckets.py --delays 0.005,0.3 --repeat 3
    python benchmarks/buckets.py --replicas 8 --seconds 600 --interval 10 --delays 0
    python benchmarks/buckets.py --upload 400

The store is the S3 server of the tests, on loopback, behind a proxy that delays each request by `--delays` seconds.
Engines are scripted, and mostly sleep. All jobs of a round run at the same time, so that they meet the same load of the
host. The requests, and the bytes that the bucket keeps, are also shown for a day of such a job. `--upload` measures the
memory of one upload of so many MB.
"""

import argparse
import importlib
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow.fs

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "tests"))
stores: Any = importlib.import_module("stores")  # the server and the proxy of the tests
MAX_NUM_SEQS = 64
TOKENS = 128
DAY_S = 86_400


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--delays", default="0.005,0.3", help="seconds before each request, one job for each")
    parser.add_argument("--seconds", type=int, default=120, help="length of the job")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--interval", type=float, default=10.0, help="checkpoint_interval_s")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--upload", type=int, metavar="MB", help="only upload a file of this size")
    args = parser.parse_args()
    if args.upload:
        measure_upload(args.upload)
        return
    stores.server()  # one for all threads
    delays = [float(text) for text in args.delays.split(",")]
    times: dict[str, list[float]] = {}
    cases = {"folder": None, **{f"bucket, {delay * 1000:g} ms a request": delay for delay in delays}}
    for _ in range(args.repeat):
        with ThreadPoolExecutor(len(cases)) as pool:
            begun = {name: pool.submit(run_job, args, delay) for name, delay in cases.items()}
        for name, job in begun.items():
            seconds, requests = job.result()
            times.setdefault(name, []).append(seconds)
            if requests:
                show_requests(requests, seconds)
    for name, runs in times.items():
        ratios = [in_folder / seconds for in_folder, seconds in zip(times["folder"], runs, strict=True)]
        shown = ", ".join(f"{ratio:.3f}" for ratio in ratios)
        print(f"{name}: {statistics.median(runs):.1f} s of {len(runs)} runs; speed beside the folder: {shown}")


def measure_upload(num_mb: int) -> None:
    """Upload a file, and show how much memory of its own the process took meanwhile. Pages of the file do not count."""
    from batchinf.base.bucket import Bucket

    with tempfile.TemporaryDirectory() as name, stores.proxy() as store:
        os.environ.update(store.environment, AWS_ENDPOINT_URL=f"http://127.0.0.1:{stores.server()}")
        path = pathlib.Path(name) / "part"
        with path.open("wb") as file:
            for _ in range(num_mb):
                file.write(os.urandom(1 << 20))
        bucket = Bucket(f"s3://{stores.BUCKET}/{uuid.uuid4().hex}")
        bucket.probe().result()  # what a run has done before its first part
        before = own_mb()
        most = [before]
        is_done = threading.Event()

        def look() -> None:
            while not is_done.wait(0.01):
                most.append(own_mb())

        looking = threading.Thread(target=look)
        looking.start()
        began = time.monotonic()
        bucket.upload("part", path)
        seconds = time.monotonic() - began
        is_done.set()
        looking.join()
        print(f"upload of {num_mb} MiB: {seconds:.1f} s, {max(most) - before:.1f} MiB more memory than before")


def own_mb() -> float:
    """MiB of this process's memory that are no pages of files."""
    [line] = [line for line in pathlib.Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon")]
    return int(line.split()[1]) / 1024


def run_job(args: argparse.Namespace, delay: float | None) -> tuple[float, Counter[str]]:
    """The seconds of one job, and its requests to the store. delay: None runs it in a folder."""
    times: list[tuple[float, float]] = []

    def fault(method: str, path: str) -> str:
        began = time.monotonic()
        time.sleep(delay or 0)
        times.append((began, time.monotonic()))
        return ""

    with tempfile.TemporaryDirectory() as name, stores.proxy(fault) as store:
        folder = pathlib.Path(name)
        url = str(folder / "out") if delay is None else f"s3://{stores.BUCKET}/{uuid.uuid4().hex}"
        spec = write_spec(args, folder, url)
        environment = {**os.environ, **store.environment}
        began = time.monotonic()
        process = subprocess.Popen([sys.executable, "-m", "batchinf", "run", "-q", spec], cwd=ROOT, env=environment)
        most: Counter[str] = Counter()
        while delay is not None and process.poll() is None:
            time.sleep(args.interval)
            most |= kept_bytes(url)
        if process.wait():
            sys.exit(f"the job failed with exit code {process.returncode}")
        seconds = time.monotonic() - began
        if delay is not None:
            show_bytes(kept_bytes(url), most, seconds)
            print(f"{num_in_sequence(times)} of {len(times)} requests one after another, {delay} s each")
        return seconds, Counter(kind_of(*request) for request in store.seen)


def kept_bytes(url: str) -> Counter[str]:
    """The bytes of all objects of the job, by their folder."""
    place = url.removeprefix("s3://")
    selector = pyarrow.fs.FileSelector(place, allow_not_found=True, recursive=True)
    kept: Counter[str] = Counter()
    for info in stores.file_system().get_file_info(selector):
        if info.is_file:
            kept[info.path.removeprefix(f"{place}/").partition("/")[0]] += info.size
    return kept


def show_bytes(kept: Counter[str], most: Counter[str], seconds: float) -> None:
    """kept: at the end. most: the most that were seen while the job ran."""
    for name, num_bytes in (kept | most).most_common():
        in_a_day = f"{kept[name] / seconds * DAY_S:,.0f} after a day"
        print(f"  {name}: {kept[name]:,} bytes at the end, {in_a_day}; at most {num_bytes:,} while it ran")


def num_in_sequence(times: list[tuple[float, float]]) -> int:
    """The most requests of which none began before another one had ended."""
    number = 0
    last_end = 0.0
    for began, ended in sorted(times, key=lambda each: each[1]):
        if began >= last_end:
            number += 1
            last_end = ended
    return number


def write_spec(args: argparse.Namespace, folder: pathlib.Path, url: str) -> pathlib.Path:
    """A job of about `--seconds`, in which all engines are full."""
    step_s = 0.05
    num_rows = int(args.seconds / (step_s * TOKENS) * MAX_NUM_SEQS * args.replicas)
    with (folder / "in.jsonl").open("w") as file:
        for index in range(num_rows):
            file.write(json.dumps({"id": index, "prompt": f"Say the number {index}."}) + "\n")
    spec = {
        "model": str(ROOT / "sample_data" / "tiny-llama"),
        "input": {"path": str(folder / "in.jsonl"), "apply_chat_template": False},
        "sampling": {"max_tokens": TOKENS},
        "parallel": {"data_parallel_size": args.replicas},
        "checkpoint_interval_s": args.interval,
        "output": {"path": url, "work_dir": str(folder / "work")} if "://" in url else {"path": url},
        "scripted": {"step_s": step_s, "max_num_seqs": MAX_NUM_SEQS},
    }
    path = folder / "job.yaml"
    path.write_text(json.dumps(spec))
    return path


def kind_of(method: str, path: str) -> str:
    """The request's method, and the folder or the name of its object in the job."""
    place, _, query = path.partition("?")
    if method == "POST":
        return "deletion"
    if "list-type" in query:
        return "list"
    name = (place.split("/", 3)[3:] or [""])[0]
    return f"{method} {name.split('/')[0]}" if "/" in name or name in ("lock", "status.json") else f"{method} others"


def show_requests(requests: Counter[str], seconds: float) -> None:
    print(f"{requests.total()} requests in {seconds:.0f} s:")
    for kind, number in requests.most_common():
        print(f"  {number:6} {kind}; {number / seconds * DAY_S:,.0f} in a day")


if __name__ == "__main__":
    main()
