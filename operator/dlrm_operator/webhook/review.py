"""Admission: from the API server's ``AdmissionReview`` to the verdict that goes back. Data in, data out.

The rules of the CustomResourceDefinition stand first and hold also while this webhook is away. It adds what they
cannot say: what lies across all tables, how far additions to pods may go, whether what the spec refers to is there, and
whether a plan exists.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dlrm_api.errors import BadDataError, InvalidSpecError
from dlrm_api.job import DLRMJob, parse_served_job
from dlrm_operator.clients.references import CONFIG_MAP, ProfileSeen
from dlrm_operator.manifests.restrictions import OverlayLimits, refuse_widening
from dlrm_operator.reconcile.findings import first_few, shorten
from dlrm_operator.reconcile.state import Planning

Object = dict[str, Any]

API_VERSION = "admission.k8s.io/v1"
INVALID = 422
WARNING_CHARACTERS = 1_000
"""The API server keeps 4,096 characters of all warnings together."""
REFUSAL_CHARACTERS = 16_384
"""A refusal names fields of the document, which may be as long as it."""
TRACE_FIELD = ".distribution.reference"
UNPLANNED = ("lifecycle", "scheduling")
"""Parts of the spec that no plan depends on."""


@dataclass(frozen=True, kw_only=True)
class Review:
    """One question: may this job be stored?"""

    uid: str
    namespace: str
    job: Object = field(repr=False)
    old: Object | None = field(default=None, repr=False)
    """What is stored now; None for a new job."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The answer, in words for whoever applied the manifest."""

    refusal: str = ""
    """Why not; empty: it is admitted."""
    warnings: tuple[str, ...] = ()


def read_review(document: Any) -> Review:
    """The question in a decoded ``AdmissionReview``.

    Raises:
        BadDataError: this is none of a DLRMJob.
    """
    try:
        if document["apiVersion"] != API_VERSION or document["kind"] != "AdmissionReview":
            raise BadDataError(
                f"{document['apiVersion']} {document['kind']}: only an {API_VERSION} AdmissionReview is read"
            )
        request = document["request"]
        kind = request["kind"]["kind"]
        if kind != "DLRMJob" or request.get("subResource"):
            raise BadDataError(f"kind {kind} {request.get('subResource') or ''}: only DLRMJobs themselves are reviewed")
        job, old = dict(request["object"]), request.get("oldObject")
        return Review(uid=str(request["uid"]), namespace=str(request.get("namespace") or ""), job=job, old=old)
    except (KeyError, TypeError, ValueError) as error:
        raise BadDataError(f"no AdmissionReview of a DLRMJob: {type(error).__name__} {error}") from error


def examine(review: Review, limits: OverlayLimits) -> Verdict | DLRMJob:
    """The verdict where the documents alone decide; else the job, for which a plan should exist."""
    old, spec = review.old or {}, review.job.get("spec")
    leaving = "deletionTimestamp" in (review.job.get("metadata") or {})
    if leaving or (review.old is not None and old.get("spec") == spec):
        return Verdict()
    meta = review.job.get("metadata")
    if isinstance(meta, dict):
        meta = {key: value for key, value in meta.items() if key in ("name", "namespace")}  # no more of it is read
    try:
        job = parse_served_job({**review.job, "metadata": meta, "status": None})
        refuse_widening(job.spec, review.namespace, limits)
    except InvalidSpecError as error:
        return Verdict(refusal=str(error))
    if review.old is not None and _planned(old.get("spec")) == _planned(spec):
        return Verdict()
    return job


def missing(profile: ProfileSeen, trace_problem: str, traces: Sequence[str]) -> tuple[str, ...]:
    """Warnings about what the spec refers to: it may come after the job, as manifests of one folder do.

    Args:
        profile: What the spec's HardwareProfile is.
        trace_problem: Why a trace can't be read.
        traces: References of all traces.
    """
    words = [f"{profile.problem}; the job waits for it"] if profile.problem else []
    if trace_problem and all(reference.startswith(CONFIG_MAP) for reference in traces):
        words += unplanned(_unusable(traces)).warnings
    elif trace_problem:
        words.append(f"{trace_problem}; the job waits for it")
    return tuple(words)


def conclude(planning: Planning, traces: Sequence[str]) -> Verdict:
    """The verdict that the planner's answer makes, of a job that refers to these traces."""
    if planning.final and planning.field.endswith(TRACE_FIELD):
        return unplanned(_unusable(traces))
    if planning.final:
        return Verdict(refusal=planning.problem)
    return unplanned(planning.problem) if planning.problem else Verdict()


def _unusable(traces: Sequence[str]) -> str:
    """The same words for ConfigMaps that are not there, hold no trace, or hold one of other tables.

    Whoever reaches the webhook may name any namespace, and is not to learn what there is.
    """
    return (
        f"a trace that tables refer to ({first_few(traces)}) is not there or can't be used: write it with dlrmctl "
        "trace --configmap NAME into the job's namespace"
    )


def unplanned(why: str) -> Verdict:
    """Admit what could not be judged: the operator plans it anyway, and its condition Planned says how that ends."""
    return Verdict(warnings=(f"not known yet whether a plan exists: {why}; see the job's condition Planned",))


def response(review: Review, verdict: Verdict) -> Object:
    """The ``AdmissionReview`` that answers."""
    found: Object = {"uid": review.uid, "allowed": not verdict.refusal}
    if verdict.refusal:
        found["status"] = {
            "code": INVALID,
            "reason": "Invalid",
            "message": shorten(verdict.refusal, REFUSAL_CHARACTERS),
        }
    if verdict.warnings:
        found["warnings"] = [_one_line(words) for words in verdict.warnings]
    return {"apiVersion": API_VERSION, "kind": "AdmissionReview", "response": found}


def _planned(spec: Any) -> Any:
    return {name: value for name, value in spec.items() if name not in UNPLANNED} if isinstance(spec, dict) else spec


def _one_line(words: str) -> str:
    """Warnings travel in an HTTP header."""
    line = " ".join(words.split())
    return line if len(line) <= WARNING_CHARACTERS else f"{line[: WARNING_CHARACTERS - 1]}…"
