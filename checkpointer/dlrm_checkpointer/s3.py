"""Object store over S3: whole objects in parallel parts and ranges, repeated within a budget."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from dlrm_api.errors import DLRMError, NoInputError, StoreUnavailableError
from dlrm_api.objects import S3Spec, SnapshotS3Spec
from dlrm_checkpointer.repeats import Repeats
from dlrm_checkpointer.s3_client import ERRORS, Clients
from dlrm_checkpointer.s3_errors import (
    REFUSED,
    Place,
    code_of,
    is_unknown_request,
    repeat_reason,
    status_of,
    translate,
)
from dlrm_checkpointer.s3_payload import Payload
from dlrm_checkpointer.s3_ranges import Version, read, read_into
from dlrm_checkpointer.store import Body, ObjectInfo, StoreOptions, delete_each

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client
    from mypy_boto3_s3.type_defs import (
        CompletedMultipartUploadTypeDef,
        CompletedPartTypeDef,
        ObjectIdentifierTypeDef,
    )

logger = logging.getLogger(__name__)

WHOLE_BYTES = 16 << 20
"""Objects above this go up in parallel parts."""
PART_BYTES = 8 << 20
RANGE_BYTES = 16 << 20
"""Objects come back in ranges of this, in parallel, where they go into a buffer."""
MAX_PARTS = 10_000
PARALLEL_PARTS = 8
"""Parts of one store's objects on their way at a time."""
PARALLEL_RANGES = 16
MOST_KEYS = 1_000
"""Objects that one request removes: S3 takes no more."""
R = TypeVar("R")
A = TypeVar("A", bound=Mapping[str, Any])


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
        self._clients = Clients(options, self._place)
        self._repeats = Repeats(repeat_reason, options.on_repeat)
        self._writers = ThreadPoolExecutor(PARALLEL_PARTS, "s3-part")
        self._readers = ThreadPoolExecutor(PARALLEL_RANGES, "s3-range")
        self._encryption = _encryption(options.s3)
        self._signs_bodies = (options.s3.endpoint or "").startswith("http://")
        """Signatures of requests without TLS cover the SHA-256 of the body, which the service checks."""
        self._knows_conditions: bool | None = None
        """Whether the service takes conditional writes, honoured or not; None before the first."""
        self._knows_batches = True
        """Whether the service removes many objects by one request, for all that it said so far."""

    @property
    def uri(self) -> str:
        """Where the keys live, without a trailing slash."""
        return f"s3://{self._bucket}/{self._prefix}".rstrip("/")

    @property
    def _bucket(self) -> str:
        return self._place.bucket

    def _call(self, operation: Callable[[S3Client], R]) -> R:
        """Make a call, with repeats; at once where refused credentials turn out to have rotated meanwhile."""

        def attempt() -> R:
            client = self._clients.current()
            try:
                return operation(client)
            except ERRORS as error:
                newer = self._clients.newer_than(client) if code_of(error) in REFUSED else None
                if newer is None:
                    raise
                return operation(newer)

        return self._repeats.run(attempt)

    def _ask(self, operation: Callable[[S3Client], A], field: str) -> A:
        """Make a call whose answer must say ``field``, as S3's does.

        What stands before a service, or another server in its place, may answer with a page of its own and 200: a
        listing would be empty then, and a write done.

        Raises:
            StoreUnavailableError: it does not.
        """

        def checked(s3: S3Client) -> A:
            answer = operation(s3)
            if field not in answer:
                place = self._place
                raise StoreUnavailableError(
                    f"{place.endpoint}, bucket {place.bucket}: an answer came that is none of S3's, without {field}: "
                    f"see that {place.fields.service}.endpoint is the service's, and what stands before it"
                )
            return answer

        return self._call(checked)

    @contextlib.contextmanager
    def _known(self, key: str) -> Iterator[None]:
        try:
            yield
        except ERRORS as error:
            raise translate(error, self._place, key) from error

    def _object(self, key: str) -> dict[str, Any]:
        return {"Bucket": self._bucket, "Key": self._prefix + key}

    def get(self, key: str) -> bytes:
        """The object's bytes, by one request: ``get_into`` reads large objects faster."""
        with self._known(key):
            return self._call(lambda s3: s3.get_object(**self._object(key))["Body"].read())

    def get_into(self, key: str, buffer: memoryview) -> int:
        """Fill a buffer with the object's first bytes, in parallel ranges; returns the object's size."""
        view = buffer.cast("B")
        if not view:
            size = self.size(key)
            if size is None:
                raise NoInputError(f"{self.uri}/{key}: there is no such object")
            return size
        places = range(0, len(view), RANGE_BYTES)
        with self._known(key):
            run = self._readers.map if len(places) > 1 else map
            parts = run(lambda at: self._read_into(key, view[at : at + RANGE_BYTES], at), places)
            versions = {version for version in parts if version is not None}
        if len(versions) > 1:
            raise StoreUnavailableError(f"{self.uri}/{key}: replaced while it was read")
        return versions.pop().size if versions else 0

    def _read_into(self, key: str, view: memoryview, start: int) -> Version | None:
        """Fill ``view`` with bytes from ``start`` on, as far as there are any; None where there are none."""
        try:
            return self._call(lambda s3: read_into(s3, self._place, self._object(key), start, view))
        except ERRORS as error:
            if status_of(error) == 416:
                return None
            raise

    def get_range_of(self, key: str, etag: str, start: int, length: int) -> bytes | None:
        """Bytes [start, start + length) of the very object that a listing showed; None where another one is there.

        Raises:
            NoInputError: there is none.
        """
        wanted = {**self._object(key), "IfMatch": etag}
        with self._known(key):
            try:
                return self._call(lambda s3: read(s3, self._place, wanted, start, length))
            except ERRORS as error:
                if status_of(error) in (412, 416):
                    return None
                raise

    def put(self, key: str, body: Body, sha256: str | None = None) -> None:
        """Write the object whole: at once, or in parallel parts that are given back if one fails."""
        view = memoryview(body).cast("B")
        with self._known(key):
            if len(view) > WHOLE_BYTES:
                self._put_parts(key, view)
            else:
                self._put_whole(key, view, sha256)

    def put_if_absent(self, key: str, body: Body) -> bool:
        """Write the object unless one is there (``If-None-Match: *``), or the service knows no conditions."""
        with self._known(key):
            written = self._put_on_condition(key, body)
            if written is None:
                self._put_whole(key, body)
                self._knows_conditions = False
        return written is not False

    def _put_on_condition(self, key: str, body: Body) -> bool | None:
        """Whether the object was written; None: the service knows no conditions, and nothing was.

        What a service refuses once it took a condition is refused for other reasons.
        """
        if self._knows_conditions is False:
            return None
        try:
            self._put_whole(key, body, IfNoneMatch="*")
        except ERRORS as error:
            if status_of(error) != 412:
                if self._knows_conditions is None and is_unknown_request(error):
                    logger.info("objects are written without conditions", extra={"store": self.uri})
                    return None
                raise
            self._knows_conditions = True
            return False
        self._knows_conditions = True
        return True

    def _put_whole(self, key: str, body: Body, sha256: str | None = None, **condition: Any) -> None:
        arguments = {**self._object(key), **self._encryption, **condition}
        digest = sha256 or hashlib.sha256(body).hexdigest()
        checksum, content = self._checksum(digest), partial(_payload, body, digest)
        self._ask(lambda s3: s3.put_object(Body=content(), **checksum, **arguments), "ETag")

    def _checksum(self, sha256: str) -> dict[str, Any]:
        """SHA-256 for the service to check, where the signature does not cover it."""
        if self._signs_bodies:
            return {}
        return {"ChecksumSHA256": base64.b64encode(bytes.fromhex(sha256)).decode()}

    def _put_parts(self, key: str, body: memoryview) -> None:
        size = max(PART_BYTES, -(-len(body) // MAX_PARTS))
        place = self._object(key)
        algorithm: dict[str, Any] = {} if self._signs_bodies else {"ChecksumAlgorithm": "SHA256"}
        begun = self._ask(lambda s3: s3.create_multipart_upload(**algorithm, **place, **self._encryption), "UploadId")
        upload = {**place, "UploadId": begun["UploadId"]}
        starts = range(0, len(body), size)
        tasks = [
            self._writers.submit(self._put_part, upload, number, body[start : start + size])
            for number, start in enumerate(starts, start=1)
        ]
        try:
            parts: CompletedMultipartUploadTypeDef = {"Parts": [task.result() for task in tasks]}
            self._ask(lambda s3: s3.complete_multipart_upload(MultipartUpload=parts, **upload), "ETag")
        except BaseException:
            for task in tasks:
                task.cancel()
            for task in tasks:
                if not task.cancelled():
                    task.exception()  # a part that is under way would outlive the upload
            self._abort(upload)
            raise

    def _put_part(self, upload: dict[str, Any], number: int, body: memoryview) -> CompletedPartTypeDef:
        digest = hashlib.sha256(body).hexdigest()
        checksum, content = self._checksum(digest), partial(_payload, body, digest)
        answer = self._ask(lambda s3: s3.upload_part(PartNumber=number, Body=content(), **checksum, **upload), "ETag")
        done: CompletedPartTypeDef = {"ETag": answer["ETag"], "PartNumber": number}
        if "ChecksumSHA256" in answer:  # the service took it: have it checked over the whole
            done["ChecksumSHA256"] = answer["ChecksumSHA256"]
        return done

    def _abort(self, upload: dict[str, Any]) -> None:
        try:
            self._call(lambda s3: s3.abort_multipart_upload(**upload))
        except (*ERRORS, DLRMError) as error:
            logger.warning(
                "open multipart upload left for the sweep", extra={"key": upload["Key"], "error": str(error)}
            )

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Objects whose key starts with ``prefix``, in ascending order of their keys."""
        wanted: dict[str, Any] = {"Bucket": self._bucket, "Prefix": self._prefix + prefix}
        more = True
        while more:
            with self._known(prefix):
                page = self._ask(lambda s3: s3.list_objects_v2(**wanted), "IsTruncated")
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
        """Remove the object; removing what is not there is success."""
        with contextlib.suppress(NoInputError), self._known(key):
            self._call(lambda s3: s3.delete_object(**self._object(key)))

    def delete_all(self, keys: Sequence[str]) -> None:
        """Remove objects, many by one request.

        What the service does not say to be gone then is removed one by one: so an error is that of a single removal,
        and a service that knows no such request does without.
        """
        batches = (keys[start : start + MOST_KEYS] for start in range(0, len(keys), MOST_KEYS))
        delete_each(self.delete, [key for batch in batches for key in self._delete_batch(batch)])

    def _delete_batch(self, keys: Sequence[str]) -> Sequence[str]:
        """Ask for all at once; returns those that the service does not say to be gone."""
        if not self._knows_batches:
            return keys
        names = [self._prefix + key for key in keys]
        with self._known(f"the removal of {len(keys)} objects"):
            try:
                objects: list[ObjectIdentifierTypeDef] = [{"Key": name} for name in names]
                answer = self._call(lambda s3: s3.delete_objects(Bucket=self._bucket, Delete={"Objects": objects}))
            except ERRORS as error:
                if not is_unknown_request(error):
                    raise
                self._knows_batches = False
                logger.info("objects are removed one by one", extra={"store": self.uri, "error": str(error)})
                return keys
        gone = {each["Key"] for each in answer.get("Deleted", ())}
        return [key for key, name in zip(keys, names, strict=True) if name not in gone]

    def size(self, key: str) -> int | None:
        """The object's bytes, None where there is none, by a listing: a refusal of HEAD would not say why."""
        wanted: dict[str, Any] = {"Bucket": self._bucket, "Prefix": self._prefix + key, "MaxKeys": 1}
        with self._known(key):
            page = self._ask(lambda s3: s3.list_objects_v2(**wanted), "IsTruncated")
        return next((item["Size"] for item in page.get("Contents", ()) if item["Key"] == wanted["Prefix"]), None)

    def sweep_uploads(self, older_than_s: float) -> int:
        """Abort multipart uploads below our prefix that were begun longer ago than this."""
        removed = 0
        for upload in self._uploads():
            if time.time() - upload["Initiated"].timestamp() > older_than_s:
                self._abort({"Bucket": self._bucket, "Key": upload["Key"], "UploadId": upload["UploadId"]})
                removed += 1
        return removed

    def _uploads(self) -> Iterator[Any]:
        wanted: dict[str, Any] = {"Bucket": self._bucket, "Prefix": self._prefix}
        more = True
        while more:
            with self._known(self._prefix):
                try:
                    page = self._call(lambda s3: s3.list_multipart_uploads(**wanted))
                except ERRORS as error:
                    if status_of(error) == 403:
                        logger.warning(
                            "uploads that nobody finishes stay: who lists them needs s3:ListBucketMultipartUploads",
                            extra={"store": self.uri, "error": str(error)},
                        )
                    elif status_of(error) not in {404, 405, 501}:  # a service without such a list has nothing to sweep
                        raise
                    return
            yield from page.get("Uploads", ())
            more = page.get("IsTruncated", False)
            wanted.update(KeyMarker=page.get("NextKeyMarker"), UploadIdMarker=page.get("NextUploadIdMarker"))


def _payload(body: Body, sha256: str) -> Any:
    """For one try of a call; boto3 takes anything that can be read."""
    return Payload(body, sha256)


def _encryption(s3: S3Spec) -> dict[str, Any]:
    """What every request that begins an object asks for."""
    if not isinstance(s3, SnapshotS3Spec) or s3.encryption == "none":
        return {}
    key = {"SSEKMSKeyId": s3.kms_key_id} if s3.kms_key_id else {}
    return {"ServerSideEncryption": s3.encryption, **key}
