"""Make boto3 clients of an S3 service, watch their calls and rotate their credentials."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import ssl
import threading
import time
from collections.abc import Callable
from datetime import datetime
from email.utils import parsedate_to_datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import boto3
import botocore
import botocore.session
from boto3.s3.transfer import TransferConfig
from botocore.auth import AUTH_TYPE_MAPS, S3SigV4Auth
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError
from botocore.utils import parse_timestamp
from urllib3.exceptions import HTTPError  # type: ignore[import-untyped]

from dlrm_api.errors import InvalidSpecError, NoInputError, NoPermissionError
from dlrm_api.fields import S3Spec
from dlrm_stores.base import Body, RetryReason, StoreOptions
from dlrm_stores.s3_errors import NOT_S3, S3Location, is_bad_certificate, retry_reason, translate

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

ERRORS = (ClientError, BotoCoreError, HTTPError)
"""Raised by calls of a client, and by reads of a response's body."""
MAX_ATTEMPTS = 6
RETRY_DEADLINE_S = 60.0
"""No retry starts later, so that a service that hangs blocks a caller for this and one timeout."""
CREDENTIALS_CHECK_S = 1.0
CONNECT_TIMEOUT_S = 5
READ_TIMEOUT_S = 20
"""For the next bytes of a response. S3 sends white space while it takes minutes to complete a multipart upload."""
METADATA_TIMEOUT = ("metadata_service_timeout", "AWS_METADATA_SERVICE_TIMEOUT", 2, int)
"""Timeout of a machine's metadata service in seconds: twice botocore's default, and the one it uses for pods."""
SIGNATURE = "s3v4-known-sha256"
CONNECTIONS = 64
SEND_BYTES = 1 << 18
"""Bytes given to the connection at a time: the 8 KiB that it asks for cost more than the sending."""
KEY_FILES = {"accessKeyId": "aws_access_key_id", "secretAccessKey": "aws_secret_access_key"}
TOKEN_FILE = ("sessionToken", "aws_session_token")
AWS_FILES = {"AWS_SHARED_CREDENTIALS_FILE": "~/.aws/credentials", "AWS_CONFIG_FILE": "~/.aws/config"}
"""Files in which tools renew keys, by the variable that names them."""
# Checksums "when_required": we send SHA-256 ourselves, and not every store takes trailers. The user agent is fixed
# because botocore's own is built again for each call.
CONFIG = Config(
    retries={"mode": "standard", "total_max_attempts": MAX_ATTEMPTS},
    connect_timeout=CONNECT_TIMEOUT_S,
    read_timeout=READ_TIMEOUT_S,
    max_pool_connections=CONNECTIONS,
    request_checksum_calculation="when_required",
    response_checksum_validation="when_required",
    user_agent=f"dlrm-operator botocore/{botocore.__version__}",
)
MULTIPART = TransferConfig(multipart_threshold=64 << 20, multipart_chunksize=16 << 20, max_concurrency=8)
EXPECTED_FIELDS = {
    "PutObject": "ETag", "CreateMultipartUpload": "UploadId", "UploadPart": "ETag", "CompleteMultipartUpload": "ETag",
    "ListObjectsV2": "IsTruncated",
}  # fmt: skip
"""Fields that S3 always sends. A proxy's page with status 200 lacks them: a listing would look empty, a write done."""
_STARTED, _REASON = "dlrm_started", "dlrm_retry_reason"


class Payload:
    """Read a body from memory without copies, with its known SHA-256 in hexadecimal for the signature.

    ``read(size)`` returns a view of at least SEND_BYTES if that many are left.
    """

    def __init__(self, body: Body, sha256: str = "") -> None:
        self._view, self._at = memoryview(body).cast("B"), 0
        self.sha256 = sha256

    def __len__(self) -> int:
        return len(self._view)

    def read(self, size: int | None = -1) -> bytes | memoryview:
        """Return the next bytes: a view, or a copy of all that is left if no size is given."""
        every = size is None or size < 0
        end = len(self._view) if size is None or size < 0 else self._at + max(size, SEND_BYTES)
        piece = self._view[self._at : end]
        self._at += len(piece)
        return bytes(piece) if every else piece

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Set the position, as files do."""
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: len(self._view)}[whence]
        return self._at

    def tell(self) -> int:
        """Return the position."""
        return self._at


class Clients:
    """Hold the client of one store for all threads; make another when its credentials change."""

    def __init__(self, options: StoreOptions, location: S3Location) -> None:
        self._options, self._location = options, location
        self._lock = threading.Lock()
        self._client: S3Client | None = None
        self._stamp: tuple[int, ...] = ()
        self._checked = 0.0

    def current(self) -> S3Client:
        """Return the client; a new one if the files with the credentials changed.

        Raises:
            BotoCoreError: there are no credentials yet; the next call looks for them again.
            NoPermissionError: a credentials file cannot be read, or there are no credentials and none will come.
            NoInputError: the CA file does not exist.
            InvalidSpecError: the endpoint is not a URL, or the CA file holds no certificate.
        """
        with self._lock:
            if self._client is None or time.monotonic() - self._checked > CREDENTIALS_CHECK_S:
                stamp = _stamp(self._options.credentials_dir)
                if self._client is None or stamp != self._stamp:
                    self._client, self._stamp = _connect(self._options, self._location), stamp
                self._checked = time.monotonic()
            return self._client

    def newer_than(self, client: S3Client) -> S3Client | None:
        """Return a client with newer credentials than a refused one's, or None if they did not change."""
        with self._lock:
            if self._client is client:
                self._checked = float("-inf")
        newer = self.current()
        return None if newer is client else newer


def _stamp(folder: Path | None) -> tuple[int, ...]:
    """Return what changes with the files of the credentials: those mounted, or those that boto3 reads."""
    if folder is not None:
        files = [folder / name for name in (*KEY_FILES, TOKEN_FILE[0])]
    else:
        files = [Path(os.environ.get(name) or default).expanduser() for name, default in AWS_FILES.items()]
    return tuple(_written(file) for file in files)


def _written(file: Path) -> int:
    try:
        return file.stat().st_mtime_ns
    except OSError:
        return 0


def _connect(options: StoreOptions, location: S3Location) -> S3Client:
    s3 = options.s3
    if s3.ca_file:
        _check_authority(s3.ca_file, f"{location.fields.service}.caFile")
    keys: dict[str, Any] = _credentials(options.credentials_dir, location) if options.credentials_dir else {}
    core = botocore.session.get_session({METADATA_TIMEOUT[0]: METADATA_TIMEOUT})
    core.get_component("response_parser_factory").set_parser_defaults(timestamp_parser=_time_of)
    session = boto3.session.Session(**keys, botocore_session=core)
    _check_credentials(session, location)
    try:
        client = session.client(
            "s3",
            endpoint_url=s3.endpoint,
            region_name=s3.region or session.region_name or "us-east-1",
            verify=s3.ca_file,
            config=CONFIG.merge(Config(s3={"addressing_style": _addressing(s3)})),
        )
    except ValueError as error:
        raise InvalidSpecError(f"{location.fields.service}.endpoint", str(error)) from error
    _watch(client, options.on_retry)
    if s3.requester_pays:
        client.meta.events.register("before-call.s3", _pay)
    return client


def _addressing(s3: S3Spec) -> Literal["auto", "path", "virtual"]:
    if s3.addressing_style == "auto":
        return "path" if s3.endpoint else "auto"
    return s3.addressing_style


def _pay(params: dict[str, Any], **_rest: Any) -> None:
    params["headers"]["x-amz-request-payer"] = "requester"


def _check_credentials(session: boto3.session.Session, location: S3Location) -> None:
    """Refuse to make a client without credentials: it would never look for them again.

    Raises:
        NoCredentialsError: there are none; a metadata service may still provide them. The caller's retries bound the
            wait, because a machine without such a service looks the same.
        NoPermissionError: there are none, and no such service may be asked.
        InvalidSpecError: the environment's settings for them are invalid.
    """
    try:
        found = session.get_credentials()
    except ValueError as error:
        raise translate(error, location, "") from error
    if found is None:
        missing = NoCredentialsError()
        asks_no_service = os.environ.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true"
        raise translate(missing, location, "") if asks_no_service else missing


def _check_authority(ca_file: str, field: str) -> None:
    """Refuse a file without certificates: a call would report a broken connection instead."""
    if not Path(ca_file).is_file():
        raise NoInputError(f"file not found: {ca_file}; correct {field}")
    try:
        ssl.create_default_context(cafile=ca_file)
    except OSError as error:
        raise InvalidSpecError(field, f"expected PEM certificates in {ca_file}: {error}") from error


def _time_of(text: Any) -> datetime:
    # botocore's own parser takes a third of the time of a listing.
    for read in (datetime.fromisoformat, parsedate_to_datetime):
        with contextlib.suppress(TypeError, ValueError):
            if (time_of := read(text)).tzinfo:
                return time_of
    found: datetime = parse_timestamp(text)
    return found


def _credentials(folder: Path, location: S3Location) -> dict[str, str]:
    try:
        keys = {argument: (folder / name).read_text().strip() for name, argument in KEY_FILES.items()}
        if (folder / TOKEN_FILE[0]).exists():
            keys[TOKEN_FILE[1]] = (folder / TOKEN_FILE[0]).read_text().strip()
    except OSError as error:
        raise NoPermissionError(
            f"cannot read {error.filename}: {error.strerror}; the credentials Secret for bucket {location.bucket} "
            f"needs the keys {' and '.join(KEY_FILES)}"
        ) from error
    return keys


class _KnownSha256(S3SigV4Auth):
    """Sign a ``Payload`` with its known SHA-256 instead of hashing it again."""

    def payload(self, request: Any) -> Any:
        return getattr(request.body, "sha256", "") or super().payload(request)


def _watch(client: Any, on_retry: Callable[[RetryReason], object]) -> None:
    """Register the handlers that sign known hashes, check responses and count retries."""
    AUTH_TYPE_MAPS[SIGNATURE] = _KnownSha256
    events = client.meta.events
    for operation in ("PutObject", "UploadPart"):
        events.register_first(f"choose-signer.s3.{operation}", _choose_signer)
    events.register("before-parameter-build.s3.UploadPart", _add_checksum)
    events.register("before-call.s3", _note_start)
    events.register_first("needs-retry.s3", _judge)
    events.register("request-created.s3", partial(_count_retry, on_retry))


def _choose_signer(signature_version: Any, signing_name: Any, **_rest: Any) -> str | None:
    return SIGNATURE if signature_version in ("v4", "s3v4") and signing_name == "s3" else None


def _add_checksum(params: dict[str, Any], **_rest: Any) -> None:
    """Send a part's SHA-256 as a header, where botocore would send it as a trailer."""
    if params.get("ChecksumAlgorithm") == "SHA256":
        body = params["Body"]
        params["ChecksumSHA256"] = base64.b64encode(hashlib.sha256(body.read()).digest()).decode()
        body.seek(0)


def _note_start(params: dict[str, Any], **_rest: Any) -> None:
    params["context"][_STARTED] = time.monotonic()


def _judge(
    response: Any, caught_exception: Exception | None, operation: Any, request_dict: dict[str, Any], **_rest: Any
) -> None:
    """Make botocore retry what its standard mode does not know, and give up where a retry cannot help.

    As botocore's own handlers do, it sets the status that the retry condition reads.
    """
    context = request_dict["context"]
    if caught_exception is not None:
        if time.monotonic() - context[_STARTED] > RETRY_DEADLINE_S or is_bad_certificate(caught_exception):
            raise caught_exception
        context[_REASON] = "broken"
        return
    http, parsed = response
    status = parsed.get("ResponseMetadata", {}).get("HTTPStatusCode", http.status_code)
    field = EXPECTED_FIELDS.get(operation.name)
    if field and status < 300 and field not in parsed:
        parsed["Error"] = {"Code": NOT_S3, "Message": f"{operation.name} without {field}"}
    context[_REASON] = retry_reason(parsed.get("Error", {}).get("Code", ""), status)
    if context[_REASON]:
        http.status_code = parsed["ResponseMetadata"]["HTTPStatusCode"] = status if status >= 500 else 503


def _count_retry(on_retry: Callable[[RetryReason], object], request: Any, **_rest: Any) -> None:
    reason = request.context.get(_REASON)
    if reason and request.context.get("retries", {}).get("attempt", 1) > 1:
        on_retry(reason)
