# /// script
# requires-python = ">=3.11"
# dependencies = ["batchinf[cuda,buckets]"]
# ///
"""From a dataset of the hub to a dataset of the hub, on a rented GPU of Hugging Face: see docs/how-to/rented-gpu.md.

    hf buckets create USER/work
    export AWS_ACCESS_KEY_ID=… AWS_SECRET_ACCESS_KEY=…     # the bucket's S3 key, which the hub derives from a token
    hf jobs uv run --flavor l40sx1 --timeout 12h --attempts 5 --secrets HF_TOKEN --secrets AWS_ACCESS_KEY_ID \
        --secrets AWS_SECRET_ACCESS_KEY job.py USER

Further arguments are those of `--set`, such as `sampling.max_tokens=64`. A machine that is lost, or stopped by the
timeout, leaves its finished rows in the bucket: the next attempt, or the same command again, goes on there.
"""

import sys

import batchinf

user, *overrides = sys.argv[1:]
spec = {
    "model": "Qwen/Qwen3-8B",
    "input": {
        "path": f"{user}/prompts",
        "prompt_column": "prompt",
        "id_column": "id",
        "add_generation_prompt": True,
    },
    "sampling": {"temperature": 0.0, "max_tokens": 512},
    "engine": {"max_model_len": 4096},
    "output": {
        "path": f"hf://buckets/{user}/work/answers",
        "push_to_hub": f"{user}/answers",
    },
}
try:
    print(batchinf.run(spec, overrides=overrides))
except batchinf.BatchinfError as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(error.exit_code)
