"""Time the copies of all tensors of a file that is not in memory, with and without `read_ahead` before.

    python benchmarks/read_ahead.py                # 4 GB, three rounds
    python benchmarks/read_ahead.py --gb 16 --wait-s 20

In each round the file is dropped from the page cache (POSIX_FADV_DONTNEED, no root needed). Then `--wait-s` pass, as in
a start that imports vLLM, with `read_ahead` or without. The clock runs while `safetensors.safe_open` reads and copies
each tensor.
"""

import argparse
import os
import pathlib
import tempfile
import time

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from batchinf.fleet.local.backend import read_ahead
from batchinf.model.identity import Model

_TENSOR_BYTES = 64 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--wait-s", type=float, default=10.0)
    parser.add_argument("--out", type=pathlib.Path, help="the folder of the file; default: that of temporary files")
    args = parser.parse_args()
    print("| before | s of the copies |\n| --- | --- |")
    with tempfile.TemporaryDirectory(dir=args.out) as scratch:
        path = pathlib.Path(scratch, "model.safetensors")
        random = np.random.default_rng(0)
        number = max(1, round(args.gb * 1e9 / _TENSOR_BYTES))
        save_file({f"w{i}": random.integers(0, 256, _TENSOR_BYTES, np.uint8) for i in range(number)}, path)
        seconds: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(args.rounds):
            for is_ahead, found in seconds.items():
                found.append(copied(path, args.wait_s, is_ahead=is_ahead))
        for is_ahead, found in seconds.items():
            print(f"| {'read_ahead' if is_ahead else 'nothing'} | {', '.join(f'{each:.1f}' for each in found)} |")


def copied(path: pathlib.Path, wait_s: float, *, is_ahead: bool) -> float:
    """Seconds of the copies, once the file was dropped and `wait_s` have passed."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if is_ahead:
        read_ahead(Model("m", str(path.parent), None, "", {}, {}, False, None, None, str(path.parent)), "auto")
    time.sleep(wait_s)
    began = time.monotonic()
    with safe_open(path, "np") as tensors:
        for name in tensors.keys():  # noqa: SIM118  # it is no mapping
            tensors.get_tensor(name).copy()
    return time.monotonic() - began


if __name__ == "__main__":
    main()
