"""Types of values in stored JSON: strict, and within the bounds that readers rely on.

A record that is read again declares its fields with them, so that one definition serves writing, reading and checking.
"""

import datetime
import sys
from typing import Annotated

from pydantic import AfterValidator, Field

Count = Annotated[int, Field(strict=True, ge=0, le=2**63 - 1)]
PositiveCount = Annotated[int, Field(strict=True, ge=1, le=2**63 - 1)]
Seconds = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
Flag = Annotated[bool, Field(strict=True)]
# Half characters are valid JSON, but no text: pydantic looks for them only where a length is asked for.
JsonText = Annotated[str, Field(strict=True, min_length=0)]
# One object for all equal texts, where few differ among many records.
SharedText = Annotated[JsonText, AfterValidator(sys.intern)]


def _is_time(text: str) -> str:
    if datetime.datetime.fromisoformat(text).tzinfo is None:
        raise ValueError("a time without its zone")
    return text


# In ISO format, with its zone.
Time = Annotated[JsonText, AfterValidator(_is_time)]
