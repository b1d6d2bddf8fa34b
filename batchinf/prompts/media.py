"""The images of rows: `ImageLoader` reads them from bytes, files and URLs, checks them, and decodes them to RGB.

Rows are not trusted. A file is read only below the folders that the spec allows, and Pillow tries only the formats of
`FORMATS`. Pillow is imported with the first image.
"""

import base64
import binascii
import contextlib
import errno
import hashlib
import io
import os
import pathlib
import random
import re
import stat
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, NoReturn
from urllib.parse import unquote_to_bytes

from batchinf.base.bucket import Bucket, ObjectTooLargeError, StoreError
from batchinf.base.errors import RowFailed
from batchinf.base.paths import is_bucket, normal_bucket_url, shown_url, split_bucket_url
from batchinf.base.storage import Folder
from batchinf.base.text import clip, counted, error_message, name_type
from batchinf.prompts.url_cache import UrlCache, cached
from batchinf.source.files import LFS_POINTER
from batchinf.spec.images import MOST_PIXELS, ImageSettings

if TYPE_CHECKING:
    from PIL import Image

    from batchinf.prompts.downloads import Downloads

# Pillow's names. Raster formats that Pillow decodes in this process; none runs another program.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF")
# A progressive JPEG has about 10. Each scan passes over all pixels, and 20 MB hold a million scans: hours of decoding.
_MAX_SCANS = 500
_BEGIN_OF_SCAN = b"\xff\xda"
# Tags of TIFF.
_BITS_PER_SAMPLE = 258
_PHOTOMETRIC = 262
_WHITE_IS_ZERO = 0
# Tag of EXIF, and its values for images that are turned by 90 degrees.
_ORIENTATION = 274
_ON_SIDE = (5, 6, 7, 8)
# A row's path that no file can have.
_NO_FILE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
_UNNAMED = "the image"
# The base64 of the first bytes of JPEG, PNG, GIF, WebP, BMP and TIFF, and more of it than a path has without a dot.
_BASE64 = re.compile(r"(?:/9j/|iVBORw0KGgo|R0lGOD|UklGR|Qk[0-9A-Za-z]|SUkqA|TU0AK)[A-Za-z0-9+/\r\n]{60}")
_WEB = ("http", "https")
_STORES = ("s3", "gs", "az")
_WITHOUT_SLASHES = ("data", "file", "http", "https")  # schemes of URLs that `://` need not follow
_FIRST_PAUSE_S = 0.5


@dataclass(frozen=True, slots=True)
class LoadedImage:
    """A decoded image."""

    image: "Image.Image"
    """Upright, of mode RGB."""
    digest: str
    """SHA-256 of the encoded bytes, as hex digits."""
    format: str
    """Pillow's name of the format, such as `JPEG`."""
    width: int
    """Pixels of `image`."""
    height: int
    """Pixels of `image`."""
    num_bytes: int
    """Of the encoded image."""


def is_in_base64(source: str) -> bool:
    """Whether a text is a picture in base64 without `data:` before it, which is no source of an image."""
    return _BASE64.match(source) is not None


class ImageLoader:
    """Loads images as rows give them. Threads may share it."""

    def __init__(self, settings: ImageSettings, *, base_folder: str | None, cache_folder: Folder | None = None) -> None:
        """base_folder: the input's folder, in which relative paths begin: here or in a bucket. None: it has none.

        cache_folder: for images of URLs. Without it, those of web servers are kept in memory for a short time.
        """
        self._settings = settings
        self._cache: UrlCache | None = None
        if cache_folder is not None and settings.cache_bytes:
            self._cache = UrlCache(cache_folder, settings.cache_bytes)
        is_in_bucket = base_folder is not None and is_bucket(base_folder)
        self._bucket_folder = base_folder if is_in_bucket else None
        self._base_folder = None if base_folder is None or is_in_bucket else os.path.realpath(base_folder)
        self._lock = threading.Lock()
        self._downloads: Downloads | None = None
        local, in_buckets = _apart((*settings.folders, *([] if base_folder is None else [base_folder])))
        self._folders = [os.path.realpath(folder) for folder in local]
        self._objects = _Objects(settings, in_buckets, self._cache)

    def load(self, source: object) -> LoadedImage:
        """Read and decode an image. Raises RowFailed.

        source: the encoded bytes; text with a path or with a URL: `data:`, `file:`, `http:`, `https:`, `s3:`, `gs:` or
        `az:`; or a mapping with `bytes` or `path`, as the feature `Image` of Hugging Face datasets.
        """
        return self._decoded(*self._encoded(source))

    def size_of(self, source: object) -> tuple[int, int] | None:
        """The width and height of an image, upright, by its header; None if a server or a store has it.

        Raises RowFailed, also of a URL that the spec does not allow. A file that is cut short has a good header.
        source: see `load`.
        """
        if self.fetches(source):
            self._check_allowed(source)
            return None
        path = _path_of(source)
        if path is None:
            data, name = self._encoded(source)
            if len(data) > self._settings.max_bytes:
                self._refuse_size(name, len(data))
            file: IO[bytes] = io.BytesIO(data)
        else:
            file, name = self._file(path)
        with file, self._refusing(name):
            return _upright_size(self._parsed(file, name))

    def digest(self, source: object) -> str:
        """`LoadedImage.digest` of an image, without decoding it. Raises RowFailed. source: see `load`."""
        data, _ = self._encoded(source)
        return _digest(data)

    def _encoded(self, source: object) -> tuple[bytes, str]:
        """The bytes of an image, and its name in messages."""
        source = _inner(source)
        if isinstance(source, bytes | bytearray | memoryview):
            return bytes(source), _UNNAMED
        if not isinstance(source, str):
            got = name_type(source)
            raise RowFailed("image_broken", f"got {got}; an image is bytes, or text with a path or a URL")
        match _scheme_of(source):
            case "data":
                return self._bytes_of_data_url(source), _UNNAMED
            case "file":
                return self._read(_path_of_url(source))
            case "http" | "https":
                return self._fetched(source), f"'{clip(shown_url(source), 200)}'"
            case store if store in _STORES:
                return self._objects.read(source)
            case str():
                shown = clip(shown_url(source), 200)
                raise RowFailed("image_forbidden", f"'{shown}': an image has a path, or a URL: data:, file:, http:, "
                                 "https:, s3:, gs: or az:; copy it to a folder, and give its path")  # fmt: skip
        if is_in_base64(source):
            raise RowFailed("image_broken", f"'{clip(source, 20)}' looks like the base64 of a picture, and no path; "
                             "write `data:image/png;base64,` before it (for any kind of picture)")  # fmt: skip
        if self._bucket_folder is not None and not os.path.isabs(source):
            return self._objects.read(f"{self._bucket_folder}/{source}")
        return self._read(source)

    def fetches(self, source: object) -> bool:
        """Whether a server or a store has the image. source: see `load`."""
        source = _inner(source)
        if not isinstance(source, str):
            return False
        if (scheme := _scheme_of(source)) is not None:
            return scheme in (*_WEB, *_STORES)
        return self._bucket_folder is not None and not os.path.isabs(source)

    def _check_allowed(self, source: object) -> None:
        """Raise RowFailed if the spec does not allow the URL of an image, without asking for it."""
        url = str(_inner(source))
        if _scheme_of(url) in _WEB:
            from batchinf.prompts.downloads import AllowedHosts, check_url

            check_url(url, AllowedHosts(self._settings.hosts))
        else:
            self._objects.place_of(url if "://" in url else f"{self._bucket_folder}/{url}")

    def _fetched(self, url: str) -> bytes:
        with self._lock:
            if self._downloads is None:
                from batchinf.prompts.downloads import Downloads

                self._downloads = Downloads(self._settings, self._cache)
        return self._downloads.fetch(url)

    def _bytes_of_data_url(self, url: str) -> bytes:
        header, comma, text = url.partition(",")
        if not comma or not header.lower().endswith(";base64"):
            raise RowFailed(
                "image_broken", f"'{clip(header)}' is no data: URL of an image; must be data:image/png;base64,…"
            )
        if len(text) * 3 // 4 - 2 > self._settings.max_bytes:  # two bytes may be padding
            self._refuse_size(_UNNAMED, len(text) * 3 // 4)
        try:
            return base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError) as error:
            raise RowFailed("image_broken", f"the data: URL is no base64: {error_message(error)}") from error

    def _read(self, path: str) -> tuple[bytes, str]:
        file, name = self._file(path)
        with file:
            try:
                return file.read(self._settings.max_bytes + 1), name
            except OSError as error:
                _refuse_file(error, name)

    def _file(self, path: str) -> tuple[IO[bytes], str]:
        """The open file, and its name in messages."""
        if not path:
            raise RowFailed("image_not_found", "the path of the image is empty")
        name = f"'{clip(path, 200)}'"
        try:
            file = open(self._resolved(path, name), "rb", opener=_open_at_once)  # noqa: SIM115
        except ValueError:  # of names with a null character or a lone surrogate
            raise RowFailed("image_not_found", f"{name} is no path that a file can have") from None
        except OSError as error:
            _refuse_file(error, name)
        try:
            self._check_file(os.fstat(file.fileno()), name)
        except BaseException:
            file.close()
            raise
        return file, name

    def _resolved(self, path: str, name: str) -> pathlib.Path:
        """The path without symbolic links. Outside of the folders it is refused before the file is looked for."""
        if self._base_folder is None and not os.path.isabs(path):
            raise RowFailed("image_forbidden", f"{name} is relative, but the input has no folder on this host; give "
                             "absolute paths, and name their folder in input.images.folders")  # fmt: skip
        real = pathlib.Path(os.path.realpath(os.path.join(self._base_folder or "/", path)))
        if not any(real.is_relative_to(folder) for folder in self._folders):
            raise RowFailed("image_forbidden", f"{name} is outside of the input's folder; name its folder in "
                             "input.images.folders to allow it")  # fmt: skip
        return real

    def _check_file(self, status: os.stat_result, name: str) -> None:
        if not stat.S_ISREG(status.st_mode):
            raise RowFailed("image_not_found", f"{name} is no file, but a pipe or a device")
        if status.st_size > self._settings.max_bytes:
            self._refuse_size(name, status.st_size)

    def _refuse_size(self, name: str, num_bytes: int) -> NoReturn:
        most = self._settings.max_bytes
        raise RowFailed(
            "image_too_large", f"{name} has {num_bytes:,} bytes, and input.images.max_bytes allows {most:,}"
        )

    def _decoded(self, data: bytes, name: str) -> LoadedImage:
        """Raises RowFailed. name: of the image, in messages."""
        if len(data) > self._settings.max_bytes:
            self._refuse_size(name, len(data))
        if data.startswith(LFS_POINTER):
            raise RowFailed("image_broken", f"{name} is a pointer of Git LFS, and no image; `git lfs pull` fetches it")
        with self._refusing(name):
            encoded = self._parsed(io.BytesIO(data), name)
            if encoded.format in ("JPEG", "MPO") and data.count(_BEGIN_OF_SCAN) > _MAX_SCANS:
                raise RowFailed("image_broken", f"{name} has more than {_MAX_SCANS} scans; save it as a plain JPEG")
            image = _as_rgb(encoded)
        return LoadedImage(image, _digest(data), encoded.format or "", width=image.width, height=image.height,
                           num_bytes=len(data))  # fmt: skip

    def _parsed(self, file: IO[bytes], name: str) -> "Image.Image":
        """The image by its header. Its pixels are decoded when they are read."""
        from PIL import Image

        encoded = Image.open(file, formats=FORMATS)
        if encoded.width * encoded.height > self._settings.max_pixels:
            self._refuse_pixels(f"{name} has {encoded.width:,} × {encoded.height:,} pixels")
        return encoded

    @contextlib.contextmanager
    def _refusing(self, name: str) -> Iterator[None]:
        """Raise RowFailed for what Pillow raises in the block."""
        from PIL import Image, UnidentifiedImageError

        try:
            yield
        except (MemoryError, RowFailed):
            raise
        except UnidentifiedImageError:
            allowed = f"{', '.join(FORMATS[:-1])} or {FORMATS[-1]}"
            raise RowFailed("image_broken", f"{name} is no image in the format {allowed}") from None
        except (Image.DecompressionBombError, Image.DecompressionBombWarning):
            self._refuse_pixels(f"{name} has too many pixels")
        except Exception as error:  # Pillow's decoders raise errors of many types
            raise RowFailed("image_broken", f"{name} cannot be decoded: {error_message(error, 200)}") from error

    def _refuse_pixels(self, got: str) -> NoReturn:
        raise RowFailed("image_too_large", f"{got}, and input.images.max_pixels allows {self._settings.max_pixels:,}"
                         f"; raise it, up to {MOST_PIXELS:,}, or make the image smaller")  # fmt: skip


def _apart(folders: Sequence[str]) -> tuple[list[str], list[str]]:
    """Folders of this host, and folders of buckets."""
    sorted_by_place: tuple[list[str], list[str]] = ([], [])
    for folder in folders:
        sorted_by_place[is_bucket(folder)].append(folder)
    return sorted_by_place


class _Objects:
    """Reads images from buckets. Threads may share it.

    A process uses it only after its last fork, as `base/bucket.py` says: replicas load images once their engine is up.
    """

    def __init__(self, settings: ImageSettings, folders: Sequence[str], cache: UrlCache | None) -> None:
        """folders: those that rows may name."""
        self._settings = settings
        self._folders = [f"{folder.rstrip('/')}/" for folder in folders]
        self._cache = cache
        self._lock = threading.Lock()
        self._buckets: dict[str, Bucket] = {}

    def read(self, url: str) -> tuple[bytes, str]:
        """The bytes of an object, and its name in messages. What is in the cache is not read. Raises RowFailed."""
        root, path, name = self.place_of(url)
        url = normal_bucket_url(url)
        return cached(self._cache, url, lambda: self._with_retries(root, path, name)), name

    def place_of(self, url: str) -> tuple[str, str, str]:
        """The bucket of an object, its name there, and its name in messages. Raises RowFailed if it is not allowed."""
        url = normal_bucket_url(url)
        # A name may have `#` and `?`, but what follows `?` may be a key.
        shown = clip(re.sub("//[^/@]*@", "//…@", re.sub(r"\?.*", "?…", url)), 200)
        name = f"'{shown}'"
        place = split_bucket_url(url)
        if place is None or not url.startswith(tuple(self._folders)):
            folder = "" if place is None else f", {shown.partition('?')[0].rpartition('/')[0]},"
            raise RowFailed("image_forbidden", f"{name} is outside of the input's folder; name its folder{folder} in "
                             "input.images.folders to allow it")  # fmt: skip
        return *place, name

    def _with_retries(self, root: str, path: str, name: str) -> bytes:
        settings = self._settings
        bucket = self._bucket(root, name)
        end = time.monotonic() + settings.timeout_s
        num_tries = 0
        while True:
            num_tries += 1
            left_s = max(0.0, end - time.monotonic())
            try:
                return bucket.read_once(path, most_bytes=settings.max_bytes, timeout_s=left_s)
            except FileNotFoundError as error:
                raise RowFailed("image_not_found", f"{name} {error}") from None
            except PermissionError as error:
                raise RowFailed("image_forbidden", f"{name} cannot be read: {error}") from None
            except ObjectTooLargeError as error:
                raise RowFailed("image_too_large", f"{name} has {error}, and input.images.max_bytes allows "
                                 f"{settings.max_bytes:,}") from None  # fmt: skip
            except TimeoutError:
                raise RowFailed("image_timeout", f"{name} was not fetched in {settings.timeout_s:g} s "
                                 "(input.images.timeout_s)") from None  # fmt: skip
            except StoreError as error:
                pause_s = _FIRST_PAUSE_S * 2 ** (num_tries - 1) * random.uniform(0.5, 1)
                if num_tries > settings.retries or time.monotonic() + pause_s > end:
                    raise RowFailed("image_unavailable", f"{name} was not fetched in {counted(num_tries, 'request')}: "
                                     f"{error}") from None  # fmt: skip
            time.sleep(pause_s)

    def _bucket(self, root: str, name: str) -> Bucket:
        with self._lock:
            if root not in self._buckets:
                try:
                    self._buckets[root] = Bucket(root)
                except StoreError as error:  # the package is missing
                    raise RowFailed("image_unavailable", f"{name} cannot be read: {error}") from None
            return self._buckets[root]


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _inner(source: object) -> object:
    """The bytes in a mapping, or else its path; another source as it is."""
    if not isinstance(source, Mapping):
        return source
    return source.get("path") if source.get("bytes") is None else source["bytes"]


def _scheme_of(source: str) -> str | None:
    """The scheme of a URL, in lower case; None of a path."""
    scheme = source[: source.find(":") + 1].removesuffix(":").lower()
    return scheme if scheme in _WITHOUT_SLASHES or "://" in source else None


def _path_of(source: object) -> str | None:
    """The path of an image in a file; None of an image in memory, or of no image."""
    source = _inner(source)
    if not isinstance(source, str) or is_in_base64(source):
        return None
    scheme = _scheme_of(source)
    return source if scheme is None else _path_of_url(source) if scheme == "file" else None


def _path_of_url(url: str) -> str:
    """The path of a `file:` URL."""
    rest = url[len("file:") :]
    if rest.startswith("//"):
        host, _, path = rest[2:].partition("/")
        if host.lower() not in ("", "localhost"):
            raise RowFailed("image_forbidden", f"'{clip(url, 200)}' is on another host; write file:///folder/name")
        rest = f"/{path}"
    return os.fsdecode(unquote_to_bytes(rest))


def _open_at_once(path: str, flags: int) -> int:
    # Opening a pipe would wait for its writer. A link that is made after the path was resolved is not followed.
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def _refuse_file(error: OSError, name: str) -> NoReturn:
    if isinstance(error, IsADirectoryError):
        raise RowFailed("image_not_found", f"{name} is a folder, not a file") from None
    if error.errno == errno.ENAMETOOLONG:
        raise RowFailed("image_not_found", f"{name} is too long for a path; base64 is given as "
                         "data:image/png;base64,…") from None  # fmt: skip
    if error.errno in _NO_FILE:
        raise RowFailed("image_not_found", f"{name} does not exist") from None
    if isinstance(error, PermissionError):
        raise RowFailed("image_forbidden", f"{name} cannot be read: no permission") from None
    raise RowFailed("image_unavailable", f"{name} cannot be read: {error.strerror}") from error


def _as_rgb(image: "Image.Image") -> "Image.Image":
    """The first frame, upright, on white. Raises errors of many types."""
    from PIL import Image

    image.load()
    _turn_upright(image)
    if image.mode.startswith("I;16"):
        return _of_16_bits(image)
    if image.mode in ("I", "F"):
        raise ValueError("its pixels are numbers without a known white; save it with 8 or 16 bits")
    if not image.has_transparency_data:
        return image.convert("RGB")
    image = image.convert("RGBA")
    opaque = Image.new("RGB", image.size, "white")
    opaque.paste(image, mask=image.getchannel("A"))
    return opaque


def _upright_size(image: "Image.Image") -> tuple[int, int]:
    """Width and height of the upright image."""
    try:
        is_on_side = image.getexif().get(_ORIENTATION) in _ON_SIDE
    except MemoryError:
        raise
    except Exception:  # as in `_turn_upright`
        is_on_side = False
    return (image.height, image.width) if is_on_side else (image.width, image.height)


def _turn_upright(image: "Image.Image") -> None:
    """Apply the orientation of EXIF. As in vLLM, EXIF that cannot be read is passed over."""
    from PIL import ImageOps

    try:
        ImageOps.exif_transpose(image, in_place=True)
    except MemoryError:
        raise
    except Exception:
        return


def _of_16_bits(image: "Image.Image") -> "Image.Image":
    """The upper 8 bits of a grey image. Pillow would make all values above 255 white."""
    import numpy as np
    from PIL import Image

    tags = getattr(image, "tag_v2", {})
    [num_bits] = tags.get(_BITS_PER_SAMPLE, (16,))
    values = np.asarray(image)
    grey = (values >> (num_bits - 8)).astype(np.uint8)
    if tags.get(_PHOTOMETRIC) == _WHITE_IS_ZERO:
        grey = 255 - grey
    if (transparent := image.info.get("transparency")) is not None:
        grey[values == transparent] = 255
    return Image.fromarray(grey).convert("RGB")
