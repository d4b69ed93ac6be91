"""Clients of an S3 service, made anew when credentials rotate: the one module that knows boto3."""

from __future__ import annotations

import contextlib
import os
import ssl
import threading
import time
from datetime import datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import boto3
import botocore
import botocore.session
from botocore.auth import AUTH_TYPE_MAPS, S3SigV4Auth
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError
from botocore.utils import parse_timestamp
from urllib3.exceptions import HTTPError  # type: ignore[import-untyped]

from dlrm_api.errors import InvalidSpecError, NoInputError, NoPermissionError
from dlrm_stores.base import StoreOptions
from dlrm_stores.s3_errors import Place, translate
from dlrm_stores.s3_payload import Payload

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

ERRORS = (ClientError, BotoCoreError, HTTPError)
"""All that a call of a client raises, and what reading the body of an answer does."""
CREDENTIALS_CHECK_S = 1.0
CONNECT_TIMEOUT_S = 5
READ_TIMEOUT_S = 20
"""For the next bytes of an answer, so that two more tries begin within ``repeats.LONGEST_RUN_S`` after one of these.

Where S3 takes minutes to answer, to complete an upload in parts, it sends white space all the while.
"""
METADATA_TIMEOUT = ("metadata_service_timeout", "AWS_METADATA_SERVICE_TIMEOUT", 2, int)
"""How long a machine's metadata service is waited for, in seconds: as long as botocore waits for a pod's, and twice
its own choice. Where a variable or the user's configuration says otherwise, that holds."""
SIGNATURE = "s3v4-known-sha256"
CONNECTIONS = 64
KEY_FILES = {"accessKeyId": "aws_access_key_id", "secretAccessKey": "aws_secret_access_key"}
TOKEN_FILE = ("sessionToken", "aws_session_token")
CONFIG = Config(
    retries={"mode": "standard", "total_max_attempts": 1},  # repeats are ours: see repeats.py
    connect_timeout=CONNECT_TIMEOUT_S,
    read_timeout=READ_TIMEOUT_S,
    max_pool_connections=CONNECTIONS,
    request_checksum_calculation="when_required",  # we send SHA-256 ourselves; not every store takes trailers
    response_checksum_validation="when_required",
    user_agent=f"dlrm-operator botocore/{botocore.__version__}",  # botocore's own is made anew for each call
)


class Clients:
    """The client of one store, for any thread."""

    def __init__(self, options: StoreOptions, place: Place) -> None:
        self._options, self._place = options, place
        self._lock = threading.Lock()
        self._client: S3Client | None = None
        self._stamp: tuple[int, ...] = ()
        self._checked = 0.0

    def current(self) -> S3Client:
        """The client; another one when the mounted credentials change, so that they rotate without a restart.

        Where no credentials are found, none is made, and the next call looks for them again.

        Raises:
            BotoCoreError: there are no credentials, or none yet.
            NoPermissionError: a credentials file is missing or unreadable, or there are no credentials and never will.
            NoInputError: the authority's file is missing.
            InvalidSpecError: the endpoint is no URL, or that file holds no certificate.
        """
        with self._lock:
            folder = self._options.credentials_dir
            if self._client is None or (folder and time.monotonic() - self._checked > CREDENTIALS_CHECK_S):
                stamp = _stamp(folder) if folder else ()
                if self._client is None or stamp != self._stamp:
                    self._client, self._stamp = _connect(self._options, self._place), stamp
                self._checked = time.monotonic()
            return self._client

    def newer_than(self, client: S3Client) -> S3Client | None:
        """The client after one whose credentials were refused; None where they have not changed."""
        with self._lock:
            if self._client is client:
                self._checked = float("-inf")
        newer = self.current()
        return None if newer is client else newer


def _stamp(folder: Path) -> tuple[int, ...]:
    names = (*KEY_FILES, TOKEN_FILE[0])
    return tuple((folder / name).stat().st_mtime_ns if (folder / name).exists() else 0 for name in names)


def _connect(options: StoreOptions, place: Place) -> S3Client:
    s3 = options.s3
    if s3.ca_file:
        _check_authority(s3.ca_file, f"{place.fields.service}.caFile")
    keys: dict[str, Any] = _credentials(options.credentials_dir, place) if options.credentials_dir else {}
    core = botocore.session.get_session({METADATA_TIMEOUT[0]: METADATA_TIMEOUT})
    core.get_component("response_parser_factory").set_parser_defaults(timestamp_parser=_time_of)
    session = boto3.session.Session(**keys, botocore_session=core)
    _check_credentials(session, place)
    try:
        client = session.client(
            "s3",
            endpoint_url=s3.endpoint,
            region_name=s3.region or session.region_name or "us-east-1",
            verify=s3.ca_file,
            config=CONFIG.merge(Config(s3={"addressing_style": "path"})) if s3.endpoint else CONFIG,
        )
    except ValueError as error:
        raise InvalidSpecError(f"{place.fields.service}.endpoint", str(error)) from error
    _trust_known_hashes(client)
    return client


def _check_credentials(session: boto3.session.Session, place: Place) -> None:
    """Refuse to make a client that has no credentials: it would never look for them again.

    Raises:
        NoCredentialsError: none are there; a metadata service may hand them out yet. The call's repeats bound the
            wait: a machine without such a service looks the same, and its user wants to be told.
        NoPermissionError: none are there, and no such service is to be asked.
        InvalidSpecError: what the environment says of them can't be used.
    """
    try:
        found = session.get_credentials()
    except ValueError as error:
        raise translate(error, place, "") from error
    if found is None:
        missing = NoCredentialsError()
        asks_no_service = os.environ.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true"
        raise translate(missing, place, "") if asks_no_service else missing


def _check_authority(ca_file: str, field: str) -> None:
    """Refuse what holds no certificate: a call would say that its connection broke off."""
    if not Path(ca_file).is_file():
        raise NoInputError(f"{field}: {ca_file}: there is no such file")
    try:
        ssl.create_default_context(cafile=ca_file)
    except OSError as error:
        raise InvalidSpecError(field, f"{ca_file} can't be read as certificates in PEM form: {error}") from error


def _time_of(text: Any) -> datetime:
    """A time as S3 writes them in listings and headers; botocore's own way takes a third of a listing's time."""
    for read in (datetime.fromisoformat, parsedate_to_datetime):
        with contextlib.suppress(TypeError, ValueError):
            if (time_of := read(text)).tzinfo:
                return time_of
    found: datetime = parse_timestamp(text)
    return found


def _credentials(folder: Path, place: Place) -> dict[str, str]:
    try:
        keys = {argument: (folder / name).read_text().strip() for name, argument in KEY_FILES.items()}
        if (folder / TOKEN_FILE[0]).exists():
            keys[TOKEN_FILE[1]] = (folder / TOKEN_FILE[0]).read_text().strip()
    except OSError as error:
        raise NoPermissionError(
            f"{error.filename}: cannot be read: {error.strerror}; the credentials Secret for bucket {place.bucket} "
            f"needs the keys {' and '.join(KEY_FILES)}"
        ) from error
    return keys


class _KnownSha256(S3SigV4Auth):
    """botocore's signature, which covers the body's SHA-256; that of a ``Payload`` is not computed once more."""

    def payload(self, request: Any) -> Any:
        body = request.body
        return body.sha256 if isinstance(body, Payload) else super().payload(request)


def _trust_known_hashes(client: Any) -> None:
    """Have a client sign each ``Payload`` with the SHA-256 that it says."""
    AUTH_TYPE_MAPS[SIGNATURE] = _KnownSha256
    for operation in ("PutObject", "UploadPart"):
        client.meta.events.register_first(f"choose-signer.s3.{operation}", _choose)


def _choose(signature_version: Any, signing_name: Any, **_rest: Any) -> str | None:
    return SIGNATURE if signature_version in ("v4", "s3v4") and signing_name == "s3" else None
