"""Prompts with and without media."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from PIL import Image

from tests import sounds, videos


def picture(seed: int, size: tuple[int, int] = (128, 96)) -> str:
    """A data: URL of noise: different seeds give different pictures."""
    width, height = size
    pixels = (np.random.RandomState(seed).rand(height, width, 3) * 255).astype("uint8")
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return f"data:image/png;base64,{base64.b64encode(out.getvalue()).decode()}"


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def image(seed: int, size: tuple[int, int] = (128, 96)) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": picture(seed, size)}}


def video(seed: int, frames: int = 6, size: tuple[int, int] = (96, 64)) -> dict[str, Any]:
    """A video given as frames."""
    url = videos.frames_url(videos.jpegs(seed, frames, size))
    return {"type": "video_url", "video_url": {"url": url}}


def video_file(seed: int, frames: int = 16, size: tuple[int, int] = (96, 64)) -> dict[str, Any]:
    """A video given as an MP4 file."""
    return {"type": "video_url", "video_url": {"url": videos.file_url(videos.file(seed, frames, size))}}


def audio(seed: int, seconds: float = 1.0, rate: int = 16_000, ending: str = ".wav") -> dict[str, Any]:
    """Audio in a file of that ending, by URL."""
    url = sounds.file_url(sounds.file(seed, ending, rate, seconds=seconds), f"audio/{ending[1:]}")
    return {"type": "audio_url", "audio_url": {"url": url}}


def input_audio(seed: int, ending: str = ".wav") -> dict[str, Any]:
    """Audio as OpenAI's API has it."""
    return sounds.input_audio(sounds.file(seed, ending), ending[1:])


def user(*parts: dict[str, Any] | str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [text(one) if isinstance(one, str) else one for one in parts]}]


PROMPTS = {
    "text": user("What is in the garden behind the house?"),
    "long text": user("Tell me a story about the sea and the moon. " * 40),
    "system and turns": [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": "Hello!"},
        {"role": "assistant", "content": "Yes, there is one."},
        {"role": "user", "content": "Which colour is the circle?"},
    ],
    "image": user(image(1), "What is in this image?"),
    "wide image": user(image(2, (320, 64)), "What is in this image?"),
    "images and text between": user("First", image(3), "then", image(4, (64, 160)), "and", image(5), "?"),
    "4 images and text between": user(
        "First", image(8), "then", image(9, (64, 160)), "and", image(10), "and last", image(11, (320, 64)), "?"
    ),
    "the same image twice": user(image(6), image(6), "Are they the same?"),
    "image in history": [
        *user(image(7), "Describe it."),
        {"role": "assistant", "content": "A horse."},
        *user("Again."),
    ],
    "video": user(video(1), "What happens in this video?"),
    "video file": user(video_file(2), "What happens in this video?"),
    "image and video": user(image(12), "and", video(3), "Which of them has a horse?"),
}


@dataclass
class Greedy:
    """A greedy answer: token ids and text, their log-probabilities, and those of the two best tokens at each place."""

    tokens: list[int]
    text: str
    best: list[list[float]] = field(default_factory=list)
    prompt_tokens: int = 0

    def same_as(self, other: Greedy, tie: float = 2e-3) -> bool:
        """Equal tokens, or a first difference where the two best tokens are as good as equal: a numerical tie."""
        for at, (mine, theirs) in enumerate(zip(self.tokens, other.tokens, strict=True)):
            if mine != theirs:
                return (
                    abs(self.best[at][0] - self.best[at][1]) < tie and abs(other.best[at][0] - other.best[at][1]) < tie
                )
        return True


def greedy(client: Any, messages: list[dict[str, Any]], tokens: int = 24, model: str = "tiny") -> Greedy:
    answer = client.chat.completions.create(
        model=model,
        messages=messages,
        max_tokens=tokens,
        temperature=0,
        logprobs=True,
        top_logprobs=2,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    choice = answer.choices[0]
    assert choice.finish_reason == "length"
    best = [sorted((top.logprob for top in one.top_logprobs), reverse=True)[:2] for one in choice.logprobs.content]
    return Greedy(choice.token_ids, choice.message.content, best, answer.usage.prompt_tokens)
