"""Writes the sample inputs: prompts.jsonl, prompts.parquet and prompts.csv, the same rows in each, and hostile.jsonl.

Run `python sample_data/make_prompts.py [folder]` once tiny-llama is there: its tokenizer says what fits. The same
files each time.
"""

import argparse
import csv
import json
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from documents import read_documents
from tokenizers import Tokenizer

FOLDER = Path(__file__).parent
SEED = 7
# A model length of 512 leaves room for 64 more tokens after 448; the chat template adds at most 18 to a prompt.
MAX_PROMPT_TOKENS = 430
OVER_LONG_TOKENS = 700
MEGABYTE = 1 << 20
SCHEMA = pa.schema([(name, pa.string()) for name in ("id", "prompt", "category", "language")])

# The order of the languages in corpus/rights.txt, which has the thirty articles of each.
RIGHTS = "en fr de es pt it nl sv pl tr vi ru el ja zh ko he ar hi".split()
NUM_ARTICLES = 30

TINY = "a b Z i ? ! . , 0 7 é ß ñ ø я Ж ω 字 人 あ ア 한 א ع अ 🙂 🚀 ∑ € —".split(" ")

UNICODE = [
    ("und", "😀😃😄😁"),
    ("en", "I ❤️ my 🐶 because"),
    ("und", "👩‍👩‍👧‍👦 👍🏽 🏳️‍🌈"),
    ("und", "🇫🇷🇯🇵🇧🇷🇰🇪"),
    ("und", "1️⃣ 2️⃣ 3️⃣"),
    ("en", "cafe\u0301 is not café, and nai\u0308ve is not naïve"),
    ("en", "Z̷a̷l̷g̷o̷ comes"),
    ("vi", "Tiê\u0301ng Việt có dấu"),
    ("ko", "\u1112\u1161\u11ab\u1100\u1173\u11af"),
    ("und", "ﬁne ﬂow ﬃ ½ ² ™"),
    ("und", "ＦＵＬＬ　ＷＩＤＴＨ"),
    ("und", "𝒜𝒷𝒸 𝔄𝔟𝔠 𝟘𝟙𝟚"),
    ("und", "𠜎𠜱𠝹𠱓"),
    ("got", "𐌰𐌱𐌲𐌳 𐌴𐌵𐌶"),
    ("und", "𓀀𓁐𓂀"),
    ("he", "שלום עולם"),
    ("ar", "السلام عليكم ورحمة الله"),
    ("he", "The word שלום means"),
    ("ar", "Price: ١٢٣ (one hundred, twenty-three)"),
    ("und", "\u202eabc\u202c def"),
    ("en", "zero\u200bwidth\u200dspaces"),
    ("en", "soft\u00adhyphen and no\u00a0break"),
    ("en", "line\u2028separator and next\u0085line"),
    ("en", "\ufeffA byte order mark stands before this"),
    ("th", "สวัสดีชาวโลก"),
    ("hi", "नमस्ते दुनिया"),
    ("bn", "ওহে বিশ্ব"),
    ("ta", "வணக்கம் உலகம்"),
    ("ka", "გამარჯობა მსოფლიო"),
    ("hy", "Բարեւ աշխարհ"),
    ("am", "ሰላም ለዓለም"),
    ("zh", "「你好」，世界！"),
    ("ja", "こんにちは、世界。ｶﾀｶﾅも。"),
    ("ja", "葛\U000e0100飾区"),
    ("el", "Γειά σου Κόσμε"),
    ("uk", "Привіт, світе! Її їжак"),
    ("tr", "İstanbul ılık, IĞDIR iğde"),
    ("de", "STRASSE, Straße, STRAẞE"),
    ("und", "∀x∈ℝ: ⌈x⌉ = −⌊−x⌋, α ∧ ¬β = ¬(¬α ∨ β)"),
    ("und", "┌─┬─┐\n│ │ │\n└─┴─┘"),
    ("und", "♔♕♖♗♘♙ ♚♛♜♝♞♟"),
    ("und", "←↑→↓ ⇒ ⇔ ⟶"),
    ("und", "⠓⠑⠇⠇⠕ ⠺⠕⠗⠇⠙"),
    ("und", "\ue000 private \uf8ff use"),
]

QUOTED = [
    ("en", 'He said, "I will come, if I can," and went.'),
    ("en", '"Quoted from end to end"'),
    ("en", "It's Tom's, isn't it?"),
    ("en", 'A lone " quote'),
    ("en", 'Two "" quotes, and three """'),
    ("en", ",starts with a comma"),
    ("en", "ends with a comma,"),
    ("en", "a,b,c\n1,2,3\n4,5,"),
    ("en", "a;b;c\n1;2;3\n4;5;"),
    ("en", "name\tplace\tday\nAnna\tthe market\t"),
    ("en", "First line\nSecond line\n\nFourth line\n"),
    ("en", "\nStarts with a new line"),
    ("en", "  starts with two spaces"),
    ("en", "ends with a space "),
    ("en", "back\\slash \\n \\t \\u0041 \\"),
    ("en", '{"name": "Anna", "age":'),
    ("en", "[1, 2, 3, null, true,"),
    ("en", "<p>Hello, <b>world</b>"),
    ("en", "# A title\n\n- one\n- two\n-"),
    ("en", "| a | b |\n|---|---|\n| 1 |"),
    ("en", "SELECT name, place FROM people WHERE name = 'O''Hara' AND"),
    ("en", "=SUM(A1:A9)"),
    ("en", "100% of {prompt} and {{braces}} and %s and $HOME"),
    ("en", "{{ prompt }} {% if x %}"),
    ("en", "<|not_a_special_token|> and <s> and </s>"),
    ("en", "https://example.org/a?b=c&d=e#f"),
    ("en", "anna@example.org,"),
    ("en", "a" * 200),
    ("en", "ha " * 60),
    ("en", "." * 100),
    ("fr", "« Bonjour », dit-il, « ça va ? »"),
    ("de", "„Guten Tag“, sagte er, „wie geht’s?“"),
    ("es", "¡Hola! ¿Qué tal, señor?"),
]


@dataclass(frozen=True, slots=True)
class Draft:
    """A prompt before it has an id."""

    prompt: str
    category: str
    language: str


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of the prompts files."""

    id: str
    prompt: str
    category: str
    language: str


def beginning(text: str, rng: random.Random) -> str:
    """The first few words of a text, never all of them."""
    words = text.split(" ")
    num_words = min(rng.randint(3, 14), len(words) - 1)
    return " ".join(words[:num_words]) if num_words > 0 else text[: max(1, len(text) // 3)]


def first_lines(text: str, rng: random.Random) -> str:
    """One to three first lines of a text, with the line break after them."""
    lines = text.split("\n")
    return "\n".join(lines[: rng.randint(1, min(3, len(lines)))]) + "\n"


def drafts(texts: dict[str, list[str]], tokenizer: Tokenizer, rng: random.Random) -> Iterator[Draft]:
    """All prompts, in the order of their categories; the same prompt may come twice."""
    for kind, num in [("prose", 40), ("drama", 40), ("stories", 40), ("fables", 12)]:
        for text in rng.sample(texts[kind], num):
            yield Draft(beginning(text, rng), "continuation", "en")
    for text in rng.sample(texts["sonnets"], 45):
        yield Draft(first_lines(text, rng), "verse", "en")
    for text in rng.sample(texts["code"], 60):
        yield Draft(first_lines(text, rng), "code", "py")
    for text in rng.sample(texts["chat"], 120):
        question = text[text.index("Q: ") + 3 :].split("\nA: ")[0]
        yield Draft(question if rng.random() < 0.5 else f"Q: {question}\nA:", "question", "en")
    for place, language in enumerate(RIGHTS):
        articles = texts["rights"][place * NUM_ARTICLES : (place + 1) * NUM_ARTICLES]
        for text in rng.sample(articles, 9):
            yield Draft(article_beginning(text, rng), "rights", language)
    for character in TINY:
        yield Draft(character, "tiny", "und")
    for language, text in UNICODE:
        yield Draft(text, "unicode", language)
    for language, text in QUOTED:
        yield Draft(text, "quoting", language)
    for kind in ["prose", "drama", "sonnets", "stories", "code"]:
        for _ in range(8):
            text = long_text(texts[kind], rng.randint(200, MAX_PROMPT_TOKENS), tokenizer, rng)
            yield Draft(text, "long", "py" if kind == "code" else "en")


def article_beginning(text: str, rng: random.Random) -> str:
    """A first part of an article, by characters: not all languages put spaces between words."""
    return text[: max(4, int(min(len(text), 300) * rng.uniform(0.15, 0.6)))]


def long_text(texts: list[str], num_tokens: int, tokenizer: Tokenizer, rng: random.Random) -> str:
    """Texts put together and cut to at most so many tokens; the cut text is encoded again, since a cut can add one."""
    whole = "\n\n".join(rng.sample(texts, min(30, len(texts))))
    end = tokenizer.encode(whole).offsets[num_tokens - 1][0]
    while len(tokenizer.encode(whole[:end]).ids) > num_tokens:
        end -= 1
    return whole[:end]


def prompts(texts: dict[str, list[str]], tokenizer: Tokenizer) -> list[Prompt]:
    """The rows: each prompt once, ids counted in each language, in a shuffled order so that lengths are mixed."""
    rng = random.Random(SEED)
    unique = {draft.prompt: draft for draft in drafts(texts, tokenizer, rng)}
    counts = Counter[str]()
    rows = []
    for draft in unique.values():
        counts[draft.language] += 1
        row_id = f"{draft.language}-{counts[draft.language]:04d}"
        rows.append(Prompt(row_id, draft.prompt, draft.category, draft.language))
        num_tokens = len(tokenizer.encode(draft.prompt).ids)
        if num_tokens > MAX_PROMPT_TOKENS:
            raise ValueError(f"prompt {row_id} has {num_tokens} tokens, but at most {MAX_PROMPT_TOKENS} fit")
    rng.shuffle(rows)
    return rows


def write_prompts(rows: list[Prompt], folder: Path) -> None:
    """The rows in each of the three formats."""
    records = [asdict(row) for row in rows]
    with (folder / "prompts.jsonl").open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    with (folder / "prompts.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, SCHEMA.names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(records)
    pq.write_table(pa.Table.from_pylist(records, schema=SCHEMA), folder / "prompts.parquet", compression="zstd")


def hostile_lines(texts: dict[str, list[str]], tokenizer: Tokenizer) -> Iterator[bytes]:
    """A good row, then a bad one, and so on, each kind of bad row once; good ids count up, bad ones name their kind."""
    rng = random.Random(SEED)
    over_long = long_text(texts["prose"], OVER_LONG_TOKENS, tokenizer, rng)
    bad = [
        json_line({"id": "bad-empty", "kind": "empty", "prompt": ""}),
        json_line({"id": "bad-missing", "kind": "missing_column"}),
        json_line({"id": "bad-null", "kind": "null", "prompt": None}),
        json_line({"id": "bad-type", "kind": "wrong_type", "prompt": 42}),
        json_line({"id": "bad-over-long", "kind": "over_long", "prompt": over_long}),
        b'{"id": "bad-broken", "kind": "broken_json", "prompt": "The line ends before its\n',
        json_line({"id": "bad-surrogate", "kind": "lone_surrogate", "prompt": "A half of a pair: \ud800 and on"}),
        b'{"id": "bad-utf8", "kind": "invalid_utf8", "prompt": "A byte that is no text: \xff and on"}\n',
        megabyte_line(texts["prose"]),
    ]
    good = rng.sample(texts["stories"], len(bad) + 1)
    for place, text in enumerate(good):
        yield json_line({"id": f"good-{place + 1:02d}", "kind": "good", "prompt": beginning(text, rng)})
        if place < len(bad):
            yield bad[place]


def megabyte_line(texts: list[str]) -> bytes:
    """A row whose line, its end included, is 1 MiB: prose, again and again."""
    frame = len(json_line({"id": "bad-megabyte", "kind": "megabyte", "prompt": ""}))
    plain = "".join(char for char in " ".join(texts) if char.isascii() and char not in '"\\\n')
    room = MEGABYTE - frame
    prompt = (plain * (room // len(plain) + 1))[:room]
    return json_line({"id": "bad-megabyte", "kind": "megabyte", "prompt": prompt})


def json_line(record: dict[str, object]) -> bytes:
    """One line, all of it ASCII: a lone surrogate can only be written as an escape."""
    return json.dumps(record).encode("ascii") + b"\n"


def main() -> None:
    """Write the four files and say what is in them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER)
    folder = parser.parse_args().folder
    tokenizer = Tokenizer.from_file(str(FOLDER / "tiny-llama" / "tokenizer.json"))
    texts: dict[str, list[str]] = {}
    for document in read_documents():
        texts.setdefault(document.kind, []).append(document.text)
    if len(texts["rights"]) != NUM_ARTICLES * len(RIGHTS):
        raise ValueError(f"corpus/rights.txt has {len(texts['rights'])} articles, not {NUM_ARTICLES} a language")
    rows = prompts(texts, tokenizer)
    write_prompts(rows, folder)
    (folder / "hostile.jsonl").write_bytes(b"".join(hostile_lines(texts, tokenizer)))
    print(f"{len(rows)} prompts: {dict(Counter(row.category for row in rows))}")


if __name__ == "__main__":
    main()
