"""The API's real process under a hundred large pictures at once: its memory has a bound, and it goes on answering."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from api.media_sources import AT_ONCE
from app import tiny_model
from bench import api_alone
from bench.processes import ROOT
from bench.watch import watching

NUMBER, MB = 100, 10
BODIES_MB, MEDIA_MB = 100, 300
#: README's bound: bodies, those media that are being decoded, what waits unread, and a tenth for what lies between.
BOUND_MB = 1.1 * (BODIES_MB + AT_ONCE * MB + 0.4 * NUMBER)
SETTINGS = {
    "TRIVET_API__BODY_MEMORY_MB": str(BODIES_MB),
    "TRIVET_TENSORS__MEDIA_GB": str(MEDIA_MB / 1000),
}


def uploads(port: int, number: int) -> None:
    command = f"-m bench.uploads --port {port} --number {number} --mb {MB}"
    done = subprocess.run(
        [sys.executable, *command.split()], cwd=ROOT, capture_output=True, text=True, timeout=300, check=True
    )
    assert json.loads(done.stdout)["statuses"] == {"200": number}, done.stdout


def test_a_hundred_large_pictures_at_once(tmp_path: Path) -> None:
    """Without a bound their bodies alone are 1300 MB."""
    model = tiny_model.build(tmp_path / "tiny")
    with api_alone.running(str(model), SETTINGS) as alone:
        uploads(alone.port, 2)  # what the first ones load stays
        with watching(alone.api, alone.port) as watch:
            uploads(alone.port, NUMBER)
    assert watch.grown < BOUND_MB * 1e6
    assert max(watch.shared) < MEDIA_MB * 1.1e6
    assert max(watch.alive_s) < 1.0, "/health/live"
