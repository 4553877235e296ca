"""How commands reach the API: where it is, its key, what a question looks like, and what it says when it refuses."""

from __future__ import annotations

import base64
import mimetypes
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    import httpx

CONNECT_TIMEOUT_S = 5.0

Url = Annotated[
    str | None,
    typer.Option(
        help="The API; that of the running `trivet up` if not given, with a key from its file or the settings. "
        "Otherwise the key comes from OPENAI_API_KEY."
    ),
]


class ApiError(RuntimeError):
    """The server refused, failed or was not there. The message is for the user."""


def connect(url: str | None, name: str, read_timeout_s: float, *, admin: bool = False) -> httpx.Client:
    """A client of the API at `url`, or of the `trivet up` of this name; for `admin` with the key for that."""
    import httpx

    from app import api_keys

    base = (url or _running_url(name)).rstrip("/").removesuffix("/v1")
    timeout = httpx.Timeout(read_timeout_s, connect=CONNECT_TIMEOUT_S)
    return httpx.Client(base_url=base, timeout=timeout, headers=api_keys.headers(_key(url, name, admin)))


def content(text: str, images: list[Path]) -> str | list[dict[str, Any]]:
    if not images:
        return text
    parts = [{"type": "image_url", "image_url": {"url": _data_url(path)}} for path in images]
    return [*parts, {"type": "text", "text": text}]


def _data_url(path: Path) -> str:
    kind = mimetypes.guess_type(path.name)[0] or "image/png"
    try:
        return f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"
    except OSError as error:
        raise ApiError(f"{path}: {error.strerror}") from error


def refusal(answer: httpx.Response) -> str:
    from app.launch.readiness import error_message

    return f"{answer.status_code}: {error_message(answer)}"


def _running_url(name: str) -> str:
    from app import settings
    from app.launch.state import StateDirectory

    if (state := StateDirectory(name).running()) is not None:
        return state.api_url
    chosen = settings.load().api
    return f"http://{chosen.host}:{chosen.port}"


def _key(url: str | None, name: str, admin: bool = False) -> str | None:
    """What opens the API. Keys of our own settings are for our own API alone."""
    from app import api_keys, settings
    from app.launch.state import StateDirectory

    others = os.environ.get("OPENAI_API_KEY")
    if url is not None:
        return others
    if admin and (own := settings.load().api.admin_key) is not None:
        return own.get_secret_value()
    state = StateDirectory(name).running()
    if state is not None and state.api_keys_file is not None:
        return api_keys.in_file(state.api_keys_file)[0]
    return next(iter(api_keys.read(settings.load().api)), others)


def first_model(client: httpx.Client) -> str:
    import httpx

    try:
        answer = client.get("/v1/models")
        if answer.status_code != 200:
            raise ApiError(refusal(answer))
        return str(answer.json()["data"][0]["id"])
    except httpx.HTTPError as error:
        raise ApiError(
            f"no API answers at {client.base_url}: {error or type(error).__name__}; is `trivet up` running?"
        ) from error
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise ApiError(f"{client.base_url} does not list models: it is no OpenAI API") from error
