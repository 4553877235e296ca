"""`python -m app.tiny_model DIR [--family NAME]`."""

import argparse
import os
from pathlib import Path

from app import tiny_model


def main() -> None:
    about = tiny_model.__doc__ or ""
    parser = argparse.ArgumentParser("python -m app.tiny_model", description=about.partition("\n")[0])
    parser.add_argument("directory", type=Path, help="where the model is made; one that is there already is kept")
    parser.add_argument("--family", choices=tiny_model.NAMES, default="qwen3_vl")
    given = parser.parse_args()
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    print(tiny_model.build(given.directory, given.family))


if __name__ == "__main__":
    main()
