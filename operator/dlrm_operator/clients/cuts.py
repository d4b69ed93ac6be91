"""Cuts asked of running gangs: ``POST /cut`` to pod 0, beside the turns; a later turn sees the answer."""

from __future__ import annotations

from collections.abc import Callable

import aiohttp

from dlrm_api.names import TOKEN_HEADER, Port
from dlrm_api.progress import CutResponse
from dlrm_operator.api_client import ClusterRefusedError, ClusterUnavailableError
from dlrm_operator.clients.addresses import pod_url
from dlrm_operator.clients.control_key import ControlKey
from dlrm_operator.clients.questions import Questions
from dlrm_operator.reconcile.findings import shorten
from dlrm_operator.reconcile.state import CutAnswer, CutQuestion, JobKey, RequestCut

AGAIN_S = 5.0
"""A cut that could not be had is asked for again after this."""
TIMEOUT_S = 15.0
"""A trainer answers within 5 s, or with the first step that the cut can have."""
PROBLEM_LENGTH = 300
MOST_BYTES = 4_096


class CutRefusedError(Exception):
    """Pod 0 gave no cut; the message says why."""


class Cutter(Questions[CutQuestion, CutAnswer]):
    """Asks for cuts; a refusal is forgotten after a moment, so that the cut is asked for again."""

    def __init__(self, control_key: ControlKey, wake: Callable[[JobKey], None]) -> None:
        super().__init__(wake, keep_s=lambda answer: AGAIN_S if answer.step is None else None)
        self._control_key = control_key

    def request(self, action: RequestCut) -> None:
        """Ask, unless this very question is at work already."""
        self.ask(action.key, action.question, lambda: self._answer(action))

    async def _answer(self, action: RequestCut) -> CutAnswer:
        try:
            return CutAnswer(question=action.question, step=await self._step(action))
        except CutRefusedError as error:
            return CutAnswer(question=action.question, problem=shorten(str(error), PROBLEM_LENGTH))

    async def _step(self, action: RequestCut) -> int:
        """The step of the cut, or the first that it can have."""
        url, asked = pod_url(action.ip, Port.TRAINER, "/cut"), {"reason": action.reason}
        try:
            headers = {TOKEN_HEADER: await self._control_key.token(action.uid, action.attempt)}
        except (ClusterUnavailableError, ClusterRefusedError) as error:
            raise CutRefusedError(f"the control key could not be had: {error}") from error
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout, auto_decompress=False) as session,
                session.post(url, json=asked, headers=headers, allow_redirects=False) as response,
            ):
                body = (await response.content.read(MOST_BYTES)).decode(errors="replace")
                if response.status not in (200, 202):
                    raise CutRefusedError(f"pod 0 answered {response.status}: {body}")
        except TimeoutError as error:
            raise CutRefusedError(f"pod 0 did not answer within {TIMEOUT_S:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise CutRefusedError(f"pod 0 did not answer: {error}") from error
        return _read_step(body)


def _read_step(body: str) -> int:
    try:
        step = CutResponse.model_validate_json(body).step
    except ValueError as error:
        raise CutRefusedError(f"pod 0 answered without a step: {body}") from error
    return step
