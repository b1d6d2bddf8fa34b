"""Makes the archives in this folder: output folders of each task, as the present version of batchinf writes them.
Those in `format-2` are of an earlier version, which this one only reads.

    python tests/folders/make.py [TASK or TASK-STATE …]

`tests/test_folders.py` continues them with the code as it then is. So they are made again only when a change of a
stored format raises `FORMAT_VERSION`: see CONTRIBUTING.md. Each archive holds the spec, the input and the output
folder, with paths relative to them. The jobs run on the scripted engine, in threads of one process.
"""

import gzip
import io
import itertools
import json
import os
import pathlib
import shutil
import sys
import tarfile
import tempfile
import traceback
from typing import Any

from batchinf.base.storage import Folder, decode_record, encode_record
from batchinf.manifest.commit_log import encode_commits, whole_lines
from batchinf.source.cache import CACHE_VERSION

FOLDERS = pathlib.Path(__file__).resolve().parent
TINY_LLAMA = FOLDERS.parents[1] / "sample_data" / "tiny-llama"
RETRY = "row_index % 2 = 0"
STATES = ("finished", "killed", "retrying")
# Sections of each task's spec beside those of `spec_of`.
TASKS: dict[str, dict[str, Any]] = {
    "generate": {"sampling": {"temperature": 1.0, "n": 2, "max_tokens": 8, "logprobs": 2}},
    "score": {
        "input": {"prompt_template": "{{ prompt }}", "choices_column": "choices", "answer_column": "answer"},
    },
    "logits": {"logits": {"token_ids": [1, 5, 9]}},
    "embed": {},
    "classify": {"pooling": {"labels": ["no", "yes"]}},
    "reward": {"pooling": {"width": 1}},
    "hidden_states": {"pooling": {"width": 4, "positions": "all"}},
    "rerank": {"input": {"query_column": "prompt", "documents_column": "choices"}, "pooling": {"top_n": 2}},
}
NUM_ROWS = 48
# How a killed job is recognised in the middle of its work; a part is published after the journal has the results.
_KILLED_AT = {"killed": "coordinator.after_publish:4=kill", "retrying": "coordinator.after_publish:3=kill"}
_LEFT_OUT = {"lock", "logs", "status.json"}


def write_inputs(folder: pathlib.Path, task: str, num_rows: int = NUM_ROWS) -> None:
    """Write the spec, the input and the model of a task's job."""
    write_rows(folder, num_rows)
    spec: dict[str, Any] = {
        "model": "./model",
        "task": task,
        "input": {"path": "rows.jsonl", "id_column": "id"},
        "output": {"path": "out", "keep_columns": ["language"], "rows_per_shard": 6},
        "parallel": {"data_parallel_size": 1},
        "checkpoint_interval_s": 0.01,
        "scripted": {"max_num_seqs": 4, "step_s": 0.003, "max_model_len": 64},
    }
    for name, section in TASKS[task].items():
        spec[name] = {**spec.get(name, {}), **section}
    (folder / "job.yaml").write_text(json.dumps(spec, indent=2) + "\n")
    write_model(folder, task)


def write_rows(folder: pathlib.Path, num_rows: int) -> None:
    """Write an input of this many rows."""
    languages = ("en", "de", "vi")
    with (folder / "rows.jsonl").open("w") as file:
        for number in range(num_rows):
            row = {
                "id": f"row-{number:03d}",
                "prompt": f"Once upon a time there were {number} foxes",
                "language": languages[number % 3],
                "choices": [" here", " there", " nowhere"],
                "answer": number % 3,
            }
            file.write(json.dumps(row) + "\n")


def write_model(folder: pathlib.Path, task: str) -> None:
    """Make the sample model the folder's, with a head for the tasks that need one."""
    shutil.copytree(TINY_LLAMA, folder / "model")
    if task in ("classify", "reward", "rerank"):
        path = folder / "model" / "config.json"
        config = json.loads(path.read_text())
        changed = {"architectures": ["LlamaForSequenceClassification"], "num_labels": 2 if task == "classify" else 1}
        path.write_text(json.dumps(config | changed))


def pack(folder: pathlib.Path, archive: pathlib.Path) -> None:
    """Pack the spec, the input and the output folder, always with the same bytes for the same files."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        for path in sorted(folder.rglob("*")):
            name = path.relative_to(folder)
            if name.parts[0] == "model" or (name.parts[0] == "out" and {*name.parts} & _LEFT_OUT):
                continue
            info = tarfile.TarInfo(str(name))
            info.type = tarfile.DIRTYPE if path.is_dir() else tarfile.REGTYPE
            info.mode = 0o755 if path.is_dir() else 0o644
            content = b"" if path.is_dir() else _content(path, folder)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    archive.write_bytes(gzip.compress(data.getvalue(), mtime=0))


def _content(path: pathlib.Path, folder: pathlib.Path) -> bytes:
    """The content of a file, without the path of this folder: in the manifest's header and the input's scan."""
    content = path.read_bytes()
    if path.parent.name == "manifest":
        lines = [*whole_lines(Folder(folder), str(path.relative_to(folder)))]
        return encode_commits([[{**line, "input_folder": None} if "input_folder" in line else line] for line in lines])
    if path.name != "files.json" or path.parent.name != "source":
        return content
    entries = decode_record(content, CACHE_VERSION)
    return encode_record(CACHE_VERSION, {name: {**entry, "path": name} for name, entry in entries.items()})


def unpack(name: str, folder: pathlib.Path) -> None:
    """Unpack an archive, such as `score-killed`, and put the model beside it."""
    with tarfile.open(FOLDERS / f"{name}.tar.gz") as tar:
        tar.extractall(folder, filter="data")
    write_model(folder, name.rpartition("/")[2].partition("-")[0])


def _run(folder: pathlib.Path, retry: str | None = None, faults_at: str = "") -> int:
    """Run the folder's job in a fork of this process, which has imported everything. The exit code."""
    child = os.fork()
    if child == 0:
        try:
            os.chdir(folder)
            faults._FAULTS = faults._parse(faults_at)
            with interruptible(ends_process=True):
                display = ProgressDisplay(is_quiet=True)
                run_job(read_spec("job.yaml", ()), InProcessBackend(), display, retry, extends=False, fresh=False)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _is_in_the_middle(folder: pathlib.Path, state: str) -> bool:
    """Whether the journal has results of a shard whose part is not written yet."""
    out = folder / "out"
    written = {path.name[:6] for path in (out / "staging").iterdir()}
    if state == "killed":  # a retry replaces parts
        written |= {path.name[5:11] for path in (out / "parts").iterdir()}
    return bool({path.name[:6] for path in (out / "journal").iterdir()} - written)


def make(task: str, state: str) -> None:
    """Make one archive. A kill may come when the journal has nothing that a resume can use: then once more."""
    while True:
        with tempfile.TemporaryDirectory() as scratch:
            folder = pathlib.Path(scratch)
            write_inputs(folder, task)
            if state != "killed":
                assert _run(folder) == 0
            if state != "finished":
                assert _run(folder, RETRY if state == "retrying" else None, _KILLED_AT[state]) == -9
                if not _is_in_the_middle(folder, state):
                    continue
            pack(folder, FOLDERS / f"{task}-{state}.tar.gz")
            return


def main() -> None:
    names = sys.argv[1:] or TASKS
    for task, state in itertools.product(TASKS, STATES):
        if {task, f"{task}-{state}"} & {*names}:
            make(task, state)
            print(f"{task}-{state}: {(FOLDERS / f'{task}-{state}.tar.gz').stat().st_size:,} bytes", flush=True)


if __name__ == "__main__":
    sys.path.append(str(FOLDERS.parent / "fleet"))

    from in_process import InProcessBackend
    from transformers import PreTrainedTokenizerFast  # noqa: F401 -- two threads cannot import it at once

    from batchinf.base import faults
    from batchinf.base.stop_signals import interruptible
    from batchinf.coordinator.display import ProgressDisplay
    from batchinf.coordinator.run import run_job
    from batchinf.spec.file import read_spec

    main()
