"""What vLLM's own tests of `run-batch`, logprobs and sampling hold, and which test here holds the same.

The cases are in this project's words. A case without a test has its reason.
"""

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[1]
_COMMAND = "tests/commands/test_run_batch.py::test_the_command_itself_on_vllm"
_VECTORS = "tests/engines/test_vllm_one_batch_file.py::test_with_a_model_of_embeddings"
_CALLS = "tests/engines/test_vllm_one_batch_file.py::test_with_a_model_that_generates"
_ANSWERS = "tests/engines/test_vllm_reasoning.py::test_the_answers_are_those_of_vllm"
_FLAGS = "tests/commands/test_run_batch.py::test_flags_are_read_as_vllm_reads_them"
_REFUSED = "tests/commands/test_run_batch.py::test_flags_that_are_refused"
_FIELDS = "tests/prompts/test_batch_files.py::test_each_field_on_real_vllm"
_AUDIO = "no test: batchinf runs texts; a line with audio is an error row, as in the first case of an unknown URL"
_UPLOAD = "no test: batchinf writes a file, and `curl -T` sends it; such a URL is refused"
_INSIDE = "no test: how vLLM's server is put together; batchinf has no such part"
_SCORING = "tests/engines/test_vllm_one_batch_file.py::test_with_a_cross_encoder"

RUN_BATCH = {
    "an empty file gives an empty file": "tests/commands/test_run_batch.py::test_an_empty_file_has_no_answers",
    "each chat is answered, in a form that the openai package reads": _COMMAND,
    "answers have the custom_id of their line": _COMMAND,
    "a model that is not served is an error of its line": _COMMAND,
    "an unknown URL is an error of its line": _COMMAND,
    "a line that is no JSON (there the end of the run, here an error row)": _COMMAND,
    "a line without a body (there the end of the run, here an error row)": _COMMAND,
    "blank lines are passed over": _COMMAND,
    "a stream is an error of its line": _COMMAND,
    "a value that sampling does not take is an error of its line": _COMMAND,
    "the answer follows a JSON schema": _COMMAND,
    "the answer follows a regex or is a choice": _COMMAND,
    "the answer is a JSON object": _FIELDS,
    "logprobs and their alternatives": _COMMAND,
    "embeddings of one text and of several": _VECTORS,
    "embeddings as base64": _VECTORS,
    "embeddings of fewer dimensions": _VECTORS,
    "embeddings of conversations": _VECTORS,
    "lines of the other kind of engine are errors": _VECTORS,
    "reasoning apart from the answer": _ANSWERS,
    "reasoning that is left out": _ANSWERS,
    "a text that ends while it thinks": _ANSWERS,
    "tools that the model may call": _CALLS,
    "a tool that it must call": _CALLS,
    "the one tool that it must call": _CALLS,
    "calls and results in the messages": _CALLS,
    "lines from a pipe": "tests/commands/test_run_batch.py::test_lines_from_a_pipe_are_kept_beside_the_answers",
    "lines from a URL": "tests/source/test_remote_files.py::test_every_format_over_http_is_what_the_files_are",
    "answers to a URL": _UPLOAD,
    "flags of the engine": _FLAGS,
    "flags of metrics (here refused: no server runs)": _REFUSED,
    "flags of the chat template and of names of the model":
        "tests/commands/test_run_batch.py::test_flags_go_to_the_fields_of_the_spec",
    "scores of a pair": _SCORING,
    "scores of a text and several": _SCORING,
    "ranks of documents": _SCORING,
    "ranks of the first few documents": _SCORING,
    "transcription of an audio file": _AUDIO,
    "translation of an audio file": _AUDIO,
    "transcription of audio at a URL": _AUDIO,
    "audio of domains that are not allowed": _AUDIO,
    "an upload by PUT, with a folder for its parts": _UPLOAD,
    "an upload that fails and is tried again": _UPLOAD,
    "the registry of endpoints": _INSIDE,
    "wrappers of endpoints, and the bar of progress": _INSIDE,
}  # fmt: skip

LOGPROBS = {
    "of output tokens": "tests/engines/test_vllm_engine.py::test_logprobs_equal_transformers",
    "of prompt tokens": "tests/engines/test_vllm_engine.py::test_prompt_logprobs_are_not_read_from_the_cache",
    "of both, of neither, and of one alone in one batch":
        "tests/engines/test_vllm_engine.py::test_requests_of_any_shape_share_a_batch",
    "of several numbers in one batch": "tests/engines/test_vllm_engine.py::test_several_positions_and_chunks_at_a_time",
    "none, if none are asked for": "tests/engines/test_vllm_engine.py::test_requests_of_any_shape_share_a_batch",
    "of the token alone, with 0": "tests/engines/test_vllm_engine.py::test_requests_of_any_shape_share_a_batch",
    "more than the engine gives are refused":
        "tests/engines/test_vllm_engine.py::test_refused_requests_leave_the_engine_unharmed",
    "of the whole vocabulary":
        "tests/engines/test_vllm_logits.py::test_logprobs_are_the_log_softmax_of_all_of_the_vocabulary",
    "raw and processed, as logprobs and as logits":
        "tests/engines/test_vllm_logits.py::test_modes_of_logprobs_and_tokens_of_ones_own_choice",
    "of chosen tokens": "tests/engines/test_vllm_logits.py::test_modes_of_logprobs_and_tokens_of_ones_own_choice",
    "raw ones where a structure masks the others":
        "tests/engines/test_vllm_worker.py::test_raw_scores_of_a_label_are_the_models_own",
    "in flat form as in lists": "tests/engines/test_vllm_engine.py::test_flat_logprobs_are_the_same",
    "of a prompt that is in the prefix cache":
        "tests/engines/test_vllm_engine.py::test_prompt_logprobs_are_not_read_from_the_cache",
    "of a prompt of one token": "tests/engines/test_vllm_engine.py::test_prompt_of_one_token_has_no_prompt_logprobs",
    "ranks and the sum": "tests/engines/test_vllm_engine.py::test_logprobs_equal_transformers",
    "texts of tokens that hold a part of a character":
        "tests/export/test_export.py::test_a_character_is_the_text_of_the_token_that_completes_it",
    "with a draft model": "no test: vLLM's CPU build has no draft models; the V2 runner of GPUs is held by benchmarks",
}  # fmt: skip

SAMPLING = {
    "several answers to a prompt": "tests/engines/test_vllm_engine.py::test_samples_of_a_row_differ_by_their_seeds",
    "penalties": "tests/engines/test_vllm_sampling_fields.py::test_penalties",
    "stop texts": "tests/engines/test_vllm_engine.py::test_stop_strings_equal_llm_generate",
    "stop tokens": "tests/engines/test_vllm_engine.py::test_stop_token_is_kept_and_makes_no_text",
    "bad words": "tests/engines/test_vllm_sampling_fields.py::test_bad_words",
    "allowed tokens": "tests/engines/test_vllm_sampling_fields.py::test_allowed_token_ids",
    "a bias": "tests/engines/test_vllm_sampling_fields.py::test_logit_bias",
    "seeds": "tests/engines/test_vllm_engine.py::test_seeded_samples_equal_llm_generate_in_any_batch",
    "a number of tokens at least and at most": _FIELDS,
    "without a text": "no test: each text is decoded; `output.include_token_ids` stores the tokens beside it",
}


@pytest.mark.parametrize(("cases", "number", "least"), [(RUN_BATCH, 44, 24), (LOGPROBS, 17, 16), (SAMPLING, 10, 9)])
def test_each_case_has_its_test_or_its_reason(cases: dict[str, str], number: int, least: int) -> None:
    assert len(cases) == number
    named = [value for value in cases.values() if not value.startswith("no test")]
    assert len(named) >= least
    for value in named:
        file, _, name = value.partition("::")
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, value
    assert all(value.partition(": ")[2] for value in cases.values() if value.startswith("no test"))
