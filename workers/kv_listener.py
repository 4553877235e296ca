"""Adapter to vLLM's NIXL connector: an engine whose handshake listener ends must not wait for it.

A thread of the engine's listens for decode workers. vLLM waits without limit for it to be there, so that with its port
taken the engine loaded for ever; and when it ends later, every request of this prefill worker waits in vain. A general
plugin of vLLM's, since those run in its engine's process (see pyproject.toml).
"""

from __future__ import annotations

import logging
import os
import threading

#: vLLM's name of the thread.
LISTENER = "nixl_handshake_listener"

log = logging.getLogger(__name__)


def install() -> None:
    """End this process when the thread fails: the worker sees its engine die, and is started again on another port."""
    report = threading.excepthook

    def ended(failure: threading.ExceptHookArgs) -> None:
        report(failure)
        if failure.thread is not None and failure.thread.name == LISTENER:
            log.critical(
                "nobody listens for decode workers on %s:%s (%s): the engine ends, to be started again",
                os.environ.get("VLLM_NIXL_SIDE_CHANNEL_HOST"),
                os.environ.get("VLLM_NIXL_SIDE_CHANNEL_PORT"),
                failure.exc_value,
            )
            logging.shutdown()
            os._exit(1)

    threading.excepthook = ended
