"""Models of about a million random parameters, for demos and tests: they load in seconds and take real media.

Their answers are words without sense, but every token and every medium of the prompt has a part in them. So greedy
output that is equal in two topologies shows that the same prompt and the same media reached the model in both.

usage: python -m app.tiny_model DIR [--family NAME]

The family is qwen3_vl (the default: images and video), qwen2_audio (audio), qwen2_5_omni (all three), llava (images) or
qwen3_embedding (text, of which it makes embeddings).
"""

from app.tiny_model.family import MAX_POSITIONS, NAMES
from app.tiny_model.files import build

__all__ = ["MAX_POSITIONS", "NAMES", "build"]
