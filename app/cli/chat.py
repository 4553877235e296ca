"""`trivet chat`."""

from __future__ import annotations

import base64
import mimetypes
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from app.cli.up import Name

if TYPE_CHECKING:
    import httpx

HELP = "/image PATH adds a picture to the next question, /reset forgets the talk so far, /quit ends"
CONNECT_TIMEOUT_S = 5.0
#: Longest silence between two tokens; the server's own deadline is shorter by default.
READ_TIMEOUT_S = 660.0


class ChatError(RuntimeError):
    """The server refused, failed or was not there. The message is for the user."""


@dataclass
class Conversation:
    """A talk with one model. `messages` is what the next request begins with."""

    client: httpx.Client
    model: str
    options: dict[str, Any]
    messages: list[dict[str, Any]] = field(default_factory=list)

    def ask(self, text: str, images: list[Path]) -> Iterator[str]:
        """Send, and yield the answer as it comes. Both become part of the talk; not when it raises ChatError."""
        question = {"role": "user", "content": _content(text, images)}
        pieces: list[str] = []
        for piece in self._stream([*self.messages, question]):
            pieces.append(piece)
            yield piece
        self.messages += [question, {"role": "assistant", "content": "".join(pieces)}]

    def _stream(self, messages: list[dict[str, Any]]) -> Iterator[str]:
        import httpx

        body = {"model": self.model, "messages": messages, "stream": True, **self.options}
        try:
            with self.client.stream("POST", "/v1/chat/completions", json=body) as answer:
                if answer.status_code != 200:
                    answer.read()
                    raise ChatError(_refusal(answer))
                yield from _pieces(answer.iter_lines())
        except httpx.HTTPError as error:
            raise ChatError(f"{self.client.base_url}: {error or type(error).__name__}") from error


def chat(
    prompt: Annotated[str | None, typer.Argument(help="The question; without one, a talk.")] = None,
    image: Annotated[list[Path] | None, typer.Option(help="A picture to ask about; may be given again.")] = None,
    url: Annotated[
        str | None,
        typer.Option(
            help="The API; that of the running `trivet up` if not given, with a key from its file or the settings. "
            "Otherwise the key comes from OPENAI_API_KEY."
        ),
    ] = None,
    model: Annotated[str | None, typer.Option(help="The model; the server's first if not given.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Longest answer, in tokens.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0, help="0: always the likeliest token.")] = None,
    name: Name = "default",
) -> None:
    """Talk to a model and see the answer as it streams."""
    import httpx

    from app import api_keys

    options = {"max_tokens": max_tokens, "temperature": temperature}
    timeout = httpx.Timeout(READ_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
    base = (url or _running_url(name)).rstrip("/").removesuffix("/v1")
    headers = api_keys.headers(_key(url, name))
    try:
        with httpx.Client(base_url=base, timeout=timeout, headers=headers) as client:
            talk = Conversation(
                client, model or _first_model(client), {k: v for k, v in options.items() if v is not None}
            )
            if prompt is not None:
                _say(talk, prompt, image or [])
            else:
                _repl(talk, image or [])
    except ChatError as error:
        print(f"trivet: {error}", file=sys.stderr)
        raise typer.Exit(1) from None


def _say(talk: Conversation, text: str, images: list[Path]) -> None:
    try:
        for piece in talk.ask(text, images):
            print(piece, end="", flush=True)
    finally:
        print(flush=True)


def _repl(talk: Conversation, images: list[Path]) -> None:
    print(f"{talk.model}: {HELP}")
    while (line := _line()) is not None:
        command, _, rest = line.partition(" ")
        if command in ("/quit", "/exit"):
            return
        if command == "/reset":
            talk.messages, images = [], []
        elif command == "/image":
            images = [*images, Path(rest.strip()).expanduser()]
        elif command.startswith("/"):
            print(HELP)
        elif line:
            images = _turn(talk, line, images)


def _turn(talk: Conversation, line: str, images: list[Path]) -> list[Path]:
    """Ask, and answer the pictures for the next question: none, also when these could not be used."""
    try:
        _say(talk, line, images)
    except ChatError as error:
        print(f"trivet: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        print()
    return []


def _line() -> str | None:
    try:
        return input("> ").strip()
    except (EOFError, KeyboardInterrupt):
        print()
        return None


def _content(text: str, images: list[Path]) -> str | list[dict[str, Any]]:
    if not images:
        return text
    parts = [{"type": "image_url", "image_url": {"url": _data_url(path)}} for path in images]
    return [*parts, {"type": "text", "text": text}]


def _data_url(path: Path) -> str:
    kind = mimetypes.guess_type(path.name)[0] or "image/png"
    try:
        return f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"
    except OSError as error:
        raise ChatError(f"{path}: {error.strerror}") from error


def _pieces(lines: Iterator[str]) -> Iterator[str]:
    """Texts of a stream of server-sent events. Raises ChatError for an error frame or a stream that breaks off."""
    import json

    for line in lines:
        data = line.removeprefix("data:").strip()
        if not line.startswith("data:"):
            continue
        if data == "[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            raise ChatError(str(event["error"].get("message", event["error"])))
        for choice in event.get("choices", []):
            if text := choice.get("delta", {}).get("content"):
                yield text
    raise ChatError("the stream broke off before its end")


def _refusal(answer: httpx.Response) -> str:
    from app.launch.readiness import error_message

    return f"{answer.status_code}: {error_message(answer)}"


def _running_url(name: str) -> str:
    from app import settings
    from app.launch.state import StateDirectory

    if (state := StateDirectory(name).running()) is not None:
        return state.api_url
    chosen = settings.load().api
    return f"http://{chosen.host}:{chosen.port}"


def _key(url: str | None, name: str) -> str | None:
    """What opens the API. Keys of our own settings are for our own API alone."""
    from app import api_keys, settings
    from app.launch.state import StateDirectory

    others = os.environ.get("OPENAI_API_KEY")
    if url is not None:
        return others
    state = StateDirectory(name).running()
    if state is not None and state.api_keys_file is not None:
        return api_keys.in_file(state.api_keys_file)[0]
    return next(iter(api_keys.read(settings.load().api)), others)


def _first_model(client: httpx.Client) -> str:
    import httpx

    try:
        answer = client.get("/v1/models")
        if answer.status_code != 200:
            raise ChatError(_refusal(answer))
        return str(answer.json()["data"][0]["id"])
    except httpx.HTTPError as error:
        raise ChatError(
            f"no API answers at {client.base_url}: {error or type(error).__name__}; is `trivet up` running?"
        ) from error
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise ChatError(f"{client.base_url} does not list models: it is no OpenAI API") from error
