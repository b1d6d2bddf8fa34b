"""A small JSON file with a version and a checksum: `{"version": 1, "checksum": "…", "content": {…}}`."""

import json
from collections.abc import Mapping
from typing import Any

import xxhash


class NewerRecord(ValueError):
    """The file was written by a newer batchinf."""


def encode_record(version: int, content: Mapping[str, object]) -> bytes:
    """The bytes of the file."""
    return json.dumps({"version": version, "checksum": _checksum(content), "content": content}).encode()


def decode_record(data: bytes, version: int) -> dict[str, Any]:
    """The content of a file. Raises NewerRecord, or ValueError if it is damaged or of an older version."""
    record = json.loads(data)
    if not isinstance(record, dict):
        raise ValueError("not a record")
    stored_version = record.get("version")
    if isinstance(stored_version, int) and stored_version > version:
        raise NewerRecord
    content = record.get("content")
    if stored_version != version or not isinstance(content, dict) or record.get("checksum") != _checksum(content):
        raise ValueError("damaged, or of an older version")
    return content


def _checksum(content: object) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True).encode())
