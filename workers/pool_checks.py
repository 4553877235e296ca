"""What the pool cannot work with, told at the start."""

import inspect
from typing import Any

from celery import Celery
from celery.exceptions import ImproperlyConfigured
from celery.utils import threads
from kombu.utils.compat import detect_environment

from workers.aiotask import AioTask


def refuse_unfit(app: Celery, hub: Any) -> None:
    """Raise ImproperlyConfigured where tasks would block, get lost or see each other's request."""
    patched = detect_environment()
    if patched != "default":
        raise ImproperlyConfigured(
            f"workers.pool:TaskPool needs real threads and sockets, but {patched} has monkey-patched this process: "
            f"start the worker without {patched}"
        )
    if hub is None:
        raise ImproperlyConfigured(
            "workers.pool:TaskPool needs Celery's event loop, which this broker's transport cannot use: take redis://"
        )
    if threads.USE_FAST_LOCALS:
        raise ImproperlyConfigured("USE_FAST_LOCALS makes all tasks of a thread share one request: unset it")
    wrong = [task.name for task in app.tasks.values() if _needs_aiotask(task)]
    if wrong:
        raise ImproperlyConfigured(f"async tasks need @app.task(base=AioTask), and may not yield: {', '.join(wrong)}")


def _needs_aiotask(task: Any) -> bool:
    body = inspect.unwrap(task.run)
    return inspect.isasyncgenfunction(body) or (inspect.iscoroutinefunction(body) and not isinstance(task, AioTask))
