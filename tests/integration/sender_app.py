"""The Celery application of test_sender.py: its tasks tell Redis that they ran.

SENDER_TEST_REDIS=redis://... celery -A tests.integration.sender_app worker -P threads
"""

import os
from typing import Any

import redis
from celery import Celery

from app.celery import DECODE_TASK, configuration

URL = os.environ.get("SENDER_TEST_REDIS", "redis://not-set.invalid")

app = Celery("sender_test", set_as_current=False)
app.config_from_object(configuration(URL) | {"worker_pool": "threads", "imports": ()})
store = redis.Redis.from_url(URL, socket_timeout=10)


@app.task(name=DECODE_TASK, bind=True)  # type: ignore[untyped-decorator]
def decode(self: Any, message: dict[str, Any]) -> None:
    store.rpush("ran", f"{message['request_id']} {self.request.id} {self.request.delivery_info['routing_key']}")
