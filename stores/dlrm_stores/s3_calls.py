"""Calls of an S3 service for one store: repeated within a budget, answered by S3 itself, refusals put into words."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from dlrm_api.errors import StoreUnavailableError
from dlrm_stores.base import StoreOptions
from dlrm_stores.repeats import Repeats
from dlrm_stores.s3_client import ERRORS, Clients
from dlrm_stores.s3_errors import REFUSED, Place, code_of, repeat_reason, translate

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

R = TypeVar("R")
A = TypeVar("A", bound=Mapping[str, Any])


class Calls:
    """Calls for keys below ``s3://bucket/prefix``, from any thread.

    Args:
        bucket: it must exist.
        prefix: empty, or with a slash at its end.
        options: where the service is and who we are.
    """

    def __init__(self, bucket: str, prefix: str, options: StoreOptions) -> None:
        self.bucket, self.prefix = bucket, prefix
        self.place = Place(bucket=bucket, endpoint=options.s3.endpoint or "AWS", fields=options.fields)
        self._clients = Clients(options, self.place)
        self._repeats = Repeats(repeat_reason, options.on_repeat)

    @property
    def uri(self) -> str:
        """Where the keys live, without a trailing slash."""
        return f"s3://{self.bucket}/{self.prefix}".rstrip("/")

    def object(self, key: str) -> dict[str, Any]:
        """The object as boto3 names it."""
        return {"Bucket": self.bucket, "Key": self.prefix + key}

    def run(self, operation: Callable[[S3Client], R]) -> R:
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

    def ask(self, operation: Callable[[S3Client], A], field: str) -> A:
        """Make a call whose answer must say ``field``, as S3's does.

        What stands before a service, or another server in its place, may answer with a page of its own and 200: a
        listing would be empty then, and a write done.

        Raises:
            StoreUnavailableError: it does not.
        """

        def checked(s3: S3Client) -> A:
            answer = operation(s3)
            if field not in answer:
                place = self.place
                raise StoreUnavailableError(
                    f"{place.endpoint}, bucket {place.bucket}: an answer came that is none of S3's, without {field}: "
                    f"see that {place.fields.service}.endpoint is the service's, and what stands before it"
                )
            return answer

        return self.run(checked)

    @contextlib.contextmanager
    def known(self, key: str) -> Iterator[None]:
        """Raise the error that says who can act, in place of one of ``ERRORS``; ``key`` is what it names."""
        try:
            yield
        except ERRORS as error:
            raise translate(error, self.place, key) from error
