"""The jobs as kopf's watch last showed them, each spec parsed once."""

from __future__ import annotations

import math
import sys
from collections import Counter
from dataclasses import replace

from dlrm_api.status import DLRMJobStatus, Phase
from dlrm_operator.facts.observed import JobKey, JobSeen
from dlrm_operator.facts.reading import Object, read_job


class JobCache:
    """Jobs by key. It decides nothing but whether a look at the live objects is worth it."""

    def __init__(self) -> None:
        self._jobs: dict[JobKey, JobSeen] = {}
        self.heard_at = -math.inf
        """When the watch last spoke, of whatever job: it tells changes in their order, so no copy is older (monotonic
        seconds)."""

    def saw(self, document: Object) -> JobSeen:
        """The job in ``document``, or the very one that was known, where that is as new or newer.

        Our own writes come back by the watch later than by their answers.
        """
        meta = document["metadata"]
        key = JobKey(meta["namespace"], meta["name"])
        known = self._jobs.get(key)
        if known is not None and _is_known(known, meta["uid"], meta["resourceVersion"]):
            return known
        # parsing 5,000 tables takes a while, and status writes are many
        job = read_job(document, known if known is not None and _has_spec_of(known, document) else None)
        if known is not None and _decided_from(known) == _decided_from(job):
            job = replace(job, unwritten=known.unwritten)
        if known is not None and known.unknown_fields and job == known:
            return known
        self._jobs[key] = job
        return job

    def keep(self, job: JobSeen, status: DLRMJobStatus) -> None:
        """Go on from this status, though it is not written, until somebody changes the job's spec or status."""
        known = self._jobs.get(job.key)
        if known is not None and _decided_from(known) == _decided_from(job):
            self._jobs[job.key] = replace(known, unwritten=status)

    def get(self, key: JobKey) -> JobSeen | None:
        """The job as last seen."""
        return self._jobs.get(key)

    def never_had_gang(self, key: JobKey) -> bool:
        """Whether the job is known, and no gang of it ever stood."""
        job = self._jobs.get(key)
        return job is not None and (job.known is None or job.known.gang_attempt == 0)

    def forget(self, key: JobKey) -> None:
        """The job is gone."""
        self._jobs.pop(key, None)

    def known(self) -> list[JobKey]:
        """All known jobs."""
        return list(self._jobs)

    def phases(self) -> Counter[str]:
        """Number of jobs in each phase; one whose status can't be read is in none."""
        found = Counter({phase.value: 0 for phase in Phase})
        readable = (job for job in self._jobs.values() if not job.unreadable)
        found.update((job.status.phase if job.status else Phase.PENDING).value for job in readable)
        return found


def _decided_from(job: JobSeen) -> tuple[object, ...]:
    """What of a job's object makes a decision: one that was made of something else is void."""
    return job.uid, job.generation, job.unknown_fields, job.status, job.unreadable


def _has_spec_of(job: JobSeen, document: Object) -> bool:
    """Whether the document's spec is the one that was read.

    Another CustomResourceDefinition gives or takes fields that are not known here, and moves neither generation nor
    resource version.
    """
    meta = document["metadata"]
    return not job.unknown_fields and (job.uid, job.generation) == (meta["uid"], meta.get("generation", 0))


def _is_known(job: JobSeen, uid: str, version: str) -> bool:
    """Whether the job was seen as it was at that version, or later."""
    same = (job.uid, job.resource_version) == (uid, version) and not job.unknown_fields
    return same or _version(job.resource_version) > _version(version)


def _version(text: str) -> int:
    """Resource versions are numbers that grow; what is none counts as the newest."""
    return int(text) if text.isascii() and text.isdigit() else sys.maxsize
