"""Where scored tokens begin and end: held against lm-evaluation-harness's own functions, with several tokenizers."""

import decimal
import functools
import itertools
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

import jobs
from batchinf.prompts.encoder import load_tokenizer
from batchinf.records import Prompt
from batchinf.source.rows import Row
from batchinf.spec.job import JobSpec
from batchinf.tasks.registry import task_of
from batchinf.tasks.score.prompts import windows

TEMPLATES = {path.stem: path.read_text() for path in (jobs.ROOT / "tests" / "chat_templates").glob("*.jinja")}
CONTEXTS = [
    "Once upon a time",
    "Once upon a time  ",
    "The fox",
    "x\n\n",
    "",
    "  ",
    "<s>The",
    "<|begin_of_text|>a b",
    "é ",
]
CONTINUATIONS = [" there was", "there", "es ran.", " ", "\n", "🦊", "<|begin_of_text|>x"]


@functools.cache
def tokenizer(name: str) -> Any:
    """The sample model's, which puts BOS first; the same, which does not; one that has EOS alone, and puts it last."""
    if name == "llama":
        return load_tokenizer(str(jobs.MODEL), False)
    if name == "no_bos_added":
        backend = Tokenizer.from_file(str(jobs.MODEL / "tokenizer.json"))
        backend.post_processor = processors.ByteLevel(trim_offsets=False)
        return PreTrainedTokenizerFast(
            tokenizer_object=backend, bos_token="<|begin_of_text|>", eos_token="<|end_of_text|>"
        )
    characters = {"</s>": 0, "?": 1} | {chr(code): code for code in range(2, 127) if chr(code) != "?"}
    backend = Tokenizer(models.WordLevel(characters, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="?")


TOKENIZERS = ("llama", "no_bos_added", "eos_after")


@functools.cache
def harness(name: str, add_bos_token: bool | None = None) -> Any:
    """lm-evaluation-harness's `hf` model without a model: it encodes, and keeps what it was to score."""
    huggingface = pytest.importorskip("lm_eval.models.huggingface")

    class Encoding(huggingface.HFLM):  # type: ignore[misc,name-defined]
        enable_thinking = False

        def __init__(self) -> None:
            self.tokenizer, self.backend, self.add_bos_token = tokenizer(name), "causal", add_bos_token
            self.custom_prefix_token_id = None

        def _loglikelihood_tokens(self, requests: Any, **_: Any) -> Any:
            return [(context, continuation) for _, context, continuation in requests]

    return Encoding()


def pair_of(
    name: str, context: str, continuation: str, add_bos_token: bool | None = None
) -> tuple[list[int], list[int]]:
    from lm_eval.api.instance import Instance

    model = harness(name, add_bos_token)
    [found] = model.loglikelihood([Instance("loglikelihood", {}, (context, continuation), 0)], disable_tqdm=True)
    return found


def build(
    name: str, values: list[dict[str, Any]], input: dict[str, Any], max_model_len: int | None = 512, **score: Any
) -> list[Prompt]:
    spec = JobSpec.model_validate(
        {"model": "m", "task": "score", "input": {"path": "p", **input}, "output": {"path": "o"}, "score": score}
    )
    builder = task_of(spec).prompt_builder(tokenizer(name), len(tokenizer(name)))
    return builder.build([Row(number, value) for number, value in enumerate(values)], max_model_len)


def spans_of(prompt: Prompt) -> list[tuple[list[int], list[int]]]:
    assert prompt.scoring is not None, prompt.error
    return [(span.token_ids[: span.start], span.token_ids[span.start :]) for span in prompt.scoring.spans]


PAIR = {"context_column": "c", "continuation_column": "t"}


@pytest.mark.parametrize("add_bos_token", [None, False])
@pytest.mark.parametrize("name", TOKENIZERS)
def test_pairs_are_the_harness_s(name: str, add_bos_token: bool | None) -> None:
    cases = list(itertools.product(CONTEXTS, CONTINUATIONS))
    prompts = build(name, [{"c": c, "t": t} for c, t in cases], PAIR, add_bos_token=add_bos_token)
    num_same = 0
    for prompt, (context, continuation) in zip(prompts, cases, strict=True):
        expected = pair_of(name, context, continuation, add_bos_token)
        if not expected[1]:
            assert prompt.error is not None and prompt.error.error_type == "empty_continuation"
        elif not expected[0]:
            # The harness stops there: nothing is left of a context of blanks. It is scored as an empty one.
            assert spans_of(prompt)[0][0] != [] and context.isspace()
        else:
            assert spans_of(prompt) == [expected], (context, continuation)
            num_same += 1
    assert num_same > 40


@pytest.mark.parametrize("style", TEMPLATES)
def test_a_conversation_is_a_context_as_the_harness_has_it(style: str) -> None:
    """Its text by the template, to which the tokenizer adds nothing."""
    messages = [{"role": "user", "content": "Tell me a story."}]
    input = {"messages_column": "m", "continuation_column": "t", "chat_template": TEMPLATES[style]}
    [prompt] = build("no_bos_added", [{"m": messages, "t": " Once upon"}], input)
    text = tokenizer("llama").apply_chat_template(
        messages, chat_template=TEMPLATES[style], tokenize=False, add_generation_prompt=True
    )
    assert spans_of(prompt) == [pair_of("no_bos_added", text, " Once upon")]


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("max_model_len", [4, 7, 12, 40, 512])
def test_texts_are_the_harness_s(name: str, max_model_len: int) -> None:
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    texts = ["Once upon a time there was a fox. " * 3, "x", "<|begin_of_text|>a", "Once upon a"]
    model = harness(name)
    for text, prompt in zip(
        texts, build(name, [{"t": t} for t in texts], {"text_column": "t"}, max_model_len), strict=True
    ):
        rolling = get_rolling_token_windows(model.tok_encode(text), model.prefix_token_id, max_model_len - 2, 1)
        assert spans_of(prompt) == [make_disjoint_window(window) for window in rolling]
        assert prompt.scoring is not None
        assert sum(span.num_bytes for span in prompt.scoring.spans) == len(text.encode())
        assert all(len(span.token_ids) < max_model_len for span in prompt.scoring.spans)


def test_windows_are_the_harness_s() -> None:
    """Every length and overlap: each token is scored once, and in the same window."""
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    for num_tokens, most in itertools.product(range(25), range(1, 9)):
        ids = list(range(100, 100 + num_tokens))
        for overlap in range(most):
            found = [(piece[:start], piece[start:]) for piece, start in windows(ids, 7, most, overlap)]
            assert found == list(map(make_disjoint_window, get_rolling_token_windows(ids, 7, most, overlap + 1)))
            assert [token for _, scored in found for token in scored] == ids
    with pytest.raises(ValueError, match="overlap of 4"):
        list(windows([1, 2], 7, 4, 4))


def test_a_long_context_is_cut_at_its_left() -> None:
    """To what the harness takes with `max_length` two below."""
    long, short = {"c": "Once upon a time " * 20, "t": " there was"}, {"c": "Once", "t": " there was"}
    cut, whole, too_long = build("llama", [long, short, {"c": "a", "t": " there was" * 20}], PAIR, 30)
    context, continuation = pair_of("llama", long["c"], long["t"])
    assert spans_of(cut) == [((context + continuation)[-29:][: -len(continuation)], continuation)]
    assert cut.is_truncated and not whole.is_truncated
    assert too_long.error is not None and too_long.error.error_type == "prompt_too_long"
    assert "alone has 40 tokens; at most 28 fit max_model_len=30" in too_long.error.error_message


def test_ids_are_a_context_as_they_are() -> None:
    input = {"token_ids_column": "ids", "continuation_column": "t"}
    given, empty, foreign = build("llama", [{"ids": [5, 6], "t": " a"}, {"ids": [], "t": " a"},
                                            {"ids": [10**6], "t": " a"}], input)  # fmt: skip
    plain = tokenizer("llama")(" a", add_special_tokens=False)["input_ids"]
    assert spans_of(given) == [([5, 6], plain)]
    assert spans_of(empty) == [([0], plain)]
    assert foreign.error is not None and foreign.error.error_type == "invalid_token_id"


def test_the_delimiter_counts_for_no_bytes() -> None:
    input = {"context_column": "c", "choices_column": "x", "answer_column": "a"}
    [prompt] = build("llama", [{"c": "Q", "x": ["é", "ab"], "a": "1"}], input, target_delimiter=" ")
    assert spans_of(prompt) == [pair_of("llama", "Q", " é"), pair_of("llama", "Q", " ab")]
    assert prompt.scoring is not None and prompt.scoring.answer == 1
    assert [span.num_bytes for span in prompt.scoring.spans] == [2, 2]


ERRORS = [
    ({"x": ["a", ""]}, "empty_continuation", "choice 1 of column 'x' is an empty string; nothing can be scored"),
    ({"x": []}, "no_choices", "the list in column 'x' is empty; nothing can be scored"),
    ({"x": None}, "null_choices", "column 'x' is null"),
    ({}, "missing_column", "row has no column 'x'"),
    ({"x": "a, b"}, "wrong_type", "got text that is not JSON in column 'x'; expected a list of texts"),
    ({"x": '{"a": 1}'}, "wrong_type", "got text that is not a list in JSON in column 'x'; expected a list of texts"),
    ({"x": 3}, "wrong_type", "got a value of type int in column 'x'; expected a list of texts"),
    ({"x": ["a", 3]}, "wrong_type", "got a value of type int in choice 1 of column 'x'; expected text"),
    ({"x": ["a", "\ud800"]}, "invalid_unicode",
     "choice 1 of column 'x' is not valid Unicode: lone surrogate U+D800 at character 1"),
]  # fmt: skip

WRONG_ANSWERS = [
    ({"x": ["a", "b"], "a": 2}, "got 2 in column 'a'; the row's choices are 0 to 1"),
    ({"x": ["a", "b"], "a": -1}, "got -1 in column 'a'; the row's choices are 0 to 1"),
    ({"x": ["a", "b"], "a": True},
     "got true or false in column 'a'; expected the text of a choice, its place from 0, or null"),
    ({"x": ["a", "b"], "a": 0.5}, "got 0.5 in column 'a'; expected the text of a choice, its place from 0, or null"),
    ({"x": ["a", "b"], "a": "B"}, "got 'B' in column 'a'; expected the text of a choice, its place from 0, or null"),
    ({"x": ["a", "b"], "a": "a\n" * 30},
     "got '" + r"a\n" * 13 + "a…' in column 'a'; expected the text of a choice, its place from 0, or null"),
    ({"x": ["a", "b"], "a": ["a"]},
     "got a list in column 'a'; expected the text of a choice, its place from 0, or null"),
    ({"x": ["1", "0"], "a": "1"},
     "got '1' in column 'a', the text of a choice and the place of another one; give places as numbers, not as text"),
]  # fmt: skip


@pytest.mark.parametrize(("values", "message"), WRONG_ANSWERS)
def test_a_row_whose_answer_is_no_choice_is_scored_without_it(values: dict[str, object], message: str) -> None:
    input = {"context_column": "c", "choices_column": "x", "answer_column": "a"}
    wrong, right = build("llama", [{"c": "Q", **values}, {"c": "Q", **values, "a": None}], input)
    assert wrong.error is None and wrong.scoring is not None
    assert (wrong.scoring.answer, wrong.scoring.answer_error) == (None, message)
    assert spans_of(wrong) == spans_of(right)


@pytest.mark.parametrize(("values", "error_type", "message"), ERRORS)
def test_what_cannot_be_scored_is_said(values: dict[str, Any], error_type: str, message: str) -> None:
    input = {"context_column": "c", "choices_column": "x", "answer_column": "a"}
    [prompt] = build("llama", [{"c": "Q", "a": None, **values}], input)
    assert prompt.error is not None
    assert (prompt.error.error_type, prompt.error.error_message) == (error_type, message)


def test_a_continuation_that_is_joined_with_its_context_is_an_error_that_says_so() -> None:
    input = {"context_column": "c", "continuation_column": "x"}
    [prompt] = build("llama", [{"c": "Th", "x": "e"}], input)
    assert prompt.error is not None and prompt.error.error_type == "empty_continuation"
    assert "the tokenizer joins them; a space in score.target_delimiter may part them" in prompt.error.error_message
    [prompt] = build("llama", [{"c": "Th", "x": "e"}], input, target_delimiter=" ")
    assert prompt.error is None


JOINED = [
    ({"c": "looked do", "x": ["wn and saw h"]}, "", "'looked do' + 'wn and saw h' scores ' and saw h'"),
    ({"c": "looked do ", "x": ["wn and saw h"]}, "", None),
    ({"c": "looked do", "x": ["wn and saw h"]}, " ", None),
    ({"c": "looked", "x": [" down", " up"]}, "", None),
    ({"c": "", "x": ["wn and"]}, "", None),
    ({"c": "and " * 20 + "looked do", "x": [" it", "wn and saw h"]}, "",
     "'nd and and looked do' + 'wn and saw h' scores ' and saw h'"),
]  # fmt: skip


@pytest.mark.parametrize(("values", "delimiter", "words"), JOINED)
def test_a_token_that_joins_context_and_text_is_said(values: dict[str, Any], delimiter: str, words: str | None) -> None:
    """And it is scored all the same, as the harness does."""
    input = {"context_column": "c", "choices_column": "x"}
    [prompt] = build("llama", [values], input, target_delimiter=delimiter)
    assert prompt.scoring is not None and prompt.scoring.joined == words
    assert spans_of(prompt) == [pair_of("llama", values["c"], delimiter + text) for text in values["x"]]


def test_a_neutral_context_may_be_joined_alone() -> None:
    input = {"context_column": "c", "choices_column": "x"}
    [prompt] = build("llama", [{"c": "looked", "x": ["wn and", " up"]}], input, neutral={"c": "looked do"})
    assert prompt.scoring is not None and prompt.scoring.joined == "'looked do' + 'wn and' scores ' and'"


def test_choices_may_be_json_and_an_answer_unknown() -> None:
    input = {"context_column": "c", "choices_column": "x", "answer_column": "a"}
    listed, text = build("llama", [{"c": "Q", "a": None, "x": x} for x in (["a", "b c"], '["a", "b c"]')], input)
    assert spans_of(listed) == spans_of(text)
    assert listed.scoring is not None and listed.scoring.answer is None


@pytest.mark.parametrize(("answer", "place"), [("b c", 1), (1, 1), (" 2", 2), ("7", 2), (3, 3), ("3", 3), (1.0, 1),
                                               (decimal.Decimal("2.00"), 2)])  # fmt: skip
def test_an_answer_is_the_text_of_a_choice_or_its_place(answer: object, place: int) -> None:
    """A number is always a place: `3` is not the choice "3" unless that stands there."""
    input = {"context_column": "c", "choices_column": "x", "answer_column": "a"}
    [prompt] = build("llama", [{"c": "Q", "x": ["a", "b c", "7", "3"], "a": answer}], input)
    assert prompt.scoring is not None and prompt.scoring.answer == place


@pytest.mark.parametrize("answer", [decimal.Decimal(10**37), decimal.Decimal("0.5"), float("nan"), float("inf"), 4, -1])
def test_other_numbers_are_no_answer(answer: object) -> None:
    input = {"context_column": "c", "choices_column": "x", "answer_column": "a"}
    [prompt] = build("llama", [{"c": "Q", "x": ["a", "b c", "7", "3"], "a": answer}], input)
    assert prompt.error is None and prompt.scoring is not None
    assert prompt.scoring.answer is None and "in column 'a'; " in (prompt.scoring.answer_error or "")


def test_choices_of_the_spec_are_those_of_every_row() -> None:
    labels = ["good", "bad film"]
    columns = {"context_column": "c", "choices_column": "x", "answer_column": "a"}
    rows = [{"c": "Q", "x": labels, "a": 1}, {"c": "The end", "x": labels, "a": None}]
    given = build("llama", rows, {"context_column": "c", "choices": labels, "answer_column": "a"}, target_delimiter=" ")
    from_column = build("llama", rows, columns, target_delimiter=" ")
    assert [prompt.scoring for prompt in given] == [prompt.scoring for prompt in from_column]
    assert [prompt.scoring is not None and prompt.scoring.answer for prompt in given] == [1, None]
    [prompt] = build("llama", [{"c": "Q", "a": 2}], {"context_column": "c", "choices": labels, "answer_column": "a"})
    assert prompt.scoring is not None and prompt.scoring.answer is None
    assert prompt.scoring.answer_error == "got 2 in column 'a'; the row's choices are 0 to 1"


@pytest.mark.parametrize("answer", [2, "2", " 2 ", 2.0])
def test_an_answer_among_numbers_in_the_spec_is_one_of_them_and_no_place(answer: str | float) -> None:
    input = {"context_column": "c", "choices": ["1", "2", "3"], "answer_column": "a"}
    [prompt] = build("llama", [{"c": "Q", "a": answer}], input)
    assert prompt.scoring is not None and prompt.scoring.answer == 1


@pytest.mark.parametrize(
    ("answer", "got"),
    [(0, "0"), ("five", "'five'"), ("", "''"), (4.5, "4.5"), (decimal.Decimal("4.5"), "4.5"), (float("nan"), "nan"),
     (True, "true or false"), ([2], "a list"), ({"stars": 2}, "a mapping")],
)  # fmt: skip
def test_an_answer_that_is_none_of_the_numbers_is_told_the_numbers(answer: object, got: str) -> None:
    """Never the place of a choice, which is no answer there."""
    input = {"context_column": "c", "choices": ["1", "2", "3"], "answer_column": "a"}
    [prompt] = build("llama", [{"c": "Q", "a": answer}], input)
    message = f"got {got} in column 'a'; expected one of input.choices (1, 2, 3), or null"
    hint = "" if answer != "" else '; input.csv: {null_values: [""]} makes empty fields of CSV files null'
    assert prompt.scoring is not None and prompt.scoring.answer is None
    assert prompt.scoring.answer_error == message + hint


def test_rows_are_scored_with_the_adapter_that_they_name() -> None:
    lora = {"a": "adapters/a", "b": "adapters/b"}
    spec = JobSpec.model_validate(
        {
            "model": {"name": "m", "lora": lora},
            "task": "score",
            "input": {"path": "p", "text_column": "text", "adapter_column": "who"},
            "output": {"path": "o"},
        }
    )
    builder = task_of(spec).prompt_builder(tokenizer("llama"), None)
    assert set(builder.columns) == {"text", "who"}
    rows = [Row(place, {"text": "the fox", "who": who}) for place, who in enumerate(["a", None, "b", "c"])]
    prompts = builder.build(rows, 64)
    assert [prompt.adapter for prompt in prompts] == ["a", None, "b", None]
    assert [prompt.error and prompt.error.error_type for prompt in prompts] == [None, None, None, "unknown_adapter"]
