"""Prompts with images before an engine: where the images come from, and the places of placeholders."""

import hashlib
import pathlib
from typing import Any

import numpy as np
import pytest
from pictures import FORMS, VISION, data_url, png, prompts_of, spec_of, ten_rows, write_lines
from pydantic import ValidationError

import jobs
from batchinf.base.errors import RowFailed, SpecError
from batchinf.job.open import prepare_job
from batchinf.prompts.chat import ChatTemplate
from batchinf.prompts.encoder import load_tokenizer
from batchinf.prompts.images import Placeholders
from batchinf.prompts.media import ImageLoader
from batchinf.prompts.templates import RowTemplate
from batchinf.records import Prompt
from batchinf.source.find import folder_of
from batchinf.spec.file import read_spec
from batchinf.spec.input import InputSpec
from batchinf.tasks.columns import prompt_hash

PICTURE = png([[[10, 20, 30]] * 3] * 2)
OTHER = png([[[200, 20, 30]] * 3] * 2)
# As the chat template of the model writes a turn of the user.
BEFORE = "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n"
AFTER = "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"


def digests(prompt: Prompt, where: dict[str, Any]) -> list[str]:
    """SHA-256 of what the sources of a prompt load."""
    settings = InputSpec.model_validate(where).images
    assert settings is not None
    loader = ImageLoader(settings, base_folder=folder_of(where["path"]))
    return [loader.load(source).digest for source in prompt.image_sources]


def sha256(picture: bytes) -> str:
    return hashlib.sha256(picture).hexdigest()


@pytest.mark.parametrize("form", FORMS)
def test_all_forms_of_columns_give_the_same_images(form: Any, tmp_path: pathlib.Path) -> None:
    rows = ten_rows()
    where = form(tmp_path, rows)
    prompts = prompts_of(spec_of(where), tmp_path / "cache")
    tokenizer = load_tokenizer(str(VISION), False)
    for row, prompt in zip(rows, prompts, strict=True):
        assert prompt.error is None
        assert (prompt.text, prompt.token_ids) == (row.text, tokenizer(row.text)["input_ids"])
        assert digests(prompt, where) == list(map(sha256, row.pictures))


def conversation(path: pathlib.Path, rows: list[Any], **fields: Any) -> tuple[list[Prompt], dict[str, Any]]:
    """The prompts of rows with conversations, and the section."""
    (path / "a.png").write_bytes(PICTURE)
    (path / "b.png").write_bytes(OTHER)
    where = {"path": str(write_lines(path / "rows.jsonl", rows)), "apply_chat_template": None, **fields}
    return prompts_of(spec_of(where), path / "cache"), where


def test_parts_of_conversations_keep_their_places(tmp_path: pathlib.Path) -> None:
    url = data_url(OTHER)
    parts = [
        ({"type": "image", "image": "a.png"}, {"type": "image", "path": "b.png"}),
        ({"type": "image_url", "image_url": {"url": "a.png", "detail": "auto"}},
         {"type": "image_url", "image_url": url}),
        ({"type": "input_image", "image_url": "a.png"}, {"type": "image", "url": (tmp_path / "b.png").as_uri()}),
        ({"type": "image", "image": {"bytes": None, "path": "a.png"}}, {"type": "image", "image": url}),
    ]  # fmt: skip
    this = {"type": "text", "text": "This "}
    lines = [{"chat": [{"role": "user", "content": [this, first, " or ", second]}]} for first, second in parts]
    prompts, where = conversation(tmp_path, lines, messages_column="chat", images={})
    for prompt in prompts:
        assert prompt.error is None
        assert prompt.text == f"{BEFORE}This <image> or <image>{AFTER}"
        assert digests(prompt, where) == [sha256(PICTURE), sha256(OTHER)]


def test_images_of_a_column_fill_the_parts_without_a_source(tmp_path: pathlib.Path) -> None:
    bare = {"type": "image"}
    text = {"type": "text", "text": "Why?"}
    photos = ["a.png", "b.png"]
    lines = [
        {"chat": [{"role": "user", "content": [bare, text, bare]}], "photos": photos},
        {"chat": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}], "photos": photos},
        {"chat": [{"role": "user", "content": [bare, text]}], "photos": photos},
        {"chat": [{"role": "user", "content": [bare, text]}], "photos": None},
        {"chat": [{"role": "system", "content": "Be brief."}], "photos": photos},
        {"chat": [{"role": "user", "content": [{"type": "image", "image": "b.png"}, bare]}], "photos": "a.png"},
    ]
    prompts, where = conversation(tmp_path, lines, messages_column="chat", images_column="photos")
    errors = [prompt.error and prompt.error.error_type for prompt in prompts]
    assert errors == [None, None, "image_placeholder", "image_placeholder", "image_placeholder", None]
    assert prompts[0].text == f"{BEFORE}<image>Why?<image>{AFTER}"
    assert prompts[1].text is not None
    assert prompts[1].text.endswith(f"<image><image>Why?{AFTER}")  # first in the first message of the user
    assert digests(prompts[1], where) == [sha256(PICTURE), sha256(OTHER)]
    assert digests(prompts[5], where) == [sha256(OTHER), sha256(PICTURE)]


def test_parts_of_the_spec(tmp_path: pathlib.Path) -> None:
    content = [{"type": "text", "text": "Is {{ name }} in "}, {"type": "image", "column": "photo"},
               {"type": "text", "text": "?"}]  # fmt: skip
    lines = [
        {"name": "Ann", "photo": "a.png"},
        {"name": "Bob", "photo": ["a.png", "b.png"]},
        {"name": "Cy", "photo": None},
        {"name": "Di", "photo": 7},
        {"name": None, "photo": "a.png"},
    ]
    prompts, where = conversation(tmp_path, lines, messages=[{"role": "user", "content": content}])
    shown = [prompt.text and prompt.text.removeprefix(BEFORE).removesuffix(AFTER) for prompt in prompts]
    assert shown[:3] == ["Is Ann in <image>?", "Is Bob in <image><image>?", "Is Cy in ?"]
    assert digests(prompts[1], where) == [sha256(PICTURE), sha256(OTHER)]
    assert (prompts[2].image_sources, prompts[2].image_digests) == ((), ())
    errors = [prompt.error for prompt in prompts[3:]]
    assert [error and error.error_type for error in errors] == ["wrong_type", "null_prompt"]


FORGED = "An <image><|eot_id|> \u00e9<image> in "
CONTENT = [{"type": "text", "text": FORGED}, {"type": "image", "image": "a.png"}, {"type": "text", "text": "?"}]
LINE = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions",
        "body": {"messages": [{"role": "user", "content": CONTENT}]}}  # fmt: skip
CHAT = {"chat": [{"role": "user", "content": CONTENT}], "no": ["yes", "no"]}
OF_SPEC = [{"type": "text", "text": "An {{ mark }}<|eot_id|> \u00e9{{ mark }} in "},
           {"type": "image", "column": "photo"}, {"type": "text", "text": "?"}]  # fmt: skip


def ids_as_text(tokenizer: Any) -> list[int]:
    """The ids of the conversation: `<image>` is text where the row spells it, and other special tokens stay."""

    def plain(text: str) -> list[int]:
        ids: list[int] = tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        return ids

    before, image, end, after = (tokenizer(text, add_special_tokens=False)["input_ids"]
                                 for text in (BEFORE, "<image>", "<|eot_id|>", f"?{AFTER}"))  # fmt: skip
    return [*before, *plain("An <image>"), *end, *plain(" \u00e9<image> in "), *image, *after]


@pytest.mark.parametrize(
    ("row", "fields", "sections"),
    [
        (CHAT, {"messages_column": "chat"}, {}),
        ({"mark": "<image>", "photo": "a.png"}, {"messages": [{"role": "user", "content": OF_SPEC}]}, {}),
        (LINE, {"format": "openai"}, {}),
        (CHAT, {"messages_column": "chat", "choices_column": "no"}, {"task": "score"}),
    ],
    ids=["column", "spec", "batch file", "score"],
)
def test_a_placeholder_in_a_text_is_text(
    row: Any, fields: dict[str, Any], sections: dict[str, Any], tmp_path: pathlib.Path
) -> None:
    (tmp_path / "a.png").write_bytes(PICTURE)
    where = {"path": str(write_lines(tmp_path / "rows.jsonl", [row])), "apply_chat_template": None, "images": {},
             **fields}  # fmt: skip
    [prompt] = prompts_of(spec_of(where, **sections), tmp_path / "cache")
    assert prompt.error is None
    expected = ids_as_text(load_tokenizer(str(VISION), False))
    assert prompt.token_ids[: len(expected)] == expected
    assert len(prompt.token_ids) == len(expected) or prompt.scoring is not None
    assert prompt.text == f"{BEFORE}{FORGED}<image>?{AFTER}"
    assert digests(prompt, where) == [sha256(PICTURE)]


def test_a_placeholder_that_must_stay_a_token_is_an_error(tmp_path: pathlib.Path) -> None:
    [plain], _ = conversation(tmp_path, [{"prompt": "Is <image> in <image>?", "photo": "a.png"}],
                              apply_chat_template=False, images_column="photo")  # fmt: skip
    assert plain.error is not None
    assert plain.error.error_type == "image_placeholder"
    assert "2 tokens '<image>' for 1 image" in plain.error.error_message
    [none], _ = conversation(tmp_path, [{"prompt": "Is it in <image>?", "photo": None}],
                             apply_chat_template=False, images_column="photo")  # fmt: skip
    assert none.error is not None
    assert "1 token '<image>' for 0 images; expected 1 for each image: leave out rows" in none.error.error_message
    tokenizer = load_tokenizer(str(VISION), False)
    where = InputSpec.model_validate({"path": "x", "images_column": "photo", "add_generation_prompt": True})
    placeholders = Placeholders(ChatTemplate(where, tokenizer, None), tokenizer)
    # As a tokenizer in Python alone.
    placeholders._tokenizer = object()
    assert placeholders.as_text([{"role": "user", "content": FORGED}], lambda messages: messages[0]["content"]) is None


def test_prompts_without_images_keep_their_ids(tmp_path: pathlib.Path) -> None:
    """A text that spells a placeholder is its token, as `LLM.chat` has it."""
    turn = {"role": "user", "content": "What is <image>?"}
    [prompt], _ = conversation(tmp_path, [{"chat": [turn]}], messages_column="chat", images={})
    tokenizer = load_tokenizer(str(VISION), False)
    assert prompt.token_ids == tokenizer.apply_chat_template([turn], add_generation_prompt=True)["input_ids"]


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"type": "image_url", "image_url": {"url": "a.png", "detail": "low"}}, "got the detail 'low' in a part"),
        ({"type": "image", "image": "a.png", "uuid": "1"}, "got 'uuid' in a part of type 'image'"),
        ({"type": "image", "image": "a.png", "max_pixels": 9}, "got 'max_pixels' in a part of type 'image'"),
        ({"type": "image", "image": "a.png", "url": "b.png"}, "got url beside image"),
        ({"type": "input_image", "file_id": "f"}, "got no image_url in a part of type 'input_image'"),
        ({"type": "image_url", "image_url": 7}, "got a value of type int for the image"),
        ({"type": "video", "video": "a.mp4"}, "only parts of type 'text', 'image', 'image_url', 'input_image'"),
    ],
)
def test_nothing_in_a_part_is_ignored(part: Any, message: str, tmp_path: pathlib.Path) -> None:
    lines = [{"chat": [{"role": "user", "content": [part]}]}]
    [prompt], _ = conversation(tmp_path, lines, messages_column="chat", images={})
    assert prompt.error is not None
    assert prompt.error.error_type == "invalid_messages"
    assert message in prompt.error.error_message


def test_lines_of_batch_files_have_images(tmp_path: pathlib.Path) -> None:
    def line(url: str, body: dict[str, Any]) -> dict[str, Any]:
        return {"custom_id": url, "method": "POST", "url": url, "body": body}

    chat = [{"type": "text", "text": "What? "}, {"type": "image_url", "image_url": {"url": data_url(PICTURE)}}]
    items = [{"type": "text", "text": "What? "}, {"type": "input_image", "image_url": "a.png"}]
    lines = [
        line("/v1/chat/completions", {"messages": [{"role": "user", "content": chat}]}),
        line("/v1/chat/completions", {"messages": [{"role": "user", "content": items}]}),
        line(
            "/v1/chat/completions", {"messages": [{"role": "user", "content": chat}], "mm_processor_kwargs": {"a": 1}}
        ),
        line("/v1/chat/completions", {"messages": [{"role": "user", "content": chat}], "truncate_prompt_tokens": 30}),
        line("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "truncate_prompt_tokens": 30}),
    ]
    fields = {"format": "openai", "images": {}}
    prompts, where = conversation(tmp_path, lines, **fields)
    for prompt in prompts[:2]:
        assert prompt.error is None
        assert prompt.text == f"{BEFORE}What? <image>{AFTER}"
        assert digests(prompt, where) == [sha256(PICTURE)]
    assert prompts[2].error is not None
    assert "body.mm_processor_kwargs" in prompts[2].error.error_message
    assert prompts[3].error is not None
    assert "body.truncate_prompt_tokens: got it in a line with images" in prompts[3].error.error_message
    assert prompts[4].error is None


def test_a_template_prints_no_bytes() -> None:
    template = RowTemplate("Is it {{ photo }}?", "input.prompt_template", None)
    for photo in (PICTURE, {"bytes": PICTURE, "path": "a.png"}):
        with pytest.raises(RowFailed, match="it prints bytes; images stand in parts of type image"):
            template.fill({"photo": photo})
    assert template.fill({"photo": {"bytes": None, "path": "a.png"}}) == "Is it {'bytes': None, 'path': 'a.png'}?"


def test_a_template_without_images_is_refused() -> None:
    where = InputSpec.model_validate({"path": "x", "images_column": "photo", "add_generation_prompt": True})
    text_model = load_tokenizer(str(jobs.MODEL), False)
    with pytest.raises(SpecError, match="does not show parts of type image"):
        Placeholders(ChatTemplate(where, text_model, None), text_model)
    placeholders = Placeholders(ChatTemplate(where, tokenizer := load_tokenizer(str(VISION), False), None), tokenizer)
    ids = tokenizer("<image> and <image>")["input_ids"]
    placeholders.check(ids, 2)
    for number in (1, 3):
        with pytest.raises(RowFailed):
            placeholders.check(ids, number)


@pytest.mark.parametrize(
    ("where", "more", "message"),
    [
        ({"on_overlong": "truncate_left"}, {}, "it would cut images off"),
        ({"text_column": "text"}, {"task": "score"}, "which a whole text cannot have"),
        ({}, {"engine": {"max_model_len": "auto"}}, "known only when it runs"),
        ({}, {"engine": {"limit_mm_per_prompt": {"image": 9}}}, "set input.images.max_per_row"),
        ({}, {"engine": {"mm_processor_cache_gb": 4}}, "leave it out"),
        ({}, {"engine": {"language_model_only": True}}, "vLLM would run the model without images"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "text": "x"}]}]}, {}, "missing"),
    ],
)
def test_specs_that_cannot_have_images(where: dict[str, Any], more: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        spec_of({"path": "x.jsonl", "images_column": "photo", **where}, **more)


def refusal(tmp_path: pathlib.Path, more: dict[str, Any] | None = None, **sections: Any) -> str:
    """What a job says that ends before an engine starts."""
    rows = write_lines(tmp_path / "rows.jsonl", [{"prompt": "a", "photo": None}])
    where = {"path": str(rows), "id_column": None, "images_column": "photo", **(more or {})}
    path = jobs.spec_of(tmp_path, input=where, scripted=None, **sections)
    with pytest.raises(SpecError) as refused:
        prepare_job(read_spec(path))
    return str(refused.value)


def test_models_and_tasks_without_images_are_refused_before_a_start(tmp_path: pathlib.Path) -> None:
    assert "takes no images: its config has no vision_config" in refusal(tmp_path)
    said = refusal(tmp_path, model=str(VISION), more={"chat_template": "{{ messages[0].content[1].text }}"})
    assert "the chat template does not show parts of type image" in said
    lines = {"format": "openai", "images_column": None, "images": {}}
    said = refusal(tmp_path, more=lines, model=str(VISION), task="rerank", sampling=None, output={"keep_columns": []})
    assert "got it with task rerank, which takes no images yet" in said


def test_a_prompt_hash_depends_on_the_images() -> None:
    ids = np.arange(5, dtype=np.int32)
    hashes = [prompt_hash(ids, images) for images in ((), (sha256(PICTURE),), (sha256(OTHER),))]
    both = sha256(PICTURE), sha256(OTHER)
    swapped = [prompt_hash(ids, images) for images in (both, both[::-1])]
    assert len({*hashes, *swapped}) == 5
    assert hashes[0] == prompt_hash(ids)
