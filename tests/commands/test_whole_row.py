"""`batchinf head --row` and `Results.tokens`: one row whole, decoded by the job's own tokenizer, whatever it holds."""

import dataclasses
import json
import pathlib
import re
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from test_head import HOSTILE, OBEYED
from transformers import AutoTokenizer

import batchinf
import jobs
from batchinf.commands.whole_row import read_whole_row


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A job over hostile rows, two samples each, with logprobs of prompts too. The prompts are not stored."""
    folder = tmp_path_factory.mktemp("inspect")
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, HOSTILE)))
    spec = jobs.spec_of(
        folder,
        input={"path": str(folder / "rows.jsonl")},
        sampling={"n": 2, "temperature": 1.0, "logprobs": 2, "prompt_logprobs": 1, "max_tokens": 12},
        output={"keep_columns": ["note"]},
        scripted={"step_s": 0.0},
        parallel={"data_parallel_size": 1},
        max_error_rate=1.0,
    )
    jobs.finish(spec)
    return folder / "out"


def test_tokens_are_decoded_by_the_jobs_own_tokenizer(out: pathlib.Path) -> None:
    results, tokenizer = batchinf.open(out), AutoTokenizer.from_pretrained(jobs.MODEL)
    ids, texts = results.ragged("token_ids"), results.tokens()
    assert np.array_equal(texts.offsets, ids.offsets)
    for row in range(len(ids)):
        for token_id, text in zip(ids[row].tolist(), texts[row].tolist(), strict=True):
            whole = tokenizer.decode([token_id])
            assert text == (tokenizer.convert_ids_to_tokens(token_id) if "\ufffd" in whole else whole)
    top = results.tokens("top_token_ids")
    assert top.values.shape == results.ragged("top_token_ids").values.shape == (len(ids.values), 2)
    with pytest.raises(batchinf.OutputError, match="has no token ids"):
        results.tokens("logprobs")


def test_a_changed_model_does_not_decode(tmp_path: pathlib.Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(jobs.MODEL, model)
    few = {"parallel": {"data_parallel_size": 1}, "scripted": {"step_s": 0.0}}
    jobs.finish(jobs.spec_of(tmp_path, model=str(model), input={"limit": 3, "id_column": None}, **few))
    assert len(batchinf.open(tmp_path / "out").tokens()) == 3
    with pytest.raises(batchinf.UserError, match=r"the job has no input\.id_column"):
        read_whole_row(str(tmp_path / "out"), "en-1")
    config = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps({**config, "extra": 1}))
    with pytest.raises(batchinf.DriftError, match="is not the one that the job began with"):
        batchinf.open(tmp_path / "out").tokens()


def test_a_row_is_shown_whole(out: pathlib.Path) -> None:
    report = read_whole_row(str(out), "title")
    tokenizer = AutoTokenizer.from_pretrained(jobs.MODEL)
    assert report.prompt is not None
    assert "".join(piece.text for piece in report.prompt) == tokenizer.bos_token + HOSTILE[1]["prompt"]
    assert [piece.is_special for piece in report.prompt] == [True, False]
    stored = [row for row in jobs.rows_of(out) if row["id"] == "title"]
    assert len(report.samples) == len(stored) == 2
    for sample, row in zip(report.samples, stored, strict=True):
        assert [token.token_id for token in sample.tokens] == row["token_ids"]
        assert [token.logprob for token in sample.tokens] == row["logprobs"]
        assert [token.rank for token in sample.tokens] == row["ranks"]
        assert [[other.token_id for other in token.alternatives] for token in sample.tokens] == row["top_token_ids"]
        assert sample.decoded == tokenizer.decode(row["token_ids"])
        assert [token.logprob for token in sample.prompt_tokens] == row["prompt_logprobs"]
        assert sample.fields["note"] == HOSTILE[1]["note"]


def test_what_stopped_a_sample(out: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """The scripted engine knows no stop tokens, so the column gets their ids afterwards."""
    shutil.copytree(out, tmp_path / "out")
    place, token_ids = next((n, row["token_ids"]) for n, row in enumerate(jobs.rows_of(out)) if row["id"] == "title")
    reasons = iter([str(token_ids[-1]), "\n\n"])
    for path in (tmp_path / "out" / "parts").iterdir():
        table = pq.read_table(path)
        found = [next(reasons) if name == "title" else None for name in table["id"].to_pylist()]
        at = table.schema.get_field_index("stop_reason")
        pq.write_table(table.set_column(at, "stop_reason", pa.array(found, pa.string())), path)
    report = read_whole_row(str(tmp_path / "out"), "title")
    text = batchinf.open(out).tokens()[place][-1]
    words = [f"the token {text!r} ({token_ids[-1]})", r"the text '\n\n'"]
    assert [sample.stopped_by for sample in report.samples] == words
    assert [dict(sample.shown_fields())["stop_reason"] for sample in report.samples] == words
    assert [sample.stopped_by for sample in read_whole_row(str(tmp_path / "out"), "script").samples] == [None, None]


@pytest.mark.parametrize("positions", ["last", "generated"])
def test_the_logprobs_of_chosen_tokens_are_a_result(positions: str, tmp_path: pathlib.Path) -> None:
    logits = {"tokens": [" a", " the"], "values": "logprobs", "positions": positions}
    drawn = ["--set", "sampling={temperature: 0.0, max_tokens: 3}"] if positions == "generated" else []
    jobs.finish(jobs.spec_of(tmp_path, task="logits", sampling=None, input={"limit": 3}, logits=logits), *drawn)
    done = jobs.run("head", tmp_path / "out", "--row", "0")
    assert done.returncode == 0, done.stderr
    assert re.search(r"^logprobs +\[\[-?\d", done.stdout, re.MULTILINE)
    [sample] = json.loads(jobs.run("head", tmp_path / "out", "--row", "0", "--json").stdout)["samples"]
    assert len(sample["fields"]["logprobs"][0]) == 2
    assert len(sample["tokens"]) == (sample["fields"]["num_output_tokens"] if positions == "generated" else 0)


def test_a_row_without_output_has_a_result(out: pathlib.Path) -> None:
    report = read_whole_row(str(out), "title")
    [sample, _] = report.samples
    assert sample.fields["num_output_tokens"] > 0
    assert sample.title == "output"
    scored = dataclasses.replace(sample, fields={**sample.fields, "num_output_tokens": 0})
    assert scored.title == "result"


def test_inspect_and_what_a_row_does_not_go_with_are_refused(out: pathlib.Path) -> None:
    refused = jobs.run("inspect", out, "title")
    assert refused.returncode == 2 and "`batchinf head OUT --row ID` shows one row whole" in refused.stderr
    refused = jobs.run("status", out, "--plot")
    assert refused.returncode == 2 and "`batchinf report OUT` writes a page with charts" in refused.stderr
    for option in (["--errors"], ["--columns", "text"]):
        refused = jobs.run("head", out, "--row", "title", *option)
        assert (refused.returncode, refused.stdout) == (2, "")
        assert refused.stderr.startswith(f"error: head: got {option[0]} with --row, which shows all of one row; leave")


def test_the_marks_of_a_chat_are_special(tmp_path: pathlib.Path) -> None:
    """They are special in tokenizer.json, and no named tokens of the tokenizer; a text that spells them is none."""
    (tmp_path / "rows.jsonl").write_text(json.dumps({"id": "a", "text": "Tell me."}))
    messages = [{"role": "user", "content": "{{ text }}"}]
    spec = jobs.spec_of(
        tmp_path, input={"path": str(tmp_path / "rows.jsonl"), "messages": messages},
        scripted={"step_s": 0.0}, parallel={"data_parallel_size": 1}, output={"keep_columns": []},
    )  # fmt: skip
    jobs.finish(spec)
    prompt = read_whole_row(str(tmp_path / "out"), "a").prompt
    assert prompt is not None
    special = "".join(piece.text for piece in prompt if piece.is_special)
    for mark in ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"):
        assert mark in special


def test_rows_are_found_by_id_and_by_position(out: pathlib.Path) -> None:
    assert read_whole_row(str(out), "1") == read_whole_row(str(out), "1")
    assert read_whole_row(str(out), "1").samples == read_whole_row(str(out), "title").samples
    assert read_whole_row(str(out), "large").prompt_note == "no prompt was run; the error below says why"
    with pytest.raises(batchinf.UserError, match="none of 8 committed rows has this as an id or a position"):
        read_whole_row(str(out), "99")


@pytest.mark.usefixtures("quick_replicas")
def test_relative_paths_lead_from_the_folder_in_which_the_job_began(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompts of a batch file are made again with the model's name of the job, and tokens with its tokenizer."""
    monkeypatch.chdir(tmp_path)
    pathlib.Path("model").symlink_to(jobs.MODEL)
    body = {"model": "model", "messages": [{"role": "user", "content": "Tell me."}]}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    pathlib.Path("rows.jsonl").write_text(json.dumps(line))
    spec = {"model": "model", "input": {"path": "rows.jsonl"}, "scripted": {}, "output": {"path": "out"}}
    batchinf.run(spec, quiet=True)
    out = str(tmp_path / "out")
    whole = read_whole_row(out, "a")
    assert whole.prompt is not None and "Tell me." in "".join(piece.text for piece in whole.prompt), whole.prompt_note
    words = batchinf.open(out).tokens()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert read_whole_row(out, "a") == whole
    (tmp_path / "rows.jsonl").write_text(json.dumps({**line, "body": {**body, "model": "other"}}))
    note = read_whole_row(out, "a").prompt_note
    assert "error below" not in note and "rows.jsonl" in note, note
    (tmp_path / "rows.jsonl").unlink()
    assert [*batchinf.open(out).tokens()[0]] == [*words[0]]


def test_an_id_of_several_rows(tmp_path: pathlib.Path) -> None:
    lines = [json.dumps({"id": "ab"[n % 2], "prompt": f"Say {n}"}) for n in range(5)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    quick = {"scripted": {"step_s": 0.0}, "parallel": {"data_parallel_size": 1}}
    shards = {
        "output": {"rows_per_shard": 2, "include_prompt": True, "keep_columns": []},
        "sampling": {"n": 2, "temperature": 1.0},
    }
    jobs.finish(jobs.spec_of(tmp_path, input={"path": str(tmp_path / "rows.jsonl")}, **quick, **shards))
    out = tmp_path / "out"
    first, fourth = read_whole_row(str(out), "a"), read_whole_row(str(out), "3")
    assert ([sample.fields["row_index"] for sample in first.samples], first.same_id) == ([0, 0], (2, 4))
    assert ([sample.fields["row_index"] for sample in fourth.samples], fourth.same_id) == ([3, 3], ())
    said = "Rows at other positions have this id too: 2, 4"
    shown = jobs.run("head", out, "--row", "a").stdout
    assert said in shown
    assert "This is the row at position 0. Give another position in place of the id." in shown


@pytest.mark.parametrize("row", ["script", "title", "large", "empty"])
def test_the_terminal_obeys_nothing_in_a_row(row: str, out: pathlib.Path) -> None:
    shown = jobs.run("head", out, "--row", row, COLUMNS="80")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert not OBEYED.search(shown.stdout)
    assert "attempts" in shown.stdout
    if row == "script":
        assert "<|begin_of_text|>Once \\u001b[31mred" in shown.stdout
        assert "alternatives, with their probabilities" in shown.stdout


COLOUR = "\x1b\\[[0-9;]*(3[0-7]|38|9[0-7])[;m]"


def test_colour_is_for_terminals_that_want_it(out: pathlib.Path) -> None:
    coloured = jobs.run("head", out, "--row", "script", FORCE_COLOR="1", TERM="xterm-256color").stdout
    assert set(re.findall("\x1b.", coloured)) == {"\x1b["}
    assert re.search(COLOUR, coloured)
    plain = jobs.run("head", out, "--row", "script", FORCE_COLOR="1", NO_COLOR="1").stdout
    assert not re.search(COLOUR, plain)


@pytest.mark.slow
def test_a_page_replaces_only_pages(out: pathlib.Path, tmp_path: pathlib.Path) -> None:
    spec, link, page = (tmp_path / name for name in ("job.yaml", "link.html", "page.html"))
    spec.write_text("model: mine")
    link.symlink_to(spec)
    for path in (spec, link):
        done = jobs.run("report", out, "-o", path)
        assert (done.returncode, spec.read_text(), link.is_symlink()) == (2, "model: mine", True)
        assert f"cannot write {path}: a file is there that this command has not written; name another" in done.stderr
    for _ in range(2):
        assert jobs.run("report", out, "-o", page).returncode == 0
    assert page.read_text().startswith("<!doctype html>")
    assert jobs.run("report", out, "-o", "/dev/null").returncode == 0
    assert pathlib.Path("/dev/null").is_char_device()


def test_json_has_the_same(out: pathlib.Path) -> None:
    shown = json.loads(jobs.run("head", out, "--row", "script", "--json").stdout)
    assert shown["samples"][0]["tokens"][0].keys() == {"text", "token_id", "logprob", "rank", "alternatives"}


def test_values_that_python_cannot_build(tmp_path: pathlib.Path) -> None:
    """Arrow holds times of zones that nobody knows, and durations of more than a thousand million years."""
    unknown = {
        "zone": pa.array([0], pa.timestamp("us", "Mars/Base")),
        "long": pa.array([10**18], pa.duration("s")),
        "late": pa.array([10**14], pa.timestamp("s")),
    }
    pq.write_table(pa.table({"id": ["x"], "prompt": ["Say 1."], **unknown}), tmp_path / "rows.parquet")
    output = {"keep_columns": list(unknown)}
    jobs.finish(jobs.spec_of(tmp_path, input={"path": str(tmp_path / "rows.parquet")}, output=output))
    [sample] = read_whole_row(str(tmp_path / "out"), "x").samples
    assert sample.fields["id"] == "x"
    assert sample.fields["zone"] == "0 (timestamp[us, tz=Mars/Base])"
    assert sample.fields["long"] == "1000000000000000000 (duration[s])"
    head = jobs.run("head", tmp_path / "out", "--json")
    assert json.loads(head.stdout)["late"] == sample.fields["late"]


@pytest.mark.parametrize("own", [False, True])
def test_a_row_of_choices(own: bool, tmp_path: pathlib.Path) -> None:
    """Each choice with its text and its tokens, nothing cut; an answer that is no choice does not hide the prompt."""
    choices = ["yes", "no " + "and a long one " * 12]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"id": "x", "q": "Is it?", "own": choices, "gold": "maybe",
                                                      "choice_of_reader": "left"}))  # fmt: skip
    given = {"choices_column": "own"} if own else {"choices": choices}
    spec = jobs.spec_of(
        tmp_path,
        task="score",
        sampling=None,
        input={"path": str(tmp_path / "rows.jsonl"), "context_column": "q", "answer_column": "gold", **given},
        output={"include_token_logprobs": not own, "keep_columns": ["own", "choice_of_reader"]},
        scripted={"step_s": 0.0},
        parallel={"data_parallel_size": 1},
    )
    jobs.finish(spec)
    shown = jobs.run("head", tmp_path / "out", "--row", "x", COLUMNS="120")
    assert shown.returncode == 0, shown.stderr
    words = " ".join(shown.stdout.split())
    assert "Is it?" in words and "not shown" not in words
    [sample] = read_whole_row(str(tmp_path / "out"), "x").samples
    best = sample.fields["best"]
    assert [choice.text for choice in sample.choices] == choices
    assert f"best {best}: {choices[best].strip()[:60]}" in words
    assert words.count("and a long one") >= 12
    assert [choice.values["logprob_sums"] for choice in sample.choices] == sample.fields["choice_logprob_sums"]
    assert "answer_error got 'maybe'" in words and "choice_of_reader left" in words
    assert ("tokens of the choices" in words) != own
    num_tokens = [len(choice.tokens) for choice in sample.choices]
    assert num_tokens == ([0, 0] if own else sample.fields["choice_num_tokens"])
    if not own:
        assert len(re.findall(r"^ +[01] +[0-9]+ ", shown.stdout, re.MULTILINE)) == sum(num_tokens)
