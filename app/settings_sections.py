"""The sections of the settings: what each setting means, its default, and what it may be."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationInfo, field_validator
from pydantic_settings import NoDecode

from app.roles import Role

#: What an HTTP header can hold as one word. Without $, which Docker Compose would replace.
KEY = re.compile(r"[!-#%-+\--~]{1,512}")
#: As browsers send it.
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s,?#@A-Z]+")


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


class RedisSettings(Section):
    broker_url: str = "redis://127.0.0.1:6379/0"
    """Redis (or Valkey) that holds the task queues. Its eviction policy must not be able to evict a queue."""
    cache_url: str | None = None
    """Redis for registry, media and token streams; the broker's when not given."""
    timeout_s: float = Field(5.0, gt=0)
    """Longest wait for an answer of Redis."""
    wait: bool = False
    """Wait for Redis at the start instead of giving up after `timeout_s`."""

    @property
    def cache(self) -> str:
        return self.cache_url or self.broker_url

    @field_validator("broker_url", "cache_url")
    @classmethod
    def _known_scheme(cls, value: str | None) -> str | None:
        if value is None:
            return None
        scheme, _, rest = value.partition("://")
        if scheme in ("valkey", "valkeys"):
            return f"redis{scheme.removeprefix('valkey')}://{rest}"
        if scheme not in ("redis", "rediss", "unix"):
            raise ValueError("must begin with redis://, rediss://, valkey:// or unix:// (a cluster cannot be a broker)")
        return value


class EngineSettings(Section):
    args: str = ""
    """vLLM's own engine flags, for workers of all roles: `--max-model-len 4096 --dtype bfloat16`."""
    encode_args: str = ""
    """Further vLLM flags for workers with the encode role; they win over `args`."""
    prefill_args: str = ""
    """Further vLLM flags for workers with the prefill role."""
    decode_args: str = ""
    """Further vLLM flags for workers with the decode role."""
    per_host: int = Field(1, ge=1)
    """Engines that share this host: the program divides cores and, on the CPU, memory by it. `trivet up` sets it."""
    kv_lease_s: float = Field(120.0, ge=10)
    """How long a prefill worker keeps KV blocks that no decode worker has read."""
    nixl_progress_delay_us: int = Field(100, ge=0)
    """Microseconds that NIXL's progress thread sleeps between two looks; 0 spins, which takes a core per engine."""
    start_timeout_s: float = Field(1800.0, gt=0)
    """Longest start of an engine, loading and compiling included."""


def words(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _check_key(key: SecretStr) -> None:
    if not KEY.fullmatch(key.get_secret_value()):
        raise ValueError("a key is printable ASCII without spaces, commas and $, 512 characters at most")


class WorkerSettings(Section):
    roles: Annotated[frozenset[Role] | None, NoDecode] = None
    """Stages of the worker, comma-separated: encode, prefill, decode. Not given: all; without media, all but encode."""
    gpu: str | None = None
    """GPUs of the worker, as CUDA_VISIBLE_DEVICES takes them. Not given: what the environment says."""
    heartbeat_s: float = Field(1.0, gt=0)
    """Seconds between two renewals of the registration."""
    lease_s: float = Field(6.0, gt=0, validate_default=True)
    """A worker without a heartbeat for so long counts as dead; at least twice `heartbeat_s`."""
    concurrency: int = Field(512, ge=1)
    """Most requests in flight in one worker; more wait in its queue."""
    metrics_host: str = "127.0.0.1"
    """Address on which the worker serves the engine's Prometheus metrics; the port is chosen by the program."""
    side_channel_host: str = "127.0.0.1"
    """Address where other engines reach this one's NIXL side channel. It has no authentication, and what it does not
    understand ends the engine: a private network."""

    @field_validator("lease_s")
    @classmethod
    def _outlives_a_lost_heartbeat(cls, value: float, info: ValidationInfo) -> float:
        heartbeat = info.data.get("heartbeat_s", 0.0)
        if value < 2 * heartbeat:
            raise ValueError(f"must be at least twice worker.heartbeat_s ({heartbeat:g})")
        return value

    @field_validator("roles", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        return frozenset(part.strip() for part in value.split(",") if part.strip())

    @field_validator("roles")
    @classmethod
    def _not_empty(cls, value: frozenset[Role] | None) -> frozenset[Role] | None:
        if value is not None and not value:
            raise ValueError("name at least one of encode, prefill, decode")
        return value


class ApiSettings(Section):
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = Field(8000, ge=1, le=65535)
    """Port of the OpenAI API."""
    workers: int = Field(1, ge=1, le=64)
    """Processes of the API under `trivet up`; by hand, uvicorn's flag `--workers` says how many."""
    request_timeout_s: float = Field(600.0, gt=0)
    """Deadline of a request; a request's `X-Request-Timeout` header (seconds) can only shorten it."""
    max_in_flight: int = Field(1024, ge=1)
    """Most requests in flight in one API process; more get 429."""
    max_body_mb: float = Field(64.0, gt=0)
    """Largest request body, in MB; larger ones get 413 before they are parsed."""
    body_memory_mb: float = Field(256.0, gt=0)
    """Memory of an API process for request bodies over 1 MB, in MB: for each until its media are taken out of it, and
    for text until it is answered. Others wait, and get 503 after 30 s."""
    tool_call_parser: str | None = None
    """vLLM's parser for the model's tool calls, by its name; the one that the model tells when not given."""
    enable_auto_tool_choice: bool | None = None
    """Let the model choose whether it calls tools. Not given: where there is a parser for tool calls."""
    grammar_timeout_s: float = Field(5.0, gt=0)
    """Longest compiling of a request's JSON schema, regex or grammar; one that takes longer gets 400."""
    reasoning_parser: str | None = None
    """vLLM's parser for the model's reasoning, by its name, or `none`; the one that the model tells when not given. API
    and workers need the same one."""
    migration_limit: int = Field(1, ge=0)
    """How often a request whose worker died, and of which no token was sent yet, is placed on another one."""
    lease_s: float = Field(10.0, gt=0)
    """An API process without a heartbeat for so long counts as gone, and its requests are cancelled."""
    api_keys: Annotated[tuple[SecretStr, ...], NoDecode] = ()
    """Keys that open the API, comma-separated. With none here and none in `api_keys_file` it is open to everybody."""
    api_keys_file: str | None = None
    """File with further keys, one a line; `#` begins a comment. Read at the start."""
    admin_key: SecretStr | None = None
    """Key for what changes the cluster for everybody, such as loading adapters; it opens the rest of the API, too.
    Where no keys at all are set, programs on the API's own host need none."""
    open_metrics: bool = False
    """Answer `/metrics` without a key, too."""
    explain_routing: bool = False
    """Tell clients why a request goes where it goes, with workers' names: /debug/route, header `X-Explain-Route`."""
    cors_origins: Annotated[tuple[str, ...], NoDecode] = ()
    """Web sites whose pages may use the API, comma-separated origins: `https://chat.example.com`; `*` is every one."""
    sse_keep_alive_s: float = Field(15.0, ge=0)
    """After so many seconds of silence in a stream, its start included, a comment (`: ping`) is sent; 0: never."""
    response_store_ttl_s: int = Field(0, ge=0, le=10**9)
    """How long Redis keeps a response (`/v1/responses`) after its end, unless its client says `"store": false`; 0 keeps
    none. The same for all API processes."""
    response_store_max_kb: int = Field(1024, ge=1)
    """Largest response that is stored, with the whole conversation before it, in KB of JSON."""
    max_embedding_inputs: int = Field(2048, ge=1)
    """Most inputs in one request to `/v1/embeddings`; more get 400. Each is a request of its own to the workers."""

    @field_validator("api_keys", "cors_origins", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        return words(value) if isinstance(value, str) else value

    @field_validator("api_keys")
    @classmethod
    def _usable(cls, value: tuple[SecretStr, ...]) -> tuple[SecretStr, ...]:
        for one in value:
            _check_key(one)
        return value

    @field_validator("admin_key")
    @classmethod
    def _usable_admin_key(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None:
            _check_key(value)
        return value

    @field_validator("cors_origins")
    @classmethod
    def _origins(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for one in value:
            if one != "*" and not ORIGIN.fullmatch(one):
                raise ValueError(f"{one!r} is no origin: write scheme://host or scheme://host:port, without a path")
        return value


class TensorSettings(Section):
    directory: str = "/dev/shm"
    """Folder for shared buffers: a memory file system, the same one for all processes of a host."""
    transport: Literal["auto", "nixl"] = "auto"
    """How buffers are read: `auto` maps the holder's file on one host and uses NIXL between hosts; `nixl` always."""
    host: str = "127.0.0.1"
    """Address at which other processes reach this one's NIXL agent: NIXL uses its network interface alone. On a host
    with RDMA devices it uses them and all interfaces, unless this is loopback or UCX_NET_DEVICES names others."""
    timeout_s: float = Field(10.0, gt=0)
    """Longest fetch of one buffer, and longest wait for NIXL to publish or withdraw one."""
    max_buffer_mb: float = Field(1024.0, gt=0)
    """Largest buffer, in MB."""
    media_gb: float = Field(2.0, gt=0)
    """Media bytes that an API process holds, for its requests in flight and, the least recently used gone first, for
    those to come; when requests in flight fill it, others with media get 503."""


class ItemSettings(Section):
    record_ttl_s: int = Field(86400, ge=60)
    """How long an item record stays in Redis after its last use."""
    max_record_kb: int = Field(1024, ge=1)
    """Largest item record; an item with a larger one is encoded wherever it is wanted, and not shared."""
    encode_timeout_s: float = Field(60.0, gt=0)
    """Longest wait for an encode worker, queue included; then the item is encoded elsewhere."""


Policy = Literal["kv", "round_robin", "random", "least_loaded", "power_of_two", "sticky"]


class RoutingSettings(Section):
    policy: Policy = "kv"
    """How workers are chosen: `kv` by cost, `sticky` where the session was, the others without a look at caches."""
    kv_events: bool = True
    """Workers tell Redis which KV blocks their engines hold, as these store and drop them; needs prefix caching. Off,
    routers go by where they sent prompts before."""
    max_blocks_per_worker: int = Field(1_000_000, ge=1)
    """Most names of KV blocks that Redis keeps of one engine; the oldest go first."""
    predicted_ttl_s: int = Field(5, ge=1)
    """How long a prompt counts as held where it was sent, until the engine tells; twice that at most."""
    ttl_s: int = Field(120, ge=1)
    """The same without `kv_events`."""
    overlap_credit: float = Field(1.0, ge=0, le=1)
    """What a block that a worker holds takes off those to prefill there."""
    prefill_load_scale: float = Field(40.0, ge=0)
    """Cost of a block to prefill, against one of a running request that counts 1."""
    queue_weight: float = Field(0.7, ge=0)
    """What a block that others have yet to prefill there counts, against one of the prompt's own: that is work, too."""
    active_request_weight: float = Field(0.0, ge=0)
    """Cost of each request that is placed on a worker, in blocks."""
    transfer_weight: float = Field(0.1, ge=0)
    """Cost of a block that a decode worker has to fetch."""
    embedding_weight: float = Field(2.5, ge=0)
    """Cost of a MiB of embeddings that is not where the prompt would be prefilled, in blocks."""
    adapter_weight: float = Field(8.0, ge=0)
    """Cost of a worker whose engine has to bring the request's adapter to its device first, in blocks; twice that where
    as many as `--max-loras` are there already."""
    temperature: float = Field(0.0, ge=0)
    """0 takes the least cost; above, others are chosen too, the more evenly the higher it is."""
    max_queue: int = Field(32, ge=1)
    """A worker with so many requests that wait for their first token is taken only when all have as many."""
    active_decode_blocks_threshold: float = Field(0.95, gt=0)
    """The same for a worker whose requests need more than this share of its KV cache."""
    local_prefill_max_tokens: int = Field(512, ge=0)
    """Beside prefill and decode workers, one that does both gets prompts with at most so many tokens to prefill ..."""
    local_prefill_cached_ratio: float = Field(0.8, gt=0, le=1)
    """... or with at least this share of their tokens in its cache."""
    expected_output_tokens: int = Field(256, ge=0)
    """How long an answer counts as that may be longer."""
    session_ttl_s: int = Field(600, ge=1)
    """How long policy `sticky` remembers where a session was."""
    timeout_s: float = Field(0.5, gt=0)
    """Longest decision; then the least loaded worker is taken."""


class StreamSettings(Section):
    replay_batches: int = Field(2000, ge=10)
    """Token batches kept for each API process to refill gaps from; those with embeddings up to about 32 MB."""
    max_prompt_logprobs: int = Field(100_000, ge=1)
    """Most log-probabilities of prompt tokens in one answer, prompt tokens times (`prompt_logprobs` + 1); more get 400.
    They travel in one message, of about 40 bytes each."""


class FlowerSettings(Section):
    host: str = "127.0.0.1"
    """Address of the dashboard. Flower can stop workers: keep it private."""
    port: int = Field(5555, ge=1, le=65535)
    """Port of the dashboard."""
    enabled: bool = True
    """Whether `trivet up` starts it."""
