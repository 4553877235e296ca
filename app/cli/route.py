"""`trivet route`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from app.cli import api_client, output
from app.cli.api_client import ApiError
from app.cli.up import Name

if TYPE_CHECKING:
    import httpx
    from rich.table import Table

    from app.routing import Explanation

READ_TIMEOUT_S = 60.0


def route(
    prompt: Annotated[str | None, typer.Argument(help="The question; or give a whole request with --file.")] = None,
    image: Annotated[list[Path] | None, typer.Option(help="A picture to ask about; may be given again.")] = None,
    file: Annotated[Path | None, typer.Option(help="A chat request in JSON, as a client would send it.")] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Show every candidate.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="All of it as JSON.")] = False,
    url: api_client.Url = None,
    model: Annotated[str | None, typer.Option(help="The model; the server's first if not given.")] = None,
    name: Name = "default",
) -> None:
    """Where a chat request would go now, and why: each worker's overlap, load and cost. It is not sent there.

    The API has to allow it: TRIVET_API__EXPLAIN_ROUTING=true.
    """
    try:
        body = _body(prompt, image or [], file)
        with api_client.connect(url, name, READ_TIMEOUT_S) as client:
            found = ask(client, {"model": model or api_client.first_model(client)} | body)
    except ApiError as error:
        print(f"trivet: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    if as_json:
        print(found.model_dump_json(indent=2))
    else:
        show(found, every=explain)


def _body(prompt: str | None, images: list[Path], file: Path | None) -> dict[str, Any]:
    if (prompt is None) == (file is None):
        raise ApiError("give either a question or --file")
    if file is None:
        return {"messages": [{"role": "user", "content": api_client.content(prompt or "", images)}]}
    try:
        body = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ApiError(f"{file} holds no chat request: {error}") from None
    if not isinstance(body, dict):
        raise ApiError(f"{file} holds no chat request: it is no JSON object")
    return body


def ask(client: httpx.Client, body: dict[str, Any]) -> Explanation:
    """What the API answers. Raises ApiError."""
    import httpx
    from pydantic import ValidationError

    from app.routing import Explanation

    try:
        answer = client.post("/debug/route", json=body)
    except httpx.HTTPError as error:
        raise ApiError(f"{client.base_url}: {error or type(error).__name__}") from error
    if answer.status_code != 200:
        raise ApiError(api_client.refusal(answer))
    try:
        return Explanation.model_validate_json(answer.content)
    except ValidationError:
        raise ApiError(f"{client.base_url} does not explain its routing: it is another version of Trivet") from None


def show(found: Explanation, *, every: bool) -> None:
    """The choice, and with `every` the candidates as a table."""
    known = "" if found.exact else ", as far as it is known"
    print(f"prompt: {found.tokens} tokens, {found.blocks} full blocks{known}")
    print(f"policy: {found.policy}" + (f", since routing is {found.fallback}" if found.fallback else ""))
    if every:
        output.console().print(_table(found))
    two = "" if found.chosen.stage == "whole" else "; the decode worker is chosen when the prompt is prefilled"
    print(f"goes to {_named(found.chosen.worker, found.chosen.rank)}{two}")
    for identity, worker in found.encode.items():
        print(f"item {identity} is encoded by {worker}")


def _table(found: Explanation) -> Table:
    from rich.table import Table

    headings = ("", "worker", "stage", "overlap", "requests", "to prefill", "KV blocks", "to fetch", "cost", "")
    table = Table(*headings, box=None, pad_edge=False)
    for one in found.candidates:
        numbers = [max(one.held, one.predicted), one.requests, one.prefill_tokens, one.kv_blocks]
        table.add_row(
            "->" if one.chosen else "",
            _named(one.worker, one.rank),
            one.stage,
            *(str(number) for number in numbers),
            f"{one.embedding_bytes / (1 << 20):.1f} MiB",
            "" if one.cost is None else f"{one.cost:.1f}",
            "overloaded" if one.overloaded else "",
        )
    return table


def _named(worker: str, rank: int) -> str:
    return f"{worker} rank {rank}" if rank else worker
