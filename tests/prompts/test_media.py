"""Images of rows: odd, broken and hostile ones, paths that must not be read, and servers that must not be trusted."""

import base64
import hashlib
import io
import os
import pathlib
import socket
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import stores
from picture_server import PICTURE, Server, noise, serving
from PIL import Image, ImageCms
from pydantic import ValidationError

from batchinf.base.errors import RowFailed
from batchinf.base.storage import Folder
from batchinf.prompts.downloads import AllowedHosts
from batchinf.prompts.media import ImageLoader
from batchinf.spec.images import ImageSettings

RED = (200, 30, 40)
BLUE = (20, 40, 220)
WHITE = (255, 255, 255)
# As in production, where Pillow's warnings are no errors.
pytestmark = pytest.mark.filterwarnings("ignore")


def encoded(image: Image.Image, format: str = "PNG", **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, format, **options)
    return stream.getvalue()


def plain(mode: str = "RGB", color: Any = RED, size: tuple[int, int] = (8, 6)) -> Image.Image:
    return Image.new(mode, size, color)


def left_red(mode: str = "RGB") -> Image.Image:
    """The left half is red, the right half blue."""
    image = plain()
    image.paste(BLUE, (4, 0, 8, 6))
    return image.convert(mode)


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(width: int, height: int, *, bits: int = 8, color: int = 2, rows: bytes = b"", more: bytes = b"") -> bytes:
    """A PNG file made by hand. color: 0 is grey, 2 is RGB. rows: with the filter byte of each. more: chunks."""
    header = struct.pack(">IIBBBBB", width, height, bits, color, 0, 0, 0)
    body = chunk(b"IHDR", header) + more + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def tiff(bits: int, data: bytes, *, order: str = "<", white_is_zero: bool = False, width: int = 2) -> bytes:
    """A TIFF file of one grey row made by hand."""
    longs = {256: width, 257: 1, 273: 8, 278: 1, 279: len(data)}
    shorts = {258: bits, 259: 1, 262: 0 if white_is_zero else 1, 277: 1}
    tags = sorted(
        [(tag, 4, value) for tag, value in longs.items()] + [(tag, 3, value) for tag, value in shorts.items()]
    )
    lines = [
        struct.pack(f"{order}HHI", tag, kind, 1)
        + (struct.pack(f"{order}I", value) if kind == 4 else struct.pack(f"{order}HH", value, 0))
        for tag, kind, value in tags
    ]
    begin = b"II" if order == "<" else b"MM"
    header = begin + struct.pack(f"{order}HI", 42, 8 + len(data))
    return header + data + struct.pack(f"{order}H", len(tags)) + b"".join(lines) + bytes(4)


def rotated(orientation: int, format: str = "JPEG") -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded(left_red(), format, exif=exif.tobytes())


def animated(format: str) -> bytes:
    return encoded(plain(), format, save_all=True, append_images=[plain(color=BLUE), plain(color=(0, 99, 0))])


def with_alpha(alpha: int) -> Image.Image:
    return plain("RGBA", (*RED, alpha))


def canvas_of_webp(size: int) -> bytes:
    """An animation of one frame with 4 × 4 pixels on a large canvas."""
    [_, frame] = encoded(with_alpha(9).resize((4, 4)), "WEBP", lossless=True).split(b"VP8L")
    place = bytes(6) + (3).to_bytes(3, "little") * 2 + (100).to_bytes(3, "little") + b"\0VP8L" + frame
    side = (size - 1).to_bytes(3, "little")
    body = b"WEBPVP8X" + struct.pack("<IBBBB", 10, 0x12, 0, 0, 0) + side * 2
    body += b"ANIM" + struct.pack("<IIH", 6, 0, 0) + b"ANMF" + struct.pack("<I", len(place)) + place
    return b"RIFF" + struct.pack("<I", len(body)) + body


def many_scans(number: int) -> bytes:
    *scans, last = encoded(plain(), "JPEG", progressive=True)[:-2].split(b"\xff\xda")
    return b"\xff\xda".join([*scans, *[last] * number]) + b"\xff\xd9"


def palette(transparent: bool) -> bytes:
    image = left_red().quantize(2)
    options = {"transparency": image.getpixel((0, 0))} if transparent else {}
    return encoded(image, **options)


def interlaced_png() -> bytes:
    """Two pixels, of which the second is in the sixth of Adam7's passes."""
    header = struct.pack(">IIBBBBB", 2, 1, 8, 2, 0, 0, 1)
    passes = b"".join(b"\0" + bytes(color) for color in (RED, BLUE))
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(passes)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def corner_gif() -> bytes:
    """The screen is larger than the only frame, which is at its upper left."""
    data = encoded(plain(size=(4, 3)), "GIF")
    return data[:6] + struct.pack("<HH", 8, 6) + data[10:]


def bmp_from_the_top() -> bytes:
    """A negative height: the first row is the upper one."""
    data = encoded(plain(), "BMP")
    return data[:22] + struct.pack("<i", -6) + data[26:]


def lab_profile() -> bytes:
    """Profiles of colours are passed over, as in vLLM."""
    return ImageCms.ImageCmsProfile(ImageCms.createProfile("LAB")).tobytes()


def circular_tiff() -> bytes:
    """The list of tags is followed by itself."""
    data = tiff(8, bytes(2))
    return data[:-4] + data[4:8]


def half(data: bytes) -> bytes:
    return data[: len(data) // 2]


GREY_16 = struct.pack(">BHH", 0, 0x80FF, 0xFFFF)
# Name → bytes of the image, its size, and the colour of its upper left pixel.
ODD: dict[str, tuple[Callable[[], bytes], tuple[int, int], tuple[int, int, int]]] = {
    "JPEG": (lambda: encoded(plain(), "JPEG"), (8, 6), RED),
    "progressive JPEG": (lambda: encoded(plain(), "JPEG", progressive=True), (8, 6), RED),
    "JPEG of many scans": (lambda: many_scans(100), (8, 6), RED),
    "grey JPEG": (lambda: encoded(plain("L", 77), "JPEG"), (8, 6), (77, 77, 77)),
    "CMYK JPEG": (lambda: encoded(plain().convert("CMYK"), "JPEG"), (8, 6), RED),
    "JPEG on its side": (lambda: rotated(6), (6, 8), RED),
    "JPEG on its head": (lambda: rotated(3), (8, 6), BLUE),
    "PNG on its head": (lambda: rotated(3, "PNG"), (8, 6), BLUE),
    "TIFF on its head": (lambda: rotated(3, "TIFF"), (8, 6), BLUE),
    "JPEG mirrored": (lambda: rotated(2), (8, 6), BLUE),
    "JPEG mirrored on its side": (lambda: rotated(5), (6, 8), RED),
    "JPEG mirrored on its other side": (lambda: rotated(7), (6, 8), BLUE),
    "unknown orientation": (lambda: rotated(9), (8, 6), RED),
    "broken EXIF": (lambda: encoded(plain(), "JPEG", exif=b"Exif\0\0II*\0\xff\xff\xff\xff"), (8, 6), RED),
    "MPO": (lambda: encoded(plain(), "MPO", save_all=True, append_images=[plain(color=BLUE)]), (8, 6), RED),
    "black and white": (lambda: encoded(plain("1", 1)), (8, 6), WHITE),
    "grey": (lambda: encoded(plain("L", 77)), (8, 6), (77, 77, 77)),
    "grey, half transparent": (lambda: encoded(plain("LA", (55, 128))), (8, 6), (155, 155, 155)),
    "palette": (lambda: palette(False), (8, 6), RED),
    "palette, transparent": (lambda: palette(True), (8, 6), WHITE),
    "transparent": (lambda: encoded(with_alpha(0)), (8, 6), WHITE),
    "half transparent": (lambda: encoded(with_alpha(128)), (8, 6), (227, 142, 147)),
    "one colour transparent": (lambda: encoded(plain(), transparency=RED), (8, 6), WHITE),
    "transparent WebP": (lambda: encoded(with_alpha(0), "WEBP", lossless=True), (8, 6), WHITE),
    "transparent GIF": (lambda: encoded(with_alpha(0), "GIF"), (8, 6), WHITE),
    "16-bit grey PNG": (lambda: png(2, 1, bits=16, color=0, rows=GREY_16), (2, 1), (128,) * 3),
    "16-bit grey PNG, one value transparent": (
        lambda: png(2, 1, bits=16, color=0, rows=GREY_16, more=chunk(b"tRNS", b"\x80\xff")), (2, 1), WHITE),
    "16-bit RGB PNG": (
        lambda: png(1, 1, bits=16, rows=struct.pack(">BHHH", 0, *(257 * value for value in RED))), (1, 1), RED),
    "16-bit RGB PNG, half transparent": (
        lambda: png(1, 1, bits=16, color=6, rows=struct.pack(">BHHHH", 0, *(257 * it for it in (*RED, 128)))),
        (1, 1), (227, 142, 147)),
    "interlaced PNG": (interlaced_png, (2, 1), RED),
    "1-bit PNG": (lambda: png(8, 1, bits=1, color=0, rows=b"\0\x80"), (8, 1), WHITE),
    "16-bit TIFF": (lambda: tiff(16, struct.pack("<HH", 0x80FF, 0)), (2, 1), (128,) * 3),
    "16-bit TIFF, big-endian": (lambda: tiff(16, struct.pack(">HH", 0x80FF, 0), order=">"), (2, 1), (128,) * 3),
    "16-bit TIFF, 0 is white": (lambda: tiff(16, struct.pack("<HH", 0, 9), white_is_zero=True), (2, 1), WHITE),
    "12-bit TIFF": (lambda: tiff(12, b"\x80\xff\xff"), (2, 1), (128,) * 3),
    "TIFF of several pages": (lambda: animated("TIFF"), (8, 6), RED),
    "CMYK TIFF": (lambda: encoded(plain().convert("CMYK"), "TIFF"), (8, 6), RED),
    "animated GIF": (lambda: animated("GIF"), (8, 6), RED),
    "GIF whose first frame covers a corner": (corner_gif, (8, 6), RED),
    "animated PNG": (lambda: animated("PNG"), (8, 6), RED),
    "animated WebP": (lambda: animated("WEBP"), (8, 6), RED),
    "TIFF whose tags follow themselves": (circular_tiff, (2, 1), (0, 0, 0)),
    "TIFF in LZW": (lambda: encoded(plain(), "TIFF", compression="tiff_lzw"), (8, 6), RED),
    "TIFF in JPEG": (lambda: encoded(plain(size=(16, 16)), "TIFF", compression="jpeg"), (16, 16), RED),
    "JPEG in CIELAB's profile": (lambda: encoded(plain(), "JPEG", icc_profile=lab_profile()), (8, 6), RED),
    "BMP from the top": (bmp_from_the_top, (8, 6), RED),
    "BMP": (lambda: encoded(plain(), "BMP"), (8, 6), RED),
    "AVIF": (lambda: encoded(plain(), "AVIF", quality=100), (8, 6), RED),
    "one pixel": (lambda: encoded(plain(size=(1, 1))), (1, 1), RED),
    "very narrow": (lambda: encoded(plain(size=(1, 3000))), (1, 3000), RED),
    "data after the end": (lambda: encoded(plain(), "JPEG") + b"<?php", (8, 6), RED),
}  # fmt: skip
# Name → bytes of the image, and the type of the error.
HOSTILE: dict[str, tuple[Callable[[], bytes], str]] = {
    "empty": (lambda: b"", "image_broken"),
    "text": (lambda: b"no image", "image_broken"),
    "HTML": (lambda: b"<!doctype html><title>404</title>", "image_broken"),
    "SVG": (lambda: b'<svg xmlns="http://www.w3.org/2000/svg"><image href="/etc/passwd"/></svg>', "image_broken"),
    "EPS": (lambda: encoded(plain(), "EPS"), "image_broken"),
    "PDF": (lambda: encoded(plain(), "PDF"), "image_broken"),
    "PPM": (lambda: encoded(plain(), "PPM"), "image_broken"),
    "ICO": (lambda: encoded(plain(size=(16, 16)), "ICO"), "image_broken"),
    "signature alone": (lambda: b"\x89PNG\r\n\x1a\n", "image_broken"),
    "half a PNG": (lambda: half(encoded(noise())), "image_broken"),
    "half a JPEG": (lambda: half(encoded(noise(), "JPEG")), "image_broken"),
    "half a progressive JPEG": (lambda: half(encoded(noise(), "JPEG", progressive=True)), "image_broken"),
    "half a GIF": (lambda: half(encoded(noise(), "GIF")), "image_broken"),
    "half a WebP": (lambda: half(encoded(noise(), "WEBP")), "image_broken"),
    "half a BMP": (lambda: half(encoded(noise(), "BMP")), "image_broken"),
    "half a TIFF": (lambda: half(encoded(noise(), "TIFF")), "image_broken"),
    "half an AVIF": (lambda: half(encoded(noise(), "AVIF")), "image_broken"),
    "PNG with a wrong checksum": (lambda: encoded(plain()).replace(b"IDAT", b"IDAT\1", 1), "image_broken"),
    "PNG without pixels": (lambda: png(8, 6), "image_broken"),
    "PNG of size 0": (lambda: png(0, 6), "image_broken"),
    "text of a PNG that grows": (
        lambda: png(8, 6, more=chunk(b"zTXt", b"k\0\0" + zlib.compress(bytes(8 << 20)))), "image_broken"),
    "profile of a PNG that grows": (
        lambda: png(8, 6, more=chunk(b"iCCP", b"k\0\0" + zlib.compress(bytes(80 << 20), 9))), "image_broken"),
    "HEIC": (lambda: b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(64), "image_broken"),
    "WMF": (lambda: b"\xd7\xcd\xc6\x9a" + bytes(64), "image_broken"),
    "ZIP": (lambda: b"PK\3\4" + bytes(64), "image_broken"),
    "PNG with wrong rows": (lambda: png(8, 6, rows=b"\x09" * 150), "image_broken"),
    "GIF of size 0": (lambda: b"GIF89a" + bytes(7) + b"," + bytes(9) + b"\2\0;", "image_broken"),
    "TIFF in negative strips": (lambda: tiff(8, b"", width=-1 & 0xFFFFFFFF), "image_too_large"),
    "JPEG of very many scans": (lambda: many_scans(1000), "image_broken"),
    "numbers of 32 bits": (lambda: encoded(plain("I", 70_000), "TIFF"), "image_broken"),
    "floating-point numbers": (lambda: encoded(plain("F", 0.5), "TIFF"), "image_broken"),
    "PNG of 60,000 × 60,000": (lambda: png(60_000, 60_000), "image_too_large"),
    "PNG of 10,000 × 9,000": (lambda: png(10_000, 9_000), "image_too_large"),
    "PNG of 2^31 × 2^31": (lambda: png(2**31 - 1, 2**31 - 1), "image_too_large"),
    "GIF of 65,535 × 65,535": (lambda: b"GIF89a\xff\xff\xff\xff" + encoded(plain(), "GIF")[10:], "image_too_large"),
    "WebP of 16,383 × 16,383": (lambda: canvas_of_webp(16_383), "image_too_large"),
    "TIFF of 10^9 pixels": (lambda: tiff(8, bytes(2), width=10**9), "image_too_large"),
    "more bytes than allowed": (lambda: encoded(noise(640)), "image_too_large"),
}  # fmt: skip


def loader(folder: pathlib.Path | None = None, **settings: Any) -> ImageLoader:
    return ImageLoader(ImageSettings(**settings), base_folder=None if folder is None else str(folder))


def refused(source: Any, images: ImageLoader) -> tuple[str, str]:
    with pytest.raises(RowFailed) as caught:
        images.load(source)
    message = caught.value.error.error_message
    assert "\n" not in message
    assert "SECRET" not in message
    return caught.value.error.error_type, message


@pytest.mark.parametrize("name", ODD)
def test_an_odd_image_has_its_documented_meaning(name: str) -> None:
    make, size, color = ODD[name]
    data = make()
    one = loader().load(data)
    assert (one.image.mode, one.image.size, (one.width, one.height)) == ("RGB", size, size)
    pixel = one.image.getpixel((0, 0))
    assert max(abs(got - wanted) for got, wanted in zip(pixel, color, strict=True)) <= 4, pixel
    assert (one.digest, one.num_bytes) == (hashlib.sha256(data).hexdigest(), len(data))
    assert loader().size_of(data) == size


@pytest.mark.parametrize("name", HOSTILE)
def test_a_broken_or_hostile_image_is_an_error(name: str) -> None:
    make, error_type = HOSTILE[name]
    assert refused(make(), loader(max_bytes=1 << 20))[0] == error_type


@pytest.mark.slow
def test_the_pixels_are_those_of_vllm() -> None:
    from vllm.multimodal.media import ImageMediaIO

    for name, (make, _, _) in ODD.items():
        data = make()
        is_same = loader().load(data).image.tobytes() == ImageMediaIO().load_bytes(data).media.tobytes()
        # vLLM makes nearly all grey values of 12 and 16 bits white, and keeps a colour that is transparent.
        is_other = name.startswith(("16-bit grey", "16-bit TIFF", "12-bit", "one colour"))
        # Both are white in these.
        assert is_same is not is_other or "one value" in name or "0 is white" in name, name


BOMB = """
import resource, sys, warnings
from PIL import Image, ImageCms
from batchinf.base.errors import RowFailed
from batchinf.prompts.media import ImageLoader
from batchinf.spec.images import ImageSettings
warnings.simplefilter("ignore")
images = ImageLoader(ImageSettings(), base_folder=sys.argv[1])
images.load("small.png")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for name in sys.argv[2:]:
    try:
        images.load(name)
    except RowFailed as error:
        assert error.error.error_type == "image_too_large", error
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_a_bomb_takes_no_memory(tmp_path: pathlib.Path) -> None:
    # 144 million pixels in 18 kB. Pillow itself decodes up to 178 million: to 144 MB, and 576 MB as RGB.
    rows = bytes(12_000 * 1_501)
    (tmp_path / "small.png").write_bytes(encoded(plain()))
    (tmp_path / "bomb.png").write_bytes(png(12_000, 12_000, bits=1, color=0, rows=rows))
    (tmp_path / "bomb.webp").write_bytes(canvas_of_webp(13_000))
    command = [sys.executable, "-c", BOMB, tmp_path, "bomb.png", "bomb.webp"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 50_000  # kB


# -- sources -----------------------------------------------------------------------------------------------------------


def test_an_image_is_read_from_bytes_paths_and_urls(tmp_path: pathlib.Path) -> None:
    data = encoded(left_red())
    other = tmp_path / "other"
    (tmp_path / "input" / "photos").mkdir(parents=True)
    other.mkdir()
    for path in ("input/photos/a b.png", "other/c#?.png"):
        (tmp_path / path).write_bytes(data)
    (tmp_path / "input" / "link.png").symlink_to(other / "c#?.png")
    images = loader(tmp_path / "input", folders=[str(other)])
    sources: list[Any] = [
        data, bytearray(data), memoryview(data), {"bytes": data, "path": "/etc/passwd"},
        {"bytes": None, "path": "photos/a b.png"}, "photos/a b.png", f"{tmp_path}/input/photos/a b.png",
        "photos/../photos/a b.png", "file:photos/a%20b.png", f"FILE://localhost{tmp_path}/input/photos/a%20b.png",
        f"{other}/c#?.png", f"file://{other}/c%23%3F.png", "link.png", "../other/c#?.png",
        f"data:image/png;base64,{base64.b64encode(data).decode()}", f"DATA:;base64,{base64.b64encode(data).decode()}",
    ]  # fmt: skip
    assert {images.load(source).digest for source in sources} == {hashlib.sha256(data).hexdigest()}


def test_a_path_that_is_not_allowed_or_no_file_is_an_error(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "input"
    folder.mkdir()
    beside = tmp_path / "input-2"
    beside.mkdir()
    (beside / "a.png").write_bytes(encoded(plain()))
    (folder / "file.png").symlink_to(beside / "a.png")
    (folder / "folder").symlink_to(beside)
    (folder / "loop").symlink_to("loop")
    (folder / "large.png").write_bytes(bytes(102))
    (folder / "small.png").write_bytes(encoded(plain()))
    os.mkfifo(folder / "pipe")
    images = loader(folder, max_bytes=100)
    wrong = {
        "image_forbidden": [
            "../input-2/a.png", f"{beside}/a.png", f"file://{beside}/a.png", "file:..%2Finput-2/a.png", "file.png",
            "folder/a.png", "/etc/passwd", "/nowhere", "/dev/zero", "/proc/self/environ", "folder/absent",
            f"file://host{folder}/small.png", "s3://bucket/a.png?SECRET", "gopher://127.0.0.1/", "\\\\host\\share://x",
            {"path": "/etc/passwd"},
        ],
        "image_not_found": [
            "absent.png", "", ".", "large.png/x", "loop", "pipe", "a\0b", "\ud800.png", "x" * 5_000, "file:%FF.png",
        ],
        "image_too_large": ["large.png", f"data:;base64,{base64.b64encode(bytes(101)).decode()}", bytes(101)],
        "image_broken": [
            "data:image/png,SECRET", "data:;base64,SECRET-", "data:;base64", "data:;base64,ä", None, 7, ["a.png"], {},
        ],
    }  # fmt: skip
    for error_type, sources in wrong.items():
        for source in sources:
            assert refused(source, images)[0] == error_type, source
    assert loader(folder).load("small.png").width == 8
    assert "'large.png' has 102 bytes" in refused("large.png", images)[1]
    assert refused("", images)[1] == "the path of the image is empty"
    # Without a folder no path is allowed, unless the spec names its folder.
    assert refused("a.png", loader())[0] == refused(f"{beside}/a.png", loader())[0] == "image_forbidden"
    assert loader(folders=[str(beside)]).load(f"{beside}/a.png").width == 8


# -- servers -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as it:
        yield it


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[list[str]]]:
    """Host → the answers that DNS gives one after the other, each with its addresses. The last answer stays."""
    answers: dict[str, list[list[str]]] = {}
    really = socket.getaddrinfo

    def resolve(host: Any, port: Any, *arguments: Any, **options: Any) -> list[Any]:
        if host not in answers:
            return really(host, port, *arguments, **options)
        addresses = answers[host].pop(0) if len(answers[host]) > 1 else answers[host][0]
        return [line for address in addresses for line in really(address, port, type=socket.SOCK_STREAM)]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    return answers


def test_an_image_is_fetched_once(server: Server) -> None:
    images = loader(hosts=[server.host])
    url = f"{server.url}/image/a?key=SECRET"
    with ThreadPoolExecutor(8) as threads:
        loaded = list(threads.map(images.load, [url] * 8))
    loaded.append(images.load(url))
    assert {one.digest for one in loaded} == {hashlib.sha256(PICTURE).hexdigest()}
    assert server.asked == ["/image/a?key=SECRET"]
    # A failure is not kept.
    for _ in range(2):
        assert refused(f"{server.url}/status/404", images)[0] == "image_not_found"
    assert server.asked[1:] == ["/status/404"] * 2


def test_rows_that_wait_for_one_download_fail_with_an_error_each(server: Server) -> None:
    images = loader(hosts=[server.host], timeout_s=0.5)

    def failure(url: str) -> RowFailed:
        with pytest.raises(RowFailed) as caught:
            images.load(url)
        return caught.value

    with ThreadPoolExecutor(8) as threads:
        failures = list(threads.map(failure, [f"{server.url}/stall"] * 8))
    assert len(server.asked) < 8
    assert len({id(one) for one in failures}) == 8
    assert {one.error.error_type for one in failures} == {"image_timeout"}


def test_only_recent_images_are_kept(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchinf.prompts.downloads._KEPT_BYTES", 2 * len(PICTURE))
    images = loader(hosts=[server.host])
    for name in ("a", "b", "a", "c", "a", "b"):
        images.load(f"{server.url}/image/{name}")
    assert server.asked == [f"/image/{name}" for name in ("a", "b", "c", "b")]


def test_a_busy_server_is_asked_again_and_a_redirect_is_followed(server: Server) -> None:
    images = loader(hosts=[server.host])
    for status in (429, 500, 503):
        assert images.load(f"{server.url}/busy/{status}").width == 64
    assert len(server.asked) == 9
    assert images.load(f"{server.url}/to/%2Fto%2F%252Fimage").width == 64
    assert server.asked[9:] == ["/to/%2Fto%2F%252Fimage", "/to/%2Fimage", "/image"]


# What the server does → the type of the error, words of its message, the number of requests with one retry.
FAULTS = {
    "stall": ("image_timeout", "was not fetched in 0.5 s", 1),
    "drip/body": ("image_timeout", "was not fetched in 0.5 s", 1),
    "drip/headers": ("image_timeout", "was not fetched in 0.5 s", 1),
    "cut": ("image_unavailable", "the connection ended before the image was complete", None),
    "garbage": ("image_unavailable", "not valid HTTP", None),
    "long": ("image_too_large", "1,000,000,000,000,000 bytes", 1),
    "endless": ("image_too_large", "input.images.max_bytes allows 100,000", 1),
    "short": ("image_broken", "truncated", 1),
    "compressed": ("image_broken", "no image", 1),
    "status/404": ("image_not_found", "status 404", 1),
    "status/410": ("image_not_found", "status 410", 1),
    "status/403": ("image_unavailable", "status 403", 1),
    "status/204": ("image_unavailable", "status 204", 1),
    "status/503": ("image_unavailable", "in 2 requests: the server answered with status 503", 2),
    "wait/100": ("image_unavailable", "asks to wait 100 s", 1),
    "wait/Fri, 31 Dec 9999 23:59:59 GMT": ("image_unavailable", "asks to wait", 1),
    "to/": ("image_unavailable", "more than 5 redirects", 6),
    "to/http:%2F%2F[": ("image_unavailable", "invalid URL", 1),
    "to/file:%2F%2F%2Fetc%2Fpasswd": ("image_forbidden", "neither http: nor https:", 1),
    "to/data:,x": ("image_forbidden", "neither http: nor https:", 1),
    "to/http:%2F%2F169.254.169.254%2F": ("image_forbidden", "'169.254.169.254', which is not in", 1),
    "to/http:%2F%2Flocalhost%2F": ("image_forbidden", "'localhost', which is not in", 1),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_server_that_fails_or_lies_makes_an_error(fault: str, server: Server) -> None:
    error_type, words, num_requests = FAULTS[fault]
    is_slow = error_type == "image_timeout"
    images = loader(hosts=[server.host], timeout_s=0.5 if is_slow else 60, retries=1, max_bytes=100_000)
    got, message = refused(f"{server.url}/{fault}?SECRET", images)
    assert (got, words in message) == (error_type, True), message
    assert num_requests is None or len(server.asked) == num_requests


def test_a_server_that_sends_more_than_it_says_makes_an_error(server: Server) -> None:
    images = loader(hosts=[server.host], retries=0)
    # The rest is no answer to a request. If it comes with the last bytes of the image, the answer is wrong.
    assert refused(f"{server.url}/more", images)[0] in ("image_broken", "image_unavailable")
    assert images.load(f"{server.url}/image").width == 64


def test_a_host_must_be_named(server: Server, names: dict[str, list[list[str]]]) -> None:
    port = server.server_address[1]
    names["images.test"] = names["a.images.test"] = names["images.test.evil"] = [["127.0.0.1"]]
    images = loader(hosts=[server.host, f"images.test:{port}", f"*.b.test:{port}"])
    assert images.load(f"http://images.test:{port}/image").width == 64
    assert len(server.asked) == 1
    for host in ("localhost", "127.1", "2130706433", "0x7f000001", "[::1]", "[::ffff:127.0.0.1]", "0.0.0.0",
                 "127.0.0.2", "a.images.test", "images.test.evil", "b.test", "127.0.0.1@images.test.evil",
                 "images.test.", "%31", "SECRET:x@127.0.0.1", "images.test:80@a.images.test"):  # fmt: skip
        assert refused(f"http://{host}:{port}/image", images)[0] == "image_forbidden", host
        with pytest.raises(RowFailed, match=r"not in input\.images\.hosts|has a user name"):
            images.size_of(f"http://{host}:{port}/image")
    for url in ("http:", "http:///image", "https://", "http:/image", f"http:{server.host}/image",
                "http://127.0.0.1/image", "https://127.0.0.1/image"):  # fmt: skip
        assert refused(url, images)[0] == "image_forbidden", url
    assert refused("http://[", images)[0] == "image_not_found"
    assert refused(f"{server.url}/image", loader())[0] == "image_forbidden"
    assert len(server.asked) == 1


def test_a_host_with_a_private_address_is_not_asked(server: Server, names: dict[str, list[list[str]]]) -> None:
    # The server on another port stands for one in the network of the job.
    with serving() as secret:
        port = secret.server_address[1]
        images = loader(hosts=[server.host, f"images.test:{port}"], timeout_s=60, retries=0)
        for addresses in (["127.0.0.1"], ["::ffff:127.0.0.1"], ["127.0.0.2", "127.0.0.1"], ["0.0.0.0"]):
            names["images.test"] = [addresses]
            for url in (f"http://images.test:{port}/image", f"{server.url}/to/http:%2F%2Fimages.test:{port}%2Fimage"):
                error_type, message = refused(url, images)
                assert (error_type, "not public" in message) == ("image_forbidden", True), message
        assert secret.asked == []


def test_a_name_that_changes_its_address_leads_nowhere(server: Server, names: dict[str, list[list[str]]]) -> None:
    port = server.server_address[1]
    with serving("127.0.0.2", port) as secret:
        images = loader(hosts=[server.host, f"images.test:{port}"])
        names["images.test"] = [["127.0.0.1"], ["127.0.0.2"]]
        assert images.load(f"http://images.test:{port}/image").width == 64
        assert (server.asked, secret.asked) == (["/image"], [])


def test_which_addresses_are_public() -> None:
    hosts = AllowedHosts(("10.0.0.5:8000", "[fd00::5]"))
    private = (
        "127.0.0.1 127.9.9.9 10.0.0.1 172.16.0.1 192.168.1.1 169.254.169.254 100.64.0.1 0.0.0.0 0.1.2.3 192.0.2.1 "
        "198.18.0.1 224.0.0.1 239.1.1.1 240.0.0.1 255.255.255.255 ::1 :: fe80::1 fe80::1%lo fc00::1 fd00::1 fec0::1 "
        "ff02::1 2001:db8::1 ::ffff:10.0.0.1 ::ffff:7f00:1 ::127.0.0.1 2002:7f00:1:: 64:ff9b::7f00:1 64:ff9b:1::1"
    )
    assert [address for address in private.split() if hosts.has_address(address, 8000)] == []
    for address in ("8.8.8.8", "2606:4700:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"):
        assert hosts.has_address(address, 443), address
    assert hosts.has_address("10.0.0.5", 8000)
    assert hosts.has_address("fd00::5", 443)
    assert not hosts.has_address("10.0.0.5", 443)
    assert not hosts.has_address("fd00::5", 8000)


def test_hosts_of_a_spec() -> None:
    given = ["Images.Example.com", "*.example.com:8080", "192.0.2.7", "[2001:DB8:0::7]", "[::1]:80", "xn--bcher-kva.de"]
    hosts = AllowedHosts(ImageSettings(hosts=given).hosts)
    allowed = [("images.example.com", 443), ("a.b.example.com", 8080), ("192.0.2.7", 80), ("2001:db8::7", 80),
               ("::1", 80), ("xn--bcher-kva.de", 443)]  # fmt: skip
    assert [place for place in allowed if not hosts.has(*place)] == []
    not_allowed = [("images.example.org", 80), ("example.com", 8080), ("::1", 443), ("2.192.0.2.7", 80)]
    assert [place for place in not_allowed if hosts.has(*place)] == []
    assert not AllowedHosts(("*.0.0.1",)).has("127.0.0.1", 80)
    for host in ("", "*", "https://example.com", "example.com/x", "a b", "bücher.de", "::1", "[x]", "u@h", "h:0",
                 "h:65536", "*.*.com", "a.*.com"):  # fmt: skip
        with pytest.raises(ValidationError):
            ImageSettings(hosts=[host])


def test_jobs_without_images_import_neither_pillow_nor_aiohttp() -> None:
    code = (
        "import sys; from batchinf.prompts.media import ImageLoader; from batchinf.spec.images import ImageSettings\n"
        "ImageLoader(ImageSettings(), base_folder='.'); assert not {'PIL', 'aiohttp'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_loader_that_is_dropped_closes_its_connections(server: Server) -> None:
    code = (
        "import gc, sys\n"
        "from batchinf.prompts.media import ImageLoader\nfrom batchinf.spec.images import ImageSettings\n"
        "images = ImageLoader(ImageSettings(hosts=[sys.argv[1]]), base_folder=None)\n"
        "images.load(f'http://{sys.argv[1]}/image'); del images; gc.collect()"
    )
    command = [sys.executable, "-W", "always", "-c", code, server.host]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "Unclosed" not in done.stderr


# -- images in buckets -------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("store_of_this_process")
def test_an_image_in_a_bucket(url: str, store: stores.Proxy, tmp_path: pathlib.Path) -> None:
    data = encoded(left_red())
    name = "a b#ä%20?.png"
    stores.put(f"{url}/photos/one.png", data)
    stores.put(f"{url}/photos/{name}", data)
    stores.put(f"{url}/secret.png", data)
    digest = hashlib.sha256(data).hexdigest()
    settings = ImageSettings(folders=(f"{url}/photos/",), retries=1, timeout_s=20)
    of_files = ImageLoader(settings, base_folder=str(tmp_path))
    of_bucket = ImageLoader(ImageSettings(), base_folder=f"{url}/photos")
    sources = [(of_files, f"{url}/photos/one.png"), (of_files, f"{url}/photos/x/../{name}")]
    sources += [(of_bucket, "one.png"), (of_bucket, f"./{name}"), (of_bucket, f"{url}/photos/one.png")]
    assert [loader.load(source).digest for loader, source in sources] == [digest] * 5
    assert [loader.fetches(source) for loader, source in sources] == [True] * 5

    # With the cache, a run and its resumes read an object once.
    store.seen.clear()
    cached = ImageLoader(settings, base_folder=None, cache_folder=Folder(tmp_path / "cache"))
    assert {cached.digest(f"{url}/photos/one.png") for _ in range(3)} == {digest} and len(store.seen) == 1

    def refused(loader: ImageLoader, source: str, fault: str = "") -> tuple[str, str]:
        store.fault = lambda method, path: fault
        with pytest.raises(RowFailed) as raised:
            loader.load(source)
        assert "\n" not in raised.value.error.error_message and "key" not in raised.value.error.error_message.replace(
            "SecretKey", ""
        )
        return raised.value.error.error_type, raised.value.error.error_message

    for loader in (of_files, of_bucket):
        forbidden = [
            f"{url}/secret.png",
            f"{url}/photos/../secret.png",
            f"{url}/photos-2/one.png",
            "s3://jobs",
            "gs://b/x",
        ]
        kinds, messages = zip(*(refused(loader, source) for source in forbidden), strict=True)
        with pytest.raises(RowFailed, match="outside of the input's folder"):
            loader.size_of(forbidden[1])
        assert loader.size_of(f"{url}/photos/one.png") is None
        assert {*kinds} == {"image_forbidden"} and f"name its folder, {url}, in input.images.folders" in messages[1]
    assert refused(of_bucket, "../secret.png")[0] == "image_forbidden"
    assert refused(of_bucket, "/etc/passwd")[0] == "image_forbidden"
    one = f"{url}/photos/one.png"
    assert refused(of_files, f"{url}/photos/none.png") == ("image_not_found", f"'{url}/photos/none.png' does not exist")
    assert refused(of_files, one, "403")[0] == "image_forbidden"
    assert refused(of_files, one, "400 ExpiredToken")[0] == "image_forbidden"
    kind, message = refused(of_files, one, "503")
    assert kind == "image_unavailable" and "in 2 requests" in message
    small = ImageLoader(ImageSettings(max_bytes=10), base_folder=f"{url}/photos")
    kind, message = refused(small, "one.png")
    assert kind == "image_too_large" and f"has {len(data)} bytes, and input.images.max_bytes allows 10" in message
    brief = ImageLoader(ImageSettings(timeout_s=0.5), base_folder=f"{url}/photos")
    assert refused(brief, "one.png", "delay 3")[0] == "image_timeout"


@pytest.mark.parametrize("folder", ["s3://key@bucket/x", "s3://b/../c", "hf://buckets/a/b/c", "ftp://host/x"])
def test_folders_that_are_refused(folder: str) -> None:
    with pytest.raises(ValidationError, match="got '"):
        ImageSettings(folders=(folder,))


@pytest.mark.parametrize("format", ["JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF"])
def test_base64_without_data_is_called_so(format: str) -> None:
    file = io.BytesIO()
    Image.new("RGB", (40, 30), (9, 90, 200)).save(file, format)
    text = base64.b64encode(file.getvalue()).decode()
    for reads in (loader().load, loader().size_of):
        with pytest.raises(RowFailed, match="looks like the base64 of a picture") as refused:
            reads(text)
        assert refused.value.error.error_type == "image_broken"
    assert loader().load(f"data:image/png;base64,{text}").width == 40
