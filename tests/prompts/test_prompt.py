"""Row → token ids: each way in which a row can have no prompt, and ids that are the tokenizer's own."""

import datetime
import decimal
import math
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

import jobs
from batchinf.base.errors import ModelError, RowError, SpecError
from batchinf.base.text import list_names
from batchinf.prompts.builder import PromptBuilder
from batchinf.prompts.encoder import load_tokenizer, show
from batchinf.prompts.renderer import Renderer, check_columns
from batchinf.source.rows import Row
from batchinf.spec.job import JobSpec

TEXT = "The quick brown fox jumps over the lazy dog. " * 20
COLUMNS = ["id", "prompt", "question", "kind"]


def byte_level(normalizer: Any = None, vocab_size: int = 400) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT, " " * 40], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def unigram() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=60, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator([TEXT], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def word_piece() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=80, special_tokens=["[UNK]"], show_progress=False)
    tokenizer.train_from_iterator([TEXT], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]")


BYTES = byte_level()
TOKENIZERS = {
    "bytes": BYTES,
    "bytes_nfc": byte_level(normalizers.NFC()),
    "unigram": unigram(),
    "word_piece": word_piece(),
}


def make_spec(**sections: Any) -> JobSpec:
    spec: dict[str, Any] = {"model": "m", "input": {"path": "rows.jsonl"}, "output": {"path": "out"}}
    return JobSpec.model_validate({key: {**spec.get(key, {}), **sections.get(key, {})} if key != "model" else "m"
                                   for key in spec})  # fmt: skip


def build(values: list[Any], max_model_len: int | None = 512, tokenizer: Any = BYTES, **sections: Any) -> list[Any]:
    """What becomes of rows: their token ids or their error."""
    rows = [value if isinstance(value, Row) else Row(i, value) for i, value in enumerate(values)]
    prompts = PromptBuilder(make_spec(**sections), tokenizer, len(tokenizer)).build(rows, max_model_len)
    assert [prompt.row_index for prompt in prompts] == [row.row_index for row in rows]
    assert all(bool(prompt.error) != bool(prompt.token_ids) for prompt in prompts)
    return [prompt.error or prompt.token_ids for prompt in prompts]


# Prompts from a column


@pytest.mark.parametrize(
    ("row", "error_type", "message"),
    [
        (Row(0, {}, "rows.jsonl, line 7: not JSON"), "unreadable", "rows.jsonl, line 7: not JSON"),
        (Row(0, {"id": 1, "kind": "a"}), "missing_column", "row has no column 'prompt'"),
        (Row(0, {}), "missing_column", "row has no column 'prompt'"),
        (Row(0, {"prompt": None}), "null_prompt", "column 'prompt' is null"),
        (Row(0, {"prompt": 12}), "wrong_type", "got int in column 'prompt'; expected a string"),
        (Row(0, {"prompt": ["a"]}), "wrong_type", "got list in column 'prompt'; expected a string"),
        (Row(0, {"prompt": b"a"}), "wrong_type", "got bytes in column 'prompt'; expected a string"),
        (Row(0, {"prompt": ""}), "empty_prompt", "the prompt is an empty string"),
        (
            Row(0, {"prompt": "abc\ud800"}),
            "invalid_unicode",
            "the prompt is not valid Unicode: lone surrogate U+D800 at character 4",
        ),
        (
            Row(0, {"prompt": "%" * 1203}),
            "prompt_too_long",
            "got 1,204 tokens; at most 511 fit max_model_len=512",
        ),
        (
            Row(0, {"prompt": "%" * 1_000_000}),
            "prompt_too_long",
            "got 1,000,000 characters, of which the first 8,192 are 8,193 tokens; at most 511 fit max_model_len=512",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else "",
)
def test_a_bad_row_is_told_apart(row: Row, error_type: str, message: str) -> None:
    assert build([row]) == [RowError(error_type, message)]


def test_many_columns_are_not_all_listed() -> None:
    assert list_names([f"c{i:02}" for i in range(1000)]).endswith("c18, c19, and 980 more")


def test_bad_rows_leave_the_others_alone() -> None:
    good = {"prompt": "The quick"}
    alone = build([good])[0]
    results = build([good, {"prompt": None}, good, {"prompt": "%" * 600}, {"prompt": "\udfff"}, good])
    assert [results[0], results[2], results[5]] == [alone] * 3
    assert [results[i].error_type for i in (1, 3, 4)] == ["null_prompt", "prompt_too_long", "invalid_unicode"]


def test_the_other_column_and_no_rows() -> None:
    assert build([{"q": "fox"}], input={"prompt_column": "q"}) == build([{"prompt": "fox"}])
    assert build([]) == []


def test_one_token_must_fit_after_the_prompt() -> None:
    fits, too_long = build([{"prompt": "%" * 510}, {"prompt": "%" * 511}])
    assert len(fits) == 511
    assert too_long == RowError("prompt_too_long", "got 512 tokens; at most 511 fit max_model_len=512")
    assert len(build([{"prompt": "%" * 5000}], max_model_len=None)[0]) == 5001


def test_a_prompt_without_tokens_is_empty() -> None:
    assert build([{"prompt": " \t "}], tokenizer=TOKENIZERS["word_piece"]) == [
        RowError("empty_prompt", "the prompt has no tokens")
    ]


def test_an_id_outside_the_vocabulary_is_refused() -> None:
    rows = [Row(0, {"prompt": "a</s>"}), Row(1, {"prompt": "a quick"})]
    highest = max(BYTES("a quick")["input_ids"])
    prompts = PromptBuilder(make_spec(), BYTES, highest).build(rows, 512)
    shown = BYTES.decode([highest])
    assert prompts[0].error is None
    assert prompts[1].error == RowError(
        "invalid_token_id", f"token id {highest} ('{shown}') is outside the model's vocabulary of {highest}"
    )
    assert PromptBuilder(make_spec(), BYTES, None).build(rows, 512)[1].error is None


def test_text_is_kept_only_if_it_is_stored() -> None:
    rows = [Row(0, {"prompt": "fox"}), Row(1, {"prompt": "%" * 600}), Row(2, {"prompt": None})]
    kept = PromptBuilder(make_spec(output={"include_prompt": True}), BYTES, None).build(rows, 512)
    assert [prompt.text for prompt in kept] == ["fox", "%" * 600, None]
    dropped = PromptBuilder(make_spec(), BYTES, None).build(rows, 512)
    assert [prompt.text for prompt in dropped] == [None] * 3


# Token ids


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(texts=st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), min_size=1, max_size=8))
def test_ids_are_the_tokenizers_own(name: str, texts: list[str]) -> None:
    tokenizer = TOKENIZERS[name]
    results = build([{"prompt": text} for text in texts], None, tokenizer)
    own = [tokenizer(text, add_special_tokens=True)["input_ids"] for text in texts]
    assert [result if isinstance(result, list) else [] for result in results] == own


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    pieces=st.lists(
        st.tuples(
            st.sampled_from([" ", "\n", "fox", "漢", "e\u0301", "</s>", "%", "ﬃ", "a" * 90]), st.integers(1, 900)
        ),
        min_size=1,
        max_size=8,
    ),
    max_model_len=st.integers(2, 60),
)
def test_only_what_is_too_long_is_refused_early(name: str, pieces: list[tuple[str, int]], max_model_len: int) -> None:
    tokenizer = TOKENIZERS[name]
    text = "".join(piece * count for piece, count in pieces)
    num_tokens = len(tokenizer(text)["input_ids"])
    (result,) = build([{"prompt": text}], max_model_len, tokenizer)
    was_refused = isinstance(result, RowError) and result.error_type == "prompt_too_long"
    assert was_refused == (num_tokens >= max_model_len)


def test_white_space_may_vanish_into_a_token() -> None:
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken("<gap>", lstrip=True)], special_tokens=True)
    text = "fox" + " \t" * 200_000 + "<gap>"
    assert len(tokenizer(text)["input_ids"]) < 10
    assert build([{"prompt": text}], 64, tokenizer) == [tokenizer(text)["input_ids"]]


@pytest.mark.parametrize("name", ["bytes", "unigram"])
def test_of_a_megabyte_a_piece_is_tokenized(name: str) -> None:
    sizes: list[int] = []

    class Counting:
        def __call__(self, texts: list[str], **options: Any) -> Any:
            sizes.append(sum(map(len, texts)))
            return TOKENIZERS[name](texts, **options)

        def __len__(self) -> int:
            return len(TOKENIZERS[name])

        def __getattr__(self, attribute: str) -> Any:
            return getattr(TOKENIZERS[name], attribute)

    texts = ["x" * 1_000_000, TEXT * 1200, "fox " * 250_000]
    # To the other tokenizer, whose vocabulary lacks the signs, this is one unknown token.
    texts += ["漢字" * 200_000] if name == "bytes" else []
    for text in texts:
        sizes.clear()
        [result] = build([{"prompt": text}], 512, Counting())
        assert result.error_type == "prompt_too_long"
        assert sum(sizes) < 32_768


def test_large_batches_are_cut() -> None:
    sizes: list[int] = []

    class Counting:
        def __call__(self, texts: list[str], **options: Any) -> Any:
            sizes.append(sum(map(len, texts)))
            return BYTES(texts, **options)

        def get_vocab(self) -> dict[str, int]:
            return BYTES.get_vocab()

    rows = [Row(i, {"prompt": "fox " * 75_000}) for i in range(8)]
    prompts = PromptBuilder(make_spec(), Counting(), 400).build(rows, None)
    assert sizes == [900_000, 900_000, 600_000]
    assert all(prompt.token_ids == prompts[0].token_ids for prompt in prompts)


class Poisonable(PreTrainedTokenizerFast):
    """A tokenizer with code of its own, which some texts break."""

    def __call__(self, text: Any, **options: Any) -> Any:
        if any("poison" in one for one in text):
            raise ValueError("no such\ntoken \ud800")
        return super().__call__(text, **options)


def test_one_poisonous_text_does_not_spoil_its_batch() -> None:
    tokenizer = Poisonable(tokenizer_object=BYTES.backend_tokenizer)
    results = build([{"prompt": "quick"}, {"prompt": "poison"}, {"prompt": "lazy"}], tokenizer=tokenizer)
    assert results == [
        BYTES("quick")["input_ids"],
        RowError("tokenizer_error", "the tokenizer failed: ValueError: no such token \\ud800"),
        BYTES("lazy")["input_ids"],
    ]


# Templates


@pytest.mark.parametrize(
    ("template", "values", "text"),
    [
        ("{{ q }}", {"q": "fox"}, "fox"),
        ("Q: {{ q }}\nA:\n", {"q": "<b> & 'c'"}, "Q: <b> & 'c'\nA:\n"),
        ("{% for c in q %}{{ loop.index }}. {{ c }}\n{% endfor %}", {"q": ["a", "b"]}, "1. a\n2. b\n"),
        ("{{ q.name | upper }} {{ n + 1 }}", {"q": {"name": "fox"}, "n": 2}, "FOX 3"),
        ("{{ q or 'none' }}", {"q": None}, "none"),
        ("{% if q is defined %}{{ q }}{% else %}-{% endif %}", {}, "-"),
        ("{{ '=' * 3 }}{{ q }}", {"q": 0.5}, "===0.5"),
        # Columns with the names of functions.
        (
            "{{ dict }} {{ range ~ 'km' }}{% if range == '1-2' %}!{% endif %}",
            {"dict": "Duden", "range": "1-2"},
            "Duden 1-2km!",
        ),
        ("{% for i in range(2) %}{{ i }}{% endfor %}{{ dict }}", {"dict": "Duden", "range": "1-2"}, "01Duden"),
        ('{{ column("My Text") | upper }} {{ column }}', {"My Text": "fox", "column": 2}, "FOX 2"),
        ("{% for c in column('a}} \"☕') %}{{ c }}.{% endfor %}", {'a}} "☕': "ab"}, "a.b."),
    ],
)
def test_a_template_is_filled(template: str, values: dict[str, Any], text: str) -> None:
    renderer = Renderer(make_spec(input={"prompt_template": template}))
    assert renderer.render(Row(0, values)) == text


@pytest.mark.parametrize(
    ("template", "error_type", "message"),
    [
        ("{{ q }} {{ typo }}", "template_error", "the template failed at line 1: 'typo' is undefined"),
        ("\n\n{{ q.typo }}", "template_error", "the template failed at line 3: 'str object' has no attribute 'typo'"),
        (
            "{{ ''.__class__.__mro__ }}{{ q }}",
            "template_error",
            "the template failed at line 1: access to attribute '__class__' of 'str' object is unsafe.",
        ),
        ("{{ column('a b') }}{{ q }}", "template_error", "the template failed at line 1: 'a b' is undefined"),
        ("{{ column('no thing') }}", "null_prompt", "the template prints a null (null here: no thing); {{ x or '' }} "
         "would print nothing"),
        ("{{ q // 0 }}", "template_error", "the template failed at line 1: TypeError: unsupported operand type(s) for "
         "//: 'str' and 'int'"),
        ("{{ q * 10**9 }}", "template_error", "the template makes more than 67,108,864 characters"),
        ("{{ 10**9 * q }}", "template_error", "the template makes more than 67,108,864 characters"),
        (
            "{% for i in range(9999) %}{{ q * 99999 }}{% endfor %}",
            "template_error",
            "the template makes more than 67,108,864 characters",
        ),
        ("{{ nothing }}{{ q }}", "null_prompt", "the template prints a null (null here: nothing); {{ x or '' }} would "
         "print nothing"),
        ("{% if not q %}{{ q }}{% endif %}", "empty_prompt", "the prompt is an empty string"),
        ("{{ bad }}", "invalid_unicode", "the prompt is not valid Unicode: lone surrogate U+DC80 at character 1"),
        ("{{ q[bad] }}", "template_error", "the template failed at line 1: 'str object' has no attribute '\\udc80'"),
    ],
)  # fmt: skip
def test_a_template_that_fails(template: str, error_type: str, message: str) -> None:
    values = {"q": "fox", "nothing": None, "no thing": None, "bad": "\udc80"}
    assert build([values], input={"prompt_template": template}) == [RowError(error_type, message)]


# A template that makes a text of `x`, and the text of jobs that began before this was refused, with a null.
NULLS_MADE_TEXTS = [
    "{{ x | trim }}",
    "{{ x | upper }}",
    "{{ x | string | replace('o', '0') }}",
    "{{ 'city ' ~ x }}",
    "{{ [x, y] | join(', ') }}",
    "{{ [x, y] | map('title') | join }}",
    "{{ '%s' | format(x) }}",
    "{{ '%s and %s' % (x, y) }}",
    "{{ '{} {}'.format(y, x) }}",
    "{{ x | truncate_tokens(4) | lower }}",
    "{{ '%s %s' | format(*[y, x]) }}",
    "{{ '%(a)s' % {'a': x} }}{{ y }}",
    "{{ '{a}'.format_map({'a': x}) }}{{ y }}",
    "{{ '{0[a]}'.format({'a': x}) }}{{ y }}",
    "{% set z = 'a' ~ x %}{{ z }}",
    "{{ x | safe }}{{ y }}",
    "{{ x | pprint }}{{ y }}",
    "{{ x | format }}{{ y }}",
    "{{ x | int }}{{ y }}",
    "{{ x | float + 1 }}{{ y }}",
]


@pytest.mark.parametrize("template", NULLS_MADE_TEXTS)
@pytest.mark.parametrize(("value", "word"), [(None, "null"), (math.nan, "NaN")])
def test_a_null_never_becomes_a_word(template: str, value: object, word: str) -> None:
    section = {"prompt_template": template}
    [error] = build([{"x": value, "y": "b"}], input=section)
    assert isinstance(error, RowError)
    assert error.error_type == "null_prompt"
    assert error.error_message.startswith(f"the template prints a {word} ({word} here: x); {{{{ x ")


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ (x or '-') | trim }}{{ y }}", "-b"),
        ("{{ x | int(7) }}{{ x | float(default=1.5) }}{{ y }}", "71.5b"),
        ("{% if x %}{{ x }}{% else %}none{% endif %}{{ y }}", "noneb"),
        ("{{ x | tojson }}{{ y }}", "nullb"),
        ("{{ 5 % 3 }}{{ [y, y] | join(x or '+') }}", "2b+b"),
        ("{{ x | map('trim') | join(',') }}{{ y }}", "b"),
        ("{{ x | truncate_tokens(4) or 'none' }}{{ y }}", "noneb"),
        ("{{ '%(a)s' % {'a': y, 'unused': x} }}", "b"),
        ("{{ '{a}'.format_map({'a': y, 'unused': x}) }}", "b"),
        ("{{ '{0[a]}'.format({'a': y, 'unused': x}) }}", "b"),
    ],
)
def test_a_null_that_the_template_handles(template: str, text: str) -> None:
    section = {"prompt_template": template}
    assert Renderer(make_spec(input=section)).render(Row(0, {"x": None, "y": "b"})) == text


def test_a_column_that_a_row_does_not_have_is_false_like_a_null() -> None:
    section = {"prompt_template": "{{ y }}{{ x or '-' }}{% if x %}!{% endif %}"}
    row = Row(0, {"y": "b"})
    assert Renderer(make_spec(input=section)).render(row) == "b-"
    nested = Renderer(make_spec(input={"prompt_template": "{{ meta.titel or '-' }}"}))
    of_value = jobs.or_error(nested.render, Row(0, {"meta": {}}))
    assert of_value == RowError(
        "template_error", "the template failed at line 1: 'dict object' has no attribute 'titel'"
    )
    printed = jobs.or_error(Renderer(make_spec(input={"prompt_template": "{{ y }}{{ x }}"})).render, row)
    assert printed == RowError("template_error", "the template failed at line 1: 'x' is undefined")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("a\nb {{ q", "input.prompt_template, line 2: unexpected end of template, expected 'end of print statement'."),
        (
            "{{ Review Text }}",
            "input.prompt_template, line 1: expected token 'end of print statement', got 'Text'; the column of this "
            'name would be {{ column("Review Text") }}',
        ),
        ("{{ q | nope }}", "input.prompt_template, line 1: No filter named 'nope'."),
        ("{{ q | random }}", "input.prompt_template, line 1: No filter named 'random'."),
        ("{% include 'x' %}{{ q }}", "input.prompt_template: it includes another template; write it as one"),
        (
            "Q: {question}",
            "input.prompt_template: it names no column; write {{ column }} where a row's value goes",
        ),
    ],
)
def test_a_template_that_cannot_be(template: str, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        Renderer(make_spec(input={"prompt_template": template}))
    assert str(caught.value) == message


# Columns


@pytest.mark.parametrize(
    ("section", "columns"),
    [
        ({}, ("prompt",)),
        ({"prompt_column": "text"}, ("text",)),
        ({"prompt_template": "{{ range }} {% if dict == 'a' %}{% endif %}{{ namespace(a=1).a }}"}, ("dict", "range")),
        ({"prompt_template": "{{ b }} {% set c = a %}{{ c }}{% for i in range(2) %}{{ i }}{% endfor %}"}, ("a", "b")),
    ],
)
def test_columns(section: dict[str, str], columns: tuple[str, ...]) -> None:
    assert PromptBuilder(make_spec(input=section), BYTES, None).columns == columns


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({}, None),
        ({"input": {"prompt_template": "{{ question }}{{ kind }}", "id_column": "id"}}, None),
        (
            {"input": {"prompt_column": "promt"}},
            "input.prompt_column: the input has no column 'promt'; did you mean 'prompt'? "
            "it has: id, prompt, question, kind",
        ),
        (
            {"input": {"prompt_template": "{{ kind }} {{ context }}"}},
            "input.prompt_template: the input has no column 'context'; it has: id, prompt, question, kind",
        ),
        (
            {"input": {"prompt_template": "{{ Review_Text }}"}},
            "input.prompt_template: the input has no column 'Review_Text'; did you mean column(\"Review Text\")? "
            "it has: id, Review Text",
        ),
        (
            {"input": {"id_column": "idd"}},
            "input.id_column: the input has no column 'idd'; did you mean 'id'? it has: id, prompt, question, kind",
        ),
        (
            {"output": {"keep_columns": ("kind", "xyz")}},
            "output.keep_columns: the input has no column 'xyz'; it has: id, prompt, question, kind",
        ),
    ],
)
def test_check_columns(sections: dict[str, Any], message: str | None) -> None:
    if message is None:
        check_columns(make_spec(**sections), COLUMNS, ())
        return
    with pytest.raises(SpecError) as caught:
        check_columns(make_spec(**sections), ["id", "Review Text"] if "Review Text" in message else COLUMNS, ())
    assert str(caught.value) == message


# Tokenizers


def test_load_tokenizer(tmp_path: Any) -> None:
    saved = byte_level()
    saved.backend_tokenizer.enable_truncation(4)
    saved.backend_tokenizer.enable_padding(length=64)
    saved.save_pretrained(tmp_path)
    loaded = load_tokenizer(str(tmp_path), False)
    assert loaded.backend_tokenizer.truncation is None
    assert build([{"prompt": TEXT}], None, loaded) == build([{"prompt": TEXT}], None)
    ids = loaded("A quick fox")["input_ids"]
    assert show(loaded, ids) == "<s>A quick fox"


@pytest.mark.parametrize("content", [None, "{", '{"version": "1.0"}'])
def test_a_tokenizer_that_does_not_load(tmp_path: Any, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelError) as caught:
        load_tokenizer(str(tmp_path), False)
    assert str(caught.value).startswith(f"cannot load the tokenizer of '{tmp_path}': ")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ([datetime.time(1, 2, 3)], "[01:02:03]"),
        ({"d": datetime.date(2024, 1, 31), "n": None}, "{'d': 2024-01-31, 'n': None}"),
        ([("k", decimal.Decimal("0E-9"))], "[('k', 0.000000000)]"),
        ([{"t": [datetime.timedelta(1)]}, "a"], "[{'t': [1 day, 0:00:00]}, 'a']"),
        ([b"ab"], None),
        ({"a": [b"ab"]}, None),
    ],
)
@pytest.mark.parametrize("template", ["{{ x }}", "{{ x | string }}", "{{ x ~ '' }}", "{{ [x] | join(',') }}"])
def test_values_in_a_list_are_printed_as_alone(value: object, text: str | None, template: str) -> None:
    spec = make_spec(input={"prompt_template": template})
    rendered = jobs.or_error(Renderer(spec).render, Row(0, {"x": value}))
    if text is None:
        assert isinstance(rendered, RowError) and "it prints bytes" in rendered.error_message
    else:
        assert rendered == text


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ x }}{{ y }}", "0.000000000b"),
        ("{{ x ~ y }}", "0.000000000b"),
        ("{{ [x, y] | join }}", "0.000000000b"),
        ("{{ x | trim }}{{ y }}", "0.000000000b"),
        ("{{ '%.2f' | format(x) }}{{ '%.1f' % x }}{{ x + 1 }}", "0.000.01.000000000"),
    ],
)
def test_a_decimal_is_printed_in_plain_digits(template: str, text: str) -> None:
    """The 0 of BigQuery's NUMERIC, which has nine decimals."""
    row = {"x": decimal.Decimal("0E-9"), "y": "b"}
    spec = make_spec(input={"prompt_template": template})
    assert Renderer(spec).render(Row(0, row)) == text
