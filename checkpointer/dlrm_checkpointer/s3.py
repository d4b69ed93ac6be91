"""Object store over S3: the one module that knows boto3."""

from __future__ import annotations

import base64
import hashlib
import logging
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import boto3
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    IncompleteReadError,
    ReadTimeoutError,
    ResponseStreamingError,
)
from tenacity import (
    retry,
    retry_if_exception,
    retry_if_exception_type,
    stop_after_attempt,
    wait_random_exponential,
)

from dlrm_api.errors import InvalidSpecError, NoInputError, NoPermissionError
from dlrm_checkpointer.s3_errors import Place, status_of, translate
from dlrm_checkpointer.store import Body, ObjectInfo, StoreOptions

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client
    from mypy_boto3_s3.type_defs import CompletedPartTypeDef

logger = logging.getLogger(__name__)

PART_BYTES = 16 << 20
"""Objects above this go up in parts of at least this, in parallel."""
MAX_PARTS = 10_000
PARALLEL_PARTS = 4
CREDENTIALS_CHECK_S = 1.0
BROKEN_OFF = (ResponseStreamingError, IncompleteReadError, ReadTimeoutError)
JITTER = wait_random_exponential(0.1, max=2)
KEY_FILES = {"accessKeyId": "aws_access_key_id", "secretAccessKey": "aws_secret_access_key"}
TOKEN_FILE = ("sessionToken", "aws_session_token")
CONFIG = Config(
    retries={"mode": "standard", "total_max_attempts": 4},
    connect_timeout=5,
    read_timeout=60,
    max_pool_connections=32,
    request_checksum_calculation="when_required",  # we send SHA-256 ourselves; not every store takes trailers
    response_checksum_validation="when_required",
)


class S3Store:
    """Keys below ``s3://bucket/prefix`` of any S3 service with strongly consistent reads and listings.

    Args:
        bucket: it must exist.
        prefix: without slashes at its ends; may be empty.
        options: where the service is and who we are.
    """

    def __init__(self, bucket: str, prefix: str, options: StoreOptions) -> None:
        self._place = Place(bucket=bucket, endpoint=options.s3.endpoint or "AWS", fields=options.fields)
        self._prefix = f"{prefix}/" if prefix else ""
        self._options = options
        self._lock = threading.Lock()
        self._client: S3Client | None = None
        self._stamp: tuple[int, ...] = ()
        self._checked = 0.0

    @property
    def uri(self) -> str:
        """Where the keys live, without a trailing slash."""
        return f"s3://{self._place.bucket}/{self._prefix}".rstrip("/")

    @property
    def _bucket(self) -> str:
        return self._place.bucket

    @property
    def _s3(self) -> S3Client:
        """The client; made anew when the mounted credentials change, so that they rotate without a restart."""
        with self._lock:
            folder = self._options.credentials_dir
            if self._client is None or (folder and time.monotonic() - self._checked > CREDENTIALS_CHECK_S):
                stamp = _stamp(folder) if folder else ()
                if self._client is None or stamp != self._stamp:
                    self._client, self._stamp = _connect(self._options, self._place), stamp
                self._checked = time.monotonic()
            return self._client

    def get(self, key: str) -> bytes:
        """The object's bytes."""
        return self._read(key, None)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Bytes [start, start + length), fewer at the object's end."""
        return self._read(key, f"bytes={start}-{start + length - 1}") if length else b""

    def get_range_of(self, key: str, etag: str, start: int, length: int) -> bytes | None:
        """Bytes [start, start + length) of the very object that a listing showed; None where another one is there.

        Raises:
            NoInputError: there is none.
        """
        wanted = {"Range": f"bytes={start}-{start + length - 1}", "IfMatch": etag}
        try:
            return self._read_body(Bucket=self._bucket, Key=self._prefix + key, **wanted)
        except (ClientError, BotoCoreError) as error:
            if status_of(error) in (412, 416):
                return None
            raise translate(error, self._place, key) from error

    def _read(self, key: str, byte_range: str | None) -> bytes:
        wanted = {"Range": byte_range} if byte_range else {}
        try:
            return self._read_body(Bucket=self._bucket, Key=self._prefix + key, **wanted)
        except (ClientError, BotoCoreError) as error:
            if status_of(error) == 416:  # the range starts at or after the end
                return b""
            raise translate(error, self._place, key) from error

    @retry(retry=retry_if_exception_type(BROKEN_OFF), stop=stop_after_attempt(4), wait=JITTER, reraise=True)
    def _read_body(self, **wanted: Any) -> bytes:
        """Read with repeats: botocore repeats requests, not bodies that break off."""
        return self._s3.get_object(**wanted)["Body"].read()

    def put(self, key: str, body: Body) -> None:
        """Write the object whole: at once, or in parallel parts that are given back if one fails."""
        try:
            if len(body) > PART_BYTES:
                self._put_parts(self._prefix + key, memoryview(body))
            else:
                self._s3.put_object(
                    Bucket=self._bucket, Key=self._prefix + key, Body=bytes(body), ChecksumSHA256=_checksum(body)
                )
        except (ClientError, BotoCoreError) as error:
            raise translate(error, self._place, key) from error

    def _put_parts(self, key: str, body: memoryview) -> None:
        size = max(PART_BYTES, -(-len(body) // MAX_PARTS))
        parts = [body[start : start + size] for start in range(0, len(body), size)]
        s3 = self._s3
        upload = s3.create_multipart_upload(Bucket=self._bucket, Key=key, ChecksumAlgorithm="SHA256")["UploadId"]

        def put_part(number: int) -> CompletedPartTypeDef:
            part = bytes(parts[number - 1])
            checksum = _checksum(part)
            answer = s3.upload_part(
                Bucket=self._bucket, Key=key, UploadId=upload, PartNumber=number, Body=part, ChecksumSHA256=checksum
            )
            done: CompletedPartTypeDef = {"ETag": answer["ETag"], "PartNumber": number}
            if "ChecksumSHA256" in answer:  # the service took it: have it checked over the whole
                done["ChecksumSHA256"] = checksum
            return done

        try:
            with ThreadPoolExecutor(PARALLEL_PARTS, "s3-part") as pool:
                done = list(pool.map(put_part, range(1, len(parts) + 1)))
            s3.complete_multipart_upload(Bucket=self._bucket, Key=key, UploadId=upload, MultipartUpload={"Parts": done})
        except BaseException:
            self._abort(key, upload)
            raise

    def _abort(self, key: str, upload: str) -> None:
        try:
            self._s3.abort_multipart_upload(Bucket=self._bucket, Key=key, UploadId=upload)
        except (ClientError, BotoCoreError, NoPermissionError, NoInputError) as error:
            logger.warning("open multipart upload left for the sweep", extra={"key": key, "error": str(error)})

    def put_if_absent(self, key: str, body: Body) -> bool:
        """Write the object unless one is there (``If-None-Match: *``)."""
        try:
            self._put_new(self._prefix + key, body)
        except (ClientError, BotoCoreError) as error:
            if status_of(error) == 412:
                return False
            raise translate(error, self._place, key) from error
        return True

    @retry(
        retry=retry_if_exception(lambda error: isinstance(error, Exception) and status_of(error) == 409),
        stop=stop_after_attempt(5),
        wait=JITTER,
        reraise=True,
    )
    def _put_new(self, key: str, body: Body) -> None:
        """Write on condition, again where another conditional write of the key was under way."""
        self._s3.put_object(
            Bucket=self._bucket, Key=key, Body=bytes(body), IfNoneMatch="*", ChecksumSHA256=_checksum(body)
        )

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Objects whose key starts with ``prefix``, in ascending order of their keys."""
        pages = self._s3.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=self._prefix + prefix)
        try:
            for page in pages:
                for item in page.get("Contents", ()):
                    key = item["Key"].removeprefix(self._prefix)
                    yield ObjectInfo(
                        key=key,
                        size=item["Size"],
                        modified=item["LastModified"].timestamp(),
                        etag=item["ETag"],
                    )
        except (ClientError, BotoCoreError) as error:
            raise translate(error, self._place, prefix) from error

    def delete(self, key: str) -> None:
        """Remove the object; removing what is not there is success."""
        try:
            self._s3.delete_object(Bucket=self._bucket, Key=self._prefix + key)
        except (ClientError, BotoCoreError) as error:
            known = translate(error, self._place, key)
            if not isinstance(known, NoInputError):
                raise known from error

    def size(self, key: str) -> int | None:
        """The object's bytes, None where there is none."""
        try:
            return self._s3.head_object(Bucket=self._bucket, Key=self._prefix + key)["ContentLength"]
        except (ClientError, BotoCoreError) as error:
            known = translate(error, self._place, key)
            if isinstance(known, NoInputError):
                return None
            raise known from error

    def sweep_uploads(self, older_than_s: float) -> int:
        """Abort multipart uploads below our prefix that were begun longer ago than this."""
        removed = 0
        try:
            pages = self._s3.get_paginator("list_multipart_uploads").paginate(Bucket=self._bucket, Prefix=self._prefix)
            for page in pages:
                for upload in page.get("Uploads", ()):
                    if time.time() - upload["Initiated"].timestamp() > older_than_s:
                        self._abort(upload["Key"], upload["UploadId"])
                        removed += 1
        except (ClientError, BotoCoreError) as error:
            if status_of(error) not in {404, 405, 501}:  # a service without such a list has nothing to sweep
                raise translate(error, self._place, self._prefix) from error
        return removed


def _checksum(body: Body) -> str:
    return base64.b64encode(hashlib.sha256(body).digest()).decode()


def _stamp(folder: Path) -> tuple[int, ...]:
    names = (*KEY_FILES, TOKEN_FILE[0])
    return tuple((folder / name).stat().st_mtime_ns if (folder / name).exists() else 0 for name in names)


def _connect(options: StoreOptions, place: Place) -> S3Client:
    """Make a client.

    Raises:
        NoPermissionError: a credentials file is missing or unreadable.
        NoInputError: the authority's file is missing.
        InvalidSpecError: the endpoint is no URL.
    """
    s3 = options.s3
    if s3.ca_file and not Path(s3.ca_file).is_file():
        raise NoInputError(f"{place.fields.service}.caFile: {s3.ca_file}: there is no such file")
    keys: dict[str, Any] = _credentials(options.credentials_dir, place) if options.credentials_dir else {}
    session = boto3.session.Session(**keys)
    try:
        return session.client(
            "s3",
            endpoint_url=s3.endpoint,
            region_name=s3.region or session.region_name or "us-east-1",
            verify=s3.ca_file,
            config=CONFIG.merge(Config(s3={"addressing_style": "path"})) if s3.endpoint else CONFIG,
        )
    except ValueError as error:
        raise InvalidSpecError(f"{place.fields.service}.endpoint", str(error)) from error


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
