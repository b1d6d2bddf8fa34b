"""The columns of an input that have images, and where these come from. `batchinf init` uses this."""

import contextlib
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from batchinf.base.errors import RowFailed
from batchinf.base.paths import is_bucket, is_http
from batchinf.prompts.chat import IMAGE_PARTS, source_of_part
from batchinf.prompts.images import ImageSource, sources_of
from batchinf.prompts.media import ImageLoader, is_in_base64
from batchinf.source.find import folder_of
from batchinf.source.formats.images import Images
from batchinf.spec.images import ImageSettings

_LOOKED_AT = 8  # values of a column that may have images
_MOST_FOLDERS = 4  # of buckets that a spec names; of more, it names the buckets


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageColumns:
    """The columns with images."""

    names: tuple[str, ...] = ()
    are_several: bool = False
    """Whether a row has several images."""
    are_in_parts: bool = False
    """Whether conversations or lines of a batch file have parts that are images."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `input.images` without which the job would not load them."""


def find_images(path: str, rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> ImageColumns:
    """The columns of these names that have images in the rows, the first ones of the input at this path."""
    base_folder = folder_of(path)
    loader = ImageLoader(ImageSettings(), base_folder=base_folder)
    found = []
    for name in names:
        sources = itertools.chain.from_iterable(_sources(row.get(name)) for row in rows)
        if _are_images(list(itertools.islice(sources, _LOOKED_AT)), loader):
            found.append(name)
    in_parts = [_sources_in_parts(list(row.values())) for row in rows]
    of_rows = [
        [*of_parts, *(source for name in found for source in _sources(row.get(name)))]
        for row, of_parts in zip(rows, in_parts, strict=True)
    ]
    urls = [source for source in itertools.chain.from_iterable(of_rows) if isinstance(source, str)]
    most = max(map(len, of_rows), default=0)
    settings = {
        "hosts": list(dict.fromkeys(filter(None, map(_host, filter(is_http, urls))))),
        "folders": [folder.replace("$", "$$") for folder in _bucket_folders(urls, base_folder)],
        "max_per_row": most if most > ImageSettings().max_per_row else None,
    }
    return ImageColumns(
        names=tuple(found),
        are_several=len(found) > 1 or most > 1,
        are_in_parts=any(in_parts),
        settings={name: value for name, value in settings.items() if value},
    )


def is_named_as_picture(text: str) -> bool:
    """Whether a text may be the name of a picture."""
    return text.lower().endswith(Images.endings) and "\n" not in text


def as_list(value: Any) -> Any:
    """A list that CSV holds as JSON text; any other value as it is."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        with contextlib.suppress(ValueError):
            return json.loads(value)
    return value


def _sources(value: object) -> list[ImageSource]:
    try:
        return sources_of(value, "")
    except RowFailed:
        return []


def _are_images(sources: Sequence[ImageSource], loader: ImageLoader) -> bool:
    """Whether one is an image, or base64 of one without `data:`, or all are named as pictures.

    `validate` says which of them a job cannot read.
    """
    texts = [source for source in sources if isinstance(source, str)]
    if texts and len(texts) == len(sources) and all(map(is_named_as_picture, texts)):
        return True
    return any(map(is_in_base64, texts)) or any(_is_image(source, loader) for source in sources)


def _is_image(source: ImageSource, loader: ImageLoader) -> bool:
    if isinstance(source, str) and (is_http(source) or is_bucket(source)):
        return is_named_as_picture(source.partition("?")[0])
    try:
        loader.load(source)
    except RowFailed:
        return False
    return True


def _sources_in_parts(value: object) -> list[object]:
    """The sources of all parts with images in conversations, or in a line of a batch file; None of a bare part."""
    if isinstance(value, str) and '"image' in value:
        value = as_list(value)
    if isinstance(value, dict):
        kind = value.get("type")
        if isinstance(kind, str) and kind in IMAGE_PARTS:
            return [source_of_part(value)]
        value = list(value.values())
    return [source for each in value for source in _sources_in_parts(each)] if isinstance(value, list) else []


def _bucket_folders(urls: Sequence[str], base_folder: str | None) -> tuple[str, ...]:
    """The folders of buckets with images, or the buckets if there are many."""
    # A folder of a bucket that the input is in itself need not be allowed.
    beyond = (url for url in urls if is_bucket(url) and not url.startswith(f"{base_folder}/"))
    folders = tuple(dict.fromkeys(url.rpartition("/")[0] for url in beyond))
    if len(folders) <= _MOST_FOLDERS:
        return folders
    return tuple(dict.fromkeys("/".join(folder.split("/")[:3]) for folder in folders))


def _host(url: str) -> str | None:
    """The host of a URL, as `input.images.hosts` takes it; None for a URL that is wrong."""
    with contextlib.suppress(ValueError):
        parts = urlsplit(url)
        return parts.hostname if parts.port is None else f"{parts.hostname}:{parts.port}"
    return None
