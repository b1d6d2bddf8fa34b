"""Token lengths of a job's prompts, and the beginning that the prefix cache has of all of them."""

import json
import pathlib
from collections.abc import Sequence
from typing import Any

import pytest

import jobs
from batchinf.planning import lengths
from batchinf.planning.lengths import Lengths, lengths_of, opened
from batchinf.planning.throughput import Workload
from batchinf.prompts.builder import PromptBuilder
from batchinf.prompts.encoder import load_tokenizer
from batchinf.spec.file import read_spec

RULES = "You are a patient teacher. Answer each question in one short sentence, and say so if you do not know. " * 3
QUESTIONS = [f"{number} times 7?" for number in range(40)]


def work_of(folder: pathlib.Path, texts: Sequence[str] = QUESTIONS, **sections: Any) -> tuple[Workload, int]:
    """The workload of a job, and the tokens of the rules."""
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    given = {"path": str(path), "id_column": None, "prompt_template": RULES + "{{ text }}"} | sections.pop("input", {})
    file = read_spec(jobs.spec_of(folder, input=given, output={"keep_columns": []}, scripted=None, **sections))
    with opened(file) as found:
        assert found is not None
        work = lengths_of(found[0], file, found[1]).workload(found[0])
    return work, len(load_tokenizer(str(jobs.MODEL), False).encode(RULES))


def test_the_rules_of_all_rows_are_computed_once(tmp_path: pathlib.Path) -> None:
    work, num_rules = work_of(tmp_path)
    assert work.prompt_tokens > num_rules
    # The last token of the rules may be one with what follows. The cache holds whole blocks of 16 tokens.
    assert work.cached_tokens in ((num_rules - 1) // 16 * 16, num_rules // 16 * 16)
    assert work.computed_tokens == work.prompt_tokens - work.cached_tokens


@pytest.mark.parametrize(
    ("texts", "sections"),
    [
        (QUESTIONS[:1], {}),  # nothing is shared with another row
        (QUESTIONS, {"input": {"prompt_template": "{{ text }}" + RULES}}),
        (QUESTIONS, {"engine": {"enable_prefix_caching": False}}),
        (QUESTIONS, {"sampling": {"prompt_logprobs": 1}}),  # such requests do not read the cache
    ],
)
def test_other_prompts_are_computed_in_full(texts: list[str], sections: dict[str, Any], tmp_path: pathlib.Path) -> None:
    work, _ = work_of(tmp_path, texts, **sections)
    assert work.cached_tokens == 0 and work.computed_tokens == work.prompt_tokens


def test_equal_prompts_have_something_to_compute(tmp_path: pathlib.Path) -> None:
    work, _ = work_of(tmp_path, ["Why?"] * 5)
    assert 0 < work.computed_tokens <= 16


def test_one_row_that_begins_differently_is_enough(tmp_path: pathlib.Path) -> None:
    texts = [RULES + question for question in QUESTIONS]
    work, _ = work_of(tmp_path, [*texts[:20], "Why?", *texts[20:]], input={"prompt_template": "{{ text }}"})
    assert work.cached_tokens == 0


def sampled(folder: pathlib.Path, texts: Sequence[str]) -> Lengths:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    given = {"path": str(path), "id_column": None, "prompt_column": "text"}
    file = read_spec(jobs.spec_of(folder, input=given, output={"keep_columns": []}, scripted=None))
    with opened(file) as found:
        assert found is not None
        return lengths_of(found[0], file, found[1])


@pytest.mark.parametrize(
    ("order", "num_rows"), [("halves", 900), ("halves", 3000), ("few large ones", 3000), ("growing", 3000)]
)
def test_some_rows_of_each_size_stand_for_many_long_ones(
    num_rows: int, order: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = {
        "halves": lambda at: 300 if at < num_rows // 2 else 30,
        "few large ones": lambda at: 400 if at // 10 == num_rows // 23 else 30,
        "growing": lambda at: 10 + 300 * at // num_rows,
    }[order]
    texts = ["word " * words(number) for number in range(num_rows)]
    whole = sampled(tmp_path, texts)
    assert len(whole.prompts) == whole.num_sampled
    tokenised: list[int] = []
    build = PromptBuilder.build
    note = lambda self, rows, length: tokenised.append(len(rows)) or build(self, rows, length)  # noqa: E731
    monkeypatch.setattr(PromptBuilder, "build", note)
    monkeypatch.setattr(lengths, "_MOST_BYTES", sum(map(len, texts)) // num_rows * 100)
    few = sampled(tmp_path, texts)
    assert sum(tokenised) < 150
    mean, true = (sum(each.prompts) / len(each.prompts) for each in (few, whole))
    assert mean == pytest.approx(true, rel=0.05)
    assert few.error == pytest.approx(whole.error, abs=0.02)
    assert (len(few.prompts), few.num_sampled) == (len(whole.prompts), whole.num_sampled)
    assert (few.longest, few.requests_per_row) == (whole.longest, 1)


def test_one_very_long_text_does_not_stand_for_others(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lengths, "_MOST_BYTES", 50_000)
    found = sampled(tmp_path, ["Why?"] * 30 + ["word " * 300_000])
    assert len(found.prompts) == 30 and found.row_error is not None  # max_model_len is 2,048


def test_one_of_two_huge_texts_stands_for_both(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lengths, "_MOST_BYTES", 100)
    found = sampled(tmp_path, ["word " * 300, "word " * 500])
    assert sum(found.prompts) == pytest.approx(800, rel=0.05) and found.longest > 500


def test_the_first_error_of_a_sample_is_that_of_its_first_row(tmp_path: pathlib.Path) -> None:
    texts = ["Why?"] * 100
    texts[35], texts[82] = "", "word " * 10_000
    assert (error := sampled(tmp_path, texts).row_error) is not None
    assert error.error_type == "empty_prompt"
    texts[35], texts[82] = texts[82], texts[35]
    assert (error := sampled(tmp_path, texts).row_error) is not None
    assert error.error_type == "prompt_too_long"
