"""What a refusal of an S3 service means for the user: who can act, and where. Pure; reads answers, not classes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from urllib3.exceptions import HTTPError  # type: ignore[import-untyped]

from dlrm_api.errors import (
    DeviceError,
    DLRMError,
    InvalidSpecError,
    NoInputError,
    NoPermissionError,
    StoreUnavailableError,
)
from dlrm_stores.base import CHECKPOINT_FIELDS, FieldNames
from dlrm_stores.repeats import Reason

REFUSED = frozenset(  # by the credentials, which may rotate
    {
        "AccessDenied",
        "AllAccessDisabled",
        "ExpiredToken",
        "InvalidAccessKeyId",
        "InvalidToken",
        "SignatureDoesNotMatch",
        "TokenRefreshRequired",
        "XAdminUserNotFound",  # versitygw, with 404: it does not know the access key
    }
)
NO_CREDENTIALS = frozenset({"NoCredentialsError", "PartialCredentialsError"})
UNFETCHED_CREDENTIALS = frozenset({"CredentialRetrievalError", "MetadataRetrievalError"})
"""A service hands them out here, and did not."""
MAYBE_LATE = UNFETCHED_CREDENTIALS | {"NoCredentialsError"}
"""A machine whose metadata service does not answer yet looks like one that has none."""
THROTTLED = frozenset(
    {"RequestLimitExceeded", "RequestThrottled", "SlowDown", "Throttling", "ThrottlingException", "TooManyRequests"}
)
CORRUPTED = frozenset({"BadDigest", "XAmzContentChecksumMismatch", "XAmzContentSHA256Mismatch"})
"""The service got other bytes than we sent."""
FAILED = frozenset({"ConditionalRequestConflict", "InternalError", "OperationAborted", "RequestTimeout"})
TEMPORARY = THROTTLED | CORRUPTED | FAILED | {"NoSuchUpload"}
BROKEN_OFF = frozenset(
    {
        "ConnectTimeoutError",
        "ConnectionClosedError",
        "ConnectionError",
        "EndpointConnectionError",
        "HTTPClientError",
        "IncompleteReadError",
        "ProxyConnectionError",
        "ReadTimeoutError",
        "ResponseStreamingError",
        "SSLError",
    }
)
BAD_CERTIFICATE = frozenset({"CertificateError", "SSLCertVerificationError"})
"""Of another authority, of another host, or no longer valid."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """What messages name."""

    bucket: str
    endpoint: str
    fields: FieldNames = CHECKPOINT_FIELDS


def status_of(error: Exception) -> int:
    """HTTP status of the service's answer, 0 where it gave none."""
    answer = getattr(error, "response", None) or {}
    return int(answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def code_of(error: Exception) -> str:
    """The service's word for what went wrong, empty where it gave none."""
    answer = getattr(error, "response", None) or {}
    return str(answer.get("Error", {}).get("Code", ""))


def is_unknown_request(error: Exception) -> bool:
    """Whether the service refused what was asked, whoever asks: it knows no such request, or wants it otherwise.

    Services say so by 501 NotImplemented and 405, and by 400 under many codes.
    """
    known = REFUSED | TEMPORARY | {"NoSuchBucket"}
    return status_of(error) in {400, 404, 405, 501} and code_of(error) not in known


def repeat_reason(error: Exception) -> Reason | None:
    """Why the same call may work in a moment; None where it will not."""
    code, status = code_of(error), status_of(error)
    if status in {429, 503} or code in THROTTLED:
        return "throttled"
    if status in {409, 500, 502, 504} or code in FAILED:
        return "failed"
    if code in CORRUPTED or isinstance(error, StoreUnavailableError):
        return "broken"
    kind = type(error).__name__
    if kind in MAYBE_LATE:
        return "credentials"
    broken_off = kind in BROKEN_OFF or isinstance(error, HTTPError)
    return "broken" if broken_off and not is_bad_certificate(error) else None


def is_bad_certificate(error: BaseException) -> bool:
    """Whether the service's certificate was refused; TLS breaks off for many other reasons, with the same classes."""
    return any(type(each).__name__ in BAD_CERTIFICATE for each in _reasons(error))


def _reasons(error: BaseException | None) -> Iterator[BaseException]:
    """An error and all that it was raised on account of; botocore names one of them among its arguments."""
    if error is not None:
        yield error
        yield from _reasons(getattr(error, "kwargs", {}).get("error"))
        yield from _reasons(error.__cause__ or error.__context__)


def translate(error: Exception, place: Place, key: str) -> DLRMError:
    """The error that says who can act, for one of botocore's."""
    answer = (getattr(error, "response", None) or {}).get("Error", {})
    code, status = code_of(error), status_of(error)
    kind = type(error).__name__
    if not status and not code:
        return _without_answer(error, kind, place)
    detail = f"{code}: {answer.get('Message', '')}".strip(": ")
    if code == "NoSuchBucket":
        return NoInputError(
            f"bucket {place.bucket} is not there at {place.endpoint}: create it, or mend {place.fields.uri}"
        )
    if code == "RequestTimeTooSkewed":
        return NoPermissionError(
            f"bucket {place.bucket} at {place.endpoint} refused {key}: the clock of this machine or of the service is "
            "wrong: set it, both must be within 15 minutes"
        )
    if code == "InvalidObjectState":
        return NoPermissionError(
            f"bucket {place.bucket} at {place.endpoint}: {key} is archived and can't be read ({detail}): have the "
            f"service restore all objects below {place.fields.uri}, and take them out of the lifecycle rule that "
            "archives them"
        )
    if status in {401, 403} or code in REFUSED:
        return NoPermissionError(
            f"bucket {place.bucket} at {place.endpoint} refused {key}: {detail or status}; "
            "mend the credentials Secret or the bucket's policy"
        )
    if status in {408, 409, 429} or code in TEMPORARY:
        return StoreUnavailableError(f"{place.endpoint}, bucket {place.bucket}: {detail or status}")
    if status == 507 or code in {"InsufficientStorage", "QuotaExceeded"}:
        return DeviceError(f"{place.endpoint}, bucket {place.bucket} is full ({detail}): free space there")
    if status >= 500:
        return StoreUnavailableError(f"{place.endpoint}, bucket {place.bucket}: {detail or status}")
    if status == 404:
        return NoInputError(f"s3://{place.bucket}/...{key}: there is no such object")
    if status in {301, 307} or code in {"AuthorizationHeaderMalformed", "PermanentRedirect"}:
        return InvalidSpecError(
            f"{place.fields.service}.region", f"bucket {place.bucket} is of another region: {detail}"
        )
    return InvalidSpecError(place.fields.service, f"{place.endpoint}, bucket {place.bucket} refused {key}: {detail}")


def _without_answer(error: Exception, kind: str, place: Place) -> DLRMError:
    if kind in NO_CREDENTIALS:
        return NoPermissionError(
            f"no credentials for bucket {place.bucket} at {place.endpoint} ({error}): "
            f"set {place.fields.credentials}, or boto3's own environment variables or files; where the machine has a "
            "role, its metadata service must be reachable"
        )
    if kind in UNFETCHED_CREDENTIALS:
        return StoreUnavailableError(
            f"credentials for bucket {place.bucket} at {place.endpoint} can't be fetched now ({error}): "
            "the service that hands them out to this machine or pod did not do so"
        )
    if is_bad_certificate(error):
        return InvalidSpecError(
            f"{place.fields.service}.caFile",
            f"the certificate of {place.endpoint} is not trusted ({error}): give its authority",
        )
    if kind in {"ParamValidationError", "InvalidEndpointURLError"} or isinstance(error, ValueError):
        return InvalidSpecError(place.fields.service, f"bucket {place.bucket} at {place.endpoint}: {error}")
    return StoreUnavailableError(f"{place.endpoint} did not answer for bucket {place.bucket} ({kind}: {error})")
