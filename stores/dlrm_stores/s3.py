"""Store objects in S3: whole, in parallel ranges, and in parallel parts above 64 MiB."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import logging
import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from tenacity import RetryCallState, Retrying, retry_if_exception, stop_after_attempt, stop_after_delay

from dlrm_api.errors import DLRMError, InvalidSpecError, NoInputError, StoreUnavailableError
from dlrm_api.fields import S3Spec, SnapshotS3Spec
from dlrm_stores import s3_errors
from dlrm_stores.base import PARALLEL_DELETES, Body, ObjectInfo, StoreOptions, parallel_map
from dlrm_stores.s3_client import ERRORS, MAX_ATTEMPTS, MULTIPART, RETRY_DEADLINE_S, Clients, Payload

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client
    from mypy_boto3_s3.type_defs import ObjectIdentifierTypeDef

logger = logging.getLogger(__name__)

RANGE_BYTES = 16 << 20
PARALLEL_RANGES = 16
PIECE_BYTES = 1 << 20
"""Bytes read at a time within a range, few enough to stay in the processor's cache."""
MAX_BATCH_KEYS = 1_000
"""Largest number of keys that S3 deletes in one request."""
INITIAL_BACKOFF_S, MAX_BACKOFF_S = 0.2, 5.0
R = TypeVar("R")


class _BrokenBodyError(StoreUnavailableError):
    """Report a response with an incomplete body. botocore retries only up to the headers."""


class _Version(NamedTuple):
    size: int
    etag: str


class S3Store:
    """Hold keys below ``s3://bucket/prefix`` of an S3 service with strongly consistent reads and listings.

    Calls are made from any thread. botocore retries them; this class retries bodies that break off, waits for
    credentials that come late, and switches to rotated credentials. The bucket exists; the prefix has no slashes at its
    ends, and may be empty.
    """

    def __init__(self, bucket: str, prefix: str, options: StoreOptions) -> None:
        self._bucket, self._prefix = bucket, f"{prefix}/" if prefix else ""
        endpoint = options.s3.endpoint or "AWS"
        self._location = s3_errors.S3Location(bucket=bucket, endpoint=endpoint, fields=options.fields)
        self._clients = Clients(options, self._location)
        self._on_retry = options.on_retry
        self._encryption = _encryption(options.s3)
        self._sends_checksums = not endpoint.startswith("http://")
        """Whether writes have checksum headers. The signature covers the body's SHA-256 anyway, and without TLS nothing
        else is needed; some services want the headers, some refuse them."""
        self._has_if_match = True
        """False once the service has refused a conditional read."""
        self._readers = ThreadPoolExecutor(PARALLEL_RANGES, "s3-range")
        self._has_conditions: bool | None = None
        """Whether the service accepts conditional writes; None before the first."""
        self._has_batches = True
        """False once the service has refused to delete many objects by one request."""

    @property
    def bucket(self) -> str:
        """Return the bucket's name."""
        return self._bucket

    @property
    def uri(self) -> str:
        """Return the URI of the keys' parent, without a trailing slash."""
        return f"s3://{self._bucket}/{self._prefix}".rstrip("/")

    def get(self, key: str) -> bytes:
        """Return the object's bytes by one request; ``get_into`` reads large objects faster."""
        with self._translated(key):
            return self._call(lambda s3: self._read_whole(s3, key))

    def get_into(self, key: str, buffer: memoryview) -> int:
        """Fill a buffer with the object's first bytes, in parallel ranges, and return the object's size."""
        view = buffer.cast("B")
        if not view:
            if (size := self.size(key)) is None:
                raise NoInputError(f"object not found: {self.uri}/{key}")
            return size
        starts = range(0, len(view), RANGE_BYTES)
        with self._translated(key):
            run = self._readers.map if len(starts) > 1 else map
            parts = run(lambda start: self._get_range(key, view[start : start + RANGE_BYTES], start), starts)
            versions = {version for version in parts if version is not None}
        if len(versions) > 1:
            raise StoreUnavailableError(f"{self.uri}/{key}: object was replaced while it was read")
        return versions.pop().size if versions else 0

    def _get_range(self, key: str, view: memoryview, start: int) -> _Version | None:
        """Fill ``view`` from byte ``start`` on; return None if the object ends before."""
        try:
            return self._call(lambda s3: self._read_range(s3, self._object(key), start, view))
        except ERRORS as error:
            if s3_errors.status_of(error) == 416:
                return None
            raise

    def get_range_of(self, key: str, etag: str, start: int, length: int) -> bytes | None:
        """Return bytes [start, start + length) of the object with this ETag, or None if it was replaced.

        Raises:
            NoInputError: the object does not exist.
        """
        buffer = bytearray(length)
        with self._translated(key):
            try:
                found = self._read_if_match(key, etag, start, memoryview(buffer))
            except ERRORS as error:
                if s3_errors.status_of(error) in (412, 416):
                    return None
                raise
        # Some services ignore the condition.
        return bytes(buffer[: max(0, found.size - start)]) if found.etag == etag else None

    def _read_if_match(self, key: str, etag: str, start: int, view: memoryview) -> _Version:
        """Read a range of the object with this ETag; of any version if the service has no conditional reads."""
        condition = {"IfMatch": etag} if self._has_if_match else {}
        wanted = self._object(key)
        try:
            return self._call(lambda s3: self._read_range(s3, {**wanted, **condition}, start, view))
        except ERRORS as error:
            if not condition or not s3_errors.is_unknown_request(error) or s3_errors.status_of(error) == 404:
                raise
            logger.info("store does not support conditional reads, comparing ETags", extra={"uri": self.uri})
            self._has_if_match = False
        return self._call(lambda s3: self._read_range(s3, wanted, start, view))

    def _read_range(self, s3: S3Client, wanted: dict[str, Any], start: int, view: memoryview) -> _Version:
        response = s3.get_object(**wanted, Range=f"bytes={start}-{start + len(view) - 1}")
        with contextlib.closing(response["Body"]) as body:
            # Each range says which version of the object it is of, so that ranges never mix two.
            size = str(response.get("ContentRange", "")).rpartition("/")[2]
            if not size.isdigit():
                service, endpoint = self._location.fields.service, self._location.endpoint
                raise InvalidSpecError(service, f"expected a service that supports range requests, got {endpoint}")
            done, end = 0, min(len(view), int(size) - start)
            while done < end:
                piece = self._read(body, min(PIECE_BYTES, end - done))
                if not piece:
                    raise _BrokenBodyError(f"{self._location.endpoint}: got {done} of {end} bytes of {wanted['Key']}")
                view[done : done + len(piece)] = piece
                done += len(piece)
        return _Version(int(size), response.get("ETag", ""))

    def _read_whole(self, s3: S3Client, key: str) -> bytes:
        with contextlib.closing(s3.get_object(**self._object(key))["Body"]) as body:
            return self._read(body)

    def _read(self, body: Any, size: int | None = None) -> bytes:
        try:
            found: bytes = body.read(size)
        except ERRORS as error:
            where = f"bucket {self._location.bucket} at {self._location.endpoint}"
            raise _BrokenBodyError(f"{where}: response broke off: {error}") from error
        return found

    def put(self, key: str, body: Body, sha256: str | None = None) -> None:
        """Write the object: by one request, or by s3transfer in parallel parts, aborted if one fails."""
        view = memoryview(body).cast("B")
        with self._translated(key):
            if len(view) <= MULTIPART.multipart_threshold:
                self._put_whole(key, view, sha256)
            else:
                self._with_checksums_or_not(lambda: self._put_parts(key, view))

    def _put_parts(self, key: str, view: memoryview) -> None:
        extra = self._encryption | ({"ChecksumAlgorithm": "SHA256"} if self._sends_checksums else {})
        options = {**self._object(key), "ExtraArgs": extra, "Config": MULTIPART}
        self._call(lambda s3: s3.upload_fileobj(_payload(view), **options))

    def _put_whole(self, key: str, body: Body, sha256: str | None = None, **condition: Any) -> None:
        digest = sha256 or hashlib.sha256(body).hexdigest()
        checksum = base64.b64encode(bytes.fromhex(digest)).decode()

        def put() -> None:
            arguments = {**self._object(key), **self._encryption, **condition}
            arguments |= {"ChecksumSHA256": checksum} if self._sends_checksums else {}
            self._call(lambda s3: s3.put_object(Body=_payload(body, digest), **arguments))

        self._with_checksums_or_not(put, conditional=bool(condition))

    def _with_checksums_or_not(self, write: Callable[[], None], *, conditional: bool = False) -> None:
        """Write; once more in the other way if the service refuses checksum headers, or the lack of them."""
        sent = self._sends_checksums
        try:
            write()
        except ERRORS as error:
            if not s3_errors.is_about_checksums(error, conditional=conditional):
                raise
            # Another thread may have found out meanwhile.
            if self._sends_checksums == sent:
                self._sends_checksums = not sent
                does = "refuses" if sent else "demands"
                logger.info("store %s checksum headers", does, extra={"uri": self.uri, "error": str(error)})
            try:
                write()
            except ERRORS:
                # It refused something else.
                self._sends_checksums = sent
                raise

    def put_if_absent(self, key: str, body: Body) -> bool:
        """Write the object unless it exists (``If-None-Match: *``), or the service has no conditional writes."""
        with self._translated(key):
            written = self._put_on_condition(key, body)
            if written is None:
                sent = self._sends_checksums
                self._put_whole(key, body)
                # The refusal may have been of checksum headers that went along.
                self._has_conditions = False if self._sends_checksums == sent else None
        return written is not False

    def _put_on_condition(self, key: str, body: Body) -> bool | None:
        """Return whether the object was written; None: the service has no conditional writes.

        A refusal after the service once accepted a condition has other reasons.
        """
        if self._has_conditions is False:
            return None
        try:
            self._put_whole(key, body, IfNoneMatch="*")
        except ERRORS as error:
            if s3_errors.status_of(error) != 412:
                if self._has_conditions is None and s3_errors.is_unknown_request(error):
                    logger.info("store does not support conditional writes", extra={"uri": self.uri})
                    return None
                raise
            self._has_conditions = True
            return False
        self._has_conditions = True
        return True

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Yield the objects with a key that starts with ``prefix``, in ascending order of keys."""
        wanted: dict[str, Any] = {"Bucket": self._bucket, "Prefix": self._prefix + prefix}
        more = True
        while more:
            with self._translated(prefix):
                page = self._call(lambda s3: s3.list_objects_v2(**wanted))
            for item in page.get("Contents", ()):
                yield ObjectInfo(
                    key=item["Key"].removeprefix(self._prefix),
                    size=item["Size"],
                    modified=item["LastModified"].timestamp(),
                    etag=item["ETag"],
                )
            more = page.get("IsTruncated", False)
            wanted["ContinuationToken"] = page.get("NextContinuationToken")

    def delete(self, key: str) -> None:
        """Remove the object if it exists."""
        with contextlib.suppress(NoInputError), self._translated(key):
            self._call(lambda s3: s3.delete_object(**self._object(key)))

    def delete_all(self, keys: Sequence[str]) -> None:
        """Remove objects, up to 1,000 by one request.

        Those that the service does not report as deleted are deleted one by one, so that an error is that of one
        object, and a service without batches works too.
        """
        batches = (keys[start : start + MAX_BATCH_KEYS] for start in range(0, len(keys), MAX_BATCH_KEYS))
        left = [key for batch in batches for key in self._delete_batch(batch)]
        list(parallel_map(self.delete, left, PARALLEL_DELETES))

    def _delete_batch(self, keys: Sequence[str]) -> Sequence[str]:
        """Return the keys that the service does not report as deleted."""
        if not self._has_batches:
            return keys
        names = [self._prefix + key for key in keys]
        objects: list[ObjectIdentifierTypeDef] = [{"Key": name} for name in names]
        with self._translated(f"the deletion of {len(keys)} objects"):
            try:
                response = self._call(lambda s3: s3.delete_objects(Bucket=self._bucket, Delete={"Objects": objects}))
            except ERRORS as error:
                if not s3_errors.is_unknown_request(error):
                    raise
                self._has_batches = False
                logger.info("store does not support batch delete", extra={"uri": self.uri, "error": str(error)})
                return keys
        gone = {each["Key"] for each in response.get("Deleted", ())}
        return [key for key, name in zip(keys, names, strict=True) if name not in gone]

    def size(self, key: str) -> int | None:
        """Return the object's bytes or None, by a listing: a refused HEAD would not say why."""
        wanted: dict[str, Any] = {"Bucket": self._bucket, "Prefix": self._prefix + key, "MaxKeys": 1}
        with self._translated(key):
            page = self._call(lambda s3: s3.list_objects_v2(**wanted))
        return next((item["Size"] for item in page.get("Contents", ()) if item["Key"] == wanted["Prefix"]), None)

    def sweep_uploads(self, older_than_s: float) -> int:
        """Abort multipart uploads below our prefix that were started longer ago than this."""
        removed = 0
        for upload in self._uploads():
            if time.time() - upload["Initiated"].timestamp() > older_than_s:
                self._abort(upload["Key"], upload["UploadId"])
                removed += 1
        return removed

    def _abort(self, name: str, upload: str) -> None:
        try:
            self._call(lambda s3: s3.abort_multipart_upload(Bucket=self._bucket, Key=name, UploadId=upload))
        except (*ERRORS, DLRMError) as error:
            logger.warning("failed to abort multipart upload", extra={"uri": f"s3://{name}", "error": str(error)})

    def _uploads(self) -> Iterator[Any]:
        wanted: dict[str, Any] = {"Bucket": self._bucket, "Prefix": self._prefix}
        more = True
        while more:
            with self._translated(self._prefix):
                try:
                    page = self._call(lambda s3: s3.list_multipart_uploads(**wanted))
                except ERRORS as error:
                    if s3_errors.status_of(error) == 403:
                        logger.warning(
                            "cannot list unfinished uploads, leaving them; grant s3:ListBucketMultipartUploads",
                            extra={"uri": self.uri, "error": str(error)},
                        )
                    # A service without this list has no uploads to sweep.
                    elif s3_errors.status_of(error) not in {404, 405, 501}:
                        raise
                    return
            yield from page.get("Uploads", ())
            more = page.get("IsTruncated", False)
            wanted.update(KeyMarker=page.get("NextKeyMarker"), UploadIdMarker=page.get("NextUploadIdMarker"))

    def _object(self, key: str) -> dict[str, Any]:
        return {"Bucket": self._bucket, "Key": self._prefix + key}

    def _call(self, operation: Callable[[S3Client], R]) -> R:
        """Run an operation on the current client, and again if its refused credentials have rotated."""

        def attempt() -> R:
            client = self._clients.current()
            try:
                return operation(client)
            except ERRORS as error:
                newer = self._clients.newer_than(client) if s3_errors.code_of(error) in s3_errors.REFUSED else None
                if newer is None:
                    raise
                return operation(newer)

        retrying = Retrying(
            retry=retry_if_exception(
                lambda error: isinstance(error, _BrokenBodyError) or s3_errors.credentials_may_come(error)
            ),
            stop=stop_after_attempt(MAX_ATTEMPTS) | stop_after_delay(RETRY_DEADLINE_S),
            wait=_backoff_s,
            before_sleep=self._count_retry,
            reraise=True,
        )
        return retrying(attempt)

    def _count_retry(self, state: RetryCallState) -> None:
        self._on_retry("broken" if _broke_off(state) else "credentials")

    @contextlib.contextmanager
    def _translated(self, key: str) -> Iterator[None]:
        """Raise the error that says who can act in place of one of ``ERRORS``."""
        try:
            yield
        except ERRORS as error:
            raise s3_errors.translate(error, self._location, key) from error


def _broke_off(state: RetryCallState) -> bool:
    return state.outcome is not None and isinstance(state.outcome.exception(), _BrokenBodyError)


def _backoff_s(state: RetryCallState) -> float:
    # What provides credentials on a node that has just come up is late by seconds.
    longest = min(INITIAL_BACKOFF_S * 2**state.attempt_number, MAX_BACKOFF_S) if _broke_off(state) else MAX_BACKOFF_S
    return random.random() * longest  # noqa: S311  jitter


def _payload(body: Body, sha256: str = "") -> Any:
    """Return a ``Payload`` for one request; boto3 takes anything that can be read, and its types do not."""
    return Payload(body, sha256)


def _encryption(s3: S3Spec) -> dict[str, Any]:
    """Return the arguments of every request that begins an object."""
    if not isinstance(s3, SnapshotS3Spec) or s3.encryption == "none":
        return {}
    return {"ServerSideEncryption": s3.encryption} | ({"SSEKMSKeyId": s3.kms_key_id} if s3.kms_key_id else {})
