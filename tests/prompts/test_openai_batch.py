"""OpenAI's batch format: every field of a body is honoured, or the row is an error that names it."""

from typing import Any

import pytest
from conftest import MODEL
from transformers import PreTrainedTokenizerFast

import jobs
from batchinf.base.errors import RowError
from batchinf.prompts.builder import PromptBuilder
from batchinf.prompts.encoder import load_tokenizer
from batchinf.prompts.openai.lines import url_of
from batchinf.prompts.openai.requests import BatchReader, RowRequest
from batchinf.source.rows import Row
from batchinf.spec.job import JobSpec
from batchinf.tasks.base import seed_of
from batchinf.tasks.registry import task_of

MESSAGES = [{"role": "user", "content": "Say hello."}]
TOOL = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object"}}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


LEAST: dict[str, Any] = {
    "model": {"name": "org/model"},
    "input": {"path": "batch.jsonl"},
    "output": {"path": "out"},
    "engine": {"served_model_name": ["gpt-4o-mini"]},
}


def reader(**sampling: Any) -> BatchReader:
    return BatchReader(JobSpec(**LEAST, sampling={"logprobs": 5, **sampling}))


def line(body: dict[str, Any], url: str = "/v1/chat/completions", **columns: Any) -> dict[str, Any]:
    return {"custom_id": "a", "method": "POST", "url": url, "body": body, **columns}


def chat(**body: Any) -> dict[str, Any]:
    return line({"model": "org/model", "messages": MESSAGES, **body})


def completion(**body: Any) -> dict[str, Any]:
    return line({"model": "gpt-4o-mini", "prompt": "Once", **body}, "/v1/completions")


def seeds_of(spec: JobSpec, *lines: dict[str, Any]) -> list[list[int | None]]:
    """The seeds of the requests of these lines."""
    rows = [Row(index, each) for index, each in enumerate(lines)]
    prompts = PromptBuilder(spec, load_tokenizer(str(MODEL), False), None).build(rows, 256)
    assert [prompt.error for prompt in prompts] == [None] * len(prompts)
    return [
        [request.seed for part in prompt.parts or (prompt,) for request in task_of(spec).expand(part, 256)]
        for prompt in prompts
    ]


def test_the_seed_of_a_line_is_used_as_it_is() -> None:
    spec = JobSpec(**{**LEAST, "input": {"path": "batch.jsonl", "format": "openai"}}, sampling={"seed": 3, "n": 2})
    two = line({"prompt": ["Once", "Twice"], "seed": 7}, "/v1/completions")
    same = [completion(seed=5), completion(seed=5)]
    assert seeds_of(spec, *same, completion(), two, completion(seed=2**63 - 1), completion(seed=-1)) == [
        [5, 6], [5, 6], [seed_of(3, 2, 0), seed_of(3, 2, 1)], [7, 8, 7, 8], [2**63 - 1, -(2**63)],
        [seed_of(-1, 5, 0), seed_of(-1, 5, 1)],
    ]  # fmt: skip
    assert seeds_of(spec, completion(seed=5, temperature=0, n=1)) == [[None]]


@pytest.mark.parametrize(
    ("body", "sampling"),
    [
        ({}, {}),
        ({"model": "gpt-4o-mini"}, {}),
        ({"max_tokens": 5}, {"max_tokens": 5}),
        ({"max_completion_tokens": 5}, {"max_tokens": 5}),
        ({"max_completion_tokens": 5, "max_tokens": 5}, {"max_tokens": 5}),
        ({"temperature": 0, "top_p": 0.5, "seed": 3}, {"temperature": 0, "top_p": 0.5, "seed": 3}),
        ({"stop": ["a", "b"], "presence_penalty": 1, "frequency_penalty": 0.5},
         {"stop": ["a", "b"], "presence_penalty": 1, "frequency_penalty": 0.5}),
        ({"top_k": 4, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 2, "stop_token_ids": [7]},
         {"top_k": 4, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 2, "stop_token_ids": [7]}),
        ({"response_format": {"type": "text"}}, {}),
        ({"response_format": {"type": "json_object"}}, {"structured_outputs": {"json": {"type": "object"}}}),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
         {"structured_outputs": {"json": SCHEMA}}),
        ({"logprobs": True, "top_logprobs": 5}, {}),
        ({"logprobs": True}, {}),
        ({"logprobs": False, "user": "me", "metadata": {"k": "v"}, "stream": False, "tools": []}, {}),
        ({"n": 3, "temperature": 1.0}, {"n": 3, "temperature": 1.0}),
        ({"temperature": None, "tools": None, "anything": None}, {}),
        # As clients spell out defaults.
        ({"model": None, "logprobs": False, "top_logprobs": 0, "tool_choice": "auto", "top_p": 1}, {"top_p": 1}),
        ({"length_penalty": 1.0, "use_beam_search": False, "include_reasoning": True, "priority": 3,
          "cache_salt": "x", "return_token_ids": True, "add_special_tokens": False}, {}),
        ({"include_reasoning": False, "length_penalty": 2.0, "stream_options": {"include_usage": True}}, {}),
        ({"top_k": -1}, {"top_k": 0}),
        ({"structured_outputs": {"regex": "a+"}}, {"structured_outputs": {"regex": "a+"}}),
    ],
)  # fmt: skip
def test_what_is_honoured(body: dict[str, Any], sampling: dict[str, Any]) -> None:
    assert reader().read(chat(**body)) == RowRequest(messages=MESSAGES, sampling=sampling)


def test_arguments_of_the_chat_template() -> None:
    body = {"chat_template_kwargs": {"enable_thinking": False}, "continue_final_message": True}
    assert reader().read(chat(**body)) == RowRequest(messages=MESSAGES, chat=body)


@pytest.mark.parametrize(
    ("body", "variables"),
    [
        ({"reasoning_effort": "low"}, {"reasoning_effort": "low", "enable_thinking": True}),
        ({"reasoning_effort": "none"}, {"reasoning_effort": "none", "enable_thinking": False}),
        ({"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}},
         {"reasoning_effort": "none", "enable_thinking": True}),
        ({"verbosity": "low"}, {"verbosity": "low"}),
    ],
)  # fmt: skip
def test_variables_of_the_chat_template(body: dict[str, Any], variables: dict[str, Any]) -> None:
    """Those of `reasoning_effort` are as in vLLM's server."""
    assert reader().read(chat(**body)) == RowRequest(messages=MESSAGES, chat={"chat_template_kwargs": variables})


@pytest.mark.parametrize("before", ["", "/v1", "/openai", "/openai/v1", "/openai/deployments/gpt-4o-mini"])
def test_the_urls_of_azure(before: str) -> None:
    after = "?api-version=2024-10-21" if before.startswith("/openai") else ""
    chat = line({"messages": MESSAGES}, f"{before}/chat/completions{after}")
    assert reader().read(chat) == RowRequest(messages=MESSAGES)
    assert reader().read(line({"prompt": "Once"}, f"{before}/completions")) == RowRequest(text="Once")


def test_the_deployment_of_azure_is_the_model() -> None:
    url = "/openai/deployments/gpt-5/chat/completions"
    assert jobs.or_error(reader().read, line({"messages": MESSAGES}, url)) == RowError(
        "unsupported_request",
        "url: the deployment: got 'gpt-5'; the job's model is 'org/model' or 'gpt-4o-mini': name it so, or list the "
        "name in engine.served_model_name",
    )
    assert reader().read(line({"messages": MESSAGES, "model": "org/model"}, url)) == RowRequest(messages=MESSAGES)


def test_a_row_cannot_leave_the_structure_of_the_job() -> None:
    found = jobs.or_error(
        reader(structured_outputs={"choice": ["a", "b"]}).read, chat(response_format={"type": "text"})
    )
    assert found == RowError(
        "unsupported_request", "body.response_format: got text, but all rows have sampling.structured_outputs"
    )


def test_completions() -> None:
    assert reader().read(completion(prompt=["Once"], add_special_tokens=True)) == RowRequest(text="Once")
    assert reader().read(completion(prompt=[[1, 2]])) == RowRequest(token_ids=[1, 2])
    assert reader().read(completion()) == RowRequest(text="Once")
    assert reader().read(completion(prompt=[1, 2], logprobs=3)) == RowRequest(token_ids=[1, 2])
    assert reader().read(completion(logprobs=False)) == RowRequest(text="Once")


def test_a_line_without_method_and_url_is_that_of_the_form_of_its_body() -> None:
    for whole in (chat(max_tokens=5), completion(seed=3)):
        short = {name: whole[name] for name in ("custom_id", "body")}
        assert reader().read(short) == reader().read(whole)
        assert url_of(short) == whole["url"]
        assert jobs.or_error(reader().read, {**short, "url": whole["url"]}) == RowError(
            "unsupported_request", "method is missing; a batch request has custom_id, method, url, body"
        )
    bodies: list[dict[str, object]] = [{"input": "a"}, {"query": "a", "documents": ["b"]}, {"text_1": "a"}]
    assert [url_of({"body": body}) for body in bodies] == ["/v1/embeddings", "/v1/rerank", "/v1/score"]
    error = jobs.or_error(reader().read, {"custom_id": "a", "body": {"n": 1}})
    assert isinstance(error, RowError) and error.error_message.startswith("method is missing")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (line({}, custom_id=None), "custom_id is missing; a batch request has custom_id, method, url, body"),
        (line({}, method="GET"), "method: got 'GET'; must be POST"),
        (line({}, "/v1/embeddings"), "url: got '/v1/embeddings'; must be /v1/chat/completions or "
         "/v1/completions, as the job's task does not run it: put such lines into a job of their own"),
        (line({}, "/v1/images"), "url: got '/v1/images'; must be /v1/chat/completions or /v1/completions"),
        (line({"input": "a"}, "/openai/v1/responses"), "url: got '/openai/v1/responses', which is not supported: write "
         "the instructions and the input as body.messages, and the URL as /v1/chat/completions"),
        (line([]), "body: got a list; must be a mapping"),  # type: ignore[arg-type]
        (chat(model="gpt-5"), "body.model: got 'gpt-5'; the job's model is 'org/model' or 'gpt-4o-mini': name it so, "
         "or list the name in engine.served_model_name"),
        (chat(messages=[]), "body.messages: got an empty list; must be a list of messages"),
        (chat(prompt="a"), "body.prompt: got 'a', which is not supported: /v1/chat/completions has no such field"),
        (chat(max_token=5), "body.max_token: got 5, which is not supported: /v1/chat/completions has no such field; "
         "did you mean max_tokens?"),
        (completion(tools=[TOOL]), "body.tools: got a list, which is not supported: completions have no tools"),
        (chat(include_reasoning="no"), "body.include_reasoning: got 'no'; must be true or false"),
        (chat(use_beam_search=True), "body.use_beam_search: got True, which is not supported: vLLM's engine has no "
         "beam search"),
        (chat(documents=["a"]), "body.documents: got a list; must be a list of mappings"),
        (chat(add_special_tokens=True), "body.add_special_tokens: got True, which is not supported: a chat template "
         "writes them itself"),
        (completion(add_special_tokens=False), "body.add_special_tokens: got False, which is not supported: the "
         "tokenizer adds them to a text"),
        (chat(structured_outputs={"choice": ["a"]}, response_format={"type": "json_object"}),
         "body.response_format: given beside structured_outputs; give one of them"),
        (chat(guided_choice=["a"]), "body.guided_choice: got a list, which is not supported: write structured_outputs "
         "with json, regex, choice or grammar"),
        (chat(functions=[TOOL]), "body.functions: got a list, which is not supported: write tools and tool_choice"),
        (chat(messages=[*MESSAGES, {"role": "assistant", "function_call": {"name": "f"}}]), "body.messages, message 1: "
         "got function_call, which is not supported: write tool_calls"),
        (chat(messages=[{"role": "function", "content": "a"}]), "body.messages, message 0: got the role function, "
         "which is not supported: write the role tool"),
        (chat(stream=True), "body.stream: got True, which is not supported: a batch has no streams"),
        (chat(reasoning_effort=3), "body.reasoning_effort: got 3; must be text"),
        (chat(chat_template_kwargs={"messages": []}), "body.chat_template_kwargs.messages: it is no variable of a chat "
         "template"),
        (completion(add_special_tokens="false"), "body.add_special_tokens: got 'false', which is not supported: the "
         "tokenizer adds them to a text"),
        (chat(response_format={"type": "json_object", "schema": {}}), "body.response_format.schema: not known beside "
         "type json_object"),
        (chat(response_format={"type": "text", "json_schema": {}}), "body.response_format.json_schema: not known "
         "beside type text"),
        (chat(ignore_eos=True), "body.ignore_eos: got True, but all rows have sampling.ignore_eos False"),
        (chat(logprobs=True, top_logprobs=6), "body.top_logprobs: asks for 6, but the job stores other columns: set "
         "sampling.logprobs"),
        (chat(top_logprobs=2), "body.top_logprobs: given without logprobs: true"),
        (chat(logprobs=3), "body.logprobs: got 3; must be true or false"),
        (chat(max_tokens=4, max_completion_tokens=5), "body.max_tokens: differs from body.max_completion_tokens; "
         "give one of them"),
        (chat(response_format={"type": "xml"}), "body.response_format: got 'xml'; must be text, json_object, "
         "structural_tag, or json_schema with its schema"),
        (chat(response_format={"type": "json_schema"}), "body.response_format: got 'json_schema'; must be text, "
         "json_object, structural_tag, or json_schema with its schema"),
        (chat(chat_template_kwargs=[]), "body.chat_template_kwargs: got a list; must be a mapping"),
        (completion(prompt=["a", [1]]), "body.prompt: got a list; must be a text, the token ids of one, or a list of "
         "texts or of token ids"),
        (completion(prompt=[]), "body.prompt: got an empty list; must be a text, the token ids of one, or a list of "
         "texts or of token ids"),
        (completion(prompt=["a"] * 3, n=9000), "body.prompt: got 3 prompts with n 9,000; a line has at most 16,384 "
         "answers"),
        (completion(echo=True), "body.echo: got True, which is not supported: output.include_prompt stores the prompts "
         "beside the answers"),
        (chat(echo=True), "body.echo: got True, which is not supported: the answer of a conversation has no prompt "
         "before it"),
        (completion(truncate_prompt_tokens=0), "body.truncate_prompt_tokens: got 0; must be a whole number, at least "
         "1, or -1"),
        (completion(suffix="b"), "body.suffix: got 'b', which is not supported: only models for which vLLM's server "
         "writes the marks of a gap take it; write the model's own marks into the prompt"),
        (completion(best_of=3), "body.best_of: got 3, which is not supported: vLLM's engine has no best_of; n gives "
         "several answers"),
        (completion(logprobs=9), "body.logprobs: asks for 9, but the job stores other columns: set sampling.logprobs"),
        (completion(messages=MESSAGES), "body.messages: got a list, which is not supported: /v1/completions has no "
         "such field"),
    ],
)  # fmt: skip
def test_what_is_not_is_named(values: dict[str, Any], message: str) -> None:
    assert jobs.or_error(reader().read, values) == RowError("unsupported_request", message)


def test_a_task_with_one_answer_takes_neither_n_nor_several_prompts() -> None:
    spec = JobSpec(model={"name": "org/model"}, input={"path": "batch.jsonl"}, output={"path": "out"})
    own = BatchReader(spec, has_samples=False)
    refused = {
        "body.n: got 2, but all rows have sampling.n 1": line({"messages": MESSAGES, "n": 2}),
        "body.prompt: got a list of 2; this job has one answer for each line": line(
            {"prompt": ["a", "b"]}, "/v1/completions"
        ),
    }
    for message, values in refused.items():
        assert jobs.or_error(own.read, values) == RowError("unsupported_request", message)
    assert own.read(line({"messages": MESSAGES, "n": 1})) == RowRequest(messages=MESSAGES)


def test_several_prompts_in_a_line() -> None:
    found = reader().read(completion(prompt=["a", "b"], n=2, temperature=1.0))
    assert isinstance(found, RowRequest)
    assert [(part.text, part.sampling, part.form) for part in found.parts] == [
        (text, {"n": 2, "temperature": 1.0}, '{"url": "/v1/completions", "n": 2}') for text in ("a", "b")
    ]
    found = reader().read(completion(prompt=[[1, 2], [3]]))
    assert isinstance(found, RowRequest)
    assert [part.token_ids for part in found.parts] == [[1, 2], [3]]


def test_no_logprobs_in_the_job() -> None:
    found = jobs.or_error(reader(logprobs=None).read, chat(logprobs=True))
    assert found == RowError(
        "unsupported_request", "body.logprobs: asks for 0, but the job stores other columns: set sampling.logprobs"
    )


def test_reasoning_has_both_names_of_chat_templates() -> None:
    past = {"role": "assistant", "reasoning": "Hm.", "content": "Hi."}
    found = reader().read(chat(messages=[*MESSAGES, past, {"role": "user", "reasoning": "a", "content": "b"}]))
    assert isinstance(found, RowRequest)
    assert found.messages == [
        *MESSAGES,
        {**past, "reasoning_content": "Hm."},
        {"role": "user", "reasoning": "a", "content": "b"},
    ]


def test_documents_are_for_the_chat_template() -> None:
    documents = [{"title": "Foxes", "text": "A fox is red."}]
    tokenizer = PreTrainedTokenizerFast.from_pretrained(MODEL)
    texts = {"with": "{% for d in documents %}[{{ d.text }}]{% endfor %}{{ messages[0].content }}", "without": "a"}
    found = {}
    for name, template in texts.items():
        spec = JobSpec(
            model={"name": str(MODEL)},
            input={"path": "batch.jsonl", "format": "openai", "chat_template": template},
            output={"path": "out", "include_prompt": True},
            sampling={"temperature": 0.0},
        )
        builder = PromptBuilder(spec, tokenizer, None)
        [found[name]] = builder.build([Row(0, line({"messages": MESSAGES, "documents": documents}), None)], 512)
    assert found["with"].text == "[A fox is red.]Say hello."
    assert found["without"].error == RowError(
        "template_error",
        "the row has documents, but the chat template has no variable `documents`, so the model would not see them",
    )


def test_lines_may_set_what_columns_may_set() -> None:
    spec = JobSpec(**LEAST, sampling={"temperature": 0, "max_tokens": {"column": "most"}})
    assert (spec.rows_may_set("max_tokens"), spec.rows_may_set("temperature")) == (True, False)
    lines = spec.model_copy(update={"input": spec.input.model_copy(update={"format": "openai"})})
    assert lines.rows_may_set("temperature")
    assert lines.may_have_structures
    assert not spec.may_have_structures
