"""Time a job over pictures and two calls of vLLM: one with decoded pictures, and one with their paths.

    python benchmarks/images.py --out results                         # a GPU: Qwen3-VL 8B, 4,000 pictures of 640 × 480
    python benchmarks/images.py --shape qwen2.5-vl-7b --rounds 3
    python benchmarks/images.py --shape qwen3-vl-2b --ways job,paths  # one thread that renders limits this model
    python benchmarks/images.py --shape tiny --rows 40 --out results     # on a CPU; Qwen's processors need torchvision
    python benchmarks/images.py --shape tiny-vision --rows 40            # on a CPU without torchvision
    python benchmarks/images.py --memory                              # peak memory: 300 pictures of 12 megapixels

The pictures are random, all different, and made before. Weights are random. Each way is a process of its own; in the
next round they run in the opposite order. All want the same number of tokens with their top 5 logprobs.

job: `batchinf run`. Its time counts from the first admitted request to the last committed part.
decoded: one call of `LLM.generate` with token ids and decoded pictures. They are decoded before the clock starts.
paths: one call of `LLM.chat` with the paths as URLs. vLLM reads and decodes the pictures within the call.

`starved` is the share of the steps, from the first prompt to the last, before which no request waited though the engine
had room for one. `decode` and `render` are the time of one thread for one picture: Pillow's, and that of the model's
processor.
"""

import argparse
import datetime
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from typing import Any

import numpy as np
from PIL import Image
from run import run_spec
from shapes import make_tokenizer
from tokenizers import AddedToken

from batchinf.fleet.local.devices import visible_devices
from batchinf.fleet.local.environment import engine_environment

HERE = pathlib.Path(__file__).resolve().parent
WAYS = ("job", "decoded", "paths")
QUESTION = "Which colours does the picture have, and what might it show?"
_WARM_UP_ROWS = 8
_MEASURED_ROWS = 50  # of `decode` and `render`
# Of the pictures that the model reads, as users of Qwen-VL usually set it. Its own limit is 16 megapixels.
_MOST_PIXELS = 1 << 20
_MARKS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_CHAT = """{%- for message in messages -%}
<|{{ message['role'] }}|>
{%- if message['content'] is string %}{{ message['content'] }}
{%- else %}{%- for part in message['content'] %}
{%- if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>
{%- elif part['type'] == 'text' %} {{ part['text'] }}{%- endif %}
{%- endfor %}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{%- endif %}"""

_QWEN3 = {
    "architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl", "tie_word_embeddings": False,
}  # fmt: skip
_QWEN3_TEXT = {
    "model_type": "qwen3_vl_text", "head_dim": 128, "hidden_act": "silu", "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-6, "rope_theta": 5000000,
    "rope_scaling": {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [24, 20, 20]},
}  # fmt: skip
_QWEN3_VISION = {
    "model_type": "qwen3_vl", "hidden_act": "gelu_pytorch_tanh", "in_channels": 3, "num_heads": 16, "patch_size": 16,
    "spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 2304,
}  # fmt: skip
# Configs as on the Hugging Face hub, without the ids of tokens.
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-vl-8b": {
        **_QWEN3,
        "text_config": {
            **_QWEN3_TEXT, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
            "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 151936,
        },
        "vision_config": {
            **_QWEN3_VISION, "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "out_hidden_size": 4096,
            "deepstack_visual_indexes": [8, 16, 24],
        },
    },
    "qwen3-vl-2b": {
        **_QWEN3,
        "tie_word_embeddings": True,
        "text_config": {
            **_QWEN3_TEXT, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28,
            "num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 151936, "tie_word_embeddings": True,
        },
        "vision_config": {
            **_QWEN3_VISION, "depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "out_hidden_size": 2048,
            "deepstack_visual_indexes": [5, 11, 17],
        },
    },
    "qwen2.5-vl-7b": {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl", "hidden_act": "silu",
        "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
        "num_key_value_heads": 4, "vocab_size": 152064, "max_position_embeddings": 128000, "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "use_sliding_window": False, "tie_word_embeddings": False,
        "vision_config": {
            "model_type": "qwen2_5_vl", "depth": 32, "hidden_act": "silu", "hidden_size": 1280, "num_heads": 16,
            "intermediate_size": 3420, "out_hidden_size": 3584, "in_chans": 3, "patch_size": 14,
            "spatial_merge_size": 2, "spatial_patch_size": 14, "temporal_patch_size": 2, "window_size": 112,
            "fullatt_block_indexes": [7, 15, 23, 31], "tokens_per_second": 2,
        },
    },
    "tiny": {
        **_QWEN3,
        "text_config": {
            **_QWEN3_TEXT, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 32,
            "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 8192,
            "rope_scaling": {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [4, 6, 6]},
        },
        "vision_config": {
            **_QWEN3_VISION, "depth": 2, "hidden_size": 32, "intermediate_size": 64, "out_hidden_size": 64,
            "num_heads": 2, "num_position_embeddings": 64, "deepstack_visual_indexes": [0],
        },
    },
}  # fmt: skip
# The model of the sample data: an Idefics3 with weights. Its processor needs no torchvision.
_SAMPLE = "tiny-vision"


def main() -> None:
    if sys.argv[1:2] == ["--rival"]:
        _rival(pathlib.Path(sys.argv[2]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=[*SHAPES, _SAMPLE], default="qwen3-vl-8b")
    parser.add_argument("--rows", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--first-round", type=int, default=1, help="results.json keeps the figures of other rounds")
    parser.add_argument("--size", default="640x480", help="width x height of the pictures")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--engine", type=json.loads, default={}, help="JSON: engine arguments of all ways")
    parser.add_argument("--input", type=json.loads, default={}, help="JSON: more of the job's section `input`")
    parser.add_argument("--memory", action="store_true", help=f"the job alone: {_SAMPLE}, 300 rows of 4000x3000")
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="end everything after so many seconds")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("results"))
    args = parser.parse_args()
    if args.memory:
        args.shape, args.rows, args.size, args.ways, args.max_tokens = _SAMPLE, 300, "4000x3000", "job", 4
    args.out = args.out.resolve() / "images"
    args.out.mkdir(parents=True, exist_ok=True)
    bench = Bench(args)
    for number in range(args.first_round, args.first_round + args.rounds):
        ways = [way for way in WAYS if way in args.ways.split(",")]
        for way in ways if number % 2 else reversed(ways):
            bench.measure(way, number)
    print(bench.table(), flush=True)


class Bench:
    """Runs the ways one after the other. results.json always has the figures so far."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._deadline = time.monotonic() + args.limit_s
        self._model = make_model(args.shape, args.out / "models" / args.shape)
        width, _, height = args.size.partition("x")
        self._rows = make_pictures(args.out, args.rows, (int(width), int(height)))
        self._results = args.out / "results.json"
        found = json.loads(self._results.read_text()) if self._results.exists() else []
        rounds = range(args.first_round, args.first_round + args.rounds)
        self._runs = [run for run in found if run["round"] not in rounds or run["way"] not in args.ways.split(",")]

    def measure(self, way: str, number: int) -> None:
        """Run one way in its own process."""
        log = self._args.out / f"{way}-{number}-steps"
        for old in log.parent.glob(f"{log.name}-*.txt"):
            old.unlink()
        path = os.pathsep.join(filter(None, (str(HERE / "step_hook"), str(HERE), os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, "PYTHONPATH": path, "STEP_LOG": str(log)}
        figures = (self._job if way == "job" else self._vllm)(way, number, environment)
        if not figures["exit_code"]:
            out = self._args.out / f"job-{number}"
            figures |= starved(log, figures.pop("began") if way != "job" else _first_request(out))
        figures |= {"way": way, "round": number, "shape": self._args.shape, "size": self._args.size}
        self._runs.append(figures)
        self._results.write_text(json.dumps(self._runs, indent=1))
        print(figures, flush=True)

    def _job(self, way: str, number: int, environment: dict[str, str]) -> dict[str, Any]:
        name = f"{way}-{number}"
        shutil.rmtree(self._args.out / name, ignore_errors=True)  # an earlier run's job would be resumed
        content = [{"type": "image", "column": "photo"}, {"type": "text", "text": QUESTION}]
        model = {key: self._engine[key] for key in ("dtype", "load_format") if key in self._engine}
        engine = {key: value for key, value in self._engine.items() if key not in ("model", *model)}
        spec: dict[str, Any] = {
            "model": {"name": str(self._model), **model},
            "input": {
                "path": str(self._rows),
                "id_column": "id",
                "messages": [{"role": "user", "content": content}],
                **self._args.input,
            },
            "sampling": _sampling(self._args.max_tokens),
            "engine": engine,
            "parallel": {"data_parallel_size": 1},
            "output": {"path": str(self._args.out / name)},
        }
        path = self._args.out / f"{name}.yaml"
        path.write_text(json.dumps(spec))
        return run_spec(path, self._args.out / name, self._deadline, environment)

    @property
    def _engine(self) -> dict[str, Any]:
        """Engine arguments of all ways."""
        engine = {"model": str(self._model), "max_model_len": self._args.max_model_len, **self._args.engine}
        engine |= {} if self._args.shape == _SAMPLE else {"load_format": "dummy"}
        if not visible_devices():  # as a job on a CPU
            engine |= {"dtype": "float32", "enforce_eager": True}
        return engine

    def _vllm(self, way: str, number: int, environment: dict[str, str]) -> dict[str, Any]:
        if not visible_devices():
            environment = environment | engine_environment((), len(os.sched_getaffinity(0)))
        result = self._args.out / f"{way}-{number}.json"
        result.unlink(missing_ok=True)
        limits = {"image": 1, "video": 0}
        engine: dict[str, Any] = {
            "limit_mm_per_prompt": limits,
            "allowed_local_media_path": str(self._rows.parent),
            **self._engine,
        }
        group = {
            "way": way,
            "engine": engine,
            "rows": str(self._rows),
            "num_rows": self._args.rows,
            "sampling": _sampling(self._args.max_tokens),
            "result": str(result),
        }
        path = result.with_suffix(".group.json")
        path.write_text(json.dumps(group))
        began = time.monotonic()
        with result.with_suffix(".log").open("wb") as log:
            command = [sys.executable, str(HERE / "images.py"), "--rival", str(path)]
            limit_s = None if self._deadline == float("inf") else max(1.0, self._deadline - began)
            try:
                code = subprocess.run(command, stdout=log, stderr=log, env=environment, timeout=limit_s).returncode
            except subprocess.TimeoutExpired:
                code = -9
        figures = {"exit_code": code, "wall_s": round(time.monotonic() - began, 1)}
        if code:
            return {**figures, "log": result.with_suffix(".log").read_text()[-2000:]}
        return {**figures, **json.loads(result.read_text())}

    def table(self) -> str:
        """Medians over the rounds, and the range of the ratio."""
        lines = [
            "| way | rounds | rows/s | output tokens/s | job / it | range | starved | window, s | process, s | "
            "prompt tokens | coordinator, MiB | replica, MiB | engine, MiB | decode, ms | render, ms | MB a picture |",
            "| --- |" + " ---: |" * 15,
        ]
        by_way = {way: [run for run in self._runs if run["way"] == way and not run["exit_code"]] for way in WAYS}
        lines += [_row(way, runs, by_way["job"]) for way, runs in by_way.items() if runs]
        lines += [f"{run['way']}, round {run['round']}: failed\n{run['log']}" for run in self._runs if "log" in run]
        return "\n".join(lines)


def _row(way: str, runs: list[dict[str, Any]], jobs: list[dict[str, Any]]) -> str:
    def median(name: str, digits: int = 1, scale: float = 1.0) -> str:
        values = [run[name] * scale for run in runs if run.get(name) is not None]
        return f"{statistics.median(values):,.{digits}f}" if values else ""

    speed = {run["round"]: run["num_rows"] / run["seconds"] for run in runs}
    of_job = {run["round"]: run["num_rows"] / run["seconds"] for run in jobs}
    ratios = sorted(of_job[number] / speed[number] for number in speed.keys() & of_job.keys())
    ratio = f"{statistics.median(ratios):.3f}" if ratios and way != "job" else ""
    spread = f"{ratios[0]:.3f} to {ratios[-1]:.3f}" if len(ratios) > 1 and way != "job" else ""
    peaks = [run["peak_bytes"] for run in runs if "peak_bytes" in run]
    kinds = ("coordinator", "replica", "engine")
    memory = [f"{max(peak[kind] for peak in peaks) >> 20:,}" if peaks else "" for kind in kinds]
    cells = [way, str(len(runs)), f"{statistics.median(speed.values()):.2f}", median("output_tokens_per_s"), ratio]
    cells += [spread, median("starved", 3), median("seconds"), median("wall_s"), median("num_prompt_tokens", 0)]
    cells += [*memory, median("decode_ms"), median("render_ms"), median("picture_bytes", 2, 1e-6)]
    return f"| {' | '.join(cells)} |"


def _sampling(max_tokens: int) -> dict[str, Any]:
    return {"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True, "logprobs": 5}


def starved(log: pathlib.Path, began: float) -> dict[str, Any]:
    """See the top of this file; nothing without steps. log: as STEP_LOG. began: seconds on the monotonic clock."""
    for path in log.parent.glob(f"{log.name}-*.txt"):
        steps = np.loadtxt(path, ndmin=2)
        steps = steps[(steps[:, 0] >= began) & (steps[:, 1] > 0)]
        prompts = np.flatnonzero(steps[:, 4])
        reading = steps[prompts[0] : prompts[-1] + 1]
        is_starved = (reading[:, 3] == 0) & (reading[:, 2] < steps[:, 2].max())
        return {
            "starved": round(float(is_starved.mean()), 3),
            "num_steps": len(steps),
            "most_running": int(steps[:, 2].max()),
        }
    return {}


def _first_request(out: pathlib.Path) -> float:
    """When a job admitted its first request, in seconds on the monotonic clock."""
    lines = [json.loads(line) for log in sorted((out / "manifest").glob("*.jsonl")) for line in log.open()]
    [at] = [line["at"] for line in lines if line["kind"] == "event" and line["name"] == "first_request"]
    return datetime.datetime.fromisoformat(at).timestamp() - time.time() + time.monotonic()


# -- models and pictures -----------------------------------------------------------------------------------------------


def make_model(shape: str, folder: pathlib.Path) -> pathlib.Path:
    """Write a model folder with this shape, without weights."""
    if shape == _SAMPLE:
        return HERE.parent / "sample_data" / _SAMPLE
    folder.mkdir(parents=True, exist_ok=True)
    config = SHAPES[shape]
    vocab_size = config.get("text_config", config)["vocab_size"]
    tokenizer = make_tokenizer(vocab_size - 16)
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in _MARKS])
    tokenizer.save(str(folder / "tokenizer.json"))
    start, end, image, video = (tokenizer.token_to_id(mark) for mark in _MARKS)
    ids = {"vision_start_token_id": start, "vision_end_token_id": end, "image_token_id": image}
    ids |= {"video_token_id": video, "bos_token_id": 256, "eos_token_id": 257}
    (folder / "config.json").write_text(json.dumps({**config, **ids, "torch_dtype": "bfloat16"}))
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": 256, "eos_token_id": 257}))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<bos>", "eos_token": "<eos>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**names, "chat_template": _CHAT}))
    family = "Qwen3VL" if shape.startswith("qwen3") or shape == "tiny" else "Qwen2_5_VL"
    patch_size = config["vision_config"]["patch_size"]
    mean = [0.5] * 3 if family == "Qwen3VL" else [0.48145466, 0.4578275, 0.40821073]
    deviation = [0.5] * 3 if family == "Qwen3VL" else [0.26862954, 0.26130258, 0.27577711]
    sizes = {"shortest_edge": 4 * 4 * patch_size * patch_size, "longest_edge": _MOST_PIXELS}
    processor = {
        "processor_class": f"{family}Processor", "patch_size": patch_size, "temporal_patch_size": 2, "merge_size": 2,
        "image_mean": mean, "image_std": deviation, "size": sizes,
    }  # fmt: skip
    pictures = {**processor, "image_processor_type": "Qwen2VLImageProcessorFast"}
    videos = {**processor, "video_processor_type": f"{'Qwen3VL' if family == 'Qwen3VL' else 'Qwen2VL'}VideoProcessor"}
    (folder / "preprocessor_config.json").write_text(json.dumps(pictures))
    (folder / "video_preprocessor_config.json").write_text(json.dumps(videos))
    return folder


def make_pictures(out: pathlib.Path, num_rows: int, size: tuple[int, int]) -> pathlib.Path:
    """Write pictures and, beside their folder, the file with their rows. Some more are for the warm-up of rivals."""
    width, height = size
    folder = out / f"pictures-{width}x{height}"
    folder.mkdir(exist_ok=True)
    paths = [folder / f"{number:06d}.jpg" for number in range(num_rows + _WARM_UP_ROWS)]
    missing = [path for path in paths if not path.exists()]
    with ProcessPoolExecutor() as pool:
        list(pool.map(_make_picture, missing, [size] * len(missing), chunksize=16))
    rows = out / f"rows-{width}x{height}-{num_rows}.jsonl"
    with rows.open("w") as file:
        for number, path in enumerate(paths[:num_rows]):
            file.write(json.dumps({"id": number, "photo": f"{folder.name}/{path.name}"}) + "\n")
    return rows


def _make_picture(path: pathlib.Path, size: tuple[int, int]) -> None:
    """Soft colours with some noise: about as many bytes as a photo."""
    random = np.random.default_rng(int(path.stem))
    width, height = size
    soft = Image.fromarray(random.integers(0, 256, (12, 16, 3), np.uint8)).resize(size, Image.Resampling.BICUBIC)
    noise = random.integers(-12, 13, (height, width, 1), np.int16)
    pixels = np.clip(np.asarray(soft, np.int16) + noise, 0, 255).astype(np.uint8)
    Image.fromarray(pixels).save(path, "JPEG", quality=85)


# -- vLLM alone --------------------------------------------------------------------------------------------------------


def _rival(path: pathlib.Path) -> None:
    """The process of one call of vLLM."""
    from vllm import LLM, SamplingParams

    group = json.loads(path.read_text())
    llm = LLM(**group["engine"])
    rows = pathlib.Path(group["rows"])
    folder = rows.parent / rows.name.rpartition("-")[0].replace("rows", "pictures")
    paths = sorted(folder.glob("*.jpg"))[: group["num_rows"] + _WARM_UP_ROWS]
    params = SamplingParams(**group["sampling"], flat_logprobs=True, detokenize=False)
    content = [{"type": "image"}, {"type": "text", "text": QUESTION}]
    ids = llm.get_tokenizer().apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, return_dict=False
    )
    if group["way"] == "decoded":
        with ThreadPoolExecutor() as pool:
            pictures = list(pool.map(_decoded, paths))
        prompts = [{"prompt_token_ids": ids, "multi_modal_data": {"image": picture}} for picture in pictures]
        call: Any = llm.generate
    else:
        urls = [{"type": "image_url", "image_url": {"url": path.as_uri()}} for path in paths]
        prompts = [[{"role": "user", "content": [url, content[1]]}] for url in urls]  # type: ignore[misc]
        call = llm.chat
    call(prompts[group["num_rows"] :], params, use_tqdm=False)
    began = time.monotonic()
    outputs = call(prompts[: group["num_rows"]], params, use_tqdm=False)
    seconds = time.monotonic() - began
    num_output = sum(len(output.outputs[0].token_ids) for output in outputs)
    figures = {
        "num_rows": len(outputs),
        "began": began,
        "seconds": round(seconds, 2),
        "num_output_tokens": num_output,
        "num_prompt_tokens": sum(len(output.prompt_token_ids) for output in outputs),
        "output_tokens_per_s": round(num_output / seconds, 1),
        **_costs(llm.llm_engine.renderer, ids, paths[:_MEASURED_ROWS]),
    }
    pathlib.Path(group["result"]).write_text(json.dumps(figures))


def _decoded(path: pathlib.Path) -> Image.Image:
    return Image.open(path).convert("RGB")


def _costs(renderer: Any, ids: list[int], paths: list[pathlib.Path]) -> dict[str, Any]:
    """Processor time of this thread for a picture, and the bytes of its tensors."""
    began = time.thread_time()
    pictures = [_decoded(path) for path in paths]
    decoded = time.thread_time()
    for picture in pictures:
        [made] = renderer.render_cmpl([{"prompt_token_ids": ids, "multi_modal_data": {"image": picture}}],
                                      skip_mm_cache=True)  # fmt: skip
    rendered = time.thread_time()
    return {
        "decode_ms": round(1e3 * (decoded - began) / len(paths), 2),
        "render_ms": round(1e3 * (rendered - decoded) / len(paths), 2),
        "picture_bytes": sum(field.data.nbytes for field in made["mm_kwargs"]["image"][0].values()),
    }


if __name__ == "__main__":
    main()
