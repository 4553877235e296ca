"""Embed: one prompt through the whole model, and its vector to the API."""

from __future__ import annotations

from app.errors.media import MediaRefused
from app.messages.tasks import EmbedTask
from workers.host import Host
from workers.watch import Watch


async def run(host: Host, task: EmbedTask) -> None:
    from workers import outputs

    if task.prompt.media:
        raise MediaRefused("only text is embedded", param=task.prompt.media[0].param)
    watch = Watch(task)
    engine_input = host.engine.renderer.text(task.prompt, answer=0, param="input")
    watch.lap("queue")
    delta = outputs.embedded(await host.engine.embed(engine_input, task), task.request_id, task.attempt)
    watch.lap("prefill")
    if task.timings:
        delta.measured = watch.measured
    host.tokens.put(task.api, delta)


async def refuse(host: Host, task: EmbedTask) -> None:
    """The request is over before it began here, and holds nothing yet."""
