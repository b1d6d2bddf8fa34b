"""Turns text into token ids with the model's tokenizer, in batches, and cuts texts and ids to a number of tokens."""

import contextlib
import importlib.metadata
import json
import pathlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from batchinf.base.errors import ModelError, RowError, SpecError
from batchinf.base.text import describe_error, error_message, shorten
from batchinf.model.model import Model
from batchinf.source.files import grouped

SECOND_BOS_COLUMN = "has_second_bos"  # a column of results in the journal, not of the output


def begins_with_two(token_ids: Sequence[int], bos_token_id: int | None) -> bool:
    """Whether the first two tokens are both BOS."""
    return len(token_ids) > 1 and token_ids[0] == bos_token_id and token_ids[1] == bos_token_id


def second_bos_lines(num_rows: int) -> list[str]:
    """The warning for people, or nothing. num_rows: rows whose prompts begin with two BOS tokens."""
    if not num_rows:
        return []
    return [
        f"warning: the prompts of {num_rows:,} input rows begin with two BOS tokens: the tokenizer, or the chat "
        "template, writes one, so leave it out of the text"
    ]


Side = Literal["left", "right"]

# Of one call of the tokenizer, which briefly needs about 190 bytes a character.
_BATCH_CHARS = 1 << 20
_PROBED_CHARS_PER_TOKEN = 4
_LONGEST_WORD_TOKENS = 1024

# The packages whose distributions transformers looks up when it is imported. These have the packages' names.
_LOOKED_UP = frozenset({"accelerate", "mistral_common", "torch"})
_importing = threading.Lock()

# A folder with a tokenizer has one of these. The tokenizer's own code is a file such as tokenization_chatglm.py.
_TOKENIZER_FILES = ("tokeniz*", "vocab.*", "merges.txt", "*.model", "*.tiktoken", "tekken.json")


def load_tokenizer(path: str, trust_remote_code: bool) -> Any:
    """The transformers tokenizer in a folder or under a hub id. Raises ModelError, in one line."""
    check_tokenizer(path)
    try:
        with _distributions_when_needed():
            tokenizer_class = _tokenizer_class(path)
        tokenizer = tokenizer_class.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:
        # The model's own code may run here and raise anything.
        reason = error_message(error)
        hint = "; set model.trust_remote_code to true if you trust it" if "trust_remote_code" in reason else ""
        raise ModelError(f"cannot load the tokenizer of '{path}': {shorten(reason, 300)}{hint}") from error
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        # Some tokenizer.json files contain the truncation of their training. Without this, each call would switch it
        # off, which is unsafe while another thread decodes.
        backend.no_truncation()
        backend.no_padding()
    return tokenizer


def check_tokenizer(path: str) -> None:
    """Raise ModelError for the folder of a model that has no tokenizer."""
    folder = pathlib.Path(path)
    if (folder / "config.json").is_file() and not any(next(folder.glob(it), None) for it in _TOKENIZER_FILES):
        # For some types of models, such as qwen3, transformers would make a tokenizer without a vocabulary, and each
        # prompt would be empty.
        raise ModelError(f"'{path}' has no tokenizer.json; copy it there, or name a tokenizer in model.tokenizer")


def _tokenizer_class(path: str) -> Any:
    # AutoTokenizer imports torch, which costs 8 s of processor time. Many folders name a class that does not need it.
    with contextlib.suppress(OSError, ValueError):
        folder = pathlib.Path(path)
        named = json.loads((folder / "tokenizer_config.json").read_bytes()).get("tokenizer_class")
        if named in ("PreTrainedTokenizerFast", "TokenizersBackend") and (folder / "tokenizer.json").is_file():
            from transformers import PreTrainedTokenizerFast

            return PreTrainedTokenizerFast
    from transformers import AutoTokenizer

    return AutoTokenizer


class _Distributions(Mapping[str, list[str]]):
    """The answer of `importlib.metadata.packages_distributions`, which is asked for at the first need."""

    def __init__(self, read_all: Callable[[], Mapping[str, list[str]]]) -> None:
        self._read_all = read_all
        self._all: Mapping[str, list[str]] | None = None

    def __getitem__(self, package: str) -> list[str]:
        if package in _LOOKED_UP:
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                importlib.metadata.distribution(package)
                return [package]
        return self._whole()[package]

    def __iter__(self) -> Iterator[str]:
        return iter(self._whole())

    def __len__(self) -> int:
        return len(self._whole())

    def _whole(self) -> Mapping[str, list[str]]:
        if self._all is None:
            self._all = self._read_all()
        return self._all


@contextlib.contextmanager
def _distributions_when_needed() -> Iterator[None]:
    """Let transformers, which is imported here, not read the metadata of all installed packages.

    It would do so for three of them, in each process: 0.5 s of processor time, a third of its import. One thread at a
    time, because its first import fails on two at once.
    """
    with _importing:
        read_all = importlib.metadata.packages_distributions
        importlib.metadata.packages_distributions = lambda: _Distributions(read_all)
        try:
            yield
        finally:
            importlib.metadata.packages_distributions = read_all


def show(tokenizer: Any, token_ids: Sequence[int]) -> str:
    """A prompt as the model sees it, with special tokens, for people to read."""
    return str(tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def token_texts(tokenizer: Any, token_ids: Sequence[int]) -> list[str]:
    """The text of each token. A token with a part of a character has its name in the vocabulary, such as `âĢ`."""
    known: dict[int, str] = {}
    for token_id in set(token_ids):
        text = show(tokenizer, [token_id])
        if "\ufffd" in text or not text:
            text = str(tokenizer.convert_ids_to_tokens(token_id))
        known[token_id] = text
    return [known[token_id] for token_id in token_ids]


def side_of(tokenizer: Any) -> Side:
    """The side that the tokenizer itself cuts."""
    return "left" if getattr(tokenizer, "truncation_side", None) == "left" else "right"


def enough_tokens(num_tokens: int) -> int:
    """How many tokens a piece of a text needs, so that its first (or last) `num_tokens` are those of the whole text.

    Near the cut, tokens of a piece may differ from those of the whole text: at most those of the longest word. White
    space at the cut may merge with the text after it. So callers strip it, and twice the number is required.
    """
    return 2 * num_tokens + _LONGEST_WORD_TOKENS


class Encoder:
    """A tokenizer. adds_special_tokens: False for texts from a chat template, which writes them itself."""

    def __init__(self, tokenizer: Any, adds_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._adds_special_tokens = adds_special_tokens
        self._ends: tuple[list[int], list[int]] | None = None

    def encode(self, texts: Sequence[str]) -> Iterator[list[int] | RowError]:
        """The ids of each text in order, or the row's error."""
        is_small = sum(map(len, texts)) <= _BATCH_CHARS
        for batch in [list(texts)] if is_small else grouped(texts, len, _BATCH_CHARS):
            yield from self._encode(batch)

    def encode_one(self, text: str) -> list[int] | RowError:
        """The ids of one text, or the row's error. If a batch fails, its texts are encoded one by one with this."""
        try:
            return self._tokenize([text])[0]
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            return RowError("tokenizer_error", f"the tokenizer failed: {describe_error(error)}")

    def begins_with(self, token_id: int | None) -> bool:
        """Whether the tokenizer puts this token before each text."""
        ids = self.encode_one("a")
        return isinstance(ids, list) and ids[:1] == [token_id]

    def probe(self, text: str, num_tokens: int, side: Side) -> tuple[list[int] | RowError, int] | None:
        """The ids of a piece of a text that has at least `num_tokens` tokens, and the piece's length in characters.

        The piece is the text's beginning, or its end with side `left` (the side that is cut). None: the whole text has
        fewer tokens. An error in place of ids: the tokenizer failed. A text that is far too long costs little this way.
        """
        num_chars = _PROBED_CHARS_PER_TOKEN * num_tokens
        while num_chars < len(text):
            ids = self.encode_one(text[:num_chars].rstrip() if side == "right" else text[-num_chars:].lstrip())
            if isinstance(ids, RowError) or len(ids) >= num_tokens:
                return ids, num_chars
            num_chars *= 2
        return None

    def cut(self, ids: list[int], num_tokens: int, side: Side) -> list[int] | None:
        """At most `num_tokens` of the ids, from the beginning or (side `left`) the end; None if no content is left.

        The special tokens that the tokenizer puts around each text stay. The tokenizer's own truncation does the same,
        and so does vLLM's `truncate_prompt_tokens` without a `truncation_side`. (With `truncation_side`, vLLM 0.32 cuts
        the plain ids, and `left` loses the BOS token.)
        """
        if len(ids) <= num_tokens:
            return ids
        before, after = self._find_ends()
        head = len(before) if ids[: len(before)] == before else 0
        tail = len(after) if after and ids[-len(after) :] == after else 0
        room = num_tokens - head - tail
        end = len(ids) - tail
        if room < 1:
            return None
        kept = ids[end - room : end] if side == "left" else ids[head : head + room]
        return [*ids[:head], *kept, *ids[end:]]

    def _find_ends(self) -> tuple[list[int], list[int]]:
        """The ids that the tokenizer puts before and after each text."""
        if self._ends is None:
            bare, dressed = (Encoder(self._tokenizer, adds).encode_one("a") for adds in (False, True))
            self._ends = [], []
            if isinstance(bare, list) and isinstance(dressed, list) and bare:
                for start in range(len(dressed) - len(bare) + 1):
                    if dressed[start : start + len(bare)] == bare:
                        self._ends = dressed[:start], dressed[start + len(bare) :]
                        break
        return self._ends

    def _encode(self, texts: list[str]) -> list[list[int] | RowError]:
        try:
            return list(self._tokenize(texts))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:
            # A panic in the tokenizers library is a BaseException.
            return [self.encode_one(text) for text in texts]

    def _tokenize(self, texts: list[str]) -> list[list[int]]:
        encoding = self._tokenizer(
            texts, add_special_tokens=self._adds_special_tokens, return_attention_mask=False, verbose=False
        )
        ids: list[list[int]] = encoding["input_ids"]
        return ids

    # -- the template filter `truncate_tokens` -------------------------------------------------------------------------

    def cut_text(self, text: str, num_tokens: int, side: Side) -> str:
        """The piece of a text that its first (side `left`: its last) `num_tokens` tokens cover, unchanged.

        The template filter `truncate_tokens` is this method of an encoder without special tokens. The piece has at most
        `num_tokens` tokens when it is tokenised alone. Raises ValueError if the tokenizer fails.
        """
        if num_tokens == 0:
            return ""
        probed = self.probe(text, enough_tokens(num_tokens), side)
        if probed is not None:
            _, num_chars = probed
            piece = text[:num_chars].rstrip() if side == "right" else text[-num_chars:].lstrip()
        elif len(self._ids(text)) <= num_tokens:
            return text
        else:
            piece = text
        if not getattr(self._tokenizer, "is_fast", False):
            return self._longest(piece, num_tokens, side)
        spans = self._spans(piece)
        # A piece that is tokenised alone may have more tokens than inside the text.
        for most in range(min(num_tokens, len(spans)), 0, -1):
            short = _within(piece, spans, most, side)
            if len(self._ids(short)) <= num_tokens:
                return short
        return ""

    def _longest(self, text: str, num_tokens: int, side: Side) -> str:
        """About the longest piece with so many tokens, by bisection: slow tokenizers report no character offsets."""
        least = 0
        most = len(text)
        while least < most:
            middle = (least + most + 1) // 2
            fits = len(self._ids(_piece(text, middle, side))) <= num_tokens
            least, most = (middle, most) if fits else (least, middle - 1)
        return _piece(text, least, side)

    def _ids(self, text: str) -> list[int]:
        ids = self.encode_one(text)
        if isinstance(ids, RowError):
            raise ValueError(ids.error_message)
        return ids

    def _spans(self, text: str) -> list[tuple[int, int]]:
        """Start and end of each token, in characters."""
        encoding = self._tokenizer(
            text, add_special_tokens=self._adds_special_tokens, return_offsets_mapping=True, verbose=False
        )
        spans: list[tuple[int, int]] = encoding["offset_mapping"]
        return spans


def _piece(text: str, num_chars: int, side: Side) -> str:
    return text[:num_chars] if side == "right" else text[len(text) - num_chars :]


def _within(text: str, spans: Sequence[tuple[int, int]], num_tokens: int, side: Side) -> str:
    """The text of the first or last tokens, without a character that also belongs to a token beyond them."""
    if num_tokens >= len(spans):
        return text
    if side == "right":
        return text[: min(spans[num_tokens - 1][1], spans[num_tokens][0])]
    return text[max(spans[-num_tokens][0], spans[-num_tokens - 1][1]) :]


def check_token_ids(field: str, ids: Sequence[int], model: Model) -> None:
    """Raise SpecError if a field of the spec has an id outside the model's vocabulary."""
    if model.vocab_size is not None and ids and max(ids) >= model.vocab_size:
        raise SpecError(f"{field}: got {max(ids)}; the model's vocabulary ends at {model.vocab_size - 1}")
