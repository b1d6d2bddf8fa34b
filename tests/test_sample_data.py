"""The sample model is small, whole and trained; the sample inputs are what sample_data/README.md says."""

import csv
import json
import random
import runpy
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

SAMPLE = Path(__file__).parent.parent / "sample_data"
MODEL = SAMPLE / "tiny-llama"
CHAT = [
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": "What is the capital of France?"},
]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(MODEL)


@pytest.fixture(scope="module")
def model() -> Iterator[Any]:
    """The model, run in one thread: so small a model gains nothing from more, and loses where the cores are shared."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    torch.set_num_threads(num_threads)


def prompt_rows() -> list[dict[str, str]]:
    return [json.loads(line) for line in (SAMPLE / "prompts.jsonl").read_text(encoding="utf-8").split("\n")[:-1]]


def corpus_texts(*, is_held_out: bool) -> list[str]:
    documents = runpy.run_path(str(SAMPLE / "documents.py"))["read_documents"]()
    return [document.text for document in documents if document.is_held_out == is_held_out]


def run_script(name: str, folder: Path) -> None:
    subprocess.run([sys.executable, str(SAMPLE / name), str(folder)], check=True, capture_output=True)


def nats(model: Any, token_ids: list[int]) -> torch.Tensor:
    """The nats of each token after the first."""
    ids = torch.tensor([token_ids])
    with torch.inference_mode():
        logprobs = model(ids).logits[0, :-1].log_softmax(-1)
    return -logprobs.gather(1, ids[0, 1:, None])[:, 0]


def test_model_takes_at_most_two_megabytes() -> None:
    assert sum(path.stat().st_size for path in MODEL.iterdir()) <= 2_000_000


def test_the_reranker_is_small_and_finds_the_right_document() -> None:
    """Of the queries, whose documents it was not trained on, at least nine in ten."""
    folder = SAMPLE / "tiny-reranker"
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 500_000
    reranker = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = [json.loads(line) for line in (SAMPLE / "queries.jsonl").read_text(encoding="utf-8").splitlines()]
    held_out = " ".join(" ".join(corpus_texts(is_held_out=True)).split())
    num_right = 0
    for row in rows:
        assert all(document in held_out for document in row["documents"])
        inputs = tokenizer(
            [(row["query"], document) for document in row["documents"]], padding=True, return_tensors="pt"
        )
        with torch.inference_mode():
            num_right += int(reranker(**inputs).logits[:, 0].argmax()) == row["relevant"]
    assert len(rows) == 120 and num_right >= 108


def test_held_out_text_is_two_nats_a_token_likelier_than_its_tokens_shuffled(model: Any, tokenizer: Any) -> None:
    rng = random.Random(0)
    in_order, shuffled = [], []
    for text in corpus_texts(is_held_out=True)[::2]:  # every second one, of all kinds, for the time it takes
        begin, *rest = tokenizer.encode(text)[:512]
        in_order.append(nats(model, [begin, *rest]))
        shuffled.append(nats(model, [begin, *rng.sample(rest, len(rest))]))
    assert torch.cat(shuffled).mean() - torch.cat(in_order).mean() >= 2


def test_held_out_text_is_not_trained_on() -> None:
    trained, held_out = corpus_texts(is_held_out=False), corpus_texts(is_held_out=True)
    assert len(held_out) >= len(trained) // 25
    assert set(trained).isdisjoint(held_out)


def test_tokenizer_is_the_one_in_its_file_and_loses_no_text(tokenizer: Any) -> None:
    raw = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    for row in prompt_rows():
        ids = tokenizer.encode(row["prompt"])
        assert ids == raw.encode(row["prompt"]).ids
        assert ids[0] == tokenizer.bos_token_id
        assert tokenizer.decode(ids[1:]) == row["prompt"]


def test_chat_template_gives_the_ids_of_its_text(tokenizer: Any) -> None:
    text = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    ids = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    assert text.startswith("<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nYou are a helpful")
    assert text.endswith("<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n")
    assert ids == tokenizer.encode(text, add_special_tokens=False)


def test_generation_config_has_both_ends_and_sampling_of_its_own(tokenizer: Any) -> None:
    fields = json.loads((MODEL / "generation_config.json").read_text())
    ends = tokenizer.convert_tokens_to_ids(["<|end_of_text|>", "<|eot_id|>"])
    assert (fields["eos_token_id"], fields["temperature"], fields["top_p"]) == (ends, 0.7, 0.9)


def test_a_chat_stops_and_prose_goes_on(model: Any, tokenizer: Any) -> None:
    chat = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    prose = tokenizer.encode("The play was entered in the Stationers' Register")
    outputs = {}
    for name, ids in [("chat", chat), ("prose", prose)]:
        inputs = torch.tensor([ids])
        settings = {"do_sample": False, "temperature": None, "top_p": None, "max_new_tokens": 48}
        whole = model.generate(inputs, attention_mask=torch.ones_like(inputs), **settings)
        outputs[name] = whole[0, len(ids) :].tolist()
    assert outputs["chat"][-1] == tokenizer.convert_tokens_to_ids("<|eot_id|>")
    assert len(outputs["prose"]) == 48


def test_prompts_are_the_same_in_each_format() -> None:
    rows = prompt_rows()
    with (SAMPLE / "prompts.csv").open(encoding="utf-8", newline="") as file:
        assert list(csv.DictReader(file)) == rows
    assert pq.read_table(SAMPLE / "prompts.parquet").to_pylist() == rows


def test_prompts_are_many_and_varied() -> None:
    rows = prompt_rows()
    assert len({row["id"] for row in rows}) == len({row["prompt"] for row in rows}) == len(rows) >= 500
    assert len({row["language"] for row in rows}) >= 20
    assert {row["category"] for row in rows} >= {"tiny", "long", "unicode", "code", "quoting", "question", "rights"}


def test_every_prompt_leaves_room_for_64_tokens_of_512(tokenizer: Any) -> None:
    for row in prompt_rows():
        message = {"role": "user", "content": row["prompt"]}
        chat = tokenizer.apply_chat_template([message], add_generation_prompt=True, return_dict=False)
        assert 1 < len(tokenizer.encode(row["prompt"])) <= len(chat) <= 448


def is_broken(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return True
    return False


def test_hostile_has_each_bad_kind_once_among_good_rows(tokenizer: Any) -> None:
    lines = (SAMPLE / "hostile.jsonl").read_bytes().split(b"\n")[:-1]
    broken = [line for line in lines if is_broken(line)]
    rows = [json.loads(line) for line in lines if line not in broken]
    by_kind = {row["kind"]: row for row in rows}
    kinds = Counter(row["kind"] for row in rows)
    num_good = kinds.pop("good")
    assert num_good >= 5
    assert kinds == Counter(
        ["empty", "missing_column", "null", "wrong_type", "over_long", "lone_surrogate", "megabyte"]
    )
    assert by_kind["empty"]["prompt"] == ""
    assert "prompt" not in by_kind["missing_column"]
    assert by_kind["null"]["prompt"] is None
    assert by_kind["wrong_type"]["prompt"] == 42
    assert 512 < len(tokenizer.encode(by_kind["over_long"]["prompt"])) < 1024
    assert "\ud800" in by_kind["lone_surrogate"]["prompt"]
    assert max(map(len, lines)) + 1 == 1 << 20
    assert [b"\xff" in line for line in broken] == [False, True]
    assert json.loads(broken[1].replace(b"\xff", b""))["kind"] == "invalid_utf8"


def test_prompts_are_repeatable(tmp_path: Path) -> None:
    run_script("make_prompts.py", tmp_path)
    for name in ["prompts.jsonl", "prompts.csv", "hostile.jsonl"]:
        assert (tmp_path / name).read_bytes() == (SAMPLE / name).read_bytes()
    assert pq.read_table(tmp_path / "prompts.parquet").equals(pq.read_table(SAMPLE / "prompts.parquet"))


def test_generated_corpus_is_repeatable(tmp_path: Path) -> None:
    run_script("make_corpus.py", tmp_path)
    for path in tmp_path.iterdir():
        assert path.read_bytes() == (SAMPLE / "corpus" / path.name).read_bytes()
    assert len(list(tmp_path.iterdir())) == 3


def test_questions_are_made_as_they_are_said_to_be(tmp_path: Path) -> None:
    """The script gives the file's bytes again; sums and orders among them are worked out anew."""
    run_script("make_questions.py", tmp_path)
    path = SAMPLE / "questions.jsonl"
    assert (tmp_path / "questions.jsonl").read_bytes() == path.read_bytes()
    questions = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert len({row["question"] for row in questions}) == len({row["id"] for row in questions}) == len(questions) == 240
    assert set(Counter(row["category"] for row in questions).values()) == {40}
    for row in questions:
        assert len(set(row["choices"])) == 4 and row["answer"] in range(4)
    assert min(Counter(row["answer"] for row in questions).values()) > 40
    num_checked = 0
    for row in questions:
        right = row["choices"][row["answer"]]
        match row["question"].removesuffix("?").split():
            case ["What", "is", left, ("+" | "-" | "x") as sign, other]:
                values = {"+": int(left) + int(other), "-": int(left) - int(other), "x": int(left) * int(other)}
                assert values[sign] == int(right)
            case ["Which", "number", "is", "the", ("largest:" | "smallest:") as which, *_]:
                numbers = map(int, row["choices"])
                assert int(right) == (max(numbers) if which == "largest:" else min(numbers))
            case _:
                continue
        num_checked += 1
    assert num_checked >= 60
