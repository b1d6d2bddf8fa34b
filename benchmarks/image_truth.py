"""How far a job over pictures is from transformers in float32, beside one with vLLM's own scheduler and worker.

    python benchmarks/image_truth.py --out results                # a GPU: the job in bfloat16
    python benchmarks/image_truth.py --rows 24 --out results      # on a CPU, in float32

The model is the small Idefics3 of the sample data, with random weights. Each row has one to three of the sample's
pictures, between texts of 4 to 100 words, and two samples of 24 tokens. The compared values are the logprobs of these
tokens and of the 5 most likely ones. The distances and their limits are those of `truth.py`. The script ends with exit
code 1 if the job is farther than these allow, or if a prompt has other tokens than transformers makes.
"""

import argparse
import json
import os
import pathlib
import random
import subprocess
import sys
from typing import Any

import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor
from truth import SIDES, Distance, Floats, row_distances, stored_logprobs

import batchinf

SAMPLES = pathlib.Path(__file__).resolve().parents[1] / "sample_data"
MODEL = SAMPLES / "tiny-vision"
_COLUMNS = ("row_index", "prompt_token_ids", "token_ids", "logprobs", "top_token_ids", "top_logprobs", "error_message")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=600)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("results"))
    args = parser.parse_args()
    folder = args.out.resolve() / "image-truth"
    folder.mkdir(parents=True, exist_ok=True)
    rows = make_rows(args.rows)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    reference = Reference()
    found = {side: distances(run(folder, side), rows, reference) for side in SIDES}
    job, noise = (Distance.of(found[side]) for side in SIDES)
    print("| rows | job, mean | worst | noise, mean | worst | job / noise |")
    print(f"| {len(rows)} | {job.mean:.2g} | {job.worst:.2g} | {noise.mean:.2g} | {noise.worst:.2g} | "
          f"{job.mean / noise.mean:.2f} |")  # fmt: skip
    sys.exit(not job.is_near(noise))


def make_rows(number: int) -> list[dict[str, Any]]:
    """Rows with the columns `prompt` and `photos`: paths of pictures, one for each `<image>` of the prompt."""
    chance = random.Random(0)
    pictures = sorted(str(path) for path in (SAMPLES / "pictures").glob("*.png"))
    words = "a bright round shape stands beside two dark lines and nobody knows which colour it has".split()
    rows = []
    for _ in range(number):
        photos = chance.choices(pictures, k=chance.randint(1, 3))
        texts = [" ".join(chance.choices(words, k=chance.randint(4, 100 // len(photos)))) for _ in photos]
        rows.append({"prompt": "".join(f"{text} <image> " for text in texts) + "so", "photos": photos})
    return rows


def run(folder: pathlib.Path, side: str) -> list[dict[str, Any]]:
    """Run the job with the settings of this side, and return its rows."""
    out = folder / side
    spec: dict[str, Any] = {
        "model": str(MODEL),
        "input": {
            "path": str(folder / "rows.jsonl"), "prompt_column": "prompt", "images_column": "photos",
            "apply_chat_template": False, "images": {"folders": [str(SAMPLES)]},
        },
        "sampling": {"max_tokens": 24, "n": 2, "temperature": 1.0, "ignore_eos": True, "logprobs": 5,
                     "bad_words": ["<image>"]},  # transformers would want an image for it
        "parallel": {"data_parallel_size": 1, "replicas_per_device": 1},
        "engine": {"max_model_len": 2048, "gpu_memory_utilization": 0.3, **SIDES[side]},
        "output": {"path": str(out), "include_prompt": True},
    }  # fmt: skip
    if not torch.cuda.is_available():
        spec["engine"].pop("gpu_memory_utilization")
    spec["model"] = {"name": str(MODEL), "dtype": "bfloat16" if torch.cuda.is_available() else "float32"}
    path = out.with_suffix(".yaml")
    path.write_text(json.dumps(spec))
    command = [sys.executable, "-m", "batchinf", "run", str(path), "--fresh"]
    subprocess.run(command, check=True, env={**os.environ, "VLLM_CACHE_ROOT": str(folder / f"cache-{side}")})
    rows: list[dict[str, Any]] = batchinf.open(out).table(list(_COLUMNS)).to_pylist()
    if errors := [row["error_message"] for row in rows if row["error_message"]]:
        sys.exit(f"{side}: {len(errors)} error rows: {errors[0]}")
    return rows


class Reference:
    """The model of transformers in float32."""

    def __init__(self) -> None:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._processor = AutoProcessor.from_pretrained(MODEL)
        options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
        self._model = AutoModelForImageTextToText.from_pretrained(MODEL, **options).to(self._device).eval()

    def logprobs(self, row: dict[str, Any], stored: dict[str, Any]) -> Floats:
        """[n, k + 1]: of the n output tokens of a stored row, and of the k most likely tokens at their places."""
        images = []
        for path in row["photos"]:
            with Image.open(path) as image:
                images.append(image.convert("RGB"))
        inputs = dict(self._processor(text=row["prompt"], images=[images], return_tensors="pt"))
        prompt = inputs["input_ids"][0].tolist()
        if prompt != stored["prompt_token_ids"]:
            sys.exit(f"row {stored['row_index']}: the prompt has other tokens than transformers makes")
        tokens = stored_logprobs(stored, is_text=False).tokens
        whole = torch.tensor([[*prompt, *stored["token_ids"]]])
        inputs |= {"input_ids": whole, "attention_mask": torch.ones_like(whole)}
        with torch.inference_mode():
            logits = self._model(**{name: value.to(self._device) for name, value in inputs.items()}).logits[0]
        after = logits[len(prompt) - 1 : -1].float().log_softmax(-1)
        logprobs: Floats = after.gather(1, torch.from_numpy(tokens).to(after.device)).cpu().numpy()
        return logprobs


def distances(found: list[dict[str, Any]], rows: list[dict[str, Any]], reference: Reference) -> list[float]:
    """Of each stored row."""
    own = [stored_logprobs(stored, is_text=False).logprobs for stored in found]
    return row_distances(own, [reference.logprobs(rows[stored["row_index"]], stored) for stored in found])


if __name__ == "__main__":
    main()
