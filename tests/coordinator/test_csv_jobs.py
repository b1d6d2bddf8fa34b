"""Jobs over CSV: what the prompts and the ids are made of."""

import pathlib
from collections.abc import Mapping
from typing import Any

import jobs

SECTIONS = "section,price,title,n\n1.1,19.90,Scope,3\n1.2,5,Terms,4\n1.10,7.25,Annexes,5\n,1e3,Nameless,6\n"
TEMPLATE = "{{ section or '-' }} {{ price }} {{ price * 2 }} {{ {'p': price} | tojson }} {{ n }}"
NEW = [
    ("1.1", "1.1 19.90 39.8 {\"p\": 19.90} 3"),
    ("1.2", "1.2 5 10.0 {\"p\": 5} 4"),
    ("1.10", "1.10 7.25 14.5 {\"p\": 7.25} 5"),
    (None, "- 1e3 2000.0 {\"p\": 1e3} 6"),
]  # fmt: skip


def spec_over(folder: pathlib.Path, content: str, input_: Mapping[str, Any] = {}, **sections: Any) -> pathlib.Path:
    """A job over `rows.csv` with this content."""
    (folder / "rows.csv").write_text(content)
    where = {"path": str(folder / "rows.csv"), "id_column": "section", "apply_chat_template": False, **input_}
    output = {"keep_columns": ["section", "price"], "include_prompt": True, **sections.pop("output", {})}
    return jobs.spec_of(folder, input=where, output=output, parallel={"data_parallel_size": 1}, **sections)


def ids_and_prompts(out: pathlib.Path) -> list[tuple[object, object]]:
    return [(row["id"], row["prompt"]) for row in jobs.rows_of(out)]


def test_a_number_is_printed_as_it_stands_in_the_file(tmp_path: pathlib.Path) -> None:
    sampling = {"max_tokens": {"column": "n"}}
    spec = spec_over(
        tmp_path, SECTIONS, {"prompt_template": TEMPLATE, "where": "price >= 5 and n < 9"}, sampling=sampling
    )
    assert "share their" not in jobs.finish(spec).stderr  # that ids are repeated
    rows = jobs.rows_of(tmp_path / "out")
    assert ids_and_prompts(tmp_path / "out") == NEW
    assert [row["section"] for row in rows] == [1.1, 1.2, 1.1, None]  # kept columns have their types
    assert [row["price"] for row in rows] == [19.9, 5, 7.25, 1000]
    assert all(row["num_output_tokens"] <= 3 + row["row_index"] for row in rows)
    assert "Annexes" not in jobs.run("validate", spec, "--row", "1.1").stdout
    assert "1.10 7.25" in jobs.run("validate", spec, "--row", "1.10").stdout


def test_new_rows_may_have_the_first_number_with_a_point(tmp_path: pathlib.Path) -> None:
    (tmp_path / "in").mkdir()
    spec = spec_over(tmp_path, "", {"path": str(tmp_path / "in"), "prompt_template": "{{ n }} {{ n + 1 }}"},
                     output={"keep_columns": []})  # fmt: skip
    (tmp_path / "in" / "a.csv").write_text("section,n\n1.10,9\n1.20,7\n")
    jobs.finish(spec)
    before = ids_and_prompts(tmp_path / "out")
    assert before == [("1.10", "9 10"), ("1.20", "7 8")]
    (tmp_path / "in" / "b.csv").write_text("section,n\nend,9.10\n1.1,8\n")
    jobs.finish(spec, "--extend")
    assert ids_and_prompts(tmp_path / "out") == [*before, ("end", "9.10 10.1"), ("1.1", "8 9.0")]


def test_ids_of_numbers_find_the_rows_of_another_file_and_another_job(tmp_path: pathlib.Path) -> None:
    where = {"prompt_template": "{{ section }} {{ price }}"}
    broken = "section,price\n1.1,2.00\n1.10,3\n1.100,x,y\n1.5,4\n"
    spec = spec_over(tmp_path, broken, where, max_error_rate=1.0)
    jobs.finish(spec)
    fixed = tmp_path / "fixed.csv"
    fixed.write_text("section,price\n1.10,3.50\n")
    jobs.finish(spec, "--retry", "id = '1.10'", "--input", str(fixed))
    assert ids_and_prompts(tmp_path / "out")[:2] == [("1.1", "1.1 2.00"), ("1.10", "1.10 3.50")]

    (tmp_path / "more").mkdir()
    exclude = {"job": str(tmp_path / "out"), "on": "id"}
    more = spec_over(tmp_path / "more", "section,price\n1.10,1\n1.1000,2\n1.1,3\n", {**where, "exclude": exclude})
    jobs.finish(more)
    assert ids_and_prompts(tmp_path / "more" / "out") == [("1.1000", "1.1000 2")]


def test_a_prompt_of_digits_is_text(tmp_path: pathlib.Path) -> None:
    spec = spec_over(tmp_path, "section,text,price\n1,2024,1\n2,9.10,2\n3,-7,3\n", {"prompt_column": "text"})
    jobs.finish(spec)
    assert ids_and_prompts(tmp_path / "out") == [(1, "2024"), (2, "9.10"), (3, "-7")]
