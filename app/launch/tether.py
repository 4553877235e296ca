"""Runs a command that gets SIGTERM when the process that started it is gone, however it went.

usage: python -I -S tether.py PARENT COMMAND [ARGUMENT]...

A program of its own: the code between fork and exec of a process with threads must not be Python.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, *command = sys.argv[1:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != int(parent):  # it went before we asked
            sys.exit(1)
    # A shell's background job ignores both, and what it starts would too: the signals by which we end workers.
    for ignored in (signal.SIGINT, signal.SIGQUIT):
        signal.signal(ignored, signal.SIG_DFL)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
