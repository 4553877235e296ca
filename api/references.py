"""`trivet:` URLs: how a medium that passed the intake travels through vLLM's chat parser, which knows only URLs.

A reference is signed with a key of this process: one that a client wrote would name any file of a worker's host.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets

from app.messages.media import MediaRef

SCHEME = "trivet:"
_KEY = secrets.token_bytes(32)


class ForeignReference(ValueError):
    """Not a reference of this process."""


def to_url(ref: MediaRef) -> str:
    payload = base64.urlsafe_b64encode(ref.model_dump_json().encode()).decode()
    return f"{SCHEME}{_sign(payload)}.{payload}"


def from_url(url: str) -> MediaRef:
    """Raises ForeignReference."""
    signature, _, payload = url.removeprefix(SCHEME).partition(".")
    if not url.startswith(SCHEME) or not url.isascii() or not hmac.compare_digest(signature, _sign(payload)):
        raise ForeignReference("media that did not pass the intake")
    try:
        return MediaRef.model_validate_json(base64.urlsafe_b64decode(payload))
    except (binascii.Error, ValueError) as error:
        raise AssertionError("a signed reference that cannot be read") from error


def _sign(payload: str) -> str:
    return hashlib.blake2b(payload.encode(), key=_KEY, digest_size=16).hexdigest()
