"""`trivet lora`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from app.cli import api_client, output
from app.cli.api_client import ApiError
from app.cli.up import Name

if TYPE_CHECKING:
    import httpx

#: Longest load: a fetch, and every engine's part. The server has its own limit, and says when it is over.
LOAD_TIMEOUT_S = 3600.0
READ_TIMEOUT_S = 60.0

app = typer.Typer(help="Load, unload and list LoRA adapters of the running cluster.", no_args_is_help=True)

AdapterName = Annotated[str, typer.Argument(help="The name that requests give as their model.")]


@app.command()
def load(
    adapter: AdapterName,
    uri: Annotated[str, typer.Argument(help="s3://..., hf://owner/name, https://...tar.gz, or a path of the workers.")],
    url: api_client.Url = None,
    name: Name = "default",
) -> None:
    """Load an adapter on every worker; afterwards requests can name it."""
    with _client(url, name, LOAD_TIMEOUT_S) as client:
        found = _answer(client, "POST", "/v1/loras", {"lora_name": adapter, "source": {"uri": uri}})
    print(f"{found['message']}: {found['id']}")


@app.command()
def unload(adapter: AdapterName, url: api_client.Url = None, name: Name = "default") -> None:
    """Take an adapter's name away; requests that run with it go on."""
    with _client(url, name, READ_TIMEOUT_S) as client:
        print(_answer(client, "POST", "/unload_lora", {"lora_name": adapter})["message"])


@app.command("list")
def listed(url: api_client.Url = None, name: Name = "default") -> None:
    """The adapters that requests can name."""
    from rich.table import Table

    with _client(url, name, READ_TIMEOUT_S) as client:
        found = _answer(client, "GET", "/v1/loras")["data"]
    table = Table("adapter", "version", "rank", "MB", "source", box=None, pad_edge=False)
    for one in found:
        table.add_row(one["lora_name"], one["version"], str(one["rank"]), f"{one['size'] / 1e6:.1f}", one["uri"])
    output.console().print(table if found else "no adapters")


@contextmanager
def _client(url: str | None, name: str, timeout_s: float) -> Iterator[httpx.Client]:
    """What goes wrong is one line on stderr, and exit code 1."""
    try:
        with api_client.connect(url, name, timeout_s, admin=True) as client:
            yield client
    except ApiError as error:
        print(f"trivet: {error}", file=sys.stderr)
        raise typer.Exit(1) from None


def _answer(client: httpx.Client, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    import httpx

    try:
        answer = client.request(method, path, json=body)
        if answer.status_code != 200:
            raise ApiError(api_client.refusal(answer))
        found: dict[str, Any] = answer.json()
        return found
    except httpx.HTTPError as error:
        raise ApiError(f"{client.base_url}: {error or type(error).__name__}; is `trivet up` running?") from error
    except ValueError:
        raise ApiError(f"{client.base_url} does not answer in JSON: it is no Trivet") from None
