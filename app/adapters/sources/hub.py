"""`hf://org/repo[@revision]`: a repository on the Hugging Face hub, or on what HF_ENDPOINT names in its place.

The files are read by us, and not by the hub's own downloader: that one keeps a copy in a cache of its own, and has no
limit of size.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from typing import Any

from app.adapters.base import AdapterRefused, AdapterUnreachable
from app.adapters.intake import FILES, Intake, missing
from app.adapters.limits import CHUNK, STALL_S

log = logging.getLogger(__name__)

_SOURCE = re.compile(r"[Hh][Ff]://(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w.-]+(?:/[\w.-]+)*))?", re.ASCII)


class HubSource:
    """Raises AdapterRefused for what is not written as a repository and, perhaps, a revision."""

    def __init__(self, source: str) -> None:
        parts = _SOURCE.fullmatch(source)
        if parts is None or ".." in source:
            raise AdapterRefused("a hub source is written as hf://org/repo or hf://org/repo@revision")
        self._repo, self._revision = parts["repo"], parts["revision"]

    def take(self, intake: Intake) -> None:
        from huggingface_hub import constants

        if constants.is_offline_mode():
            self._take_from_cache(intake)
        else:
            self._take_from_hub(intake)

    def _take_from_hub(self, intake: Intake) -> None:
        from httpx2 import HTTPError, InvalidURL
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError

        try:
            commit = self._commit(intake)
            for name in FILES:
                intake.write(name, self._read(name, commit))
        except HfHubHTTPError as error:
            raise self._refusal(error) from None
        except HFValidationError:
            raise AdapterRefused(f"{self._repo} cannot be the name of a repository on the hub") from None
        except (HTTPError, InvalidURL) as error:
            log.warning("an adapter does not come from the hub: %s", error)
            raise AdapterUnreachable(
                f"the hub cannot be reached, or broke its answer off ({type(error).__name__}); with HF_HUB_OFFLINE=1 "
                "the copy in its cache here is taken"
            ) from None

    def _commit(self, intake: Intake) -> str:
        """What the revision stands for now, so that both files are of one commit."""
        from huggingface_hub import HfApi

        info = HfApi().model_info(self._repo, revision=self._revision, timeout=min(STALL_S, intake.limits.left_s))
        problem = missing([one.rfilename for one in info.siblings or ()], f"hf://{self._repo}")
        if problem is not None:
            raise problem
        if not info.sha:
            raise AdapterUnreachable(f"the hub does not say which commit of {self._repo} is asked for")
        return info.sha

    def _read(self, name: str, commit: str) -> Iterator[bytes]:
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import (  # type: ignore[attr-defined]
            build_hf_headers,
            get_session,
            hf_raise_for_status,
        )

        url = hf_hub_url(self._repo, name, revision=commit)
        # Sizes and hashes are those of the file as it is, so it must come as it is.
        headers = build_hf_headers() | {"Accept-Encoding": "identity"}
        # Not the hub's own wrapper with retries: it would begin anew in the middle of what has been written.
        with get_session().stream("GET", url, headers=headers, timeout=STALL_S) as answer:
            hf_raise_for_status(answer)
            # What is there, however little: so the limits are looked at as often as something comes.
            yield from answer.iter_raw()

    def _take_from_cache(self, intake: Intake) -> None:
        from huggingface_hub import try_to_load_from_cache

        for name in FILES:
            found = try_to_load_from_cache(self._repo, name, revision=self._revision)
            if not isinstance(found, str):
                raise AdapterUnreachable(
                    f"HF_HUB_OFFLINE is set, and the hub's cache here has no {name} of {self._repo}"
                    + (f" at {self._revision}" if self._revision else "")
                )
            intake.write(name, _chunks(found))

    def _refusal(self, error: Any) -> AdapterRefused:
        from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

        if isinstance(error, RevisionNotFoundError):
            return AdapterUnreachable(f"{self._repo} on the hub has no revision {self._revision}")
        if isinstance(error, RepositoryNotFoundError) and not isinstance(error, GatedRepoError):
            return AdapterUnreachable(f"the hub has no repository {self._repo}, or shows it to others alone (HF_TOKEN)")
        status = getattr(error.response, "status_code", "no status")
        return AdapterUnreachable(f"the hub refuses {self._repo} ({status})")


def _chunks(path: str) -> Iterator[bytes]:
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK):
            yield chunk
