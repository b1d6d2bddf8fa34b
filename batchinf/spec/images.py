"""The section `input.images` of a spec: where the images of rows may come from, and how large they may be.

Also the parts of messages, which may be images.
"""

import re
from ipaddress import IPv6Address
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from batchinf.base.paths import elsewhere, folder_problem, is_bucket, shown_url
from batchinf.base.text import clip
from batchinf.spec.fields import IDENTITY, RUNTIME, Path, Positive, Section, Text, without, wrong

# A name in ASCII, with or without `*.` before it, or an IPv4 address; an IPv6 address; and a port.
_HOST = re.compile(
    r"(?P<name>(\*\.)?[a-z0-9_]([a-z0-9_.-]*[a-z0-9_])?|\[(?P<ipv6>[0-9a-f:.]+)\])(:(?P<port>[1-9][0-9]{0,4}))?"
)


def _checked_host(host: str) -> str:
    match = _HOST.fullmatch(host.lower())
    try:
        if match is not None and int(match["port"] or 0) <= 65535:
            name = match["name"] if match["ipv6"] is None else f"[{IPv6Address(match['ipv6'])}]"
            return name if match["port"] is None else f"{name}:{match['port']}"
    except ValueError:
        pass
    shown = clip(shown_url(host if "//" in host else f"//{host}").removeprefix("//"), 200)
    raise wrong(
        f"got '{shown}'; must be a host without a scheme and a path, such as images.example.com, *.example.com, "
        "images.example.com:8080, 192.0.2.7 or [2001:db8::7]:8080; letters beyond ASCII are written as xn--…"
    )


def _folder_problem(folder: str) -> str | None:
    instead = "copy the images to this host, and give their folder"
    return folder_problem(folder) if is_bucket(folder) else elsewhere(folder, instead)


_Folder = Annotated[Path, without(_folder_problem)]
_Host = Annotated[Text, AfterValidator(_checked_host)]


# Pillow refuses twice as many by itself, and warns of more than these.
MOST_PIXELS = 89_478_485


class ImageSettings(Section):
    """Where the images of rows may come from, and how large they may be."""

    max_per_row: Annotated[Positive, RUNTIME] = 4
    """Images of one row. A row with more is an error row."""
    max_bytes: Annotated[Positive, RUNTIME] = 20 << 20
    """Bytes of an encoded image, such as a JPEG file. A larger one makes an error row."""
    max_pixels: Annotated[int, Field(ge=1, le=MOST_PIXELS), RUNTIME] = 40_000_000
    """Width × height of an image. A larger one makes an error row, and is not decoded."""
    folders: Annotated[tuple[_Folder, ...], Field(strict=False), RUNTIME] = ()
    """Folders in which rows may name images, besides the input's: of this host, or in a bucket, `s3://bucket/photos`."""
    hosts: Annotated[tuple[_Host, ...], Field(strict=False), RUNTIME] = ()
    """Hosts from which images of `http:` and `https:` URLs may be fetched: see docs/how-to/images.md. Default: none."""
    timeout_s: Annotated[float, Field(gt=0, le=3600), RUNTIME] = 20.0
    """Seconds in which an image must be fetched, with all retries."""
    retries: Annotated[int, Field(ge=0, le=100), RUNTIME] = 3
    """How often a fetch is retried if the server is busy (status 408, 429 or 5xx) or the connection fails."""
    on_missing: Annotated[Literal["error", "run"], IDENTITY] = "error"
    """What becomes of a row of which all columns with images are empty: an error row, or it runs without an image. A
    row of which only some are empty runs."""
    on_changed: Annotated[Literal["stop", "take"], RUNTIME] = "stop"
    """What a retry does with a row that has results without an error, and whose image is another one now: it stops and
    names the row and the image, or takes the new image and names the row in a note."""
    cache_bytes: Annotated[int, Field(ge=0), RUNTIME] = 1 << 30
    """Bytes of fetched images that the output folder keeps until the job is done. About the last ones that were used
    are kept, and none is fetched twice. 0: none is kept."""


class PartSpec(Section):
    """One part of a message: a text, or the images of a column."""

    type: Annotated[Literal["text", "image"], IDENTITY]
    """What the part is."""
    text: Annotated[str | None, IDENTITY] = None
    """Of a text: a Jinja2 template over the row's columns."""
    column: Annotated[Text | None, IDENTITY] = None
    """Of an image: the column with it, or with a list of images; null: none."""

    @model_validator(mode="after")
    def _of_its_type(self) -> Self:
        field, other = ("text", "column") if self.type == "text" else ("column", "text")
        if getattr(self, field) is None:
            raise wrong(f"missing; a part of type {self.type} has it", field)
        if getattr(self, other) is not None:
            raise wrong(f"got it in a part of type {self.type}, which has {field}: leave it out", other)
        return self
