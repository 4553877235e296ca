"""From a source to a verified local folder."""

from __future__ import annotations

import asyncio
import logging
import os
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from app import settings as all_settings
from app.adapters.base import Adapter, AdapterCacheFull, AdapterRefused
from app.adapters.cache import Cache
from app.adapters.flights import flight
from app.adapters.holds import HOLDS
from app.adapters.intake import Intake
from app.adapters.limits import Limits
from app.adapters.names import check_name
from app.adapters.sources import Source, find
from app.adapters.verify import Facts, verify
from app.settings_adapters import AdapterSettings
from app.settings_media import MediaUrlSettings

log = logging.getLogger(__name__)

#: Fetches of a process at once.
THREADS = 4

_threads = ThreadPoolExecutor(THREADS, thread_name_prefix="adapters")


async def fetch(
    name: str,
    source: str,
    settings: AdapterSettings,
    *,
    max_rank: int,
    base_model: str | None = None,
    version: str | None = None,
    urls: MediaUrlSettings | None = None,
) -> Adapter:
    """The adapter that `source` has now, in a folder that stays until this process calls `release`.

    `max_rank` is the engine's `--max-lora-rank`, and `base_model` is the model that the adapter must fit, a folder or a
    name on the hub. With a `version` its content must be that one, and the source is asked only if it is not in the
    cache. `urls` is the policy for `https://` sources; the process's own when not given. Raises AdapterRefused
    (AdapterTooLarge and AdapterUnreachable among them) or AdapterCacheFull; then nothing is left behind.
    """
    check_name(name, ())
    limits = Limits.of(settings.max_mb, settings.fetch_timeout_s)
    wanted = _Wanted(name, source, version, max_rank, base_model)
    running = _threads.submit(_fetch, wanted, settings, urls or all_settings.current().media_urls, limits)
    try:
        async with asyncio.timeout(settings.fetch_timeout_s):
            return await asyncio.wrap_future(running)
    except BaseException as error:
        # The thread sees it at the next chunk, and leaves nothing behind; but it may be done just now.
        limits.stopped.set()
        running.add_done_callback(_let_go)
        if isinstance(error, TimeoutError):
            raise limits.too_late() from None
        raise


def release(adapter: Adapter) -> None:
    """Let the cache drop the adapter's folder, once nobody else holds it. Raises KeyError if this process does not."""
    HOLDS.release(Path(adapter.path))


@dataclass(frozen=True)
class _Wanted:
    name: str
    source: str
    version: str | None
    max_rank: int
    base_model: str | None


def _let_go(running: Future[Adapter]) -> None:
    if not running.cancelled() and running.exception() is None:
        release(running.result())


def _fetch(wanted: _Wanted, settings: AdapterSettings, urls: MediaUrlSettings, limits: Limits) -> Adapter:
    try:
        return _Job(wanted, find(wanted.source, settings, urls), Cache(settings, limits), limits).run()
    except OSError as error:  # of the cache alone: sources have errors of their own
        log.exception("the cache of adapters cannot be used")
        raise AdapterCacheFull(
            f"adapters.cache_directory cannot be written to: {os.strerror(error.errno or 0)}"
        ) from None


class _Job:
    """One fetch, in a thread."""

    def __init__(self, wanted: _Wanted, source: Source, cache: Cache, limits: Limits) -> None:
        self._wanted, self._source, self._cache, self._limits = wanted, source, cache, limits

    def run(self) -> Adapter:
        held = None if self._wanted.version is None else self._cache.hold(self._wanted.version)
        while held is None:
            self._limits.check()
            held = self._from_source()
        try:
            facts = self._verified(held)
        except BaseException:
            HOLDS.release(held)
            raise
        return Adapter(self._wanted.name, held.name, str(held), facts.rank, facts.size, facts.modules)

    def _from_source(self) -> Path | None:
        """The folder, held; None if another one's fetch found it, and the cache has dropped it already."""
        with flight(self._cache.flights, self._wanted.source, self._limits) as own:
            if own.found is not None:
                return self._cache.hold(self._as_wanted(own.found))
            folder = self._land()
            own.tell(folder.name)
            return folder

    def _land(self) -> Path:
        with self._cache.staging() as scratch:
            fetched = scratch / "adapter"
            fetched.mkdir(mode=0o700)
            intake = Intake(fetched, scratch, self._limits)
            self._source.take(intake)
            version = self._as_wanted(intake.version)
            size = self._verified(fetched).size
            log.info("adapter %s@%s was fetched: %d bytes", self._wanted.name, version, size)
            return self._cache.publish(fetched, version, size)

    def _as_wanted(self, version: str) -> str:
        if self._wanted.version not in (None, version):
            raise AdapterRefused(f"the source has version {version} now, and {self._wanted.version} is asked for")
        return version

    def _verified(self, folder: Path) -> Facts:
        return verify(folder, max_rank=self._wanted.max_rank, base_model=self._wanted.base_model)
