# %% [markdown]
# # A teacher's logits for distillation
#
# Reads a job with `task: logits`. For each stored position it gives the teacher's distribution at a temperature, cut to
# the most likely tokens, as a training loop needs it. `jobs/logits.yaml` stores the last position of each prompt; with
# `positions: all` it stores every position. Logits are read a few rows at a time, so the job may be of any size.
#
#     batchinf run jobs/logits.yaml --set logits.positions=all --set output.path=out/teacher
#     python docs/examples/teacher_logits.py out/teacher

# %%
import sys
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

import batchinf

TEMPERATURE, K = 2.0, 64
results = batchinf.open(sys.argv[1] if len(sys.argv) > 1 else "out/logits")
print(results)


# %%
def targets() -> Iterator[tuple[int, npt.NDArray[np.int32], npt.NDArray[np.int64], npt.NDArray[np.float32]]]:
    """For each row: `row_index`, positions [n], ids [n, K] and probabilities [n, K] of the K most likely tokens."""
    for rows in results.arrays("row_index", "logits", "positions"):
        for place, row_index in enumerate(rows["row_index"].tolist()):
            logits = rows["logits"][place].astype(np.float32) / TEMPERATURE  # [n, vocab_size]
            ids = np.argpartition(logits, -min(K, logits.shape[1]), axis=1)[:, -K:]
            shares = np.exp(logits - logits.max(axis=1, keepdims=True, initial=-np.inf))
            shares /= shares.sum(axis=1, keepdims=True)
            yield row_index, rows["positions"][place], ids, np.take_along_axis(shares, ids, axis=1)


# %% [markdown]
# How much of the teacher's distribution does the cut lose? If a student gets the probabilities of the K tokens
# unchanged, and the rest as one more class, the order of the K tokens is kept.

# %%
num_positions, kept = 0, []
for _row_index, positions, ids, shares in targets():
    assert ids.shape == shares.shape == (len(positions), shares.shape[1])
    num_positions += len(positions)
    kept.append(shares.sum(axis=1))
mass = np.concatenate(kept) if kept else np.zeros(0)
print(
    f"{num_positions:,} positions; the {K} likeliest tokens have {mass.mean():.3f} of the mass at T = {TEMPERATURE:g}"
)
print(f"in one position of a hundred they have less than {np.quantile(mass, 0.01):.3f}")
