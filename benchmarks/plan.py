"""What `plan` predicts against what vLLM reports and what a job measures: tokens of cache, and tokens a second.

    python benchmarks/plan.py llama-3.1-8b llama-3.1-8b,quantization=fp8,cache=fp8 --out results       # one GPU
    python benchmarks/plan.py llama-3.3-70b,quantization=fp8,tensor=2 --tasks generate --out results    # two GPUs
    python benchmarks/plan.py llama-3.1-8b,cache_gb=4 llama-3.1-8b,cache_gb=12,tensor=2 --tasks generate
    python benchmarks/plan.py tiny --seconds 1 --out results                                            # on a CPU

A case is a shape of shapes.py, or a folder with a config.json, and settings behind commas: `tensor`, `pipeline`,
`data`, `quantization`, `cache` (kv_cache_dtype), `cache_gb` (kv_cache_memory_bytes), `seqs` (max_num_seqs). The weights
are random (`load_format: dummy`). Each task is one job, with as many rows as it predicts for `--seconds`. All results
so far are in plan.json, and the tables are printed again after each job.
"""

import argparse
import json
import pathlib
import shutil
import time
from typing import Any, Literal

from run import run_spec
from shapes import SHAPES, make_model, make_prompts

import batchinf.tasks.registry  # it adds the tasks to the spec
from batchinf.base.storage import Folder
from batchinf.fleet.launch import choose_backend
from batchinf.manifest.events import read_events
from batchinf.model.memory import DEFAULT_GPU_MEMORY_UTILIZATION, fit_of
from batchinf.model.model import resolve
from batchinf.planning.degrees import degrees_of
from batchinf.planning.gpus import GPUS, Gpu, gpu_like
from batchinf.planning.throughput import Prediction, Workload, prediction_of, shape_of
from batchinf.spec.file import read_spec

LENGTHS = {"generate": (256, 128), "score": (1024, 1), "embed": (128, 0)}
LOGITS: dict[str, Literal["all", "last", "none"]] = {"generate": "last", "score": "all", "embed": "none"}
CONTEXT = 2048
ARGUMENTS = {"cache": "kv_cache_dtype", "seqs": "max_num_seqs"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="+")
    parser.add_argument("--tasks", default="generate,score,embed", help="with commas between them")
    parser.add_argument("--seconds", type=float, default=30.0, help="of each job's window, as predicted")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("results"))
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="end everything after so many seconds")
    args = parser.parse_args()
    deadline = time.monotonic() + args.limit_s
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "plan.json"
    results: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []
    for case in args.cases:
        for task in args.tasks.split(","):
            results.append(measure(case, task, args.out, args.seconds, deadline))
            path.write_text(json.dumps(results, indent=1))
            print(table(results), flush=True)


def measure(case: str, task: str, out: pathlib.Path, seconds: float, deadline: float) -> dict[str, Any]:
    """Run one task of a case, with as many rows as are predicted for `seconds`."""
    name, *settings = case.split(",")
    given: dict[str, str] = dict(setting.split("=", 1) for setting in settings)
    shape = shape_named(name)
    model = make_model(shape, out / "models" / shape)
    folder = out / "-".join([task, *case.replace("=", "").replace("/", "_").split(",")])
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    spec = folder / "job.yaml"
    write(spec, task, given, model, folder)
    predicted, tokens = predict(spec, task, 10**6)
    rows = max(64, round(10**6 / predicted.seconds * seconds / 64) * 64)
    data = int(given.get("data", 1))
    predicted, tokens = predict(spec, task, rows // data)
    make_prompts(folder / "rows.parquet", shape, rows, LENGTHS[task][0])
    found = run_spec(spec, folder / "job", deadline)
    unit = "output_tokens_per_s" if task == "generate" else "prompt_tokens_per_s"
    reported = settings_of(folder / "job") if found["exit_code"] == 0 else {}
    return {
        "case": case,
        "task": task,
        "rows": rows,
        "predicted_cache_tokens": tokens,
        "cache_tokens": reported.get("kv_cache_size_tokens"),
        "predicted_tokens_per_s": round(getattr(predicted, unit) * data, 1),
        "tokens_per_s": found.get(unit),
        "limited_by": predicted.limited_by,
        **found,
    }


def shape_named(name: str) -> str:
    """The name of a shape; a folder's config becomes one."""
    if name not in SHAPES:
        folder = pathlib.Path(name)
        SHAPES[folder.name] = json.loads((folder / "config.json").read_text())
        name = folder.name
    return name


def write(path: pathlib.Path, task: str, given: dict[str, str], model: pathlib.Path, folder: pathlib.Path) -> None:
    engine: dict[str, Any] = {"max_model_len": int(given.get("context", CONTEXT)), "enable_prefix_caching": False}
    engine |= {ARGUMENTS[name]: value for name, value in given.items() if name == "cache"}
    engine |= {ARGUMENTS[name]: int(value) for name, value in given.items() if name == "seqs"}
    if "cache_gb" in given:
        engine["kv_cache_memory_bytes"] = int(float(given["cache_gb"]) * 1e9)
    degrees = ("tensor", "pipeline", "data")
    spec: dict[str, Any] = {
        "model": {"name": str(model), "dtype": "bfloat16", "load_format": "dummy",
                  "quantization": given.get("quantization")},
        "task": task,
        "input": {"path": str(folder / "rows.parquet"), "prompt_column": "prompt", "id_column": "id"},
        "parallel": {f"{name}_parallel_size": int(given.get(name, 1)) for name in degrees},
        "engine": engine,
        "output": {"path": str(folder / "job")},
    }  # fmt: skip
    if task == "generate":
        spec["sampling"] = {"temperature": 0.0, "max_tokens": LENGTHS[task][1], "ignore_eos": True}
    if task == "score":
        spec["input"] = {"path": str(folder / "rows.parquet"), "text_column": "prompt", "id_column": "id"}
    path.write_text(json.dumps(spec))


def predict(path: pathlib.Path, task: str, num_rows: int) -> tuple[Prediction, int]:
    """The speed of one replica, and the tokens of its cache."""
    spec = read_spec(path).spec
    backend = choose_backend(spec)
    device_bytes, title = next(map(backend.device_size, backend.devices()), (None, ""))
    gpu: Gpu | None = gpu_like(title, device_bytes) if device_bytes is not None else GPUS["h200"]
    if gpu is None:
        raise SystemExit(f"{title} is not in the table of GPUs")
    limits_of = batchinf.tasks.registry.task_of(spec).default_batch_limits
    fit = fit_of(resolve(spec.model), spec, gpu.memory_bytes, gpu.title, limits_of=limits_of)
    share = DEFAULT_GPU_MEMORY_UTILIZATION
    tensor, pipeline = spec.parallel.tensor_parallel_size, spec.parallel.pipeline_parallel_size
    assert tensor != "auto" and pipeline != "auto"
    degrees = degrees_of(fit, tensor, pipeline, context=CONTEXT, share=share)
    prompt, output = LENGTHS[task]
    work = Workload(num_rows, prompt, output, output, LOGITS[task])
    shape = shape_of(fit)
    assert shape is not None
    return prediction_of(fit, shape, gpu=gpu, work=work, share=share), degrees.cache_tokens


def settings_of(out: pathlib.Path) -> dict[str, Any]:
    """What the first replica reported when it was ready."""
    ready = [event.fields for event in read_events(Folder(out)) if event.name == "ready"]
    return dict(ready[0].get("settings", {})) if ready else {}


def table(results: list[dict[str, Any]]) -> str:
    """Markdown."""
    lines = [
        "| case | task | cache tokens, predicted | reported | ratio | tokens/s, predicted | measured | ratio | limit |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    for it in results:
        cells = [it["case"], it["task"]]
        for predicted, found in (
            ("predicted_cache_tokens", "cache_tokens"),
            ("predicted_tokens_per_s", "tokens_per_s"),
        ):
            mine, theirs = it[predicted], it.get(found)
            cells += [f"{mine:,.0f}", *([f"{theirs:,.0f}", f"{mine / theirs:.2f}"] if theirs else ["failed", ""])]
        lines.append(f"| {' | '.join([*cells, it['limited_by']])} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
