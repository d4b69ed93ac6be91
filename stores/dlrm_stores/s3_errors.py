"""Translate what an S3 service refuses into the error that says who can act. Pure; imports no boto3."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dlrm_api.errors import (
    DeviceError,
    DLRMError,
    InvalidSpecError,
    NoInputError,
    NoPermissionError,
    StoreUnavailableError,
)
from dlrm_stores.base import CHECKPOINT_FIELDS, FieldNames, RetryReason

# The credentials were refused; they may have been rotated meanwhile.
REFUSED = frozenset({
    "AccessDenied", "AllAccessDisabled", "ExpiredToken", "InvalidAccessKeyId", "InvalidToken", "SignatureDoesNotMatch",
    "TokenRefreshRequired", "XAdminUserNotFound",  # the last by versitygw, with status 404
})  # fmt: skip
BAD_KEYS = REFUSED - {"AccessDenied", "AllAccessDisabled"}
FULL = frozenset({"InsufficientStorage", "XMinioStorageFull"})
NO_CREDENTIALS = frozenset({"NoCredentialsError", "PartialCredentialsError"})
UNFETCHED_CREDENTIALS = frozenset({"CredentialRetrievalError", "MetadataRetrievalError"})
MAYBE_LATE = UNFETCHED_CREDENTIALS | {"NoCredentialsError"}
"""A machine with a metadata service that is not up yet looks like one without such a service."""
THROTTLED = frozenset(
    {"RequestLimitExceeded", "RequestThrottled", "SlowDown", "Throttling", "ThrottlingException", "TooManyRequests"}
)
CORRUPTED = frozenset({"BadDigest", "XAmzContentChecksumMismatch", "XAmzContentSHA256Mismatch"})
"""The service received other bytes than were sent."""
FAILED = frozenset({"ConditionalRequestConflict", "InternalError", "OperationAborted", "RequestTimeout"})
NOT_S3 = "NotAnS3Response"
"""Our own code for a success without the field that S3 always sends: a proxy's page, or another server."""
TEMPORARY = THROTTLED | CORRUPTED | FAILED | {"NoSuchUpload", NOT_S3}
BAD_CERTIFICATE = frozenset({"CertificateError", "SSLCertVerificationError"})
"""Unknown authority, wrong host name, or expired."""


@dataclass(frozen=True, kw_only=True)
class S3Location:
    """Name a bucket in error messages."""

    bucket: str
    endpoint: str
    fields: FieldNames = CHECKPOINT_FIELDS


def status_of(error: Exception) -> int:
    """Return the HTTP status of the service's response, 0 if there was none."""
    return int(_response(error).get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def code_of(error: Exception) -> str:
    """Return the service's error code, empty if there was none."""
    return str(_response(error).get("Error", {}).get("Code", ""))


def _response(error: Exception) -> dict[str, Any]:
    found: dict[str, Any] = getattr(error, "response", None) or {}
    return found


def is_unknown_request(error: Exception) -> bool:
    """Return whether the service does not implement the request, whoever sends it.

    Services answer 501 NotImplemented, 405, or 400 with many codes.
    """
    return status_of(error) in {400, 404, 405, 501} and code_of(error) not in REFUSED | TEMPORARY | {"NoSuchBucket"}


def is_about_checksums(error: Exception, *, conditional: bool) -> bool:
    """Return whether a write was refused for its checksum headers, or for the lack of them.

    A bucket with object lock demands one. Of a ``conditional`` write, the condition may be what is not implemented.
    """
    said = str(_response(error).get("Error", {}).get("Message", "")).lower()
    named = any(word in said for word in ("checksum", "content-md5", "x-amz-sdk"))
    return is_unknown_request(error) and (named or (code_of(error) == "NotImplemented" and not conditional))


def retry_reason(code: str, status: int) -> RetryReason | None:
    """Return why a request with this response may work when it is sent again, or None if it will not."""
    if status in {429, 503} or code in THROTTLED:
        return "throttled"
    if code in CORRUPTED or code == NOT_S3:
        return "broken"
    return "failed" if status in {409, 500, 502, 504} or code in FAILED else None


def credentials_may_come(error: BaseException) -> bool:
    """Return whether credentials are missing that a metadata service may hand out in a moment."""
    return type(error).__name__ in MAYBE_LATE


def is_bad_certificate(error: BaseException) -> bool:
    """Return whether the service's certificate was refused; other TLS failures raise the same classes."""
    return any(type(reason).__name__ in BAD_CERTIFICATE for reason in _reasons(error))


def _reasons(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and its causes; botocore passes one of them as a keyword argument."""
    if error is not None:
        yield error
        yield from _reasons(getattr(error, "kwargs", {}).get("error"))
        yield from _reasons(error.__cause__ or error.__context__)


def translate(error: Exception, location: S3Location, key: str) -> DLRMError:
    """Return the error that says who can act, for one that boto3 raised while it worked on ``key``."""
    code, status, fields = code_of(error), status_of(error), location.fields
    where = f"bucket {location.bucket} at {location.endpoint}"
    if not status and not code:
        return _without_response(error, location, where)
    message = _response(error).get("Error", {}).get("Message", "")
    detail = f"{code}: {message}".strip(": ") or str(status)
    if code == NOT_S3:
        return StoreUnavailableError(
            f"{where}: not an S3 response: {message}; check {fields.service}.endpoint and any proxy in front of it"
        )
    if code == "NoSuchBucket":
        return NoInputError(f"{where} not found; create it, or correct {fields.uri}")
    if code == "RequestTimeTooSkewed":
        return NoPermissionError(
            f"{where} refused {key}: clocks of this machine and the service differ by more than 15 minutes; set them"
        )
    if code == "InvalidObjectState":
        return NoPermissionError(
            f"{where}: {key} is archived and cannot be read ({detail}); restore all objects below {fields.uri}, and "
            "exclude them from the lifecycle rule that archives them"
        )
    if "quota" in code.lower():
        return DeviceError(f"{where}: quota exceeded: {detail}; free space there, or raise the quota")
    if status == 507 or code in FULL:
        return DeviceError(f"{where} is full: {detail}; free space there")
    if code in BAD_KEYS:
        return NoPermissionError(f"{where} refused the key for {key}: {detail}; correct {fields.credentials}")
    if status in {401, 403} or code in REFUSED:
        return NoPermissionError(
            f"{where} denied access to {key}: {detail}; correct the bucket's policy, or the rights of the key"
        )
    if status in {408, 409, 429} or status >= 500 or code in TEMPORARY:
        return StoreUnavailableError(f"{where}: {detail}")
    if status == 404:
        return NoInputError(f"object not found: s3://{location.bucket}/...{key}")
    if status in {301, 307} or code in {"AuthorizationHeaderMalformed", "PermanentRedirect"}:
        return InvalidSpecError(f"{fields.service}.region", f"bucket {location.bucket} is in another region: {detail}")
    return InvalidSpecError(fields.service, f"{where} refused {key}: {detail}")


def _without_response(error: Exception, location: S3Location, where: str) -> DLRMError:
    kind, fields = type(error).__name__, location.fields
    if kind in NO_CREDENTIALS:
        return NoPermissionError(
            f"no credentials for {where} ({error}); set {fields.credentials}, or boto3's environment variables or "
            "files; if the machine has a role, its metadata service must be reachable"
        )
    if kind in UNFETCHED_CREDENTIALS:
        return StoreUnavailableError(
            f"credentials for {where} cannot be fetched now ({error}); check the service that provides them"
        )
    if is_bad_certificate(error):
        return InvalidSpecError(
            f"{fields.service}.caFile",
            f"the certificate of {location.endpoint} is not trusted ({error}); give the CA that signed it",
        )
    if kind in {"ParamValidationError", "InvalidEndpointURLError"} or isinstance(error, ValueError):
        return InvalidSpecError(fields.service, f"{where}: {error}")
    return StoreUnavailableError(f"{location.endpoint} did not answer for bucket {location.bucket} ({kind}: {error})")
