# %% [markdown]
# # Which sources does the model know?
#
# Reads a job with `task: score` and `input.text_column` that keeps the column with the source (`jobs/score.yaml`). It
# prints perplexity and bits per byte of each source. Logprobs are summed over a source before the division, so each
# token counts the same. The mean of the texts' perplexities would be another number.
#
#     python docs/examples/perplexity_by_source.py out/score language

# %%
import sys

import pyarrow.compute as pc

import batchinf

results = batchinf.open(sys.argv[1] if len(sys.argv) > 1 else "out/score")
source = sys.argv[2] if len(sys.argv) > 2 else "language"
print(results)
if results.spec["score"]["add_bos_token"] is not False:
    print("where the tokenizer adds a BOS, it counts as a scored token; score.add_bos_token: false leaves it out")

# %%
table = results.table([source, "logprob_sum", "num_tokens", "num_bytes", "error_type"])
print(f"{table.num_rows - table['error_type'].null_count:,} of {table.num_rows:,} rows have no score")
sums = (
    table.filter(table["error_type"].is_null())
    .group_by(source)
    .aggregate([("logprob_sum", "sum"), ("num_tokens", "sum"), ("num_bytes", "sum"), ("logprob_sum", "count")])
)

# %%
negative = pc.negate(sums["logprob_sum_sum"])
sums = sums.append_column("perplexity", pc.exp(pc.divide(negative, sums["num_tokens_sum"])))
# Bits per byte do not depend on the tokenizer, so models with different tokenizers can be compared.
sums = sums.append_column("bits_per_byte", pc.divide(pc.divide(negative, sums["num_bytes_sum"]), pc.ln(2.0)))
print(f"{source:>16} {'texts':>8} {'tokens':>10} {'perplexity':>12} {'bits a byte':>12}")
for row in sums.sort_by("perplexity").to_pylist():
    print(
        f"{row[source]!s:>16} {row['logprob_sum_count']:>8,} {row['num_tokens_sum']:>10,} "
        f"{row['perplexity']:>12.2f} {row['bits_per_byte']:>12.3f}"
    )
