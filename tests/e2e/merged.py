"""What transformers answers, greedily, with a model that an adapter was merged into: without vLLM, and without us."""

from __future__ import annotations

import base64
import io
import warnings
from pathlib import Path
from typing import Any

from PIL import Image

from tests.e2e.prompts import Greedy


class Merged:
    """A checkpoint with its processor, loaded by transformers in float32."""

    def __init__(self, folder: Path) -> None:
        from app import torchvision_ops

        torchvision_ops.define()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from transformers import AutoModelForImageTextToText, AutoProcessor

            self._processor: Any = AutoProcessor.from_pretrained(folder)
            self._model: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype="float32")
        self._model.generation_config.eos_token_id = None  # as vLLM's ignore_eos

    def greedy(self, messages: list[dict[str, Any]], tokens: int = 24) -> Greedy:
        """`messages` are OpenAI's, with pictures as `data:` URLs."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            inputs = self._processor.apply_chat_template(
                [_as_transformers(one) for one in messages],
                add_generation_prompt=True,
                tokenize=True,
                return_dict=True,
                return_tensors="pt",
            )
            found = self._model.generate(
                **inputs,
                max_new_tokens=tokens,
                do_sample=False,
                output_logits=True,
                return_dict_in_generate=True,
            )
        length = inputs["input_ids"].shape[1]
        made = found.sequences[0][length:].tolist()
        best = [sorted(one[0].log_softmax(-1).topk(2).values.tolist(), reverse=True) for one in found.logits]
        return Greedy(made, self._processor.tokenizer.decode(made), best, length)


def _as_transformers(message: dict[str, Any]) -> dict[str, Any]:
    content = message["content"]
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    return {**message, "content": [_part(one) for one in parts]}


def _part(part: dict[str, Any]) -> dict[str, Any]:
    if part["type"] != "image_url":
        return part
    data = base64.b64decode(part["image_url"]["url"].partition(",")[2])
    return {"type": "image", "image": Image.open(io.BytesIO(data)).convert("RGB")}
