"""What errors of object stores mean, in words for people: of obstore, by its types and by what the stores answer."""

import importlib.util
import pathlib
import re

from batchinf.base.text import clip

NO_BUCKET = re.compile("NoSuchBucket|ContainerNotFound|The specified bucket does not exist")
_NOT_ALLOWED = ("PermissionDeniedError", "UnauthenticatedError")
_EXPIRED = re.compile("ExpiredToken|TokenRefreshRequired|RequestExpired|InvalidAccessKeyId|SignatureDoesNotMatch")
_FULL = re.compile("QuotaExceeded|InsufficientStorage|507 |EntityTooLarge")


def remedy(error: BaseException) -> str:
    """What the user must do about an error that stays the same until then; empty for one that may pass."""
    text = str(error)
    if _FULL.search(text):  # some stores answer 403 to it
        return "make room there, or ask for a larger quota"
    if NO_BUCKET.search(text):
        return "make the bucket first, or correct output.path"
    if is_refused(error):
        return "check that the key is right, has not expired, and may read, list, write and delete there"
    return no_credentials(error)


def is_refused(error: BaseException) -> bool:
    """Whether the store does not accept the credentials."""
    is_named_so = isinstance(error, PermissionError) or type(error).__name__ in _NOT_ALLOWED
    return is_named_so or _EXPIRED.search(str(error)) is not None


def no_credentials(error: BaseException) -> str:
    """In words, that obstore found no credentials: it then asks the host for those of a cloud's machine. Else empty."""
    if not re.search(r"169\.254\.169\.254|metadata\.google", str(error)):
        return ""
    has_profiles = (pathlib.Path.home() / ".aws").is_dir() and importlib.util.find_spec("boto3") is None
    more = ", or install boto3, which reads the profiles in ~/.aws" if has_profiles else ""
    return f"no credentials were found: set them in the environment{more}"


def one_line(error: BaseException) -> str:
    """The first line of an error, without what may be a secret. obstore's errors have 30 lines of debug text."""
    text = str(error).partition("\n")[0] or type(error).__name__
    if code := re.search(r"<Code>(\w+)</Code>", str(error)):
        text = f"{text.partition(': <?xml')[0]} ({code[1]})"
    text = re.sub(r"//[^/@\s]*@", "//…@", re.sub(r"\?\S+", "", text))
    return clip(text, 300)
