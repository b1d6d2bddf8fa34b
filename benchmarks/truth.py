"""How far jobs are from transformers in float32, beside jobs with vLLM's own scheduler and worker.

    python benchmarks/truth.py --devices 0,1,2,3 --jobs 4 --limit-s 400 --out results       # all models, four GPUs
    python benchmarks/truth.py --devices 0 --jobs 3 --only llama,qwen3 --out results
    python benchmarks/truth.py --rows 24 --jobs 1 --only llama --out results                # on a CPU, in float32

For each small model of `architectures.py` and each task, two jobs run over the same rows: with the settings of
batchinf for a large model, and with vLLM's own scheduler, worker and graphs. Both are compared with transformers in
float32, which reads the tokens that the job itself has chosen. The distance of the second job is the noise of the type
and of vLLM's kernels. The script ends with exit code 1 if a first job is farther than 1.5 times the noise, or if one of
its rows is farther than 2.5 times the worst row of the noise.

| task | compared values | a row's distance |
| --- | --- | --- |
| greedy | logprobs of the output tokens and of the 5 most likely ones, at temperature 0 | mean difference |
| sampled | the same at temperature 1, two samples of a prompt | mean difference |
| top-1 | the same for other rows of the same job, with `top_k: 1` | mean difference |
| score | logprobs of a text's tokens and of the 2 most likely ones | mean difference |
| embed | vectors of length 1 | length of the difference |
| logits | logits of the whole vocabulary after the last token | mean difference |

`reach` is the mean difference of the reference's own logprobs 32 tokens after the first half of a prompt was replaced:
the noise must be far below it. The last column counts the steps that decode with batchinf's own kernel for attention.
For score and embed it counts the steps of prompts that are one CUDA graph each.
"""

import argparse
import json
import os
import pathlib
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from architectures import ADAPTER, ARCHITECTURES, BOS, VOCAB_SIZE, Architecture, make_architecture, merge_adapter
from run import end
from safetensors.torch import load_file
from shapes import words
from transformers import AutoModelForCausalLM

import batchinf

Floats = npt.NDArray[np.float32]
HERE = pathlib.Path(__file__).resolve().parent
# Of a generating job on a GPU. Batchinf chooses it for larger models; these are so small that it would take vLLM's own.
_WORKER = "batchinf.engines.vllm.kernels.attention.DecodingWorker"
# Null is vLLM's own value.
SIDES: dict[str, dict[str, Any]] = {
    "batchinf": {},
    "vllm": dict.fromkeys(
        ("scheduler_cls", "worker_cls", "worker_extension_cls", "compilation_config", "additional_config",
         "attention_config", "max_num_seqs", "max_num_batched_tokens", "async_scheduling")
    ),
}  # fmt: skip
_LIMIT, _ROW_LIMIT, _FLOOR = 1.5, 2.5, 1e-6
_MOST_NOISE = 0.25  # of the reach
# Of the prompts: a share of them, and their fewest and most tokens. One more is much longer.
_SHARES = ((0.4, 3, 40), (0.5, 41, 250), (0.1, 251, 700))
_LONGEST, _MAX_MODEL_LEN, _MAX_TOKENS = 3000, 4096, 40
_CACHE_BYTES = 3 << 30
_BATCH_TOKENS = 8192  # of a batch of the reference
_REACH_TOKENS = 32
_LOGPROBS = ("token_ids", "logprobs", "top_token_ids", "top_logprobs")
# What is read of a job's rows.
COLUMNS = {
    **dict.fromkeys(("sampled", "top-1"), ("prompt_token_ids", *_LOGPROBS, "top_k")),
    "greedy": ("prompt_token_ids", *_LOGPROBS),
    "score": _LOGPROBS,
    "embed": ("prompt_token_ids", "embedding"),
    "logits": ("prompt_token_ids", "logits"),
}


@dataclass(frozen=True, slots=True)
class Distance:
    """How far a job is from the reference."""

    mean: float
    """Of the rows' distances."""
    worst: float
    """The largest distance of a row."""

    @classmethod
    def of(cls, rows: Sequence[float]) -> "Distance":
        """rows: the distance of each."""
        return cls(float(np.mean(rows)), float(np.max(rows)))

    def is_near(self, noise: "Distance") -> bool:
        """Whether a job is no farther than the noise allows. NaN is far."""
        is_mean_near = self.mean <= _LIMIT * noise.mean + _FLOOR
        return is_mean_near and self.worst <= _ROW_LIMIT * noise.worst + _FLOOR


def verdict_of(job: Distance, noise: Distance, reach: float) -> str:
    """`near` or `FAR`; or why the comparison says nothing."""
    if not job.is_near(noise):
        return "FAR"
    return "near" if noise.mean < _MOST_NOISE * reach else "no verdict: vLLM itself is far from transformers"


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the table."""

    model: str
    task: str
    verdict: str
    """See `verdict_of`; or why it did not run."""
    job: Distance | None = None
    noise: Distance | None = None
    reach: float | None = None
    replaced: str = ""
    seconds: float | None = None
    """Of the two jobs and the reference."""

    def cells(self) -> list[str]:
        """For the table."""
        cells = [self.model, self.task]
        if self.job is None or self.noise is None:
            return [*cells, "", "", "", "", "", "", self.verdict]
        ratio = self.job.mean / self.noise.mean if self.noise.mean else 1.0
        pairs = [f"{value:.2g}" for pair in (self.job, self.noise) for value in (pair.mean, pair.worst)]
        return [*cells, *pairs, f"{ratio:.2f}", f"{self.reach:.2g}", f"{self.verdict}; {self.replaced}"]


def not_run(model: str, task: str, error: Exception) -> Line:
    """The line of a task that failed."""
    words = " ".join(str(error).split()).replace("|", "/")
    return Line(model, task, f"not run: {words}"[:200])


class Table:
    """The lines so far. `truth.json` always has them."""

    def __init__(self, path: pathlib.Path) -> None:
        self._path, self._lock = path, threading.Lock()
        self.lines: list[Line] = []

    def add(self, lines: Sequence[Line]) -> None:
        """Keep lines, and print them."""
        with self._lock:
            self.lines += lines
            self._path.write_text(json.dumps([asdict(line) for line in self.lines], indent=1))
            for line in lines:
                print("|", " | ".join(line.cells()), "|", flush=True)

    def text(self) -> str:
        """As Markdown, sorted."""
        head = ["model", "task", "job, mean", "worst", "noise, mean", "worst", "job / noise", "reach", "verdict"]
        places = {name: place for place, name in enumerate(ARCHITECTURES)}
        lines = sorted(self.lines, key=lambda line: places[line.model])
        rows = [head, ["---", "---", *["---:"] * 6, "---"], *(line.cells() for line in lines)]
        return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("results"))
    parser.add_argument("--only", help="models with commas between them")
    parser.add_argument("--tasks", default="generate,score,greedy,embed,logits", help="with commas between them")
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--devices", default="0", help="GPUs with commas between them")
    parser.add_argument("--jobs", type=int, default=3, help="models at once on each device, with two engines each")
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="end everything after so many seconds")
    args = parser.parse_args()
    names = args.only.split(",") if args.only else list(ARCHITECTURES)
    if unknown := set(names) - ARCHITECTURES.keys():
        parser.error(f"--only: got {', '.join(sorted(unknown))}; must be of {', '.join(ARCHITECTURES)}")
    folder = args.out / "truth"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    devices = args.devices.split(",") if torch.cuda.is_available() else ["cpu"]
    make_rows(folder / "rows.parquet", args.rows, _LONGEST if args.rows > 100 else 700)
    # Long ones first: they have the most tasks.
    order = sorted(names, key=lambda name: -len(ARCHITECTURES[name].tasks))
    table = Table(args.out / "truth.json")
    truth = Truth(folder, args.tasks.split(","), time.monotonic() + args.limit_s, table)
    with ThreadPoolExecutor(len(devices) * args.jobs) as pool:
        lanes = [devices[number % len(devices)] for number in range(len(order))]
        for done in [pool.submit(truth.of_model, *pair) for pair in zip(order, lanes, strict=True)]:
            done.result()
    print(f"\n{table.text()}", flush=True)
    sys.exit(any(line.verdict == "FAR" for line in table.lines))


def make_rows(path: pathlib.Path, num_rows: int, longest: int) -> None:
    """Write rows `id`, `prompt` and `top_k`, which is 1 in every second row."""
    chance, vocabulary = random.Random(0), words(VOCAB_SIZE)
    lengths = [chance.randint(*ends) for share, *ends in _SHARES for _ in range(round(share * num_rows))]
    lengths[-1] = longest
    chance.shuffle(lengths)
    prompts = [" " + " ".join(chance.choices(vocabulary, k=length)) for length in lengths]
    top_ks = [row % 2 for row in range(len(prompts))]  # 0 is all
    pq.write_table(pa.table({"id": range(len(prompts)), "prompt": prompts, "top_k": top_ks}), path)


class Truth:
    """Runs the jobs and compares them. deadline: on the monotonic clock."""

    def __init__(self, folder: pathlib.Path, tasks: Sequence[str], deadline: float, table: Table) -> None:
        self._folder, self._tasks, self._deadline, self._table = folder, tasks, deadline, table
        self._loading = threading.Lock()  # transformers' loading is not safe in threads

    def of_model(self, name: str, device: str) -> None:
        """All tasks of a model, one after the other. device: a GPU's number, or `cpu`."""
        architecture, folder = ARCHITECTURES[name], self._folder / name
        tasks = [task for task in architecture.tasks if task in self._tasks]
        dtype = "float32" if device == "cpu" else "bfloat16"
        reference = None
        try:
            with self._loading:
                make_architecture(architecture, folder / "model", dtype)
        except Exception as error:  # transformers may lack a model, or fail in any way
            self._table.add([not_run(name, task, error) for task in tasks])
            return
        for task in tasks:
            began = time.monotonic()
            names = ("sampled", "top-1") if task == "generate" else (task,)
            try:
                job, noise = self._jobs(architecture, folder, task, device)
                with self._loading:
                    reference = reference or Reference(folder / "model", device)
                pairs = [(distance_of(job, each, reference), distance_of(noise, each, reference)) for each in names]
            except Exception as error:  # the other tasks still run
                self._table.add([not_run(name, task, error)])
                continue
            done, took_s = replaced(job), round(time.monotonic() - began, 1)
            self._table.add(
                [Line(name, each, verdict_of(*pair, reference.reach), *pair, reference.reach, done, took_s)
                 for each, pair in zip(names, pairs, strict=True)]
            )  # fmt: skip

    def _jobs(
        self, architecture: Architecture, folder: pathlib.Path, task: str, device: str
    ) -> tuple[pathlib.Path, pathlib.Path]:
        """Run both jobs side by side. Returns their folders."""
        with ThreadPoolExecutor(2) as pool:
            runs = [pool.submit(self._run, architecture, folder, task, side, device) for side in SIDES]
            job, noise = (run.result() for run in runs)
        return job, noise

    def _run(self, architecture: Architecture, folder: pathlib.Path, task: str, side: str, device: str) -> pathlib.Path:
        out = folder / f"{task}-{side}"
        spec = spec_of(architecture, task, self._folder / "rows.parquet", folder / "model", device != "cpu")
        if device != "cpu" and spec["task"] == "generate":
            spec["engine"]["worker_cls"] = _WORKER
        spec["engine"] |= SIDES[side]
        spec["output"]["path"] = str(out)
        path = out.with_suffix(".yaml")
        path.write_text(json.dumps(spec))
        # Two engines must not write the same compiled model at once.
        environment = {**os.environ, "VLLM_CACHE_ROOT": str((self._folder / f"cache-{side}").resolve()),
                       "KERNEL_LOG": str(out.resolve())}  # fmt: skip
        environment["PYTHONPATH"] = os.pathsep.join(
            filter(None, (str(HERE / "step_hook"), os.environ.get("PYTHONPATH")))
        )
        if device != "cpu":
            environment["CUDA_VISIBLE_DEVICES"] = device
        left_s = self._deadline - time.monotonic()
        if left_s < 1:
            raise TimeoutError("time")
        with path.with_suffix(".log").open("wb") as log:
            command = [sys.executable, "-m", "batchinf", "run", str(path)]
            process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
            try:
                process.wait(left_s if left_s != float("inf") else None)
            except subprocess.TimeoutExpired:
                raise TimeoutError("time") from None
            finally:
                end(process)
        if process.returncode:
            lines = path.with_suffix(".log").read_text(errors="replace").splitlines()
            errors = [line for line in lines if "rror" in line]
            raise RuntimeError(f"{side}: exit code {process.returncode}: {[*errors, *lines, ''][0]}")
        return out


def spec_of(
    architecture: Architecture, task: str, rows: pathlib.Path, model: pathlib.Path, is_on_gpu: bool
) -> dict[str, Any]:
    """The job with batchinf's settings, without the path of the output."""
    prompts = {"prompt_column": "prompt", "apply_chat_template": False}
    named: dict[str, Any] = {"name": str(model)}
    engine: dict[str, Any] = {"max_model_len": _MAX_MODEL_LEN, **architecture.engine}
    if architecture.has_adapter:
        named["lora"] = str(model / ADAPTER)
    if is_on_gpu:  # so that several engines share a device
        engine |= {"gpu_memory_utilization": 0.06, "kv_cache_memory_bytes": _CACHE_BYTES}
    spec: dict[str, Any] = {
        "model": named,
        "task": "generate" if task == "greedy" else task,
        "input": {"path": str(rows), "id_column": "id", **({"text_column": "prompt"} if task == "score" else prompts)},
        "parallel": {"data_parallel_size": 1, "replicas_per_device": 1},
        "engine": engine,
        "output": {"include_prompt": True, "keep_columns": ["top_k"]},
    }
    if task in ("generate", "greedy"):
        several = {"n": 2, "temperature": 1.0, "columns": {"top_k": "top_k"}}
        more = several if task == "generate" else {"temperature": 0.0}
        spec["sampling"] = {"max_tokens": _MAX_TOKENS, "ignore_eos": True, "logprobs": 5, **more}
    elif task == "score":
        spec["sampling"] = {"prompt_logprobs": 2}
    elif task == "logits":
        spec["logits"] = {"dtype": "float32"}
    return spec


def replaced(out: pathlib.Path) -> str:
    """What batchinf did in place of vLLM in a job, from the hook's counts."""
    counts: dict[str, int] = {}
    for path in out.parent.glob(f"{out.name}-kernels-*.json"):
        counts |= json.loads(path.read_text())
    if counts.get("whole_steps"):
        return f"{counts['whole_steps']} steps as one graph each"
    if counts.get("kernel_calls"):
        return f"{counts.get('decode_steps', 0)} steps with the kernel"
    return "vLLM's attention"


# -- the comparison ----------------------------------------------------------------------------------------------------


def distance_of(out: pathlib.Path, name: str, reference: "Reference") -> Distance:
    """Of a finished job. name: a task; `sampled` and `top-1` are halves of a job that generates."""
    rows = batchinf.open(out).table([*COLUMNS[name], "error_type", "error_message"]).to_pylist()
    if num := sum(row["error_type"] is not None for row in rows):
        raise RuntimeError(f"{num} error rows: {next(r['error_message'] for r in rows if r['error_type'])}")
    if name in ("sampled", "top-1"):
        rows = [row for row in rows if row["top_k"] == (name == "top-1")]
    prompts = [row.get("prompt_token_ids", []) for row in rows]
    if name == "embed":
        vectors = reference.vectors(prompts)
        pairs = zip(rows, vectors, strict=True)
        return Distance.of([float(np.linalg.norm(np.subtract(row["embedding"], vector))) for row, vector in pairs])
    if name == "logits":
        found = [np.asarray(row["logits"], np.float32).reshape(-1) for row in rows]
        return Distance.of(row_distances(found, reference.logits(prompts)))
    stored = [stored_logprobs(row, is_text=name == "score") for row in rows]
    expected = reference.logprobs([(one.token_ids, one.tokens) for one in stored])
    return Distance.of(row_distances([one.logprobs for one in stored], expected))


def row_distances(found: Sequence[Floats], expected: Sequence[Floats]) -> list[float]:
    """The mean difference of each row."""
    return [float(np.abs(one - other).mean()) for one, other in zip(found, expected, strict=True)]


@dataclass(frozen=True, slots=True)
class Stored:
    """The logprobs of a row of a job."""

    token_ids: list[int]
    """Prompt and output; for a text, its context and its tokens."""
    tokens: npt.NDArray[np.int64]
    """[n, k + 1]: for each of the last n tokens, the token and the most likely ones."""
    logprobs: Floats
    """[n, k + 1], of these."""


def stored_logprobs(row: dict[str, Any], *, is_text: bool) -> Stored:
    """is_text: of task `score`, whose context is the BOS token."""
    before = [BOS] if is_text else row["prompt_token_ids"]
    own = row["token_ids"]
    tokens = np.column_stack([np.asarray(own, np.int64), np.asarray(row["top_token_ids"], np.int64)])
    logprobs = np.column_stack([row["logprobs"], row["top_logprobs"]]).astype(np.float32)
    return Stored([*before, *own], tokens, logprobs)


class Reference:
    """A model of transformers in float32. device: a GPU's number, or `cpu`."""

    def __init__(self, folder: pathlib.Path, device: str) -> None:
        self._device = device if device == "cpu" else f"cuda:{device}"
        # PyTorch's own attention knows neither soft caps nor sinks.
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        if (folder / ADAPTER).exists():
            merge_adapter(model, load_file(folder / ADAPTER / "adapter_model.safetensors"))
        self._model = model.to(self._device).eval()
        self.reach = self._measure_reach()

    def logprobs(self, wanted: Sequence[tuple[list[int], npt.NDArray[np.int64]]]) -> list[Floats]:
        """Of each row: [n, k + 1]. wanted: token ids, and the tokens [n, k + 1] at the last n of them."""
        rows: list[Floats] = [np.zeros(0, np.float32)] * len(wanted)
        with torch.inference_mode():
            for places, ids in self._batches([token_ids for token_ids, _ in wanted]):
                logits = self._model(input_ids=ids, use_cache=False).logits
                for at, place in enumerate(places):
                    token_ids, tokens = wanted[place]
                    last = len(token_ids) - 1
                    own = logits[at, last - len(tokens) : last].float().log_softmax(-1)
                    rows[place] = own.gather(1, torch.from_numpy(tokens).to(own.device)).cpu().numpy()
        return rows

    def logits(self, prompts: Sequence[list[int]]) -> list[Floats]:
        """After the last token of each prompt: [vocab_size]."""
        return self._last(prompts, lambda ids: self._model(input_ids=ids, use_cache=False).logits)

    def vectors(self, prompts: Sequence[list[int]]) -> list[Floats]:
        """The last token's state, scaled to length 1: [width]."""
        states = self._last(prompts, lambda ids: self._model.base_model(input_ids=ids, use_cache=False)[0])
        return [state / np.linalg.norm(state) for state in states]

    def _last(self, prompts: Sequence[list[int]], run: Any) -> list[Floats]:
        rows: list[Floats] = [np.zeros(0, np.float32)] * len(prompts)
        with torch.inference_mode():
            for places, ids in self._batches(prompts):
                output = run(ids)
                for at, place in enumerate(places):
                    rows[place] = output[at, len(prompts[place]) - 1].float().cpu().numpy()
        return rows

    def _batches(self, sequences: Sequence[list[int]]) -> Iterator[tuple[list[int], torch.Tensor]]:
        """Places of sequences of similar lengths, and their tokens with zeros behind, which no token before sees."""
        order = sorted(range(len(sequences)), key=lambda place: -len(sequences[place]))
        while order:
            longest = len(sequences[order[0]])
            num = max(1, _BATCH_TOKENS // longest)
            places, order = order[:num], order[num:]
            ids = torch.zeros((len(places), longest), dtype=torch.int64)
            for at, place in enumerate(places):
                ids[at, : len(sequences[place])] = torch.tensor(sequences[place])
            yield places, ids.to(self._device)

    def _measure_reach(self) -> float:
        chance = torch.Generator().manual_seed(1)
        ids = torch.randint(BOS + 2, VOCAB_SIZE, (16, 2 * _REACH_TOKENS), generator=chance)
        other = ids.clone()
        other[:, :_REACH_TOKENS] = ids.roll(1, 0)[:, :_REACH_TOKENS]
        with torch.inference_mode():
            one, two = (
                self._model(input_ids=each.to(self._device), use_cache=False).logits[:, -1].log_softmax(-1)
                for each in (ids, other)
            )
        return float((one - two).abs().mean())


if __name__ == "__main__":
    main()
