"""OpenAI's batch requests: JSON lines with four columns. `prompts.openai` makes prompts of them."""

from collections.abc import Iterable

from batchinf.source.formats.base import InputFormat
from batchinf.source.formats.jsonl import JsonLines


class OpenAIBatch(InputFormat):
    """A form of JSON lines, told by its columns."""

    name = "openai"
    read_as = JsonLines.name
    columns = ("custom_id", "method", "url", "body")

    @classmethod
    def has_its_columns(cls, columns: Iterable[str]) -> bool:
        """Whether an input with these columns is a batch file."""
        return set(cls.columns) <= set(columns)
