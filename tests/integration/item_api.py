"""An API process as workers see it: the media that it holds for them, and the encode workers that it chooses."""

from __future__ import annotations

import asyncio
import io
import time
from pathlib import Path
from typing import Any

from PIL import Image

from app import keys
from app.celery import ENCODE_TASK
from app.media import MediaHolder
from app.messages.media import MediaRef
from app.messages.plans import Assignment, Plan
from app.messages.prompts import Prompt
from app.messages.tasks import EncodeTask
from app.registry import Fleet
from app.roles import Role
from app.routing import Ask, RedisRouter
from app.sender import TaskSender
from app.settings_sections import RoutingSettings, TensorSettings
from app.tensors import folder
from app.tensors.plane import TensorPlane
from tests.integration.item_engine import TARGET
from tests.items import identity


class Api:
    """What an API process does for items: their bytes, and the claims of encode workers."""

    def __init__(self, root: Path, redis: Any, claim_s: float) -> None:
        self._folder = folder.make_folder(root, "api")
        self.plane = TensorPlane(self._folder.path, TensorSettings(directory=str(root)), 100)
        self.holder = MediaHolder(self.plane, self._folder.path, 1 << 30)
        self._router = RedisRouter(redis, RoutingSettings(), claim_s)
        self._sender = TaskSender(redis)

    async def ref(self, number: int, param: str = "messages[0].content[0].image_url", lease_s: float = 60) -> MediaRef:
        picture = io.BytesIO()
        Image.new("RGB", (8, 8), (number % 256, number // 256 % 256, 3)).save(picture, "PNG")
        of, data = identity(number), picture.getvalue()
        source = await self.holder.put(of, data, lease_s)
        return MediaRef(modality="image", identity=of, size=len(data), param=param, source=source)

    async def prompt(self, *numbers: int) -> Prompt:
        """Text with an item between each two words."""
        media = [await self.ref(number, f"messages[0].content[{at}]") for at, number in enumerate(numbers)]
        return Prompt(token_ids=[1, *[token for _ in numbers for token in (TARGET, 2)]], media=media)

    async def place(self, fleet: Fleet, fingerprint: str, prompt: Prompt, request_id: str) -> Plan:
        """Claim encode workers for what nobody has, and send them their tasks."""
        media = {ref.identity: ref for ref in prompt.media}
        ask = Ask(request_id, time.time() + 60, "api-1", tuple(media), fingerprint)
        plan = (await self._router.plan(fleet, ask)).plan
        await asyncio.gather(*(self._send(media[of], worker, request_id) for of, worker in plan.encode.items()))
        return plan

    async def _send(self, item: MediaRef, worker: Assignment, request_id: str) -> None:
        task = EncodeTask(
            request_id=request_id,
            attempt=0,
            api="api-1",
            model="m",
            deadline=time.time() + 60,
            item=item,
            assigned=worker,
        )
        await self._sender.send(ENCODE_TASK, task, keys.worker_queue(Role.ENCODE, worker.worker))

    async def close(self) -> None:
        await self.holder.close()
        await self.plane.close()
        self._folder.remove()
