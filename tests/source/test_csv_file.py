import contextlib
import csv
import pathlib
import re
from dataclasses import replace

import pyarrow as pa
import pytest

from batchinf.base.errors import InputError
from batchinf.prompts.checks import input_notes
from batchinf.source.files import CsvDialect, InputLocation
from batchinf.source.rows import Source, open_source


def test_csv_that_is_not_utf8_or_never_closes_a_quote(tmp_path: pathlib.Path) -> None:
    (tmp_path / "x.csv").write_bytes(b'a,b\n1,2\n\xff,3\n4,5\n6,"open\n')
    found = open_source(InputLocation(str(tmp_path / "x.csv")), tmp_path / "cache")
    rows = found.read(0, found.num_rows)
    assert [row.error and row.error.partition(":")[0] for row in rows] == [None, "x.csv line 3", None, "x.csv line 5"]
    remedy = "; if the file is in cp1252, write `input.csv: {encoding: cp1252}`"
    assert rows[1].error == f"x.csv line 3: not UTF-8: byte 0xff at byte 1{remedy}"
    assert rows[2].values == {"a": 4, "b": 5}
    found.close()


def test_a_mark_of_utf8_contradicts_another_encoding(tmp_path: pathlib.Path) -> None:
    (tmp_path / "x.csv").write_bytes("id,text\n1,ü\n".encode("utf-8-sig"))
    path = str(tmp_path / "x.csv")
    with pytest.raises(InputError, match=r"x\.csv begins with the mark of UTF-8, but input\.csv\.encoding is cp1252; "):
        open_source(InputLocation(path, csv=CsvDialect(encoding="cp1252")), tmp_path / "cache")
    for encoding in ("utf-8", "UTF8", "utf-8-sig"):
        found = open_source(InputLocation(path, csv=CsvDialect(encoding=encoding)), tmp_path / encoding)
        assert found.read(0, 1)[0].values == {"id": 1, "text": "ü"}
        found.close()


def test_a_quote_that_swallows_the_rows_after_it_is_refused(tmp_path: pathlib.Path) -> None:
    (tmp_path / "x.csv").write_text('a,b\n1,2\n6,"open\n7,8\n9,10\n')
    words = "x.csv: a quote opens in line 3 and is never closed, so that row would have the next 2 lines in it"
    with pytest.raises(InputError, match=words):
        open_source(InputLocation(str(tmp_path / "x.csv")), tmp_path / "cache")


def test_a_header_in_cp1252(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "x.csv"
    path.write_bytes("id,große\n1,2\n".encode("cp1252"))
    remedy = re.escape("if the file is in cp1252, write `input.csv: {encoding: cp1252}`")
    with pytest.raises(InputError, match=f"x.csv: its header is not UTF-8: byte 0xdf at byte 7; {remedy}"):
        open_source(InputLocation(str(path)), tmp_path / "cache")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            {"a.csv": "id,text\n1,a\n", "b.csv": "2,b\n"},
            "b.csv: the first line names no column of a.csv, which has id, te",
        ),
        (
            {"a.csv": "", "b.csv": "1,a\n2,b\n", "c.csv": "id,text\n"},
            "c.csv: the first line names no column of b.csv, which",
        ),
        (
            {"a.tsv": "id\ttext\n1\ta\n", "p=1/b.tsv": "2\tb\n3\tc\n", "p=2/c.tsv": "4\td\n"},
            "p=1/b.tsv, p=2/c.tsv: the",
        ),
        (
            {
                "a.csv": "id,text\n1,a\n",
                "b.csv": "text,id\nb,2\n",
                "c.csv": "text,more\nc,2\n",
                "d.csv": "",
                "e.csv": "\n",
            },
            None,
        ),
    ],
)
@pytest.mark.parametrize("path", ["in", "in/**/*.?sv"])
def test_files_without_a_header(files: dict[str, str], path: str, message: str | None, tmp_path: pathlib.Path) -> None:
    for name, content in files.items():
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_text(content)
    location = InputLocation(str(tmp_path / path))
    if message is None:
        assert open_source(location, tmp_path / "cache").num_rows == 3
        return
    with pytest.raises(InputError, match=re.escape(message)):
        open_source(location, tmp_path / "cache")
    # A job that has begun goes on.
    begun = open_source(replace(location, is_new=False), tmp_path / "cache")
    assert open_source(location, tmp_path / "cache", begun.fingerprints).num_rows == begun.num_rows


def test_a_file_without_a_header_that_comes_later(tmp_path: pathlib.Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.csv").write_text("id,text\n1,a\n")
    location = InputLocation(str(tmp_path / "in"))
    begun = open_source(location, tmp_path / "cache").fingerprints
    (tmp_path / "in/b.csv").write_text("2,b\n3,c\n")
    message = (
        r"^b\.csv: the first line names no column of a\.csv, which has id, text; if it is a row, it would be lost: "
    )
    with pytest.raises(InputError, match=message):
        open_source(location, tmp_path / "cache", begun, "take")
    (tmp_path / "in/b.csv").write_text("text,id\nb,2\n")
    assert open_source(location, tmp_path / "cache", begun, "take").num_rows == 2


def opened(tmp_path: pathlib.Path, content: bytes, dialect: CsvDialect | None = None, name: str = "x.csv") -> Source:
    (tmp_path / name).write_bytes(content)
    return open_source(InputLocation(str(tmp_path / name), csv=dialect), tmp_path / "cache")


def values_of(source: Source) -> list[dict[str, object] | str | None]:
    return [row.error or dict(row.values) for row in source.read(0, source.num_rows)]


ROWS = [{"id": 1, "text": "a, b"}, {"id": 2, "text": "ü"}]


@pytest.mark.parametrize(
    ("content", "name", "dialect", "remark"),
    [
        ("id;text\n1;a, b\n2;ü\n", "x.csv", None, "its fields are separated by semicolons, as its first rows show"),
        ("id|text\r\n1|a, b\r\n2|ü\r\n", "x.csv", None, "separated by vertical bars"),
        ("id\ttext\n1\ta, b\n2\tü\n", "x.csv", None, "separated by tabs"),
        ("id\ttext\n1\ta, b\n2\tü\n", "x.tsv", None, ""),
        ('id,text\n1,"a, b"\n2,ü\n', "x.tsv", None, "separated by commas"),
        ("id#text\n1#'a, b'\n2#ü\n", "x.csv", CsvDialect(delimiter="#", quotechar="'"), ""),
        ("id;text\n1;a, b\n2;ü\n", "x.csv", CsvDialect(encoding="utf-16-be", delimiter=";"), ""),
        ("id;text\n1;a, b\n2;ü\n", "x.csv", CsvDialect(encoding="cp1252"), "separated by semicolons"),
    ],
)
def test_dialects(content: str, name: str, dialect: CsvDialect | None, remark: str, tmp_path: pathlib.Path) -> None:
    found = opened(tmp_path, content.encode((dialect and dialect.encoding) or "utf-8"), dialect, name)
    assert values_of(found) == ROWS
    assert [(remark in said, list(names)) for said, names in found.remarks.items()] == [(True, [name])] * bool(remark)


@pytest.mark.parametrize("content", ["a;b\n1\n", "a;b,c\n1;2,3\n", "text\nx;y|z\n", "a;b\n"])
def test_a_delimiter_that_is_not_clear_is_a_comma(content: str, tmp_path: pathlib.Path) -> None:
    header = content.partition("\n")[0]
    if content.count("\n") == 1:
        content += "\n1\n"
    assert opened(tmp_path, content.encode()).schema.names == header.split(",")


def test_utf16_by_its_mark(tmp_path: pathlib.Path) -> None:
    found = opened(tmp_path, 'id,text\n1,"a, b"\n2,ü\n'.encode("utf-16"))
    assert values_of(found) == ROWS
    assert found.remarks == {"it is UTF-16, as its first bytes show": ["x.csv"]}


def test_rows_appended_to_utf16(tmp_path: pathlib.Path) -> None:
    content = "id;text\n1;a\n".encode("utf-16")
    found = opened(tmp_path, content)
    (tmp_path / "x.csv").write_bytes(content + "2;b\n".encode("utf-16-le"))
    grown = open_source(InputLocation(str(tmp_path / "x.csv")), tmp_path / "cache", found.fingerprints, "take")
    assert values_of(grown) == [{"id": 1, "text": "a"}, {"id": 2, "text": "b"}]


def test_bytes_that_an_encoding_lacks_are_error_rows(tmp_path: pathlib.Path) -> None:
    found = opened(tmp_path, b"id,text\n1,\xfc\n2,\x81\n", CsvDialect(encoding="cp1252"))
    message = "x.csv line 3: not cp1252: byte 0x81; set the file's encoding in `input.csv.encoding`"
    assert values_of(found) == [{"id": 1, "text": "ü"}, message]


def test_null_values(tmp_path: pathlib.Path) -> None:
    content = b"id,text,score\n1,,0.5\n2,NA,NA\n3,x,\n"
    plain = opened(tmp_path, content)
    assert values_of(plain)[1] == {"id": 2, "text": "NA", "score": "NA"}
    assert values_of(plain)[0]["text"] == ""
    found = opened(tmp_path, content, CsvDialect(null_values=("", "NA")))  # the same cache: it is scanned again
    assert values_of(found) == [
        {"id": 1, "text": None, "score": 0.5},
        {"id": 2, "text": None, "score": None},
        {"id": 3, "text": "x", "score": None},
    ]


def test_quotes_that_are_text(tmp_path: pathlib.Path) -> None:
    found = opened(tmp_path, b'id\ttext\n1\t"open\n2\tx"y\n', CsvDialect(quotechar=""), "x.tsv")
    assert [row["text"] for row in values_of(found)] == ['"open', 'x"y']


def test_both_guesses_about_a_file_are_said(tmp_path: pathlib.Path) -> None:
    found = opened(tmp_path, "id\tprompt\n1\tПривет\n2\tb\n".encode("utf-16"))
    words = "its fields are separated by tabs, as its first rows show; it is UTF-16, as its first bytes show"
    assert found.remarks == {words: ["x.csv"]}


@pytest.mark.parametrize("format", ["jsonl", "parquet", "arrow"])
def test_a_dialect_for_another_format(format: str, tmp_path: pathlib.Path) -> None:
    with pytest.raises(
        InputError, match=rf"input.csv is given, but .*x.{format} has the format {format}; leave it out"
    ):
        opened(tmp_path, b"{}", CsvDialect(), f"x.{format}")


def test_numbers_are_printed_as_they_stand(tmp_path: pathlib.Path) -> None:
    content = b"section,n\n1.10,5\n1.1,07\n-0,8\n1E3,x\n,9\n0.10,a\n"
    found = opened(tmp_path, content)
    assert found.schema.field("section").type == pa.float64()
    sections = [row.values["section"] for row in found.read(0, found.num_rows)]
    assert sections == [1.1, 1.1, 0.0, 1000.0, None, 0.1]
    written = ["1.10", "1.1", "-0", "1E3", None, "0.10"]
    assert [None if value is None else str(value) for value in sections] == written
    both = [found.id_field("section"), found.schema.field("section")]
    read = found.read_fields(0, found.num_rows, both)
    assert [column.to_pylist() for column in read.columns] == [written, sections]
    assert found.id_field("n") == found.schema.field("n")
    found.close()


def test_text_columns_are_text_whatever_is_in_them(tmp_path: pathlib.Path) -> None:
    (tmp_path / "x.csv").write_text("id,text,price\n1,2024,1.50\n2,,2\n")
    location = InputLocation(str(tmp_path / "x.csv"), text_columns=("text", "none"))
    found = open_source(location, tmp_path / "cache")
    assert [row.values for row in found.read(0, 2)] == [
        {"id": 1, "text": "2024", "price": 1.5}, {"id": 2, "text": "", "price": 2.0},
    ]  # fmt: skip
    assert found.schema.field("text").type == pa.int64()  # for `where`


SWALLOWED = "it is inside the row that begins in line {}, whose quotes do not fit"
NO_DELIMITER = "not CSV: ',' expected after '\"'"
HINT = "; if \\\" in it is a quote, write `input.csv: {escapechar: '\\'}`"


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        # As Spark writes a quote at the end of a field.
        (
            ['1,"6\\"",en', "2,plain,en", "3,no,de", '4,"x, y",de', "5,e,fr"],
            [
                f"lines 2 to 5: {NO_DELIMITER}{HINT}",
                *((line, 2) for line in (3, 4, 5)),
                {"id": 5, "text": "e", "lang": "fr"},
            ],
        ),
        (
            ['1,"6\\"",en', '2,"7\\"",en', "3,no,de"],
            [f"lines 2 to 3: {NO_DELIMITER}{HINT}", (3, 2), {"id": 3, "text": "no", "lang": "de"}],
        ),
        # An open quote that a later field closes.
        (
            ['1,"abc,en', "2,plain,en", '3,"x",de', "4,d,de"],
            [f"lines 2 to 4: {NO_DELIMITER}", (3, 2), (4, 2), {"id": 4, "text": "d", "lang": "de"}],
        ),
        # The same, where the joined row has too few fields.
        (
            ['1,"abc,en', "2,plain,en", '3,x"', "4,d,de"],
            ["lines 2 to 4: 2 fields where the header has 3", (3, 2), {"id": 4, "text": "d", "lang": "de"}],
        ),
        # Honest line breaks are no error, whatever stands in the lines; those of a broken row are not counted.
        (['1,"a\n2,b,c\nd",en'], [{"id": 1, "text": "a\n2,b,c\nd", "lang": "en"}]),
        (['1,"a\nb\nc",en,more'], ["lines 2 to 4: 4 fields where the header has 3"]),
        (["1,a", "2,b,c"], ["line 2: 2 fields where the header has 3", {"id": 2, "text": "b", "lang": "c"}]),
    ],
)
def test_lines_that_a_broken_row_takes_count_as_errors(
    lines: list[str], expected: list[dict[str, object] | tuple[int, int] | str], tmp_path: pathlib.Path
) -> None:
    content = "".join(f"{line}\n" for line in ["id,text,lang", *lines]).encode()
    found = opened(tmp_path, content)
    assert values_of(found) == [
        f"x.csv {row}" if isinstance(row, str) else
        f"x.csv line {row[0]}: {SWALLOWED.format(row[1])}" if isinstance(row, tuple) else row
        for row in expected
    ]  # fmt: skip
    found.close()


def test_rows_behind_a_broken_one_may_come_later(tmp_path: pathlib.Path) -> None:
    content = b'id,text,lang\n1,"abc,en\n2,plain,en\n3,"x",de\n'
    found = opened(tmp_path, content)
    assert found.num_rows == 3
    (tmp_path / "x.csv").write_bytes(content + b"4,d,de\n")
    grown = open_source(InputLocation(str(tmp_path / "x.csv")), tmp_path / "cache", found.fingerprints, "take")
    assert [row.error is None for row in grown.read(0, grown.num_rows)] == [False, False, False, True]


@pytest.mark.parametrize(
    ("field", "text"),
    [
        (r'"6\""', '6"'),
        (r'"say \"a, b\""', 'say "a, b"'),
        (r'"C:\data\new"', r"C:\data\new"),
        (r"C:\data\new", r"C:\data\new"),
        (r'"a\\"', "a\\"),
        (r'"a\\\"b"', r"a\"b"),
        (r'"two "" ways \""', 'two " ways "'),
        ('"a\\\nb"', "a\\\nb"),
        (r"\N", r"\N"),
        ('"ü \\" ü"', 'ü " ü'),
    ],
)
def test_escapechar(field: str, text: str, tmp_path: pathlib.Path) -> None:
    content = f"id,text,lang\n1,{field},en\n2,next,de\n".encode()
    found = opened(tmp_path, content, CsvDialect(escapechar="\\"))
    assert values_of(found) == [{"id": 1, "text": text, "lang": "en"}, {"id": 2, "text": "next", "lang": "de"}]


def test_escapechar_and_the_delimiter_of_the_first_rows(tmp_path: pathlib.Path) -> None:
    found = opened(tmp_path, b'id;text\n1;"a \\"; b, c"\n', CsvDialect(escapechar="\\"))
    assert values_of(found) == [{"id": 1, "text": 'a "; b, c'}]


@pytest.mark.parametrize(
    ("content", "dialect", "rows", "remark"),
    [
        ("sep=;\r\nid;text\r\n1;a\r\n", None, [{"id": 1, "text": "a"}], "by semicolons, as its first line says"),
        ('"sep=\t"\nid\ttext\n1\ta\n', None, [{"id": 1, "text": "a"}], "separated by tabs, as its first line says"),
        ("\ufeffSEP=#\nid#text\n1#a, b;c\n", None, [{"id": 1, "text": "a, b;c"}], "by '#', as its first line says"),
        ("sep=;\nid,text\n1,a\n", CsvDialect(delimiter=","), [{"id": 1, "text": "a"}],
         "by commas, but input.csv.delimiter has another one than its first line says"),
        ("id,text,,\n1,a,,\n2,b,x,\n", None, [{"id": 1, "text": "a"}, {"id": 2, "text": "b"}],
         "2 columns without a name are left out"),
        (",id,text\n0,1,a\n", None, [{"id": 1, "text": "a"}], "1 column without a name is left out"),
        ("id,note,text,note\n1,x,a,y\n", None, [{"id": 1, "text": "a"}],
         "its header has note more than once: these columns are left out"),
    ],
)  # fmt: skip
def test_files_of_spreadsheets(
    content: str, dialect: CsvDialect | None, rows: list[dict[str, object]], remark: str, tmp_path: pathlib.Path
) -> None:
    found = opened(tmp_path, content.encode(), dialect)
    assert values_of(found) == rows
    assert found.schema.names == ["id", "text"]
    assert [remark in said for said in found.remarks] == [True]
    broken = opened(tmp_path, f"{content}\n1\n".encode(), dialect)
    assert f"line {content.count(chr(10)) + 2}:" in str(values_of(broken)[-1])


@pytest.mark.parametrize(
    ("content", "ids", "remark"),
    [
        (
            "id,text\n1,a\nid,text\n2,b\n",
            ["1", "id", "2"],
            "1 row like the header, line 3 first, as in files that were jo",
        ),
        (
            'sep=;\nid;text\n1;"a\n"\nid;text\n\ufeffid;text\n',
            ["1", "id", "id"],
            "2 rows like the header, line 5 first, ",
        ),
        ("id\n1\nid\n", ["1", "id"], "1 row like the header, line 3 first"),
        ("id,text\n1,text\nid,b\n", ["1", "id"], None),
    ],
)
def test_a_header_within_the_rows(content: str, ids: list[str], remark: str | None, tmp_path: pathlib.Path) -> None:
    found = opened(tmp_path, content.encode())
    assert [str(row["id"]) for row in values_of(found) if isinstance(row, dict)] == ids
    assert [remark in said for said in found.remarks] == [True] if remark else not found.remarks


@pytest.mark.parametrize(
    ("content", "rows", "remark"),
    [
        ("text\na\n\nb\n", ["a", "b"], "1 line without a field, line 3 first: an empty line is no row, so row_index"),
        ("\ntext\r\n\r\na\r\n\r\nb\r\n\r\n", ["a", "b"], "2 lines without a field, line 3 first: "),
        ('text\na\n""\n \nb\n\n\n', ["a", "", " ", "b"], None),
        ("text,id\na,1\n\nb,2\n", ["a", "b"], None),
    ],
)
def test_empty_lines_of_one_column(content: str, rows: list[str], remark: str | None, tmp_path: pathlib.Path) -> None:
    found = opened(tmp_path, content.encode())
    assert [row["text"] for row in values_of(found) if isinstance(row, dict)] == rows
    assert [remark in said for said in found.remarks] == [True] if remark else not found.remarks


def test_columns_of_one_name_are_refused_if_the_job_names_them(tmp_path: pathlib.Path) -> None:
    (tmp_path / "x.csv").write_text("id,note,text,note\n1,x,a,y\n")
    location = InputLocation(str(tmp_path / "x.csv"), named=("text", "note"))
    for _ in range(2):  # from a scan, and from its results
        with pytest.raises(InputError, match=r"x\.csv has two columns named 'note'; rename one of them"):
            open_source(location, tmp_path / "cache")


def test_a_header_without_any_name(tmp_path: pathlib.Path) -> None:
    with pytest.raises(InputError, match=r"x\.csv: its header has no name of a column"):
        opened(tmp_path, b", ,\n1,2,3\n")
    with pytest.raises(InputError, match=r"x\.csv has two columns named 'a'"):
        opened(tmp_path, b",a,a\n1,2,3\n")


def test_the_limit_of_fields_of_the_process_stays(tmp_path: pathlib.Path) -> None:
    before = csv.field_size_limit(1000)
    try:
        found = opened(tmp_path, b"id,text\n1," + b"x" * 300_000 + b"\n")
        assert csv.field_size_limit() == 1000
        assert len(str(values_of(found)[0]["text"])) == 300_000  # type: ignore[call-overload,index]
    finally:
        csv.field_size_limit(before)


def test_many_files_with_remarks_of_their_own_print_few_lines(tmp_path: pathlib.Path) -> None:
    for number in range(25):
        (tmp_path / f"{number:02}.csv").write_text("a,b\n" + "1,2\n" * number + "a,b\n")
    with contextlib.closing(open_source(InputLocation(str(tmp_path)), tmp_path / "cache")) as source:
        *notes, last = input_notes(source)
    assert [note.partition(":")[2][:10] for note in notes] == [f" {number:02}.csv: 1" for number in range(20)]
    assert last == "note: 5 more remarks about single files; `validate` of a file shows its own"
