"""The process of one incarnation on this host: sets processor cores and signals, opens the socket, reports errors.

The local backend starts it as `python -m batchinf.fleet.local.process FD MEMORY` in its own session, with
its output in its log. FD is one end of a socket pair; MEMORY has the requests in flight. When the socket closes, the
whole process group ends, including engine processes, which would otherwise keep the device's memory.
"""

import contextlib
import mmap
import os
import signal
import socket
import sys
import threading
import traceback

from batchinf.base import faults
from batchinf.base.errors import EngineDeadError
from batchinf.base.process import leave
from batchinf.base.stop_signals import STOP_SIGNALS
from batchinf.fleet.local.channel import Channel
from batchinf.replica.in_flight import InFlightRecord
from batchinf.replica.incarnation import Incarnation, last_words
from batchinf.replica.messages import Launch
from batchinf.version import __version__


def end_group() -> None:
    """End this process and all that it started."""
    os.killpg(os.getpgrp(), signal.SIGKILL)


def main() -> None:
    """Entry point of the process."""
    # The coordinator decides when to stop. Signals to the whole process tree must not end a replica.
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    while not (messages := channel.receive(None)):
        if channel.is_closed:
            sys.exit("the coordinator ended before it said what to do")
    launch: Launch
    launch, *others = messages
    if launch.cpus:
        os.sched_setaffinity(0, launch.cpus)
    try:
        print(f"batchinf {__version__} replica {launch.replica} incarnation {launch.incarnation}", flush=True)
        record = InFlightRecord(mmap.mmap(int(sys.argv[2]), 0))
        replica = Incarnation(launch, channel, record, end_group)
        threading.Thread(target=replica.listen, args=(others,), name="control", daemon=True).start()
        faults.point("replica.start")
        replica.run()
    except BaseException as error:
        # The log may be on a full disk.
        with contextlib.suppress(OSError):
            traceback.print_exc()
            sys.stderr.flush()
        channel.send(last_words(error))
        leave(1 if isinstance(error, EngineDeadError) else 2)
    leave(0)


if __name__ == "__main__":
    main()
