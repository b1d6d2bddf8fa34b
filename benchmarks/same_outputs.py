"""How far the outputs of two jobs over the same rows agree. Gives a model weights in which attention matters.

    python benchmarks/same_outputs.py --make-weights llama-3.2-1b --out results
    python benchmarks/run.py bare-lognormal --shape llama-3.2-1b --rows 3000 --rivals= --out results \
        --job-spec '{"model": {"load_format": "auto"}}' \
        --compare 'chosen={}' --compare 'flash={"engine": {"worker_cls": null}}' \
        --compare 'other={"engine": {"worker_cls": null, "max_num_seqs": 1500}}'
    python benchmarks/same_outputs.py results/bare-lognormal/batchinf-chosen-1 results/bare-lognormal/batchinf-flash-1

vLLM's dummy weights are so small that attention changes nothing. Rounding alone makes two jobs choose different tokens
sooner or later, so the third job above shows how soon. The jobs need `logprobs`.
"""

import argparse
import pathlib

import numpy as np
import torch
from safetensors.torch import save_file
from shapes import SHAPES, make_model
from transformers import AutoConfig, AutoModelForCausalLM

import batchinf

_SPREAD = 0.08  # standard deviation of the weights


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", nargs="*", metavar="job", help="two finished jobs")
    parser.add_argument("--make-weights", choices=sorted(SHAPES), metavar="SHAPE", help="write this model, and end")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("results"))
    args = parser.parse_args()
    if args.make_weights:
        make_weights(args.make_weights, args.out / "models" / args.make_weights)
    elif len(args.jobs) == 2:
        print(compared(*args.jobs))
    else:
        parser.error(f"got {len(args.jobs)} jobs; give two, or --make-weights SHAPE")


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
