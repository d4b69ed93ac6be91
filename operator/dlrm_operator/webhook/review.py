"""From an ``AdmissionReview`` to the verdict, within a deadline.

CEL rules of the CustomResourceDefinition are checked first and also while the webhook is down. The webhook adds what
they cannot express: rules across all tables, the pod-template policy, references, and whether a plan exists.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dlrm_api.base import read_served
from dlrm_api.errors import BadDataError, InvalidSpecError
from dlrm_api.job import DLRMJob
from dlrm_operator.api_client import API_ERRORS, Object
from dlrm_operator.clients.planner import PlannerProcess
from dlrm_operator.clients.references import CONFIG_MAP_SCHEME, ProfilesSeen, ReferenceReader
from dlrm_operator.manifests.pod_template import RESTRICTED, PodTemplatePolicy, check_policy
from dlrm_operator.manifests.storage import ephemeral_store_warnings
from dlrm_operator.metrics import ADMISSION_SECONDS, ADMISSIONS
from dlrm_operator.reconcile.findings import first_few, shorten
from dlrm_operator.reconcile.state import Planning, PlanQuestion
from dlrm_planner import trace_references

PlanFunction = Callable[[PlanQuestion, float], Awaitable[Planning]]

API_VERSION = "admission.k8s.io/v1"
UNPROCESSABLE = 422
# The API server keeps 4,096 characters of all warnings together.
MAX_WARNING_CHARACTERS = 1_000
# A refusal names fields of the document, so it can be as long as the document.
MAX_REFUSAL_CHARACTERS = 16_384
TRACE_FIELD = ".distribution.reference"
FIELDS_WITHOUT_PLAN = ("lifecycle", "scheduling")
MAX_KEPT_VERDICTS = 256
"""Jobs are often applied in many copies that differ in their names only."""


@dataclass(frozen=True, kw_only=True)
class Review:
    """Ask whether this job may be stored."""

    uid: str
    namespace: str
    job: Object = field(repr=False)
    old: Object | None = field(default=None, repr=False)
    """The stored job; None for a new one."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Answer a review, in the words that kubectl shows."""

    refusal: str = ""  # empty if the job is admitted
    warnings: tuple[str, ...] = ()


class Reviewer:
    """Answer reviews without side effects, so dry runs are answered like all others."""

    def __init__(
        self,
        references: ReferenceReader,
        deadline_s: float,
        plan: PlanFunction | None = None,
        *,
        limits: PodTemplatePolicy = RESTRICTED,
    ) -> None:
        self._references, self._limits, self._deadline_s = references, limits, deadline_s
        self._planner = PlannerProcess()
        self._plan = plan or self._planner.ask
        self._planning = asyncio.Semaphore(1)
        self._examining = asyncio.Semaphore(1)
        self._verdicts: OrderedDict[str, Verdict] = OrderedDict()

    async def start(self) -> None:
        """Start the planner's process."""
        await self._planner.start()

    async def stop(self) -> None:
        """End the planner's process."""
        await self._planner.end()

    async def answer(self, document: Any) -> Object:
        """Answer a decoded ``AdmissionReview`` within the deadline.

        Raises:
            BadDataError: this is not a review of a DLRMJob.
        """
        with ADMISSION_SECONDS.time():
            review = read_review(document)
            async with self._examining:
                # Thousands of tables take most of a second.
                found = await asyncio.to_thread(examine, review, self._limits)
            verdict = found if isinstance(found, Verdict) else await self._judge(review.namespace, found)
        ADMISSIONS.labels("refused" if verdict.refusal else "warned" if verdict.warnings else "admitted").inc()
        return response(review, verdict)

    async def _judge(self, namespace: str, job: DLRMJob) -> Verdict:
        try:
            async with asyncio.timeout(self._deadline_s):
                verdict = await self._feasibility(namespace, job)
        except TimeoutError:
            verdict = unplanned(f"the planner did not finish within {self._deadline_s:g} s")
        except API_ERRORS as error:
            verdict = unplanned(f"failed to read what the spec refers to: {error}")
        return replace(verdict, warnings=(*verdict.warnings, *ephemeral_store_warnings(job.spec)))

    async def _feasibility(self, namespace: str, job: DLRMJob) -> Verdict:
        profiles = await self._references.profiles(job.spec)
        traces, trace_problem = await self._references.traces(namespace, job.spec)
        if warnings := missing(profiles, trace_problem, list(trace_references(job.spec))):
            return Verdict(warnings=warnings)
        question = PlanQuestion(
            uid="", generation=0, profile_version=profiles.version, job=job, profiles=profiles.profiles, traces=traces
        )
        digest = await asyncio.to_thread(_digest, question)
        # Whoever waits here for an equal question finds its answer.
        async with self._planning:
            if digest in self._verdicts:
                self._verdicts.move_to_end(digest)
                return self._verdicts[digest]
            planning = await self._plan(question, self._deadline_s)
            verdict = conclude(planning, list(traces))
            if planning.final or not planning.problem:
                self._verdicts[digest] = verdict
                if len(self._verdicts) > MAX_KEPT_VERDICTS:
                    self._verdicts.popitem(last=False)
            return verdict


def read_review(document: Any) -> Review:
    """Read a decoded ``AdmissionReview``.

    Raises:
        BadDataError: this is not a review of a DLRMJob.
    """
    try:
        api_version, kind, request = document["apiVersion"], document["kind"], document["request"]
        if api_version != API_VERSION or kind != "AdmissionReview":
            raise BadDataError(f"invalid kind: expected {API_VERSION} AdmissionReview, got {api_version} {kind}")
        resource, subresource = request["kind"]["kind"], request.get("subResource")
        if resource != "DLRMJob" or subresource:
            raise BadDataError(f"invalid request.kind: expected DLRMJob, got {resource} {subresource or ''}")
        job, old = dict(request["object"]), request.get("oldObject")
        return Review(uid=str(request["uid"]), namespace=str(request.get("namespace") or ""), job=job, old=old)
    except (KeyError, TypeError, ValueError) as error:
        raise BadDataError(f"invalid AdmissionReview: {type(error).__name__} {error}") from error


def examine(review: Review, limits: PodTemplatePolicy) -> Verdict | DLRMJob:
    """Return the verdict if the documents decide it; else the job, for which a plan must exist."""
    old, spec, metadata = review.old or {}, review.job.get("spec"), review.job.get("metadata")
    if "deletionTimestamp" in (metadata or {}) or (review.old is not None and old.get("spec") == spec):
        return Verdict()
    if isinstance(metadata, dict):
        metadata = {key: value for key, value in metadata.items() if key in ("name", "namespace")}
    try:
        job = read_served(DLRMJob, {**review.job, "metadata": metadata, "status": None})
        check_policy(job.spec, review.namespace, limits)
    except InvalidSpecError as error:
        return Verdict(refusal=str(error))
    return Verdict() if review.old is not None and _planned_part(old.get("spec")) == _planned_part(spec) else job


def missing(profiles: ProfilesSeen, trace_problem: str, traces: Sequence[str]) -> tuple[str, ...]:
    """Warn about references that cannot be used: they may be applied after the job, from the same folder."""
    private = all(reference.startswith(CONFIG_MAP_SCHEME) for reference in traces)
    problems = (profiles.problem, "" if private else trace_problem)
    hidden = unplanned(_unusable(traces)).warnings if private and trace_problem else ()
    return (*(f"{problem}; the job waits for it" for problem in problems if problem), *hidden)


def conclude(planning: Planning, traces: Sequence[str]) -> Verdict:
    """Turn the planner's answer for a job with these traces into the verdict."""
    if planning.final and planning.field.endswith(TRACE_FIELD):
        return unplanned(_unusable(traces))
    if planning.final:
        return Verdict(refusal=planning.problem)
    return unplanned(planning.problem) if planning.problem else Verdict()


def _unusable(traces: Sequence[str]) -> str:
    """Use one message for ConfigMaps that are absent, hold no trace, or hold one of other tables.

    Whoever reaches the webhook may name any namespace, and must not learn what is in it.
    """
    return (
        f"a trace is missing or unusable ({first_few(traces)}): write it into the job's namespace with dlrmctl trace "
        "--configmap NAME"
    )


def unplanned(reason: str) -> Verdict:
    """Admit a job that could not be checked. The operator plans it, and reports in the condition Planned."""
    return Verdict(warnings=(f"feasibility is unknown: {reason}; see the job's condition Planned",))


def response(review: Review, verdict: Verdict) -> Object:
    """Build the ``AdmissionReview`` that answers."""
    found: Object = {"uid": review.uid, "allowed": not verdict.refusal}
    if verdict.refusal:
        message = shorten(verdict.refusal, MAX_REFUSAL_CHARACTERS)
        found["status"] = {"code": UNPROCESSABLE, "reason": "Invalid", "message": message}
    if verdict.warnings:
        found["warnings"] = [_one_line(warning) for warning in verdict.warnings]
    return {"apiVersion": API_VERSION, "kind": "AdmissionReview", "response": found}


def _planned_part(spec: Any) -> Any:
    if not isinstance(spec, dict):
        return spec
    return {name: value for name, value in spec.items() if name not in FIELDS_WITHOUT_PLAN}


def _one_line(text: str) -> str:
    """Shorten a warning to one line: warnings travel in an HTTP header."""
    line = " ".join(text.split())
    return line if len(line) <= MAX_WARNING_CHARACTERS else f"{line[: MAX_WARNING_CHARACTERS - 1]}…"


def _digest(question: PlanQuestion) -> str:
    """Hash all that the answer depends on; the job's name is not part of it."""
    spec = question.job.spec.model_dump(mode="json", exclude_unset=True)
    profiles = [
        (profile.metadata.name, profile.spec.model_dump(mode="json", exclude_unset=True))
        for profile in question.profiles
    ]
    return hashlib.sha256(json.dumps([spec, profiles, dict(question.traces)], sort_keys=True).encode()).hexdigest()
