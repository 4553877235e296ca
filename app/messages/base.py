"""What all messages in JSON have in common: they do not change, and have no field that the reader does not know."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
