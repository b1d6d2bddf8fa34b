"""Prompts that are cut to fit, texts cut by tokens in a template, and token ids that a column holds."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_chat import make_spec
from test_prompt import BYTES, TEXT, TOKENIZERS
from tokenizers import processors

import jobs
from batchinf.base.errors import RowError, SpecError
from batchinf.prompts.builder import PromptBuilder
from batchinf.prompts.encoder import Encoder
from batchinf.prompts.renderer import Renderer, check_columns
from batchinf.records import Prompt, Result
from batchinf.source.rows import Row
from batchinf.source.types import WrittenNumber
from batchinf.tasks.registry import task_of


def prompts(values: list[dict[str, Any]], max_model_len: int | None, tokenizer: Any = BYTES, **s: Any) -> list[Prompt]:
    builder = PromptBuilder(make_spec(**s), tokenizer, len(tokenizer))
    return builder.build([Row(i, value) for i, value in enumerate(values)], max_model_len)


def left(**more: Any) -> dict[str, Any]:
    return {"input": {"on_overlong": "truncate_left", **more}}


def right(**more: Any) -> dict[str, Any]:
    return {"input": {"on_overlong": "truncate_right", **more}}


# -- on_overlong -------------------------------------------------------------------------------------------------------


def test_a_prompt_is_cut_where_it_is_asked_and_keeps_its_beginning_token() -> None:
    ids = BYTES(TEXT)["input_ids"]
    bos, content = ids[0], ids[1:]
    assert bos == 0
    [one] = prompts([{"prompt": TEXT}], 64, **left())
    assert (one.token_ids, one.is_truncated, one.error) == ([bos, *content[-62:]], True, None)
    [one] = prompts([{"prompt": TEXT}], 64, **right())
    assert (one.token_ids, one.is_truncated) == ([bos, *content[:62]], True)
    # Room for max_tokens, the row's own before the job's.
    sampling = {"max_tokens": 30, "columns": {"max_tokens": "room"}}
    rows = [{"prompt": TEXT, "room": 60}, {"prompt": TEXT, "room": None}, {"prompt": "fox", "room": 60}]
    found = prompts(rows, 64, sampling=sampling, **left())
    assert [one.token_ids for one in found] == [[bos, *content[-3:]], [bos, *content[-33:]], BYTES("fox")["input_ids"]]
    assert [one.is_truncated for one in found] == [True, True, False]
    assert [one.sampling.max_tokens for one in found if one.sampling is not None] == [60, 30, 60]


def test_what_fits_is_left_alone_and_what_leaves_nothing_is_an_error() -> None:
    exact = BYTES("The quick fox")["input_ids"]
    for sections in (left(), right()):
        [one] = prompts([{"prompt": "The quick fox"}], len(exact) + 1, **sections)
        assert (one.token_ids, one.is_truncated) == (exact, False)
        [one] = prompts([{"prompt": "The quick fox"}], len(exact), **sections)
        assert (len(one.token_ids), one.is_truncated) == (len(exact) - 1, True)
        [one] = prompts([{"prompt": "The quick fox"}], None, **sections)
        assert one.token_ids == exact
        for max_tokens in (63, 64, 100):
            [one] = prompts([{"prompt": TEXT}], 64, sampling={"max_tokens": max_tokens}, **sections)
            assert one.error == RowError(
                "prompt_too_long", f"max_tokens {max_tokens} leaves no room for a prompt in max_model_len=64"
            )
    assert prompts([{"prompt": None}], 64, **left())[0].error == RowError("null_prompt", "column 'prompt' is null")


def test_a_token_at_the_end_stays_too() -> None:
    tokenizer = TOKENIZERS["bytes"].__class__(
        tokenizer_object=BYTES.backend_tokenizer.from_str(BYTES.backend_tokenizer.to_str())
    )
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    whole = tokenizer(TEXT)["input_ids"]
    assert (whole[0], whole[-1]) == (0, 1)
    own = tokenizer.__class__(tokenizer_object=tokenizer.backend_tokenizer, truncation_side="left")
    for side, sections in (("left", left()), ("right", right())):
        own.truncation_side = side
        expected = own(TEXT, truncation=True, max_length=20)["input_ids"]
        own.backend_tokenizer.no_truncation()
        assert prompts([{"prompt": TEXT}], 21, tokenizer, **sections)[0].token_ids == expected
        assert (expected[0], expected[-1], len(expected)) == (0, 1, 20)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_an_endless_text_is_cut_as_if_all_of_it_had_been_encoded(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    text = " ".join(f"fox {number} over the lazy dog." for number in range(30_000))
    ids = tokenizer(text)["input_ids"]
    head = ids[:1] if ids[0] == 0 and name.startswith("bytes") else []
    room = 63 - len(head)
    for sections, kept in ((left(), ids[-room:]), (right(), ids[len(head) :][:room])):
        [one] = prompts([{"prompt": text}], 64, tokenizer, **sections)
        assert one.token_ids == [*head, *kept]
        assert one.is_truncated


def test_the_output_says_which_prompts_were_cut() -> None:
    spec = make_spec(sampling={"temperature": 0.0}, **left())
    task = task_of(spec)
    names = task.output_schema([]).names
    assert names[names.index("num_prompt_tokens") + 1] == "prompt_truncated"
    assert "prompt_truncated" not in task_of(make_spec()).output_schema([]).names
    found = prompts([{"prompt": TEXT}, {"prompt": "fox"}, {"prompt": None}], 64, **left())
    error = RowError("engine_death", "x")
    results = [Result(one, 0, 1, None, None, one.error or error, 1) for one in found]
    assert task.encode(results).column("prompt_truncated").to_pylist() == [True, False, None]


# -- token ids ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "outcome"),
    [
        ([5, 0, 7], [5, 0, 7]),
        ("[5, 0, 7]", [5, 0, 7]),
        (None, RowError("null_prompt", "column 'ids' is null")),
        ([], RowError("empty_prompt", "the prompt has no tokens")),
        ([5, -1], RowError("invalid_token_id", "got token id -1; must not be negative")),
        ([5, 400], RowError("invalid_token_id", "token id 400 is outside the model's vocabulary of 300")),
        ([5, 300], RowError("invalid_token_id", "token id 300 is outside the model's vocabulary of 300")),
        ([5, None], RowError("wrong_type", "got a list with null at place 1 in column 'ids'; expected a list of token "
                             "ids")),
        ([5.0], RowError("wrong_type", "got a list with a value of type float at place 0 in column 'ids'; expected a "
                         "list of token ids")),
        ([True], RowError("wrong_type", "got a list with true or false at place 0 in column 'ids'; expected a list of "
                          "token ids")),
        (5, RowError("wrong_type", "got a value of type int in column 'ids'; expected a list of token ids")),
        ("5 6", RowError("wrong_type", "got text that is not JSON in column 'ids'; expected a list of token ids")),
        ("{}", RowError("wrong_type", "got text that is not a list in JSON in column 'ids'; expected a list of token "
                        "ids")),
        ([1] * 64, RowError("prompt_too_long", "got 64 tokens; at most 63 fit max_model_len=64")),
    ],
)  # fmt: skip
def test_token_ids_are_taken_as_they_are(value: Any, outcome: Any) -> None:
    spec = make_spec(input={"token_ids_column": "ids"}, output={"include_prompt": True})
    builder = PromptBuilder(spec, BYTES, 300)
    assert builder.columns == ("ids",)
    [one] = builder.build([Row(0, {"ids": value})], 64)
    assert (one.error or one.token_ids, one.text) == (outcome, None)


def test_token_ids_are_cut_too() -> None:
    ids = list(range(100))
    for sections, expected in ((left(token_ids_column="ids"), [0, *range(38, 100)]),
                               (right(token_ids_column="ids"), [*range(63)])):  # fmt: skip
        [one] = prompts([{"ids": ids}], 64, **sections)
        assert (one.token_ids, one.is_truncated) == (expected, True)
    assert prompts([{"ids": ids[1:]}], 64, **left(token_ids_column="ids"))[0].token_ids == [*range(37, 100)]
    with pytest.raises(SpecError, match=r"^input.token_ids_column: the input has no column 'ids'"):
        check_columns(make_spec(input={"token_ids_column": "ids"}), ["id"], ())


# -- filters -----------------------------------------------------------------------------------------------------------


def filled(template: str, tokenizer: Any = BYTES, **values: Any) -> str | RowError:
    return jobs.or_error(Renderer(make_spec(input={"prompt_template": template}), tokenizer).render, Row(0, values))


def test_truncate_tokens() -> None:
    tokens = [BYTES.decode([number]) for number in BYTES(TEXT, add_special_tokens=False)["input_ids"]]
    assert filled("{{ q | truncate_tokens(7) }}.", q=TEXT) == "".join(tokens[:7]) + "."
    assert filled("{{ q | truncate_tokens(7, side='left') }}.", q=TEXT) == "".join(tokens[-7:]) + "."
    assert filled("{{ q | truncate_tokens(n) }}", q="a fox", n=100) == "a fox"
    assert filled("{{ q | truncate_tokens(0) }}.", q=TEXT) == "."
    assert filled("{{ q | truncate_tokens(3) }}", q=123456) == "123"
    assert filled("{{ q | truncate_tokens(2) }}", q="\U0001f98a\U0001f98a") == RowError(
        "empty_prompt", "the prompt is an empty string"
    )  # four tokens a character here, none of which is cut apart
    assert filled("{{ q | truncate_tokens(4) }}", q="\U0001f98a\U0001f98a") == "\U0001f98a"
    assert filled("{{ q | truncate_tokens(4) }}", q=None).error_type == "null_prompt"
    assert filled("{{ q | truncate_tokens(n) }}", q="a", n=-1) == RowError(
        "template_error",
        "the template failed at line 1: truncate_tokens: got -1 for the number of tokens; must be a whole number, at "
        "least 0",
    )
    long = TEXT * 5000
    assert filled("{{ q | truncate_tokens(20) }}", q=long) == filled("{{ q | truncate_tokens(20) }}", q=TEXT)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=40, deadline=None)
@given(
    text=st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
    | st.text("ab e\u0301漢\U0001f98a\n ", max_size=60),
    num_tokens=st.integers(0, 30),
    side=st.sampled_from(["left", "right"]),
)
def test_a_cut_text_is_a_piece_of_the_text_within_its_tokens(name: str, text: str, num_tokens: int, side: Any) -> None:
    tokenizer = TOKENIZERS[name]
    piece = Encoder(tokenizer, adds_special_tokens=False).cut_text(text, num_tokens, side)
    assert text.startswith(piece) if side == "right" else text.endswith(piece)
    assert len(tokenizer(piece, add_special_tokens=False)["input_ids"]) <= num_tokens
    if len(tokenizer(text, add_special_tokens=False)["input_ids"]) <= num_tokens:
        assert num_tokens == 0 or piece == text


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("truncate_tokens", "call it as truncate_tokens(n), or truncate_tokens(n, side='left')"),
        ("truncate_tokens(n, max=3)", "call it as truncate_tokens(n), or truncate_tokens(n, side='left')"),
        ("truncate_tokens('many')", "got 'many' for the number of tokens; must be a whole number, at least 0"),
        ("truncate_tokens(3, side='end')", "got side='end'; must be 'left' (the last tokens stay) or 'right'"),
    ],
)
def test_a_wrong_call_is_found_before_any_row(call: str, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        Renderer(make_spec(input={"prompt_template": f"a\n{{{{ q | {call} }}}}"}))
    assert str(caught.value) == f"input.prompt_template, line 2: truncate_tokens: {message}"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ x }}|{{ [x] }}|{{ {'a': x} }}", "1.10|[1.10]|{'a': 1.10}"),
        ("{{ x ~ ' EUR' }}|{{ x | string }}|{{ [x, x] | join('-') }}", "1.10 EUR|1.10|1.10-1.10"),
        ("{{ '%s' | format(x) }}|{{ '{}'.format(x) }}|{{ x | replace('.', ',') }}", "1.10|1.10|1,10"),
        ("{{ '%.1f' | format(x) }}|{{ x | float }}|{{ x | round(1) }}|{{ x * 2 }}", "1.1|1.1|1.1|2.2"),
        ("{{ x > 1 and x == 1.1 }}|{{ x == '1.10' }}", "True|False"),
        (
            "{{ x | tojson }}|{{ {'a': [x, {'b': x}], x: '\"'} | tojson }}",
            '1.10|{"a": [1.10, {"b": 1.10}], "1.10": "\\""}',
        ),
        ("{{ {'a': x} | tojson(ensure_ascii=true) }}", '{"a": 1.10}'),
    ],
)
def test_a_written_number_is_printed_as_it_stands_and_computed_as_a_float(template: str, expected: str) -> None:
    assert filled(template, x=WrittenNumber("1.10")) == expected


def test_tojson() -> None:
    value = {"b": [1, None, "é<&'"], "a": {"c": 1.5}}
    assert filled("{{ q | tojson }}", q=value) == json.dumps(value, ensure_ascii=False)
    assert filled("{{ q | tojson(indent=2) }}", q=value) == json.dumps(value, ensure_ascii=False, indent=2)
    assert filled("{{ q | tojson }}", q=None) == "null"
    assert filled("{{ q | tojson }}", q=b"x") == RowError(
        "template_error", "the template failed at line 1: TypeError: a value of type bytes cannot be written as JSON"
    )
