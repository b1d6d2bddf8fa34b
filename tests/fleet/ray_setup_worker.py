"""Becomes a process of Ray with the environment of its job, in place of Ray's `setup_worker.py`.

Ray's script imports all of Ray to do so, a second of processor time in each of a hundred processes. Ray leaves the
script out where there is no environment to set, and knows it by the end of its name.
"""

import json
import os
import sys

_CONTEXT = "--serialized-runtime-env-context="


def main() -> None:
    [given] = [argument for argument in sys.argv if argument.startswith(_CONTEXT)]
    context = json.loads(given.removeprefix(_CONTEXT))
    assert not context["command_prefix"] and not context["override_worker_entrypoint"]
    others = [argument for argument in sys.argv[1:] if not argument.startswith((_CONTEXT, "--language="))]
    command = [context["py_executable"], *others]
    os.execve(command[0], command, {**os.environ, **context["env_vars"]})


if __name__ == "__main__":
    main()
