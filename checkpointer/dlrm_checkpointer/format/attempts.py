"""Attempts and the lineage: which gang may add to a job's history, and which manifests count.

An attempt announces itself with ``attempts/<n>.json`` and the step that it goes on from, and says so once more when it
is sure of that snapshot: one that is pending stops older attempts, and rules on no manifest. A manifest of an
earlier attempt with a later step is of a history that was given up (a lost node that committed late): it is
ignored for ever, so the lineage can't fork. Listings must see every finished write, as S3 and files do.
"""

from __future__ import annotations

import json
import logging
import random
import re
import secrets
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from dlrm_api.errors import NoInputError, SnapshotError, TemporaryError
from dlrm_checkpointer.format.manifest import MANIFESTS, PARTS, parse_cut_key, parse_manifest_key
from dlrm_stores import ObjectStore
from dlrm_stores.parallel import PARALLEL_GETS, parallel_map

logger = logging.getLogger(__name__)

ATTEMPTS = "attempts/"
CLAIMS = "claims/"
RETIRED = "retired/"
PROBES = "probe/"
JITTER_S = 0.2
DEAD_MARK_S = 600.0
"""A retention that marked a snapshot removes it in moments: a mark that is so much older than a claim has no owner."""
_ATTEMPT = re.compile(r"attempts/(\d+)\.json")
_CLAIM = re.compile(r"claims/(\d+)\.[0-9a-f]+\.json")


@dataclass(frozen=True, order=True)
class StoreAttempt:
    """One gang's announcement."""

    number: int
    restored_step: int | None
    """Step that it went on from; None: from the beginning."""

    def accepts(self, step: int, attempt: int) -> bool:
        """Whether a manifest of this step and attempt is part of the history that this attempt goes on from."""
        return attempt >= self.number or (self.restored_step is not None and step <= self.restored_step)


def in_lineage(step: int, attempt: int, attempts: Iterable[StoreAttempt]) -> bool:
    """Whether a manifest counts: every attempt after its own went on from it or from a later step."""
    return all(later.accepts(step, attempt) for later in attempts)


def attempt_key(number: int) -> str:
    """Key of an attempt's announcement."""
    return f"{ATTEMPTS}{number:08d}.json"


def newest_attempt(store: ObjectStore) -> int:
    """Number of the newest announced attempt, pending or not; 0 before the first."""
    return max(_numbers(store, ATTEMPTS, _ATTEMPT), default=0)


def read_attempts(
    store: ObjectStore, after: int, known: Mapping[int, StoreAttempt] | None = None
) -> list[StoreAttempt]:
    """Attempts with a number above ``after``: those that can rule on a manifest of attempt ``after``; no pending ones.

    Args:
        store: the job's store.
        after: see above.
        known: attempts by number that were read before. They are listed again and not read: one that is not pending any
            more never changes, and a job that is often restarted has thousands.

    Raises:
        SnapshotError: an announcement can't be read.
    """
    known = known or {}
    numbers = [number for number in _numbers(store, ATTEMPTS, _ATTEMPT) if number > after]
    there = [known[number] for number in numbers if number in known]
    new = [number for number in numbers if number not in known]
    read = filter(None, parallel_map(partial(_read, store), new, PARALLEL_GETS))
    return sorted([*there, *read], key=lambda attempt: attempt.number)


def is_claimed(number: int, attempts: Iterable[StoreAttempt]) -> bool:
    """Whether an attempt is sure of its snapshot, as it is where it begins anew: 0 is before the first.

    Args:
        number: of the attempt.
        attempts: those that are not pending.
    """
    return number == 0 or any(each.number == number for each in attempts)


def honours_conditions(store: ObjectStore) -> bool:
    """Whether the store refuses a conditional write over an object; some accept it silently and overwrite."""
    key = f"{PROBES}{secrets.token_hex(8)}"
    try:
        store.put_if_absent(key, b"first")
        return not store.put_if_absent(key, b"second")
    finally:
        store.delete(key)


def claim_attempt(store: ObjectStore, restored_step: int | None, note: str) -> int:
    """Announce a new attempt that goes on from ``restored_step``; from now on older attempts can't add to the history.

    Rank 0 of a gang calls it once, after ``newest_snapshot``. Two gangs never get one number, also where the
    store ignores conditional writes.

    Args:
        store: the job's store.
        restored_step: step of the snapshot that was chosen; None: none is there.
        note: who claims, for people.

    Raises:
        TemporaryError: that snapshot is being removed by an older attempt's retention: choose again.
    """
    token = secrets.token_hex(8)
    said = {"restoredStep": restored_step, "note": note, "token": token, "time": time.time()}
    body = _encode({**said, "pending": True})
    number = (
        _claim_by_condition(store, token, body) if honours_conditions(store) else _claim_by_rank(store, token, body)
    )
    if restored_step is not None and not _still_there(store, restored_step, number):
        store.delete(attempt_key(number))  # where this fails it is pending for ever, which rules on nothing
        raise TemporaryError(f"{store.uri}: the snapshot of step {restored_step} is being removed: choose again")
    store.put(attempt_key(number), _encode(said))
    logger.info("attempt claimed", extra={"attempt": number, "restored_step": restored_step})
    return number


def _claim_by_condition(store: ObjectStore, token: str, body: bytes) -> int:
    number = _greatest_used(store)
    while True:
        number += 1
        key = attempt_key(number)
        if store.put_if_absent(key, body):
            return number
        if _token(store, key) == token:
            return number  # our own write, whose answer was lost


def _claim_by_rank(store: ObjectStore, token: str, body: bytes) -> int:
    """Claim without conditions: write a claim of our own name, then look who else claims the number.

    Of two claimants the later to write sees the other's claim, because a listing sees every finished write;
    whoever sees one withdraws and tries a higher number. So a number has at most one owner, who announces it.
    """
    while True:
        number = max(_greatest_used(store), max(_numbers(store, CLAIMS, _CLAIM), default=0)) + 1
        mine = f"{CLAIMS}{number:08d}.{token}.json"
        store.put(mine, body)
        rivals = [info.key for info in store.list(f"{CLAIMS}{number:08d}.") if info.key != mine]
        if not rivals and number > newest_attempt(store):
            store.put(attempt_key(number), body)
            store.delete(mine)  # the announcement says it now
            return number
        store.delete(mine)
        time.sleep(random.uniform(0, JITTER_S))  # noqa: S311  jitter


def _greatest_used(store: ObjectStore) -> int:
    """The greatest number of an attempt that was announced or has stored something; 0 where there is none.

    A copy of a store that was in use may lack announcements, and so may one whose objects expire. An attempt that got
    such a number would take part lists of the other one for its own, and commit what that had handed over.
    """
    manifests = filter(None, (parse_manifest_key(info.key) for info in store.list(MANIFESTS)))
    cuts = filter(None, (parse_cut_key(info.key) for info in store.list(PARTS)))
    return max([newest_attempt(store), *(attempt for _, attempt in manifests), *(cut.attempt for cut in cuts)])


def _still_there(store: ObjectStore, step: int, number: int) -> bool:
    """Whether a snapshot of this step is there that no living retention has marked for removal.

    Args:
        store: the job's store.
        step: of the snapshot.
        number: of the attempt that was announced just now: its time is the store's present.
    """
    prefix = f"{MANIFESTS}{step:016d}-"
    now = max((info.modified for info in store.list(attempt_key(number))), default=0.0)
    marks = [info for info in store.list(f"{RETIRED}{step:016d}-") if now - info.modified < DEAD_MARK_S]
    retired = {info.key.removeprefix(RETIRED) for info in marks}
    keys = [info.key for info in store.list(prefix) if parse_manifest_key(info.key)]
    return any(key.removeprefix(MANIFESTS) not in retired for key in keys)


def _numbers(store: ObjectStore, prefix: str, pattern: re.Pattern[str]) -> list[int]:
    matches = (pattern.fullmatch(info.key) for info in store.list(prefix))
    return [int(match[1]) for match in matches if match]


def _read(store: ObjectStore, number: int) -> StoreAttempt | None:
    """None where it is pending, or was taken back since it was listed."""
    key = attempt_key(number)
    try:
        said = json.loads(store.get(key))
        restored = said["restoredStep"]
        return None if said.get("pending") else StoreAttempt(number, None if restored is None else int(restored))
    except NoInputError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise SnapshotError(f"{store.uri}/{key}: not an attempt's announcement: {error!r}") from error


def _token(store: ObjectStore, key: str) -> str:
    """Who announced an attempt; nobody where that was taken back."""
    try:
        return str(json.loads(store.get(key)).get("token"))
    except (NoInputError, ValueError, AttributeError, RecursionError):
        return ""


def _encode(said: dict[str, Any]) -> bytes:
    return json.dumps(said).encode()
