"""Number the attempts of a job and decide the lineage: which manifests belong to the job's history.

An attempt writes ``attempts/<n>.json`` with the step that it continues from: first as pending, and again once that
snapshot is known to exist. A pending attempt stops older attempts, but invalidates no manifest. A manifest of an
earlier attempt with a later step belongs to an abandoned history (a lost node that committed late): it is ignored for
ever, so the lineage cannot fork. Listings must show every finished write, as S3 and files do.
"""

from __future__ import annotations

import contextlib
import json
import logging
import random
import re
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from dlrm_api.errors import NoInputError, TemporaryError
from dlrm_checkpointer.format.manifest import MANIFESTS, PARTS, parse_cut_key, parse_manifest_key, refusing
from dlrm_stores import ObjectStore
from dlrm_stores.base import PARALLEL_GETS, parallel_map

logger = logging.getLogger(__name__)

ATTEMPTS = "attempts/"
CLAIMS = "claims/"
RETIRED = "retired/"
PROBES = "probe/"
JITTER_S = 0.2
DEAD_MARK_S = 600.0
"""Age at which a retention mark has no owner any more: retention removes a snapshot moments after it marks it."""
_ATTEMPT = re.compile(r"attempts/(\d+)\.json")
_CLAIM = re.compile(r"claims/(\d+)\.[0-9a-f]+\.json")


@dataclass(frozen=True)
class JobIdentity:
    """Name the job that writes to a store."""

    name: str
    namespace: str = ""
    """Empty for a job outside a cluster."""
    uid: str = ""
    """Tells apart two jobs of one name, or two runs on machines."""

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}" if self.namespace else self.name

    def is_job(self, other: JobIdentity) -> bool:
        """Return whether another identity is of the same job. A job outside a cluster may move into any namespace."""
        same_namespace = self.namespace == other.namespace or not (self.namespace and other.namespace)
        return self.name == other.name and same_namespace


@dataclass(frozen=True)
class StoreAttempt:
    """Describe the announcement of one gang."""

    number: int
    restored_step: int | None
    """Step of the snapshot that it continued from; None: it started at step 0."""
    owner: JobIdentity | None = None
    """None: an earlier version announced it."""
    settings: str = ""
    """Digest of the document of its settings; empty: an earlier version announced it."""

    def accepts(self, step: int, attempt: int) -> bool:
        """Return whether this manifest belongs to the history that this attempt continues."""
        return attempt >= self.number or (self.restored_step is not None and step <= self.restored_step)


def in_lineage(step: int, attempt: int, attempts: Iterable[StoreAttempt]) -> bool:
    """Return whether a manifest counts: every later attempt continued from it or from a later step."""
    return all(later.accepts(step, attempt) for later in attempts)


def attempt_key(number: int) -> str:
    """Return the key of an attempt's announcement."""
    return f"{ATTEMPTS}{number:08d}.json"


def newest_attempt(store: ObjectStore) -> int:
    """Return the number of the newest announced attempt, pending or not; 0 before the first."""
    return max(_numbers(store, ATTEMPTS, _ATTEMPT), default=0)


def read_attempts(
    store: ObjectStore, after: int, known: Mapping[int, StoreAttempt] | None = None
) -> list[StoreAttempt]:
    """Read the attempts above ``after`` that are not pending: they can invalidate its manifests.

    Those in ``known``, by number, were read before. They are listed again but not read: an attempt that is not pending
    never changes, and a job that is often restarted has thousands.

    Raises:
        SnapshotError: an announcement cannot be read.
    """
    known = known or {}
    numbers = [number for number in _numbers(store, ATTEMPTS, _ATTEMPT) if number > after]
    there = [known[number] for number in numbers if number in known]
    new = [number for number in numbers if number not in known]
    read = filter(None, parallel_map(partial(find_attempt, store), new, PARALLEL_GETS))
    return sorted([*there, *read], key=lambda attempt: attempt.number)


def last_attempt(store: ObjectStore) -> StoreAttempt | None:
    """Read the newest attempt that is not pending; None before the first.

    Raises:
        SnapshotError: an announcement cannot be read.
    """
    numbers = sorted(_numbers(store, ATTEMPTS, _ATTEMPT), reverse=True)
    return next(filter(None, (find_attempt(store, number) for number in numbers)), None)


def find_attempt(store: ObjectStore, number: int) -> StoreAttempt | None:
    """Read one attempt; None if its announcement is pending or gone. Raises SnapshotError if it cannot be read."""
    key = attempt_key(number)
    with contextlib.suppress(NoInputError), refusing(f"{store.uri}/{key}", "not an attempt's announcement"):
        said = json.loads(store.get(key))
        if said.get("pending"):
            return None
        restored, owner = said["restoredStep"], said.get("owner")
        return StoreAttempt(
            number,
            None if restored is None else int(restored),
            None if owner is None else JobIdentity(*(str(owner.get(key, "")) for key in ("name", "namespace", "uid"))),
            str(said.get("settings", "")),
        )
    return None


def attempts_over(store: ObjectStore, keys: Sequence[tuple[int, int]]) -> list[StoreAttempt]:
    """Read the attempts that can invalidate any of some manifests, given as (step, attempt)."""
    return read_attempts(store, min(attempt for _, attempt in keys)) if keys else []


def is_claimed(number: int, attempts: Iterable[StoreAttempt]) -> bool:
    """Return whether an attempt is among those not pending; attempt 0, before the first, always is."""
    return number == 0 or any(each.number == number for each in attempts)


def honours_conditions(store: ObjectStore) -> bool:
    """Return whether the store refuses to create an object that exists; some overwrite it silently."""
    key = f"{PROBES}{secrets.token_hex(8)}"
    try:
        store.put_if_absent(key, b"first")
        return not store.put_if_absent(key, b"second")
    finally:
        store.delete(key)


def claim_attempt(
    store: ObjectStore, restored_step: int | None, note: str, owner: JobIdentity | None = None, settings: str = ""
) -> int:
    """Announce a new attempt that continues from ``restored_step`` and return its number.

    From then on older attempts cannot add to the history. Rank 0 of a gang calls it once, after ``newest_snapshot``.
    Two gangs never get the same number, not even from a store that ignores conditional writes. ``restored_step`` is
    None if the store has no snapshot; ``note`` names the gang, for people; ``settings`` is the digest of a document.

    Raises:
        TemporaryError: an older attempt's retention is removing that snapshot: choose again.
    """
    token = secrets.token_hex(8)
    said: dict[str, Any] = {"restoredStep": restored_step, "note": note, "token": token, "time": time.time()}
    said |= {"owner": asdict(owner)} if owner else {}
    said |= {"settings": settings} if settings else {}
    body = json.dumps({**said, "pending": True}).encode()
    claim = _claim_by_condition if honours_conditions(store) else _claim_by_rank
    number = claim(store, token, body)
    if restored_step is not None and not _still_there(store, restored_step, number):
        # If this fails, the attempt stays pending for ever, which invalidates no manifest.
        store.delete(attempt_key(number))
        raise TemporaryError(f"{store.uri}: the snapshot of step {restored_step} is being removed: choose again")
    store.put(attempt_key(number), json.dumps(said).encode())
    logger.info("attempt claimed", extra={"attempt": number, "restored_step": restored_step})
    return number


def _claim_by_condition(store: ObjectStore, token: str, body: bytes) -> int:
    number = _greatest_used(store)
    while True:
        number += 1
        key = attempt_key(number)
        if store.put_if_absent(key, body):
            return number
        # The object may be our own write, and only its response was lost.
        if _token(store, key) == token:
            return number


def _claim_by_rank(store: ObjectStore, token: str, body: bytes) -> int:
    """Claim without conditional writes: write a claim under our own name, then list the others.

    Of two claimants, the later writer sees the other's claim, because a listing shows every finished write. Whoever
    sees another claim withdraws and tries a higher number. So a number has at most one owner, who announces it.
    """
    while True:
        number = max(_greatest_used(store), max(_numbers(store, CLAIMS, _CLAIM), default=0)) + 1
        mine = f"{CLAIMS}{number:08d}.{token}.json"
        store.put(mine, body)
        rivals = [info.key for info in store.list(f"{CLAIMS}{number:08d}.") if info.key != mine]
        if not rivals and number > newest_attempt(store):
            store.put(attempt_key(number), body)
            store.delete(mine)
            return number
        store.delete(mine)
        time.sleep(random.uniform(0, JITTER_S))  # noqa: S311  jitter


def _greatest_used(store: ObjectStore) -> int:
    """Return the greatest number of an attempt that was announced or has stored anything, or 0.

    A copy of a store in use may lack announcements, and so may a store that expires objects. An attempt that reused a
    number would take the other's part lists for its own and commit them.
    """
    manifests = filter(None, (parse_manifest_key(info.key) for info in store.list(MANIFESTS)))
    cuts = filter(None, (parse_cut_key(info.key) for info in store.list(PARTS)))
    return max([newest_attempt(store), *(attempt for _, attempt in manifests), *(cut.attempt for cut in cuts)])


def _still_there(store: ObjectStore, step: int, number: int) -> bool:
    """Return whether a snapshot of this step exists that no running retention has marked for removal.

    The time of the announcement of attempt ``number``, just made, is the store's current time.
    """
    now = max((info.modified for info in store.list(attempt_key(number))), default=0.0)
    marks = [info for info in store.list(f"{RETIRED}{step:016d}-") if now - info.modified < DEAD_MARK_S]
    retired = {info.key.removeprefix(RETIRED) for info in marks}
    keys = [info.key for info in store.list(f"{MANIFESTS}{step:016d}-") if parse_manifest_key(info.key)]
    return any(key.removeprefix(MANIFESTS) not in retired for key in keys)


def _numbers(store: ObjectStore, prefix: str, pattern: re.Pattern[str]) -> list[int]:
    matches = (pattern.fullmatch(info.key) for info in store.list(prefix))
    return [int(match[1]) for match in matches if match]


def _token(store: ObjectStore, key: str) -> str:
    """Return the token of who announced an attempt; empty if the announcement was withdrawn."""
    try:
        return str(json.loads(store.get(key)).get("token"))
    except (NoInputError, ValueError, AttributeError, RecursionError):
        return ""
