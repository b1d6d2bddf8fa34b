"""Writes what `LLM.generate` gives for prompts, as a user would call it, for `test_end_to_end.py`."""

import json
import pathlib
import sys

from vllm import LLM, SamplingParams


def main() -> None:
    prompts, sampling, out, model = sys.argv[1:]
    llm = LLM(model, dtype="float32", enforce_eager=True, max_model_len=512)
    rows = []
    for output in llm.generate(json.loads(prompts), SamplingParams(**json.loads(sampling)), use_tqdm=False):
        [completion] = output.outputs
        rows.append(
            {
                "text": completion.text,
                "token_ids": list(completion.token_ids),
                "finish_reason": completion.finish_reason,
                "stop_reason": None if completion.stop_reason is None else str(completion.stop_reason),
                "prompt_token_ids": list(output.prompt_token_ids),
                "cumulative_logprob": completion.cumulative_logprob,
                "logprobs": [
                    {token: (entry.logprob, entry.rank) for token, entry in position.items()}
                    for position in completion.logprobs
                ],
            }
        )
    pathlib.Path(out).write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
