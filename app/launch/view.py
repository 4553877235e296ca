"""What the user of `trivet up` sees: a live table on a terminal, a line for each change elsewhere."""

from __future__ import annotations

import time

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from app.launch.process import tail
from app.launch.state import ComponentState, Phase, State
from app.redis import redacted
from app.roles import Does

COLOURS = {Phase.READY: "green", Phase.FAILED: "red", Phase.RESTARTING: "yellow"}
TAIL_LINES = 20


class View:
    """Shows states as they come. `update` is cheap enough to be called twice a second."""

    def __init__(self, console: Console, *, live: bool = True) -> None:
        self._console = console
        self._shown: dict[str, tuple[Phase, int, str]] = {}
        self._live: Live | None = None
        if live and console.is_terminal:
            # Not refreshed by a thread of rich's: the supervisor forks.
            self._live = Live(console=console, auto_refresh=False, transient=False)
            self._live.start()

    def update(self, state: State) -> None:
        if self._live is not None:
            self._live.update(table(state), refresh=True)
            return
        for one in state.components:
            now = (one.phase, one.restarts, one.detail)
            if self._shown.get(one.name) != now:
                self._shown[one.name] = now
                self.line(state, f"{one.name}: {one.phase}{f' ({one.detail})' if one.detail else ''}")

    def line(self, state: State, text: str) -> None:
        seconds = time.time() - state.started
        self._console.print(f"[{seconds:5.1f} s] {text}", markup=False, highlight=False, soft_wrap=True)

    def to_lines(self, state: State) -> None:
        """Leave the table as it stands; further changes come as lines below it."""
        if self._live is not None:
            self.seen(state)
            self._live.stop()
            self._live = None

    def seen(self, state: State) -> None:
        """Take the state as shown already."""
        self._shown = {one.name: (one.phase, one.restarts, one.detail) for one in state.components}


def table(state: State) -> Table:
    made = Table(box=None, pad_edge=False, expand=True)
    for heading, ratio in (("component", None), ("state", None), ("seconds", None), ("last line of its log", 1)):
        made.add_column(
            heading, no_wrap=True, ratio=ratio, overflow="ellipsis", justify="right" if heading == "seconds" else "left"
        )
    for one in state.components:
        phase = f"{one.phase} ({one.restarts})" if one.restarts else str(one.phase)
        seconds = f"{time.time() - one.since:.0f}"
        made.add_row(one.name, Text(phase, style=COLOURS.get(one.phase, "")), seconds, Text(_line(one), style="dim"))
    return made


def _line(one: ComponentState) -> str:
    return one.detail or next(iter(tail(one.log, 1)), "")


def ready(state: State, stop: str) -> str:
    """What to do with a topology that is up. `stop` says how it ends."""
    redis = state.redis_url if "@" not in state.redis_url else redacted(state.redis_url)
    lines = [
        f"Ready in {time.time() - state.started:.0f} s: {state.model} ({state.topology})",
        f"  API     {state.api_url}",
        f"  Flower  {state.flower_url}" if state.flower_url else "",
        f"  Redis   redis-cli -u {redis}{'' if state.owns_redis else '   (was there before)'}",
        f"  logs    {state.logs}",
        *_examples(state),
        f"  stop    {stop}",
    ]
    return "\n".join(line for line in lines if line)


def _examples(state: State) -> list[str]:
    """Of what the model does."""
    headers = "-H 'Content-Type: application/json'"
    if state.needs_key:
        headers += ' -H "Authorization: Bearer $OPENAI_API_KEY"'
    if state.does is Does.EMBED:
        body = f'{{"model": "{state.model}", "input": "Hello"}}'
        return [f"  try     curl {state.api_url}/v1/embeddings {headers} -d '{body}'"]
    body = f'{{"model": "{state.model}", "messages": [{{"role": "user", "content": "Hello"}}], "stream": true}}'
    name = "" if state.name == "default" else f"--name {state.name} "
    return [
        f"  try     curl -N {state.api_url}/v1/chat/completions {headers} -d '{body}'",
        f"          trivet chat {name}'Hello'",
    ]


def failure(state: State) -> str:
    """Why the start failed, with the end of the log that tells more."""
    failed = next((one for one in state.components if one.name == state.failed_component), None)
    if failed is None:
        return f"trivet: {state.reason}"
    lines = [f"    {line}" for line in tail(failed.log, TAIL_LINES)]
    head = f"trivet: {failed.name}: {state.reason}. The end of {failed.log}:"
    return "\n".join([head, *lines, f"trivet: {failed.name}: {state.reason}; its whole log is {failed.log}"])
