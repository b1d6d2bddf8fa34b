"""`batchinf head`: a table that fits the terminal, or all columns as JSON, of rows with any content."""

import csv
import json
import math
import pathlib
import re
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table

import jobs
from batchinf.base.text import to_json
from batchinf.commands.export import ExportRequest, export_job
from batchinf.commands.head import Head, head_table
from batchinf.commands.screen import cell
from batchinf.tasks.base import ShownColumns

_SCRIPT = "<script>alert(1)</script>"
HOSTILE = [
    {"id": "script", "prompt": "Once \x1b[31mred\x1b[2J \u202egnp.exe\u202c \x07 \u200f [b]x[/b]", "note": _SCRIPT},
    {"id": "title", "prompt": "Once upon a time\r\nthere was", "note": "\x1b]0;title\x07"},
    {"id": "large", "prompt": "A" * 1_000_000, "note": "x" * 50},
    {"id": "empty", "prompt": "", "note": "日本語日本語日本語日本語日本語日本語日本語"},
]  # fmt: skip
LABELS = ShownColumns(("text", "finish_reason"), label_logprob="cumulative_logprob")
OBEYED = re.compile("[\0-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A job over hostile rows and harmless ones."""
    folder = tmp_path_factory.mktemp("head")
    lines = [
        json.dumps(row) for row in [*HOSTILE, *({"id": f"n{i}", "prompt": "Once", "note": "y"} for i in range(30))]
    ]
    (folder / "rows.jsonl").write_text("\n".join(lines))
    spec = jobs.spec_of(
        folder,
        input={"path": str(folder / "rows.jsonl")},
        output={"keep_columns": {"note": "note", "prompt": "asked"}},
        scripted={"step_s": 0.0},
        parallel={"data_parallel_size": 1},
        max_error_rate=1.0,
    )
    jobs.finish(spec)
    return folder / "out"


def head(out: pathlib.Path, *arguments: str, columns: int = 100) -> list[str]:
    """The lines of the command."""
    shown = jobs.run("head", out, *arguments, COLUMNS=str(columns))
    assert shown.returncode == 0, shown.stderr
    return shown.stdout.splitlines()


@pytest.mark.parametrize("columns", [60, 80, 160])
def test_the_table_fits_the_terminal_and_nothing_in_it_is_obeyed(columns: int, out: pathlib.Path) -> None:
    lines = head(out, "-n", "6", columns=columns)
    assert all(cell_len(line) <= columns for line in lines)
    assert not OBEYED.search("".join(lines))
    assert lines[0].split()[0] == "id" and {"text", "finish", "tokens"} <= {*lines[0].split()}
    rows = lines[2:8]
    assert [row.split()[0] for row in rows] == ["script", "title", "large", "empty", "n0", "n1"]
    assert "prompt_too_long: got" in rows[2] and "empty_prompt" in rows[3]
    if columns == 160:
        assert "\\u001b[31mred" in rows[0] and "<script>alert" in rows[0]
        assert "Once upon a time↵there was" in rows[1]
    assert any("no room for" in line for line in lines) == (columns < 160)
    assert any(line.startswith("the answers are invented") for line in lines)
    assert lines[-1] == "6 of 34 rows; -n shows more"


def test_the_number_of_a_choice_has_its_text() -> None:
    rows = ({"id": "a", "best": 1, "answer": 0, "answered": 1}, {"id": "b", "best": None})
    choices = dict.fromkeys(("best", "answer"), ("1", "verse"))
    found = Head(
        rows=rows,
        columns=("id", "best", "answer", "answered"),
        kept=("answered",),
        shown=ShownColumns(("best", "answer"), choices=choices),
    )
    screen = Console(width=80)
    with screen.capture() as captured:
        for item in head_table(found, (), screen.width):
            screen.print(item)
    assert captured.get().splitlines()[2].split() == ["a", "1", "1:", "verse", "0:", '"1"']
    assert captured.get().splitlines()[-1] == "2 rows shown; the job is not done"


@pytest.mark.parametrize("own", [None, ["1", "verse"], '["1", "verse"]'])
def test_the_best_choice_has_its_text_and_probability(own: Any) -> None:
    rows = (
        {"id": "a", "own": own, "best": 1, "choice_logprob_sums": [math.log(0.1), math.log(0.3)]},
        {"id": "b", "own": own, "best": None, "choice_logprob_sums": None},
        {"id": "c", "own": own, "best": 0, "choice_logprob_sums": [-1.0, math.nan]},
    )
    shown = ShownColumns(
        ("best", "choice_logprob_sums"),
        choices={"best": ("1", "verse") if own is None else ()},
        choice_sums="choice_logprob_sums",
        choices_column="own",
    )
    screen = Console(width=80)
    with screen.capture() as captured:
        for item in head_table(Head(rows=rows, columns=tuple(rows[0]), shown=shown), (), screen.width):
            screen.print(item)
    header, _, first, second, third, *_ = [line.split() for line in captured.get().splitlines()]
    assert header[:3] == ["id", "best", "confidence"]
    assert first[:4] == ["a", "1:", "verse", "0.75"]
    assert second[:3] == ["b", "–", "–"]
    assert third[:4] == ["c", "0:", '"1"', "–"]


def test_a_label_has_its_confidence() -> None:
    row = {"id": "a", "text": "good", "cumulative_logprob": math.log(0.25)}
    bad = {"id": "b", "text": None, "cumulative_logprob": None, "error_type": "empty_prompt"}

    def shown(wanted: tuple[str, ...], writes_labels: bool) -> list[list[str]]:
        screen = Console(width=80)
        with screen.capture() as captured:
            names = ShownColumns(("text",), label_logprob="cumulative_logprob" if writes_labels else None)
            for item in head_table(Head(rows=(row, bad), columns=tuple(row), shown=names), wanted, screen.width):
                screen.print(item)
        return [line.split() for line in captured.get().splitlines()]

    table = shown((), True)
    assert (table[0], table[2], table[3][0]) == (["id", "text", "confidence"], ["a", "good", "0.25"], "b")
    assert shown((), False)[0] == ["id", "text"]
    assert shown(("id", "cumulative_logprob"), True)[2] == ["a", "-1.386"]


@pytest.mark.parametrize(
    ("has_others", "columns"),
    [(True, ["id", "Review Text", "text", "confidence"]), (False, ["id", "text", "confidence"])],
)
def test_the_message_of_an_error_takes_no_room_from_the_others(has_others: bool, columns: list[str]) -> None:
    row = {"id": "review-000001", "Review Text": "a good one " * 9, "text": "good", "cumulative_logprob": -0.1}
    bad = {**row, "text": None, "cumulative_logprob": None, "error_type": "empty_prompt", "error_message": "x" * 60}
    rows = (row, bad) if has_others else (bad,)
    table, *_ = head_table(Head(rows=rows, columns=tuple(row), kept=("Review Text",), shown=LABELS), (), 74)
    assert isinstance(table, Table)
    assert [str(column.header) for column in table.columns] == columns


def test_json_has_all_columns_and_the_first_rows(out: pathlib.Path) -> None:
    first = [json.loads(line) for line in head(out, "--json", "-n", "20")]
    assert [{k: v for k, v in row.items() if k != "attempts"} for row in first] == jobs.rows_of(out)[:20]
    assert [json.loads(line) for line in head(out, "--json", "-n", "1", "--columns", "asked,id")] == [
        {"asked": HOSTILE[0]["prompt"], "id": "script"}
    ]


def test_errors_alone(out: pathlib.Path) -> None:
    assert [json.loads(line)["id"] for line in head(out, "--errors", "--json")] == ["large", "empty"]
    for columns in (40, 80, 120):
        lines = head(out, "--errors", columns=columns)
        assert lines[0].split()[:3] == ["error_type", "error_message", "id"]
        assert all(cell_len(line) <= columns for line in lines)
        words = " ".join(lines).split()
        assert {"prompt_too_long", "empty_prompt", "large", "empty"} <= {*words}
        [long, _] = [json.loads(line)["error_message"].split() for line in head(out, "--errors", "--json")]
        assert {word for word in long if len(word) < 12} <= {*words}  # the whole message, in several lines


def test_columns_are_those_that_are_named(out: pathlib.Path) -> None:
    lines = head(out, "--columns", "id,num_prompt_tokens", "--columns", "token_ids", "-n", "2")
    assert lines[0].split() == ["id", "num_prompt_tokens", "token_ids"]
    assert "[b]x[/b]" in head(out, "--columns", "asked")[2]
    refused = jobs.run("head", out, "--columns", "id,nothing")
    assert refused.returncode == 2
    assert refused.stderr.startswith("error: --columns: no column nothing; the output has id, row_index")
    refused = jobs.run("head", out, "--columns", "finish_reasons")
    assert refused.stderr == (
        "error: --columns: no column finish_reasons; the output has finish_reason, stop_reason, id, row_index, "
        "prompt_hash, sample_index, note, asked, text, token_ids, and 10 more\n"
    )
    assert head(out, "--columns", " id,  text , ", "-n", "1")[0].split() == ["id", "text"]


def test_the_confidence_of_a_label_is_a_column_that_may_be_named(tmp_path: pathlib.Path) -> None:
    sampling = {
        "logprobs_mode": "processed_logprobs",
        "logprobs": 0,
        "structured_outputs": {"choice": ["prose", "verse"]},
    }
    given = {"path": str(jobs.PROMPTS), "id_column": "id", "limit": 5}
    jobs.finish(jobs.spec_of(tmp_path, input=given, sampling=sampling, scripted={"step_s": 0.0}))
    rows = jobs.rows_of(tmp_path / "out")
    shown = [json.loads(line) for line in head(tmp_path / "out", "--json", "--columns", "confidence, id")]
    assert shown == [{"confidence": math.exp(row["cumulative_logprob"]), "id": row["id"]} for row in rows]
    assert head(tmp_path / "out", "--columns", "confidence")[0].split() == ["confidence"]
    path = tmp_path / "rows.jsonl"
    export_job(str(tmp_path / "out"), ExportRequest(path=str(path), columns=("confidence", "id")))
    assert list(map(json.loads, path.read_text().splitlines())) == shown


def test_the_label_of_the_best_choice_is_exported(tmp_path: pathlib.Path) -> None:
    given = {"path": str(jobs.PROMPTS), "context_column": "prompt", "choices": [" good", " bad"], "limit": 5}
    jobs.finish(jobs.spec_of(tmp_path, task="score", input=given, sampling=None, scripted={"step_s": 0.0}))
    path = tmp_path / "rows.csv"
    done = export_job(str(tmp_path / "out"), ExportRequest(path=str(path), columns=("id", "label", "confidence")))
    rows = {row["id"]: row for row in jobs.rows_of(tmp_path / "out")}
    lines = list(csv.DictReader(path.read_text().splitlines()))
    assert done.num_rows == len(lines) == 5
    for line in lines:
        row = rows[line["id"]]
        shares = [math.exp(value) for value in row["choice_logprob_sums"]]
        assert line["label"] == (" good", " bad")[row["best"]]
        assert float(line["confidence"]) == pytest.approx(max(shares) / sum(shares))
    [note] = export_job(str(tmp_path / "out"), ExportRequest(path=str(tmp_path / "all.csv"))).notes
    assert note.endswith("--columns takes confidence and label, too")


def test_a_second_column_of_the_ids_goes_first() -> None:
    row = {"id": "review-000000000001", "ticket": "review-000000000001", "language": "en", "text": "verse",
           "finish_reason": "stop", "cumulative_logprob": -0.1, "num_output_tokens": 3}  # fmt: skip

    def titles(width: int) -> list[str]:
        found = Head(rows=(row,), columns=tuple(row), kept=("ticket", "language"), shown=LABELS)
        table, *_ = head_table(found, (), width)
        assert isinstance(table, Table)
        return [str(column.header) for column in table.columns]

    assert titles(100) == ["id", "ticket", "language", "text", "confidence", "finish", "tokens"]
    assert titles(80) == ["id", "language", "text", "confidence", "finish", "tokens"]
    assert titles(50) == ["id", "language", "text", "confidence"]


@pytest.mark.parametrize(
    ("width", "titles"),
    [
        (200, "row_index gold asked logprob_sum logprob_mean perplexity"),
        (78, "gold asked logprob_sum logprob_mean perplexity"),
        (50, "gold logprob_sum logprob_mean perplexity"),
        (30, "gold logprob_sum"),
    ],
)
def test_what_a_narrow_table_leaves_out(width: int, titles: str) -> None:
    """First row_index, then long kept columns, then what the task computes; short kept columns last."""
    row = {"row_index": 0, "gold": "bug", "asked": "why? " * 20, "logprob_sum": -1.0, "logprob_mean": -0.5,
           "perplexity": 2.0}  # fmt: skip
    shown = ShownColumns(("logprob_sum", "logprob_mean", "perplexity"))
    table, *_ = head_table(Head(rows=(row,), columns=tuple(row), kept=("gold", "asked"), shown=shown), (), width)
    assert isinstance(table, Table)
    assert " ".join(str(column.header) for column in table.columns) == titles


def test_the_logprobs_of_chosen_tokens_are_shown(tmp_path: pathlib.Path) -> None:
    given = {"input": {"limit": 3}, "logits": {"tokens": [" a", " the"], "values": "logprobs"}}
    one = {"parallel": {"data_parallel_size": 1}, "scripted": {"step_s": 0.0}}
    jobs.finish(jobs.spec_of(tmp_path, task="logits", sampling=None, **one, **given))
    assert head(tmp_path / "out")[0].split() == ["id", "language", "logprobs"]


@pytest.mark.slow
@pytest.mark.parametrize(("task", "sections", "wanted"), [
    ("score", {"input": {"text_column": "prompt"}}, "id language logprob_sum logprob_mean perplexity bits_per_byte"),
    ("embed", {}, "id language embedding"),
])  # fmt: skip
def test_other_tasks_show_what_they_store(task: str, sections: Any, wanted: str, tmp_path: pathlib.Path) -> None:
    few = {"parallel": {"data_parallel_size": 1}, "scripted": {"step_s": 0.0}}
    given = {"path": str(jobs.PROMPTS), "id_column": "id", "limit": 5, **sections.get("input", {})}
    jobs.finish(jobs.spec_of(tmp_path, task=task, sampling=None, **few, input=given))
    lines = head(tmp_path / "out", columns=160)
    assert lines[0].split()[: len(wanted.split())] == wanted.split()
    assert len(lines) == 8


def test_a_job_without_finished_rows_says_so(out: pathlib.Path, tmp_path: pathlib.Path) -> None:
    spec = jobs.spec_of(tmp_path, max_restarts=0)
    assert jobs.run("run", spec, faults="replica.start=kill").returncode == 2
    [line] = head(tmp_path / "out")
    assert line == f"{tmp_path / 'out'}: no row is finished yet; the job is stopped: run the job again to go on"
    assert head(tmp_path / "out", "--json") == []
    good = jobs.spec_of(tmp_path, output={"path": str(tmp_path / "good")}, input={"limit": 5}, scripted={"step_s": 0.0})
    jobs.finish(good)
    assert head(tmp_path / "good", "--errors") == [
        f"{tmp_path / 'good'}: none of the 5 finished output rows is an error row"
    ]


def test_bytes_of_a_kept_column_are_counted_in_the_table_and_base64_in_json() -> None:
    kept = {"bytes": b"\x89PNG", "path": "a.png"}
    assert (cell(kept).plain, cell(b"PNG").plain) == ('{"bytes": "4 bytes", "path": "a.png"}', "3 bytes")
    assert json.loads(to_json([kept, b"PNG"])) == [{"bytes": "iVBORw==", "path": "a.png"}, "UE5H"]


def test_a_number_that_is_not_finite_is_null_in_json(tmp_path: pathlib.Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"id": 1, "prompt": "Once", "score": NaN}\n')
    given = {"path": str(tmp_path / "rows.jsonl")}
    jobs.finish(jobs.spec_of(tmp_path, input=given, output={"keep_columns": ["score"]}))
    assert head(tmp_path / "out", "--json", "--columns", "score") == ['{"score": null}']


def test_a_kept_column_named_error_is_no_error(tmp_path: pathlib.Path) -> None:
    rows = [{"id": f"r{n}", "prompt": f"Say {n}.", "error": "of a log"} for n in range(3)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec = jobs.spec_of(
        tmp_path, input={"path": str(tmp_path / "rows.jsonl")}, output={"keep_columns": ["error"]},
        scripted={"step_s": 0.0}, parallel={"data_parallel_size": 1},
    )  # fmt: skip
    jobs.finish(spec)
    lines = jobs.run("head", tmp_path / "out", COLUMNS="120").stdout.splitlines()
    assert [line.count("of a log") for line in lines[2:5]] == [1, 1, 1]
