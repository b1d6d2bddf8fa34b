"""Conversations: token ids that are transformers' and vLLM's own, and each way in which a row can have none."""

import datetime
import functools
import json
import pathlib
from typing import TYPE_CHECKING, Any

import pytest

import jobs
from batchinf.base.errors import RowError, SpecError
from batchinf.prompts.builder import PromptBuilder
from batchinf.prompts.chat import ChatTemplate, read_messages
from batchinf.prompts.encoder import load_tokenizer
from batchinf.prompts.renderer import Renderer, check_columns
from batchinf.source.rows import Row
from batchinf.spec.job import JobSpec

if TYPE_CHECKING:
    from batchinf.engines.vllm.engine import VllmEngine

TEMPLATES = {path.stem: path.read_text() for path in (jobs.ROOT / "tests" / "chat_templates").glob("*.jinja")}
BEGUN_AT = "2026-02-03T23:30:00+00:00"

FEW_SHOT = [
    {"role": "user", "content": "  What is 2 + 2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "And 3 + 3? \u00e9\U0001f98a\n"},
]
SYSTEM = [{"role": "system", "content": "Be brief."}, *FEW_SHOT]
PREFILL = [*SYSTEM, {"role": "assistant", "content": "The answer is"}]
CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "few_shot": (FEW_SHOT, {}),
    "system": (SYSTEM, {}),
    "no_turn": (SYSTEM, {"add_generation_prompt": False}),
    "prefill": (PREFILL, {"continue_final_message": True}),
}
KWARGS = {
    "qwen3": {"enable_thinking": False}, "chatml": {"default_system": "Sing."}, "llama3": {"date_string": "1 May 2025"},
}  # fmt: skip


@functools.cache
def tokenizer() -> Any:
    return load_tokenizer(str(jobs.MODEL), False)


def make_spec(**sections: Any) -> JobSpec:
    spec: dict[str, Any] = {"model": "m", "input": {"path": "p"}, "output": {"path": "o"}}
    return JobSpec.model_validate({**spec, **{k: {**spec.get(k, {}), **v} for k, v in sections.items()}})


def builder(input: dict[str, Any], begun_at: str | None = BEGUN_AT, **sections: Any) -> PromptBuilder:
    spec = make_spec(input=input, output={"include_prompt": True}, **sections)
    return PromptBuilder(spec, tokenizer(), len(tokenizer()), begun_at)


def built(values: list[dict[str, Any]], input: dict[str, Any], **sections: Any) -> list[Any]:
    """What becomes of rows: their token ids or their error."""
    prompts = builder(input, **sections).build([Row(i, value) for i, value in enumerate(values)], 512)
    return [prompt.error or prompt.token_ids for prompt in prompts]


def asked(options: dict[str, Any]) -> dict[str, Any]:
    """The options of a conversation as transformers and vLLM take them."""
    continues = bool(options.get("continue_final_message"))
    return {"add_generation_prompt": not continues, **options}


# -- ids are those of others -------------------------------------------------------------------------------------------


def test_there_are_five_styles() -> None:
    assert sorted(TEMPLATES) == ["chatml", "gemma", "llama3", "mistral", "qwen3"]


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("style", [*TEMPLATES, None])
def test_ids_are_those_of_transformers(style: str | None, conversation: str) -> None:
    """Encoded in batches, after rendering, they are what `apply_chat_template(tokenize=True)` gives one by one."""
    messages, options = CONVERSATIONS[conversation]
    template = None if style is None else TEMPLATES[style]
    for kwargs in ({}, KWARGS.get(style or "", {})):
        # Without the date of its own the template of Llama takes the clock: the job's.
        own = {**kwargs, **({"date_string": "03 Feb 2026"} if style == "llama3" and not kwargs else {})}
        ids = tokenizer().apply_chat_template(
            messages, chat_template=template, tokenize=True, return_dict=False, **asked(options), **own
        )
        chat = {"messages_column": "chat", "chat_template": template, "chat_template_kwargs": kwargs or None}
        rows = [{"chat": messages}, {"chat": json.dumps(messages)}, {"chat": None}, {"chat": messages}]
        found = built(rows, {**chat, **options})
        assert [found[0], found[1], found[3]] == [ids] * 3
        assert found[2].error_type == "null_prompt"
        assert ids.count(tokenizer().bos_token_id) == (style not in ("qwen3", "chatml"))


@pytest.fixture(scope="module")
def llm(vllm_engine: "VllmEngine") -> Any:
    """vLLM's `LLM` around the engine that the tests share: all of `LLM.chat` but the start of another."""
    from vllm import LLM
    from vllm.utils.counter import Counter

    made = LLM.__new__(LLM)
    made.llm_engine = vllm_engine._engine
    for name in ("model_config", "renderer", "input_processor"):
        setattr(made, name, getattr(vllm_engine._engine, name))
    made.request_counter, made.chat_template = Counter(), None
    return made


@pytest.mark.parametrize("style", [*TEMPLATES, None])
def test_ids_are_those_of_vllm(llm: Any, style: str | None) -> None:
    from vllm import SamplingParams

    template = None if style is None else TEMPLATES[style]
    kwargs = KWARGS.get(style or "")
    parts = [{"role": "user", "content": [{"type": "text", "text": "One."}, {"type": "text", "text": " Two. "}]}]
    calls = [{"type": "function", "function": {"name": "add", "arguments": '{"a": [1, null]}'}}]
    called = [FEW_SHOT[0], {"role": "assistant", "content": "", "tool_calls": calls}, FEW_SHOT[2]]
    developer = [FEW_SHOT[0], {"role": "assistant", "content": "4"}, {"role": "developer", "content": "Now sing."},
                 FEW_SHOT[2]]  # fmt: skip
    more = {"parts": (parts, {}), "called": (called, {}), "developer": (developer, {})}
    for messages, options in {**CONVERSATIONS, **more}.values():
        [output] = llm.chat(
            messages,
            SamplingParams(max_tokens=1, temperature=0),
            use_tqdm=False,
            chat_template=template,
            chat_template_kwargs=kwargs,
            **asked(options),
        )
        chat = {"messages_column": "chat", "chat_template": template, "chat_template_kwargs": kwargs, **options}
        assert built([{"chat": messages}], chat) == [output.prompt_token_ids]


# -- each way to say what a conversation is ----------------------------------------------------------------------------


def text_of(input: dict[str, Any], **values: Any) -> str | RowError:
    renderer = Renderer(make_spec(input={"chat_template": TEMPLATES["chatml"], **input}), tokenizer())
    return jobs.or_error(renderer.render, Row(0, values))


def chatml(*turns: tuple[str, str], end: str = "<|im_start|>assistant\n") -> str:
    default = [] if turns[0][0] == "system" else [("system", "You are a helpful assistant.")]
    return "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in [*default, *turns]) + end


def test_each_form_of_a_conversation() -> None:
    turn = ("user", "a fox")
    assert text_of({}, prompt="a fox") == chatml(turn)
    assert text_of({"prompt_column": "q"}, q="a fox") == chatml(turn)
    assert text_of({"prompt_template": "a {{ q }}"}, q="fox") == chatml(turn)
    assert text_of({"system_prompt": "{{ Be }} brief."}, prompt="a fox") == chatml(("system", "{{ Be }} brief."), turn)
    assert text_of({"add_generation_prompt": False}, prompt="a fox") == chatml(turn, end="")
    messages = [
        {"role": "user", "content": "Say yes."},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "{{ q }}{% if n %} {{ n }}{% endif %}"},
        {"role": "assistant", "content": "I say "},
    ]
    shots = (("user", "Say yes."), ("assistant", "yes"))
    prefill = "<|im_start|>assistant\nI say "
    text = text_of({"messages": messages, "continue_final_message": True}, q="fox", n=None)
    assert text == chatml(*shots, ("user", "fox"), end=prefill)
    text = text_of({"messages": messages[:3], "system_prompt": "Hi."}, q="fox", n=2)
    assert text == chatml(("system", "Hi."), *shots, ("user", "fox 2"))


def test_arrow_fills_with_nulls_what_other_messages_have() -> None:
    filled = [
        {"role": "user", "content": "hi", "tool_calls": None, "name": None},
        {"role": "assistant", "content": None, "name": None,
         "tool_calls": [{"id": None, "type": "function", "function": {"name": "f", "arguments": '{"a": null}'}}]},
        {"role": "user", "content": [{"type": "text", "text": "a", "image_url": None}], "name": None},
    ]  # fmt: skip
    assert read_messages(filled, "column 'chat'") == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "",
         "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"a": None}}}]},
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
    ]  # fmt: skip
    # Templates of several models show an image for a part that has such a key.
    part = '[{"role": "user", "content": [{"type": "text", "text": "a", "image": null}]}]'
    assert read_messages(part, "column 'chat'") == [{"role": "user", "content": [{"type": "text", "text": "a"}]}]


def test_images_beside_the_content_are_refused() -> None:
    message = {"role": "user", "content": "hi", "images": ["a.png"]}
    refused = jobs.or_error(read_messages, [message], "column 'chat'", takes_images=True)
    assert isinstance(refused, RowError)
    assert refused.error_message == (
        "column 'chat', message 0: got 'images' beside the content; give each image a part of its own in the content"
    )
    assert read_messages([{**message, "images": []}], "column 'chat'", takes_images=True) == [{**message, "images": []}]


EXPECTED = "expected a list of messages, or JSON text of one"


@pytest.mark.parametrize(
    ("value", "error_type", "message"),
    [
        (None, "null_prompt", "column 'chat' is null"),
        ([], "empty_prompt", "column 'chat' has no messages"),
        ("hello", "invalid_messages", "got text that is not JSON (JSONDecodeError: Expecting value: line 1 column 1 "
         f"(char 0)) in column 'chat'; {EXPECTED}"),
        ('"hello"', "invalid_messages", f"got text in column 'chat'; {EXPECTED}"),
        ({"role": "user"}, "invalid_messages", f"got a mapping in column 'chat'; {EXPECTED}"),
        (5, "invalid_messages", f"got a value of type int in column 'chat'; {EXPECTED}"),
        (["hi"], "invalid_messages", "column 'chat', message 0: got text; expected a mapping with role and content"),
        *[([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}],
           "invalid_messages", "column 'chat', message 0: got arguments of a tool call that are no JSON mapping: "
           f"{words}") for arguments, words in [("[1]", "a list"), ([1], "a list"), ("5", "a value of type int")]],
        ([{"author": "user", "value": "hi"}], "invalid_messages",
         "column 'chat', message 0: got no role, but author, value; expected text such as 'user'"),
        ([{"from": "human", "value": "hi"}], "invalid_messages", "column 'chat', message 0: got ShareGPT's from and "
         "value; expected role and content: human is user, and gpt is assistant"),
        ([{"role": 1, "content": "hi"}], "invalid_messages",
         "column 'chat', message 0: got a value of type int for role; expected text such as 'user'"),
        ([FEW_SHOT[0], {"role": "assistant", "content": None}], "invalid_messages",
         "column 'chat', message 1: got no content from 'assistant'"),
        ([{"role": "user", "content": 7}], "invalid_messages",
         "column 'chat', message 0: got a value of type int for content; expected text, or a list of parts of text"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "invalid_messages",
         "column 'chat', message 0: got a part of type 'image_url'; only parts of type 'text' are supported, unless "
         "the spec has input.images"),
        ([{"role": "user", "content": [{"type": "text"}]}], "invalid_messages",
         "column 'chat', message 0: got null for the text of a part; expected text"),
        ([{"role": "user", "content": [{"type": "text", "text": "a", "image": "x.png"}]}], "invalid_messages",
         "column 'chat', message 0: got 'image' in a part of type 'text'; give the image a part of its own"),
        ([{"role": "user", "content": "\ud800"}], "invalid_unicode",
         "the prompt is not valid Unicode: lone surrogate U+D800 at character 25"),
        ([FEW_SHOT[0], FEW_SHOT[0]], "template_error", "the chat template failed at line 11: After the optional system "
         "message, conversation roles must alternate user/assistant"),
    ],
)  # fmt: skip
def test_a_bad_conversation_is_told_apart(value: Any, error_type: str, message: str) -> None:
    good = {"chat": FEW_SHOT}
    options = {"messages_column": "chat", "chat_template": TEMPLATES["mistral"]}
    first, bad, last = built([good, {"chat": value}, good], options)
    assert bad == RowError(error_type, message)
    assert first == last == built([good], options)[0]


def test_other_rows_without_a_conversation() -> None:
    assert built([{}], {"messages_column": "chat"}) == [RowError("missing_column", "row has no column 'chat'")]
    own = {"messages_column": "chat", "system_prompt": "Be brief."}
    assert built([{"chat": SYSTEM}], own) == [
        RowError(
            "invalid_messages", "the conversation begins with a system message of its own, beside input.system_prompt"
        )
    ]
    assert built([{"prompt": ""}], {"system_prompt": "Be brief."}) == [
        RowError("empty_prompt", "the prompt is an empty string")
    ]
    turns = [{"role": "system", "content": "x"}, {"role": "user", "content": "{{ q }}"}]
    assert built([{"q": None}], {"messages": turns}) == [
        RowError(
            "null_prompt",
            "the template input.messages[1].content prints a null (null here: q); {{ x or '' }} would print nothing",
        )
    ]
    # transformers looks for the final message in what comes out, and this template loses it.
    lost = {"chat_template": "{{ messages[0].content }}", "messages_column": "chat", "continue_final_message": True}
    [error] = built([{"chat": PREFILL}], lost)
    assert error.error_type == "template_error"
    assert "continue_final_message is set but the final message does not appear" in error.error_message


def test_columns_of_messages_are_looked_for() -> None:
    turns = [{"role": "user", "content": "{{ q }}"}, {"role": "assistant", "content": "{{ answr }}"}]
    spec = make_spec(input={"messages": turns})
    assert Renderer(spec).columns == ("q", "answr")
    with pytest.raises(SpecError) as caught:
        check_columns(spec, ["q", "answer"], ())
    assert str(caught.value) == (
        "input.messages[1].content: the input has no column 'answr'; did you mean 'answer'? it has: q, answer"
    )


# -- the date ----------------------------------------------------------------------------------------------------------


def test_a_template_that_prints_the_date_sees_the_jobs_own() -> None:
    for begun_at, shown in ((BEGUN_AT, "03 Feb 2026 23"), ("2026-02-03T23:30:00-05:00", "04 Feb 2026 04")):
        chat = make_spec(input={"chat_template": "{{ strftime_now('%d %b %Y %H') }}{{ messages }}"}).input
        text = ChatTemplate(chat, tokenizer(), begun_at).render([{"role": "user", "content": "x"}])
        assert isinstance(text, str)
        assert text.startswith(shown)
    text = ChatTemplate(chat, tokenizer(), None).render([{"role": "user", "content": "x"}])
    assert isinstance(text, str)
    assert abs(int(text[7:11]) - datetime.datetime.now(datetime.UTC).year) <= 1  # it may be New Year's Eve


# -- whole jobs --------------------------------------------------------------------------------------------------------

CHAT = {
    "messages": [
        {"role": "system", "content": "Answer in {{ language }}."},
        {"role": "user", "content": "{{ prompt | truncate_tokens(12) }}"},
    ],
    "chat_template_kwargs": {"enable_thinking": False},
}
ROWS = [json.loads(line) for line in jobs.PROMPTS.read_text().split("\n")[:240]]
TO_THE_SECOND = "{{ strftime_now('%H:%M:%S') }} {{ messages[-1].content }}"


def chat_job(folder: pathlib.Path, input: dict[str, Any], step_s: float) -> pathlib.Path:
    folder.mkdir()
    (folder / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in ROWS))
    where = {"path": str(folder / "rows.jsonl"), **input}
    scripted, one = {"step_s": step_s}, {"data_parallel_size": 1}
    return jobs.spec_of(folder, input=where, output={"include_prompt": True}, scripted=scripted, parallel=one)


def killed_and_resumed(folder: pathlib.Path, input: dict[str, Any]) -> pathlib.Path:
    """The output folder of a job that was killed with some of its rows stored, and a while later went on."""
    path, out = chat_job(folder, input, 0.005), folder / "out"
    process = jobs.start("run", path)
    jobs.wait_until(lambda: any(out.glob("journal/*")) or any(out.glob("parts/*.parquet")))
    jobs.kill(jobs.family(process.pid))
    process.communicate()
    assert not jobs.state_of(out).is_done
    jobs.finish(path)
    return out


@pytest.mark.slow
def test_a_job_of_chat_that_is_killed_has_the_rows_of_one_never_hurt(tmp_path: pathlib.Path) -> None:
    chat = {**CHAT, "chat_template": TEMPLATES["qwen3"]}
    jobs.finish(chat_job(tmp_path / "whole", chat, 0.0))
    rows = jobs.rows_of(killed_and_resumed(tmp_path / "hurt", chat))
    assert len(rows) == len(ROWS)
    assert rows == jobs.rows_of(tmp_path / "whole/out")
    ending = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert all(row["prompt"].startswith(f"<|im_start|>system\nAnswer in {row['language']}.") for row in rows)
    assert all(row["prompt"].endswith(ending) for row in rows)


@pytest.mark.slow
def test_the_time_that_a_template_prints_stands_still_over_a_resume(tmp_path: pathlib.Path) -> None:
    out = killed_and_resumed(tmp_path / "hurt", {"chat_template": TO_THE_SECOND})
    begun_at = datetime.datetime.fromisoformat(jobs.state_of(out).header.created_at)
    expected = [f"{begun_at:%H:%M:%S} {row['prompt']}" for row in ROWS]
    assert [row["prompt"] for row in jobs.rows_of(out)] == expected


def test_validate_shows_the_rendered_conversation(tmp_path: pathlib.Path) -> None:
    done = jobs.run("validate", jobs.spec_of(tmp_path, input={"system_prompt": "Be brief."}), "-n", "1")
    assert done.returncode == 0, done.stderr
    assert (
        "  │ <|begin_of_text|><|start_header_id|>system<|end_header_id|>\n  │ \n"
        "  │ Be brief.<|eot_id|><|start_header_id|>user<|end_header_id|>\n  │ \n" in done.stdout
    )
    assert "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n  │ \n" in done.stdout
    assert "warning" not in done.stdout
