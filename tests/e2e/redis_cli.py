"""What `redis-cli --raw` prints, for machines that have none: `python -m tests.e2e.redis_cli URL --raw COMMAND...`

A subscription ends after its first message.
"""

import sys
from typing import Any

import redis


def main() -> None:
    url, raw, *words = sys.argv[1:]
    assert raw == "--raw", "only --raw is known here"
    connection = redis.Connection(**redis.connection.parse_url(url), protocol=2, socket_timeout=10)
    connection.connect()
    if words[0] == "--scan":
        _scan(connection, words[words.index("--pattern") + 1])
    else:
        connection.send_command(*words)
        _print(connection.read_response())
        if words[0] == "psubscribe":
            _print(connection.read_response())


def _scan(connection: Any, pattern: str) -> None:
    cursor = b"0"
    while True:
        connection.send_command("SCAN", cursor, "MATCH", pattern, "COUNT", 1000)
        cursor, keys = connection.read_response()
        _print(keys)
        if cursor == b"0":
            return


def _print(answer: Any) -> None:
    if isinstance(answer, list):
        for one in answer:
            _print(one)
    else:
        print(answer.decode() if isinstance(answer, bytes) else "" if answer is None else answer, flush=True)


if __name__ == "__main__":
    main()
