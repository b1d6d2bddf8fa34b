"""Row → text → token ids, in batches: the prompt column or the template, and every reason why a row has no prompt.

Token ids are those that vLLM's `LLM.generate` makes of the same text. Reading rows is left to `source`.
"""

import contextlib
import difflib
import itertools
import json
import pathlib
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jinja2
import jinja2.meta

from batchinf.errors import ModelError, RowError, SpecError
from batchinf.records import Prompt
from batchinf.row_sampling import RowSampling, wanted_columns
from batchinf.sandbox import LONGEST_TEXT, Environment, NullPrinted, RanAway
from batchinf.source import Row
from batchinf.spec import JobSpec

# Of one call of the tokenizer: it needs about 190 bytes a character for a moment.
_BATCH_CHARS = 1 << 20
_PROBED_CHARS_PER_TOKEN = 4
_LONGEST_WORD_TOKENS = 1024
_SHOWN_COLUMNS = 20


def load_tokenizer(path: str, trust_remote_code: bool) -> Any:
    """The transformers tokenizer in a folder or under a hub id. Raises ModelError, in one line."""
    try:
        tokenizer = _tokenizer_class(path).from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:
        # Anything at all may come out of here, code of the model's own included.
        reason = " ".join(str(error).split()) or type(error).__name__
        hint = "; set model.trust_remote_code to true if you trust it" if "trust_remote_code" in reason else ""
        raise ModelError(f"cannot load the tokenizer of '{path}': {_shorten(reason, 300)}{hint}") from error
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


def check_columns(spec: JobSpec, schema_names: Iterable[str]) -> None:
    """Raise SpecError if the spec names a column that the input does not have."""
    names = list(schema_names)
    where = "input.prompt_column" if spec.input.prompt_template is None else "input.prompt_template"
    wanted = [(where, name) for name in Renderer(spec).columns]
    wanted += [("input.id_column", spec.input.id_column)] if spec.input.id_column is not None else []
    wanted += [("output.keep_columns", name) for name in spec.output.keep_columns]
    wanted += wanted_columns(spec.sampling)
    for field, name in wanted:
        if name not in names:
            close = difflib.get_close_matches(name, names, n=1)
            guess = f"; did you mean '{close[0]}'?" if close else ";"
            raise SpecError(f"{field}: the input has no column '{name}'{guess} it has: {_list(names)}")


class Renderer:
    """Row → text."""

    def __init__(self, spec: JobSpec) -> None:
        """Compile the template. Raises SpecError, with its line, if that cannot be done."""
        self._column = spec.prompt_column
        self._template: jinja2.Template | None = None
        self.columns: tuple[str, ...] = (self._column,)  # the input columns that a prompt is made of
        if spec.input.prompt_template is not None:
            self._template, self.columns = _compile(spec.input.prompt_template)

    def render(self, row: Row) -> str | RowError:
        """The prompt's text, never empty, always encodable as UTF-8; or why there is none."""
        if row.error is not None:
            return RowError("unreadable", row.error)
        text = self._take(row.values) if self._template is None else _fill(self._template, self.columns, row.values)
        return text if isinstance(text, RowError) else _check_text(text)

    def _take(self, values: Mapping[str, object]) -> str | RowError:
        if self._column not in values:
            others = f"; it has: {_list(values)}" if values else ""
            return RowError("missing_column", f"row has no column '{self._column}'{others}")
        value = values[self._column]
        if value is None:
            return RowError("null_prompt", f"column '{self._column}' is null")
        if not isinstance(value, str):
            return RowError("wrong_type", f"got {type(value).__name__} in column '{self._column}'; expected a string")
        return value


class PromptBuilder:
    """Rows → prompts. vocab_size: the model's; ids at or above it would crash the engine (None: not known)."""

    def __init__(self, spec: JobSpec, tokenizer: Any, vocab_size: int | None) -> None:
        self._renderer = Renderer(spec)
        self._sampling = RowSampling(spec.sampling)
        self._tokenizer = tokenizer
        self._keeps_text = spec.output.include_prompt
        self._vocab_size = vocab_size
        self._may_exceed_vocab = vocab_size is not None and _highest_id(tokenizer) >= vocab_size

    @property
    def columns(self) -> tuple[str, ...]:
        """The input columns that a prompt is made of, and those of the row's own sampling."""
        return tuple(dict.fromkeys([*self._renderer.columns, *self._sampling.columns]))

    def build(self, rows: Sequence[Row], max_model_len: int | None) -> list[Prompt]:
        """One prompt for each row, in order. A prompt has fewer tokens than `max_model_len`: one must fit after it."""
        texts = [self._refuse_endless(self._renderer.render(row), max_model_len) for row in rows]
        batches = _batches([text for text in texts if isinstance(text, str)])
        encoded = itertools.chain.from_iterable(self._encode(batch) for batch in batches)
        prompts = []
        for row, text in zip(rows, texts, strict=True):
            outcome = text if isinstance(text, RowError) else self._check_ids(next(encoded), max_model_len)
            kept = text if self._keeps_text and isinstance(text, str) else None
            if isinstance(outcome, RowError):
                prompts.append(Prompt(row.row_index, [], kept, outcome))
            else:
                prompts.append(Prompt(row.row_index, outcome, kept, None))
        return self._sampling.apply(rows, prompts)

    def preview(self, row: Row, num_chars: int) -> str | RowError:
        """The beginning of a row's text as the model sees it, special tokens and all, for people to read."""
        text = self._renderer.render(row)
        if isinstance(text, RowError):
            return text
        beginning = text[:num_chars]
        ids = self._encode_one(beginning)
        shown = beginning if isinstance(ids, RowError) else show(self._tokenizer, ids)
        return shown if len(text) <= num_chars else f"{shown}… ({len(text):,} characters)"

    def _refuse_endless(self, text: str | RowError, max_model_len: int | None) -> str | RowError:
        """Refuse a text whose beginning alone has far too many tokens, before the whole of it costs time and memory.

        Tokens of a beginning may differ from those of the whole where it is cut: at most the longest word's, and white
        space may vanish into what follows. So white space at the cut is left out, and twice the limit is asked for.
        """
        if isinstance(text, RowError) or max_model_len is None:
            return text
        enough = 2 * max_model_len + _LONGEST_WORD_TOKENS
        num_chars = _PROBED_CHARS_PER_TOKEN * enough
        while num_chars < len(text):
            beginning = self._encode_one(text[:num_chars].rstrip())
            if isinstance(beginning, RowError):
                return beginning
            if len(beginning) >= enough:
                got = f"{len(text):,} characters, of which the first {num_chars:,} are {len(beginning):,} tokens"
                return _too_long(got, max_model_len)
            num_chars *= 2
        return text

    def _encode(self, texts: list[str]) -> list[list[int] | RowError]:
        try:
            return list(self._tokenize(texts))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:
            # A panic in the tokenizers library is no Exception.
            return [self._encode_one(text) for text in texts]

    def _encode_one(self, text: str) -> list[int] | RowError:
        # One text that a tokenizer (perhaps the model's own code) cannot take must not spoil its batch.
        try:
            return self._tokenize([text])[0]
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            return RowError("tokenizer_error", f"the tokenizer failed: {_describe(error)}")

    def _tokenize(self, texts: list[str]) -> list[list[int]]:
        encoding = self._tokenizer(texts, add_special_tokens=True, return_attention_mask=False, verbose=False)
        ids: list[list[int]] = encoding["input_ids"]
        return ids

    def _check_ids(self, ids: list[int] | RowError, max_model_len: int | None) -> list[int] | RowError:
        if isinstance(ids, RowError):
            return ids
        if not ids:
            return RowError("empty_prompt", "the prompt has no tokens")
        if max_model_len is not None and len(ids) >= max_model_len:
            return _too_long(f"{len(ids):,} tokens", max_model_len)
        if self._may_exceed_vocab and max(ids) >= (self._vocab_size or 0):
            return RowError(
                "invalid_token_id",
                f"token id {max(ids)} ('{show(self._tokenizer, [max(ids)])}') is outside the model's "
                f"vocabulary of {self._vocab_size:,}",
            )
        return ids


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


def _too_long(got: str, max_model_len: int) -> RowError:
    most = f"at most {max_model_len - 1:,} fit max_model_len={max_model_len}"
    return RowError("prompt_too_long", f"got {got}; {most}")


def _check_text(text: str) -> str | RowError:
    if not text:
        return RowError("empty_prompt", "the prompt is an empty string")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        found = f"U+{ord(text[error.start]):04X} at character {error.start:,}"
        return RowError("invalid_unicode", f"the prompt is not valid Unicode: lone surrogate {found}")
    return text


# Templates


def _compile(source: str) -> tuple[jinja2.Template, tuple[str, ...]]:
    """The template and, sorted, the columns that it names. Raises SpecError."""
    environment = Environment()
    try:
        tree = environment.parse(source)
        environment.from_string(source)  # its errors name lines; those of a changed tree do not
        has_includes = any(True for _ in jinja2.meta.find_referenced_templates(tree))
        columns = tuple(sorted(jinja2.meta.find_undeclared_variables(tree)))
        template = environment.guarded(tree)
    except jinja2.TemplateSyntaxError as error:
        raise SpecError(f"input.prompt_template, line {error.lineno}: {_describe(error)}") from error
    if has_includes:
        raise SpecError("input.prompt_template: it includes another template; write it as one")
    if not columns:
        raise SpecError("input.prompt_template: it names no column; write {{ column }} where a row's value goes")
    return template, columns


def _fill(template: jinja2.Template, columns: Sequence[str], values: Mapping[str, object]) -> str | RowError:
    pieces, length = [], 0
    assert isinstance(template.environment, Environment)
    template.environment.begin()
    try:
        for piece in template.generate(values):
            length += len(piece)
            if length > LONGEST_TEXT:
                raise RanAway
            pieces.append(piece)
    except NullPrinted:
        nulls = [name for name in columns if values.get(name, "") is None]
        where = f" (null here: {_list(nulls)})" if nulls else ""
        return RowError("null_prompt", f"the template prints a null{where}; {{{{ x or '' }}}} would print nothing")
    except RanAway as error:
        return RowError("template_error", str(error) or f"the template makes more than {LONGEST_TEXT:,} characters")
    except Exception as error:
        # A template calls what it likes on what a row holds, so anything may come out.
        return RowError("template_error", f"the template failed{_line(error)}: {_describe(error)}")
    return "".join(pieces)


def _line(error: Exception) -> str:
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "<template>"]
    return f" at line {lines[-1]}" if lines else ""


def _highest_id(tokenizer: Any) -> int:
    return max(tokenizer.get_vocab().values(), default=-1)


# Words


def _list(names: Iterable[str]) -> str:
    names = list(names)
    more = f", and {len(names) - _SHOWN_COLUMNS:,} more" if len(names) > _SHOWN_COLUMNS else ""
    return ", ".join(names[:_SHOWN_COLUMNS]) + more


def _describe(error: BaseException) -> str:
    """An exception in one short line; its type too unless it is Jinja2's own, whose words say enough."""
    words = _shorten(" ".join(str(error).split()), 300)
    return words if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: {words}"


def _shorten(text: str, most: int) -> str:
    """At most so many characters, and none that UTF-8 cannot encode: what a row holds may be quoted in it."""
    short = text if len(text) <= most else text[:most] + "…"
    return short.encode(errors="backslashreplace").decode()
