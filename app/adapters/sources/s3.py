"""`s3://bucket/prefix`: the objects below a prefix on AWS, or on another server that speaks S3.

Credentials and region are those that boto3 finds: AWS's variables, its files, or the machine's role.
"""

from __future__ import annotations

import logging
import re
from contextlib import closing
from typing import Any

from app.adapters.base import AdapterRefused, AdapterUnreachable
from app.adapters.intake import FILES, PICKLES, WEIGHTS, Intake, missing
from app.adapters.limits import CHUNK, STALL_S

log = logging.getLogger(__name__)

CONNECT_S = 5.0
ATTEMPTS = 3

_SOURCE = re.compile(r"s3://(?P<bucket>[a-z0-9][a-z0-9.-]{1,61}[a-z0-9])/(?P<prefix>[^?#]+)", re.IGNORECASE)
_ABSENT = ("NoSuchKey", "404", "NotFound")


class S3Source:
    """Raises AdapterRefused for what is not written as a bucket and a prefix."""

    def __init__(self, source: str, endpoint_url: str | None) -> None:
        parts = _SOURCE.fullmatch(source)
        if parts is None or not parts["prefix"].strip("/"):
            raise AdapterRefused("an S3 source is written as s3://bucket/prefix")
        self._bucket, self._prefix = parts["bucket"], parts["prefix"].strip("/")
        self._endpoint_url = endpoint_url

    def take(self, intake: Intake) -> None:
        from botocore.exceptions import BotoCoreError, ClientError
        from urllib3.exceptions import HTTPError

        try:
            with closing(self._client()) as client:
                for name in FILES:
                    self._take(client, name, intake)
        except ClientError as error:
            raise self._refusal(str(error.response.get("Error", {}).get("Code", ""))) from None
        except (BotoCoreError, HTTPError, ValueError) as error:  # ValueError: an endpoint that is no URL
            log.warning("an adapter does not come from S3: %s", error)
            raise AdapterUnreachable(f"the S3 server does not give the adapter ({type(error).__name__})") from None

    def _take(self, client: Any, name: str, intake: Intake) -> None:
        from botocore.exceptions import ClientError

        intake.limits.check()
        try:
            found = client.get_object(Bucket=self._bucket, Key=f"{self._prefix}/{name}")
        except ClientError as error:
            if error.response.get("Error", {}).get("Code") in _ABSENT:
                raise self._missing(client, name) from None
            raise
        with closing(found["Body"]) as body:
            # Below what checks the length and the checksum.
            body._raw_stream = _Arrived(body._raw_stream)
            intake.write(name, body.iter_chunks(CHUNK))

    def _missing(self, client: Any, name: str) -> AdapterRefused:
        names = {*FILES} - {name}
        if name == WEIGHTS:
            names |= {one for one in PICKLES if self._has(client, one)}
        problem = missing(names, f"s3://{self._bucket}/{self._prefix}")
        assert problem is not None
        return problem

    def _has(self, client: Any, name: str) -> bool:
        from botocore.exceptions import ClientError

        try:
            client.head_object(Bucket=self._bucket, Key=f"{self._prefix}/{name}")
        except ClientError:
            return False
        return True

    def _client(self) -> Any:
        import boto3
        from botocore.config import Config

        retries = {"total_max_attempts": ATTEMPTS, "mode": "standard"}
        config = Config(connect_timeout=CONNECT_S, read_timeout=STALL_S, retries=retries)
        # Not the default session, which threads must not share while it makes clients.
        return boto3.session.Session().client("s3", endpoint_url=self._endpoint_url, config=config)

    def _refusal(self, code: str) -> AdapterRefused:
        if code == "NoSuchBucket":
            return AdapterUnreachable(f"there is no S3 bucket {self._bucket}")
        if code in ("AccessDenied", "403", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken"):
            return AdapterUnreachable(f"this server has no access to s3://{self._bucket}/{self._prefix} ({code})")
        return AdapterUnreachable(f"the S3 server refuses s3://{self._bucket}/{self._prefix} ({code})")


class _Arrived:
    """A urllib3 response that is read as its bytes come.

    Its own `read` waits until there are as many as it is asked for, and nobody looks at the limits meanwhile.
    """

    def __init__(self, response: Any) -> None:
        self._response = response

    def read(self, size: int) -> bytes:
        return self._response.read1(size) or b""

    def close(self) -> None:
        self._response.close()
