"""Export as a dataset of the Hugging Face hub: a folder of Parquet files and a card."""

import contextlib
import pathlib
from collections.abc import Iterator
from dataclasses import dataclass

from batchinf.base.errors import UserError
from batchinf.export.plain import ParquetExport
from batchinf.spec.output import PushSpec

DATA = "data"
"""The folder of the Parquet files."""
CARD = "README.md"
# The hub makes this file itself.
_HUBS_OWN = {".gitattributes"}
_FIELD = "output.push_to_hub"


class HuggingFaceExport(ParquetExport):
    """`datasets.load_dataset(FOLDER)` reads it."""

    name = "hf"


def job_mark(job_id: str) -> str:
    """How a card names the job that pushed it. The digest of its rows may follow."""
    return f"<!-- batchinf job={job_id} "


@dataclass(frozen=True, slots=True)
class JobDataset:
    """The dataset of `output.push_to_hub` as it is on the hub: the job may write to it."""

    target: PushSpec
    commit: str
    """The last one."""
    card: str
    """Empty if there is none."""

    @classmethod
    def reserve(cls, target: PushSpec, job_id: str | None, again: str) -> "JobDataset":
        """Make the dataset if it is not there. Raises UserError if the job may not write to it.

        job_id: None for a job that has not begun. again: the end of the error, which says what to do.
        """
        from huggingface_hub import HfApi, errors, get_token, utils

        name = target.repository
        api = HfApi()
        card = ""
        with _told(name, again):
            if get_token() is None:
                raise errors.LocalTokenNotFoundError
            api.create_repo(name, repo_type="dataset", private=not target.public, exist_ok=True)
            # As `auth_check` with `write`, which versions before 2.4 may lack.
            url = f"{api.endpoint}/api/datasets/{name}/auth-check/write"
            answer = utils.get_session().get(url, headers=utils.build_hf_headers())  # type: ignore[attr-defined]
            utils.hf_raise_for_status(answer)  # type: ignore[attr-defined]
            found = api.dataset_info(name)
            commit = str(found.sha)
            files = {file.rfilename for file in found.siblings or ()} - _HUBS_OWN
            if CARD in files:
                path = api.hf_hub_download(name, CARD, repo_type="dataset", revision=commit)
                card = pathlib.Path(path).read_text(encoding="utf-8", errors="replace")
        if not found.private and not target.public:
            why = f"the dataset {name} is public, so all could read the rows; make it private, or write public: true"
            raise UserError(f"{_FIELD}: {why}; {again}")
        is_own = job_id is not None and job_mark(job_id) in card
        if files and not is_own and not target.overwrite:
            why = f"the dataset {name} has {min(files)!r}, which this job has not pushed; give another name, or write"
            raise UserError(f"{_FIELD}: {why} overwrite: true to replace its data and card; {again}")
        return cls(target, commit, card)

    def push(self, folder: str, again: str) -> str:
        """Upload the folder in one commit, if no other one has come since. Returns its URL. Raises UserError."""
        from huggingface_hub import HfApi

        with _told(self.target.repository, again):
            commit = HfApi().upload_folder(
                repo_id=self.target.repository,
                repo_type="dataset",
                folder_path=folder,
                commit_message="Export of batchinf",
                delete_patterns=[f"{DATA}/*", "plots/*"],  # cards had plots until commit 7d63964a
                parent_commit=self.commit,
            )
        return str(commit.commit_url)


@contextlib.contextmanager
def _told(name: str, again: str) -> Iterator[None]:
    """Raise an error of the hub as a UserError of one line. again: the end of the line, which says what to do."""
    from huggingface_hub import errors

    try:
        yield
    except errors.HFValidationError:
        raise UserError(f"{_FIELD}: got {name!r}; must be the name of a dataset on the hub: USER/NAME") from None
    except errors.LocalTokenNotFoundError:
        why = "no token of the hub is here; set HF_TOKEN or run `hf auth login`"
        raise UserError(f"{_FIELD}: {why}; {again}") from None
    except errors.OfflineModeIsEnabled:
        raise UserError(f"{_FIELD}: HF_HUB_OFFLINE is set; unset it; {again}") from None
    except (errors.HTTPError, OSError, RuntimeError) as error:  # type: ignore[attr-defined]
        # An upload that fails is a RuntimeError that names the file, because of one of the others.
        cause = error.__cause__ if type(error) is RuntimeError and error.__cause__ is not None else error
        status = getattr(getattr(cause, "response", None), "status_code", None)
        if status in (401, 403):
            why = f"the hub does not let this machine's token write to {name} ({status}); run `hf auth login`"
        else:
            why = f"the hub answered with status {status}" if status else f"the hub cannot be reached: {cause}"
        raise UserError(f"{_FIELD}: {why}; {again}") from error
