"""Writes questions.jsonl: 240 questions with four choices each, of which one is right.

Run `python sample_data/make_questions.py [folder]`. The same file each time; needs nothing but Python.
"""

import argparse
import json
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

FOLDER = Path(__file__).parent
SEED = 11
NUM_CHOICES = 4

ONES = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = "January February March April May June July August September October November December".split()
LETTERS = "abcdefghijklmnopqrstuvwxyz"

OPPOSITES = """hot cold|big small|light dark|early late|full empty|open shut|rich poor|wet dry|old young|fast slow
high low|hard soft|near far|thick thin|loud quiet|long short|true false|first last|strong weak|sweet bitter
asleep awake|above below|before after|always never""".replace("\n", "|")
YOUNG = """dog puppy|cat kitten|cow calf|horse foal|sheep lamb|goat kid|pig piglet|hen chick|duck duckling|goose gosling
lion cub|frog tadpole|deer fawn|swan cygnet|owl owlet|eel elver""".replace("\n", "|")
PLURALS = """child children|mouse mice|goose geese|tooth teeth|foot feet|man men|woman women|ox oxen|leaf leaves
knife knives|wolf wolves|city cities|box boxes|church churches|sheep sheep|person people""".replace("\n", "|")
KINDS = {
    "a bird": "owl heron sparrow crow".split(),
    "a fish": "trout salmon herring carp".split(),
    "a tree": "oak birch willow maple".split(),
    "a tool": "hammer saw chisel spade".split(),
    "a colour": "blue white yellow green".split(),
    "a metal": "iron zinc lead tin".split(),
    "a vegetable": "carrot turnip leek radish".split(),
    "an instrument": "violin flute harp trumpet".split(),
}
UNITS = [
    ("minutes", "hours", 60), ("seconds", "minutes", 60), ("hours", "days", 24), ("days", "weeks", 7),
    ("months", "years", 12), ("metres", "kilometres", 1000), ("grams", "kilograms", 1000),
    ("centimetres", "metres", 100), ("millimetres", "centimetres", 10), ("eggs", "dozens", 12),
]  # fmt: skip

Question = tuple[str, str, Sequence[str]]
"""The question, the right answer, and others to draw from, of which the right one may be one."""


def pairs(text: str) -> list[tuple[str, str]]:
    """`a b|c d` as pairs."""
    return [(first, second) for first, second in (pair.split() for pair in text.split("|"))]


def near(number: int, draw: random.Random) -> list[str]:
    """Numbers that might be taken for this one."""
    offsets = [offset for offset in (-11, -10, -3, -2, -1, 1, 2, 3, 10, 11) if number + offset >= 0]
    return [str(number + offset) for offset in draw.sample(offsets, NUM_CHOICES - 1)]


def sums(draw: random.Random) -> Iterator[Question]:
    """Adding, taking away, multiplying."""
    while True:
        left, right = draw.randint(2, 60), draw.randint(2, 60)
        yield f"What is {left} + {right}?", str(left + right), near(left + right, draw)
        left, right = max(left, right), min(left, right)
        yield f"What is {left} - {right}?", str(left - right), near(left - right, draw)
        left, right = draw.randint(2, 12), draw.randint(2, 12)
        yield f"What is {left} x {right}?", str(left * right), near(left * right, draw)


def orders(draw: random.Random) -> Iterator[Question]:
    """The largest, the smallest, the next, the one in between."""
    while True:
        numbers = draw.sample(range(1, 999), NUM_CHOICES)
        listed = ", ".join(map(str, numbers))
        yield f"Which number is the largest: {listed}?", str(max(numbers)), list(map(str, numbers))
        yield f"Which number is the smallest: {listed}?", str(min(numbers)), list(map(str, numbers))
        start, step = draw.randint(1, 40), draw.randint(2, 9)
        run = [start + step * place for place in range(5)]
        yield f"Which number comes next: {', '.join(map(str, run[:4]))}?", str(run[4]), near(run[4], draw)
        words = draw.sample(ONES, NUM_CHOICES)
        yield f"Which of these words comes first in a dictionary: {', '.join(words)}?", min(words), words


def units(draw: random.Random) -> Iterator[Question]:
    """How many of the small make so many of the large."""
    while True:
        small, large, factor = draw.choice(UNITS)
        number = draw.randint(2, 9)
        right = number * factor
        others = [number * other for other in (7, 10, 12, 24, 60, 100, 1000) if other != factor]
        yield f"How many {small} are there in {number} {large}?", str(right), list(map(str, draw.sample(others, 3)))


def words(draw: random.Random) -> Iterator[Question]:
    """Opposites, young animals, plurals, and what is of a kind."""
    tables = [(OPPOSITES, "What is the opposite of {}?"), (YOUNG, "What is the young of a {} called?"),
              (PLURALS, "What is the plural of the word {}?")]  # fmt: skip
    while True:
        for table, question in tables:
            known = pairs(table)
            word, right = draw.choice(known)
            yield question.format(word), right, [other for _, other in known]
        kind = draw.choice([*KINDS])
        others = [draw.choice(names) for other, names in KINDS.items() if other != kind]
        yield f"Which of these is {kind}?", draw.choice(KINDS[kind]), others


def calendar(draw: random.Random) -> Iterator[Question]:
    """Days and months that follow others."""
    while True:
        for names, unit in ((DAYS, "day"), (MONTHS, "month")):
            place = draw.randrange(len(names))
            yield f"Which {unit} comes after {names[place]}?", names[(place + 1) % len(names)], names
            yield f"Which {unit} comes before {names[place]}?", names[place - 1], names
            yield f"Which {unit} comes two {unit}s after {names[place]}?", names[(place + 2) % len(names)], names


def spelling(draw: random.Random) -> Iterator[Question]:
    """Letters, and numbers as words."""
    while True:
        number = draw.randrange(len(ONES))
        yield f"How is the number {number} written as a word?", ONES[number], ONES
        place = draw.randrange(1, 25)
        yield f"Which letter comes after {LETTERS[place]} in the alphabet?", LETTERS[place + 1], LETTERS
        word = draw.choice([first for first, _ in pairs(OPPOSITES)])
        yield f"How many letters has the word {word}?", str(len(word)), near(len(word), draw)


KINDS_OF_QUESTIONS: dict[str, Callable[[random.Random], Iterator[Question]]] = {
    "arithmetic": sums, "order": orders, "units": units, "words": words, "calendar": calendar, "spelling": spelling,
}  # fmt: skip
NUM_EACH = 40


def rows() -> Iterator[dict[str, object]]:
    """All questions, no two alike; the right choice stands in each place about as often."""
    for category, make in KINDS_OF_QUESTIONS.items():
        draw = random.Random(f"{SEED} {category}")
        asked: set[str] = set()
        for question, right, others in make(draw):
            wrong = sorted({*others} - {right})
            if question in asked or len(wrong) < NUM_CHOICES - 1:
                continue
            asked.add(question)
            choices = [right, *draw.sample(wrong, NUM_CHOICES - 1)]
            draw.shuffle(choices)
            yield {
                "id": f"{category}-{len(asked):02}",
                "category": category,
                "question": question,
                "choices": choices,
                "answer": choices.index(right),
            }
            if len(asked) == NUM_EACH:
                break


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER)
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows())
    (parser.parse_args().folder / "questions.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
