"""How far the outputs of two jobs over the same rows agree. Gives a model weights in which attention matters.

    python benchmarks/same_outputs.py --make-weights llama-3.2-1b --out results
    python benchmarks/run.py bare-lognormal --shape llama-3.2-1b --rows 3000 --rivals= --out results \
        --job-spec '{"model": {"load_format": "auto"}}' \
        --compare 'kernel={"engine": {"worker_cls": "batchinf.engines.vllm.kernels.attention.DecodingWorker"}}' \
        --compare 'flash={"engine": {"worker_cls": null}}' \
        --compare 'other={"engine": {"worker_cls": null, "max_num_seqs": 1500}}'
    python benchmarks/same_outputs.py results/bare-lognormal/batchinf-kernel-1 results/bare-lognormal/batchinf-flash-1
    python benchmarks/same_outputs.py --rounding qwen3-0.6b --out results      # what rounding alone does; on a CPU
    python benchmarks/same_outputs.py --make-texts qwen3-0.6b --out results    # results/texts.parquet

vLLM's dummy weights are so small that attention changes nothing. Rounding alone makes two jobs choose different tokens
sooner or later, so the third job above shows how soon. The jobs need `logprobs`. `--rounding` scores texts with two
attentions of PyTorch in bfloat16, and with one in float32. `--make-texts` writes texts of many lengths; a few are
longer than a step.
"""

import argparse
import itertools
import pathlib
import random

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors.torch import save_file
from shapes import SHAPES, make_model, words
from transformers import AutoConfig, AutoModelForCausalLM

import batchinf

_SPREAD = 0.08  # standard deviation of the weights
_TEXT_LENGTHS = (10, 20, 20, 40, 100, 100, 300)
# Of the texts that are written: a share of them, and their fewest and most tokens.
_TEXT_SHARES = ((0.4, 1, 40), (0.5, 41, 700), (0.0975, 701, 3500), (0.0025, 16_500, 24_000))
_NUM_TEXTS = 1600


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", nargs="*", metavar="job", help="two finished jobs")
    parser.add_argument("--make-weights", choices=sorted(SHAPES), metavar="SHAPE", help="write this model, and end")
    parser.add_argument("--rounding", choices=sorted(SHAPES), metavar="SHAPE", help="score with this model, and end")
    parser.add_argument("--make-texts", choices=sorted(SHAPES), metavar="SHAPE", help="write texts for it, and end")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("results"))
    args = parser.parse_args()
    if args.make_weights:
        make_weights(args.make_weights, args.out / "models" / args.make_weights)
    elif args.rounding:
        print(rounding(args.rounding, args.out / "models" / args.rounding))
    elif args.make_texts:
        make_texts(args.make_texts, args.out / "texts.parquet")
    elif len(args.jobs) == 2:
        print(compared(*args.jobs))
    else:
        parser.error(f"got {len(args.jobs)} jobs; give two, or another option with a SHAPE")


def make_weights(shape: str, folder: pathlib.Path) -> None:
    """Write a model with random weights from a normal distribution."""
    make_model(shape, folder)
    config = AutoConfig.from_pretrained(folder)
    config.initializer_range = _SPREAD
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    weights = {name: value.cpu().contiguous() for name, value in model.state_dict().items() if name not in tied}
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})


def make_texts(shape: str, path: pathlib.Path) -> None:
    """Write rows `id` and `prompt`, in a random order of lengths."""
    chance = random.Random(0)
    lengths = [
        chance.randint(fewest, most) for share, fewest, most in _TEXT_SHARES for _ in range(round(share * _NUM_TEXTS))
    ]
    chance.shuffle(lengths)
    vocabulary = words(SHAPES[shape]["vocab_size"])
    texts = [" " + " ".join(chance.choices(vocabulary, k=length)) for length in lengths]
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"id": range(len(texts)), "prompt": texts}), path)


def rounding(shape: str, folder: pathlib.Path) -> str:
    """The largest differences of a text's logprobs between two attentions in bfloat16, and from float32."""
    if not (folder / "model.safetensors").exists():
        make_weights(shape, folder)
    chance = torch.Generator().manual_seed(0)
    texts = [torch.randint(SHAPES[shape]["vocab_size"], (1, length), generator=chance) for length in _TEXT_LENGTHS]
    found = {}
    for dtype, attention in ((torch.bfloat16, "eager"), (torch.bfloat16, "sdpa"), (torch.float32, "sdpa")):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=attention).eval()
        with torch.inference_mode():
            logprobs = [model(ids).logits[0, :-1].float().log_softmax(-1) for ids in texts]
        scores = [each.gather(1, ids[0, 1:, None]) for each, ids in zip(logprobs, texts, strict=True)]
        found[f"{str(dtype).removeprefix('torch.')} {attention}"] = scores
    names = list(found)
    lines = [f"standard deviation of the logprobs: {torch.cat(found[names[-1]]).std():.2f}"]
    for one, other in itertools.combinations(names, 2):
        far = [(a - b).abs().max().item() for a, b in zip(found[one], found[other], strict=True)]
        lines.append(f"{one} and {other}: {', '.join(f'{each:.2f}' for each in far)}")
    return "\n".join(lines)


def compared(job: str, other: str) -> str:
    """How many tokens are equal until the first that differs, and by how much their logprobs differ."""
    columns = ["id", "token_ids", "logprobs"]
    left, right = (
        {row["id"]: row for row in batchinf.open(folder).table(columns).to_pylist()} for folder in (job, other)
    )
    lengths, differences = [], []
    for name in left.keys() & right.keys():
        one, two = left[name], right[name]
        if not one["token_ids"] or not two["token_ids"]:
            continue
        pairs = zip(one["token_ids"], two["token_ids"], strict=False)
        shorter = min(len(one["token_ids"]), len(two["token_ids"]))
        equal = next((place for place, (a, b) in enumerate(pairs) if a != b), shorter)
        lengths.append(equal)
        if equal:
            differences.append(np.abs(np.subtract(one["logprobs"][:equal], two["logprobs"][:equal])).max())
    quartiles, far = np.percentile(lengths, [25, 50, 75]), np.percentile(differences, [50, 99, 100])
    return (
        f"{len(lengths):,} rows; equal tokens, quartiles: {quartiles.round(1).tolist()}; largest difference of a row's "
        f"logprobs, median, 99 %, all: {far.round(3).tolist()}"
    )


if __name__ == "__main__":
    main()
