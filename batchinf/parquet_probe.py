"""Looks at Parquet footers in a process of its own, before this one does.

pyarrow 26 lets an exception of its C++ end the process where a damaged footer's column chunks are asked for from
Python (found by fuzzing); reading rows is not concerned.
"""

import json
import subprocess
import sys
from collections.abc import Sequence

from batchinf.errors import InputError
from batchinf.input_files import InputFile

# What Python's own errors say comes again, and is told, when the file is opened in earnest.
_PROBE = """
import json, sys
import pyarrow.parquet as pq
for number, path in enumerate(json.load(sys.stdin)):
    try:
        metadata = pq.read_metadata(path)
        group = metadata.row_group(0)
        for column in range(group.num_columns):
            group.column(column)
    except Exception:
        pass
    print(number, flush=True)
"""


def probe_footers(files: Sequence[InputFile]) -> None:
    """Raise `InputError`, naming the file, if a footer would end this process. Half a second, and a read of each."""
    if not files:
        return
    paths = json.dumps([file.path for file in files])
    # -P: a `json.py` in the user's folder must not take the place of Python's own.
    command = [sys.executable, "-P", "-c", _PROBE]
    done = subprocess.run(command, input=paths, capture_output=True, text=True, check=False)
    num_seen = len(done.stdout.splitlines())
    if done.returncode < 0 and num_seen < len(files):
        raise InputError(f"{files[num_seen].name} cannot be read as parquet: its footer is not whole; is it damaged?")
