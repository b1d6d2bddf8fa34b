"""Each wrong thing that a user may ask for, with the exact words of its one clear line, and exit 2.

A row of the table: what is changed in a small job that is right, what of the input or the model, and what `validate`
says. To add one, append a `Wrong` to WRONG with `error=""`: the failing test shows the text.
"""

import json
import os
import pathlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import yaml
from hub_server import Hub, serving

import jobs
from batchinf import cli
from batchinf.engines.installed import parser_names, structures_config

ROWS = ({"id": 1, "prompt": "Once upon a time", "language": "en"}, {"id": 2, "prompt": "Then", "language": "en"})
SCORE: dict[str, Any] = {"task": "score", "sampling": None, "engine": {"max_model_len": 512}}
INDEX = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}

# A LoRA adapter of rank 2 for one module of the sample model, all zeros.
_TENSORS = {
    f"base_model.model.model.layers.0.self_attn.q_proj.lora_{half}.weight":
        {"dtype": "F32", "shape": shape, "data_offsets": [1024 * place, 1024 * place + 1024]}
    for place, (half, shape) in enumerate({"A": [2, 128], "B": [128, 2]}.items())
}  # fmt: skip
_HEADER = json.dumps(_TENSORS).encode()
ADAPTER: dict[str, str | bytes | None] = {
    "lora/adapter_config.json": '{"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["q_proj"]}',
    "lora/adapter_model.safetensors": len(_HEADER).to_bytes(8, "little") + _HEADER + bytes(2048),
}


@dataclass(frozen=True)
class Wrong:
    """One wrong thing.

    changes: sections of the spec, merged over the small job's; a section that is None is left out. files: by name, put
    into the working folder, or taken away (None); `model/` there is the sample model. arguments: of the command line,
    beside the spec. command: `validate`, or what else is to say it. error: stderr after `error: `, without the working
    folder's own path.
    """

    name: str
    changes: dict[str, Any]
    error: str
    rows: tuple[dict[str, Any], ...] = ROWS
    files: dict[str, str | bytes | None] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    command: str = "validate"


WRONG = [
    # A typo in a column
    Wrong("prompt_column", {"input": {"prompt_column": "promt"}},
          "job.yaml:4:3: input.prompt_column: the input has no column 'promt'; did you mean 'prompt'? it has: id, "
          "prompt, language"),
    Wrong("prompt_template", {"input": {"prompt_template": "Translate {{ promt }}"}},
          "job.yaml:4:3: input.prompt_template: the input has no column 'promt'; did you mean 'prompt'? it has: id,"
          " prompt, language"),
    Wrong("id_column", {"input": {"id_column": "idd"}},
          "job.yaml:4:3: input.id_column: the input has no column 'idd'; did you mean 'id'? it has: id, prompt, "
          "language"),
    Wrong("keep_columns", {"output": {"keep_columns": ["langage"]}},
          "job.yaml:9:3: output.keep_columns: the input has no column 'langage'; did you mean 'language'? it has: "
          "id, prompt, language"),
    Wrong("no column at all", {},
          "job.yaml:2:1: input.prompt_column: the input has no column 'prompt', the default of this field; it has: "
          "text; name one of them",
          rows=({"text": "Once"},)),
    Wrong("JSON in place of JSON lines", {"input": {"path": "list.jsonl"}},
          "list.jsonl: no row can be read; the first: list.jsonl line 1: not a JSON object but an array; write {...} "
          "on each line",
          files={"list.jsonl": '[{"id": 1, "prompt": "Once"}]'}),
    # Templates
    Wrong("template without a column", {"input": {"prompt_template": "Tell me a story."}},
          "job.yaml:4:3: input.prompt_template: it names no column; write {{ column }} where a row's value goes"),
    Wrong("template's path", {"input": {"prompt_template": "prompts/story.jinja"}},
          "job.yaml:4:3: input.prompt_template: it names no column; write {{ column }} where a row's value goes; for a "
          "template in a file write {file: prompts/story.jinja}"),
    Wrong("template syntax", {"input": {"prompt_template": "One:\n{{ prompt"}},
          "job.yaml:4:3: input.prompt_template, line 2: unexpected end of template, expected 'end of print "
          "statement'."),
    Wrong("template filter", {"input": {"prompt_template": "{{ prompt | shorten(9) }}"}},
          "job.yaml:4:3: input.prompt_template, line 1: No filter named 'shorten'."),
    Wrong("template include", {"input": {"prompt_template": "{% include 'x' %}{{ prompt }}"}},
          "job.yaml:4:3: input.prompt_template: it includes another template; write it as one"),
    Wrong("two prompts", {"input": {"prompt_template": "{{ prompt }}", "prompt_column": "prompt"}},
          "job.yaml:4:3: input.prompt_template: got prompt_template beside prompt_column; give one of them"),
    # Columns
    Wrong("a list of one", {"output": {"keep_columns": "language"}},
          "job.yaml:9:3: output.keep_columns: got 'language'; must be a list of texts, or a mapping; for a list of one "
          "write [language]"),
    Wrong("clash unnamed", {"output": {"keep_columns": ["text"]}},
          "job.yaml:9:3: output.keep_columns: got text, which the output has a column of its own for; give it "
          "another name, as in {text: input_text}",
          rows=({"id": 1, "prompt": "Once", "text": "x"},)),
    Wrong("twice the same name", {"output": {"keep_columns": {"language": "a", "prompt": "a"}}},
          "job.yaml:9:3: output.keep_columns: got 'a' for two columns; give each a name of its own"),
    # Scoring
    Wrong("nothing to score", {**SCORE},
          "job.yaml:2:1: input: missing; must be text_column, or a context with continuation_column, "
          "choices_column or choices, for task score"),
    Wrong("score without the task", {"input": {"text_column": "prompt"}},
          "job.yaml:4:3: input.text_column: got it with task generate; must be left out, or set task: score"),
    Wrong("score's section without the task", {"score": {"window_overlap": 5}},
          "job.yaml:10:3: score.window_overlap: got it with task generate; must be left out, or set task: score"),
    Wrong("sums alone without the task", {"output": {"include_token_logprobs": False}},
          "job.yaml:9:3: output.include_token_logprobs: got false with task generate; must be left out: it stores "
          "the logprobs that sampling.logprobs asks for"),
    Wrong("two things to score", {**SCORE, "input": {"text_column": "prompt", "continuation_column": "language"}},
          "job.yaml:5:3: input.continuation_column: got continuation_column beside text_column; give one of them"),
    Wrong("no context", {**SCORE, "input": {"continuation_column": "language"}},
          "job.yaml:4:3: input.continuation_column: got it without a context; name its column in context_column, or"
          " give another of prompt_column, prompt_template, messages, messages_column, token_ids_column"),
    Wrong("a column to score", {**SCORE, "input": {"context_column": "prompt", "choices_column": "languag"}},
          "job.yaml:5:3: input.choices_column: the input has no column 'languag'; did you mean 'language'? it has: "
          "id, prompt, language"),
    Wrong("answer without choices", {**SCORE, "input": {"text_column": "prompt", "answer_column": "id"}},
          "job.yaml:5:3: input.answer_column: got it without choices_column or choices; it is the right one of them: "
          "leave it out"),
    Wrong("answers without a column", {**SCORE, "input": {"context_column": "prompt", "choices": ["a", "b"],
                                                          "answers": "texts"}},
          "job.yaml:8:3: input.answers: got texts without input.answer_column, whose values it is about: leave it out"),
    Wrong("chat to score", {**SCORE, "input": {"text_column": "prompt", "system_prompt": "Be brief."}},
          "job.yaml:4:3: input.text_column: got it with a field of chat; a conversation can only be a context: "
          "name the column of the text after it in continuation_column"),
    Wrong("batch file to score", {**SCORE, "input": {"text_column": "prompt", "format": "openai"}},
          "job.yaml:5:3: input.format: got openai with task score; its lines have prompts and nothing to score"),
    Wrong("cut in a score", {**SCORE, "input": {"text_column": "prompt", "on_overlong": "truncate_left"}},
          "job.yaml:5:3: input.on_overlong: got truncate_left with task score, which cuts a long context at its "
          "left and scores a long text in windows: leave it out"),
    Wrong("sampling in a score",
          {**SCORE, "input": {"text_column": "prompt"},
           "sampling": {"temperature": None, "max_tokens": None, "top_p": 0.5}},
          "job.yaml:8:3: sampling.top_p: got it with task score, which generates nothing; only prompt_logprobs "
          "counts: leave it out"),
    Wrong("overlap of all", {**SCORE, "input": {"text_column": "prompt"}, "score": {"window_overlap": 510}},
          "job.yaml:11:3: score.window_overlap: got 510; must be below max_model_len - 2 = 510, the tokens of a "
          "window"),
    Wrong("overlap without a text", {**SCORE, "score": {"window_overlap": 5},
           "input": {"context_column": "prompt", "continuation_column": "language"}},
          "job.yaml:12:3: score.window_overlap: got 5 without input.text_column; only a text is scored in windows: "
          "leave it out"),
    Wrong("neutral values without choices", {**SCORE, "score": {"neutral": {"prompt": ""}},
           "input": {"context_column": "prompt", "continuation_column": "language"}},
          "job.yaml:12:3: score.neutral: got it without choices; it compares the choices of a row: leave it out"),
    Wrong("a neutral value of no column of the context", {**SCORE, "score": {"neutral": {"language": ""}},
           "input": {"context_column": "prompt", "choices": ["a", "b"]}},
          "job.yaml:14:3: score.neutral: got 'language', which the context does not read; it reads: prompt"),
    Wrong("all of a text", {**SCORE, "input": {"text_column": "prompt"}, "score": {"store": "all"}},
          "job.yaml:11:3: score.store: got all without input.continuation_column; all tokens of a text are stored "
          "anyway, and choices would store their context again and again: leave it out"),
    Wrong("delimiter of a text", {**SCORE, "input": {"text_column": "prompt"}, "score": {"target_delimiter": " "}},
          "job.yaml:11:3: score.target_delimiter: got it with input.text_column, which has no context: leave it out"),
    Wrong("top of sums alone", {**SCORE, "input": {"text_column": "prompt"},
           "sampling": {"temperature": None, "max_tokens": None, "prompt_logprobs": 2},
           "output": {"include_token_logprobs": False}},
          "job.yaml:8:3: sampling.prompt_logprobs: got 2 with output.include_token_logprobs false; leave out one of"
          " them"),
    # Chat
    Wrong("truncate with chat", {"input": {"system_prompt": "Be brief.", "on_overlong": "truncate_left"}},
          "job.yaml:5:3: input.on_overlong: got truncate_left with system_prompt; it would cut the instructions or "
          "the assistant's header off a conversation: cut a long column with {{ column | truncate_tokens(n) }}"),
    Wrong("ids with chat", {"input": {"token_ids_column": "ids", "system_prompt": "Be brief."}},
          "job.yaml:5:3: input.system_prompt: got it beside token_ids_column, whose ids are taken as they are; give"
          " one of them"),
    Wrong("prefill and turn",
          {"input": {"messages_column": "m", "add_generation_prompt": True, "continue_final_message": True}},
          "job.yaml:5:3: input.add_generation_prompt: got true with continue_final_message; the model continues "
          "the final message or begins a new turn: give one of them"),
    Wrong("no chat template", {"input": {"system_prompt": "Be brief."}},
          "job.yaml:4:3: input.system_prompt: it needs a chat template, and the model 'model' has none; give "
          "one as input.chat_template: {file: template.jinja}", files={"model/chat_template.jinja": None}),
    Wrong("chat template syntax", {"input": {"chat_template": "a\n{% for m in messages %}"}},
          "job.yaml:4:3: input.chat_template: line 2: Unexpected end of template. Jinja was looking for the "
          "following tags: 'endfor' or 'else'. The innermost block that needs to be closed is 'for'."),
    Wrong("chat template's path", {"input": {"chat_template": "templates/llama.jinja"}},
          "job.yaml:4:3: input.chat_template: it has nothing of `messages` in it, so that all prompts would be "
          "the same; is it a file's path? Write input.chat_template: {file: path}"),
    Wrong("chat template argument", {"input": {"chat_template_kwargs": {"enable_thinkng": False}}},
          "job.yaml:4:3: input.chat_template_kwargs: the chat template has no variable 'enable_thinkng'; it "
          "has: none"),
    Wrong("chat template applied and not", {"input": {"system_prompt": "s", "apply_chat_template": False}},
          "job.yaml:5:3: input.apply_chat_template: got false beside system_prompt, which applies the chat template; "
          "give one of them"),
    Wrong("chat template argument elsewhere", {"input": {"chat_template_kwargs": {"add_generation_prompt": True}}},
          "job.yaml:5:5: input.chat_template_kwargs.add_generation_prompt: it is no variable of a chat "
          "template; use input.add_generation_prompt instead"),
    Wrong("a typo in a message", {"input": {"messages": [{"role": "user", "content": "{{ promt }}"}]}},
          "job.yaml:6:5: input.messages[0].content: the input has no column 'promt'; did you mean 'prompt'? it "
          "has: id, prompt, language"),
    Wrong("messages as text", {"input": {"messages": "{{ prompt }}"}},
          "job.yaml:4:3: input.messages: got '{{ prompt }}'; must be {file: path}, or a list of mappings, such as "
          "[{role: user, content: \"…\"}]"),
    Wrong("messages without a column", {"input": {"messages": [{"role": "user", "content": "Hello"}]}},
          "job.yaml:4:3: input.messages: they name no column; write {{ column }} where a row's value goes"),
    Wrong("template syntax in a message", {"input": {"messages": [{"role": "user", "content": "a\n{{ prompt"}]}},
          "job.yaml:6:5: input.messages[0].content, line 2: unexpected end of template, expected 'end of print "
          "statement'."),
    Wrong("messages_column", {"input": {"messages_column": "chat"}},
          "job.yaml:4:3: input.messages_column: the input has no column 'chat'; it has: id, prompt, language"),
    Wrong("token_ids_column", {"input": {"token_ids_column": "ids"}},
          "job.yaml:4:3: input.token_ids_column: the input has no column 'ids'; did you mean 'id'? it has: id, "
          "prompt, language"),
    Wrong("two system messages",
          {"input": {"messages": [{"role": "system", "content": "{{ prompt }}"}], "system_prompt": "Be brief."}},
          "job.yaml:7:3: input.system_prompt: got it beside messages, which begin with a system message; give "
          "one of them"),
    Wrong("missing file", {"input": {"prompt_template": {"file": "prompt.jinja"}}},
          "job.yaml:4:3: input.prompt_template: cannot read the file prompt.jinja: no such file or directory"),
    Wrong("file of a variable", {"input": {"system_prompt": {"file": "$NO_SUCH_THING/a"}}},
          "job.yaml:4:3: input.system_prompt: $NO_SUCH_THING is unset or empty in the environment; set it, or "
          "write $$ for a plain $"),
    Wrong("no room for a prompt",
          {"input": {"on_overlong": "truncate_left"}, "engine": {"max_model_len": 16}},
          "job.yaml:4:3: input.on_overlong: max_tokens 16 leaves no room for a prompt in max_model_len=16; "
          "lower sampling.max_tokens"),
    Wrong("truncate_tokens", {"input": {"prompt_template": "{{ prompt | truncate_tokens(side='left') }}"}},
          "job.yaml:4:3: input.prompt_template, line 1: truncate_tokens: call it as truncate_tokens(n), or "
          "truncate_tokens(n, side='left')"),
    # Selection
    Wrong("sample of all and more", {"input": {"sample": 1.5}},
          "job.yaml:4:3: input.sample: got 1.5; must be a number, above 0 and at most 1"),
    Wrong("limit of none", {"input": {"limit": 0}},
          "job.yaml:4:3: input.limit: got 0; must be a whole number, at least 1 and at most 2147483647"),
    Wrong("exclude without id", {"input": {"exclude": {"job": "out/old", "on": "id"}}},
          "job.yaml:6:5: input.exclude.on: got id, but the job has no id_column: set it, or use prompt_hash"),
    Wrong("order by the cache that is off", {"input": {"order": "prefix"}, "engine": {"enable_prefix_caching": False}},
          "job.yaml:4:3: input.order: got prefix, which is for vLLM's prefix cache, and engine.enable_prefix_caching "
          "is false: leave one of them out"),
    Wrong("order by what all have", {"input": {"order": "longest"}},
          "job.yaml:4:3: input.order: got longest, but all rows have the same max_tokens; name the column of each "
          "row's own, as in sampling.max_tokens: {column: budget}, or leave it out"),
    Wrong("order by nothing", {"input": {"order": "random"}},
          "job.yaml:4:3: input.order: got 'random'; must be one of input, prefix, longest, auto"),
    # Sampling
    Wrong("sampling field", {"sampling": {"max_tokns": 3}},
          "job.yaml:7:3: sampling.max_tokns: unknown field; did you mean max_tokens? Allowed: n, temperature, "
          "top_p, top_k, min_p, presence_penalty, frequency_penalty, repetition_penalty, max_tokens, min_tokens, "
          "stop, stop_token_ids, logit_bias, allowed_token_ids, bad_words, thinking_token_budget, "
          "repetition_detection, include_stop_str_in_output, ignore_eos, skip_special_tokens, seed, logprobs, "
          "prompt_logprobs, logprob_token_ids, logprobs_mode, structured_outputs, columns"),
    Wrong("sampling value", {"sampling": {"temperature": -1}},
          "job.yaml:5:3: sampling.temperature: got -1; must be a number, at least 0 and at most 2"),
    Wrong("greedy samples", {"sampling": {"n": 4}},
          "job.yaml:7:3: sampling.n: got 4 with temperature 0; greedy samples are all equal: set n to 1, or a "
          "temperature above 0"),
    Wrong("a row's own ignore_eos", {"sampling": {"columns": {"ignore_eos": "language"}}},
          "job.yaml:8:5: sampling.columns.ignore_eos: must be the job's, as a row cannot have its own; it can have n, "
          "temperature, top_p, "
          "top_k, min_p, presence_penalty, frequency_penalty, repetition_penalty, max_tokens, min_tokens, stop, "
          "stop_token_ids, seed, logit_bias, allowed_token_ids, bad_words, thinking_token_budget, "
          "repetition_detection, structured_outputs.json, structured_outputs.regex, "
          "structured_outputs.choice, structured_outputs.grammar, "
          "structured_outputs.structural_tag"),
    Wrong("a row's own ignore_eos, in short", {"sampling": {"ignore_eos": {"column": "language"}}},
          "job.yaml:7:3: sampling.ignore_eos: must be the job's, as a row cannot have its own; it can have n, "
          "temperature, top_p, "
          "top_k, min_p, presence_penalty, frequency_penalty, repetition_penalty, max_tokens, min_tokens, stop, "
          "stop_token_ids, seed, logit_bias, allowed_token_ids, bad_words, thinking_token_budget, "
          "repetition_detection, structured_outputs.json, structured_outputs.regex, "
          "structured_outputs.choice, structured_outputs.grammar, "
          "structured_outputs.structural_tag"),
    Wrong("a typo in a row's own", {"sampling": {"columns": {"max_tokns": "id"}}},
          "job.yaml:8:5: sampling.columns.max_tokns: must be the job's, as a row cannot have its own; did you mean "
          "max_tokens? it can have n, temperature, top_p, "
          "top_k, min_p, presence_penalty, frequency_penalty, repetition_penalty, max_tokens, min_tokens, stop, "
          "stop_token_ids, seed, logit_bias, allowed_token_ids, bad_words, thinking_token_budget, "
          "repetition_detection, structured_outputs.json, structured_outputs.regex, "
          "structured_outputs.choice, structured_outputs.grammar, "
          "structured_outputs.structural_tag"),
    Wrong("a typo in column", {"sampling": {"top_p": {"colum": "language"}}},
          "job.yaml:7:3: sampling.top_p: got {colum: \"language\"}; must be a value, or {column: name} with the column "
          "of each row's own"),
    Wrong("columns without a name", {"sampling": {"columns": {"max_tokens": 5}}},
          "job.yaml:8:5: sampling.columns.max_tokens: got {column: 5}; must be a value, or {column: name} with the "
          "column of each row's own"),
    Wrong("two columns of a field", {"sampling": {"max_tokens": {"column": "id"},
                                                 "columns": {"max_tokens": "language"}}},
          "job.yaml:9:5: sampling.columns.max_tokens: got 'language' beside max_tokens: {column: id}, and 'id' counted "
          "until now; give one of them"),
    Wrong("two columns of a structure", {"sampling": {"structured_outputs": {"choice": {"column": "id"}},
                                                      "columns": {"structured_outputs.choice": "language"}}},
          "job.yaml:11:5: sampling.columns.structured_outputs.choice: got 'language' beside structured_outputs.choice: "
          "{column: id}, and 'id' counted until now; give one of them"),
    Wrong("sampling column", {"sampling": {"max_tokens": {"column": "languge"}}},
          "job.yaml:6:3: sampling.max_tokens: the input has no column 'languge'; did you mean 'language'? it has: id, "
          "prompt, language"),
    Wrong("sampling column's type", {"sampling": {"columns": {"max_tokens": "language"}}},
          "job.yaml:6:3: sampling.max_tokens: the column 'language' holds text, or nothing at all; each value must be "
          "a whole number, at least 1 and at most 2147483647, or null for the job's own"),
    Wrong("clash of a new name", {"output": {"keep_columns": {"language": "token_ids", "prompt": "text"}}},
          "job.yaml:9:3: output.keep_columns: got text, token_ids, which the output has columns of its own for; give "
          "them other names, as in {prompt: input_text}"),
    Wrong("schema that is not JSON", {"sampling": {"structured_outputs": {"json": "{type: object}"}}},
          "job.yaml:8:5: sampling.structured_outputs.json: got text that is not JSON: Expecting property name enclosed "
          "in double quotes: line 1 column 2 (char 1); must be a JSON schema, as a mapping, as text or as {file: "
          "path}"),
    Wrong("a backend as text", {"engine": {"structured_outputs_config": "xgrammar"}},
          "job.yaml:10:3: engine.structured_outputs_config: got 'xgrammar'; must be a mapping, such as {backend: "
          "xgrammar}"),
    Wrong("choices as text", {"sampling": {"structured_outputs": {"choice": "good"}}},
          "job.yaml:8:5: sampling.structured_outputs.choice: got \"good\"; must be a list of texts, or {file: path}"),
    Wrong("a choice that is no text", {"sampling": {"structured_outputs": {"choice": ["one", 1]}}},
          "job.yaml:8:5: sampling.structured_outputs.choice: got [\"one\", 1]; must be a list of texts; text that "
          "looks like something else needs quotes"),
    Wrong("two structures", {"sampling": {"structured_outputs": {"json": {}, "regex": "a"}}},
          "job.yaml:7:3: sampling.structured_outputs: got json, regex; must be one of json, regex, choice, grammar, "
          "structural_tag, json_object"),
    Wrong("no structure", {"sampling": {"structured_outputs": {"jsn": {}}}},
          "job.yaml:7:3: sampling.structured_outputs: got jsn; must be one of json, regex, choice, grammar, "
          "structural_tag, json_object"),
    # The model
    Wrong("missing shard", {},
          "the weights of 'model' are not whole: model-00001-of-00002.safetensors is missing; "
          "model-00002-of-00002.safetensors is missing. Copy them again, or get them with `hf download ORG/MODEL "
          "--local-dir model`", files={"model/model.safetensors": None,
          "model/model.safetensors.index.json": json.dumps(INDEX)}),
    Wrong("cut weights", {},
          "the weights of 'model' are not whole: model.safetensors is cut short, or no safetensors file (1 bytes). "
          "Copy them again, or get them with `hf download ORG/MODEL --local-dir model`",
          files={"model/model.safetensors": b"\x10"}),
    Wrong("no weights", {},
          "the weights of 'model' are not whole: the folder has no weights (consolidated*.safetensors, "
          "*.safetensors, *.bin, *.pt). Copy them again, or get them with `hf download ORG/MODEL --local-dir model`",
          files={"model/model.safetensors": None}),
    Wrong("no config", {},
          "model.name: 'model' has no config.json; give a model in the Hugging Face format",
          files={"model/config.json": None}),
    Wrong("a quantization of the wrong type", {},
          "model.name: quantization_config in model/config.json is text; must be a mapping with quant_method, or "
          "absent",
          files={"model/config.json": '{"quantization_config": "fp8"}'}),
    Wrong("no tokenizer", {},
          "'model' has no tokenizer.json; copy it there, or name a tokenizer in model.tokenizer",
          files={"model/tokenizer.json": None}),
    Wrong("no such folder", {"model": "./tiny"},
          "model.name: there is no folder 'tiny'; a Hugging Face id would be 'org/name'"),
    Wrong("no such adapter", {"model": {"name": "model", "lora": {"sql": "./sql"}}},
          "model.lora: adapter 'sql': there is no folder 'sql'; a Hugging Face id would be 'org/name'"),
    Wrong("no adapter of another kind", {"model": {"name": "model", "lora": "model"}},
          "model.lora: model has no adapter_config.json; give the folder of a LoRA adapter as PEFT saves it"),
    Wrong("two adapters for all rows", {"model": {"name": "model", "lora": {"sql": "a", "chat": "b"}}},
          "job.yaml:3:3: model.lora: got 2 adapters, but nothing says which of them a row has; name the column that "
          "does in input.adapter_column"),
    Wrong("adapters that are not there", {"input": {"adapter_column": "language"}},
          "job.yaml:4:3: input.adapter_column: got 'language', but there are no adapters to name; write "
          "model.lora: {name: folder}"),
    Wrong("adapters' column with one adapter", {"model": {"name": "model", "lora": "a"},
                                               "input": {"adapter_column": "language"}},
          "job.yaml:6:3: input.adapter_column: got 'language', but there is one adapter for all rows; write "
          "model.lora: {name: folder}"),
    Wrong("adapters' column", {"model": {"name": "model", "lora": {"sql": "lora"}},
                               "input": {"adapter_column": "langage"}},
          "job.yaml:7:3: input.adapter_column: the input has no column 'langage'; did you mean 'language'? it has: "
          "id, prompt, language", files=ADAPTER),
    Wrong("adapters switched off", {"model": {"name": "model", "lora": "lora"}, "engine": {"enable_lora": False}},
          "job.yaml:12:3: engine.enable_lora: got false with model.lora; leave it out"),
    Wrong("an adapter of too high a rank", {"model": {"name": "model", "lora": {"sql": "lora"}},
                                            "engine": {"max_lora_rank": 1}},
          "job.yaml:13:3: engine.max_lora_rank: got 1, but the adapter 'sql' has rank 2; leave it out", files=ADAPTER),
    Wrong("gated model", {"model": "org/gated"},
          "model.name: 'org/gated' is gated; accept its licence at HUB/org/gated, then run `hf auth login`"),
    Wrong("gated files", {"model": "org/half-gated"},
          "model.name: 'org/half-gated' is gated; accept its licence at HUB/org/half-gated, then run `hf auth "
          "login`"),
    Wrong("absent model", {"model": "org/absent"},
          "model.name: there is no folder 'org/absent', nor a model 'org/absent' on the hub; check the name; a "
          "private one needs `hf auth login`"),
    Wrong("absent revision", {"model": {"name": "org/open", "revision": "v9"}},
          "model.name: 'org/open' has no revision 'v9'; its branches and tags are at HUB/org/open/tree/main"),
    Wrong("refused token", {"model": "org/private"},
          "model.name: the hub refuses this machine's token for 'org/private'; run `hf auth login`"),
    # vLLM's arguments
    Wrong("unknown engine argument", {"engine": {"max_model_length": 512}},
          "job.yaml:10:3: engine.max_model_length: no engine argument of the installed vLLM; did you mean "
          "max_model_len?"),
    Wrong("engine argument elsewhere", {"engine": {"tensor_parallel_size": 2}},
          "job.yaml:10:3: engine.tensor_parallel_size: say parallel.tensor_parallel_size instead"),
    # The input
    Wrong("no such file", {"input": {"path": "row.jsonl"}},
          "job.yaml:3:3: input.path: row.jsonl does not exist in the working folder; give a file, a glob, a folder, "
          "or a Hugging Face dataset's id; did you mean rows.jsonl?"),
    Wrong("a device", {"input": {"path": "/dev/stdin"}},
          "/dev/stdin is a pipe or a device; a job reads its input more than once, so write the rows to a file"),
    Wrong("UTF-16", {"input": {"path": "wide.jsonl"}}, "wide.jsonl is UTF-16; save it as UTF-8",
          files={"wide.jsonl": "\x00{\x00\"\x00p"}),
    Wrong("no file matches", {"input": {"path": "rows/*.jsonl"}},
          "job.yaml:3:3: input.path: no file matches rows/*.jsonl; correct the glob, or put it in quotes if a shell "
          "expanded it"),
    Wrong("unknown ending", {"input": {"path": "rows.xls"}},
          "the ending of rows.xls is not known; the formats are jsonl, json, parquet, csv, text, arrow, images and "
          "hf, by the endings .jsonl, .ndjson, .json, .parquet, .pq, .csv, .tsv, .txt, .text, .arrow, .feather, .ipc, "
          ".png, .jpg, .jpeg, .webp, .gif, .bmp, .tif, .tiff, .avif; name it so, or set `input.format`; or make one in "
          "pandas: read_excel(NAME).to_parquet('rows.parquet')",
          files={"rows.xls": "x"}),
    Wrong("unknown format", {"input": {"format": "xls"}},
          "job.yaml:4:3: input.format: got 'xls'; must be one of jsonl, json, parquet, csv, text, arrow, images, "
          "openai, hf"),
    Wrong("no rows", {},
          "rows.jsonl has no rows; give an input with at least one", rows=()),
    # Rows to look at
    Wrong("no such id", {"input": {"id_column": "id"}},
          "--row 3: none of 2 rows has this in 'id' (int64)", arguments=("--row", "3")),
    Wrong("id of another type", {"input": {"id_column": "id"}},
          "--row one: the ids in 'id' are int64; give one of them", arguments=("--row", "one")),
    Wrong("no such position", {},
          "--row 2: the job has no id_column, so a row is named by its position, 0 to 1", arguments=("--row", "2")),
    Wrong("named and drawn", {},
          "got --row with --random; --row names the rows, --random draws them: give one of them",
          arguments=("--row", "1", "--random")),
    # The spec itself
    Wrong("unknown section", {"sampler": {"top_p": 1}},
          "job.yaml:9:1: sampler: unknown field; did you mean input.sample? Allowed: model, task, input, sampling, "
          "score, logits, pooling, parallel, backend, ray, engine, output, checkpoint_interval_s, drain_timeout_s, "
          "stop_before_s, stall_timeout_s, start_timeout_s, max_restarts, on_oom, max_error_rate, retry, "
          "price_per_gpu_hour, same_device, scripted, rules"),
    Wrong("no input", {"input": None},
          "job.yaml: input: missing; must be a mapping of fields (path, job, format, csv, split, name, revision, "
          "prompt_column, prompt_template, messages, messages_column, tools_column, tools, tool_choice, "
          "parallel_tool_calls, images_column, images, token_ids_column, text_column, context_column, "
          "continuation_column, choices_column, choices, answer_column, answers, query_column, documents_column, "
          "document_column, system_prompt, chat_template, "
          "chat_template_kwargs, add_generation_prompt, "
          "continue_final_message, apply_chat_template, on_overlong, adapter_column, "
          "id_column, where, sample, limit, exclude, order). Where the rows come from, which of them "
          "run, and how a row becomes a prompt."),
    Wrong("not YAML", {},
          "job.yaml:2:1: not valid YAML: while parsing a flow sequence, expected ',' or ']', but got '<stream "
          "end>'; does a text need quotes?", files={"job.yaml": "model: [tiny\n"}),
    Wrong("no such spec", {},
          "job.yaml: no such file or directory; must be a job spec, as `batchinf init` writes it",
          files={"job.yaml": None}),
    Wrong("override without a value", {},
          "--set sampling.max_tokens: must be field=value, such as --set sampling.max_tokens=64",
          arguments=("--set", "sampling.max_tokens")),

    Wrong("none for null", {"input": {"id_column": "none"}},
          "job.yaml:4:3: input.id_column: the input has no column 'none'; it has: id, prompt, language; for no value "
          "write null"),

    # Rows that cannot be chosen
    Wrong("where, unknown column", {"input": {"where": "langage = 'en'"}},
          "job.yaml:4:3: input.where: got \"langage = 'en'\": there is no column 'langage'; must be an "
          "expression in SQL over the input's columns, such as \"language = 'en'\"; columns: id, prompt, language"),
    Wrong("where, text in double quotes", {"input": {"where": 'language = "en"'}},
          "job.yaml:4:3: input.where: got 'language = \"en\"': there is no column 'en'; a text is in single quotes, "
          "'en'; must be an expression in SQL over the input's columns, such as \"language = 'en'\"; columns: id, "
          "prompt, language"),
    Wrong("where, no expression", {"input": {"where": "id = 1; drop table input"}},
          "job.yaml:4:3: input.where: got 'id = 1; drop table input': syntax error at or near \";\"; must be an "
          "expression in SQL over the input's columns, such as \"language = 'en'\"; columns: id, prompt, language"),
    Wrong("where, no truth value", {"input": {"where": "id + 1"}},
          "job.yaml:4:3: input.where: got 'id + 1': it must be true or false, but is BIGINT; must be an "
          "expression in SQL over the input's columns, such as \"language = 'en'\"; columns: id, prompt, language"),
    Wrong("where, a query", {"input": {"where": "id in (select 1)"}},
          "job.yaml:4:3: input.where: got 'id in (select 1)': it must use the columns of one row only, but it has "
          "a query; must be an expression in SQL over the input's columns, such as \"language = 'en'\"; columns: id, "
          "prompt, language"),
    Wrong("where, chance", {"input": {"where": "random() < 0.1"}},
          "job.yaml:4:3: input.where: got 'random() < 0.1': random() differs from one run to the next, but a run must "
          "be able to choose the same rows again; write a value in its place, or set input.sample; must be an "
          "expression in SQL over the input's columns, such as \"language = 'en'\"; columns: id, prompt, language"),
    Wrong("where, a value that does not fit", {"input": {"where": "prompt::int = 1"}},
          "job.yaml:4:3: input.where: got 'prompt::int = 1': Conversion Error: Could not convert string 'Once upon a "
          "time' to INT32 when casting from source column prompt; must be an "
          "expression in SQL over the input's columns, such as \"language = 'en'\"; columns: id, prompt, language"),
    Wrong("nothing chosen", {"input": {"where": "id > 2"}},
          "job.yaml:2:1: input: where 'id > 2' leaves none of the 2 input rows; there is nothing to run"),
    Wrong("exclude, no job", {"input": {"id_column": "id", "exclude": {"job": "elsewhere", "on": "id"}}},
          "job.yaml:5:3: input.exclude: elsewhere holds no job: there is no such folder; give the output.path of a "
          "job"),
    # Logits
    Wrong("logits without their task", {"logits": {"positions": "all"}},
          "job.yaml:9:1: logits: must be left out with task generate; or set task: logits"),
    Wrong("a token of several", {"task": "logits", "sampling": None, "logits": {"tokens": [" the", " Istanbul!"]}},
          "job.yaml:10:5: logits.tokens[1]: got ' Istanbul!', which is 6 tokens: ' I' (314), 'st' (334), 'an'"
          " (298), 'b' (71), 'ul' (409), '!' (6); must be one token, or use task: score with input.choices, which takes"
          " texts of several tokens"),
    Wrong("a token without its space", {"task": "logits", "sampling": None, "logits": {"tokens": ["the"]}},
          "job.yaml:9:5: logits.tokens[0]: got 'the', which is 2 tokens: 't' (89), 'he' (264); must be one token, such"
          " as ' the', or use task: score with input.choices, which takes texts of several tokens"),
    Wrong("one token under two names", {"task": "logits", "sampling": None, "logits": {"tokens": [" the", " the"]}},
          "job.yaml:8:3: logits.tokens: got a token twice; name each once"),
    Wrong("tokens and other ids",
          {"task": "logits", "sampling": None, "logits": {"tokens": [" the"], "token_ids": [9]}},
          "job.yaml:10:3: logits.token_ids: got [9], but logits.tokens are [268]; leave out one of them"),
    Wrong("an id beyond the vocabulary", {"task": "logits", "sampling": None, "logits": {"token_ids": [3, 1536]}},
          "job.yaml:8:3: logits.token_ids: got 1536; the model's vocabulary ends at 1535"),
    Wrong("another vocabulary", {"task": "logits", "sampling": None, "logits": {"vocab_size": 9}},
          "job.yaml:8:3: logits.vocab_size: got 9; the model's is 1536: leave it out"),
    Wrong("positions of a kind", {"task": "logits", "sampling": None, "logits": {"positions": "first"}},
          "job.yaml:8:3: logits.positions: got 'first'; must be last, all, generated or {column: name}"),
    Wrong("positions of no column", {"task": "logits", "sampling": None, "logits": {"positions": {"column": "at"}}},
          "job.yaml:8:3: logits.positions: the input has no column 'at'; it has: id, prompt, language"),
    Wrong("positions of what is cut",
          {"task": "logits", "sampling": None, "logits": {"positions": {"column": "id"}},
           "input": {"on_overlong": "truncate_left"}},
          "job.yaml:4:3: input.on_overlong: positions in a column count the tokens of the uncut prompt; leave it out"),
    Wrong("logprobs of logits", {"task": "logits", "sampling": {"logprobs": 3}},
          "job.yaml:7:3: sampling.logprobs: has no meaning with task logits; logits.values says which numbers"
          " are stored; leave it out"),
    Wrong("tokens where none come", {"task": "logits", "sampling": {"max_tokens": 3}},
          "job.yaml:6:3: sampling.max_tokens: has no meaning where nothing is generated; leave it out, or set"
          " logits.positions: generated"),
    Wrong("samples of logits", {"task": "logits", "sampling": {"n": 3, "temperature": 1.0}},
          "job.yaml:7:3: sampling.n: must be 1 with task logits; leave it out"),
    Wrong("more than may be written", {"task": "logits", "sampling": None, "output": {"max_output_bytes": 6000}},
          "job.yaml:6:3: output.max_output_bytes: the output of 2 rows is estimated at 6.4 kB (3.2 kB each), "
          "more than 6.0 kB; take fewer rows (input.limit), only some tokens (logits.tokens), or raise it to "
          "6400"),
    Wrong("more text than may be written", {"output": {"max_output_bytes": 200}},
          "job.yaml:9:3: output.max_output_bytes: the output of 2 rows is estimated at 392 bytes (196 bytes "
          "each), more than 200 bytes; take fewer rows (input.limit), store less of each, or raise it to 400"),
    Wrong("chosen tokens beside the likeliest", {"sampling": {"logprobs": 3, "logprob_token_ids": [1, 2]}},
          "job.yaml:7:3: sampling.logprobs: got 3 with logprob_token_ids; the engine gives the likeliest "
          "tokens or the chosen ones: leave out one of them"),
    Wrong("a chosen id beyond the vocabulary", {"sampling": {"logprob_token_ids": [1, 1536]}},
          "job.yaml:7:3: sampling.logprob_token_ids: got 1536; the model's vocabulary ends at 1535"),
    Wrong("a mode of logprobs", {"sampling": {"logprobs_mode": "logits"}},
          "job.yaml:7:3: sampling.logprobs_mode: got 'logits'; must be one of raw_logprobs, raw_logits, "
          "processed_logprobs, processed_logits"),
    Wrong("the mode as the engine's", {"engine": {"logprobs_mode": "raw_logits"}},
          "job.yaml:10:3: engine.logprobs_mode: say sampling.logprobs_mode instead"),
    # Tasks that make vectors
    Wrong("sampling of vectors", {"task": "embed", "sampling": {"temperature": 0.5}},
          "job.yaml:5:3: sampling.temperature: got 0.5; must be left out with task embed, which generates no "
          "text"),
    Wrong("structure of vectors",
          {"task": "classify",
           "sampling": {"temperature": None, "max_tokens": None, "structured_outputs": {"choice": ["a"]}}},
          "job.yaml:7:3: sampling.structured_outputs: got a mapping; must be left out with task classify, which"
          " generates no text"),
    Wrong("reasoning of vectors",
          {"task": "reward", "sampling": None, "model": {"name": "model", "reasoning_parser": "qwen3"}},
          "job.yaml:3:3: model.reasoning_parser: got 'qwen3'; must be left out with task reward, which "
          "generates no text"),
    Wrong("batch lines of vectors", {"task": "embed", "sampling": None, "input": {"format": "openai"}},
          "job.yaml:4:3: input.format: got openai, but the input has no column 'custom_id'; a batch request has "
          "custom_id, method, url, body"),
    Wrong("batch lines of vectors, recognised", {"task": "embed", "sampling": None},
          "task: got embed, but the only line of rows.jsonl has another kind of request, such as "
          "/v1/chat/completions; must be generate",
          rows=({"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": []}},)),
    Wrong("logprobs of vectors", {"task": "embed", "sampling": None, "output": {"logprobs_dtype": "float16"}},
          "job.yaml:6:3: output.logprobs_dtype: got 'float16'; must be left out with task embed, which has no "
          "logprobs"),
    Wrong("another task's field", {"task": "hidden_states", "sampling": None, "pooling": {"normalize": False}},
          "job.yaml:8:3: pooling.normalize: got false; must be left out with task hidden_states: it is for "
          "embed"),
    Wrong("vectors of text", {"pooling": {"layers": [1]}},
          "job.yaml:10:3: pooling.layers: got 1; must be left out with task generate: it is for hidden_states"),
    Wrong("layers out of order", {"task": "hidden_states", "sampling": None, "pooling": {"layers": [3, 1]}},
          "job.yaml:8:3: pooling.layers: got 3, 1; must be numbers of layers, each once, ascending"),
    Wrong("layers with a norm",
          {"task": "hidden_states", "sampling": None, "pooling": {"layers": [1], "final_norm": False}},
          "job.yaml:10:3: pooling.final_norm: got false beside layers; must be left out, as no layer has the "
          "final norm"),
    Wrong("a layer too many", {"task": "hidden_states", "sampling": None, "pooling": {"layers": [4, 5]}},
          "job.yaml:8:3: pooling.layers: got 5; must be from 0, the embedding, to 4, the model's last layer"),
    Wrong("layers of a pipeline",
          {"task": "hidden_states", "sampling": None, "pooling": {"layers": [1]},
           "parallel": {"pipeline_parallel_size": 2}},
          "job.yaml:8:3: pooling.layers: vLLM gives states between layers with pipeline_parallel_size 1 alone; "
          "got 2: use tensor_parallel_size"),
    Wrong("no head", {"task": "classify", "sampling": None},
          "job.yaml:1:1: model.name: LlamaForCausalLM of 'model' has no classification head, which task "
          "classify needs; give a model such as a …ForSequenceClassification"),
    Wrong("no documents",
          {"task": "rerank", "sampling": None, "input": {"prompt_column": None, "query_column": "prompt"}},
          "job.yaml:5:3: input.query_column: got it without documents_column or document_column; a score is that of a "
          "query and a document"),
    Wrong("no Matryoshka", {"task": "embed", "sampling": None, "pooling": {"dimensions": 8}},
          "job.yaml:8:3: pooling.dimensions: got 8, but the model's config does not say that it was trained for"
          " fewer (Matryoshka); leave it out, or, if it was, set engine.hf_overrides: {is_matryoshka: true}"),
    Wrong("a vector's column",
          {"task": "embed", "sampling": None, "output": {"keep_columns": {"language": "embedding"}}},
          "job.yaml:6:3: output.keep_columns: got embedding, which the output has a column of its own for; give"
          " it another name, as in {language: input_embedding}"),
]  # fmt: skip
if (parsers := parser_names("reasoning")) is not None:  # vLLM is installed
    said = f"got 'qwen33'; the installed vLLM has {', '.join(parsers)}"
    changes = {"model": {"name": "model", "reasoning_parser": "qwen33"}}
    WRONG.append(Wrong("reasoning parser", changes, f"job.yaml:3:3: model.reasoning_parser: {said}"))
if (known := structures_config()) is not None:
    names, backends = map(", ".join, known)  # a mapping from fields to types, and a tuple
    for config, said in (
        ({"backend": "foo"}, f".backend: got 'foo'; must be one of {backends}"),
        ({"bakend": "xgrammar"}, f".bakend: no field of the installed vLLM; it has {names}"),
        ({"disable_any_whitespace": "yes", "backend": "xgrammar"},
         ".disable_any_whitespace: got 'yes'; must be true or false"),
        ({"enable_in_reasoning": 1}, ".enable_in_reasoning: got 1; must be true or false"),
        ({"disable_additional_properties": None}, ".disable_additional_properties: got null; must be true or false"),
        ({"reasoning_parser": True}, ".reasoning_parser: got true; must be text"),
        ({"reasoning_parser_plugin": ["a.py"]}, ".reasoning_parser_plugin: got ['a.py']; must be text"),
        ({"disable_any_whitespace": True},
         ".disable_any_whitespace: got true with backend auto; needs backend xgrammar or guidance"),
    ):  # fmt: skip
        changes = {"engine": {"structured_outputs_config": config}}
        line = f"job.yaml:11:5: engine.structured_outputs_config{said}"
        WRONG.append(Wrong(f"structures of {' '.join(config)}", changes, line))


@pytest.fixture
def hub(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serving(tmp_path, monkeypatch) as hub:
        hub.refusals["org/gated"] = (403, {"X-Error-Code": "GatedRepo"})
        hub.refusals["org/private"] = (401, {"X-Error-Message": "Invalid credentials in Authorization header"})
        hub.refs["org/half-gated"] = hub.refs["org/open"] = {"main": "c" * 40}
        hub.commits["c" * 40] = {"config.json": b"{}"}
        hub.gated_files.add("org/half-gated")
        yield hub


def lay_out(wrong: Wrong) -> None:
    """The small job and what it needs, in the working folder."""
    pathlib.Path("model").mkdir()
    for path in jobs.MODEL.iterdir():
        pathlib.Path("model", path.name).symlink_to(path)
    spec: dict[str, Any] = {
        "model": "model",
        "input": {"path": "rows.jsonl"},
        "sampling": {"temperature": 0.0, "max_tokens": 16},
        "output": {"path": "out"},
    }
    for name, section in wrong.changes.items():
        old = spec.get(name)
        spec[name] = {**old, **section} if isinstance(old, dict) and isinstance(section, dict) else section
    pathlib.Path("job.yaml").write_text(
        yaml.safe_dump({k: v for k, v in spec.items() if v is not None}, sort_keys=False)
    )
    pathlib.Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in wrong.rows))
    for name, content in wrong.files.items():
        path = pathlib.Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_bytes(content.encode() if isinstance(content, str) else content)


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.name)
def test_it_is_one_clear_line_and_exit_2(
    wrong: Wrong,
    tmp_path: pathlib.Path,
    hub: Hub,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    lay_out(wrong)
    before = sorted(os.listdir())
    monkeypatch.setattr(sys, "argv", ["batchinf", wrong.command, "job.yaml", *wrong.arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    said = capsys.readouterr().err.replace(f"{tmp_path}/", "").replace(hub.url, "HUB")
    assert said == f"error: {wrong.error}\n"
    assert ended.value.code == 2
    # It is looked at before anything is written.
    assert sorted(set(os.listdir()) - {"cache"}) == before


def test_the_job_that_is_changed_is_right(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    lay_out(Wrong("", {}, ""))
    monkeypatch.setattr(sys, "argv", ["batchinf", "validate", "job.yaml"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert (ended.value.code, capsys.readouterr().err) == (0, "")
