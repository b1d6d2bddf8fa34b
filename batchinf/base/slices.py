"""Slices of a job: their rows, their folders, and the record `OUT/cut.json`, which says what an output folder holds.

The first start that has passed all checks creates the record, just before it begins its job. `OUT/files.json` has the
digests of the model's files: the slices share it, so that all of them run one model.

Each slice is a job of its own in `OUT/slice-i`; the slices share `OUT/source`. A slice's first extent begins at its
first row, so `row_index` and seeds are those of the whole job. `i/N` belongs to a slice's identity, so a Parquet part
of one slice cannot be mistaken for a part of another.
"""

import pathlib
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, TypeVar

from pydantic import Field, StrictInt, StrictStr

from batchinf.base import faults
from batchinf.base.bucket import Bucket
from batchinf.base.errors import OutputError, SpecError
from batchinf.base.storage import Folder, NewerRecord, adapter, decode_record, encode_record, reason
from batchinf.base.text import near_path

CUT_VERSION = 1
MAX_SLICES = 999_999
SOURCE_FOLDER = "source"
CUT_RECORD = "cut.json"
FILES_RECORD = "files.json"
_T = TypeVar("_T")
_TEXT = re.compile("([0-9]{1,6})/([0-9]{1,6})")


@dataclass(frozen=True, slots=True)
class Slice:
    """One of `num_slices` ranges of consecutive rows."""

    index: int
    """From 0."""
    num_slices: int

    @classmethod
    def parse(cls, text: str) -> "Slice":
        """The slice that `--slice` names, as in `3/8`. Raises SpecError."""
        match = _TEXT.fullmatch(text)
        if match is None or int(match[1]) >= int(match[2]):
            raise SpecError(
                f"--slice: got {text[:60]!r}; must be i/N, i from 0 to N - 1 and N at most {MAX_SLICES}: "
                "--slice 0/8 is the first of eight, --slice 7/8 the last"
            )
        return cls(int(match[1]), int(match[2]))

    @classmethod
    def of(cls, identity: Mapping[str, Any]) -> "Slice | None":
        """The slice that a job's identity names; None for a whole job."""
        return cls.parse(identity["slice"]) if "slice" in identity else None

    def __str__(self) -> str:
        return f"{self.index}/{self.num_slices}"

    def rows(self, num_rows: int) -> range:
        """Its rows out of `num_rows`. Some slices are empty if there are more slices than rows."""
        return range(self.index * num_rows // self.num_slices, (self.index + 1) * num_rows // self.num_slices)

    @property
    def name(self) -> str:
        """Its folder in the output folder, padded with zeros so that names sort in row order: `slice-07` of 12."""
        return f"slice-{self.index:0{len(str(self.num_slices - 1))}d}"


@dataclass(frozen=True, slots=True)
class Cut:
    """What an output folder holds."""

    num_slices: Annotated[StrictInt, Field(ge=0, le=MAX_SLICES)]
    """0 for a whole job, which has no other fields."""
    num_rows: Annotated[StrictInt, Field(ge=0)] = 0
    """Of all slices together."""
    identity: dict[str, Any] = field(default_factory=dict)
    """Of the job."""
    begun_at: StrictStr = ""
    """When the first slice began, in ISO format; may be empty."""
    positions: StrictStr | None = None
    """Digest of the file of the chosen rows; None if they are the first `num_rows` of the input."""
    rules: Annotated[StrictInt, Field(ge=1)] = 1
    """The number of the rules with which the first slice began: `JobSpec.rules`."""


def is_slice_folder(name: str) -> bool:
    """Whether this is the name of a slice's folder."""
    return re.fullmatch(r"slice-\d+", name) is not None


def job_folder(out: str, slice_: Slice | None) -> Folder:
    """The folder of a job or of one of its slices."""
    return Folder(out) if slice_ is None else Folder(pathlib.Path(out, slice_.name), slice_)


def source_folder(folder: Folder) -> pathlib.Path:
    """Where a job keeps the results of the scan; all slices share one folder."""
    return (folder.root if folder.slice is None else folder.root.parent) / SOURCE_FOLDER


def no_job_message(out: object) -> str:
    """The error message for an output folder without a job's manifest."""
    if Folder(str(out)).exists("manifest"):
        return f"{out} holds no job yet: its first run ended before the job had begun; run the spec again"
    if not Folder(str(out)).root.exists():
        return f"{out} holds no job: there is no such folder; give the output.path of a job{near_path(str(out))}"
    return f"{out} holds no job: it has no manifest; give the output.path of a job"


def job_folders(out: str) -> list[Folder]:
    """The folders of the jobs in an output folder: one job, or all slices in row order, begun or not.

    Does not read the slices' folders. Raises OutputError if the slices' record is damaged, or if a whole job lies
    beside slices.
    """
    cut = read_cut(out)
    if cut is None:
        return [Folder(out)]
    if _holds_whole_job(out):
        raise OutputError(f"{out} holds both a whole job and slices: move one of them to another folder")
    return [job_folder(out, Slice(index, cut.num_slices)) for index in range(cut.num_slices)]


def read_cut(out: str) -> Cut | None:
    """The record of the slices in an output folder; None if it holds none. Raises OutputError for damage."""
    cut = _read_record(out)
    return cut if cut is not None and cut.num_slices else None


def _read_record(out: str) -> Cut | None:
    remedy = "delete it and run the job, or one of its slices, again, which writes it again"
    return _read_shared(out, CUT_RECORD, adapter(Cut).validate_python, remedy)


def _read_shared(out: str, name: str, decoded: Callable[[dict[str, Any]], _T], remedy: str) -> _T | None:
    """A record that all slices share; None without it. Raises OutputError. remedy: what to do about damage."""
    path = Folder(out).path(name)
    try:
        return decoded(decode_record(Folder(out).read(name), CUT_VERSION))
    except NewerRecord:
        raise OutputError(f"{path} was written by a newer batchinf: install a newer one") from None
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise OutputError(f"cannot read {path}: {reason(error)}") from error
    except ValueError:
        raise OutputError(f"{path} is damaged: {remedy}") from None


def write_cut(out: str, cut: Cut, bucket: Bucket | None = None) -> Cut:
    """Write the record unless there is one. Returns the record that is there now.

    bucket: of a job in a bucket, whose record counts.
    """
    Folder(out).make()
    faults.point("cut.before_record")
    _create_shared(out, CUT_RECORD, encode_record(CUT_VERSION, asdict(cut)), bucket)
    faults.point("cut.after_record")
    record = _read_record(out)
    assert record is not None
    return record


def _create_shared(out: str, name: str, data: bytes, bucket: Bucket | None) -> None:
    """Create a record that all slices share, durably, unless it is there."""
    if bucket is None:
        Folder(out).create_exclusive(name, data)
        return
    Folder(out).write_atomic(name, bucket.put_new(name, data).data)


def share_files(out: str, digests: Mapping[str, str], bucket: Bucket | None = None) -> dict[str, str]:
    """The digests of the model's files that all slices share: those of the slice that calls this first.

    Durable on return. bucket: see `write_cut`. Raises OutputError for a damaged record.
    """
    _create_shared(out, FILES_RECORD, encode_record(CUT_VERSION, dict(sorted(digests.items()))), bucket)
    return read_files(out)


def read_files(out: str) -> dict[str, str]:
    """The digests of the model's files that all slices share; empty before the first. Raises OutputError for damage."""
    remedy = "delete it, and run a slice that has begun, which writes it again"
    return _read_shared(out, FILES_RECORD, dict, remedy) or {}


def claim_whole(out: str, bucket: Bucket | None = None) -> None:
    """Make the output folder that of a whole job, durably. Raises OutputError if it holds slices."""
    write_cut(out, Cut(0), bucket)
    refuse_other_cut(out, None)


def refuse_other_cut(out: str, slice_: Slice | None) -> None:
    """Raise OutputError if an output folder holds a job that is cut differently. Writes nothing."""
    cut = _read_record(out)
    if slice_ is None and cut is not None and cut.num_slices:
        raise OutputError(
            f"{out} holds a job in {cut.num_slices} slices: run one of them with --slice i/{cut.num_slices}, or give "
            "this job another output.path"
        )
    if slice_ is not None and cut is not None and cut.num_slices not in (0, slice_.num_slices):
        raise OutputError(
            f"--slice {slice_}: {out} holds a job in {cut.num_slices} slices: use --slice i/{cut.num_slices}, or give "
            "this job another output.path"
        )
    if slice_ is not None and (_holds_whole_job(out) if cut is None else not cut.num_slices):
        raise OutputError(
            f"--slice {slice_}: {out} holds a job that is not cut into slices: continue it without --slice, or give "
            "this job another output.path"
        )


def _holds_whole_job(out: str) -> bool:
    folder = Folder(out)
    # A log alone does not prove a job: it may come from a start that ended before the job began. `job.yaml` is written
    # before the job's header.
    return bool(folder.list("parts") or (folder.list("manifest") and folder.exists("job.yaml")))
