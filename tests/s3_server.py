"""An S3 server on loopback: moto's, in a process of its own.

with s3_server() as server:
    server.upload(folder, "adapters", "sql")
    ... AdapterSettings(s3_endpoint_url=server.url), with S3_ENVIRONMENT in the environment ...
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
import httpx

from app.ports import reserve

START_S, STOP_S = 120.0, 10.0
#: Credentials that it takes, and no files of the user's.
S3_ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    "AWS_EC2_METADATA_DISABLED": "true",
}


@dataclass(frozen=True)
class S3Server:
    url: str
    client: Any

    def upload(self, folder: Path, bucket: str, prefix: str) -> str:
        """Put the folder's files there, in place of what was; the source's name."""
        self.client.create_bucket(Bucket=bucket)
        for one in folder.iterdir():
            self.client.put_object(Bucket=bucket, Key=f"{prefix}/{one.name}", Body=one.read_bytes())
        return f"s3://{bucket}/{prefix}"


@contextmanager
def s3_server(*, closed: bool = False) -> Iterator[S3Server]:
    """With `closed` no credentials open it."""
    port = reserve()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    environment = os.environ | ({"INITIAL_NO_AUTH_ACTION_COUNT": "0"} if closed else {})
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        url = f"http://127.0.0.1:{port}"
        _wait(url, process)
        client = boto3.session.Session().client(
            "s3",
            endpoint_url=url,
            region_name=S3_ENVIRONMENT["AWS_DEFAULT_REGION"],
            aws_access_key_id=S3_ENVIRONMENT["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=S3_ENVIRONMENT["AWS_SECRET_ACCESS_KEY"],
        )
        yield S3Server(url, client)
        client.close()
    finally:
        process.terminate()
        process.wait(STOP_S)


def _wait(url: str, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + START_S
    while True:
        try:
            httpx.get(f"{url}/moto-api/data.json", timeout=5).raise_for_status()
            return
        except httpx.TransportError:
            assert process.poll() is None, "the S3 server ended"
            assert time.monotonic() < end, "the S3 server did not start"
            time.sleep(0.1)
