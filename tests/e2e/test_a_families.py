"""Every model family gives the aggregated engine's tokens in every topology, whatever its media and its positions are.

First of the folder's tests: a family's topologies run one after the other and by themselves, so that no more than three
engines of theirs take memory at once.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from app import tiny_model
from app.roles import TOPOLOGIES
from tests import pictures, sounds, videos
from tests.e2e.prompts import Greedy, audio, greedy, image, input_audio, user, video, video_file
from tests.e2e.stack import Stack, up
from tests.media_server import MediaHost, media_server
from tests.pictures import data_url

ENCODED = "trivet:ec_encoded_items_total"


@dataclass(frozen=True)
class Family:
    """`limits` are most media of each kind, `media` how many different ones `prompts` have, and `fetched` is the prompt
    that is asked once more with its media by URL."""

    limits: Mapping[str, int]
    prompts: Mapping[str, list[dict[str, Any]]]
    media: int
    fetched: str


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
        fetched="again and twice",
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
        fetched="other rates",
    ),
    "qwen2_5_omni": Family(
        {"image": 2, "video": 1, "audio": 2},
        {
            "one": user(image(1), audio(1), video(1), "What is it?"),
            "another": user(image(1), audio(2), video(1), "What is it?"),
            "image": user("See", image(2, (320, 64)), "?"),
            "audio": user(audio(3, 1.3, 44_100), "What is it?"),
            "video file": user(video_file(2), "What happens?"),
            "files": user(image(1), video_file(2), audio(1), "What is it?"),
            "another order": user(audio(1), "and", video(1), "and", image(3), "and", input_audio(4), image(1), "?"),
        },
        9,
        fetched="files",
    ),
}


#: Status, the error's code, and its field.
Told = tuple[int, str, str]


@dataclass(frozen=True)
class Answers:
    """To the family's prompts, by name, and to the one by URL, with how often each medium was got for it. `faults` is
    what each kind of fault was told, once for each modality. `encoded` is how many items each kind of worker encoded in
    the end."""

    greedy: Mapping[str, Greedy]
    fetched: Greedy
    gets: list[int]
    faults: Mapping[str, list[Told]]
    encoded: Mapping[str, float]


Ask = Callable[[str, str], Answers]


@pytest.fixture(scope="module")
def web() -> Iterator[MediaHost]:
    with media_server() as host:
        yield host


@pytest.fixture(scope="module")
def ask(home: Path, tmp_path_factory: pytest.TempPathFactory, web: MediaHost) -> Ask:
    """The answers of a family in a topology, which runs as long as it takes to get them."""
    folder = tmp_path_factory.mktemp("families")

    @cache
    def answers(name: str, topology: str) -> Answers:
        family, model = FAMILIES[name], tiny_model.build(folder / name, name)
        with up(f"e2e-{name}-{topology}", topology, model, limits=family.limits) as stack:
            found = {prompt: greedy(stack.client, messages) for prompt, messages in family.prompts.items()}
            messages, paths = by_url(family.prompts[family.fetched], web, f"/{name}/{topology}")
            fetched = greedy(stack.client, messages)
            gets = [web.gets(path) for path in paths]
            faults = {kind: [told(stack, modality, url) for modality, url in urls] for kind, urls in bad(family, web)}
            encoded = {kind: stack.counter(kind, ENCODED) for kind in TOPOLOGIES[topology]}
            return Answers(found, fetched, gets, faults, encoded)

    return answers


def by_url(messages: list[dict[str, Any]], web: MediaHost, folder: str) -> tuple[list[dict[str, Any]], list[str]]:
    """The same with each medium on the media host, and the paths there."""
    paths: dict[str, str] = {}

    def moved(part: dict[str, Any]) -> dict[str, Any]:
        kind = part["type"]
        if kind == "text":
            return part
        inline = part[kind]["url"]
        path = paths.setdefault(inline, f"{folder}/{len(paths)}")
        head, _, data = inline.partition(",")
        return {
            "type": kind,
            kind: {"url": web.put(path, base64.b64decode(data), head[len("data:") : -len(";base64")])},
        }

    asked = [one | {"content": [moved(part) for part in one["content"]]} for one in messages]
    return asked, [*paths.values()]


def bad(family: Family, web: MediaHost) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Each kind of fault, as (modality, URL) for all that the family takes."""
    sound = {
        "image": ("image/png", pictures.encoded(size=(64, 48))),
        "video": ("video/mp4", videos.file()),
        "audio": ("audio/flac", sounds.file(ending=".flac")),
    }
    taken = [one for one in sound if one in family.limits]
    for kind, of in {
        "truncated": lambda modality: data_url(sound[modality][1][: len(sound[modality][1]) // 2], sound[modality][0]),
        "empty": lambda modality: web.put(f"/empty.{modality}", b"", sound[modality][0]),
        "a page": lambda modality: web.url("/html"),
        "a page in disguise": lambda modality: data_url(b"<html></html>", sound[modality][0]),
        "another type": lambda modality: data_url(sound[modality][1], "application/pdf"),
        "not there": lambda modality: web.url("/nothing"),
    }.items():
        yield kind, [(modality, of(modality)) for modality in taken]


def told(stack: Stack, modality: str, url: str) -> Told:
    kind = f"{modality}_url"
    found = stack.post({"model": "tiny", "messages": user("See", {"type": kind, kind: {"url": url}})})
    error = found.json()["error"]
    return found.status_code, error["code"], error["param"].replace(modality, "medium")


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


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("name", FAMILIES)
def test_one_get_for_each_medium_and_the_same_answer(ask: Ask, name: str, topology: str) -> None:
    found, family = ask(name, topology), FAMILIES[name]
    assert found.gets == [1] * len(found.gets) and len(found.gets) >= len(family.limits)
    assert found.fetched.same_as(found.greedy[family.fetched])


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("name", FAMILIES)
def test_the_same_fault_is_told_the_same_for_every_modality(ask: Ask, name: str, topology: str) -> None:
    for fault, answers in ask(name, topology).faults.items():
        (one,) = {*answers}
        assert (one[0], one[2]) == (400, "messages[0].content[1].medium_url"), (fault, one)
        assert one[1] in ("invalid_media", "media_unreachable"), (fault, one)


def _check_encodes(family: Family, answers: Answers, topology: str) -> None:
    """One encode for each medium, all in one kind of worker, besides each worker's own self-check."""
    own = len(family.limits)
    encoder = {"agg": "agg", "pd": "prefill"}.get(topology, "encode")
    for kind, encoded in answers.encoded.items():
        if kind == encoder:
            assert encoded == own + family.media
        else:
            assert encoded == (0 if kind == "decode" else own)
