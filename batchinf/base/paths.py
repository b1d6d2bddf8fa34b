"""Tells places on other machines, such as `s3://bucket/x`, from paths. Every local path that a user gives is checked.

Without the check, such a place is a relative path: a job would fill a folder `s3:` on this host.
"""

import os
import pathlib
import posixpath
import re

from batchinf.base.errors import OutputError, UserError
from batchinf.base.text import clip, name_type

LARGE_BYTES = 100_000_000
"""From this size on, a command says first what it copies from another machine."""
# A scheme or a host before the first slash: `s3://b/x`, `zip://a::s3://b/x`, `me@host:/x`. pathlib makes `s3:/b/x` of
# `s3://b/x`. One letter is no scheme.
_ELSEWHERE = re.compile(r"\s*[\w+.@:-]+[\w+.@-]:+/")
# Where a job's output may be, if not in a folder.
_BUCKET = re.compile(
    r"(?P<scheme>s3|gs|az)://(?P<bucket>[^/]+)/(?P<prefix>.+)|hf://buckets/(?P<hub>[^/]+/[^/]+)/(?P<path>.+)"
)
_OBJECT = re.compile(r"(?P<root>(?:s3|gs|az)://[^/]+)/(?P<name>.+)")
# In a URL, the user and the password before the host. A password may have a slash in it, as keys of S3 do; what stands
# after `:` and is only digits is a port.
PASSWORD = re.compile(r"//[^/?#:@]*:(?!\d*(?:[/?#]|$)).*@")
_URL_OF_BUCKET = re.compile(r"\s*(?:s3|gs|az|hf)://")
# The folders of caches, of this package and of the libraries that it uses.
_CACHE_FOLDERS = (
    "HF_HOME", "HF_HUB_CACHE", "HF_XET_CACHE", "HF_DATASETS_CACHE", "XDG_CACHE_HOME", "VLLM_CACHE_ROOT",
    "VLLM_CONFIG_ROOT", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TMPDIR",
)  # fmt: skip


def elsewhere(path: str, instead: str) -> str | None:
    """The message about a place that is not on this host; None for a path. instead: what to do."""
    if not _ELSEWHERE.match(path):
        return None
    if path.strip().startswith("file:/"):
        instead = "write the path alone, without file:"
    here = f"; '{os.path.normpath(path)}' is a path here too: rename it to use it" if os.path.lexists(path) else ""
    return f"got '{clip(shown_url(path), 200)}', but only a path of this host is possible: {instead}{here}"


def is_bucket(path: str) -> bool:
    """Whether this is the URL of a bucket, right or wrong, and no path of this host."""
    return _URL_OF_BUCKET.match(path) is not None


def is_http(path: str) -> bool:
    """Whether this is a URL of a web server."""
    return re.match("https?://", path) is not None


def shown_url(url: str) -> str:
    """A URL for people: without what may be a secret."""
    without_query = re.split("[?#]", PASSWORD.sub("//…@", url), maxsplit=1)[0]
    return re.sub(r"//[^/@]*@", "//…@", without_query)


def bucket_problem(url: str) -> str | None:
    """What is wrong with the URL of a bucket that is to hold a job; None if nothing is."""
    match = _BUCKET.fullmatch(url.rstrip("/"))
    if "@" in url or "?" in url or "#" in url:
        return (
            f"got '{clip(shown_url(url), 200)}' with a key, a query or a fragment in it, which would be recorded: "
            "leave it out, and give the key in the environment or in a profile"
        )
    names = url.split("://", 1)[1].strip("/").split("/")
    if match is None or any(name in ("", ".", "..") or re.search(r"[^\w.=+-]", name, re.ASCII) for name in names):
        return (
            f"got '{clip(url, 200)}'; must be a folder in a bucket, such as s3://bucket/my-job, gs://…, az://… or "
            "hf://buckets/user/bucket/my-job, of letters, digits and _ . = + -"
        )
    return None


def bucket_and_prefix(url: str) -> tuple[str, str, str]:
    """Scheme, bucket and prefix of a URL that `bucket_problem` has passed, or of a whole bucket."""
    match = _BUCKET.fullmatch(url)
    if match is None:  # a whole bucket, as `split_bucket_url` gives it
        scheme, _, bucket = url.partition("://")
        return scheme, bucket, ""
    if match["hub"]:
        return "hub", match["hub"], match["path"]
    return match["scheme"], match["bucket"], match["prefix"]


def split_bucket_url(url: str) -> tuple[str, str] | None:
    """The URL of the bucket of an object, and the object's name in it; None for a URL that is none of a bucket."""
    match = _OBJECT.fullmatch(url)
    return None if match is None else (match["root"], match["name"])


def folder_problem(url: str) -> str | None:
    """What is wrong with the URL of a folder of a bucket, or of a whole bucket; None if nothing is."""
    names = url.rstrip("/").split("/")[3:]
    if re.match(r"(?:s3|gs|az)://[^/@?#]+(?:/|$)", url) and not {"", ".", ".."} & {*names}:
        return None
    return (
        f"got '{clip(shown_url(url), 200)}'; must be a folder in a bucket, such as s3://bucket/photos, gs://… or "
        "az://…, without a key; give the key in the environment"
    )


def normal_bucket_url(url: str) -> str:
    """The URL of an object in a bucket without `.` and `..`, which do not lead out of the bucket."""
    scheme, _, rest = url.partition("://")
    bucket, _, name = rest.partition("/")
    return f"{scheme.lower()}://{bucket}/{posixpath.normpath(f'/{name}').lstrip('/')}"


def check_is_here(path: str | os.PathLike[str], name: str, instead: str) -> None:
    """Raise UserError for a place that is not on this host. name: of the argument or the variable."""
    if (message := elsewhere(os.fspath(path), instead)) is not None:
        raise UserError(f"{name}: {message}")


def folder_name(out: object) -> str:
    """The output folder that a caller names, as text. Raises UserError for a value that is no path of this host."""
    name = os.fspath(out) if isinstance(out, str | os.PathLike) else None
    if isinstance(name, str):
        check_is_here(name, "the output folder", "copy the folder to this host, and give the copy")
        return name
    raise OutputError(f"got {name_type(out)} as the output folder; must be its path, such as 'out/my-job'")


def check_caches() -> None:
    """Raise UserError if the environment puts a cache on another machine."""
    for name in _CACHE_FOLDERS:
        check_is_here(os.environ.get(name, ""), name, "set it to a folder of this host, or unset it")


def user_cache(name: str) -> pathlib.Path:
    """A folder of the user for what any job may need again. It may not exist. Raises RuntimeError without a home."""
    return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache", "batchinf", name)
