"""Every legal (tensor, pipeline, data) on the GPUs of this host: a full batch, and one prompt at a time.

    python benchmarks/degrees.py llama-3.1-8b llama-3.3-70b,quantization=fp8 --out results     # on all GPUs
    python benchmarks/degrees.py llama-2-7b,memory_gb=17.97,context=512 --gpus 2 --out results  # the cache is starved
    python benchmarks/degrees.py llama-3.1-8b --gpus 4 --estimate                              # starts nothing

A case is a shape of shapes.py and settings as in plan.py. `memory_gb` gives each degree the KV cache that it would have
on a GPU with so much memory: with 17.97, llama-2-7b has 0.9 GB of cache on one GPU and 7.6 GB on each of two. Prompts
have 256 tokens, outputs 128; the weights are random. A start takes one to two minutes, and each degrees start twice.
All results so far are in degrees.json; what is there is not measured again. The table names what `auto` chooses.
"""

import argparse
import json
import pathlib
import shutil
import time
from dataclasses import dataclass, replace
from typing import Any

from plan import LENGTHS, settings_of, shape_named, write
from run import run_spec
from shapes import make_model, make_prompts

import batchinf.tasks.registry  # noqa: F401  # it adds the tasks to the spec
from batchinf.fleet.launcher import choose_backend
from batchinf.model.identity import resolve
from batchinf.model.memory import DEFAULT_GPU_MEMORY_UTILIZATION as SHARE
from batchinf.model.memory import Fit, fit_of
from batchinf.planning.degrees import Degrees, Machine, Option, best, degrees_of, options, shape_text
from batchinf.planning.gpus import GPUS, Gpu, gpu_like
from batchinf.planning.throughput import Workload, prediction_of, shape_of
from batchinf.spec.file import read_spec

PROMPT, OUTPUT = LENGTHS["generate"]
SINGLE_ROWS = 8


@dataclass(frozen=True)
class Case:
    """A model on GPUs. given: the settings. fit: of one GPU, or of one with less memory."""

    name: str
    given: dict[str, str]
    model: pathlib.Path
    shape: str
    fit: Fit
    gpu: Gpu
    num_gpus: int

    @property
    def context(self) -> int:
        return self.fit.max_model_len or 1

    def work(self, num_requests: int) -> Workload:
        return Workload(num_requests, PROMPT, OUTPUT, OUTPUT)

    def legal(self) -> list[Option]:
        """All degrees that use all GPUs and fit, the fewest GPUs of a replica first."""
        found = []
        for tensor in self.fit.needs.tensor_degrees(self.num_gpus):
            for pipeline in range(1, self.num_gpus // tensor + 1):
                data, rest = divmod(self.num_gpus, tensor * pipeline)
                degrees = degrees_of(self.fit, tensor, pipeline, context=self.context, share=SHARE)
                if rest == 0 and degrees.fits:
                    found.append(Option(degrees, data, None))
        return sorted(found, key=lambda it: (it.degrees.num_devices, it.degrees.pipeline))

    def chosen(self) -> Option | None:
        """What `auto` takes for a large job."""
        machine = Machine(self.gpu, self.num_gpus, 1, SHARE)
        return best(options(self.fit, machine, self.context, self.work(10**6)))

    def tokens_per_s(self, degrees: Degrees) -> float:
        """Predicted output tokens of one replica with a full batch."""
        shape = shape_of(self.fit.needs)
        assert shape is not None
        at = replace(self.fit, tensor_parallel_size=degrees.tensor, pipeline_parallel_size=degrees.pipeline)
        return prediction_of(at, shape, gpu=self.gpu, work=self.work(10**6), share=SHARE).output_tokens_per_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="+")
    parser.add_argument("--gpus", type=int, help="default: all of this host")
    parser.add_argument("--seconds", type=float, default=30.0, help="of each batch, as predicted")
    parser.add_argument("--modes", default="batch,single", help="batch: as many rows as fit; single: one at a time")
    parser.add_argument("--degrees", help="only these: tensor and pipeline with a comma between them; then a space")
    parser.add_argument("--estimate", action="store_true", help="print what would be measured, and the predictions")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("results"))
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="end everything after so many seconds")
    args = parser.parse_args()
    deadline = time.monotonic() + args.limit_s
    wanted = args.degrees and [tuple(map(int, each.split(","))) for each in args.degrees.split()]
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "degrees.json"
    results: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.exists() else {}
    for name in args.cases:
        case = case_of(name, args.out, args.gpus)
        for option in case.legal():
            if wanted and (option.degrees.tensor, option.degrees.pipeline) not in wanted:
                continue
            for mode in () if args.estimate else args.modes.split(","):
                key = f"{name} {shape_text(option.degrees, option.data)} {mode}"
                if key not in results and time.monotonic() < deadline:
                    results[key] = measure(case, option, mode, args.out, args.seconds, deadline)
                    path.write_text(json.dumps(results, indent=1))
        print(table(case, results), flush=True)


def case_of(name: str, out: pathlib.Path, num_gpus: int | None) -> Case:
    """The case, with its model made."""
    shape, *settings = name.split(",")
    given = dict(setting.split("=", 1) for setting in settings)
    shape = shape_named(shape)
    model = make_model(shape, out / "models" / shape)
    folder = out / "degrees"
    folder.mkdir(exist_ok=True)
    write(folder / "probe.yaml", "generate", given, model, folder)
    spec = read_spec(folder / "probe.yaml").spec
    backend = choose_backend(spec)
    devices = backend.devices()
    device_bytes, title = backend.device_size(devices[0]) if devices else (None, "")
    gpu = gpu_like(title, device_bytes) if device_bytes is not None else GPUS["h200"]
    if gpu is None:
        raise SystemExit(f"{title} is not in the table of GPUs")
    memory = int(float(given["memory_gb"]) * 1e9) if "memory_gb" in given else gpu.memory_bytes
    # The limits of a batch are those of the GPU that is here.
    limits = fit_of(resolve(spec.model), spec, gpu.memory_bytes, gpu.title).limits
    fit = replace(fit_of(resolve(spec.model), spec, memory, gpu.title), batch_limits=limits)
    return Case(name, given, model, shape, fit, gpu, num_gpus or len(devices) or 4)


def measure(
    case: Case, option: Option, mode: str, out: pathlib.Path, seconds: float, deadline: float
) -> dict[str, Any]:
    """Run a job at these degrees. One prompt at a time needs only one replica."""
    degrees, data = option.degrees, option.data if mode == "batch" else 1
    words = [mode, case.name, str(degrees.tensor), str(degrees.pipeline), str(data)]
    folder = out / "degrees" / "-".join(words).replace("=", "").replace("/", "_").replace(",", "-")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    given = {**case.given, "tensor": str(degrees.tensor), "pipeline": str(degrees.pipeline), "data": str(data)}
    if "memory_gb" in case.given:
        at = replace(case.fit, tensor_parallel_size=degrees.tensor, pipeline_parallel_size=degrees.pipeline)
        given["cache_gb"] = str((at.cache_bytes(SHARE, at.step_bytes) or 0) / 1e9)
    rows = SINGLE_ROWS
    if mode == "single":
        given["seqs"] = "1"
    else:
        predicted = case.tokens_per_s(degrees)
        rows = max(64, round(predicted * data * seconds / OUTPUT / 64) * 64)
    write(folder / "job.yaml", "generate", given, case.model, folder)
    make_prompts(folder / "rows.parquet", case.shape, rows, PROMPT)
    found = run_spec(folder / "job.yaml", folder / "job", deadline)
    reported = settings_of(folder / "job") if found["exit_code"] == 0 else {}
    return {"rows": rows, "cache_tokens": reported.get("kv_cache_size_tokens"), **found}


def table(case: Case, results: dict[str, dict[str, Any]]) -> str:
    """Markdown. Tokens are output tokens."""
    chosen = case.chosen()
    lines = [
        f"{case.name} on {case.num_gpus} × {case.gpu.title}:",
        "",
        "| degrees | cache tokens of a replica | batch, tokens/s per GPU: predicted | measured | one prompt at a time, "
        "tokens/s | |",
        "| --- | ---: | ---: | ---: | ---: | --- |",
    ]
    for option in case.legal():
        degrees, name = option.degrees, shape_text(option.degrees, option.data)
        batch, single = (results.get(f"{case.name} {name} {mode}", {}) for mode in ("batch", "single"))
        of_batch = case.tokens_per_s(degrees) / degrees.num_devices
        is_auto = chosen is not None and (chosen.degrees.tensor, chosen.degrees.pipeline) == (
            degrees.tensor,
            degrees.pipeline,
        )
        rates = (_rate(batch, case.num_gpus), _rate(single, 1))
        lines.append(
            f"| {name} | {batch.get('cache_tokens') or degrees.cache_tokens:,} | {of_batch:,.0f} | {rates[0]} | "
            f"{rates[1]} | {'auto' if is_auto else ''} |"
        )
    return "\n".join(lines)


def _rate(found: dict[str, Any], divisor: int) -> str:
    rate = found.get("output_tokens_per_s")
    return f"{rate / divisor:,.0f}" if rate else "failed" if found else ""


if __name__ == "__main__":
    main()
