"""The formats of an export, by name."""

from batchinf.export.base import Format
from batchinf.export.huggingface import HuggingFaceExport
from batchinf.export.jsonl import JsonLinesExport
from batchinf.export.openai_batch import OpenAIBatchExport
from batchinf.export.plain import CsvExport, ParquetExport

FORMATS: dict[str, type[Format]] = {
    format.name: format for format in (JsonLinesExport, CsvExport, ParquetExport, HuggingFaceExport, OpenAIBatchExport)
}
