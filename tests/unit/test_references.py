"""api.references."""

from __future__ import annotations

import base64
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api import references
from api.references import ForeignReference
from app.messages.media import MediaRef
from app.messages.tensors import Descriptor


def ref(param: str = "messages[0].content[0].image_url", path: str = "/dev/shm/x") -> MediaRef:
    source = Descriptor(
        agent="a", host="h", path=path, address=1, metadata="bWV0YQ==", name="n", nonce="0" * 16, dtype="uint8",
        shape=[3], nbytes=3, expires_at=1.5,
    )  # fmt: skip
    return MediaRef(modality="video", identity="a" * 32, size=3, media_type="video/jpeg", param=param, source=source)


@given(st.text(max_size=20))
def test_a_reference_comes_back_whole(param: str) -> None:
    url = references.to_url(ref(param))
    assert references.from_url(url) == ref(param)
    assert url.startswith("trivet:") and url.isascii() and not set(url) & set(" \"'<>?#%+/")


FORGED = base64.urlsafe_b64encode(ref(path="/etc/passwd").model_dump_json().encode()).decode()
HONEST = references.to_url(ref())


@pytest.mark.parametrize(
    "url",
    [
        "",
        "trivet:",
        "trivet:.",
        "http://127.0.0.1/x.png",
        "data:image/png;base64,AAEC",
        "trivet:" + "a" * 32 + ":77",
        f"trivet:{FORGED}",
        f"trivet:.{FORGED}",
        f"trivet:{'0' * 32}.{FORGED}",
        f"{HONEST.partition('.')[0]}.{FORGED}",
        HONEST.removeprefix("trivet:"),
        HONEST[:-1],
        HONEST + "é",
        HONEST.replace("trivet:", "trivet:é"),
    ],
)
def test_what_a_client_could_write_is_none(url: str) -> None:
    with pytest.raises(ForeignReference, match="did not pass the intake"):
        references.from_url(url)


def test_another_process_signs_with_another_key() -> None:
    code = "import sys; from tests.unit.test_references import HONEST; sys.stdout.write(HONEST)"
    url = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout
    assert url.startswith("trivet:")
    with pytest.raises(ForeignReference):
        references.from_url(url)
