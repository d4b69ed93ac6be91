"""How a call to the Kubernetes API can end, by who can act. No HTTP library's exception leaves ``cluster``.

ClusterUnavailableError   nothing was decided: the same call may succeed later
ClusterRefusedError       the server understood and said no
├── NotFoundError         404
├── ConflictError         409  the object, or a quota that it counts in, has changed meanwhile
│   └── AlreadyExistsError     someone else was first: an object of that name is there
└── GoneError             410  a list or watch must start anew
"""

from __future__ import annotations

from dlrm_api.errors import DLRMError, TemporaryError


class ClusterUnavailableError(TemporaryError):
    """The API server did not answer, or asked to be left alone; ``retry_after_s`` is its own wish, if it has one.

    ``code`` is the HTTP status of its answer; 0: there was none.
    """

    def __init__(self, message: str, retry_after_s: float | None = None, code: int = 0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.code = code


class ClusterRefusedError(DLRMError):
    """The API server refused the call; ``code`` is its HTTP status, the message its own words."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class NotFoundError(ClusterRefusedError):
    """The object is not there."""


class ConflictError(ClusterRefusedError):
    """The object exists already, or is not the one that was seen any more."""


class AlreadyExistsError(ConflictError):
    """An object of that name is there. A creation that meets another conflict, as in its quota, made nothing."""


class GoneError(ClusterRefusedError):
    """The resource version or the continuation is too old."""
