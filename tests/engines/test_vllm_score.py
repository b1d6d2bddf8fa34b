"""Scores by real vLLM against two references in float32: transformers, written plainly, and lm-evaluation-harness."""

import pathlib
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest
import torch

import jobs
from batchinf.prompts.encoder import load_tokenizer
from batchinf.records import Result
from batchinf.source.rows import Row
from batchinf.spec.job import JobSpec
from batchinf.tasks.registry import task_of

if TYPE_CHECKING:
    from batchinf.engines.vllm.engine import VllmEngine

# Of vLLM's engine in the tests, and what the harness is to be told for the same windows and cuts.
MAX_MODEL_LEN = 512
MAX_LENGTH = MAX_MODEL_LEN - 2

STORY = "Once upon a time there was a fox who lived in a wood.\nEvery day he went to the river. "
# No two of the same tokens with the boundary elsewhere: lm-evaluation-harness 0.4.13 would mix their logits up.
PAIRS = [
    ("Once upon a time", " there was a fox."),
    ("Once upon a time ", "there was a fox."),
    ("Once upon a time \n", "there"),
    ("", "Many years ago"),
    ("The fox", "es ran"),
    ("<|begin_of_text|>Once upon", " a time"),
    ("There was a", " fox"),
    ("Déjà vu 🦊", " ça va, 人?"),
    (STORY * 30, " The end of it."),
]
TEXTS = ["Once upon a time there was a fox.", "x", STORY * 10, STORY * 50, "Ünï 🦊 人 " * 200]


@pytest.fixture(scope="module")
def harness() -> Any:
    """lm-evaluation-harness's `hf` model."""
    huggingface = pytest.importorskip("lm_eval.models.huggingface")
    return huggingface.HFLM(
        pretrained=str(jobs.MODEL), dtype="float32", device="cpu", batch_size=8, max_length=MAX_LENGTH
    )


def ask(harness: Any, kind: str, arguments: list[tuple[str, ...]]) -> list[Any]:
    from lm_eval.api.instance import Instance

    requests = [Instance(kind, {}, each, number) for number, each in enumerate(arguments)]
    return getattr(harness, kind)(requests, disable_tqdm=True)


def score(
    engine: "VllmEngine", rows: list[dict[str, Any]], input: dict[str, Any], **sections: Any
) -> list[dict[str, Any]]:
    """Output rows of a job's task, run on an engine in this process."""
    spec = JobSpec.model_validate(
        {
            "model": str(jobs.MODEL),
            "task": "score",
            "input": {"path": "p", **input},
            "output": {"path": "o"},
            **sections,
        }
    )
    tokenizer = load_tokenizer(str(jobs.MODEL), False)
    prompts = (
        task_of(spec)
        .prompt_builder(tokenizer, len(tokenizer))
        .build([Row(number, values) for number, values in enumerate(rows)], MAX_MODEL_LEN)
    )
    task = task_of(spec)
    pending, results = {}, []
    for prompt in prompts:
        requests = task.expand(prompt, MAX_MODEL_LEN)
        for request in requests:
            if prompt.error is None:
                pending[request.key] = prompt, len(requests)
                engine.add(request)
            else:
                results.append(Result(prompt, 0, 1, None, None, prompt.error, 1))
    while engine.num_unfinished():
        for completion in engine.step():
            prompt, num_requests = pending[completion.request.key]
            results.append(Result(prompt, completion.request.request_index, num_requests, completion, None, None, 1))
    results.sort(key=lambda result: (result.prompt.row_index, result.request_index))
    return task.reduce(None, pa.Table.from_batches([task.encode(results)])).to_pylist()


@pytest.fixture(scope="module")
def pairs(vllm_engine: "VllmEngine") -> list[dict[str, Any]]:
    rows = [{"c": context, "t": continuation} for context, continuation in PAIRS]
    return score(vllm_engine, rows, {"context_column": "c", "continuation_column": "t"}, score={"store": "all"},
                 sampling={"prompt_logprobs": 3})  # fmt: skip


@pytest.fixture(scope="module")
def texts(vllm_engine: "VllmEngine") -> list[dict[str, Any]]:
    return score(vllm_engine, [{"text": text} for text in TEXTS], {"text_column": "text"})


def test_pairs_are_the_harness_s(pairs: list[dict[str, Any]], harness: Any) -> None:
    for row, (logprob, is_greedy) in zip(pairs, ask(harness, "loglikelihood", PAIRS), strict=True):
        assert row["logprob_sum"] == pytest.approx(logprob, abs=1e-3 * row["num_tokens"])
        assert row["is_greedy"] == is_greedy
    assert {row["is_greedy"] for row in pairs} == {True, False}
    assert [row["prompt_truncated"] for row in pairs] == [False] * 8 + [True]
    assert [row["num_bytes"] for row in pairs] == [len(text.encode()) for _, text in PAIRS]


def test_pairs_are_transformers_(pairs: list[dict[str, Any]], harness: Any) -> None:
    """Each token's logprob and rank, and the likeliest three in its place."""
    for row in pairs:
        ids, start = torch.tensor([row["token_ids"]]), row["num_context_tokens"]
        with torch.inference_mode():
            logprobs = harness.model(ids).logits[0, :-1].log_softmax(-1)
        own = logprobs.gather(1, ids[0, 1:, None])[:, 0]
        assert row["logprobs"][0] is None
        np.testing.assert_allclose(row["logprobs"][1:], own, atol=1e-3)
        assert row["logprob_sum"] == pytest.approx(sum(row["logprobs"][start:]))
        assert row["num_tokens"] == len(row["token_ids"]) - start
        np.testing.assert_allclose(row["top_logprobs"][1:], logprobs.topk(3).values, atol=1e-3)
        ranks = (logprobs > own[:, None]).sum(-1) + 1
        # Where two are within rounding of each other either may come first.
        assert np.mean(np.array(row["ranks"][1:]) == ranks.numpy()) > 0.98


def test_texts_are_the_harness_s(texts: list[dict[str, Any]], harness: Any) -> None:
    found = ask(harness, "loglikelihood_rolling", [(text,) for text in TEXTS])
    for row, text, logprob in zip(texts, TEXTS, found, strict=True):
        ids = harness.tok_encode(text)
        assert row["token_ids"] == ids and row["num_tokens"] == len(row["logprobs"]) == len(ids)
        assert row["logprob_sum"] == pytest.approx(logprob, abs=1e-3 * len(ids))
        assert row["bits_per_byte"] == pytest.approx(-row["logprob_sum"] / len(text.encode()) / np.log(2))
        assert row["perplexity"] == pytest.approx(np.exp(-row["logprob_sum"] / len(ids)))
    assert max(row["num_tokens"] for row in texts) > 2 * MAX_MODEL_LEN


def test_windows_overlap_as_transformers_has_them(vllm_engine: "VllmEngine", harness: Any) -> None:
    """A text of several windows with 100 tokens of context each, one forward pass a window."""
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    [row] = score(vllm_engine, [{"text": STORY * 50}], {"text_column": "text"}, score={"window_overlap": 100})
    expected: list[float] = []
    for window in get_rolling_token_windows(row["token_ids"], 0, MAX_LENGTH, 101):
        context, scored = make_disjoint_window(window)
        ids = torch.tensor([context + scored])
        with torch.inference_mode():
            logprobs = harness.model(ids).logits[0, :-1].log_softmax(-1)
        expected += logprobs.gather(1, ids[0, 1:, None])[len(context) - 1 :, 0].tolist()
    np.testing.assert_allclose(row["logprobs"], expected, atol=1e-3)


@pytest.mark.parametrize("choices", [[" a", " the", ".", "!"], [" a fox", " the", "."]])
def test_choices_are_the_harness_s(vllm_engine: "VllmEngine", harness: Any, choices: list[str]) -> None:
    """Single tokens in one pass and apart, and others."""
    contexts = ["Once upon a time there was", "He saw", "The end", ""]
    rows = [{"c": context, "choices": choices, "a": 0} for context in contexts]
    input = {"context_column": "c", "choices_column": "choices", "answer_column": "a"}
    together = score(vllm_engine, rows, input)
    apart = score(vllm_engine, rows, input, score={"one_pass": False})
    found = ask(harness, "loglikelihood", [(context, choice) for context in contexts for choice in choices])
    for place, context in enumerate(contexts):
        expected = found[place * len(choices) : (place + 1) * len(choices)]
        for row in (together[place], apart[place]):
            num_tokens = np.array(row["choice_num_tokens"])
            sums = [logprob for logprob, _ in expected]
            assert np.all(np.abs(np.array(row["choice_logprob_sums"]) - sums) < 1e-3 * num_tokens)
            assert row["choice_is_greedy"] == [is_greedy for _, is_greedy in expected], context
            assert row["best"] == np.argmax(sums) and row["best_per_token"] == np.argmax(sums / num_tokens)
            for name in ("choice_token_ids", "choice_logprobs", "choice_ranks"):
                assert list(map(len, row[name])) == [*num_tokens]
        assert all(rank >= 1 for ranks in apart[place]["choice_ranks"] for rank in ranks)
    if len(choices) == 4:
        assert together[0]["choice_ranks"] == [[None]] * 4
        assert together[0]["num_prompt_tokens"] < apart[0]["num_prompt_tokens"] / 3


@pytest.mark.parametrize("choices", [[" a", " the", ".", " and"], [" a fox", " the", "."]])
@pytest.mark.parametrize("neutral", ["", "N/A"])
def test_mutual_information_is_the_harness_s(
    vllm_engine: "VllmEngine", harness: Any, choices: list[str], neutral: str
) -> None:
    """log P(choice | context) - log P(choice | neutral context); with "" the harness's `acc_mutual_info`."""
    contexts = ["Once upon a time there was", "He saw", "The end", "One day", "of", "\n"]
    rows = [{"c": context, "choices": choices, "a": 0} for context in contexts]
    input = {"context_column": "c", "choices_column": "choices", "answer_column": "a"}
    scored = score(vllm_engine, rows, input, score={"neutral": {"c": neutral}})
    plain = score(vllm_engine, rows, input)
    num_tokens = np.array(scored[0]["choice_num_tokens"])
    sums_after = lambda context: np.array(  # noqa: E731
        [logprob for logprob, _ in ask(harness, "loglikelihood", [(context, each) for each in choices])]
    )
    expected = sums_after(neutral)
    for row, plain_row, context in zip(scored, plain, contexts, strict=True):
        assert np.all(np.abs(np.array(row["choice_neutral_logprob_sums"]) - expected) < 1e-3 * num_tokens)
        assert row["best_pmi"] == np.argmax(sums_after(context) - expected)
        others = {name: value for name, value in row.items() if "neutral" not in name and name != "best_pmi"}
        np.testing.assert_allclose(others.pop("choice_logprob_sums"), plain_row.pop("choice_logprob_sums"), atol=1e-3)
        assert {name: others[name] for name in ("best", "answer", "num_prompt_tokens", "choice_token_ids")} == {
            name: plain_row[name] for name in ("best", "answer", "num_prompt_tokens", "choice_token_ids")
        }
    assert any(row["best_pmi"] != row["best"] for row in scored)


def test_a_conversation_is_the_context(vllm_engine: "VllmEngine", harness: Any) -> None:
    messages = [{"role": "user", "content": "Tell me a story."}]
    [row] = score(vllm_engine, [{"m": messages, "t": "Once upon a time"}],
                  {"messages_column": "m", "continuation_column": "t"})  # fmt: skip
    context = harness.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    [(logprob, is_greedy)] = ask(harness, "loglikelihood", [(context, "Once upon a time")])
    assert row["logprob_sum"] == pytest.approx(logprob, abs=1e-3 * row["num_tokens"])
    assert row["is_greedy"] == is_greedy


@pytest.mark.slow
def test_the_sample_job_s_winners_are_the_harness_s(tmp_path: pathlib.Path, harness: Any) -> None:
    """All rows of jobs/multiple_choice.yaml as a task of the harness, which makes its own requests and metrics."""
    from lm_eval.api.task import ConfigurableTask

    path = jobs.ROOT / "sample_data" / "questions.jsonl"
    metrics = {"best": "acc", "best_per_byte": "acc_norm"}
    task = ConfigurableTask(config={
        "task": "questions", "output_type": "multiple_choice", "test_split": "test", "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(path)}, "cache_dir": str(tmp_path / "cache")},
        "doc_to_text": "Question: {{question}}\nAnswer:", "doc_to_choice": "choices", "doc_to_target": "answer",
        "metric_list": [{"metric": m, "aggregation": "mean", "higher_is_better": True} for m in metrics.values()],
    })  # fmt: skip
    task.build_all_requests()
    found = harness.loglikelihood(task.instances, disable_tqdm=True)
    out = tmp_path / "out"
    done = jobs.run("run", jobs.ROOT / "jobs" / "multiple_choice.yaml", "--set", f"output.path={out}",
                    VLLM_ENABLE_V1_MULTIPROCESSING="0")  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows, questions = jobs.rows_of(out), list(task.eval_docs)
    assert len(rows) == len(questions) >= 200
    num_right = dict.fromkeys(metrics, 0)
    for number, (row, question) in enumerate(zip(rows, questions, strict=True)):
        assert (row["id"], row["answer"]) == (question["id"], question["answer"])
        results = found[4 * number : 4 * number + 4]
        expected = task.process_results(question, results)
        for name, metric in metrics.items():
            assert float(row[name] == row["answer"]) == expected[metric], (row["id"], name)
            num_right[name] += row[name] == row["answer"]
        sums = np.array([logprob for logprob, _ in results])
        assert row["best"] == np.argmax(sums)
        assert row["best_per_byte"] == np.argmax(sums / [len(choice) for choice in question["choices"]])
        assert row["choice_is_greedy"] == [is_greedy for _, is_greedy in results]
    assert 0 < num_right["best"] < len(rows) and num_right["best"] != num_right["best_per_byte"]
