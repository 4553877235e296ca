"""An API of several processes (`uvicorn --workers`), which share a port, Redis and a folder of metrics alone."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal

import psutil

log = logging.getLogger(__name__)

#: Those that are started together are started within so many seconds.
TOGETHER_S = 10.0


def end_siblings() -> None:
    """Called by one that cannot start. If it is one of those that were started together, none will, and the process
    that starts them would try for ever: it is told to end. One that was started anew later ends alone."""
    parent = multiprocessing.parent_process()
    if parent is None or parent.pid is None:
        return
    try:
        age = psutil.Process().create_time() - psutil.Process(parent.pid).create_time()
    except psutil.Error:
        return
    if age < TOGETHER_S:
        os.kill(parent.pid, signal.SIGTERM)
