"""`batchinf init`: the specs that it writes are valid, warn of nothing, and use the columns that are meant."""

import base64
import io
import itertools
import json
import pathlib
import shutil
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from pictures import VISION
from PIL import Image

import batchinf
import jobs
from batchinf.base.errors import InputError, ModelError, UserError
from batchinf.commands.init.columns import look_at
from batchinf.commands.init.init import _TAKEN, InitRequest, has_chat_template, write_spec
from batchinf.spec.file import read_spec
from batchinf.spec.job import JobSpec
from batchinf.tasks.purposes import PURPOSES
from batchinf.tasks.registry import task_of

PICTURES = jobs.ROOT / "sample_data" / "pictures"
QUESTIONS = jobs.ROOT / "sample_data" / "questions.jsonl"
# The structure of labels is compiled by vLLM itself, whose import takes 10 s of processor time.
NO_VLLM = {"sampling.structured_outputs": None}


def rows_file(folder: pathlib.Path, rows: list[dict[str, Any]]) -> pathlib.Path:
    path = folder / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def written(
    purpose: str, data: pathlib.Path, folder: pathlib.Path, *, model: pathlib.Path = jobs.MODEL, **options: Any
) -> pathlib.Path:
    """The path of a spec as `init` writes it."""
    path = folder / "job.yaml"
    path.unlink(missing_ok=True)
    said(purpose, data, path, model=model, out=str(folder / "out $x"), **options)
    return path


def said(
    purpose: str, data: pathlib.Path, path: pathlib.Path, *, model: pathlib.Path = jobs.MODEL, **options: Any
) -> list[str]:
    """The lines of `init` about the spec that it writes."""
    request = InitRequest(path=str(path), purpose=purpose, data=str(data), model=str(model), **options)
    return write_spec(request)


def without_template(folder: pathlib.Path) -> pathlib.Path:
    """A model without a chat template."""
    model = folder / "model"
    model.mkdir()
    for file in jobs.MODEL.iterdir():
        (model / file.name).symlink_to(file)
    (model / "chat_template.jinja").unlink()
    return model


OF_TEXTS = [purpose for purpose in PURPOSES if purpose != "rerank"]  # which needs documents


@pytest.mark.parametrize(
    ("purpose", "data"),
    [
        *itertools.product(OF_TEXTS, [jobs.PROMPTS, jobs.ROOT / "sample_data" / "prompts.csv", QUESTIONS]),
        ("rerank", jobs.ROOT / "sample_data" / "queries.jsonl"),
    ],
)
def test_validate_is_happy(purpose: str, data: pathlib.Path, tmp_path: pathlib.Path) -> None:
    path = written(purpose, data, tmp_path)
    report = batchinf.validate(path, overrides=NO_VLLM, num_rows=1)
    assert [remark.text for remark in report.remarks if remark.kind == "warning"] == []
    assert report.prompt_lengths.errors == ()
    assert report.rows[0].error is None
    assert report.output.folder == str(tmp_path / "out $x")


@pytest.mark.slow
def test_vllm_compiles_the_labels(tmp_path: pathlib.Path) -> None:
    remarks = batchinf.validate(written("label", jobs.PROMPTS, tmp_path)).remarks
    assert [remark.kind for remark in remarks] == ["structure"]


@pytest.mark.parametrize("purpose", OF_TEXTS)
def test_a_model_without_a_chat_template(purpose: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = without_template(tmp_path)
    assert has_chat_template(str(jobs.MODEL)) is True
    assert has_chat_template(str(model)) is False
    assert has_chat_template("nobody/nothing-of-this-name") is None
    with pytest.raises(ModelError, match="--model: got empty text"):
        has_chat_template("")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert has_chat_template("~/model") is False  # `--model=~/model`: the shell leaves it so, and the spec expands it
    path = written(purpose, jobs.PROMPTS, tmp_path, model=model)
    report = batchinf.validate(path, overrides=NO_VLLM, num_rows=1)
    assert [remark.text for remark in report.remarks if remark.kind == "warning"] == []


def test_an_id_is_a_column_of_unique_short_words_if_no_name_says_so(tmp_path: pathlib.Path) -> None:
    rows = [
        {"price": n / 2, "topic": f"t{n}", "said": f"word {n}" * 9, "title": f"The {n}", "twice": n // 2, "ticket": n}
        for n in range(8)
    ]
    assert look_at(str(rows_file(tmp_path, rows))).id == "ticket"
    assert look_at(str(rows_file(tmp_path, [*rows, {**rows[0], "ticket": None}]))).id is None
    many = [{**row, "ticket": 8 * part + row["ticket"]} for part in range(3) for row in rows]
    repeated = rows_file(tmp_path, [*many, many[3]])
    assert (look_at(str(repeated)).id, look_at(str(repeated)).repeated_id) == (None, "ticket repeats '3'")
    assert "  # id_column: NAME " in (text := written("label", repeated, tmp_path).read_text())
    assert "; ticket repeats '3'\n" in text
    renamed = rows_file(tmp_path, [{"ticket\nid": row["ticket"], "said": row["said"]} for row in [*many, many[3]]])
    assert read_spec(written("label", renamed, tmp_path)).spec.input.id_column is None
    assert look_at(str(rows_file(tmp_path, [*rows, rows[0]]))).id is None
    assert look_at(str(rows_file(tmp_path, [{**row, "key": f"k{row['ticket']}"} for row in rows]))).id == "key"


@pytest.mark.parametrize("purpose", ["generate", "label", "logits", "embed"])
def test_conversations_alone_are_prompts(purpose: str, tmp_path: pathlib.Path) -> None:
    turns = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]
    data = rows_file(tmp_path, [{"messages": turns}] * 3)
    report = batchinf.validate(str(written(purpose, data, tmp_path)), overrides=NO_VLLM if purpose == "label" else {})
    text = report.rows[0].text
    assert "Why?" in text
    assert "[{" not in text
    assert ("user: Why?\nassistant: So." in text) == (purpose == "label")


def test_scores_of_conversations_need_a_text_or_labels(tmp_path: pathlib.Path) -> None:
    turns = [{"role": "user", "content": "Why?"}]
    alone = rows_file(tmp_path, [{"messages": turns}] * 3)
    with pytest.raises(UserError, match=r"has only conversations, in 'messages'; give --labels, or a column with the"):
        written("score", alone, tmp_path)
    report = batchinf.validate(written("score", alone, tmp_path, labels=("yes", "no")), num_rows=1)
    assert "user: Why?" in report.rows[0].scored[0].context


def test_a_batch_file_keeps_its_own_prompts(tmp_path: pathlib.Path) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 7}
    line = {"method": "POST", "url": "/v1/chat/completions", "body": body}
    data = rows_file(tmp_path, [{"custom_id": name, **line} for name in "ab"])
    path = tmp_path / "job.yaml"
    given = ("--data", data, "--model", jobs.MODEL)
    done = jobs.run("init", path, "--for", "generate", *given)
    assert done.returncode == 0, done.stderr
    assert "an OpenAI batch file" in done.stdout
    report = batchinf.validate(str(path))
    assert "Tell me a story." in report.rows[0].text
    assert report.rows[0].id == "a"
    spec = yaml.safe_load(path.read_text())
    assert spec.keys() == {"model", "input", "engine", "output"}  # a line has its own parameters
    assert spec["engine"] == {"served_model_name": ["m"]}
    path.unlink()
    for purpose in PURPOSES:
        if purpose not in ("generate", "embed", "rerank"):
            refused = jobs.run("init", path, "--for", purpose, *given)
            assert refused.returncode == 2
            assert "is an OpenAI batch file" in refused.stderr
            assert not path.exists()


@pytest.mark.parametrize("has_texts", [False, True])  # a body of mixed types is JSON text
def test_a_batch_file_gets_what_its_lines_need_of_the_job(has_texts: bool, tmp_path: pathlib.Path) -> None:
    own = str(jobs.MODEL)
    bodies: list[Any] = [
        {"model": own},
        {"model": "gpt-4o-mini", "logprobs": True, "top_logprobs": 3},
        {"model": "gpt 4", "logprobs": True, "top_logprobs": 1},
        {"model": "gpt-4o-mini", "logprobs": has_texts and None},
    ]
    bodies = [{"messages": [{"role": "user", "content": "Hi."}], **body} for body in bodies]
    line = {"method": "POST", "url": "/v1/chat/completions"}
    azure = {**line, "url": "/openai/deployments/mine/chat/completions", "body": {**bodies[0], "model": None}}
    lines = [{**line, "body": body} for body in [*bodies, *["no mapping"] * has_texts]] + [azure]
    data = rows_file(tmp_path, [{"custom_id": str(number), **each} for number, each in enumerate(lines)])
    path = written("generate", data, tmp_path)
    spec = yaml.safe_load(path.read_text())
    assert spec["engine"] == {"served_model_name": ["gpt-4o-mini", "gpt 4", "mine"]}
    assert spec["sampling"] == {"logprobs": 3}
    assert path.read_text().count(f"first {len(lines)} lines") == 2
    errors = [row.error for row in batchinf.validate(path, num_rows=len(lines)).rows]
    assert [error is not None for error in errors] == [False] * 4 + [True] * has_texts + [False]
    (tmp_path / "plain").mkdir()
    plain = rows_file(tmp_path / "plain", [{"custom_id": "a", **line, "body": bodies[0]}])
    assert yaml.safe_load(written("generate", plain, tmp_path / "plain").read_text()).keys() == {
        "model",
        "input",
        "output",
    }


def test_a_batch_file_of_embeddings(tmp_path: pathlib.Path) -> None:
    line = {"method": "POST", "url": "/v1/embeddings", "body": {"input": ["Tell me", "a story"]}}
    data = rows_file(tmp_path, [{"custom_id": name, **line} for name in "ab"])
    path = written("embed", data, tmp_path)
    found = yaml.safe_load(path.read_text())
    assert (found["task"], found["input"]["format"]) == ("embed", "openai")
    report = batchinf.validate(str(path))
    assert report.rows[0].text.endswith("a story")


def test_the_columns_of_documents_are_those_that_the_user_writes(tmp_path: pathlib.Path) -> None:
    rows = [{"query": f"sea {n}", "passages": ["a", "b"]} for n in range(3)]
    path = written("rerank", rows_file(tmp_path, rows), tmp_path)
    found = yaml.safe_load(path.read_text())["input"]
    assert (found["query_column"], found["documents_column"]) == ("query", "documents")
    with pytest.raises(UserError, match=r"input\.documents_column: the input has no column 'documents'"):
        batchinf.validate(path)
    report = batchinf.validate(path, overrides={"input.documents_column": "passages"})
    assert report.rows[0].text.endswith("sea 0<|begin_of_text|>a<|begin_of_text|>b")
    line = {"method": "POST", "url": "/rerank", "body": {"query": "a", "documents": ["b"]}}
    batch = rows_file(tmp_path, [{"custom_id": name, **line} for name in "ab"])
    found = yaml.safe_load(written("rerank", batch, tmp_path).read_text())
    assert (found["task"], found["input"]["format"]) == ("rerank", "openai")
    assert "documents_column" not in found["input"]


def test_scores_are_those_of_texts_and_the_spec_names_the_others(tmp_path: pathlib.Path) -> None:
    lines = said("score", QUESTIONS, tmp_path / "job.yaml")
    assert "each text is scored alone; the spec says how to score choices or a continuation after each" in lines
    text = (tmp_path / "job.yaml").read_text()
    assert yaml.safe_load(text)["input"]["text_column"] == "question"
    assert "write context_column in its place, and choices_column (with\n  # answer_column)" in text


def test_columns_are_found_by_name_and_content(tmp_path: pathlib.Path) -> None:
    rows = [
        {"uid": f"r{n}", "Kind": "x", "verdict": "ab"[n % 2], "sentiment": ["no", "yes"][n % 2], "answer": 1}
        for n in range(1, 9)
    ]
    rows = [{**row, "said": "word " * place} for place, row in enumerate(rows, 1)]
    found = look_at(str(rows_file(tmp_path, rows)))
    assert (found.text, found.id, found.num_rows) == ("said", "uid", 8)
    assert (found.labelled, found.label_counts) == ("sentiment", {"no": 4, "yes": 4})
    other = look_at(str(rows_file(tmp_path, [{**row, "sentiment": "one"} for row in rows])))
    assert (other.label_counts, other.labelled) == ({"a": 4, "b": 4}, "verdict")
    counts = '  # sentiment of the first rows: {"no": 4, "yes": 4}\n'
    assert counts in written("label", rows_file(tmp_path, rows), tmp_path).read_text()
    assert counts not in written("label", rows_file(tmp_path, rows), tmp_path, labels=("no", "yes")).read_text()
    for purpose in OF_TEXTS:
        spec = yaml.safe_load(written(purpose, tmp_path / "rows.jsonl", tmp_path).read_text())
        assert spec["output"]["keep_columns"] == {
            "said": "said", "Kind": "Kind", "verdict": "verdict", "sentiment": "sentiment", "answer": "input_answer"
        }  # fmt: skip
        assert batchinf.validate(tmp_path / "job.yaml", overrides=NO_VLLM, num_rows=1).rows[0].error is None
    why = "  # input_…: the output may have columns of its own with the name answer\n"
    assert why in (tmp_path / "job.yaml").read_text()
    assert yaml.safe_load(written("label", tmp_path / "rows.jsonl", tmp_path).read_text())["sampling"][
        "structured_outputs"
    ] == {"choice": ["no", "yes"]}


def test_the_closing_line_names_what_the_spec_reads(tmp_path: pathlib.Path) -> None:
    data = rows_file(tmp_path, [{"question": "Who?", "messages": [{"role": "user", "content": "Who?"}]}])
    for number, (model, read) in enumerate(
        [
            (jobs.MODEL, "conversations from the column 'messages'"),
            (without_template(tmp_path), "text from the column 'question'"),
        ]
    ):
        path = tmp_path / f"{number}.yaml"
        assert said("generate", data, path, model=model) == [
            f"{path}: rows from {data} (1), {read}", f"next: batchinf validate {path}"
        ]  # fmt: skip


MORE = ("paths", "data URLs", "bytes", "parts", "bare parts")


def picture_files(folder: pathlib.Path) -> pathlib.Path:
    """A folder with a picture of each label in a folder of its own."""
    for label, name in itertools.product(("red", "blue"), ("circle", "square")):
        (folder / "pictures" / label).mkdir(parents=True, exist_ok=True)
        shutil.copy(PICTURES / f"{label}-{name}.png", folder / "pictures" / label / f"a {name}.png")
    return folder / "pictures"


def pictures_of(form: str, folder: pathlib.Path) -> tuple[pathlib.Path, dict[str, Any]]:
    """An input with images, and the fields that say so in the spec."""
    paths = sorted(picture_files(folder).rglob("*.png"))
    contents = [path.read_bytes() for path in paths]
    part = {"type": "image", "column": "photo"}
    if form == "a folder":
        return folder / "pictures", {"id_column": "path", "messages": {"type": "image", "column": "path"}}
    if form in ("bytes", "feature"):
        of_hub = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
        values = contents if form == "bytes" else [{"bytes": data, "path": "gone.png"} for data in contents]
        photos = pa.array(values, pa.binary() if form == "bytes" else of_hub)
        pq.write_table(pa.table({"photo": photos, "n": range(4)}), folder / "rows.parquet")
        return folder / "rows.parquet", {"messages": part}
    relative = [str(path.relative_to(folder)) for path in paths]
    photos = {
        "paths": relative,
        "lists": [relative, relative[:1], [], [*relative, relative[0]]],
        "data URLs": [f"data:image/png;base64,{base64.b64encode(data).decode()}" for data in contents],
        "URLs": [f"https://images.example.com/{number}.JPG?size=1" for number in range(4)],
        "bare parts": relative,
    }  # fmt: skip
    if form in photos and form != "bare parts":
        rows = [{"photo": photo, "n": number} for number, photo in enumerate(photos[form])]
        more = {"URLs": {"hosts": ["images.example.com"]}, "lists": {"max_per_row": 5}}.get(form)
        return rows_file(folder, rows), {"messages": part, "images": more}
    source = {} if form == "bare parts" else {"image": relative[0]}
    turn = {"role": "user", "content": [{"type": "image", **source}, {"type": "text", "text": "What?"}]}
    column = {"photo": relative[0]} if form == "bare parts" else {}
    found = {"messages_column": "messages", "images_column": ["photo"]} if column else {"messages_column": "messages",
                                                                                         "images": {}}  # fmt: skip
    if form == "batch":
        of_openai = [
            {"type": "image_url", "image_url": {"url": f"https://images.example.com/{n}.png"}} for n in range(5)
        ]
        schema = {"type": ["object", "null"]}  # `type` is no text here
        body = {"messages": [{"role": "user", "content": of_openai}],
                "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}}  # fmt: skip
        line = {"method": "POST", "url": "/v1/chat/completions", "body": body}
        found = {"images": {"hosts": ["images.example.com"], "max_per_row": 5}}
        return rows_file(folder, [{"custom_id": name, **line} for name in ("a.png", "b.png")]), found
    return rows_file(folder, [{"messages": [turn], **column}] * 3), found


@pytest.mark.usefixtures("quick_vllm_replicas")  # as in tests/planning/test_images.py
@pytest.mark.parametrize(
    "form",
    [
        *("a folder", "lists", "feature", "URLs", "batch"),
        *(pytest.param(form, marks=pytest.mark.slow) for form in MORE),
    ],
)
def test_images_are_found(form: str, tmp_path: pathlib.Path) -> None:
    data, expected = pictures_of(form, tmp_path)
    path = written("generate", data, tmp_path, model=VISION)
    where = yaml.safe_load(path.read_text())["input"]
    for field, value in expected.items():
        stored = where.get(field)
        assert (stored[0]["content"][0] if field == "messages" else stored) == value, path.read_text()
    report = batchinf.validate(path, num_rows=1)
    assert report.rows[0].error is None
    assert "<image>" in report.rows[0].text


def test_names_of_pictures_are_no_texts(tmp_path: pathlib.Path) -> None:
    """Also if the pictures are elsewhere: `validate` says so."""
    names = sorted(path.name for path in picture_files(tmp_path).rglob("red/*.png"))
    data = rows_file(tmp_path, [{"file": name, "colour": "red"} for name in names])
    path = written("generate", data, tmp_path, model=VISION)
    assert yaml.safe_load(path.read_text())["input"]["messages"][0]["content"][0] == {"type": "image", "column": "file"}
    with pytest.raises(UserError, match=f"Row 0: image_not_found: image 1: '{names[0]}' does not exist"):
        batchinf.validate(path)
    described = look_at(str(rows_file(tmp_path, [{"file": name, "caption": "A red picture."} for name in names])))
    assert (described.text, described.images.names, described.kept) == (None, ("file",), ("file", "caption"))


def test_pictures_in_buckets_and_pairs_of_pictures(tmp_path: pathlib.Path) -> None:
    rows = [{"before": f"s3://bucket/old/{n}.png", "after": f"s3://bucket/new/{n}.png"} for n in range(3)]
    path = written("label", rows_file(tmp_path, rows), tmp_path, model=VISION)
    [message] = yaml.safe_load(path.read_text())["input"]["messages"]
    assert [part.get("column") or part["text"].partition(" Answer")[0] for part in message["content"]] == [
        "before:", "before", "after:", "after", "Which label fits the pictures?"]  # fmt: skip
    folders = yaml.safe_load(path.read_text())["input"]["images"]["folders"]
    assert folders == ["s3://bucket/old", "s3://bucket/new"]
    [message] = yaml.safe_load(written("embed", PICTURES, tmp_path, model=VISION).read_text())["input"]["messages"]
    assert message["content"] == [{"type": "image", "column": "path"}]


def test_folders_of_pictures_are_kept_if_there_are_any(tmp_path: pathlib.Path) -> None:
    path = written("generate", picture_files(tmp_path), tmp_path, model=VISION)
    assert yaml.safe_load(path.read_text())["output"]["keep_columns"] == ["folder"]
    path = written("generate", PICTURES, tmp_path, model=VISION)
    assert "keep_columns" not in yaml.safe_load(path.read_text())["output"]


@pytest.mark.parametrize("out", ["s3://bucket/job", "hf://buckets/user/bucket/job"])
def test_an_output_in_a_bucket(out: str, tmp_path: pathlib.Path) -> None:
    done = jobs.run("init", tmp_path / "job.yaml", "--for", "generate", "--data", QUESTIONS, "--model", jobs.MODEL,
                    "--out", out)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert read_spec(tmp_path / "job.yaml").spec.output.path == out


@pytest.mark.parametrize(
    ("out", "words"),
    [("s3://bucket", "must be a folder in a bucket, such as s3://bucket/my-job"),
     ("https://host/job", "give a folder here, such as out/my-job, or a bucket")],
)  # fmt: skip
def test_places_that_no_output_can_have(out: str, words: str, tmp_path: pathlib.Path) -> None:
    with pytest.raises(UserError, match=r"^--out: got ") as raised:
        said("generate", QUESTIONS, tmp_path / "job.yaml", out=out)
    assert words in str(raised.value)
    assert not (tmp_path / "job.yaml").exists()


def test_a_folder_of_pictures_with_labels_runs(tmp_path: pathlib.Path) -> None:
    pictures = picture_files(tmp_path)
    for purpose in ("label", "score", "embed"):
        written(purpose, pictures, tmp_path, model=VISION)
        batchinf.validate(tmp_path / "job.yaml", overrides=NO_VLLM if purpose == "label" else {})
    done = jobs.run("init", tmp_path / "job.yml", "--for", "score", "--data", pictures, "--model", VISION,
                    "--out", tmp_path / "out")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "images from the column 'path'" in done.stdout
    assert ", the words of the column 'folder'; change them" in done.stdout
    with (tmp_path / "job.yml").open("a") as spec:
        spec.write("scripted: {}\nparallel: {data_parallel_size: 1}\n")
    jobs.finish(tmp_path / "job.yml")
    rows = jobs.rows_of(tmp_path / "out")
    assert [row["id"] for row in rows] == ["blue/a circle.png", "blue/a square.png", "red/a circle.png",
                                           "red/a square.png"]  # fmt: skip
    assert {row["best"] for row in rows} <= {0, 1}
    assert [row["answer"] for row in rows] == [0, 0, 1, 1]
    with pytest.raises(UserError, match="has images and no text; write --for label, generate, score or embed"):
        written("rerank", pictures, tmp_path, model=VISION)
    with pytest.raises(UserError, match="takes no images"):
        batchinf.validate(written("label", pictures, tmp_path, model=without_template(tmp_path)))


@pytest.mark.parametrize(
    "name", ["a: b", "{{ x }}", 'say "hi" #1', "naïve\u202e", "yes", "\x1b[31m", "\U0001f600\u00a0mood", "two\nlines"]
)
def test_hostile_names_of_columns_are_quoted(name: str, tmp_path: pathlib.Path) -> None:
    data = rows_file(tmp_path, [{name: "Once upon a time", "id": n} for n in range(4)])
    for purpose in OF_TEXTS:
        path = written(purpose, data, tmp_path)
        assert all(line.isprintable() for line in path.read_text().splitlines())
        report = batchinf.validate(path, overrides=NO_VLLM, num_rows=1)
        assert report.rows[0].error is None
        assert name in report.input.columns


def test_a_question_names_a_column_of_several_words(tmp_path: pathlib.Path) -> None:
    rows = [{"Review Text": f"It boils fast, {n}", "posted on": f"2025-01-0{n}"} for n in range(1, 5)]
    path = written("label", rows_file(tmp_path, rows), tmp_path)
    assert "id_column" not in yaml.safe_load(path.read_text())["input"]  # a date is unique by chance
    text = batchinf.validate(path, overrides=NO_VLLM, num_rows=1).rows[0].text
    assert "Answer with one of: positive, negative, neutral.\n\nText: It boils fast, 1" in text


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.csv", "id;review\n1;nice; but loud\n", r"'id;review', so ';' seems to separate its columns"),
        ("a.csv", "id\treview\n1\n", r"so '\\t' seems to separate its columns"),
        ("a.jsonl", '{"review": 1\n', "no row can be read; the first: a.jsonl line 1: not JSON"),
    ],
)
def test_files_that_need_another_form(name: str, content: str, words: str, tmp_path: pathlib.Path) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=words):
        look_at(str(tmp_path / name))


@pytest.mark.parametrize("content", ["id;review\n1;nice, but loud\n", "id\treview\n1\tnice\n"])
def test_a_csv_file_may_have_other_separators(content: str, tmp_path: pathlib.Path) -> None:
    (tmp_path / "a.csv").write_text(content)
    found = look_at(str(tmp_path / "a.csv"))
    assert (found.id, found.text) == ("id", "review")


def test_conversations_are_used_as_they_are(tmp_path: pathlib.Path) -> None:
    turns = [{"role": "user", "content": "Once?"}]
    path = written("generate", rows_file(tmp_path, [{"messages": turns, "id": 1}]), tmp_path)
    assert yaml.safe_load(path.read_text())["input"]["messages_column"] == "messages"
    assert "Once?" in batchinf.validate(path).rows[0].text
    parts = [{"role": "user", "content": [{"type": "text", "text": "Twice?"}]}]
    mixed = [{"messages": turns, "id": 1}, {"messages": parts, "id": 2}]
    assert look_at(str(rows_file(tmp_path, mixed))).messages == "messages"


def test_conversations_are_known_by_their_messages(tmp_path: pathlib.Path) -> None:
    asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Once?"}]
    answer = [*asked, {"role": "assistant", "content": "Upon a time."}]
    rows = [{"chosen": answer, "chat": asked, "text": f"Text {n}."} for n in range(3)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    path = written("generate", tmp_path / "rows.parquet", tmp_path)
    assert yaml.safe_load(path.read_text())["input"]["messages_column"] == "chat"
    assert "Once?" in batchinf.validate(path).rows[0].text
    plain = written("generate", tmp_path / "rows.parquet", tmp_path, model=without_template(tmp_path)).read_text()
    assert "  prompt_column: text\n" in plain
    assert look_at(str(rows_file(tmp_path, [{"chosen": answer, "text": "Once."}]))).messages is None


def test_conversations_may_be_json_text(tmp_path: pathlib.Path) -> None:
    parts = [{"type": "image", "image": "a.png"}, {"type": "text", "text": "Twice?"}]
    for content in ("Once?", parts):
        rows = [{"chat": json.dumps([{"role": "user", "content": content}]), "photos": [f"{n}.png"]} for n in range(3)]
        found = look_at(str(rows_file(tmp_path, rows)))
        assert (found.messages, found.text, found.kept) == ("chat", "chat", ())
        assert found.id is None  # a list is no id


def test_labels_of_conversations_with_images_are_refused(tmp_path: pathlib.Path) -> None:
    parts = [{"type": "image", "image": "a.png"}, {"type": "text", "text": "Twice?"}]
    data = rows_file(tmp_path, [{"messages": [{"role": "user", "content": parts}]}] * 3)
    with pytest.raises(UserError, match="'messages' have images, and a text of them has none: write --for gen"):
        written("label", data, tmp_path)
    assert "messages_column: messages" in written("generate", data, tmp_path).read_text()


def test_columns_of_several_types_are_no_text(tmp_path: pathlib.Path) -> None:
    kinds = [{"source": {"url": "x" * 99}}, ["x" * 99], {}, 5]
    rows = [{"said": f"Say {n}.", "about": kind, "mark": {}} for n, kind in enumerate(kinds)]
    found = look_at(str(rows_file(tmp_path, rows * 3)))
    assert (found.text, found.labelled, found.messages) == ("said", None, None)
    report = batchinf.validate(written("generate", tmp_path / "rows.jsonl", tmp_path), overrides=NO_VLLM)
    assert [row.error for row in report.rows] == [None, None]


def test_the_command_writes_once_and_says_what_is_next(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "mine.yaml"
    given = ["init", path, "--for", "label", "--model", jobs.MODEL, "--data", jobs.PROMPTS, "--labels", "prose, verse"]
    first = jobs.run(*given)
    assert (first.returncode, first.stderr) == (0, "")
    assert first.stdout.splitlines()[-1] == f"next: batchinf validate {path}"
    spec = yaml.safe_load(path.read_text())
    assert spec["sampling"]["structured_outputs"] == {"choice": ["prose", "verse"]}
    assert (spec["sampling"]["logprobs"], spec["sampling"]["logprobs_mode"]) == (0, "processed_logprobs")
    assert spec["output"]["path"] == "out/mine"
    again = jobs.run(*given)
    assert again.returncode == 2
    assert again.stderr == f"error: {path} is there already; give another name, or delete it yourself\n"
    refused = jobs.run("init", tmp_path / "new.yaml", "--for", "lables", "--model", "m", "--data", jobs.PROMPTS)
    assert (
        refused.stderr == "error: --for: got 'lables'; must be one of label, generate, score, logits, embed, rerank\n"
    )
    refused = jobs.run("init", tmp_path / "new.yaml", "--for", "label", "--model", "a,b", "--data", jobs.PROMPTS)
    assert refused.returncode == 2
    assert refused.stderr == "error: --model: 'a,b' is neither a folder here nor a Hugging Face id (org/name)\n"
    refused = jobs.run("init", tmp_path / "new.yaml", *given[2:-1], "yes, no,yes")
    assert (refused.returncode, (tmp_path / "new.yaml").exists()) == (2, False)
    assert refused.stderr == "error: --labels: got 'yes' more than once; give each label once\n"
    refused = jobs.run("init", tmp_path / "new.yaml", "--for", "embed", *given[4:])
    assert (refused.returncode, (tmp_path / "new.yaml").exists()) == (2, False)
    assert refused.stderr == "error: --labels: got --for embed, which has no labels; write --for label or --for score\n"


@pytest.mark.parametrize(
    ("arguments", "missing"),
    [
        (["init"], "--for label|generate|score|embed|logits|rerank, --model MODEL, --data PATH"),
        (["init", "new.yaml", "--data=rows.csv", "--for", "label"], "--model MODEL"),
        (["export", "--to", "csv"], "OUT, --output FILE"),
        (["run-batch", "--max-model-len", "4096"], "--input-file FILE, --output-file FILE, --model MODEL"),
    ],
)
def test_all_that_is_missing_is_named_with_what_it_takes(arguments: list[str], missing: str) -> None:
    done = jobs.run(*arguments)
    assert done.returncode == 2
    words = " ".join(line.strip("│ ") for line in done.stderr.splitlines() if line.startswith("│"))
    assert words.startswith(f"Missing: {missing}. Example: batchinf {arguments[0]} "), words
    assert set("label|generate|score|embed|logits|rerank".split("|")) == PURPOSES.keys()


@pytest.mark.parametrize("is_chat", [True, False])
def test_given_labels_are_the_choices_of_scores(is_chat: bool, tmp_path: pathlib.Path) -> None:
    model = jobs.MODEL if is_chat else without_template(tmp_path)
    path = written("score", QUESTIONS, tmp_path, model=model, labels=("easy", "no"))
    assert yaml.safe_load(path.read_text())["input"]["choices"] == ["easy", "no"]
    report = batchinf.validate(path, overrides=NO_VLLM, num_rows=1)
    assert [remark.text for remark in report.remarks if remark.kind == "warning"] == []
    assert report.rows[0].error is None


def test_a_csv_file_of_a_spreadsheet_in_cp1252(tmp_path: pathlib.Path) -> None:
    rows = tmp_path / "rows.csv"
    rows.write_bytes("id,größe\n1,Für 5 € „gut“.\n2,Schön.\n".encode("cp1252"))
    with pytest.raises(InputError, match=r"its header is not UTF-8: .*; for a new spec, `init` takes --encoding$"):
        look_at(str(rows))
    path = written("generate", rows, tmp_path, encoding="1252")
    report = batchinf.validate(path, overrides=NO_VLLM, num_rows=1)
    assert "Für 5 € „gut“." in str(report.rows[0].text)
    assert '  csv: {encoding: "1252"}    # as --encoding says\n' in path.read_text()
    rows.write_bytes(b"id,text\n1,F\xfcr.\n2,Sch\xf6n.\n")
    with pytest.raises(UserError, match=r"no row can be read; the first: .* line 2: not UTF-8: byte 0xfc.*cp1252"):
        look_at(str(rows))


def test_an_encoding_that_the_user_gives(tmp_path: pathlib.Path) -> None:
    rows = tmp_path / "rows.csv"
    rows.write_bytes("id,größe\n1,Šťastný.\n".encode("cp1250"))
    assert look_at(str(rows), encoding="cp1250").names == ("id", "größe")
    with pytest.raises(UserError, match=r"^--encoding: got 'no-such'; must be an encoding of text"):
        look_at(str(rows), encoding="no-such")


def test_a_batch_file_is_known_by_its_columns(tmp_path: pathlib.Path) -> None:
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "p"}, "note": "a text"}
    assert look_at(str(rows_file(tmp_path, [line]))).is_batch
    del line["body"]
    assert not look_at(str(rows_file(tmp_path, [line]))).is_batch


@pytest.mark.parametrize(
    "name", ["image_formats", "choice_texts", "tool_calls", "answer_error", "Text", "ID", "Logprobs"]
)
def test_kept_columns_have_no_name_of_the_output(name: str, tmp_path: pathlib.Path) -> None:
    """Names that `validate` refuses, or that differ from those of the output by case only."""
    rows = [{name: "ab"[n % 2], "question": f"Say {n}."} for n in range(4)]
    data = rows_file(tmp_path, rows)
    for purpose in ("generate", "label", "score"):
        path = written(purpose, data, tmp_path)
        kept = yaml.safe_load(path.read_text())["output"]["keep_columns"]
        assert kept == {"question": "question", name: f"input_{name}"}
        assert batchinf.validate(path, overrides=NO_VLLM, num_rows=1).rows[0].error is None


def test_names_of_the_output_are_known() -> None:
    """The columns of each task that `init` writes a spec for."""
    for name in ("generate", "score", "logits", "embed", "rerank"):
        own = {"query_column": "q", "document_column": "d"} if name == "rerank" else {"prompt_column": "p"}
        own = {"context_column": "c", "choices": ["a", "b"]} if name == "score" else own
        more = {"logits": {"logits": {"vocab_size": 9}}, "embed": {"pooling": {"width": 4}}}.get(name, {})
        spec = JobSpec.model_validate(
            {"model": "m", "task": name, "input": {"path": "in", **own}, "output": {"path": "out"}, **more}
        )
        columns = task_of(spec).computed_schema.names
        assert len(columns) > 5
        assert [column for column in columns if not _TAKEN.fullmatch(column)] == []


def test_kept_columns_that_differ_by_case_only(tmp_path: pathlib.Path) -> None:
    rows = [{"Kind": "a", "kind": "b", "question": f"Say {n}."} for n in range(4)]
    path = written("generate", rows_file(tmp_path, rows), tmp_path)
    kept = yaml.safe_load(path.read_text())["output"]["keep_columns"]
    assert kept == {"question": "question", "Kind": "Kind", "kind": "input_kind"}


@pytest.mark.parametrize("ending", ["PNG", "JPEG"])
def test_base64_of_pictures_without_data_is_known(ending: str, tmp_path: pathlib.Path) -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (60, 40), (200, 10, 10)).save(buffer, ending)
    coded = base64.b64encode(buffer.getvalue()).decode()
    found = look_at(str(rows_file(tmp_path, [{"photo": coded, "question": f"What is it, {n}?"} for n in range(3)])))
    assert (found.images.names, found.text) == (("photo",), "question")
    with pytest.raises(UserError, match="looks like the base64 of a picture, and no path; write `data:image/png"):
        batchinf.validate(written("generate", tmp_path / "rows.jsonl", tmp_path, model=VISION))
    words = rows_file(tmp_path, [{"said": f"/9j/ is a path {n} " * 9} for n in range(3)])
    assert look_at(str(words)).images.names == ()


def test_pictures_beside_captions_are_chosen(tmp_path: pathlib.Path) -> None:
    pictures = picture_files(tmp_path)
    (pictures / "red" / "a circle.txt").write_text("A red circle.\n")
    (pictures / "notes.TXT").write_text("of mine\n")
    path = written("label", pictures, tmp_path, model=VISION)
    spec = yaml.safe_load(path.read_text())
    assert spec["input"]["format"] == "images"
    assert spec["sampling"]["structured_outputs"] == {"choice": ["blue", "red"]}
    assert batchinf.validate(path, overrides=NO_VLLM, num_rows=1).input.num_rows == 4
    pictures_alone = "format: images    # the pictures, and not the text files beside them; for their lines: text"
    assert look_at(str(pictures)).settings == (pictures_alone,)
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "a.txt").write_text("one\n")
    assert look_at(str(texts)).settings == ()
