# %% [markdown]
# # When the model is 80 % sure, is it right 80 % of the time?
#
# Reads a job with `task: score` over questions with choices and answers (`jobs/multiple_choice.yaml`). It compares the
# probability of the model's best choice with how often that choice is right.
#
#     python docs/examples/calibration.py out/multiple_choice

# %%
import sys

import numpy as np
import pyarrow.compute as pc

import batchinf

results = batchinf.open(sys.argv[1] if len(sys.argv) > 1 else "out/multiple_choice")
columns = ["choice_logprob_sums", "choice_num_bytes", "best", "best_per_token", "best_per_byte", "answer", "error_type"]
table = results.table(columns)
has_answer = pc.is_valid(table["answer"])
table = table.filter(pc.and_(pc.is_null(table["error_type"]), has_answer))
answer = table["answer"].to_numpy()
print(results)

# %%
for name in ("best", "best_per_token", "best_per_byte"):
    right = table[name].to_numpy() == answer
    error = np.sqrt(right.mean() * (1 - right.mean()) / max(1, len(right) - 1))
    print(f"{name:>16}: {right.mean():.3f} ± {error:.3f} of {len(right):,} right")

# %% [markdown]
# The probabilities of the choices are a softmax over their logprobs: over the sums, which suits labels, and over the
# logprobs per byte, which suits answers of different lengths. Long choices have low sums only because of their length.

# %%
sums = table["choice_logprob_sums"].to_pylist()
num_bytes = table["choice_num_bytes"].to_pylist()


def calibration(is_per_byte: bool) -> None:
    """Print how often the model is right at each level of its confidence."""
    confidence, is_right = np.zeros(len(sums)), np.zeros(len(sums), bool)
    for row, (own_sums, own_bytes, own_answer) in enumerate(zip(sums, num_bytes, answer, strict=True)):
        scores = np.array(own_sums) / (np.array(own_bytes) if is_per_byte else 1)
        shares = np.exp(scores - scores.max())
        confidence[row] = shares.max() / shares.sum()
        is_right[row] = scores.argmax() == own_answer
    edges = np.quantile(confidence, np.linspace(0, 1, 6))
    places = np.clip(np.searchsorted(edges, confidence, side="right") - 1, 0, 4)
    print(f"{'confidence':>16} {'questions':>10} {'mean':>8} {'right':>8}")
    expected_error = 0.0
    for place in range(5):
        here = places == place
        if here.any():
            mean, right = confidence[here].mean(), is_right[here].mean()
            expected_error += here.mean() * abs(mean - right)
            print(f"{edges[place]:>7.3f}–{edges[place + 1]:<8.3f} {here.sum():>10,} {mean:>8.3f} {right:>8.3f}")
    print(f"expected calibration error: {expected_error:.3f}")


# %%
print("\nprobabilities from the sums (best):")
calibration(is_per_byte=False)
print("\nprobabilities from the logprobs per byte (best_per_byte):")
calibration(is_per_byte=True)
