"""What kopf keeps of an object between events: nothing.

kopf compares each object that it is told of with an essence of it that handlers of changes would have stored. There
are none here (``handlers``), and copying the object for it, several times an event, was half of what an event cost.
"""

# ruff: noqa: ARG002  the signatures are kopf's

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import kopf

NOT_KEPT = "only kopf.on.event is used: it keeps nothing of an object"


class NoEssence(kopf.DiffBaseStorage):
    """Every object is of the same, empty essence."""

    def build(self, *, body: kopf.Body, extra_fields: Iterable[Any] | None = None) -> kopf.BodyEssence:
        """The empty essence."""
        return kopf.BodyEssence({})

    def fetch(self, *, body: kopf.Body) -> kopf.BodyEssence | None:
        """None was stored."""
        return None

    def store(self, *, body: kopf.Body, patch: kopf.Patch, essence: kopf.BodyEssence) -> None:
        """Called for handlers of changes alone."""
        raise AssertionError(NOT_KEPT)


class NoProgress(kopf.ProgressStorage):
    """No handler goes on where it was left."""

    def fetch(self, *, key: Any, body: kopf.Body) -> Any:
        """None was stored."""
        return None

    def store(self, *, key: Any, record: Any, body: kopf.Body, patch: kopf.Patch) -> None:
        """Called for handlers of changes alone."""
        raise AssertionError(NOT_KEPT)

    def purge(self, *, key: Any, body: kopf.Body, patch: kopf.Patch) -> None:
        """There is nothing to remove."""

    def touch(self, *, body: kopf.Body, patch: kopf.Patch, value: str | None) -> None:
        """Called for handlers of changes alone."""
        raise AssertionError(NOT_KEPT)

    def clear(self, *, essence: kopf.BodyEssence) -> kopf.BodyEssence:
        """The same: nothing of ours is in it."""
        return essence
