"""An engine as a clock sees it: continuous batching with chunked prefill, a prefix cache, an embedding cache."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from bench.simulation.traffic import Turn


@dataclass(frozen=True)
class Costs:
    """Seconds, of a model of about 8 billion parameters on one accelerator. `step_s` is an engine step's own time.

    `fetch_s` is what taking an embedding from another worker costs the request, and the engine nothing; `encode_s`, a
    token of a picture, keeps the engine busy. Sizes: `blocks` KV blocks of `block_size` tokens, `items` embeddings.
    """

    step_s: float = 0.008
    prefill_s: float = 0.00006
    decode_s: float = 0.0002
    encode_s: float = 0.00008
    fetch_s: float = 0.01
    chunk: int = 2048
    running: int = 256
    block_size: int = 16
    blocks: int = 12_000
    items: int = 256


@dataclass
class Running:
    """A request in the engine. `blocks` names its prompt's blocks and, after them, those of the answer."""

    turn: Turn
    blocks: list[str]
    prompt_blocks: int
    arrived: float
    ready: float
    name: str
    then: Callable[[float], None]
    cached: int = 0
    prefilled: int = 0
    answered: int = 0
    encode: list[str] = field(default_factory=list)
    first_token: float | None = None


class Lru:
    """Names with the least recently used first. `put` answers what had to go."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._names: OrderedDict[str, None] = OrderedDict()

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def put(self, names: Iterable[str]) -> list[str]:
        for name in names:
            self._names[name] = None
            self._names.move_to_end(name)
        gone = []
        while len(self._names) > self._capacity:
            gone.append(self._names.popitem(last=False)[0])
        return gone


@dataclass
class Step:
    """What a step brought: requests with their first token, ended ones, and what the caches took in and threw out."""

    seconds: float
    first: list[Running]
    ended: list[Running]
    stored: list[str]
    removed: list[str]
    taken_in: list[str]
    dropped: list[str]
    encodes: int


class Engine:
    """One worker's engine. The cluster runs its steps; time passes only there."""

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self.kv = Lru(costs.blocks)
        self.embeddings = Lru(costs.items)
        self.waiting: deque[Running] = deque()
        self.active: list[Running] = []
        self.busy_s = 0.0
        self.prompt_tokens = self.cached_tokens = self.requests = 0

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.active

    def next_ready(self, now: float) -> float:
        """When there is something to do, if that is later than now."""
        if self.active or not self.waiting:
            return now
        return max(now, min(one.ready for one in self.waiting))

    def step(self, now: float) -> Step:
        """One engine step that begins at `now`."""
        self._admit(now)
        stored: list[str] = []
        tokens, encoded, fetched, encode_tokens = self._prefill(stored)
        decoding = [one for one in self.active if one.prefilled >= len(one.turn.tokens)]
        costs = self.costs
        seconds = costs.step_s + costs.prefill_s * tokens + costs.decode_s * len(decoding)
        seconds += costs.encode_s * encode_tokens
        first, ended = self._decode(decoding, now + seconds)
        for one in ended:
            stored += reversed(one.blocks)
        dropped = self.embeddings.put([*encoded, *fetched])
        removed = self.kv.put(stored)
        self.busy_s += seconds
        return Step(seconds, first, ended, stored, removed, [*encoded, *fetched], dropped, len(encoded))

    def _admit(self, now: float) -> None:
        for one in [one for one in self.waiting if one.ready <= now][: self.costs.running - len(self.active)]:
            self.waiting.remove(one)
            held = 0
            while held < one.prompt_blocks and one.blocks[held] in self.kv:
                held += 1
            one.cached = one.prefilled = min(held * self.costs.block_size, len(one.turn.tokens) - 1)
            self.kv.put(reversed(one.blocks[:held]))
            self.active.append(one)
            self.requests += 1
            self.prompt_tokens += len(one.turn.tokens)
            self.cached_tokens += one.cached

    def _prefill(self, stored: list[str]) -> tuple[int, list[str], list[str], int]:
        """Fill prompts, up to a chunk in all. Answers tokens, pictures encoded and fetched, tokens of the former."""
        left, encode_tokens = self.costs.chunk, 0
        encoded: list[str] = []
        fetched: list[str] = []
        for one in self.active:
            missing = len(one.turn.tokens) - one.prefilled
            if missing <= 0 or left <= 0:
                continue
            needed = [span for span in one.turn.pictures if span.offset + span.length > one.cached]
            for span in needed:
                if span.identity in self.embeddings or span.identity in encoded:
                    continue
                if span.identity in one.encode:
                    encoded.append(span.identity)
                    encode_tokens += span.length
                else:
                    fetched.append(span.identity)
            taken = min(missing, left)
            left -= taken
            one.prefilled += taken
            if one.prefilled == len(one.turn.tokens):
                # Last to first, as vLLM frees them: what many share goes last.
                stored += reversed(one.blocks[: one.prompt_blocks])
        return self.costs.chunk - left, encoded, fetched, encode_tokens

    def _decode(self, decoding: list[Running], at: float) -> tuple[list[Running], list[Running]]:
        first, ended = [], []
        for one in decoding:
            if one.first_token is None:
                one.first_token = at
                first.append(one)
            one.answered += 1
            if one.answered >= len(one.turn.answer):
                self.active.remove(one)
                ended.append(one)
        return first, ended
