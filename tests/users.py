"""Runs commands as other users of this host, for tests that run as root."""

import os
import shutil
import subprocess
import sys

import pytest

GROUP = 50_000
ONE, OTHER = 50_001, 50_002  # users of the group

_RUN = 'umask "$0"; exec "$@"'


def as_user(user: int, umask: str = "022") -> list[str]:
    """A command before another one, which then runs as this user of the group.

    The user may read every file, because the interpreter may lie in root's home.
    """
    may_read = ("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search")
    change = (
        "setpriv",
        f"--reuid={user}",
        f"--regid={GROUP}",
        "--clear-groups",
        "--bounding-set=-all,+dac_read_search",
    )
    return [*change, *may_read, "sh", "-c", _RUN, umask]


def needs_users() -> pytest.MarkDecorator:
    """Skip a test where no other user can be had."""
    works = os.getuid() == 0 and shutil.which("setpriv") is not None
    if works:
        probe = [*as_user(ONE), sys.executable, "-c", "import os; raise SystemExit(os.getuid() != 50001)"]
        works = subprocess.run(probe, capture_output=True, check=False).returncode == 0
    return pytest.mark.skipif(not works, reason="needs root and setpriv, to run as other users")
