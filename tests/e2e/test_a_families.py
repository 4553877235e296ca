"""Every model family gives the aggregated engine's tokens in every topology, whatever its media and its positions are.

First of the folder's tests: a family's topologies run one after the other and by themselves, so that no more than three
engines of theirs take memory at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from app import tiny_model
from app.roles import TOPOLOGIES
from tests.e2e.prompts import Greedy, audio, greedy, image, input_audio, user, video, video_file
from tests.e2e.stack import up

ENCODED = "trivet:ec_encoded_items_total"


@dataclass(frozen=True)
class Family:
    """`limits` are most media of each kind, `media` how many different ones `prompts` have."""

    limits: Mapping[str, int]
    prompts: Mapping[str, list[dict[str, Any]]]
    media: int


FAMILIES = {
    "llava": Family(
        {"image": 3},
        {
            "one": user(image(1), "What is it?"),
            "another": user(image(2), "What is it?"),
            "two sizes": user("First", image(3, (320, 64)), "then", image(4, (33, 160)), "?"),
            "again and twice": user(image(1), image(5), image(1), "Which of them is the first?"),
        },
        5,
    ),
    "qwen2_audio": Family(
        {"audio": 3},
        {
            "one": user(audio(1), "What is it?"),
            "another": user(audio(2), "What is it?"),
            "other rates": user("First", audio(3, 2.5, 44_100, ".flac"), "then", audio(4, 0.7, 8_000, ".ogg"), "?"),
            "again and as OpenAI has it": user(audio(1), "or", input_audio(5, ".mp3"), "Which is a voice?"),
            "in history": [
                *user(audio(6), "Describe it."),
                {"role": "assistant", "content": "A phone rings."},
                *user("Again."),
            ],
        },
        6,
    ),
    "qwen2_5_omni": Family(
        {"image": 2, "video": 1, "audio": 2},
        {
            "one": user(image(1), audio(1), video(1), "What is it?"),
            "another": user(image(1), audio(2), video(1), "What is it?"),
            "image": user("See", image(2, (320, 64)), "?"),
            "audio": user(audio(3, 1.3, 44_100), "What is it?"),
            "video file": user(video_file(2), "What happens?"),
            "another order": user(audio(1), "and", video(1), "and", image(3), "and", input_audio(4), image(1), "?"),
        },
        9,
    ),
}


@dataclass(frozen=True)
class Answers:
    """To the family's prompts, by name. `encoded` is how many items each kind of worker encoded in the end."""

    greedy: Mapping[str, Greedy]
    encoded: Mapping[str, float]


Ask = Callable[[str, str], Answers]


@pytest.fixture(scope="module")
def ask(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Ask:
    """The answers of a family in a topology, which runs as long as it takes to get them."""
    folder = tmp_path_factory.mktemp("families")

    @cache
    def answers(name: str, topology: str) -> Answers:
        family, model = FAMILIES[name], tiny_model.build(folder / name, name)
        with up(f"e2e-{name}-{topology}", topology, model, limits=family.limits) as stack:
            found = {prompt: greedy(stack.client, messages) for prompt, messages in family.prompts.items()}
            return Answers(found, {kind: stack.counter(kind, ENCODED) for kind in TOPOLOGIES[topology]})

    return answers


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_are_those_of_the_aggregated_engine(ask: Ask, name: str, topology: str) -> None:
    there, here = ask(name, topology), ask(name, "agg")
    for prompt, answer in there.greedy.items():
        expected = here.greedy[prompt]
        assert answer.prompt_tokens == expected.prompt_tokens, prompt
        assert answer.same_as(expected), (prompt, answer, expected)
    # Of the two prompts that differ in a medium alone.
    assert there.greedy["one"].tokens != there.greedy["another"].tokens
    _check_encodes(FAMILIES[name], there, topology)


def _check_encodes(family: Family, answers: Answers, topology: str) -> None:
    """One encode for each medium, all in one kind of worker, besides each worker's own self-check."""
    own = len(family.limits)
    encoder = {"agg": "agg", "pd": "prefill"}.get(topology, "encode")
    for kind, encoded in answers.encoded.items():
        if kind == encoder:
            assert encoded == own + family.media
        else:
            assert encoded == (0 if kind == "decode" else own)
