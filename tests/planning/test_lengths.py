"""Token lengths of a job's prompts, and the beginning that the prefix cache has of all of them."""

import json
import pathlib
from collections.abc import Sequence
from typing import Any

import pytest

import jobs
from batchinf.planning.lengths import lengths_of, opened
from batchinf.planning.throughput import Workload
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
