"""`batchinf`, forked by the server that `FORKED_BY` names, with this process's streams. Pages have it as their command.

The server of `VLLM_FORKED_BY` forks the replicas of `run-batch`, which run vLLM. If the environment does not allow a
fork, it is a new process. A signal to this process does not reach a fork.
"""

import os
import sys

from fork_server import ForkedPopen, address_for


def main(*arguments: str) -> None:
    command = [sys.executable, "-m", "batchinf", *arguments]
    address = address_for(os.environ)
    if address is None:
        os.execv(command[0], command)
    replicas = address_for(os.environ, "VLLM_FORKED_BY") if arguments[:1] == ("run-batch",) else None
    code = ForkedPopen(address, replicas or address, command, env=os.environ).wait()
    sys.exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main(*sys.argv[1:])
