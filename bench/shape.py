"""A model folder of real dimensions without weights, for engines started with `--load-format dummy`.

    python -m bench.shape DIR          (Qwen3-VL-2B's dimensions)

Speed hardly depends on the values of weights, so a benchmark needs no download. Tokenizer and processors are the tiny
model's.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path

from app import tiny_model

#: As in the model's own config.json.
TEXT = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
}
VISION = {
    "depth": 24,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_heads": 16,
    "out_hidden_size": 2048,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [5, 11, 17],
}


def build(directory: Path) -> Path:
    with tempfile.TemporaryDirectory() as scratch:
        tiny = tiny_model.build(Path(scratch) / "tiny")
        shutil.copytree(tiny, directory, ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True)
    path = directory / "config.json"
    config = json.loads(path.read_text())
    config["text_config"] |= TEXT
    config["text_config"]["rope_parameters"] |= {"mrope_section": [24, 20, 20], "rope_theta": 5000000.0}
    config["vision_config"] |= VISION
    config["tie_word_embeddings"] = True
    for part in (config, config["text_config"], config["vision_config"]):
        part["dtype"] = "bfloat16"
    path.write_text(json.dumps(config, indent=2))
    return directory


if __name__ == "__main__":
    print(build(Path(sys.argv[1])))
