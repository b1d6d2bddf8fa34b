"""What becomes of each field of a request's body in a batch file. Readers of lines and a page of the docs have it."""

import difflib
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from batchinf.prompts.openai.lines import (
    CHAT_URL,
    COMPLETIONS_URL,
    EMBEDDINGS_URL,
    RERANK_URL,
    SCORE_URL,
    show,
)

# The URLs by their letters in the table.
_URLS = {
    "C": CHAT_URL,
    "T": COMPLETIONS_URL,
    "E": EMBEDDINGS_URL,
    "S": SCORE_URL,
    "K": RERANK_URL,
}


Use = Literal["used", "without effect", "refused"]
_OF_THE_ROW = "the row's own, in place of the spec's"


@dataclass(frozen=True, slots=True)
class Fields:
    """Fields of which the same becomes."""

    use: Use
    urls: tuple[str, ...]
    names: tuple[str, ...]
    note: str
    """How they are used, why they change no answer, or why they are refused."""
    accepted: tuple[Any, ...] = ()
    """Values of refused fields that ask for nothing."""


def _fields(use: Use, urls: str, names: str, note: str = _OF_THE_ROW, *, accepted: Sequence[Any] = ()) -> Fields:
    """urls: their letters. names: with spaces between them."""
    return Fields(
        use=use,
        urls=tuple(_URLS[url] for url in urls),
        names=tuple(names.split()),
        note=note,
        accepted=tuple(accepted),
    )


_used = functools.partial(_fields, "used")
_without_effect = functools.partial(_fields, "without effect")
_refused = functools.partial(_fields, "refused")
_OF_JOB = "an engine or a job has one"

FIELDS: tuple[Fields, ...] = (
    # The prompt
    _used("CTESK", "model", "left out, the job's model, or a name in `engine.served_model_name`"),
    _used("C", "messages", "through the chat template; texts, and images if the spec has `input.images`"),
    _used("E", "messages", "through the chat template; texts only"),
    _used("T", "prompt", "a text, the token ids of one, or a list of several"),
    _used("S", "text_1 text_2 queries documents items data_1 data_2", "the two sides of the score: texts"),
    _used("K", "query documents", "texts"),
    _used("K", "top_n", "how many documents are ranked"),
    _used("SK", "max_tokens_per_query max_tokens_per_doc", "each text is cut to so many tokens"),
    _used("SK", "chat_template_kwargs instruction", "variables of `input.chat_template`"),
    _used("E", "input", "one or several texts, their token ids, or conversations"),
    _used("CE", "chat_template_kwargs", "variables of the chat template; a warning names those that it never reads"),
    _used("CE", "add_generation_prompt continue_final_message", "the end of the prompt"),
    _used("C", "documents", "given to the chat template, which must have a variable `documents`"),
    _used("C", "reasoning_effort verbosity", "variables of the chat template"),
    _used("CTESK", "truncate_prompt_tokens truncation_side", "the prompt is cut as by vLLM's server"),
    _used("E", "add_special_tokens dimensions", "see [Embed a batch file](how-to/embed.md#embed-a-batch-file)"),
    # The text
    _used("CT", "max_tokens"),
    _used("C", "max_completion_tokens", "the same as `max_tokens`"),
    _used("CT", "temperature top_p top_k min_p", "`top_k` -1 is all tokens, like 0"),
    _used(
        "CT",
        "seed",
        "used as it is: an equal prompt with an equal seed gives an equal text, wherever the line stands; sample i "
        "of `n` has the seed plus i. -1 is no seed. A line without one has a hash of the job's seed and the row",
    ),
    _used("CT", "presence_penalty frequency_penalty repetition_penalty logit_bias stop stop_token_ids"),
    _used("CT", "min_tokens allowed_token_ids bad_words thinking_token_budget repetition_detection"),
    _used("CT", "response_format structured_outputs"),
    _used("C", "tools tool_choice parallel_tool_calls", "functions only; see [Call tools](how-to/tools.md)"),
    # The form of the answer
    _used("CT", "logprobs", "no more than `sampling.logprobs` stores"),
    _used("C", "top_logprobs", "no more than `sampling.logprobs` stores"),
    _used("CT", "prompt_logprobs", "no more than `sampling.prompt_logprobs` stores"),
    _used("C", "include_reasoning", "false leaves the reasoning out of the exported answer"),
    _used(
        "CT",
        "return_token_ids",
        "the exported answer has those of the output, if the job stores `token_ids`; vLLM's server also gives those of "
        "the prompt",
    ),
    _used("E", "encoding_format", "`float` or `base64` in the exported answer"),
    _used("CT", "n", "samples of each prompt"),
    _used("CT", "ignore_eos skip_special_tokens include_stop_str_in_output", "must be the job's"),
    _used("E", "use_activation", "must be the job's `pooling.normalize`"),
    _used("SK", "use_activation", "of a cross-encoder: the row's own, in place of the spec's"),
    _used("K", "return_documents", "false leaves the texts out of the exported answer"),
    # Without effect
    _without_effect(
        "CTESK",
        "user metadata store service_tier safety_identifier request_id session_id user_security_context",
        "they say who asks",
    ),
    _without_effect(
        "CTESK",
        "priority cache_salt prompt_cache_key prompt_cache_retention prompt_cache_options stream_interval",
        "they change the order or the speed of requests",
    ),
    _without_effect("C", "prediction", "a guess that makes OpenAI's servers faster"),
    _without_effect("CT", "stream_options", "a batch has no streams"),
    _without_effect("CT", "length_penalty early_stopping", "only beam search reads them, which is refused"),
    _without_effect(
        "CTESK", "mm_processor_kwargs media_io_kwargs", "texts have no images; beside images they are refused"
    ),
    _without_effect(
        "CT", "mm_payload return_mm_kwargs return_token_offsets", "only vLLM's rendering server reads them"
    ),
    _without_effect("CT", "routed_experts_prompt_start", "engines return no experts"),
    _without_effect(
        "CTESK",
        "timeout request_timeout max_retries num_retries extra_headers extra_query api_version",
        "clients' own settings of a connection",
    ),
    # Refused
    _refused("CT", "stream", "a batch has no streams", accepted=[False]),
    _refused("CT", "use_beam_search", "vLLM's engine has no beam search", accepted=[False]),
    _refused("CT", "best_of", "vLLM's engine has no `best_of`; `n` gives several answers", accepted=[1]),
    _refused("C", "echo", "the answer of a conversation has no prompt before it", accepted=[False]),
    _refused(
        "T",
        "suffix",
        "only models for which vLLM's server writes the marks of a gap take it; write the model's own marks into the "
        "prompt",
        accepted=[""],
    ),
    _refused("C", "add_special_tokens", "a chat template writes them itself", accepted=[False]),
    _refused("T", "add_special_tokens", "the tokenizer adds them to a text", accepted=[True]),
    _refused("CTE", "watermarking", "batchinf sets no watermark", accepted=[False]),
    _refused("CT", "spaces_between_special_tokens detokenize", "there is only the default", accepted=[True]),
    _refused("CT", "logprob_token_ids", f"{_OF_JOB}: set `sampling.logprob_token_ids`", accepted=[[]]),
    _refused("CT", "guided_whitespace_pattern", f"{_OF_JOB}: set `engine.structured_outputs_config`"),
    _refused("CT", "guided_decoding_backend", f"{_OF_JOB}: set `engine.structured_outputs_config`"),
    _refused("CE", "chat_template", "a job has one template: set `input.chat_template`"),
    _refused("C", "return_prompt_text", "`output.include_prompt` stores the prompts", accepted=[False]),
    _refused("T", "tools", "completions have no tools", accepted=[[]]),
    _refused("T", "tool_choice", "completions have no tools", accepted=["none", "auto"]),
    _refused("T", "functions", "completions have no tools", accepted=[[]]),
    _refused("T", "function_call", "completions have no tools", accepted=["none"]),
    _refused("T", "parallel_tool_calls", "completions have no tools", accepted=[True, False]),
    _refused("C", "modalities", "only texts are made", accepted=[["text"]]),
    _refused("C", "audio", "only texts are made"),
    _refused("C", "web_search_options data_sources", "nothing is searched", accepted=[[]]),
    _refused("C", "moderation", "nothing is moderated"),
    _refused("T", "prompt_embeds", "prompts are texts or token ids"),
    _refused("CT", "vllm_xargs", "they are for extensions of vLLM", accepted=[{}]),
    _refused("CT", "kv_transfer_params ec_transfer_params", "engines do not share a request", accepted=[{}]),
    _refused("C", "enable_thinking", "write it into `chat_template_kwargs`"),
    _refused("CTESK", "extra_body", "openai's Python argument: write its fields into the body itself", accepted=[{}]),
    _refused("ESK", "padding", "inputs are not padded", accepted=["do_not_pad", False]),
    _refused("E", "embed_dtype", "vectors are float32", accepted=["float32"]),
    _refused("E", "endianness", "base64 is little-endian", accepted=["native", "little"]),
    _refused(
        "CT",
        "guided_json guided_regex guided_choice guided_grammar",
        "write `structured_outputs` with `json`, `regex`, `choice` or `grammar`",
    ),
    _refused("C", "functions function_call", "write `tools` and `tool_choice`", accepted=[[], "none", "auto"]),
    _refused("T", "echo", "`output.include_prompt` stores the prompts beside the answers", accepted=[False]),
    _refused("CT", "return_tokens_as_token_ids", "`return_token_ids` gives the ids of the output", accepted=[False]),
)


@functools.cache
def fields_of(url: str) -> dict[str, Fields]:
    """The entry of each field of bodies with this URL."""
    return {name: fields for fields in FIELDS if url in fields.urls for name in fields.names}


def objection(url: str, name: str, value: object) -> str | None:
    """Why a field that nothing has used cannot be left out; None if it changes no answer."""
    known = fields_of(url)
    fields = known.get(name)
    got = f"got {show(value)}, which is not supported"
    if fields is None:
        close = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
        meant = f"; did you mean {close[0]}?" if close else ""
        return f"{got}: {url} has no such field{meant}"
    if fields.use == "without effect" or any(value == it and type(value) is type(it) for it in fields.accepted):
        return None
    return f"{got}: {fields.note.replace('`', '')}"
