"""How the webhook comes to its verdict in bounded time: what a spec refers to is read, and a plan is looked for."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from dlrm_api.job import DLRMJob
from dlrm_operator.api_client import ClusterRefusedError, ClusterUnavailableError
from dlrm_operator.clients.planner_process import PlannerProcess
from dlrm_operator.clients.references import References
from dlrm_operator.manifests.restrictions import RESTRICTED, OverlayLimits
from dlrm_operator.manifests.stores import passing_stores
from dlrm_operator.metrics import ADMISSION_SECONDS, ADMISSIONS
from dlrm_operator.reconcile.state import Planning, PlanQuestion
from dlrm_operator.webhook.review import Object, Verdict, conclude, examine, missing, read_review, response, unplanned
from dlrm_planner import trace_references

REMEMBERED = 256
"""Verdicts of the planner that are kept: jobs are often applied in many copies that differ in their names alone."""

Plan = Callable[[PlanQuestion, float], Awaitable[Planning]]


class Admission:
    """Answers reviews; has no effect beyond its answer, so that dry runs are answered like all others."""

    def __init__(
        self,
        references: References,
        deadline_s: float,
        plan: Plan | None = None,
        *,
        limits: OverlayLimits = RESTRICTED,
    ) -> None:
        self._references = references
        self._limits = limits
        self._deadline_s = deadline_s
        self._planner = PlannerProcess()
        self._plan = plan or self._planner.ask
        self._slot = asyncio.Semaphore(1)
        self._examining = asyncio.Semaphore(1)
        self._verdicts: OrderedDict[str, Verdict] = OrderedDict()

    async def stop(self) -> None:
        """End the planner's process."""
        await self._planner.end()

    async def answer(self, document: Any) -> Object:
        """The decoded answer to a decoded ``AdmissionReview``, within the deadline.

        Raises:
            BadDataError: this is no review of a DLRMJob.
        """
        with ADMISSION_SECONDS.time():
            review = read_review(document)
            async with self._examining:
                found = await asyncio.to_thread(
                    examine, review, self._limits
                )  # thousands of tables take most of a second
            verdict = await self._judged(review.namespace, found) if isinstance(found, DLRMJob) else found
        ADMISSIONS.labels("refused" if verdict.refusal else "warned" if verdict.warnings else "admitted").inc()
        return response(review, verdict)

    async def _judged(self, namespace: str, job: DLRMJob) -> Verdict:
        """The verdict, with what its user should know of where snapshots go."""
        verdict = await self._bounded(namespace, job)
        return replace(verdict, warnings=(*verdict.warnings, *passing_stores(job.spec)))

    async def _bounded(self, namespace: str, job: DLRMJob) -> Verdict:
        try:
            async with asyncio.timeout(self._deadline_s):
                return await self._judge(namespace, job)
        except TimeoutError:
            return unplanned(f"the planner was not done within {self._deadline_s:g} s")
        except (ClusterUnavailableError, ClusterRefusedError) as error:
            return unplanned(f"what the spec refers to could not be read: {error}")

    async def _judge(self, namespace: str, job: DLRMJob) -> Verdict:
        profile = await self._references.profile(job.spec)
        traces, trace_problem = await self._references.traces(namespace, job.spec)
        if warnings := missing(profile, trace_problem, list(trace_references(job.spec))):
            return Verdict(warnings=warnings)
        question = PlanQuestion(
            uid="", generation=0, profile_version=profile.version, job=job, profile=profile.profile, traces=traces
        )
        return await self._planned(question)

    async def _planned(self, question: PlanQuestion) -> Verdict:
        digest = await asyncio.to_thread(_digest, question)
        async with self._slot:  # whoever waits for a like question finds its answer here
            if digest in self._verdicts:
                self._verdicts.move_to_end(digest)
                return self._verdicts[digest]
            planning = await self._plan(question, self._deadline_s)
            verdict = conclude(planning, list(question.traces))
            if planning.final or not planning.problem:
                self._verdicts[digest] = verdict
                if len(self._verdicts) > REMEMBERED:
                    self._verdicts.popitem(last=False)
            return verdict


def _digest(question: PlanQuestion) -> str:
    """Equal for questions whose answers are: the job's name is no part of it."""
    spec = question.job.spec.model_dump(mode="json", exclude_unset=True)
    profile = question.profile.spec.model_dump(mode="json", exclude_unset=True) if question.profile else None
    text = json.dumps([spec, profile, dict(question.traces)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
