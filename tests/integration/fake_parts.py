"""Stand-ins for worker, API and Flower, quick to start, and `trivet` with them in place of the real ones.

    python -m tests.integration.fake_parts trivet up --model m ...
    python -m tests.integration.fake_parts worker prefill@cpu0

FAKE_FAULT=<kind>:<fault> makes the parts of a kind misbehave: `exit` at the start, `stubborn` against every signal,
`mute` about being ready.
"""

import asyncio
import http.server
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from multiprocessing import shared_memory
from typing import Any

from app import api_keys, settings
from app.redis import connect
from app.registry import EngineState, Registry, WorkerRecord

ENGINE = EngineState(vllm="0", max_model_len=10, block_size=1, kv_tokens=100, kv_usage=0.25, running=3, waiting=4)
#: What the stand-in for an engine is called in the process list.
DESCENDANT = "import time; time.sleep(600)  # "


def worker(name: str) -> None:
    """Registers and renews; has a descendant and a shared memory segment that outlive it when it is killed."""
    _misbehave("worker")
    segment = shared_memory.SharedMemory(create=True, size=64)
    engine = subprocess.Popen([sys.executable, "-I", "-S", "-c", DESCENDANT + name])
    try:
        asyncio.run(_serve(name))
    finally:
        engine.kill()
        segment.close()
        segment.unlink()


async def _serve(name: str) -> None:
    chosen = settings.current()
    client = connect(chosen.redis.cache, 2.0, name=name)
    registry = Registry(client, chosen.worker.lease_s)
    record = WorkerRecord(
        id=name,
        incarnation=str(os.getpid()),
        roles=chosen.roles,
        model=chosen.served_name,
        multimodal=chosen.enable_multimodal,
        pid=os.getpid(),
        host="here",
        concurrency=1,
        metrics="http://127.0.0.1:1/metrics",
        engine=ENGINE,
        started=time.time(),
    )
    stop = asyncio.Event()
    if _fault("worker") != "stubborn":
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    print(f"{name} serves {chosen.model} with {chosen.engine.args}", flush=True)
    while not stop.is_set():
        if _fault("worker") != "mute":
            await registry.announce(record)
        try:
            await asyncio.wait_for(stop.wait(), 0.5)
        except TimeoutError:
            continue
    await registry.remove(name)
    await client.aclose()


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers all that `trivet up` and `trivet chat` ask."""

    def do_GET(self) -> None:
        # `trivet chat` asks for models, all else for health.
        if self.path == "/v1/models" and not self._has_key():
            return self._answer({"error": {"message": "no key"}}, 401)
        self._answer({"data": [{"id": settings.current().served_name}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self._has_key():
            return self._answer({"error": {"message": "no key"}}, 401)
        text = json.dumps(body["messages"][-1]["content"])
        if "refuse" in text:
            self._answer({"error": {"message": "refused, as asked"}}, 400)
        elif not body.get("stream"):
            self._answer({"choices": [{"message": {"content": "Hi"}}]})
        else:
            frames: list[Any] = [{"choices": [{"delta": {"content": piece}}]} for piece in ("you said ", text)]
            if "break" in text:
                frames.append({"error": {"message": "broken, as asked"}})
            self._write(
                200, b"".join(b"data: %s\n\n" % json.dumps(frame).encode() for frame in frames) + b"data: [DONE]\n\n"
            )

    def _has_key(self) -> bool:
        known = api_keys.read(settings.current().api)
        return not known or self.headers["Authorization"] in [f"Bearer {key}" for key in known]

    def _answer(self, content: Any, status: int = 200) -> None:
        self._write(status, json.dumps(content).encode())

    def _write(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def server(kind: str) -> None:
    _misbehave(kind)
    chosen = settings.current()
    part = chosen.api if kind == "api" else chosen.flower
    http.server.ThreadingHTTPServer((part.host, part.port), Handler).serve_forever()


def trivet() -> None:
    """The command with these parts; only their command lines differ from the real ones."""
    from app.cli import main
    from app.launch import plan

    real_worker, real_api, real_flower = plan.worker, plan.api, plan.flower

    def faked(real: Any, kind: str) -> Any:
        def make(*arguments: Any) -> Any:
            spec = real(*arguments)
            return replace(spec, argv=(sys.executable, "-m", __spec__.name, kind, spec.name))

        return make

    plan.worker, plan.api, plan.flower = (
        faked(real_worker, "worker"),
        faked(real_api, "api"),
        faked(real_flower, "flower"),
    )
    sys.argv[:2] = ["trivet"]
    main.main()


def _fault(kind: str) -> str:
    given, _, fault = os.environ.get("FAKE_FAULT", "").partition(":")
    return fault if given == kind else ""


def _misbehave(kind: str) -> None:
    if _fault(kind) == "exit":
        print(f"this {kind} does not want to", flush=True)
        sys.exit(3)
    if _fault(kind) == "stubborn":
        for number in (signal.SIGTERM, signal.SIGQUIT, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)


if __name__ == "__main__":
    if sys.argv[1] == "trivet":
        trivet()
    elif sys.argv[1] == "worker":
        worker(sys.argv[2])
    else:
        server(sys.argv[1])
