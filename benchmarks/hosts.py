"""One replica over two Ray nodes with real GPUs: whether its rows are those of one host, and how a lost node ends.

    python benchmarks/hosts.py --out results --tensor 2 --pipeline 2

The nodes are two of this host with `tensor` × `pipeline` / 2 GPUs each, and a head without any; for vLLM they are two
hosts. The sample model runs in float32 three times: with processes of this host, on the two nodes, and on the two nodes
with one of them killed at work and replaced. The script prints a table, writes hosts.json, and exits with 1 if rows
differ or a process is left.
"""

import argparse
import contextlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import time
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from batchinf.fleet.local.devices import visible_devices

ROOT = pathlib.Path(__file__).resolve().parents[1]
_WAIT_S = 600.0
_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
    "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--tensor", type=int, default=2)
    parser.add_argument("--pipeline", type=int, default=2)
    parser.add_argument("--max-tokens", type=int, default=256)
    args = parser.parse_args()
    shutil.rmtree(args.out, ignore_errors=True)
    args.out.mkdir(parents=True)
    os.environ.update(_SETTINGS)
    found = Hosts(args.out, args.tensor, args.pipeline, args.max_tokens).run()
    (args.out / "hosts.json").write_text(json.dumps(found, indent=1))
    print("| job | exit | seconds | rows | rows that differ | largest difference of a logprob |")
    for name, job in found.items():
        print(f"| {name} | {job['exit_code']} | {job['wall_s']} | {job['num_rows']} | {job['num_different']} | "
              f"{job['logprob_difference']} |")  # fmt: skip
    left = left_processes()
    if left or any(job["exit_code"] or job["num_different"] or not job["num_rows"] for job in found.values()):
        sys.exit(f"a job failed, rows differ, or processes are left: {left}")


class Hosts:
    """Three runs of one job."""

    def __init__(self, out: pathlib.Path, tensor: int, pipeline: int, max_tokens: int) -> None:
        self._out, self._tensor, self._pipeline, self._max_tokens = out, tensor, pipeline, max_tokens
        self._each = tensor * pipeline // 2

    def run(self) -> dict[str, dict[str, Any]]:
        """Run the jobs. Returns the figures of each."""
        from ray.cluster_utils import Cluster

        found = {"one host": self._job("local", {})}
        expected = rows_in(self._out / "local")
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        try:
            nodes = [self._add(cluster, number) for number in range(2)]
            sections = {"backend": "ray", "ray": {"address": cluster.address}}
            found["two nodes"] = self._job("ray", sections)
            found["two nodes, one killed"] = self._job("killed", sections, lambda: self._replace(cluster, nodes[1]))
        finally:
            cluster.shutdown()
        for name, folder in zip(found, ("local", "ray", "killed"), strict=True):
            found[name] |= difference(expected, rows_in(self._out / folder))
        return found

    def _add(self, cluster: Any, number: int) -> Any:
        first = number * self._each
        gpus = ",".join(visible_devices()[first : first + self._each])
        return cluster.add_node(num_cpus=self._each, num_gpus=self._each, env_vars={"CUDA_VISIBLE_DEVICES": gpus})

    def _replace(self, cluster: Any, node: Any) -> None:
        cluster.remove_node(node, allow_graceful=False)
        self._add(cluster, 1)

    def _job(self, name: str, sections: dict[str, Any], hurt: Any = None) -> dict[str, Any]:
        """Run a job. hurt: called when the first part is there."""
        folder = self._out / name
        sizes = {"tensor_parallel_size": self._tensor, "pipeline_parallel_size": self._pipeline}
        spec = sample_spec(folder, sizes, {"max_model_len": 512}, sampling_of(self._max_tokens)) | sections
        path = self._out / f"{name}.yaml"
        path.write_text(json.dumps(spec))
        started = time.monotonic()
        with (self._out / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "batchinf", "run", path], cwd=ROOT, stdout=log, stderr=log
            )
            while hurt is not None and process.poll() is None:
                if any((folder / "parts").glob("*.parquet")):
                    hurt()
                    hurt = None
                time.sleep(0.05)
            code = process.wait(_WAIT_S)
        return {"exit_code": code, "wall_s": round(time.monotonic() - started, 1)}


def sample_spec(
    folder: pathlib.Path, sizes: dict[str, int], engine: dict[str, Any], sections: dict[str, Any]
) -> dict[str, Any]:
    """A job with the sample model in float32, in many small parts. sizes: of the replica. engine: more arguments."""
    return {
        "model": {"name": str(ROOT / "sample_data" / "tiny-llama"), "dtype": "float32"},
        "input": {"path": str(ROOT / "sample_data" / "prompts.jsonl"), "id_column": "id"},
        "parallel": {"data_parallel_size": 1, **sizes},
        "engine": {
            "max_num_seqs": 16,
            "gpu_memory_utilization": 0.2,
            "enforce_eager": True,
            "enable_prefix_caching": False,
            **engine,
        },
        "output": {"path": str(folder), "rows_per_shard": 32},
        "checkpoint_interval_s": 1.0,
        **sections,
    }


def sampling_of(max_tokens: int) -> dict[str, Any]:
    """The section `sampling` of a greedy job whose rows all have the same length."""
    return {"sampling": {"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True, "logprobs": 1}}


def rows_in(folder: pathlib.Path) -> list[dict[str, Any]]:
    """The rows of a job, in the input's order."""
    parts = sorted((folder / "parts").glob("*.parquet"))
    table = pa.concat_tables([pq.read_table(path) for path in parts]) if parts else pa.table({"row_index": []})
    return list(table.sort_by("row_index").to_pylist())


def difference(expected: list[dict[str, Any]], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """How many rows have other tokens than expected, and the largest difference of a logprob among the others."""
    pairs = list(zip(expected, rows, strict=False))
    alike = [(a, b) for a, b in pairs if a["row_index"] == b["row_index"] and a["token_ids"] == b["token_ids"]]
    gaps = [abs(a["cumulative_logprob"] - b["cumulative_logprob"]) / max(1, len(a["token_ids"])) for a, b in alike]
    num_different = max(len(expected), len(rows)) - len(alike)
    return {"num_rows": len(rows), "num_different": num_different, "logprob_difference": max(gaps, default=0.0)}


def left_processes() -> list[str]:
    """Commands of replicas, engines and actors that still run."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            command = " ".join(process.cmdline())
            if any(word in command for word in ("fleet.local.process", "ReplicaActor", "EngineCore", "RayWorkerProc")):
                found.append(command)
    return found


if __name__ == "__main__":
    main()
