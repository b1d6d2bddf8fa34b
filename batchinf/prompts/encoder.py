"""Text to token ids by the model's tokenizer, in batches, and the checks of tokens that a spec or a prompt contains."""

import contextlib
import json
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from batchinf.base.errors import ModelError, RowError, SpecError
from batchinf.base.text import describe_error, error_message, shorten
from batchinf.model.identity import Model

SECOND_BOS_COLUMN = "has_second_bos"  # of a result, in the journal; the output has no such column


def begins_with_two(token_ids: Sequence[int], bos_token_id: int | None) -> bool:
    """Whether the first two tokens are both the one that begins a text."""
    return len(token_ids) > 1 and token_ids[0] == bos_token_id and token_ids[1] == bos_token_id


def second_bos_lines(num_rows: int) -> list[str]:
    """For people; nothing where no prompt begins so. num_rows: of the input."""
    if not num_rows:
        return []
    return [
        f"warning: the prompts of {num_rows:,} input rows begin with two BOS tokens: the tokenizer, or the chat "
        "template, writes one, so leave it out of the text"
    ]


Side = Literal["left", "right"]

# Of one call of the tokenizer: it needs about 190 bytes a character for a moment.
_BATCH_CHARS = 1 << 20
_PROBED_CHARS_PER_TOKEN = 4
_LONGEST_WORD_TOKENS = 1024


def load_tokenizer(path: str, trust_remote_code: bool) -> Any:
    """The transformers tokenizer in a folder or under a hub id. Raises ModelError, in one line."""
    try:
        tokenizer = _tokenizer_class(path).from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:
        # Anything at all may come out of here, code of the model's own included.
        reason = error_message(error)
        hint = "; set model.trust_remote_code to true if you trust it" if "trust_remote_code" in reason else ""
        raise ModelError(f"cannot load the tokenizer of '{path}': {shorten(reason, 300)}{hint}") from error
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        # Some tokenizer.json files carry the truncation of their training. Taken out once, here: each call would do
        # it otherwise, and must not while another thread decodes.
        backend.no_truncation()
        backend.no_padding()
    return tokenizer


def _tokenizer_class(path: str) -> Any:
    # AutoTokenizer imports torch and with it 8 s of processor time; a folder may say that the plain class will do.
    with contextlib.suppress(OSError, ValueError):
        folder = pathlib.Path(path)
        named = json.loads((folder / "tokenizer_config.json").read_bytes()).get("tokenizer_class")
        if named in ("PreTrainedTokenizerFast", "TokenizersBackend") and (folder / "tokenizer.json").is_file():
            from transformers import PreTrainedTokenizerFast

            return PreTrainedTokenizerFast
    from transformers import AutoTokenizer

    return AutoTokenizer


def show(tokenizer: Any, token_ids: Sequence[int]) -> str:
    """A prompt as the model sees it, special tokens and all, for people to read."""
    return str(tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def enough_tokens(num_tokens: int) -> int:
    """How many tokens a piece of a text must have for the first, or last, `num_tokens` to be those of the whole.

    Tokens of a piece may differ from those of the whole where it is cut: at most the longest word's, and white space
    may vanish into what follows. So white space at the cut is left out, and twice the number is asked for.
    """
    return 2 * num_tokens + _LONGEST_WORD_TOKENS


class Encoder:
    """A tokenizer, with or without the special tokens that it adds of its own: a chat template writes them itself."""

    def __init__(self, tokenizer: Any, adds_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._adds_special_tokens = adds_special_tokens
        self._ends: tuple[list[int], list[int]] | None = None

    def encode(self, texts: Sequence[str]) -> Iterator[list[int] | RowError]:
        """The ids of each text, in order, or why there are none."""
        for batch in _batches(texts):
            yield from self._encode(batch)

    def encode_one(self, text: str) -> list[int] | RowError:
        """The ids of one text: what a tokenizer (perhaps the model's own code) cannot take must not spoil its batch."""
        try:
            return self._tokenize([text])[0]
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            return RowError("tokenizer_error", f"the tokenizer failed: {describe_error(error)}")

    def begins_with(self, token_id: int | None) -> bool:
        """Whether this token stands before each text."""
        ids = self.encode_one("a")
        return isinstance(ids, list) and ids[:1] == [token_id]

    def probe(self, text: str, num_tokens: int, side: Side = "right") -> tuple[list[int] | RowError, int] | None:
        """The ids of a piece of a text, its beginning or (side left: what is over is cut there) its end, if it has
        `num_tokens` of them or fails, and the piece's length in characters; None if the whole text has fewer.

        A text that is far too long costs no time and memory so.
        """
        num_chars = _PROBED_CHARS_PER_TOKEN * num_tokens
        while num_chars < len(text):
            ids = self.encode_one(text[:num_chars].rstrip() if side == "right" else text[-num_chars:].lstrip())
            if isinstance(ids, RowError) or len(ids) >= num_tokens:
                return ids, num_chars
            num_chars *= 2
        return None

    def cut(self, ids: list[int], num_tokens: int, side: Side) -> list[int] | None:
        """At most `num_tokens` of the ids, from the beginning or (side left) the end; None where no content is left.

        Special tokens that the tokenizer puts around each text, such as the one that begins it, stay, as in the
        tokenizer's own truncation, which is what vLLM's `truncate_prompt_tokens` does where no `truncation_side` is
        named. (Where one is, vLLM 0.32 cuts the plain ids, and with `left` loses the first of them.)
        """
        if len(ids) <= num_tokens:
            return ids
        before, after = self._find_ends()
        head = len(before) if ids[: len(before)] == before else 0
        tail = len(after) if after and ids[-len(after) :] == after else 0
        room, end = num_tokens - head - tail, len(ids) - tail
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
            # A panic in the tokenizers library is no Exception.
            return [self.encode_one(text) for text in texts]

    def _tokenize(self, texts: list[str]) -> list[list[int]]:
        encoding = self._tokenizer(
            texts, add_special_tokens=self._adds_special_tokens, return_attention_mask=False, verbose=False
        )
        ids: list[list[int]] = encoding["input_ids"]
        return ids


class TextCutter:
    """The filter `truncate_tokens`: texts cut to so many of the tokenizer's tokens."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._encoder = Encoder(tokenizer, adds_special_tokens=False)

    def cut(self, text: str, num_tokens: int, side: Side = "right") -> str:
        """What of a text its first (side left: its last) tokens stand for: a piece of it, no character changed.

        It never has more than `num_tokens` tokens of its own. Raises ValueError where the tokenizer fails.
        """
        if num_tokens == 0:
            return ""
        piece = text
        found = self._encoder.probe(text, enough_tokens(num_tokens), side)
        if found is not None:
            piece = text[: found[1]].rstrip() if side == "right" else text[-found[1] :].lstrip()
        if found is None and len(self._ids(text)) <= num_tokens:
            return text
        if not getattr(self._tokenizer, "is_fast", False):
            return self._longest(piece, num_tokens, side)
        spans = self._spans(piece)
        # Tokens of a piece are often, but not always, those of the whole.
        for most in range(min(num_tokens, len(spans)), 0, -1):
            short = _within(piece, spans, most, side)
            if len(self._ids(short)) <= num_tokens:
                return short
        return ""

    def _longest(self, text: str, num_tokens: int, side: Side) -> str:
        """About the longest piece with so many tokens, by halving: tokenizers in Python say nothing of places."""
        least, most = 0, len(text)
        while least < most:
            middle = (least + most + 1) // 2
            fits = len(self._ids(_piece(text, middle, side))) <= num_tokens
            least, most = (middle, most) if fits else (least, middle - 1)
        return _piece(text, least, side)

    def _ids(self, text: str) -> list[int]:
        ids = self._encoder.encode_one(text)
        if isinstance(ids, RowError):
            raise ValueError(ids.error_message)
        return ids

    def _spans(self, text: str) -> list[tuple[int, int]]:
        """Where in the text each token begins and ends, in characters."""
        encoding = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        spans: list[tuple[int, int]] = encoding["offset_mapping"]
        return spans


def _piece(text: str, num_chars: int, side: Side) -> str:
    return text[:num_chars] if side == "right" else text[len(text) - num_chars :]


def _within(text: str, spans: Sequence[tuple[int, int]], num_tokens: int, side: Side) -> str:
    """The text of the first or last tokens; a character of which a token beyond them is a part is left out."""
    if num_tokens >= len(spans):
        return text
    if side == "right":
        return text[: min(spans[num_tokens - 1][1], spans[num_tokens][0])]
    return text[max(spans[-num_tokens][0], spans[-num_tokens - 1][1]) :]


def _batches(texts: Sequence[str]) -> Iterator[list[str]]:
    """Runs of texts of at most `_BATCH_CHARS` characters, or of one text."""
    batch: list[str] = []
    num_chars = 0
    for text in texts:
        if batch and num_chars + len(text) > _BATCH_CHARS:
            yield batch
            batch, num_chars = [], 0
        batch.append(text)
        num_chars += len(text)
    if batch:
        yield batch


def check_token_ids(field: str, ids: Sequence[int], model: Model) -> None:
    """Raise SpecError if the model's vocabulary does not have all of these ids of a field of the spec."""
    if model.vocab_size is not None and ids and max(ids) >= model.vocab_size:
        raise SpecError(f"{field}: got {max(ids)}; the model's vocabulary ends at {model.vocab_size - 1}")
