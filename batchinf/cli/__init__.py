"""The command line: each command is one function, each error one clear line and an exit code (see `errors`)."""

from batchinf.cli import jobs, outputs  # they add the commands
from batchinf.cli.program import app, main

__all__ = ["app", "jobs", "main", "outputs"]
