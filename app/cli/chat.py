"""`trivet chat`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from app.cli import api_client
from app.cli.api_client import ApiError
from app.cli.up import Name

if TYPE_CHECKING:
    import httpx

HELP = "/image PATH adds a picture to the next question, /reset forgets the talk so far, /quit ends"
#: Longest silence between two tokens; the server's own deadline is shorter by default.
READ_TIMEOUT_S = 660.0


@dataclass
class Conversation:
    """A talk with one model. `messages` is what the next request begins with."""

    client: httpx.Client
    model: str
    options: dict[str, Any]
    messages: list[dict[str, Any]] = field(default_factory=list)

    def ask(self, text: str, images: list[Path]) -> Iterator[str]:
        """Send, and yield the answer as it comes. Both become part of the talk; not when it raises ApiError."""
        question = {"role": "user", "content": api_client.content(text, images)}
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
                    raise ApiError(api_client.refusal(answer))
                yield from _pieces(answer.iter_lines())
        except httpx.HTTPError as error:
            raise ApiError(f"{self.client.base_url}: {error or type(error).__name__}") from error


def chat(
    prompt: Annotated[str | None, typer.Argument(help="The question; without one, a talk.")] = None,
    image: Annotated[list[Path] | None, typer.Option(help="A picture to ask about; may be given again.")] = None,
    url: api_client.Url = None,
    model: Annotated[str | None, typer.Option(help="The model; the server's first if not given.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Longest answer, in tokens.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0, help="0: always the likeliest token.")] = None,
    name: Name = "default",
) -> None:
    """Talk to a model and see the answer as it streams."""
    options = {"max_tokens": max_tokens, "temperature": temperature}
    try:
        with api_client.connect(url, name, READ_TIMEOUT_S) as client:
            talk = Conversation(
                client, model or api_client.first_model(client), {k: v for k, v in options.items() if v is not None}
            )
            if prompt is not None:
                _say(talk, prompt, image or [])
            else:
                _repl(talk, image or [])
    except ApiError as error:
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
    except ApiError as error:
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


def _pieces(lines: Iterator[str]) -> Iterator[str]:
    """Texts of a stream of server-sent events. Raises ApiError for an error frame or a stream that breaks off."""
    import json

    for line in lines:
        data = line.removeprefix("data:").strip()
        if not line.startswith("data:"):
            continue
        if data == "[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            raise ApiError(str(event["error"].get("message", event["error"])))
        for choice in event.get("choices", []):
            if text := choice.get("delta", {}).get("content"):
                yield text
    raise ApiError("the stream broke off before its end")
