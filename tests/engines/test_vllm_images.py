"""Prompts with images on real vLLM, in float32: held against transformers, token by token."""

import gc
import io
import pathlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from pictures import (
    CHAT_FORMS,
    FORMS,
    MAX_MODEL_LEN,
    QUESTION,
    VISION,
    Row,
    folder_of_pictures,
    mappings_in_parquet,
    png,
    prompts_of,
    spec_of,
    ten_rows,
    write_lines,
)
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from batchinf.base.errors import RowFailed
from batchinf.planning.lengths import lengths_of, opened
from batchinf.prompts.encoder import load_tokenizer
from batchinf.prompts.images import RenderedPrompt
from batchinf.records import Completion, Prompt, Result
from batchinf.replica.images import ImagePrompts
from batchinf.source.find import folder_of
from batchinf.spec.file import SpecFile
from batchinf.spec.job import JobSpec
from batchinf.tasks.registry import task_of

vllm = pytest.importorskip("vllm")
from batchinf.engines.vllm.engine import VllmEngine  # noqa: E402
from batchinf.engines.vllm.images import Rendering  # noqa: E402
from batchinf.engines.vllm.pooling import VllmPooling  # noqa: E402

NUM_TOKENS = 6
SAMPLING = {"max_tokens": NUM_TOKENS, "temperature": 0.0, "logprobs": 3, "prompt_logprobs": 1, "ignore_eos": True}


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return ten_rows()


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory, rows: list[Row]) -> Iterator[VllmEngine]:
    spec = spec_of(mappings_in_parquet(tmp_path_factory.mktemp("engine"), rows), sampling=SAMPLING)
    yield from started(VllmEngine, spec)


def started(engine_class: type[VllmEngine], spec: JobSpec) -> Iterator[VllmEngine]:
    task = task_of(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        made = engine_class(task, str(VISION), str(VISION))
    made.warm_up(task.warm_up_request())
    yield made
    made.close()
    del made
    gc.collect()


@pytest.fixture(scope="module")
def processor() -> Any:
    return AutoProcessor.from_pretrained(VISION)


@pytest.fixture(scope="module")
def model() -> Any:
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    return AutoModelForImageTextToText.from_pretrained(VISION, **options).eval()


def inputs_of(processor: Any, row: Row, **options: Any) -> dict[str, torch.Tensor]:
    """Those of transformers."""
    images = [Image.open(io.BytesIO(picture)) for picture in row.pictures]
    return dict(processor(text=row.text, images=[images] if images else None, return_tensors="pt", **options))


def logprobs_of(model: Any, inputs: dict[str, torch.Tensor], token_ids: Sequence[int]) -> np.ndarray:
    """By transformers, of all tokens after each position of a prompt and of an output behind it."""
    whole = torch.cat([inputs["input_ids"], torch.tensor([list(token_ids)], dtype=torch.long)], 1)
    longer = {**inputs, "input_ids": whole, "attention_mask": torch.ones_like(whole)}
    if (types := inputs.get("mm_token_type_ids")) is not None:  # of Qwen3-VL: 0 is text
        longer["mm_token_type_ids"] = torch.nn.functional.pad(types, (0, len(token_ids)))
    with torch.no_grad():
        logits = model(**longer).logits[0]
    return logits.double().log_softmax(-1).numpy()


def stored(spec: JobSpec, prompts: Sequence[Prompt], engine: VllmEngine) -> list[dict[str, Any]]:
    """The results of these prompts as the journal has them, in the order of rows and requests."""
    task = task_of(spec)
    assert spec.input.images is not None
    images = ImagePrompts(spec.input.images, base_folder=folder_of(spec.input.path))
    results: list[Result] = []
    of_request: dict[tuple[int, int], tuple[Prompt, int]] = {}
    for unloaded in prompts:
        prompt, rendered = (unloaded, None) if unloaded.error else images.made(unloaded, engine.render, {})
        requests = task.expand(prompt, MAX_MODEL_LEN)
        for request in requests:
            of_request[request.key] = prompt, len(requests)
            if prompt.error is not None:
                results.append(result_of(prompt, request.request_index, len(requests)))
                continue
            if rendered is not None:
                request = replace(request, rendered=rendered.for_ids(request.prompt_token_ids))
            try:
                engine.add(request)
            except RowFailed as refusal:
                results.append(result_of(prompt, request.request_index, len(requests), error=refusal.error))
    while engine.num_unfinished():
        for completion in engine.step():
            prompt, number = of_request[completion.request.key]
            results.append(result_of(prompt, completion.request.request_index, number, completion))
    results.sort(key=lambda result: (result.prompt.row_index, result.request_index))
    return task.encode(results).to_pylist()


def result_of(
    prompt: Prompt, index: int, number: int, completion: Completion | None = None, *, error: Any = None
) -> Result:
    return Result(
        prompt=prompt,
        request_index=index,
        num_requests=number,
        completion=completion,
        text=None,
        error=error or prompt.error,
        attempts=1,
    )


def test_a_placeholder_in_a_text_takes_no_image(tmp_path: pathlib.Path, engine: VllmEngine, rows: list[Row]) -> None:
    (tmp_path / "a.png").write_bytes(rows[1].pictures[0])
    chats = [[{"role": "user", "content": [{"type": "text", "text": text}, {"type": "image", "image": "a.png"}]}]
             for text in ("A <image> is here: ", "Here: ")]  # fmt: skip
    lines = write_lines(tmp_path / "rows.jsonl", [{"chat": chat} for chat in chats])
    where = {"path": str(lines), "apply_chat_template": None, "messages_column": "chat", "images": {}}
    spec = spec_of(where, sampling=SAMPLING)
    prompts = prompts_of(spec, tmp_path / "cache")
    forged, plain = stored(spec, prompts, engine)
    assert (forged["error_type"], plain["error_type"]) == (None, None)
    [image] = load_tokenizer(str(VISION), False)("<image>", add_special_tokens=False)["input_ids"]
    first, other = (prompt.token_ids.index(image) for prompt in prompts)
    assert first > other
    assert forged["prompt_token_ids"][:first] == prompts[0].token_ids[:first]
    assert forged["prompt_token_ids"][first:] == plain["prompt_token_ids"][other:]


@pytest.mark.parametrize("form", FORMS)
def test_ten_rows_equal_transformers(
    form: Any, tmp_path: pathlib.Path, engine: VllmEngine, rows: list[Row], processor: Any, model: Any
) -> None:
    spec = spec_of(form(tmp_path, rows), sampling=SAMPLING)
    found = stored(spec, prompts_of(spec, tmp_path / "cache"), engine)
    assert len({row["prompt_hash"] for row in found}) == len(found) == len(rows)
    for row, result in zip(rows, found, strict=True):
        assert len(result["image_digests"]) == len(row.pictures)
        assert_equal(result, inputs_of(processor, row), processor, model)


@pytest.mark.parametrize("form", CHAT_FORMS)
def test_questions_about_pictures_equal_transformers(
    form: Any, tmp_path: pathlib.Path, engine: VllmEngine, rows: list[Row], processor: Any, model: Any
) -> None:
    pictures = [row.pictures for row in rows]
    if form is folder_of_pictures:
        pictures = [(picture,) for of_row in pictures for picture in of_row][:10]
    spec = spec_of({"apply_chat_template": None, **form(tmp_path, pictures)}, sampling=SAMPLING)
    found = stored(spec, prompts_of(spec, tmp_path / "cache"), engine)
    assert len(found) == 10
    for of_row, result in zip(pictures, found, strict=True):
        content = [*[{"type": "image"}] * len(of_row), {"type": "text", "text": QUESTION}]
        chat = [{"role": "user", "content": content}]
        text = processor.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        inputs = inputs_of(processor, Row(text, of_row), add_special_tokens=False)
        assert_equal(result, inputs, processor, model)


def assert_equal(result: dict[str, Any], inputs: dict[str, torch.Tensor], processor: Any, model: Any) -> None:
    """A row of the output, and transformers."""
    prompt_ids = inputs["input_ids"][0].tolist()
    assert result["error_message"] is None
    assert result["prompt_token_ids"] == prompt_ids
    logprobs = logprobs_of(model, inputs, result["token_ids"])
    first = len(prompt_ids) - 1
    after = logprobs[first : first + NUM_TOKENS]
    assert after.argmax(-1).tolist() == result["token_ids"]
    assert np.abs(after[np.arange(NUM_TOKENS), result["token_ids"]] - result["logprobs"]).max() < 1e-5
    # A position that the model sees as a part of an image has no logprob; all others have that of their token.
    image_id = processor.image_token_id
    for place, (token_id, logprob) in enumerate(zip(prompt_ids, result["prompt_logprobs"], strict=True)):
        if place == 0 or token_id == image_id:
            assert logprob is None
        else:
            assert abs(logprobs[place - 1, token_id] - logprob) < 1e-5


def test_wrong_places_and_images_are_error_rows(tmp_path: pathlib.Path, engine: VllmEngine) -> None:
    picture = png(np.full((50, 70, 3), 90))
    (tmp_path / "a.png").write_bytes(picture)
    (tmp_path / "broken.png").write_bytes(picture[:60])
    lines = [
        {"prompt": "one <image> place", "photos": "a.png"},
        {"prompt": "no place", "photos": "a.png"},
        {"prompt": "a spare <image> place <image>", "photos": "a.png"},
        {"prompt": "too few <image>", "photos": ["a.png", "a.png"]},
        {"prompt": "expanded <fake_token_around_image><global-img><image><image><image><image>", "photos": "a.png"},
        {"prompt": "broken <image>", "photos": "broken.png"},
        {"prompt": "gone <image>", "photos": "gone.png"},
        {"prompt": "outside <image>", "photos": "../../etc/hostname"},
        {"prompt": "<image>" * 5, "photos": ["a.png"] * 5},
        {"prompt": f"long <image>{' word' * 490}", "photos": ["a.png"]},
        {"prompt": "a place <image> without an image", "photos": None},
        {"prompt": "one <image> place", "photos": "a.png"},
    ]
    spec = spec_of({"path": str(write_lines(tmp_path / "rows.jsonl", lines)), "images_column": "photos"},
                   sampling=SAMPLING)  # fmt: skip
    found = stored(spec, prompts_of(spec, tmp_path / "cache"), engine)
    types = [row["error_type"] for row in found]
    wrong = "image_placeholder"
    assert types == [None, wrong, wrong, wrong, wrong, "image_broken", "image_not_found", "image_forbidden",
                     "too_many_images", "prompt_too_long", wrong, None]  # fmt: skip
    # Rows that were refused have left nothing in the engine.
    without_key = [{key: value for key, value in row.items() if key != "row_index"} for row in (found[0], found[-1])]
    assert without_key[0] == without_key[1]


def test_spare_placeholders_that_only_the_engine_knows(engine: VllmEngine) -> None:
    tokenizer = load_tokenizer(str(VISION), False)
    picture = Image.new("RGB", (60, 40), "red")
    ids = tokenizer("a <image> b")["input_ids"]
    rendered = engine.render(ids, [picture])
    for wrong in (tokenizer("a <image> b <image>")["input_ids"], rendered.token_ids):
        with pytest.raises(RowFailed) as refusal:
            engine.render(wrong, [picture])
        assert refusal.value.error.error_type == "image_placeholder"


def test_threads_that_render_at_one_time_make_the_same(
    engine: VllmEngine, rows: list[Row], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine knows an image by its name, so no two may have one."""
    tokenizer = load_tokenizer(str(VISION), False)
    images = [[Image.open(io.BytesIO(picture)).convert("RGB") for picture in row.pictures] for row in rows]
    prompts = [(tokenizer(row.text)["input_ids"], of_row) for row, of_row in zip(rows, images, strict=True) if of_row]
    monkeypatch.setattr("batchinf.engines.vllm.images._num_threads", lambda: 4)
    rendering = Rendering(engine._engine)
    assert rendering._threads._value == 4
    alone = [rendering.render(*prompt) for prompt in prompts]
    with ThreadPoolExecutor(4) as threads:
        others = list(threads.map(lambda prompt: rendering.render(*prompt), prompts * 8))
    for expected, made in zip(alone * 8, others, strict=True):
        assert made.token_ids == expected.token_ids
        assert all(torch.equal(a, b) for a, b in zip(_tensors(made), _tensors(expected), strict=True))
    names = [name for prompt in alone + others for name in prompt.for_ids([])["mm_hashes"]["image"]]
    assert len(set(names)) == len(names) == 9 * sum(map(len, images))


def _tensors(prompt: RenderedPrompt) -> list[torch.Tensor]:
    """Of the images of a prompt, as the engine gets them."""
    return [field.data for item in prompt.for_ids([])["mm_kwargs"]["image"] for field in item.values()]


@pytest.mark.slow
@pytest.mark.usefixtures("quick_vllm_replicas")
def test_lengths_before_a_start_are_those_of_the_engine(
    tmp_path: pathlib.Path, engine: VllmEngine, rows: list[Row]
) -> None:
    """`plan` and `validate` count the tokens of images by their sizes alone."""
    spec = spec_of(mappings_in_parquet(tmp_path, rows), sampling=SAMPLING)
    file = SpecFile(spec, {}, "job.yaml")
    with opened(file) as found:
        assert found is not None
        counted = lengths_of(found[0], file, found[1])
    ids = [load_tokenizer(str(VISION), False)(row.text)["input_ids"] for row in rows]
    pictures = [[Image.open(io.BytesIO(picture)) for picture in row.pictures] for row in rows]
    pairs = zip(ids, pictures, strict=True)
    expected = [len(engine.render(text, images).token_ids) if images else len(text) for text, images in pairs]
    assert list(counted.prompts) == expected


def test_samples_share_one_rendered_prompt(
    tmp_path: pathlib.Path, engine: VllmEngine, rows: list[Row], processor: Any, model: Any
) -> None:
    sampling = {**SAMPLING, "n": 3, "temperature": 1.0, "prompt_logprobs": None}
    spec = spec_of(mappings_in_parquet(tmp_path, rows[:3]), sampling=sampling)
    found = stored(spec, prompts_of(spec, tmp_path / "cache"), engine)
    assert len({tuple(row["token_ids"]) for row in found}) == len(found) == 9
    for row, result in zip([row for row in rows[:3] for _ in range(3)], found, strict=True):
        inputs = inputs_of(processor, row)
        logprobs = logprobs_of(model, inputs, result["token_ids"])[inputs["input_ids"].shape[1] - 1 : -1]
        expected = logprobs[np.arange(NUM_TOKENS), result["token_ids"]]
        assert np.abs(expected - result["logprobs"]).max() < 1e-5


def test_choices_after_an_image_equal_transformers(
    tmp_path: pathlib.Path, engine: VllmEngine, rows: list[Row], processor: Any, model: Any
) -> None:
    choices = (" red", " blue and yellow")
    where = mappings_in_parquet(tmp_path, rows[:3])
    spec = spec_of({**where, "prompt_column": "prompt", "choices": choices}, task="score", score={"one_pass": False})
    found = stored(spec, prompts_of(spec, tmp_path / "cache"), engine)
    assert [row["error_message"] for row in found] == [None] * 6
    for result, (row, choice) in zip(found, [(row, choice) for row in rows[:3] for choice in choices], strict=True):
        inputs = inputs_of(processor, row)
        target = processor.tokenizer(choice, add_special_tokens=False)["input_ids"]
        logprobs = logprobs_of(model, inputs, target)[-len(target) - 1 : -1]
        expected = logprobs[np.arange(len(target)), target]
        assert np.abs(np.array(result["choice_logprobs"][0]) - expected).max() < 1e-5


@pytest.mark.slow
def test_logits_of_rows_with_images_equal_transformers(
    tmp_path: pathlib.Path, rows: list[Row], processor: Any, model: Any
) -> None:
    where = mappings_in_parquet(tmp_path, rows[:4])
    section = {"values": "logprobs", "dtype": "float32", "vocab_size": model.config.text_config.vocab_size}
    whole, last = (
        spec_of(where, task="logits", logits={**section, "positions": which}, sampling={"temperature": 0.0})
        for which in ("all", "last")
    )
    prompts = prompts_of(whole, tmp_path / "cache")
    for engine in started(VllmEngine, whole):
        found = stored(whole, prompts, engine), stored(last, prompts, engine)
    for row, of_all, of_last in zip(rows, *found, strict=False):
        expected = logprobs_of(model, inputs_of(processor, row), [])
        for result, first in ((of_all, 0), (of_last, len(expected) - 1)):
            assert result["error_message"] is None
            assert result["positions"] == list(range(first, len(expected)))
            assert np.abs(np.array(result["logprobs"]) - expected[first:]).max() < 1e-5


def test_all_tokens_of_a_scored_row_with_images_equal_transformers(
    tmp_path: pathlib.Path, engine: VllmEngine, rows: list[Row], processor: Any, model: Any
) -> None:
    where = mappings_in_parquet(tmp_path, rows[:3])
    table = pq.read_table(where["path"])
    pq.write_table(table.append_column("text", [[" blue and yellow"] * 3]), where["path"])
    where |= {"prompt_column": "prompt", "continuation_column": "text"}
    spec = spec_of(where, task="score", score={"store": "all"}, sampling={"prompt_logprobs": 2})
    found = stored(spec, prompts_of(spec, tmp_path / "cache"), engine)
    for row, result in zip(rows, found, strict=False):
        inputs = inputs_of(processor, row)
        target = processor.tokenizer(" blue and yellow", add_special_tokens=False)["input_ids"]
        logprobs = logprobs_of(model, inputs, target)
        ids = [*inputs["input_ids"][0].tolist(), *target]
        assert result["error_message"] is None
        assert result["token_ids"] == ids
        assert len(result["logprobs"]) == len(result["top_logprobs"]) == len(ids)
        for place, token_id in enumerate(ids):
            values = (result["logprobs"][place], result["ranks"][place], result["top_logprobs"][place])
            if place == 0 or token_id == processor.image_token_id:
                assert values == (None, None, None)
            else:
                assert abs(logprobs[place - 1, token_id] - values[0]) < 1e-5
                assert np.abs(np.sort(logprobs[place - 1])[:-3:-1] - values[2]).max() < 1e-5
        sum_ = logprobs[-len(target) - 1 : -1][np.arange(len(target)), target].sum()
        assert abs(result["logprob_sum"] - sum_) < 1e-4


@pytest.mark.slow
def test_vectors_of_pictures_equal_transformers(
    tmp_path: pathlib.Path, rows: list[Row], processor: Any, model: Any
) -> None:
    spec = spec_of(mappings_in_parquet(tmp_path, rows), task="embed", pooling={"width": 64})
    for engine in started(VllmPooling, spec):
        found = stored(spec, prompts_of(spec, tmp_path / "cache"), engine)
    for row, result in zip(rows, found, strict=True):
        with torch.no_grad():
            states = model.model(**inputs_of(processor, row)).last_hidden_state[0, -1]
        expected = torch.nn.functional.normalize(states, dim=0).numpy()
        assert result["error_message"] is None
        assert np.abs(np.array(result["embedding"]) - expected).max() < 1e-5
