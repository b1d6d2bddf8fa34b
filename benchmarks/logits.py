"""Full-vocabulary logits of each prompt's last position: a job, what limits it, and `LLM.generate(logprobs=-1)`.

    python benchmarks/logits.py --out results                                     # 8B shape, 128k vocabulary
    python benchmarks/logits.py --shape tiny-128k --rows 400 --out results        # anywhere, on a CPU

One run on one machine measures in this order:

1. the disk, with files that are fsynced;
2. the job, with the given number of rows and with four times as many, and the peak memory of its replica and engine;
3. on one engine, plain prefill: `max_tokens=1`, no logprobs, token ids in;
4. `logprobs=-1` read into an array, through vLLM's dicts and through `flat_logprobs`, with few rows: one takes 0.1
   to 1 s;
5. in a process of its own, a loop over batches with transformers, which computes the logits of the last position only.

A job's time counts from the first admitted request to the last committed part. The goal is 0.8 × the lower of prefill
and disk.
"""

import argparse
import json
import os
import pathlib
import shutil
import subprocess
import sys
import time
from typing import Any

import numpy as np
import psutil
import pyarrow.parquet as pq
from run import end, from_manifest
from shapes import SHAPES, make_model, make_prompts

_MIB = 2**20
_PIECE_BYTES = 64 * _MIB
_SAMPLE_S = 0.2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("results"))
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-3.1-8b")
    parser.add_argument("--rows", type=int, default=4096, help="of the smaller job; the larger has four times as many")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--slow-rows", type=int, default=32, help="rows that are read through vLLM's own outputs")
    parser.add_argument("--disk-mib", type=int, default=4096, help="written to measure the disk")
    parser.add_argument("--batch", type=int, default=64, help="rows of a batch of the loop with transformers")
    parser.add_argument("--rivals", help="of a group's JSON: run those alone (used within)")
    parser.add_argument("--transformers", help="the same for the loop with transformers")
    args = parser.parse_args()
    for run, path in ((run_rivals, args.rivals), (run_transformers, args.transformers)):
        if path:
            run(json.loads(pathlib.Path(path).read_text()))
            return
    folder = args.out / "logits"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    model = make_model(args.shape, folder / "model")
    prompts = make_prompts(folder / "prompts.parquet", args.shape, 4 * args.rows, args.prompt_tokens)
    vocab_size = SHAPES[args.shape]["vocab_size"]
    found: dict[str, Any] = {"shape": args.shape, "row_bytes": 2 * vocab_size, "prompt_tokens": args.prompt_tokens}
    found["disk_bytes_per_s"] = disk_rate(folder, args.disk_mib)
    for num_rows in (args.rows, 4 * args.rows):
        found[f"job_{num_rows}"] = run_job(folder, model, prompts, num_rows, args)
        keep(found, folder)
    group = {
        "engine": {"model": str(model), "load_format": "dummy", "dtype": args.dtype, "max_logprobs": -1,
                   "max_model_len": args.prompt_tokens + 8, "enable_prefix_caching": False,
                   "logprobs_mode": "raw_logits"},
        "prompts": str(prompts), "num_rows": 4 * args.rows, "slow_rows": args.slow_rows, "batch": args.batch,
        "vocab_size": vocab_size,
    }  # fmt: skip
    for kind in ("rivals", "transformers"):
        path, result = folder / f"{kind}-group.json", folder / f"{kind}.json"
        path.write_text(json.dumps(group | {"result": str(result)}))
        with (folder / f"{kind}.log").open("wb") as log:
            subprocess.run([sys.executable, __file__, f"--{kind}", str(path)], stdout=log, stderr=log, check=False)
        if result.exists():
            found |= json.loads(result.read_text())
        keep(found, folder)
    print(summary(found, args.rows))


def keep(found: dict[str, Any], folder: pathlib.Path) -> None:
    (folder / "results.json").write_text(json.dumps(found, indent=1))


def disk_rate(folder: pathlib.Path, num_mib: int) -> float:
    """Bytes a second of random data in files of 64 MiB, each with an fsync like parts."""
    data = np.random.default_rng(0).bytes(_PIECE_BYTES)
    num_files = max(1, num_mib * _MIB // _PIECE_BYTES)
    started = time.monotonic()
    for number in range(num_files):
        with (folder / f"disk-{number}").open("wb") as file:
            file.write(data)
            os.fsync(file.fileno())
    seconds = time.monotonic() - started
    for number in range(num_files):
        (folder / f"disk-{number}").unlink()
    return round(num_files * _PIECE_BYTES / seconds)


def run_job(
    folder: pathlib.Path, model: pathlib.Path, prompts: pathlib.Path, num_rows: int, args: argparse.Namespace
) -> dict[str, Any]:
    """Figures of one job, and the peak memory of its replica and of the engine's largest process."""
    spec = {
        "model": {"name": str(model), "dtype": args.dtype, "load_format": "dummy"},
        "task": "logits",
        "input": {"path": str(prompts), "id_column": "id", "limit": num_rows},
        "logits": {"positions": "last", "dtype": "float16"},
        "parallel": {"data_parallel_size": 1},
        "engine": {"max_model_len": args.prompt_tokens + 8, "enable_prefix_caching": False},
        "output": {"path": str(folder / f"job-{num_rows}")},
    }
    path = folder / f"job-{num_rows}.yaml"
    path.write_text(json.dumps(spec))
    with path.with_suffix(".log").open("wb") as log:
        command = [sys.executable, "-m", "batchinf", "run", str(path)]
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        peak = {"coordinator": 0, "replica": 0, "engine": 0}
        try:
            while process.poll() is None:
                look(process.pid, peak)
                time.sleep(_SAMPLE_S)
        finally:
            end(process)
    if process.returncode:
        return {"exit_code": process.returncode, "log": path.with_suffix(".log").read_text()[-2000:]}
    figures = from_manifest(folder / f"job-{num_rows}")
    shutil.rmtree(folder / f"job-{num_rows}" / "parts")
    return {
        **figures,
        "rows_per_s": round(figures["num_rows"] / figures["seconds"], 1),
        "bytes_per_s": round(figures["num_bytes"] / figures["seconds"]),
        "peak_mib": {name: num_bytes // _MIB for name, num_bytes in peak.items()},
    }


def look(pid: int, peak: dict[str, int]) -> None:
    """Note a job's memory. Only anonymous pages count: the kernel can take back pages of files."""
    try:
        root = psutil.Process(pid)
        for process in [root, *root.children(recursive=True)]:
            held = sum(m.anonymous for m in process.memory_maps(grouped=True))
            is_replica = "batchinf.fleet.local.process" in process.cmdline()
            kind = "coordinator" if process.pid == pid else "replica" if is_replica else "engine"
            peak[kind] = max(peak[kind], held)
    except (psutil.Error, OSError):
        pass


# -- the rivals, in their own process ----------------------------------------------------------------------------------


def run_rivals(group: dict[str, Any]) -> None:
    """Rows a second of plain prefill, and of each of vLLM's ways to return the whole vocabulary."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB, where there is no other device
    from vllm import LLM, SamplingParams
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        group["engine"]["enforce_eager"] = True
    llm = LLM(**group["engine"])
    texts = pq.read_table(group["prompts"])["prompt"].to_pylist()[: group["num_rows"]]
    prompts = [{"prompt_token_ids": ids} for ids in llm.get_tokenizer()(texts)["input_ids"]]
    found = {}
    for name, extra in {
        "prefill": {},
        "dicts": {"logprobs": -1},
        "flat": {"logprobs": -1, "flat_logprobs": True},
    }.items():
        params = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False, **extra)
        chosen = prompts if name == "prefill" else prompts[: group["slow_rows"]]
        llm.generate(chosen[:4], params, use_tqdm=False)
        started = time.monotonic()
        outputs = llm.generate(chosen, params, use_tqdm=False)
        if extra:
            rows = [row_of(output.outputs[0].logprobs, group["vocab_size"]) for output in outputs]
            assert all(np.isfinite(row).all() for row in rows)
        found[f"{name}_rows_per_s"] = round(len(chosen) / (time.monotonic() - started), 2)
        pathlib.Path(group["result"]).write_text(json.dumps(found))


def run_transformers(group: dict[str, Any]) -> None:
    """Rows a second of a loop over batches with transformers. All rows have the same length, so nothing is padded."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    folder, engine = group["engine"]["model"], group["engine"]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        dtype = getattr(torch, engine["dtype"])
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=dtype).eval()
    texts = pq.read_table(group["prompts"])["prompt"].to_pylist()[: group["num_rows"]]
    ids = AutoTokenizer.from_pretrained(folder)(texts)["input_ids"]
    size = group["batch"]

    def run(rows: list[list[int]]) -> None:
        for start in range(0, len(rows), size):
            batch = torch.tensor(rows[start : start + size], device=device)
            logits = model(batch, use_cache=False, logits_to_keep=1).logits[:, -1].to(torch.float16).cpu().numpy()
            assert logits.shape[1] == group["vocab_size"]

    with torch.inference_mode():
        run(ids[:size])
        started = time.monotonic()
        run(ids)
    found = {"transformers_rows_per_s": round(len(ids) / (time.monotonic() - started), 2)}
    pathlib.Path(group["result"]).write_text(json.dumps(found))


def row_of(logprobs: Any, vocab_size: int) -> np.ndarray[Any, np.dtype[np.float16]]:
    """[vocab_size] of the generated position."""
    row = np.full(vocab_size, np.nan, np.float16)
    if hasattr(logprobs, "token_ids"):
        row[np.array(logprobs.token_ids)] = np.array(logprobs.logprobs, np.float16)
    else:
        for token_id, entry in logprobs[0].items():
            row[token_id] = entry.logprob
    return row


def summary(found: dict[str, Any], num_rows: int) -> str:
    job, large = found[f"job_{num_rows}"], found[f"job_{4 * num_rows}"]
    disk = found["disk_bytes_per_s"] / found["row_bytes"]
    lines = ["| what | rows/s | job / it |", "| --- | ---: | ---: |"]
    rate = large.get("rows_per_s", 0.0)
    rates = {
        "disk": disk,
        **{n: found.get(f"{n}_rows_per_s", 0.0) for n in ("prefill", "dicts", "flat", "transformers")},
    }
    lines += [f"| job, {4 * num_rows:,} rows | {rate:,.1f} | |"]
    lines += [f"| {name} | {figure:,.1f} | {rate / figure if figure else 0:.2f} |" for name, figure in rates.items()]
    lines += [f"peak MiB, {num_rows:,} rows: {job.get('peak_mib')}", f"{4 * num_rows:,} rows: {large.get('peak_mib')}"]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
