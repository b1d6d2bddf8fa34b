"""`batchinf export` on whole jobs: every format gives back the rows that `batchinf.open` reads."""

import base64
import csv
import io
import json
import os
import pathlib
from collections.abc import Callable
from typing import Any

import openai.types
import pyarrow.parquet as pq
import pytest
import tokenizers
import yaml
from datasets import load_dataset
from openai.types.chat import ChatCompletion
from transformers import PreTrainedTokenizerFast

import batchinf
import jobs
from batchinf.base.errors import OutputError, UserError
from batchinf.commands.export import Exported, ExportRequest, export_job
from batchinf.export import rows as export_rows
from batchinf.export.files import STDOUT
from batchinf.export.openai_batch import _num_reasoning_tokens, _refuse_removed
from batchinf.export.tokens import StoredToken, TokenTexts
from batchinf.prompts.encoder import load_tokenizer
from batchinf.schedule.predicate import PredicateError

NUM_ROWS = 60
LINES = [
    *[{"custom_id": f"chat-{number}", "method": "POST", "url": "/v1/chat/completions",
       "body": {"messages": [{"role": "user", "content": f"Say {number}."}], "max_tokens": 8, "temperature": 0,
                **({"logprobs": True, "top_logprobs": number} if number else {})}} for number in range(3)],
    {"custom_id": "same", "method": "POST", "url": "/v1/completions",
     "body": {"prompt": "Once upon", "max_tokens": 5, "logprobs": 1}},
    {"custom_id": "same", "method": "POST", "url": "/v1/completions", "body": {"prompt": "A time", "max_tokens": 5}},
    {"custom_id": "wrong", "method": "POST", "url": "/v1/images", "body": {}},
]  # fmt: skip


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A job with three samples of each row, whose parts have rows from all over the input."""
    folder = tmp_path_factory.mktemp("sampled")
    rows = [
        {"id": f"r{n}", "prompt": f"a {n}", "budget": 1 + n * 7 % 11, "tags": ["x", str(n)]} for n in range(NUM_ROWS)
    ]
    (folder / "in.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    spec = jobs.spec_of(
        folder,
        input={"path": str(folder / "in.jsonl"), "order": "longest"},
        sampling={"temperature": 1.0, "n": 3, "max_tokens": {"column": "budget"}, "logprobs": 2},
        output={"keep_columns": ["tags"], "rows_per_shard": 7},
        scripted={"step_s": 0.0},
    )
    jobs.finish(spec)
    return folder / "out"


@pytest.fixture(scope="module")
def batch(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A job over lines of an OpenAI batch file."""
    folder = tmp_path_factory.mktemp("batch")
    (folder / "in.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in LINES))
    spec = jobs.spec_of(
        folder,
        input={"path": str(folder / "in.jsonl"), "id_column": None},
        sampling={"temperature": None, "max_tokens": None, "logprobs": 2},
        output={"keep_columns": []},
        scripted={"step_s": 0.0},
        max_error_rate=1.0,
    )
    jobs.finish(spec)
    return folder / "out"


def exported(out: pathlib.Path, path: pathlib.Path | str, **options: Any) -> Exported:
    return export_job(str(out), ExportRequest(path=str(path), **options))


def lines_of(path: pathlib.Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def stored(out: pathlib.Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = batchinf.open(out).table().to_pylist()
    return rows


def check_joined(texts: list[str], row: dict[str, Any]) -> None:
    """The tokens joined are the text, which has no special tokens, and no character without its end."""
    special = {token_id for token_id, token in byte_level().added_tokens_decoder.items() if token.special}
    shown = [text for text, token_id in zip(texts, row["token_ids"], strict=True) if token_id not in special]
    assert "".join(shown).rstrip("\ufffd") == row["text"].rstrip("\ufffd")


@pytest.fixture(params=["one bucket", "many buckets"])
def buckets(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows whose parts are not in order are sorted in one piece, or in many."""
    if request.param == "many buckets":
        monkeypatch.setattr(export_rows, "_BUCKET_BYTES", 256)
        monkeypatch.setattr(export_rows, "_BATCH_BYTES", 1024)


@pytest.mark.usefixtures("buckets")
def test_parquet_has_the_rows_in_order(sampled: pathlib.Path, tmp_path: pathlib.Path) -> None:
    assert not batchinf.open(sampled).is_in_order
    done = exported(sampled, tmp_path / "rows.parquet")
    assert (done.num_rows, done.files) == (3 * NUM_ROWS, (str(tmp_path / "rows.parquet"),))
    table = pq.read_table(tmp_path / "rows.parquet")
    assert table.schema.equals(batchinf.open(sampled).schema)
    assert table.to_pylist() == stored(sampled)
    assert [*tmp_path.iterdir()] == [tmp_path / "rows.parquet"]


def test_json_lines_have_each_token_in_one_place(sampled: pathlib.Path, tmp_path: pathlib.Path) -> None:
    exported(sampled, tmp_path / "rows.jsonl")
    for line, row in zip(lines_of(tmp_path / "rows.jsonl"), stored(sampled), strict=True):
        tokens = line.pop("logprobs")
        parts = ("logprobs", "ranks", "top_token_ids", "top_logprobs")
        logprobs, ranks, top_ids, top_logprobs = (row.pop(name) for name in parts)
        assert line == row
        check_joined([token["token"] for token in tokens], row)
        assert [token["token_id"] for token in tokens] == row["token_ids"]
        assert [token["logprob"] for token in tokens] == logprobs
        assert [token["rank"] for token in tokens] == ranks
        for token, ids, values in zip(tokens, top_ids, top_logprobs, strict=True):
            assert [*token["top"].values()] == values
            # Some tokens have the same text, or none. The less likely one has its id, too.
            named = [(name, id) for name, id in zip(token["top"], ids, strict=True) if name.endswith(f" ({id})")]
            assert all(name.removesuffix(f" ({id})") in ("", *token["top"]) for name, id in named)


def test_csv_has_lists_as_json_text(sampled: pathlib.Path, tmp_path: pathlib.Path) -> None:
    exported(sampled, tmp_path / "rows.csv", columns=("id", "tags", "sample_index", "error_type", "text"))
    read = list(csv.DictReader(io.StringIO((tmp_path / "rows.csv").read_text(encoding="utf-8"), newline="")))
    assert [(row["id"], int(row["sample_index"]), json.loads(row["tags"]), row["text"]) for row in read] == [
        (row["id"], row["sample_index"], row["tags"], row["text"]) for row in stored(sampled)
    ]
    assert {row["error_type"] for row in read} == {""}


def test_a_dataset_is_read_by_datasets(sampled: pathlib.Path, tmp_path: pathlib.Path) -> None:
    exported(sampled, tmp_path / "data set", to="hf", num_files=4)
    files = sorted((tmp_path / "data set" / "data").iterdir())
    assert [file.name for file in files] == [f"train-{n:05}-of-00004.parquet" for n in range(4)]
    # As many rows each, and the samples of a row in one file.
    assert [pq.read_metadata(file).num_rows for file in files] == [45] * 4
    dataset = load_dataset(str(tmp_path / "data set"), split="train", cache_dir=str(tmp_path / "cache"))
    assert dataset["id"][:] == [row["id"] for row in stored(sampled)]
    assert dataset["logprobs"][:] == [row["logprobs"] for row in stored(sampled)]
    # Another export in a folder of the same name, or in the same one.
    for folder, where, num_rows in (("a", "true", 180), ("b", "row_index = 0", 3), ("b", "row_index < 2", 6)):
        path = tmp_path / folder / "data set"
        exported(sampled, path, to="hf", where=where, split="new.1", overwrites=True)
        [(split, rows)] = load_dataset(str(path), cache_dir=str(tmp_path / "cache")).items()
        assert (split, len(rows)) == ("new.1", num_rows)
    with pytest.raises(UserError, match=r"train-00000-of-00004.parquet is there already, and `datasets` reads"):
        exported(sampled, tmp_path / "data set", to="hf", overwrites=True)


def test_files_have_as_many_of_the_chosen_rows(sampled: pathlib.Path, tmp_path: pathlib.Path) -> None:
    exported(sampled, tmp_path / "rows.jsonl", where="row_index < 12 and sample_index = 0", num_files=3)
    files = [lines_of(tmp_path / f"rows-{n:05}-of-00003.jsonl") for n in range(3)]
    assert [[row["row_index"] for row in rows] for rows in files] == [[*range(n, n + 4)] for n in (0, 4, 8)]


def test_the_card_of_a_dataset_says_what_it_has(sampled: pathlib.Path, tmp_path: pathlib.Path) -> None:
    exported(sampled, tmp_path / "data", to="hf", where="sample_index = 0")
    assert pq.read_table(tmp_path / "data" / "data").num_rows == NUM_ROWS
    card = (tmp_path / "data" / "README.md").read_text(encoding="utf-8")
    assert yaml.safe_load(card.split("---")[1]) == {"tags": ["batchinf"]}
    facts = (f"| model | `{jobs.MODEL}` |", "| rows | 60, those with `sample_index = 0` |", "n: 3")
    for fact in (*facts, batchinf.open(sampled).job_id):
        assert fact in card


def test_rows_are_chosen_by_sql(sampled: pathlib.Path, tmp_path: pathlib.Path) -> None:
    where = "sample_index = 1 AND row_index % 2 = 0"
    exported(sampled, tmp_path / "rows.jsonl", where=where, columns=("id",))
    expected = [{"id": f"r{number}"} for number in range(0, NUM_ROWS, 2)]
    assert lines_of(tmp_path / "rows.jsonl") == expected
    exported(sampled, tmp_path / "twice.parquet", columns=("id", "row_index", "id"))
    assert pq.read_schema(tmp_path / "twice.parquet").names == ["id", "row_index"]
    exported(sampled, tmp_path / "none.jsonl", where="false")
    assert (tmp_path / "none.jsonl").read_bytes() == b""


@pytest.mark.parametrize(
    ("rows", "number"),
    [
        ([{"reasoning": "a b", "num_reasoning_tokens": 2}, {"reasoning": None, "num_reasoning_tokens": 0}], 2),
        ([{"reasoning": "a b", "num_reasoning_tokens": None}, {"reasoning": "a", "num_reasoning_tokens": 1}], None),
        ([{"reasoning": "a b"}], None),  # of a job that began without the column
        ([{"text": "a"}, {"reasoning": None}], 0),
    ],
)
def test_tokens_of_the_reasoning_are_counted_or_left_out(rows: list[dict[str, Any]], number: int | None) -> None:
    assert _num_reasoning_tokens(rows) == number


@pytest.mark.parametrize(
    ("form", "name"),
    [
        ({"url": "/v1/responses"}, "/v1/responses"),
        ({"url": "/v1/chat/completions", "functions": True}, "functions"),
        ({"url": "/v1/completions", "echo": True}, "echo"),
        ({"url": "/v1/completions", "return_tokens_as_token_ids": True}, "return_tokens_as_token_ids"),
    ],
)
def test_answers_in_a_form_that_is_gone_are_refused(form: dict[str, Any], name: str) -> None:
    with pytest.raises(UserError, match=f"the request of row 3 has {name}, whose answers .* export the job as jsonl"):
        _refuse_removed({"row_index": 3}, form)
    _refuse_removed({"row_index": 3}, {"url": "/v1/completions", "return_tokens_as_token_ids": False})


def test_lines_of_a_batch_file(batch: pathlib.Path, tmp_path: pathlib.Path) -> None:
    done = exported(batch, tmp_path / "answers.jsonl", to="openai-batch")
    assert done.files == (str(tmp_path / "answers.errors.jsonl"), str(tmp_path / "answers.jsonl"))
    rows = stored(batch)
    answers = lines_of(tmp_path / "answers.jsonl")
    assert [line["custom_id"] for line in answers] == ["chat-0", "chat-1", "chat-2", "same", "same"]
    assert all(line["error"] is None and line["response"]["status_code"] == 200 for line in answers)
    assert len({line["id"] for line in answers}) == len(answers)
    for number, (line, row) in enumerate(zip(answers[:3], rows, strict=False)):
        body = ChatCompletion.model_validate(line["response"]["body"], strict=True)
        [choice] = body.choices
        assert (choice.message.content, choice.finish_reason) == (row["text"], row["finish_reason"])
        assert (body.model, body.created) == (str(jobs.MODEL), int(batchinf.open(batch).begun_at.timestamp()))
        assert body.usage is not None
        assert body.usage.prompt_tokens == row["num_prompt_tokens"]
        assert body.usage.completion_tokens == row["num_output_tokens"]
        if number == 0:
            assert choice.logprobs is None  # the line asks for none
            continue
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        assert [token.logprob for token in choice.logprobs.content] == row["logprobs"]
        tops = [[top.logprob for top in token.top_logprobs] for token in choice.logprobs.content]
        assert tops == [values[:number] for values in row["top_logprobs"]]
        for token in choice.logprobs.content:
            assert bytes(token.bytes or ()).decode() == token.token
        assert "".join(token.token for token in choice.logprobs.content).rstrip("\ufffd") == (row["text"]).rstrip(
            "\ufffd"
        )
    bodies = [openai.types.Completion.model_validate(line["response"]["body"], strict=True) for line in answers[3:]]
    assert [body.choices[0].text for body in bodies] == [row["text"] for row in rows[3:5]]
    first, second = (body.choices[0].logprobs for body in bodies)
    assert first is not None
    assert first.token_logprobs == rows[3]["logprobs"]
    assert second is None
    [wrong] = lines_of(tmp_path / "answers.errors.jsonl")
    assert (wrong["custom_id"], wrong["response"]) == ("wrong", None)
    assert wrong["error"] == {"code": rows[5]["error_type"], "message": rows[5]["error_message"]}
    # The same job gives the same bytes.
    exported(batch, tmp_path / "again.jsonl", to="openai-batch")
    assert (tmp_path / "again.jsonl").read_bytes() == (tmp_path / "answers.jsonl").read_bytes()


def test_samples_are_choices_of_one_line(sampled: pathlib.Path, tmp_path: pathlib.Path) -> None:
    exported(sampled, tmp_path / "answers.jsonl", to="openai-batch")
    lines = lines_of(tmp_path / "answers.jsonl")
    assert [line["custom_id"] for line in lines] == [f"r{number}" for number in range(NUM_ROWS)]
    texts = [[choice["text"] for choice in line["response"]["body"]["choices"]] for line in lines]
    assert [text for choices in texts for text in choices] == [row["text"] for row in stored(sampled)]
    assert not (tmp_path / "answers.errors.jsonl").exists()


def test_a_line_without_an_id_does_not_have_that_of_another(tmp_path: pathlib.Path) -> None:
    lines = [json.dumps({**LINES[0], "custom_id": name}) for name in ("1", "2")]
    (tmp_path / "in.jsonl").write_text("\n".join([lines[0], '{"custom_id": "3", "meth', lines[1]]))
    where = {"path": str(tmp_path / "in.jsonl"), "id_column": None}
    sections = {"output": {"keep_columns": []}, "scripted": {"step_s": 0.0}, "max_error_rate": 1.0}
    sampling = {"temperature": None, "max_tokens": None, "logprobs": None}
    jobs.finish(jobs.spec_of(tmp_path, input=where, sampling=sampling, **sections))
    exported(tmp_path / "out", tmp_path / "answers.jsonl", to="openai-batch")
    names = [
        [line["custom_id"] for line in lines_of(tmp_path / name)] for name in ("answers.jsonl", "answers.errors.jsonl")
    ]
    assert names == [["1", "2"], ["row_index 1"]]


def test_stdout_and_what_is_said(batch: pathlib.Path) -> None:
    run = jobs.run("export", batch, "-o", "-", "--to", "openai-batch")
    assert run.returncode == 0, run.stderr
    assert [json.loads(line)["custom_id"] for line in run.stdout.splitlines()][-1] == "wrong"
    assert run.stderr == "6 output rows in stdout\n"
    run = jobs.run("export", batch, "-o", "-", "--to", "csv", "--columns", "id")
    assert run.stdout == '"id"\n' + "".join(f'"{line["custom_id"]}"\n' for line in LINES)


def test_what_is_there_stays_unless_told(batch: pathlib.Path, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("mine")
    with pytest.raises(UserError, match=r"rows\.jsonl is there already; give another name, or --overwrite"):
        exported(batch, path)
    assert path.read_text() == "mine"
    link, pipe = tmp_path / "link.jsonl", tmp_path / "pipe.jsonl"
    link.symlink_to(path)
    exported(batch, link, overwrites=True)
    assert len(lines_of(path)) == len(LINES)
    os.mkfifo(pipe)
    with pytest.raises(UserError, match=r"pipe\.jsonl is a folder, a device or a pipe"):
        exported(batch, pipe, overwrites=True)
    assert link.is_symlink()
    assert pipe.is_fifo()
    link.unlink()
    pipe.unlink()
    # An export that fails leaves nothing.
    part = batchinf.open(batch).parts[0]
    kept = part.read_bytes()
    part.write_bytes(kept[:-100])
    with pytest.raises(OutputError, match="cannot be read"):
        exported(batch, tmp_path / "other.parquet", columns=("id",))
    part.write_bytes(kept)
    assert [*tmp_path.iterdir()] == [path]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"to": "xlsx"}, "--to: got xlsx; must be one of jsonl, csv, parquet, hf, openai-batch"),
        ({"path": "rows.txt"}, "--to: missing, and 'rows.txt' does not say it; must be one of jsonl"),
        ({"to": "jsonl", "columns": ("txt",)}, "--columns: no column txt; the output has id, row_index"),
        ({"to": "jsonl", "columns": ("confidence",)}, "--columns: no column confidence; the output has id, row_index"),
        ({"to": "openai-batch", "columns": ("id",)}, "--columns: not with openai-batch, whose lines have one form"),
        ({"to": "hf", "path": STDOUT}, "-o: got stdout, which holds one file; give a path"),
        ({"to": "jsonl", "path": STDOUT, "num_files": 2}, "-o: got stdout, which holds one file"),
        ({"to": "jsonl", "path": "/", "overwrites": True}, "-o: / is a folder, a device or a pipe; give the path of a"),
    ],
)
def test_refused(options: dict[str, Any], message: str, batch: pathlib.Path, tmp_path: pathlib.Path) -> None:
    with pytest.raises(UserError) as raised:
        export_job(str(batch), ExportRequest(**{"path": str(tmp_path / "rows"), **options}))
    assert str(raised.value).startswith(message)
    assert [*tmp_path.iterdir()] == []


def test_a_wrong_expression_names_its_option(batch: pathlib.Path, tmp_path: pathlib.Path) -> None:
    with pytest.raises(PredicateError, match=r"^--where: got 'langage = 1': there is no column 'langage'"):
        exported(batch, tmp_path / "rows.jsonl", where="langage = 1")


TEXTS = ["Once upon a time", "an é 🦊 in the 雪, 貰う", "x" + "🧑‍🚒" * 3, " two  spaces\n", "", "𝔘𝔫𝔦"]


def byte_level() -> Any:
    return load_tokenizer(str(jobs.MODEL), False)


def byte_fallback() -> Any:
    """A tokenizer with words and bytes, which drops the space before a text, as those of SentencePiece."""
    names = ["<unk>", *(f"<0x{number:02X}>" for number in range(256)), *(f"▁{char}" for char in "abcdeOuptimn"), "▁"]
    vocab = {name: -float(place) for place, name in enumerate([*names, *"abcdefghijklmnopqrstuvwxyz"])}
    own = tokenizers.Tokenizer(tokenizers.models.Unigram([*vocab.items()], 0, byte_fallback=True))
    own.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="never")
    parts = (tokenizers.decoders.Replace("▁", " "), tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse())
    own.decoder = tokenizers.decoders.Sequence([*parts, tokenizers.decoders.Strip(" ", 1, 0)])
    return PreTrainedTokenizerFast(tokenizer_object=own)


def spelt(tokenizer: Any, ids: list[int], top: list[tuple[int, float]] | None = None) -> list[tuple[str, list[str]]]:
    return [*TokenTexts(tokenizer).spell(StoredToken(token_id, -1.0, 1, top) for token_id in ids)]


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
@pytest.mark.parametrize("text", TEXTS)
def test_tokens_joined_are_the_text(text: str, make: Callable[[], Any]) -> None:
    tokenizer = make()
    ids = tokenizer(text, add_special_tokens=False).input_ids
    texts = [token for token, _ in spelt(tokenizer, ids)]
    assert "".join(texts) == text
    assert len(texts) == len(ids)
    assert not any("\ufffd" in token for token in texts)


def test_a_character_is_the_text_of_the_token_that_completes_it() -> None:
    """Its other tokens have no text, and nor has an alternative that is another part."""
    tokenizer = byte_level()
    ids = tokenizer("a貰b", add_special_tokens=False).input_ids
    parts = [place for place, token_id in enumerate(ids) if "\ufffd" in tokenizer.decode([token_id])]
    assert len(parts) > 1
    found = spelt(tokenizer, ids, top=[(ids[parts[0]], -1.0), (ids[-1], -2.0)])
    assert [token for token, _ in found] == ["a", *[""] * (len(parts) - 1), "貰", "b"]
    assert found[0][1] == ["", "b"]


def test_bytes_that_are_no_character_stay_in_the_text() -> None:
    tokenizer = byte_level()
    [*_, last, _] = tokenizer("貰b", add_special_tokens=False).input_ids
    [b] = tokenizer("b", add_special_tokens=False).input_ids
    for number in (1, 3, 20):
        ids = [last] * number + [b]
        assert "".join(token for token, _ in spelt(tokenizer, ids)) == tokenizer.decode(ids)
    assert [token for token, _ in spelt(tokenizer, [b, last])] == ["b", ""]


def test_values_that_json_does_not_have(tmp_path: pathlib.Path) -> None:
    import datetime

    import pyarrow as pa

    table = pa.table({
        "prompt": ["a", "b"],
        "data": pa.array([b"\xff\x00", None]),
        "at": [datetime.datetime(2026, 1, 2, 3, 4, 5), None],
        "exact": pa.array([1_767_323_045_000_000_001, None], pa.timestamp("ns")),
        "number": [float("nan"), float("inf")],
        "time": pa.array([3_723_000_000_005, None], pa.time64("ns")),
        "times": pa.array([[{"t": 3_723_000_000_005}], None], pa.list_(pa.struct([("t", pa.time64("ns"))]))),
        "far": pa.array([253_402_300_800_000, None], pa.timestamp("ms")),
        "span": pa.array([1_000_000_005, None], pa.duration("ns")),
        "code": pa.array([b"\xff\x00", None], pa.binary(2)),
    })  # fmt: skip
    pq.write_table(table, tmp_path / "in.parquet")
    spec = jobs.spec_of(
        tmp_path,
        input={"path": str(tmp_path / "in.parquet"), "id_column": None},
        output={"keep_columns": ["data", "at", "exact", "number", "time", "times", "far", "span", "code"]},
    )
    jobs.finish(spec)
    columns = ("data", "at", "exact", "number", "time", "times", "far", "span", "code")
    done = exported(tmp_path / "out", tmp_path / "rows.jsonl", columns=columns)
    first, second = lines_of(tmp_path / "rows.jsonl")
    text = base64.b64encode(b"\xff\x00").decode()
    exact = "2026-01-02T03:04:05.000000001"
    time = "01:02:03.000000005"
    at = "2026-01-02T03:04:05"
    times = {"at": at, "exact": exact, "time": time, "times": [{"t": time}], "span": "P0DT0H0M1.000000005S"}
    # Python has no times after the year 9999.
    assert first == {**times, "data": text, "number": None, "far": "253402300800000 (timestamp[ms])", "code": text}
    assert second == dict.fromkeys(columns)
    exported(tmp_path / "out", tmp_path / "rows.csv", columns=columns)
    assert (tmp_path / "rows.csv").read_text().splitlines() == [
        '"data","at","exact","number","time","times","far","span","code"',
        f'"{text}",2026-01-02 03:04:05.000000,2026-01-02 03:04:05.000000001,nan,{time},"[{{""t"":""{time}""}}]",'
        f'10000-01-01 00:00:00.000,1000000005,"{text}"',
        ",,,inf,,,,,",
    ]  # fmt: skip
    assert done.notes == ()


@pytest.mark.parametrize("ending", ["jsonl", "csv", "parquet"])
def test_an_export_is_the_input_of_a_job_with_the_same_export(ending: str, tmp_path: pathlib.Path) -> None:
    rows = [{"id": f"r{n}", "prompt": f'"{n}",\n  ä\t{"".join(map(chr, range(32, 32 + n)))}'} for n in range(NUM_ROWS)]
    (tmp_path / "in.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    exports = []
    source = tmp_path / "in.jsonl"
    for name in ("first", "second"):
        folder = tmp_path / name
        folder.mkdir()
        spec = jobs.spec_of(
            folder,
            input={"path": str(source), "id_column": "id"},
            output={"include_prompt": True, "keep_columns": []},
            scripted={"step_s": 0.0},
        )
        jobs.finish(spec)
        source = folder / f"rows.{ending}"
        exported(folder / "out", source, columns=("id", "prompt", "text", "token_ids", "cumulative_logprob"))
        exports.append(source.read_bytes())
    assert exports[0] == exports[1]
    assert [row["prompt"] for row in stored(tmp_path / "second" / "out")] == [row["prompt"] for row in rows]


def test_a_job_that_is_not_done_says_so(tmp_path: pathlib.Path) -> None:
    spec = jobs.spec_of(tmp_path, scripted={"step_s": 0.0})
    jobs.run("run", spec, faults="coordinator.after_publish:3=kill")
    done = exported(tmp_path / "out", tmp_path / "rows.jsonl", columns=("id",))
    assert 0 < done.num_rows == len(batchinf.open(tmp_path / "out"))
    [note] = done.notes
    assert note == f"the job is not done: {done.num_rows} rows are committed so far"
