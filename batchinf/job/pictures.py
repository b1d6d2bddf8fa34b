"""Small copies of the images of rows, for people to look at. `head --row` lists them, and the report's page shows them.

The images are read again from their sources. Only those with the digest that the job stored are shown.
"""

import base64
import io
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from batchinf.base.errors import RowFailed
from batchinf.base.paths import shown_url
from batchinf.base.text import clip, size_text
from batchinf.job.input_job import image_folder
from batchinf.job.job import Job
from batchinf.prompts.images import ImageSource
from batchinf.prompts.media import ImageLoader, LoadedImage

if TYPE_CHECKING:
    from PIL import Image

# Pixels of the longer side: twice as many as a page gives it, for screens of high density.
_SIDE = 320
_QUALITY = 80
_NAME_CHARS = 60
# Of all small copies of a page. One has about 10 kB, and never more than 100 kB.
_MOST_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Picture:
    """An image of a row."""

    name: str
    """Its path or URL, or what it is in the input."""
    digest: str | None
    """That the job stored; None if the job could not load the row's images."""
    about: str = ""
    """Its size, its format and its bytes; empty if it is not there any more."""
    note: str = ""
    """Why it is not shown; empty if it is."""
    data_url: str | None = None
    """A small copy."""

    @property
    def short_digest(self) -> str:
        """The beginning of the digest; empty without one."""
        return "" if self.digest is None else f"SHA-256 {self.digest[:12]}…"


class Pictures:
    """Loads the images of a job's rows again. For one page."""

    def __init__(self, job: Job, *, has_copies: bool, fetches: bool) -> None:
        """has_copies: make small copies. fetches: load images of URLs too, from the hosts that the spec names."""
        settings = job.spec.input.images
        assert settings is not None
        self._folder = image_folder(job.spec.input)
        self._loader = ImageLoader(settings, base_folder=self._folder)
        self._has_copies = has_copies
        self._fetches = fetches
        self._bytes_left = _MOST_BYTES

    def of(self, sources: Sequence[ImageSource], digests: Sequence[str] | None) -> tuple[Picture, ...]:
        """The images of a row. digests: those that the job stored; None: it has none."""
        known = digests if digests is not None else [None] * len(sources)
        return tuple(self._picture(source, digest) for source, digest in zip(sources, known, strict=False))

    def _picture(self, source: ImageSource, digest: str | None) -> Picture:
        name = _name_of(source)
        if not self._fetches and self._loader.fetches(source):
            return Picture(name, digest, note="not fetched for this page; `batchinf head --row` shows it")
        try:
            loaded = self._loader.load(source)
        except RowFailed as failed:
            gone = "" if digest is None else "it is not there any more: "
            where = f"; relative paths begin in {self._folder}" if failed.error.error_type == "image_not_found" else ""
            return Picture(name, digest, note=gone + failed.error.error_message + (where if self._folder else ""))
        if digest is not None and loaded.digest != digest:
            return Picture(name, digest, note="it has changed since the job ran the row")
        about = f"{loaded.width:,} × {loaded.height:,}, {loaded.format}, {size_text(loaded.num_bytes)}"
        return self._with_copy(Picture(name, digest, about), loaded)

    def _with_copy(self, picture: Picture, loaded: LoadedImage) -> Picture:
        if not self._has_copies:
            return picture
        copy = small_copy(loaded.image)
        if len(copy) > self._bytes_left:
            return Picture(picture.name, picture.digest, picture.about, "the page has no room for more pictures")
        self._bytes_left -= len(copy)
        return Picture(picture.name, picture.digest, picture.about, data_url=copy)


def small_copy(image: "Image.Image") -> str:
    """A JPEG as a `data:` URL. It is encoded anew, so nothing of the file is in it but colours."""
    small = image.copy()
    small.thumbnail((_SIDE, _SIDE))
    file = io.BytesIO()
    small.save(file, "jpeg", quality=_QUALITY)
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"


def _name_of(source: ImageSource) -> str:
    """A short name of an image."""
    if isinstance(source, bytes):
        return "bytes in the input"
    if not isinstance(source, str):
        path = source.get("path")
        return _end(os.path.basename(path)) if isinstance(path, str) and path else "bytes in the input"
    return "a data: URL in the input" if source[:5].lower() == "data:" else _end(shown_url(source))


def _end(name: str) -> str:
    """The end of a path, which tells files of one folder apart."""
    return clip(name if len(name) <= _NAME_CHARS else f"…{name[-_NAME_CHARS:]}", _NAME_CHARS + 1)
