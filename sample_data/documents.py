"""The corpus as documents: the files of corpus/, what is trained on and what is held out.

A corpus file holds documents, with a line of one "%" between each and the next. One document in twenty is held
out, by its place in its file, so that the held-out text is of the same kinds, in the same shares, as the rest.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CORPUS = Path(__file__).parent / "corpus"
SEPARATOR = "\n%\n"
HELD_OUT_EVERY = 20
HELD_OUT_PLACE = 10
ROLES = {"S: ": "system", "Q: ": "user", "A: ": "assistant"}


@dataclass(frozen=True, slots=True)
class Document:
    """One text of the corpus: `kind` is its file's name without the ending."""

    kind: str
    text: str
    is_held_out: bool


def read_documents(corpus: Path = CORPUS) -> list[Document]:
    """All documents, by file name and then by place; the same text twice counts once, at its first place."""
    unique: dict[str, Document] = {}
    for path in sorted(corpus.glob("*.txt")):
        for place, text in enumerate(path.read_text(encoding="utf-8").rstrip("\n").split(SEPARATOR)):
            is_held_out = place % HELD_OUT_EVERY == HELD_OUT_PLACE
            unique.setdefault(text, Document(path.stem, text, is_held_out))
    return list(unique.values())


def write_documents(kind: str, texts: list[str], corpus: Path) -> None:
    """Write one corpus file."""
    (corpus / f"{kind}.txt").write_text(SEPARATOR.join(texts) + "\n", encoding="utf-8", newline="\n")


def messages(text: str) -> list[dict[str, str]]:
    """The chat messages of a document of kind "chat": S, Q and A begin a message, other lines go on with it."""
    return [{"role": role, "content": content} for role, content in _turns(text)]


def _turns(text: str) -> Iterator[tuple[str, str]]:
    role, lines = "", list[str]()
    for line in text.split("\n"):
        if line[:3] in ROLES:
            if role:
                yield role, "\n".join(lines)
            role, lines = ROLES[line[:3]], [line[3:]]
        else:
            lines.append(line)
    yield role, "\n".join(lines)
