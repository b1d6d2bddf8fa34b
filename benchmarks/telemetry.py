"""What telemetry costs: processor time of a step's figures in a replica, and of the coordinator's records.

    python benchmarks/telemetry.py --replicas 8

A replica reads the scheduler's figures after each step and sends them once a second. The coordinator records the load
of all replicas, and of the devices if NVML is available: once a second at first, every 15 s in a long job. Runs on any
CPU.
"""

import argparse
import pathlib
import tempfile
import time
from collections.abc import Callable

from vllm.v1.metrics.stats import SchedulerStats

from batchinf.base.storage import Folder
from batchinf.engines.vllm.engine import _Stats
from batchinf.fleet.local.devices import NvmlWatch
from batchinf.fleet.status import ReplicaLook, Telemetry
from batchinf.replica.messages import Progress

_STEP_S = 0.017  # of a small model with 1,024 requests on an H200, the shortest step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--devices", default="", help="indices with commas between them")
    args = parser.parse_args()
    stats, scheduler = _Stats(), SchedulerStats(num_running_reqs=1024, num_waiting_reqs=176)
    step_us = microseconds(lambda: stats.record(scheduler), 200_000)
    progress = Progress(10**6, {"too_long": 3}, 10**9, 10**8, 10**6, 1200, 0.5, stats.latest)
    with tempfile.TemporaryDirectory() as name:
        watch = NvmlWatch([device for device in args.devices.split(",") if device])
        telemetry = Telemetry(Folder(pathlib.Path(name)), 1, watch)

        def look() -> None:
            telemetry.look(
                [ReplicaLook.of(number, "000001.0001", "running", progress) for number in range(args.replicas)]
            )

        look_us = microseconds(look, 2000)
        telemetry.close()
    print("| processor time | µs | of a core |\n| --- | ---: | ---: |")
    print(f"| replica, a step | {step_us:.1f} | {step_us / 1e6 / _STEP_S:.5f}, at {1 / _STEP_S:.0f} steps a second |")
    print(f"| coordinator, a look at {args.replicas} replicas | {look_us:.0f} | {look_us / 1e6:.5f}, at one a second |")


def microseconds(call: Callable[[], None], number: int) -> float:
    began = time.process_time()
    for _ in range(number):
        call()
    return (time.process_time() - began) / number * 1e6


if __name__ == "__main__":
    main()
