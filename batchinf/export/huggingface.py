"""Export as a dataset of the Hugging Face hub: a folder of Parquet files and a card, which may be pushed."""

import contextlib
from collections.abc import Iterator

from batchinf.base.errors import UserError
from batchinf.export.plain import ParquetExport

DATA = "data"
"""The folder of the Parquet files."""
CARD = "README.md"
# The hub makes this file itself.
_HUBS_OWN = {".gitattributes"}


class HuggingFaceExport(ParquetExport):
    """`datasets.load_dataset(FOLDER)` reads it."""

    name = "hf"


def reserve(name: str, *, is_public: bool, overwrites: bool) -> None:
    """Make the dataset on the hub if it is not there, so that a missing right is found before rows are written.

    is_public: of a new dataset. overwrites: whether files that it has already may be replaced. Raises UserError.
    """
    from huggingface_hub import HfApi

    with _told(name):
        api = HfApi()
        api.create_repo(name, repo_type="dataset", private=not is_public, exist_ok=True)
        there = [file for file in api.list_repo_files(name, repo_type="dataset") if file not in _HUBS_OWN]
    if there and not overwrites:
        raise UserError(
            f"--push-to-hub: the dataset {name} has {there[0]!r} already; give another name, or --overwrite to replace "
            "its data and card"
        )


def push(name: str, folder: str) -> str:
    """Upload the folder in one commit that replaces the data of an earlier one. Returns the commit's URL.

    Raises UserError, which says how to upload the folder without another export.
    """
    from huggingface_hub import HfApi

    again = f"the dataset is in {folder}; `hf upload {name} {folder} . --repo-type dataset` uploads it"
    with _told(name, again):
        commit = HfApi().upload_folder(
            repo_id=name,
            repo_type="dataset",
            folder_path=folder,
            commit_message="Export of batchinf",
            delete_patterns=[f"{DATA}/*", "plots/*"],  # cards had plots until commit 7d63964a
        )
    return str(commit.commit_url)


@contextlib.contextmanager
def _told(name: str, again: str = "nothing was exported") -> Iterator[None]:
    """Raise an error of the hub as a UserError of one line. again: the end of the line, which says what to do."""
    from huggingface_hub import errors

    try:
        yield
    except errors.HFValidationError:
        raise UserError(f"--push-to-hub: got {name!r}; must be the name of a dataset on the hub: USER/NAME") from None
    except errors.LocalTokenNotFoundError:
        raise UserError(f"--push-to-hub: no token of the hub is here; run `hf auth login`; {again}") from None
    except errors.OfflineModeIsEnabled:
        raise UserError(f"--push-to-hub: HF_HUB_OFFLINE is set; unset it; {again}") from None
    except (errors.HTTPError, OSError, RuntimeError) as error:  # type: ignore[attr-defined]
        # An upload that fails is a RuntimeError that names the file, because of one of the others.
        cause = error.__cause__ if type(error) is RuntimeError and error.__cause__ is not None else error
        status = getattr(getattr(cause, "response", None), "status_code", None)
        if status in (401, 403):
            why = f"the hub does not let this machine's token write to {name} ({status}); run `hf auth login`"
        else:
            why = f"the hub answered with status {status}" if status else f"the hub cannot be reached: {cause}"
        raise UserError(f"--push-to-hub: {why}; {again}") from error
