"""vLLM's own flags on `trivet up`'s command line: which are for all workers, and which for those of one role."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

import typer

from app.roles import Role

_FLAG = re.compile(r"-{1,2}[A-Za-z]")
_OF_ROLE = re.compile(rf"--({'|'.join(Role)})\.(.+)")

COMMON = "args"
#: vLLM's server takes it on its command line, which every user of the host can read.
API_KEY = ("--api-key", "--api_key", "--api-keys")
KEYS_GO = "set TRIVET_API__API_KEYS, or name a file with --api-keys-file"


def split(arguments: Sequence[str]) -> dict[str, str]:
    """`--max-num-seqs 8 --decode.max-num-seqs 32` -> {"args": "--max-num-seqs 8", "decode_args": "--max-num-seqs 32"}.

    Keys are settings of the section `engine`; values are quoted as a shell would take them. Raises BadParameter for
    a word that belongs to no flag.
    """
    found: dict[str, list[str]] = {}
    key: str | None = None
    for word in arguments:
        if word.partition("=")[0] in API_KEY:
            raise typer.BadParameter(f"{word.partition('=')[0]}: a key in a command line is public; {KEYS_GO}")
        if role := _OF_ROLE.fullmatch(word):
            key, word = f"{role[1]}_args", f"--{role[2]}"
        elif _FLAG.match(word):
            key = COMMON
        elif key is None:
            raise typer.BadParameter(f"unexpected argument {word!r}")
        found.setdefault(key, []).append(word)
    return {name: shlex.join(words) for name, words in found.items()}
