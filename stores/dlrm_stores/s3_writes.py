"""Objects on their way to an S3 service: whole, or in parallel parts that are given back if one fails."""

from __future__ import annotations

import base64
import hashlib
import logging
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

from dlrm_api.errors import DLRMError
from dlrm_api.objects import S3Spec, SnapshotS3Spec
from dlrm_stores.base import Body
from dlrm_stores.s3_calls import Calls
from dlrm_stores.s3_client import ERRORS
from dlrm_stores.s3_errors import status_of
from dlrm_stores.s3_payload import Payload

if TYPE_CHECKING:
    from mypy_boto3_s3.type_defs import CompletedMultipartUploadTypeDef, CompletedPartTypeDef

logger = logging.getLogger(__name__)

WHOLE_BYTES = 16 << 20
"""Objects above this go up in parallel parts."""
PART_BYTES = 8 << 20
MAX_PARTS = 10_000
PARALLEL_PARTS = 8
"""Parts of one store's objects on their way at a time."""


class Writes:
    """Writes objects.

    Args:
        calls: of the service.
        s3: how it is reached and what it is to encrypt with.
    """

    def __init__(self, calls: Calls, s3: S3Spec) -> None:
        self._calls = calls
        self._writers = ThreadPoolExecutor(PARALLEL_PARTS, "s3-part")
        self._encryption = _encryption(s3)
        self._signs_bodies = (s3.endpoint or "").startswith("http://")
        """Signatures of requests without TLS cover the SHA-256 of the body, which the service checks."""

    def put(self, key: str, body: Body, sha256: str | None = None) -> None:
        """Write an object, its SHA-256 in hexadecimal if it is known; raises one of ``ERRORS``."""
        view = memoryview(body).cast("B")
        if len(view) > WHOLE_BYTES:
            self._put_parts(key, view)
        else:
            self.put_whole(key, view, sha256)

    def put_whole(self, key: str, body: Body, sha256: str | None = None, **condition: Any) -> None:
        """Write an object by one request, on conditions as boto3 names them; raises one of ``ERRORS``."""
        arguments = {**self._calls.object(key), **self._encryption, **condition}
        digest = sha256 or hashlib.sha256(body).hexdigest()
        checksum, content = self._checksum(digest), partial(_payload, body, digest)
        self._calls.ask(lambda s3: s3.put_object(Body=content(), **checksum, **arguments), "ETag")

    def _checksum(self, sha256: str) -> dict[str, Any]:
        """SHA-256 for the service to check, where the signature does not cover it."""
        if self._signs_bodies:
            return {}
        return {"ChecksumSHA256": base64.b64encode(bytes.fromhex(sha256)).decode()}

    def _put_parts(self, key: str, body: memoryview) -> None:
        size = max(PART_BYTES, -(-len(body) // MAX_PARTS))
        place = self._calls.object(key)
        algorithm: dict[str, Any] = {} if self._signs_bodies else {"ChecksumAlgorithm": "SHA256"}
        begun = self._calls.ask(
            lambda s3: s3.create_multipart_upload(**algorithm, **place, **self._encryption), "UploadId"
        )
        upload = {**place, "UploadId": begun["UploadId"]}
        starts = range(0, len(body), size)
        tasks = [
            self._writers.submit(self._put_part, upload, number, body[start : start + size])
            for number, start in enumerate(starts, start=1)
        ]
        try:
            parts: CompletedMultipartUploadTypeDef = {"Parts": [task.result() for task in tasks]}
            self._calls.ask(lambda s3: s3.complete_multipart_upload(MultipartUpload=parts, **upload), "ETag")
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
        answer = self._calls.ask(
            lambda s3: s3.upload_part(PartNumber=number, Body=content(), **checksum, **upload), "ETag"
        )
        done: CompletedPartTypeDef = {"ETag": answer["ETag"], "PartNumber": number}
        if "ChecksumSHA256" in answer:  # the service took it: have it checked over the whole
            done["ChecksumSHA256"] = answer["ChecksumSHA256"]
        return done

    def _abort(self, upload: dict[str, Any]) -> None:
        try:
            self._calls.run(lambda s3: s3.abort_multipart_upload(**upload))
        except (*ERRORS, DLRMError) as error:
            logger.warning(
                "open multipart upload left for the sweep", extra={"key": upload["Key"], "error": str(error)}
            )

    def sweep(self, older_than_s: float) -> int:
        """Abort multipart uploads below our prefix that were begun longer ago than this."""
        removed = 0
        for upload in self._uploads():
            if time.time() - upload["Initiated"].timestamp() > older_than_s:
                self._abort({"Bucket": self._calls.bucket, "Key": upload["Key"], "UploadId": upload["UploadId"]})
                removed += 1
        return removed

    def _uploads(self) -> Iterator[Any]:
        wanted: dict[str, Any] = {"Bucket": self._calls.bucket, "Prefix": self._calls.prefix}
        more = True
        while more:
            with self._calls.known(self._calls.prefix):
                try:
                    page = self._calls.run(lambda s3: s3.list_multipart_uploads(**wanted))
                except ERRORS as error:
                    if status_of(error) == 403:
                        logger.warning(
                            "uploads that nobody finishes stay: who lists them needs s3:ListBucketMultipartUploads",
                            extra={"store": self._calls.uri, "error": str(error)},
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
