"""Pushes the output of a finished job to the hub, for `output.push_to_hub`. The hub alone says what was pushed.

The card names the job and its rows, and comes with the rows in one commit. So a push that failed or was killed runs
again with the next `run`, and rows that are there are not pushed twice. The push is a process of its own, in which
this module is run as a program: a stop ends an upload at once.
"""

import json
import math
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from batchinf.base.errors import BatchinfError, Interrupted, UserError
from batchinf.base.process import NoAnswerError, Question, leave
from batchinf.base.slices import job_folder
from batchinf.base.stop_signals import STOP_SIGNALS
from batchinf.base.storage import disk_error
from batchinf.base.text import counted
from batchinf.commands.export import ExportRequest, export_job
from batchinf.coordinator.ending import Summary
from batchinf.export.dataset_card import rows_mark
from batchinf.export.huggingface import HuggingFaceExport, JobDataset
from batchinf.manifest.names import PUSH_FOLDER
from batchinf.results import Results
from batchinf.spec.file import SpecFile
from batchinf.spec.output import PushSpec

_FILE_BYTES = 512 << 20  # of parts, for each file
_LOOK_S = 0.05


def check_push(file: SpecFile, job_id: str | None) -> None:
    """Raise UserError if the hub would refuse the rows of the job, before any row runs. job_id: None for a new job."""
    if (target := file.spec.output.push_to_hub) is None:
        return
    if file.slice is not None:
        raise UserError(
            f"output.push_to_hub: got it with --slice {file.slice}; leave it out, and when all slices are done, run "
            f"batchinf export {file.spec.output.path} --to hf -o FOLDER && hf upload {target.repository} FOLDER . "
            "--repo-type dataset --private"
        )
    JobDataset.reserve(target, job_id, "no engine has started")


def push_output(file: SpecFile, summary: Summary, say: Callable[[str], None], stop: threading.Event | None) -> Summary:
    """Push the output of the finished job if its spec says so and the hub does not have it.

    Returns the summary with a line about it. stop: ends the push when it is set. Raises UserError, or Interrupted.
    """
    if (target := file.spec.output.push_to_hub) is None:
        return summary
    if not summary.has_begun:
        return replace(summary, remarks=(*summary.remarks, f"nothing is pushed to {target.repository}"))
    say(f"pushing {counted(summary.num_rows, 'output row')} to {target.repository} on the hub, unless it has them")
    out = file.spec.output.path
    folder = str(job_folder(file.spec.output.folder, None).path(PUSH_FOLDER))
    question = {
        "out": out,
        "folder": folder,
        "target": target.model_dump(),
        "num_files": max(1, math.ceil(summary.num_bytes / _FILE_BYTES)),
        "parent": os.getpid(),
    }
    try:
        with Question("batchinf.commands.push", question, math.inf, {}) as asked:
            while not asked.is_answered:
                if stop is not None and stop.is_set():
                    raise Interrupted("stopped on request: the job is done, and its output is not pushed")
                time.sleep(_LOOK_S)
            answer = asked.answer()
    except NoAnswerError as error:
        raise UserError(f"output.push_to_hub: the process that pushes has ended: {error}; {_again(out)}") from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if "error" in answer:
        raise UserError(answer["error"])
    return replace(summary, remarks=(*summary.remarks, answer["line"]))


def _again(out: str) -> str:
    return f"the job is done, and its output is in {out}; run the same command again to push it"


def _push(question: Mapping[str, Any]) -> str:
    results = Results(question["out"])
    target = PushSpec(**question["target"])
    again = _again(question["out"])
    dataset = JobDataset.reserve(target, results.job_id, again)
    if rows_mark(results, target.split) in dataset.card:
        return f"the hub has these rows already: {target.repository}"
    folder = question["folder"]
    shutil.rmtree(folder, ignore_errors=True)  # of a push that was killed
    request = ExportRequest(to=HuggingFaceExport.name, path=folder, num_files=question["num_files"], split=target.split)
    export_job(question["out"], request)
    invented = "" if results.spec.get("scripted") is None else " (its answers are invented: the spec has `scripted`)"
    return f"pushed to the hub: {dataset.push(folder, again)}{invented}"


def _end_with(parent: int) -> None:
    """End this process if its parent has been killed."""
    while os.getppid() == parent:
        time.sleep(_LOOK_S)
    os._exit(1)


def _answer(question: Mapping[str, Any]) -> dict[str, str]:
    try:
        return {"line": _push(question)}
    except BatchinfError as error:
        return {"error": str(error)}
    except OSError as error:
        return {"error": f"output.push_to_hub: {disk_error(error)}; {_again(question['out'])}"}


if __name__ == "__main__":
    for number in STOP_SIGNALS:  # its parent ends it
        signal.signal(number, signal.SIG_IGN)
    asked_for = json.load(sys.stdin)
    threading.Thread(target=_end_with, args=(asked_for["parent"],), daemon=True).start()
    print(json.dumps(_answer(asked_for)), flush=True)
    leave(0)
