"""The files of a model, in a folder or by hub id: JSON files, whether the weights are whole, and a first digest.

The digest covers config and tokenizer files whole. Of the weights it covers each safetensors header and 64 bytes from
the middle of each of about 512 tensors. So most other models are noticed before an engine starts. `content.py` has the
digests of all bytes.
"""

import contextlib
import fnmatch
import functools
import hashlib
import json
import os
import pathlib
import shlex
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from batchinf.base.errors import ModelError
from batchinf.base.process import on_thread
from batchinf.base.storage import Folder
from batchinf.base.text import near_path
from batchinf.source.files import LFS_POINTER

# A few bytes from about this many tensors tell checkpoints of the same shapes apart.
_SAMPLED_TENSORS = 512
_SAMPLE_BYTES = 64
_LONGEST_HEADER_BYTES = 100_000_000  # the safetensors library's own bound

CONFIG_FILES = (
    "config.json", "generation_config.json", "*quant*_config.json", "quantize_config.json",
    "modules.json", "*_Pooling/config.json", "*_Dense/config.json",  # which positions are pooled, and how
)  # fmt: skip
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "vocab.txt", "*.model", "*.tiktoken", "tekken.json", "chat_template.jinja", "chat_template.json",
    "additional_chat_templates/*.jinja",
)  # fmt: skip
# They decide the output of jobs with images.
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
# Tokenizers of these plain classes are made from one of the vocabulary files.
PLAIN_TOKENIZERS = ("PreTrainedTokenizerFast", "TokenizersBackend")
VOCABULARY_FILES = ("tokenizer.json", "vocab.*", "*.model", "*.tiktoken", "tekken.json")

# Takes the place of a load format for the folder of a LoRA adapter, whose files are found in vLLM's order.
ADAPTER = "LoRA adapter"
ADAPTER_CONFIG = "adapter_config.json"

# Pattern of the weight files, and the index that names them if there are several.
_SAFETENSORS = ("*.safetensors", "model.safetensors.index.json")
_CONSOLIDATED = ("consolidated*.safetensors", "consolidated.safetensors.index.json")
_BIN = ("*.bin", "pytorch_model.bin.index.json")
_PT = ("*.pt", "")
# By load format, in the order in which vLLM's default loader looks. Other formats have other kinds of files.
_WEIGHTS = {
    "auto": (_CONSOLIDATED, _SAFETENSORS, _BIN, _PT),
    "hf": (_SAFETENSORS, _BIN, _PT),
    "bitsandbytes": (_SAFETENSORS, _BIN, _PT),
    "safetensors": (_SAFETENSORS,),
    "fastsafetensors": (_SAFETENSORS,),
    "instanttensor": (_SAFETENSORS,),
    "mistral": (_CONSOLIDATED,),
    "npcache": (_BIN,),
    "pt": (_PT,),
    ADAPTER: (("adapter_model.safetensors", ""), ("adapter_model.bin", ""), ("adapter_model.pt", "")),
}
# For load formats that are not in the table.
_WEIGHT_ENDINGS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".tensors", ".npz")
_NOT_WEIGHTS = ("training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt")


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """A JSON object from a file that exists. Raises ModelError if it holds anything else."""
    data = path.read_bytes()
    if data.startswith(LFS_POINTER):
        raise _pointer_error(path)
    try:
        value = json.loads(data)
    except ValueError as error:
        raise ModelError(f"{path} is not JSON ({error}); get the file again") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds a {type(value).__name__}, not a JSON object; get the file again")
    return value


def _pointer_error(path: pathlib.Path) -> ModelError:
    return ModelError(f"{path} is a git-lfs pointer in place of the file; run `git lfs pull` in {path.parent}")


def weight_files(folder: pathlib.Path, load_format: str) -> list[str]:
    """Names of the weight files that vLLM loads from a folder, sorted; those of the index if there is one."""
    kinds = _WEIGHTS.get(load_format, ())
    for pattern, index in kinds:
        if names := sorted(path.name for path in folder.glob(pattern) if path.name not in _NOT_WEIGHTS):
            return _indexed(folder / index) or names
    # Without any such file, the index names the missing ones.
    return next(filter(None, (_indexed(folder / index) for _, index in kinds)), [])


def loaded_files(folder: pathlib.Path, load_format: str) -> list[str]:
    """Names of all files with weights that vLLM may load from a folder and that are there, each once.

    For a load format of another kind these are all files whose names end as those of weights.
    """
    names = weight_files(folder, load_format)
    if load_format not in _WEIGHTS and load_format != "dummy":
        names = sorted(path.name for path in folder.glob("*") if path.suffix in _WEIGHT_ENDINGS)
    names += [path.relative_to(folder).as_posix() for path in _of_modules(folder)]
    return [name for name in dict.fromkeys(names) if (folder / name).is_file()]


def _of_modules(folder: pathlib.Path) -> list[pathlib.Path]:
    """The files of sentence-transformers modules in folders of their own, such as `2_Dense`."""
    try:
        modules = json.loads((folder / "modules.json").read_bytes())
        names = {module["path"] for module in modules}
    except (OSError, ValueError, LookupError, TypeError):  # vLLM ignores such a file, too
        return []
    inner_folders = (folder / name for name in sorted(filter(None, names)))
    return [path for inner in inner_folders if inner.is_relative_to(folder) for path in sorted(inner.glob("*"))]


def _indexed(index: pathlib.Path) -> list[str]:
    """The files that an index names; none if it is not there."""
    if not index.is_file():
        return []
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ModelError(f"{index} has no weight_map; get the file again")
    return sorted(set(weight_map.values()))


def read_header(path: pathlib.Path) -> tuple[dict[str, Any], int]:
    """A safetensors file's tensors by name (`dtype`, `shape`, `data_offsets`), and the byte at which its data starts.

    Raises ValueError if the file does not begin with 8 bytes of length, little-endian, and that much JSON.
    """
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8).ljust(8, b"\0"))
        if not 2 <= length <= min(path.stat().st_size - 8, _LONGEST_HEADER_BYTES):
            raise ValueError("no header, or half of one")
        header = json.loads(file.read(length))
    tensors = {name: tensor for name, tensor in header.items() if name != "__metadata__"}
    if not all(tensor.keys() >= {"dtype", "shape", "data_offsets"} for tensor in tensors.values()):
        raise ValueError("a header of another format")
    return tensors, 8 + length


def weight_problems(folder: pathlib.Path, load_format: str) -> list[str]:
    """The problems of a folder's weights, a line for each file; empty if they are whole."""
    if load_format not in _WEIGHTS:
        return []
    names = weight_files(folder, load_format)
    if not names:
        patterns = ", ".join(pattern for pattern, _ in _WEIGHTS[load_format])
        return [f"the folder has no weights ({patterns})"]
    return [f"{name} {problem}" for name in names if (problem := _problem(folder / name))]


def _problem(path: pathlib.Path) -> str | None:
    if not path.is_file():
        return "is missing"
    size = path.stat().st_size
    with path.open("rb") as file:
        if file.read(len(LFS_POINTER)) == LFS_POINTER:
            return "is a git-lfs pointer in place of the weights"
    if path.suffix != ".safetensors":
        return None if size else "is empty"
    try:
        tensors, start = read_header(path)
    except (ValueError, AttributeError):
        return f"is cut short, or no safetensors file ({size:,} bytes)"
    whole = start + max((tensor["data_offsets"][1] for tensor in tensors.values()), default=0)
    return None if size >= whole else f"is cut short ({size:,} of {whole:,} bytes)"


def matching(folder: pathlib.Path, patterns: tuple[str, ...]) -> list[pathlib.Path]:
    """The files that match, sorted."""
    return sorted({path for pattern in patterns for path in folder.glob(pattern) if path.is_file()})


def _describe_weights(folder: pathlib.Path, load_format: str) -> Iterator[str]:
    """A line for each weight file: its name and a digest of its header and of a few bytes of its tensors.

    Headers alone do not tell the checkpoints of a training run apart.
    """
    names = [name for name in weight_files(folder, load_format) if (folder / name).is_file()]
    for name in names:
        yield f"{name} {_sample(folder / name, max(1, _SAMPLED_TENSORS // len(names)))}"


def _sample(path: pathlib.Path, num_samples: int) -> str:
    try:
        header, start = read_header(path)
    except (ValueError, AttributeError):
        # Not safetensors: treated as one tensor.
        size = path.stat().st_size
        header = {"": {"dtype": "", "shape": [size], "data_offsets": [0, size]}}
        start = 0
    tensors = sorted(header.items())
    shapes = [(name, tensor["dtype"], tensor["shape"]) for name, tensor in tensors]
    result = hashlib.blake2b(json.dumps(shapes).encode())
    with path.open("rb") as file:
        for _, tensor in tensors[:: max(1, len(tensors) // num_samples)]:
            begin, end = tensor["data_offsets"]
            file.seek(start + (begin + end) // 2)
            result.update(file.read(min(_SAMPLE_BYTES, end - begin)))
    return result.hexdigest()


def write_cached(path: pathlib.Path, data: bytes) -> None:
    """Write a file of the user's cache in one step. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Folder(path.parent).write_atomic(path.name, data, durable=False, fault="cache")


# A machine without a network can take a minute to notice (name servers, dropped packets).
_TIMEOUT_S = 10.0
_SMALL_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py")


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """Where a model, a tokenizer or an adapter is: a folder of the user, or a commit in the hub's cache."""

    name: str
    """As the spec has it."""
    folder: pathlib.Path
    commit: str | None = None
    """None for a folder of the user."""
    is_online: bool = False
    """The hub can give files that the folder lacks."""

    def fingerprint(self, patterns: tuple[str, ...], load_format: str) -> str:
        """`id@commit` of a hub id; of a folder 32 hexadecimal digits over the files that match, and the weights."""
        if self.commit is not None:
            return f"{self.name}@{self.commit}"
        lines = []
        for path in matching(self.folder, patterns):
            data = path.read_bytes()
            if data.startswith(LFS_POINTER) and path.name.startswith("tokenizer"):
                raise _pointer_error(path)
            lines.append(f"{path.relative_to(self.folder).as_posix()} {hashlib.blake2b(data).hexdigest()}")
        lines += _describe_weights(self.folder, load_format)
        return hashlib.blake2b("\n".join(lines).encode(), digest_size=16).hexdigest()


def _local_folder(field: str, name: str, load_format: str = "") -> pathlib.Path | None:
    """The folder that a field of the spec names; None for a hub id. Raises ModelError for a name that is neither."""
    folder = pathlib.Path(name)
    if folder.is_dir():
        return folder.absolute()
    if folder.is_file():
        config = ADAPTER_CONFIG if load_format == ADAPTER else "config.json"
        raise ModelError(f"{field}: '{name}' is a file; give the folder that holds {config} and the weights")
    if name.startswith(("/", ".")) or name.count("/") > 1:
        hint = near_path(name) or "; a Hugging Face id would be 'org/name'"
        raise ModelError(f"{field}: there is no folder '{os.path.abspath(name)}'{hint}")
    return None


def check_name(field: str, name: str) -> None:
    """Raise ModelError for a name that is neither that of a folder nor an id that the hub allows. Asks no server."""
    if _local_folder(field, name) is None:
        _check_id(field, name)


def _check_id(field: str, name: str) -> None:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise ModelError(f"{field}: '{name}' is neither a folder here nor a Hugging Face id (org/name)") from error


def find(field: str, name: str, revision: str | None, load_format: str) -> ModelFolder:
    """The folder of this name or, for a hub id, the commit of `revision`: by the hub's answer, else by the cache.

    The hub is not asked about a commit hash whose cached folder has all weights of `load_format`. field: of the spec,
    for messages. Raises ModelError.
    """
    if (folder := _local_folder(field, name, load_format)) is not None:
        return ModelFolder(name, folder)
    from huggingface_hub import errors

    _check_id(field, name)
    cached = _cached(name, revision)
    if cached is not None and cached.name == revision and not weight_problems(cached, load_format):
        return ModelFolder(name, cached, cached.name)
    try:
        fetched = _fetch_small_files(name, revision)
    except (OSError, errors.HTTPError, ValueError) as error:  # type: ignore[attr-defined]
        if cached is None:
            raise ModelError(f"{field}: {_why_not(name, revision, error)}") from error
        return ModelFolder(name, cached, cached.name)
    return ModelFolder(name, fetched, fetched.name, is_online=True)


def fetch(field: str, name: str, commit: str, patterns: tuple[str, ...]) -> None:
    """Fetch these files of a commit into the cache. field: of the spec, for messages. Raises ModelError."""
    from huggingface_hub import errors, snapshot_download

    try:
        with _no_progress_bars():
            snapshot_download(name, revision=commit, allow_patterns=list(patterns))
    except (OSError, errors.HTTPError, ValueError) as error:  # type: ignore[attr-defined]
        raise ModelError(f"{field}: {_why_not(name, commit, error)}") from error


def _cached(name: str, revision: str | None) -> pathlib.Path | None:
    from huggingface_hub import try_to_load_from_cache

    for file in ("config.json", "tokenizer_config.json", "tokenizer.json", ADAPTER_CONFIG):
        path = try_to_load_from_cache(name, file, revision=revision)
        if isinstance(path, str):
            return pathlib.Path(path).parent
    return None


def _fetch_small_files(name: str, revision: str | None) -> pathlib.Path:
    from huggingface_hub import HfApi, snapshot_download

    ask = functools.partial(HfApi().model_info, name, revision=revision, timeout=_TIMEOUT_S / 2)
    files = on_thread(ask).result(_TIMEOUT_S).siblings or ()  # a call that hangs stays on its thread
    small = [file.rfilename for file in files if _is_small(file.rfilename)]
    with _no_progress_bars():
        return pathlib.Path(snapshot_download(name, revision=revision, allow_patterns=small or ["config.json"]))


@contextlib.contextmanager
def _no_progress_bars() -> Iterator[None]:
    from huggingface_hub import utils

    were_disabled = utils.are_progress_bars_disabled()  # type: ignore[attr-defined]
    utils.disable_progress_bars()  # type: ignore[attr-defined]
    try:
        yield
    finally:
        if not were_disabled:
            utils.enable_progress_bars()  # type: ignore[attr-defined]


def _is_small(name: str) -> bool:
    patterns = TOKENIZER_FILES if "/" in name else _SMALL_FILES
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _why_not(name: str, revision: str | None, error: Exception) -> str:
    """Why the hub gave nothing, and what to do about it."""
    from huggingface_hub import constants, errors

    page = f"{constants.ENDPOINT}/{name}"
    command = shlex.join(["hf", "download", name, *(["--revision", revision] if revision else [])])
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, errors.GatedRepoError):
        return f"'{name}' is gated; accept its licence at {page}, then run `hf auth login`"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"'{name}' has no revision '{revision}'; its branches and tags are at {page}/tree/main"
    if os.path.isdir(os.path.dirname(name)) and (near := near_path(name)):
        return f"{_nowhere(name)}{near}"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"{_nowhere(name)}, nor a model '{name}' on the hub; check the name; a private one needs `hf auth login`"
    if status == 401:
        return f"the hub refuses this machine's token for '{name}'; run `hf auth login`"
    return _no_answer(name, command, error, status)


def _no_answer(name: str, command: str, error: Exception, status: int | None) -> str:
    """See `_why_not`, for a hub that said nothing of the model. command: fetches it."""
    from huggingface_hub import errors

    absent = f"{_nowhere(name)}, nor a model in the hub cache"
    # Rather than an id: the download would be of no use.
    is_path = os.path.isdir(os.path.dirname(name)) or name.endswith(".json")
    if isinstance(error, errors.OfflineModeIsEnabled):
        remedy = "check the name" if is_path else f"unset it, or run `{command}` first"
        return f"{absent}, and HF_HUB_OFFLINE is set; {remedy}"
    answer = f"answered with status {status}" if status else f"cannot be reached ({_brief(error)})"
    remedy = "check the name" if is_path else f"run `{command}` where there is a network"
    return f"{absent}, and the hub {answer}; {remedy}"


def _nowhere(name: str) -> str:
    folder, _, last = name.rpartition("/")
    if os.path.isdir(folder):
        return f"there is no '{last}' in the folder '{os.path.abspath(folder)}'"
    return f"there is no {'file' if name.endswith('.json') else 'folder'} '{name}'"


def _brief(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer in {_TIMEOUT_S:.0f} s"
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(". ")
