"""Every Redis key and channel, in one place.

| name | kind | lifetime | meaning |
| --- | --- | --- | --- |
| `trivet:workers` | set | none; dead members are removed by whoever lists them | ids of registered workers |
| `trivet:worker:<id>` | string, JSON | `worker.lease_s` | a worker's record: roles, model, engine, load |
| `trivet:api:<id>` | string, JSON | `api.lease_s` | an API process that reads tokens |
| `trivet:load:<worker>:<incarnation>:<rank>` | hash | its last request | sums over the requests placed there |
| `trivet:placed:<api>` | hash | its last request; without the API `api.lease_s` | request -> where it is placed, JSON |
| `trivet:owners` | sorted set | none; who is gone is removed | API processes that have requests placed |
| `trivet:cancelled:<request>` | string | 600 s or more | tombstone: a task that finds it does not start |
| `trivet:item:<model>:<identity>` | string, JSON | `items.record_ttl_s` after its last use | an item record |
| `trivet:emb:<model>:<identity>` | hash | the same | worker -> where it holds the item's embedding, JSON |
| `trivet:encoding:<model>:<identity>` | string, JSON | `items.encode_timeout_s` | whoever is to encode the item |
| `trivet:kv:<worker>:<rank>` | set | `worker.lease_s` | names of the KV blocks that an engine holds |
| `trivet:predicted:<worker>:<incarnation>:<rank>:<n>` | set | twice `routing.predicted_ttl_s` | what was sent there |
| `trivet:session:<tenant>:<session>` | hash | `routing.session_ttl_s` | stage -> where its last request went |
| `trivet:turns` | hash | the same | stage -> number of requests, for policy `round_robin` |
| `trivet:url:<digest>` | string, JSON | `media_urls.memo_ttl_s` after its last use | what a media URL gave last |
| `trivet:media:<model>:<identity>` | hash | as long as they may be read | API process -> where it has the bytes, JSON |
| `trivet:uuid:<tenant>:<uuid>` | string, JSON | `media.uuid_ttl_s` after its last use | a client's name for a medium |
| `trivet:response:<tenant>:<response>` | hash | `api.response_store_ttl_s` | a response and its input, JSON |
| `trivet:lora:<model>` | hash | none; until the adapter is unloaded | name of an adapter -> what it stands for, JSON |
| `trivet:lora-loads:<model>` | hash | 600 s after each one's end | name of an adapter -> its last load, JSON |
| `trivet:lora-users:<model>:<adapter>` | sorted set | the last deadline in it | requests that use an adapter |
| `trivet:replay:<api>` | stream, capped | 600 s after the last batch | the last token batches, to refill a gap |
| `trivet:tokens:<api>` | channel | | token batches for one API process |
| `trivet:cancel` | channel | | ids of requests to stop |
| `trivet:items` | channel | | items that were encoded, or could not be, JSON |
| `trivet:loras` | channel | | names of models whose adapters changed |
| `encode`, `prefill`, `decode` | list | until taken | Celery queue that any worker of the role takes from |
| `encode.<worker>`, ... | list | the same | Celery queue of one worker |

Celery adds keys of its own that begin with `_kombu.`. Nothing here is pickled: strings are JSON or text. `<model>` is
the fingerprint of a model and its processor settings, and of adapters' keys the name that it is served by; `<identity>`
names an item by its content, and `<adapter>` is an adapter's name and version. `<rank>` is 0 but in engines with data
parallelism; how blocks are named is in app/routing/blocks.py.
"""

from __future__ import annotations

from app.roles import Role

PREFIX = "trivet:"

WORKERS = f"{PREFIX}workers"
CANCEL_CHANNEL = f"{PREFIX}cancel"
ITEMS_CHANNEL = f"{PREFIX}items"
LORAS_CHANNEL = f"{PREFIX}loras"
OWNERS = f"{PREFIX}owners"
TURNS = f"{PREFIX}turns"

#: How long a tombstone outlives the cancel message: longer than any task waits unseen between two queues.
CANCELLED_TTL_S = 600
#: How long a replay stream outlives its last batch.
REPLAY_TTL_S = 600


#: Of Celery's queues: kombu keeps a list for each step of priority, `queue` for the first and `queue|5` for the second.
SEPARATOR = "|"
PRIORITY_STEPS = (0, 5)


def worker(worker_id: str) -> str:
    return f"{PREFIX}worker:{worker_id}"


def api(api_id: str) -> str:
    return f"{PREFIX}api:{api_id}"


def load(worker_id: str, incarnation: str, rank: int = 0) -> str:
    return f"{PREFIX}load:{worker_id}:{incarnation}:{rank}"


def placed(api_id: str) -> str:
    return f"{PREFIX}placed:{api_id}"


def predicted(worker_id: str, incarnation: str, rank: int, n: str) -> str:
    return f"{PREFIX}predicted:{worker_id}:{incarnation}:{rank}:{n}"


def session(tenant: str, session: str) -> str:
    return f"{PREFIX}session:{tenant}:{session}"


def cancelled(request_id: str) -> str:
    return f"{PREFIX}cancelled:{request_id}"


def item(model: str, identity: str) -> str:
    return f"{PREFIX}item:{model}:{identity}"


def embedding(model: str, identity: str) -> str:
    return f"{PREFIX}emb:{model}:{identity}"


def encoding(model: str, identity: str) -> str:
    return f"{PREFIX}encoding:{model}:{identity}"


def kv(worker_id: str, rank: int) -> str:
    return f"{PREFIX}kv:{worker_id}:{rank}"


def url(digest: str) -> str:
    return f"{PREFIX}url:{digest}"


def media(model: str, identity: str) -> str:
    return f"{PREFIX}media:{model}:{identity}"


def uuid(tenant: str, uuid: str) -> str:
    return f"{PREFIX}uuid:{tenant}:{uuid}"


def response(tenant: str, response_id: str) -> str:
    return f"{PREFIX}response:{tenant}:{response_id}"


def lora(model: str) -> str:
    return f"{PREFIX}lora:{model}"


def lora_loads(model: str) -> str:
    return f"{PREFIX}lora-loads:{model}"


def lora_users(model: str, adapter: str) -> str:
    return f"{PREFIX}lora-users:{model}:{adapter}"


def replay(api_id: str) -> str:
    return f"{PREFIX}replay:{api_id}"


def tokens_channel(api_id: str) -> str:
    return f"{PREFIX}tokens:{api_id}"


def role_queue(role: Role) -> str:
    return role.value


def worker_queue(role: Role, worker_id: str) -> str:
    return f"{role.value}.{worker_id}"


def stepped(queue: str, step: int) -> str:
    """The Redis list of a queue for one step of priority."""
    return f"{queue}{SEPARATOR}{step}" if step else queue


def lists(queue: str) -> list[str]:
    """The Redis lists of a queue, one for each step of priority."""
    return [stepped(queue, step) for step in PRIORITY_STEPS]
