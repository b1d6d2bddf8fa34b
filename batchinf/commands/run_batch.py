"""`batchinf run-batch`: the spec of a job by the command line of `vllm run-batch`, and the file that it writes."""

import contextlib
import difflib
import filecmp
import json
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from batchinf.base.errors import BatchinfError, ErrorRateExceeded, UserError
from batchinf.commands.export import Exported, ExportRequest, export_job
from batchinf.coordinator.ending import Summary
from batchinf.engines.installed import engine_argument_names, takes_text
from batchinf.export.files import Files, check_target, local_stem
from batchinf.model.model import resolve
from batchinf.prompts.chat import ChatTemplate
from batchinf.prompts.encoder import load_tokenizer
from batchinf.prompts.images import Placeholders
from batchinf.prompts.openai.lines import CHAT_URL, RERANK_URL, most_logprobs, url_of
from batchinf.source.formats.lines import OPENAI
from batchinf.spec.images import ImageSettings
from batchinf.spec.job import ENGINE_ARGUMENTS_ELSEWHERE, JobSpec
from batchinf.tasks.registry import task_of_url

# vLLM's short flags.
_SHORT = {"tp": "tensor_parallel_size", "pp": "pipeline_parallel_size", "dp": "data_parallel_size", "q": "quantization"}
# Flags of vLLM's server → fields of the spec.
_FIELDS = {
    **ENGINE_ARGUMENTS_ELSEWHERE,
    "default_chat_template_kwargs": "input.chat_template_kwargs",
    "seed": "sampling.seed",
    "tool_call_parser": "model.tool_parser",
}
# Flags of vLLM's server whose values are texts.
_TEXTS = frozenset({"chat_template", "response_role", "tool_call_parser"})
# Flags of vLLM's server → fields of `input.images`.
_OF_IMAGES = {"allowed_local_media_path": "folders", "allowed_media_domains": "hosts"}
_IMAGE_PARTS = ("image_url", "input_image")
# Flags without effect here, each with its reason. The user is told.
_WITHOUT_EFFECT = {
    "output_tmp_dir": "the results are in the job's folder until the end",
    "enable_auto_tool_choice": "--tool-call-parser is enough",
    "enable_log_outputs": "the outputs are in the job's folder",
    "disable_log_requests": "requests are not logged",
    "max_log_len": "requests are not logged",
}
_REFUSED = {
    **dict.fromkeys(("enable_metrics", "host", "port", "url"), "no server runs: see `batchinf status --watch`"),
    "follow": "`batchinf export FOLDER --to openai-batch -o FILE` writes the answers so far at any time",
    **dict.fromkeys(("enable_lora", "lora_modules"), "write a spec with model.lora, and run it with `batchinf run`"),
    "hf_token": "set HF_TOKEN in the environment",
}
# Numbers that may be written as 32k (thousands) or 32K (1,024s).
_READABLE = frozenset({"max_model_len", "max_num_batched_tokens", "kv_cache_memory_bytes", "max_num_scheduled_tokens"})
_UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRun:
    """A job over a batch file, and what becomes of its output."""

    spec: dict[str, Any]
    folder: str
    """The job's folder."""
    output: ExportRequest
    notes: tuple[str, ...]
    """Lines for the user about flags without effect."""


def batch_run(
    input_file: str, output_file: str, model: str, flags: Sequence[str], *, folder: str | None = None
) -> BatchRun:
    """The job of a command line. flags: those of vLLM's engine and server.

    folder: of the job; None: beside the file, or in the working folder if the answers go to a URL.

    Raises UserError for a flag that cannot be used, and for an output file of something else.
    """
    stem = local_stem(output_file)
    folder = folder or f"{stem}.job"
    _check_output(output_file, folder)
    input_file = kept_input(input_file, f"{stem}.input.jsonl")
    spec: dict[str, Any] = {
        "model": {"name": model},
        "input": {"path": input_file, "format": OPENAI},
        "sampling": {},
        "engine": {},
        "output": {"path": folder},
        "max_error_rate": 1.0,  # `check_lines` judges, once the answers are written
    }
    notes = []
    for name, value in read_flags(flags):
        if (reason := _REFUSED.get(name)) is not None:
            raise UserError(f"--{_flag(name)}: not supported: {reason}")
        if (reason := _WITHOUT_EFFECT.get(name)) is not None:
            notes.append(f"--{_flag(name)} has no effect: {reason}")
            continue
        _put(spec, name, value)
    if (task := _task_of(spec["engine"], input_file)) is not None:
        spec["task"] = task
    if (task or _first_task(input_file)) in (None, task_of_url(CHAT_URL)):
        asked = asked_by_lines(input_file)
        spec |= {section: {**asked[section], **spec[section]} for section in asked}
        _add_images(spec, most_images(input_file))
    output = ExportRequest(to="openai-batch", path=output_file, overwrites=True, splits_errors=False)
    return BatchRun(spec=spec, folder=folder, output=output, notes=tuple(notes))


def _check_output(output_file: str, folder: str) -> None:
    """Raise UserError if a job in this folder cannot write the file."""
    if output_file in ("-", "/dev/stdout"):
        raise UserError(
            f"-o: got {output_file}; must be a file. When the job is done, "
            "`batchinf export FOLDER --to openai-batch -o -` writes to stdout"
        )
    check_target(output_file)
    if os.path.lexists(output_file) and not os.path.lexists(folder):
        raise UserError(
            f"-o: {output_file} is there already, and no job in {folder} has written it; give another name, or delete "
            "it yourself"
        )


def kept_input(path: str, copy: str) -> str:
    """The input's path; of a pipe, that of a copy with all its lines: a job reads its input more than once.

    The same lines from a pipe again leave the copy as it is, so that the job resumes.
    """
    path = "/dev/stdin" if path == "-" else path
    try:
        mode = os.stat(path).st_mode
    except OSError:  # a glob or a URL, or the job says that it is not there
        return path
    if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
        # Other processes have another /dev/stdin.
        return os.path.realpath(path) if path.startswith("/dev/") else path
    part = f"{copy}.part"
    with open(path, "rb") as pipe, open(part, "wb") as file:
        shutil.copyfileobj(pipe, file)
    if os.path.isfile(copy) and filecmp.cmp(copy, part, shallow=False):
        os.remove(part)
    else:
        os.replace(part, copy)
    return copy


def write_answers(run: BatchRun, *, has_rows: bool) -> Exported:
    """Write the file of answers. has_rows: whether the input has any; without, the file is empty, as with vLLM."""
    if has_rows:
        return export_job(run.folder, run.output)
    with Files(overwrites=True) as files:
        files.open(run.output.path)
    return Exported(num_rows=0, files=tuple(files.written), notes=())


def check_lines(summary: Summary) -> None:
    """Raise ErrorRateExceeded if lines failed. The file of answers has them all."""
    if summary.num_errors:
        raise ErrorRateExceeded(
            f"{summary.num_errors:,} of {summary.num_rows:,} answers are errors; the file has each of them"
        )


def _add_images(spec: dict[str, Any], most: int) -> None:
    """Let the job load images if lines have some and the model takes them. most: of one line.

    Without, a line with an image is an error row and the others run, as with vLLM.
    """
    flags = spec["input"].get("images")
    if not most or (flags is None and not _takes_images(spec)):
        return
    spec["input"]["images"] = {"max_per_row": max(most, ImageSettings().max_per_row), **(flags or {})}


def _takes_images(spec: Mapping[str, Any]) -> bool:
    """Whether the model's chat template shows images. Anything wrong with the model is found when the job starts."""
    try:
        checked = JobSpec.model_validate({**spec, "input": {**spec["input"], "images": {}}})
        model = resolve(checked.model, has_images=True)
        tokenizer = load_tokenizer(model.tokenizer, checked.model.trust_remote_code)
        Placeholders(ChatTemplate(checked.input, tokenizer, None), tokenizer)
    except (BatchinfError, ValueError):
        return False
    return True


def _put(spec: dict[str, Any], name: str, value: Any) -> None:
    """Write a flag's value into the spec. Raises UserError for a flag that is not known."""
    if name == "chat_template":
        is_file = os.path.isfile(str(value))
        if not is_file and "{" not in str(value):  # else each prompt would be this text
            raise UserError(f"--chat-template: got {value}; must be a file that is there, or a template in Jinja")
        spec["input"]["chat_template"] = {"file": value} if is_file else value
        return
    if name == "response_role" and value == "assistant":
        return
    if (field := _OF_IMAGES.get(name)) is not None:
        spec["input"].setdefault("images", {})[field] = value if isinstance(value, list) else [value]
        return
    if name == "limit_mm_per_prompt":
        limit = value.get("image") if isinstance(value, dict) else value
        limit = limit.get("count") if isinstance(limit, dict) else limit
        if not isinstance(limit, int) or limit < 1:
            raise UserError(f'--limit-mm-per-prompt: got {value}; must have a number of images, such as {{"image": 2}}')
        spec["input"].setdefault("images", {})["max_per_row"] = limit
        return
    if (field := _FIELDS.get(name)) is not None:
        section, _, key = field.partition(".")
        spec.setdefault(section, {})[key] = value
        return
    _check_known(name)
    spec["engine"][name] = value


def _check_known(name: str) -> None:
    """Raise UserError if the installed vLLM has no such engine argument."""
    known = engine_argument_names()
    if known is None or name in known:
        return
    close = difflib.get_close_matches(name, {*known, *_FIELDS, "chat_template"}, n=1)
    hint = f"; did you mean --{_flag(close[0])}?" if close else "."
    raise UserError(
        f"--{_flag(name)}: not a flag of `batchinf run-batch`{hint} It takes the engine arguments of the installed "
        "vLLM" + ("" if close else ": see `vllm run-batch --help=all`")
    )


def _task_of(engine: Mapping[str, Any], path: str) -> str | None:
    """The task of a pooling engine: where flags ask for one, lines for texts do not decide. None: the lines do."""
    if engine.get("convert") == "classify":
        return task_of_url(RERANK_URL)
    if engine.get("runner") != "pooling" and engine.get("convert") != "embed":
        return None
    return _first_task(path, other_than=task_of_url(CHAT_URL))


def _first_task(path: str, other_than: str | None = None) -> str | None:
    tasks = (task_of_url(url_of(line)) for line in _lines(path))
    return next((task for task in tasks if task not in (None, other_than)), None)


def _bodies(path: str, words: Sequence[bytes]) -> Iterator[dict[str, Any]]:
    """The bodies of these lines. The job makes an error row of a line without one."""
    bodies = (line.get("body") for line in _lines(path, words))
    return (body for body in bodies if isinstance(body, dict))


def _lines(path: str, words: Sequence[bytes] = (b"",)) -> Iterator[dict[str, Any]]:
    """The lines of a file of this host that are JSON objects and have one of these words."""
    if not os.path.isfile(path):
        return
    with open(path, "rb") as file:
        for line in file:
            with contextlib.suppress(ValueError, RecursionError):
                values = json.loads(line) if any(word in line for word in words) else None
                if isinstance(values, dict):
                    yield values


def read_flags(flags: Sequence[str]) -> Iterable[tuple[str, Any]]:
    """Names and values of flags in vLLM's forms: `--a 1`, `--a=1`, `--flag`, `--no-flag`, `--names x y`, `-tp 2`."""
    place = 0
    while place < len(flags):
        flag, has_value, text = flags[place].partition("=")
        place += 1
        if not re.fullmatch(r"--?[A-Za-z][\w.-]*", flag):
            raise UserError(
                f"run-batch: got {flags[place - 1]!r} where a flag is expected, such as --max-model-len 512"
            )
        values = [text] if has_value else []
        while not has_value and place < len(flags) and not re.match(r"--?[A-Za-z]", flags[place]):
            values.append(flags[place])
            place += 1
        name = flag.lstrip("-").replace("-", "_")
        name = _SHORT.get(name, name)
        if not values and name.startswith("no_"):
            yield name.removeprefix("no_"), False
        elif not values:
            yield name, True
        else:
            read = [_value(name, value) for value in values]
            yield name, read[0] if len(read) == 1 else read


def _value(name: str, text: str) -> Any:
    """The text, or the number, true, false, null or JSON value that it says, if the flag takes no text."""
    if name in _TEXTS or takes_text(name):
        return text
    if name in _READABLE and (match := re.fullmatch(r"(\d+(?:\.\d+)?)([kmgtKMGT])", text)):
        return int(float(match[1]) * _UNITS[match[2]])
    try:
        return json.loads(text)
    except ValueError:
        return {"True": True, "False": False, "None": None}.get(text, text)


def _flag(name: str) -> str:
    return name.replace("_", "-")


def asked_by_lines(path: str) -> dict[str, dict[str, Any]]:
    """Sections of the spec with what some lines of a batch file need of the whole job.

    These are the most logprobs of outputs and of prompts that a line asks for. Nothing of a file that is not on this
    host.
    """
    return {"sampling": most_logprobs(_lines(path, (b"logprobs",)))}


def most_images(path: str) -> int:
    """The most images of one line of a batch file; 0 for a file that is not on this host."""
    return max((_num_images(body) for body in _bodies(path, (b"image",))), default=0)


def _num_images(body: Mapping[str, Any]) -> int:
    parts = [part for message in _items(body.get("messages")) for part in _items(message.get("content"))]
    return sum(part.get("type") in _IMAGE_PARTS for part in parts)


def _items(value: object) -> list[dict[str, Any]]:
    """The mappings in a list."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []
