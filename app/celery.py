"""The Celery application: `celery -A app.celery worker`, `celery -A app.celery flower`.

Importing this must stay cheap: Flower, the CLI and every worker do it before anything else, so nothing here imports
vLLM.
"""

from __future__ import annotations

from typing import Any

import click
from celery import Celery
from kombu import Queue

from app import keys, kombu_client, settings
from app.roles import Role

ENCODE_TASK = "encode"
PREFILL_TASK = "prefill"
DECODE_TASK = "decode"
EMBED_TASK = "embed"


def configuration(broker_url: str) -> dict[str, Any]:
    """Celery's settings, each with its reason. What they gain is measured in `bench/README.md`."""
    return {
        "broker_url": broker_url,
        # The engine lives on one asyncio loop; no pool of Celery's own can run there.
        "worker_pool": "workers.pool:TaskPool",
        "imports": ("workers.tasks",),
        # JSON alone: pickle from a broker is code from whoever reaches it.
        "accept_content": ["json"],
        "task_serializer": "json",
        "result_serializer": "json",
        "event_serializer": "json",
        # Tokens leave through pub/sub; a stored result would only be a second copy.
        "task_ignore_result": True,
        "result_backend": None,
        # The API supervises a request; late acknowledgement would run a long decode twice.
        "task_acks_late": False,
        # Take exactly as many tasks as there are slots, so that what waits stays in Redis, seen and countable.
        "worker_disable_prefetch": True,
        "worker_prefetch_multiplier": 1,
        "worker_send_task_events": True,
        "task_send_sent_event": False,
        "worker_disable_rate_limits": True,
        # A blip of Redis must not cancel the running generations.
        "worker_cancel_long_running_tasks_on_connection_loss": False,
        # SIGQUIT: so long the requests in flight may go on, and then they end with an error for their clients.
        "worker_soft_shutdown_timeout": 3,
        "worker_hijack_root_logger": False,
        "task_publish_retry": False,
        "broker_connection_retry_on_startup": True,
        "broker_connection_max_retries": None,
        "broker_pool_acquire_timeout": 2,
        "control_queue_expires": 10,
        "broker_transport_options": {
            # Two Redis transactions a task less: early acknowledgement has nothing to restore.
            "ack_emulation": False,
            # A worker's own queues before those it shares with its role.
            "queue_order_strategy": "priority",
            "sep": keys.SEPARATOR,
            "priority_steps": list(keys.PRIORITY_STEPS),
            "socket_timeout": 10,
            "socket_connect_timeout": 2,
            "socket_keepalive": True,
            "health_check_interval": 10,
        },
        "task_create_missing_queues": True,
        # Nothing is sent to Celery's default queue; a stray task must not run on an engine.
        "task_default_queue": "unrouted",
    }


def queues(worker_id: str, roles: frozenset[Role]) -> list[Queue]:
    """A worker's queues, its own first, in the order in which it takes from them."""
    ordered = sorted(roles)
    names = [keys.worker_queue(role, worker_id) for role in ordered] + [keys.role_queue(role) for role in ordered]
    return [Queue(name, routing_key=name) for name in names]


def _worker_options() -> list[click.Option]:
    return [
        click.Option(["--model"], help="Model path or hub name [TRIVET_MODEL]."),
        click.Option(["--roles"], help="Comma-separated: encode, prefill, decode [TRIVET_WORKER__ROLES]."),
        click.Option(["--gpu"], help="GPUs, as CUDA_VISIBLE_DEVICES takes them [TRIVET_WORKER__GPU]."),
        click.Option(["--enable-multimodal"], is_flag=True, help="Take media [TRIVET_ENABLE_MULTIMODAL]."),
        click.Option(
            ["--multimodal-embedding-cache-capacity-gb"],
            type=float,
            help="Embeddings kept in shared memory [TRIVET_MULTIMODAL_EMBEDDING_CACHE_CAPACITY_GB].",
        ),
        click.Option(["--engine-args"], help="vLLM's engine flags, in one string [TRIVET_ENGINE__ARGS]."),
    ]


def create() -> Celery:
    kombu_client.install()
    celery = Celery("trivet")
    celery.config_from_object(configuration(settings.current().redis.broker_url))
    celery.user_options["worker"].update(_worker_options())
    return celery


app = create()
