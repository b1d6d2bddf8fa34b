# %% [markdown]
# # How sure is the model, from token to token?
#
# Reads a job with `sampling.logprobs: 20` (`jobs/logprobs.yaml`) and computes the entropy of the next token at each
# position of the output. The k most likely tokens have most of the probability. The sum of the rest is known, but not
# how it is distributed. So the entropy is known only between two bounds.
#
#     python docs/examples/topk_entropy.py out/logprobs

# %%
import sys

import numpy as np

import batchinf

results = batchinf.open(sys.argv[1] if len(sys.argv) > 1 else "out/logprobs")
top = results.ragged("top_logprobs")  # values [num_tokens, k], in the order of rank
print(results)

# %%
logprobs = top.values.astype(np.float64)
# -inf is a token with probability 0: its share of the entropy is 0, not NaN.
shares = np.exp(logprobs)
of_top = -np.sum(np.where(shares > 0, shares * logprobs, 0.0), axis=1)
rest = np.clip(1.0 - shares.sum(axis=1), 0.0, 1.0)
# Lower bound: no token beyond rank k is more likely than rank k, so the rest covers at least rest / p_k tokens. Upper
# bound: the rest is spread evenly over the vocabulary, here 2**17 tokens.
least_likely = np.maximum(shares[:, -1], 1e-12)
with np.errstate(divide="ignore", invalid="ignore"):
    lower = of_top + np.where(rest > 0, -rest * np.log(np.minimum(least_likely, 1.0)), 0.0)
    upper = of_top + np.where(rest > 0, -rest * np.log(rest / 2**17), 0.0)
lower = np.minimum(lower, upper)

# %% [markdown]
# The entropy by position: the first tokens are usually less certain than the later ones.

# %%
position = np.arange(len(lower)) - np.repeat(top.offsets[:-1], top.lengths)
edges = [0, 1, 2, 4, 8, 16, 32, 64, 128]
print(f"{'position':>12} {'tokens':>8} {'mass of top k':>14} {'entropy, nats':>20}")
for first, last in zip(edges, [*edges[1:], np.iinfo(np.int64).max], strict=True):
    here = (position >= first) & (position < last)
    if here.any():
        name = f"{first}" if last == first + 1 else f"{first}–{min(last - 1, int(position.max()))}"
        between = f"{lower[here].mean():.3f} to {upper[here].mean():.3f}"
        print(f"{name:>12} {here.sum():>8,} {1 - rest[here].mean():>14.4f} {between:>20}")
