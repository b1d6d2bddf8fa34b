"""The formats of an export, by name."""

from batchinf.export.base import Format
from batchinf.export.huggingface import HuggingFace
from batchinf.export.jsonl import JsonLines
from batchinf.export.openai_batch import OpenAIBatchFile
from batchinf.export.plain import Csv, Parquet

FORMATS: dict[str, type[Format]] = {
    format.name: format for format in (JsonLines, Csv, Parquet, HuggingFace, OpenAIBatchFile)
}
