"""Strict types of the fields of stored records: pydantic writes, reads and checks their JSON."""

import datetime
import sys
from typing import Annotated

from pydantic import AfterValidator, Field

Count = Annotated[int, Field(strict=True, ge=0, le=2**63 - 1)]
PositiveCount = Annotated[int, Field(strict=True, ge=1, le=2**63 - 1)]
Seconds = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
Rate = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]  # a second
Share = Annotated[float, Field(strict=True, ge=0, le=1)]
Flag = Annotated[bool, Field(strict=True)]
# Lone surrogates are valid JSON, but UTF-8 cannot encode them. Pydantic checks for them only if a length is given.
JsonText = Annotated[str, Field(strict=True, min_length=0)]
# Interned: many records share few distinct texts.
SharedText = Annotated[JsonText, AfterValidator(sys.intern)]


def _is_time(text: str) -> str:
    if datetime.datetime.fromisoformat(text).tzinfo is None:
        raise ValueError("a time without its zone")
    return text


# In ISO format, with its zone.
Time = Annotated[JsonText, AfterValidator(_is_time)]
