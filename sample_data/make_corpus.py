"""Writes the generated part of the corpus: stories, code and chat, from small grammars and word lists.

Run `python sample_data/make_corpus.py [folder]`: the same files each time. The other corpus files are texts as
they were found, or written by hand, and are not touched.
"""

import argparse
import random
from collections.abc import Callable
from pathlib import Path

from documents import CORPUS, write_documents

NUM_STORIES = 260
NUM_FUNCTIONS = 300
NUM_CHATS = 640

NAMES = ["Anna", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Henry", "Ida", "Jack", "Kate", "Leo", "Mia",
         "Noah", "Olga", "Paul", "Rosa", "Sam", "Tom", "Vera"]  # fmt: skip
ANIMALS = ["dog", "cat", "horse", "fox", "bear", "mouse", "owl", "frog", "rabbit", "duck", "goat", "wolf"]
PLACES = ["the river", "the old mill", "the forest", "the market", "the school", "the garden", "the sea",
          "the mountain", "the village", "the bridge", "the library", "the station"]  # fmt: skip
THINGS = ["a red ball", "a small key", "an old book", "a silver coin", "a letter", "a lamp", "a green stone",
          "a map", "a golden ring", "a wooden box", "a warm coat", "a loaf of bread"]  # fmt: skip
WEATHERS = ["It was raining.", "The sun was shining.", "It was a cold morning.", "The wind blew from the north.",
            "Snow lay on the ground.", "It was a warm evening."]  # fmt: skip
FEELINGS = ["happy", "sad", "tired", "afraid", "glad", "angry", "proud", "hungry"]
MORALS = ["A friend in need is a friend indeed.", "It is better to ask than to guess.",
          "What is lost can be found again.", "Those who share have more.", "No day is like another.",
          "He who waits long enough sees everything.", "A small light is enough in the dark."]  # fmt: skip

CAPITALS = {
    "France": "Paris", "Germany": "Berlin", "Italy": "Rome", "Spain": "Madrid", "Portugal": "Lisbon",
    "England": "London", "Ireland": "Dublin", "Greece": "Athens", "Poland": "Warsaw", "Austria": "Vienna",
    "Norway": "Oslo", "Sweden": "Stockholm", "Finland": "Helsinki", "Denmark": "Copenhagen", "Russia": "Moscow",
    "Japan": "Tokyo", "China": "Beijing", "India": "New Delhi", "Egypt": "Cairo", "Kenya": "Nairobi",
    "Peru": "Lima", "Chile": "Santiago", "Canada": "Ottawa", "Mexico": "Mexico City", "Cuba": "Havana",
}  # fmt: skip
COLOURS = {"grass": "green", "snow": "white", "coal": "black", "the sky": "blue", "a lemon": "yellow",
           "blood": "red", "a carrot": "orange", "chocolate": "brown"}  # fmt: skip
LEGS = {"a dog": "four", "a cat": "four", "a spider": "eight", "a bird": "two", "an ant": "six", "a horse": "four",
        "a bee": "six", "a snake": "no", "a crab": "ten"}  # fmt: skip
WORDS = {
    "dog": ("Hund", "chien", "perro"), "cat": ("Katze", "chat", "gato"), "house": ("Haus", "maison", "casa"),
    "water": ("Wasser", "eau", "agua"), "bread": ("Brot", "pain", "pan"), "book": ("Buch", "livre", "libro"),
    "sun": ("Sonne", "soleil", "sol"), "moon": ("Mond", "lune", "luna"), "tree": ("Baum", "arbre", "árbol"),
    "friend": ("Freund", "ami", "amigo"), "day": ("Tag", "jour", "día"), "night": ("Nacht", "nuit", "noche"),
}  # fmt: skip
LANGUAGES = ["German", "French", "Spanish"]
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
MONTHS = ["January", "February", "March", "April", "May", "June", "July", "August", "September", "October",
          "November", "December"]  # fmt: skip
OPPOSITES = {"hot": "cold", "big": "small", "up": "down", "old": "new", "light": "dark", "day": "night",
             "rich": "poor", "open": "closed", "fast": "slow", "full": "empty", "early": "late"}  # fmt: skip
KINDS = {
    "fruits": ["apple", "pear", "cherry", "plum", "grape", "orange", "banana", "lemon"],
    "animals": ["dog", "cat", "horse", "cow", "sheep", "fox", "wolf", "bear"],
    "colours": ["red", "green", "blue", "yellow", "black", "white", "brown", "orange"],
    "tools": ["hammer", "saw", "knife", "spade", "axe", "needle", "brush", "rope"],
}
NUMBERS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven",
           "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen"]  # fmt: skip
SYSTEMS = ["You are a helpful assistant.", "You answer in one sentence.", "You are a patient teacher.",
           "Answer as briefly as you can."]  # fmt: skip

Turn = tuple[str, str]


def story(rng: random.Random) -> str:
    """A short tale of one child, one animal and one thing."""
    name, friend = rng.sample(NAMES, 2)
    animal, thing, (place, other) = rng.choice(ANIMALS), rng.choice(THINGS), rng.sample(PLACES, 2)
    the_thing = "the " + thing.split(" ", 1)[1]
    said = f'"Have you seen {the_thing}?" asked {friend}.'
    beginnings = [
        f"Once upon a time there was a {animal} who lived near {place}. {rng.choice(WEATHERS)}",
        f"{name} lived in a little house near {place}. {rng.choice(WEATHERS)}",
        f"One day {name} went to {place} with a {animal}. {rng.choice(WEATHERS)}",
        f"There was once a {animal} that belonged to {name}. {rng.choice(WEATHERS)}",
    ]
    middles = [
        f"On the way to {other} {name} found {thing}.",
        f"{name} looked for {thing} everywhere, but it was not there.",
        f"The {animal} was {rng.choice(FEELINGS)}, because it had lost {thing}.",
        f"{friend} came along the road and gave {name} {thing}.",
        f'{said} "No," said {name}, "but the {animal} has."',
        f"They walked to {other}, and there they sat down and ate.",
        f"The {animal} ran to {other} as fast as it could.",
        f"{name} was {rng.choice(FEELINGS)} and did not know what to do.",
        f'"Come with me," said the {animal}, "and I will show you {other}."',
    ]
    ends = [
        f"So {name} took {the_thing} home, and everybody was {rng.choice(FEELINGS)}.",
        f"In the evening {name} and {friend} went home together.",
        f"From that day on the {animal} and {name} were friends.",
        f"And {the_thing} was never seen again.",
    ]
    sentences = [rng.choice(beginnings), *rng.sample(middles, rng.randint(2, 4)), rng.choice(ends)]
    tale = " ".join(sentences)
    return f"{tale}\n\n{rng.choice(MORALS)}" if rng.random() < 0.4 else tale


def function(rng: random.Random) -> str:
    """A small Python function with its docstring, sometimes with a test after it."""
    return rng.choice([_arithmetic, _loop, _text, _condition, _class])(rng)


def _arithmetic(rng: random.Random) -> str:
    name, sign, word = rng.choice(
        [
            ("add", "+", "sum"),
            ("subtract", "-", "difference"),
            ("multiply", "*", "product"),
            ("divide", "/", "quotient"),
        ]
    )
    a, b = rng.choice([("a", "b"), ("x", "y"), ("left", "right"), ("first", "second")])
    text = f'def {name}({a}, {b}):\n    """Return the {word} of {a} and {b}."""\n    return {a} {sign} {b}'
    if name == "divide":
        return text
    x, y = rng.randint(1, 9), rng.randint(1, 9)
    result = {"add": x + y, "subtract": x - y, "multiply": x * y}[name]
    return f"{text}\n\n\ndef test_{name}():\n    assert {name}({x}, {y}) == {result}"


def _loop(rng: random.Random) -> str:
    items, item = rng.choice([("numbers", "number"), ("values", "value"), ("items", "item"), ("prices", "price")])
    total = rng.choice(["total", "result"])
    return rng.choice(
        [
            f'def sum_{items}({items}):\n    """Return the sum of the {items}."""\n    {total} = 0\n'
            f"    for {item} in {items}:\n        {total} += {item}\n    return {total}",
            f'def count_{items}({items}):\n    """Return how many {items} there are."""\n    return len({items})',
            f'def largest_{item}({items}):\n    """Return the largest of the {items}, or None."""\n'
            f"    {total} = None\n    for {item} in {items}:\n        if {total} is None or {item} > {total}:\n"
            f"            {total} = {item}\n    return {total}",
            f'def double_{items}({items}):\n    """Return the {items}, each times two."""\n'
            f"    return [{item} * 2 for {item} in {items}]",
            f"for {item} in range({rng.randint(2, 20)}):\n    print({item})",
        ]
    )


def _text(rng: random.Random) -> str:
    word = rng.choice(["word", "line", "text", "name"])
    return rng.choice(
        [
            f'def reverse_{word}({word}):\n    """Return the {word} backwards."""\n    return {word}[::-1]',
            f'def is_empty({word}):\n    """Say whether the {word} is empty."""\n    return len({word}) == 0',
            f'def shout({word}):\n    """Return the {word} in capitals."""\n    return {word}.upper() + "!"',
            f'def count_{word}s(path):\n    """Count the {word}s in a file."""\n    with open(path) as file:\n'
            f"        return sum(1 for {word} in file)",
            f'def greet(name):\n    """Greet somebody by name."""\n    print(f"{rng.choice(["Hello", "Good morning"])},'
            ' {name}!")\n\n\n' + f'greet("{rng.choice(NAMES)}")',
        ]
    )


def _condition(rng: random.Random) -> str:
    n, limit = rng.choice(["n", "number", "value"]), rng.randint(2, 9)
    return rng.choice(
        [
            f'def is_even({n}):\n    """Say whether {n} is even."""\n    return {n} % 2 == 0',
            f'def is_divisible({n}):\n    """Say whether {n} is divisible by {limit}."""\n'
            f"    return {n} % {limit} == 0",
            f'def absolute({n}):\n    """Return {n} without its sign."""\n    if {n} < 0:\n'
            f"        return -{n}\n    return {n}",
            f'def factorial({n}):\n    """Return the product of all numbers up to {n}."""\n    if {n} < 2:\n'
            f"        return 1\n    return {n} * factorial({n} - 1)",
            f'def fibonacci({n}):\n    """Return the Fibonacci number at place {n}."""\n    a, b = 0, 1\n'
            f"    for _ in range({n}):\n        a, b = b, a + b\n    return a",
        ]
    )


def _class(rng: random.Random) -> str:
    animal = rng.choice(ANIMALS)
    field, value = rng.choice([("name", rng.choice(NAMES)), ("colour", "brown"), ("place", "garden")])
    title = animal.capitalize()
    return (
        f'class {title}:\n    """A {animal} with a {field}."""\n\n    def __init__(self, {field}):\n'
        f'        self.{field} = {field}\n\n    def __repr__(self):\n        return f"{title}({{self.{field}}})"\n\n\n'
        f'{animal} = {title}("{value}")\nprint({animal}.{field})'
    )


def _capital(rng: random.Random) -> Turn:
    country = rng.choice(list(CAPITALS))
    city = CAPITALS[country]
    return rng.choice(
        [
            (f"What is the capital of {country}?", f"The capital of {country} is {city}."),
            (f"Which country has the capital {city}?", f"{city} is the capital of {country}."),
            (f"Is {city} the capital of {country}?", f"Yes, {city} is the capital of {country}."),
        ]
    )


def _thing(rng: random.Random) -> Turn:
    thing, animal = rng.choice(list(COLOURS)), rng.choice(list(LEGS))
    return rng.choice(
        [
            (f"What colour is {thing}?", f"{thing[0].upper()}{thing[1:]} is {COLOURS[thing]}."),
            (f"How many legs does {animal} have?", f"{animal[0].upper()}{animal[1:]} has {LEGS[animal]} legs."),
        ]
    )


def _word(rng: random.Random) -> Turn:
    word, place, opposite = rng.choice(list(WORDS)), rng.randrange(len(LANGUAGES)), rng.choice(list(OPPOSITES))
    language, foreign = LANGUAGES[place], WORDS[word][place]
    return rng.choice(
        [
            (f'What is the word for "{word}" in {language}?', f'The {language} word for "{word}" is "{foreign}".'),
            (f'Translate "{foreign}" into English.', f'"{foreign}" means "{word}".'),
            (f'What is the opposite of "{opposite}"?', f'The opposite of "{opposite}" is "{OPPOSITES[opposite]}".'),
            (f'How do you spell "{word}"?', f"{'-'.join(word.upper())}."),
        ]
    )


def _order(rng: random.Random) -> Turn:
    unit, names = rng.choice([("day", DAYS), ("month", MONTHS)])
    place, (a, b) = rng.randrange(len(names)), (rng.randint(0, 9), rng.randint(0, 9))
    after = names[(place + 1) % len(names)]
    return rng.choice(
        [
            (f"Which {unit} comes after {names[place]}?", f"After {names[place]} comes {after}."),
            (f"Which {unit} comes before {after}?", f"Before {after} comes {names[place]}."),
            (f"What is {a} plus {b}?", f"{a} plus {b} is {a + b}."),
            (
                f"What is {NUMBERS[a]} plus {NUMBERS[b]}?",
                f"{NUMBERS[a].capitalize()} plus {NUMBERS[b]} is {NUMBERS[a + b]}.",
            ),
        ]
    )


def _list(rng: random.Random) -> Turn:
    kind, num = rng.choice(list(KINDS)), rng.randint(2, 4)
    names = rng.sample(KINDS[kind], num)
    if rng.random() < 0.5:
        listed = "\n".join(f"{place}. {name}" for place, name in enumerate(names, 1))
        return f"Write a list of {NUMBERS[num]} {kind}.", listed
    return f"Name {NUMBERS[num]} {kind}.", f"{', '.join(names[:-1]).capitalize()} and {names[-1]}."


def _greeting(rng: random.Random) -> Turn:
    name = rng.choice(NAMES)
    return rng.choice(
        [
            ("Hello!", "Hello! How can I help you?"),
            (f"My name is {name}.", f"Good morning, {name}! What can I do for you?"),
            (f"Good morning, I am {name}. Who are you?", f"Good morning, {name}. I am a very small model."),
            ("Thank you very much.", "You are welcome."),
            (f"Please write a birthday wish for {name}.", f"Happy birthday, {name}! I wish you a good year."),
        ]
    )


def _code(rng: random.Random) -> Turn:
    text = function(rng)
    while '"""' not in text or not text.startswith("def "):
        text = function(rng)
    aim = text.split('"""')[1].rstrip(".")
    return f"Write a Python function: {aim[0].lower()}{aim[1:]}.", text


def _tale(rng: random.Random) -> Turn:
    text = story(rng)
    animal = next((animal for animal in ANIMALS if animal in text), "child")
    return f"Tell me a short story about a {animal}.", text.split("\n")[0]


TURNS: list[Callable[[random.Random], Turn]] = [
    _capital, _capital, _thing, _word, _word, _order, _order, _list, _greeting, _code, _tale,
]  # fmt: skip


def chat(rng: random.Random) -> str:
    """A conversation of one to three questions, sometimes with a system message first."""
    lines = [f"S: {rng.choice(SYSTEMS)}"] if rng.random() < 0.35 else []
    for _ in range(rng.choice([1, 1, 1, 2, 2, 3])):
        question, answer = rng.choice(TURNS)(rng)
        lines += [f"Q: {question}", f"A: {answer}"]
    return "\n".join(lines)


def distinct(make: Callable[[random.Random], str], num: int, seed: int) -> list[str]:
    """`num` different texts; a text that comes again is thrown away, so that none is both trained on and held out."""
    rng, texts = random.Random(seed), dict[str, None]()
    while len(texts) < num:
        texts[make(rng)] = None
    return list(texts)


def main() -> None:
    """Write the three generated files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=CORPUS)
    folder = parser.parse_args().folder
    write_documents("stories", distinct(story, NUM_STORIES, seed=1), folder)
    write_documents("code", distinct(function, NUM_FUNCTIONS, seed=2), folder)
    write_documents("chat", distinct(chat, NUM_CHATS, seed=3), folder)


if __name__ == "__main__":
    main()
