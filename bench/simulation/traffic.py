"""Conversations about pictures: many turns, a system prompt, pictures that are new or that others asked about, too."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate

from app.routing.blocks import Span


@dataclass(frozen=True)
class Workload:
    """Lengths are in tokens and means of exponential distributions, but for the system prompts and the pictures.

    `picture` is the share of turns with a picture, `reuse` the share of those whose picture is one of `popular`, by
    Zipf's law with exponent `zipf`; the others are new. A conversation has `turns` turns on average, and `think_s`
    seconds between an answer and the next question.
    """

    sessions: int = 160
    turns: float = 6.0
    picture: float = 0.6
    reuse: float = 0.5
    popular: int = 400
    zipf: float = 1.0
    picture_tokens: tuple[int, ...] = (1024, 1536, 2048, 2560)
    system_prompts: int = 4
    system_tokens: int = 600
    question_tokens: float = 120.0
    answer_tokens: float = 80.0
    think_s: float = 1.0


@dataclass
class Turn:
    """One request: the prompt as an engine gets it, pictures expanded; its answer, and how long the next one takes."""

    session: str
    tokens: list[int]
    pictures: list[Span]
    answer: list[int]
    think_s: float


@dataclass
class Session:
    name: str
    left: int
    tokens: list[int] = field(default_factory=list)
    pictures: list[Span] = field(default_factory=list)


class Traffic:
    """The same seed gives the same conversations, whoever answers them and in whatever order."""

    def __init__(self, workload: Workload, seed: int) -> None:
        self.workload = workload
        self._seed = seed
        chance = random.Random(seed)
        self._systems = [_text(chance, workload.system_tokens) for _ in range(workload.system_prompts)]
        self._weights = list(accumulate(1 / rank**workload.zipf for rank in range(1, workload.popular + 1)))

    def sessions(self) -> Iterator[Iterator[Turn]]:
        """Conversations without end; each yields its turns."""
        number = 0
        while True:
            yield self._turns(number)
            number += 1

    def _turns(self, number: int) -> Iterator[Turn]:
        chance = random.Random(f"{self._seed}.{number}")
        one = Session(f"s{number}", 1 + int(chance.expovariate(1 / (self.workload.turns - 1))))
        one.tokens += chance.choice(self._systems)
        while one.left:
            one.left -= 1
            if chance.random() < self.workload.picture:
                self._show(one, chance)
            one.tokens += _text(chance, 1 + int(chance.expovariate(1 / self.workload.question_tokens)))
            answer = _text(chance, 1 + int(chance.expovariate(1 / self.workload.answer_tokens)))
            think_s = chance.expovariate(1 / self.workload.think_s)
            yield Turn(one.name, list(one.tokens), list(one.pictures), answer, think_s)
            one.tokens += answer

    def _show(self, session: Session, chance: random.Random) -> None:
        if chance.random() < self.workload.reuse:
            (number,) = chance.choices(range(self.workload.popular), cum_weights=self._weights)
            identity = f"{number:032x}"
        else:
            identity = f"{chance.getrandbits(120):032x}"
        length = self.workload.picture_tokens[int(identity, 16) % len(self.workload.picture_tokens)]
        session.pictures.append(Span(identity, len(session.tokens), length))
        session.tokens += [1] * length


def _text(chance: random.Random, length: int) -> list[int]:
    return [chance.randrange(100, 100_000) for _ in range(length)]
