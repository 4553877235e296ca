"""From the flags of `celery worker` to settings, and from settings to the worker's queues."""

from __future__ import annotations

import logging
from typing import Any

from app import settings
from app.celery import queues
from app.settings import Settings, SettingsError
from workers.preflight import MisconfiguredWorker, check

#: Two lines a request that say nothing that Flower and the metrics don't.
CHATTY = ("celery.worker.strategy", "celery.app.trace")


def configure(sender: str, conf: Any, options: dict[str, Any], **_: Any) -> None:
    """For Celery's `celeryd_init` signal, which comes before anything of the worker is made.

    What is wrong ends the process: Celery only logs a receiver's exceptions, and would go on with its defaults.
    """
    try:
        chosen = from_flags(options)
        check(chosen)
    except (SettingsError, MisconfiguredWorker) as error:
        raise SystemExit(f"worker {sender} cannot start: {error}") from error
    settings.use(chosen)
    conf.task_queues = queues(sender, chosen.roles)
    conf.worker_concurrency = chosen.worker.concurrency
    if chosen.log_level != "DEBUG":
        for name in CHATTY:
            logging.getLogger(name).setLevel(logging.WARNING)


def from_flags(options: dict[str, Any]) -> Settings:
    """All sources, with the command line's flags as the strongest."""
    tree = {
        "model": options.get("model"),
        "enable_multimodal": options.get("enable_multimodal") or None,
        "multimodal_embedding_cache_capacity_gb": options.get("multimodal_embedding_cache_capacity_gb"),
        "engine": {"args": options.get("engine_args")},
        "worker": {"roles": options.get("roles"), "gpu": options.get("gpu")},
    }
    given = {name: value for name, value in tree.items() if value is not None and not isinstance(value, dict)}
    for section in ("engine", "worker"):
        flags = {name: value for name, value in tree[section].items() if value is not None}  # type: ignore[union-attr]
        if flags:
            given[section] = flags
    return settings.load(**given)
