"""Cuts asked of running gangs: ``POST /cut`` to pod 0, beside the turns; a later turn sees the answer."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable

import aiohttp

from dlrm_api.names import TOKEN_HEADER, Path, Port
from dlrm_api.progress import CutWord
from dlrm_operator.actions import RequestCut
from dlrm_operator.cluster import Api
from dlrm_operator.cluster_errors import ClusterRefusedError, ClusterUnavailableError
from dlrm_operator.conditions import shorten
from dlrm_operator.observed import CutAnswer, CutQuestion, JobKey

AGAIN_S = 5.0
"""A cut that could not be had is asked for again after this."""
TIMEOUT_S = 15.0
"""A trainer answers within 5 s, or with the first step that the cut can have."""
PROBLEM_LENGTH = 300
MOST_BYTES = 4_096


class CutRefusedError(Exception):
    """Pod 0 gave no cut; the message says why."""


class Cutter:
    """Requests by job; one answer a job is kept. The attempt's token is read for each request and never kept."""

    def __init__(self, api: Api, wake: Callable[[JobKey], None]) -> None:
        self._api = api
        self._wake = wake
        self._answers: dict[JobKey, CutAnswer] = {}
        self._running: dict[JobKey, tuple[CutQuestion, asyncio.Task[None]]] = {}

    def answer(self, key: JobKey) -> CutAnswer | None:
        """The newest answer; a refusal is forgotten after a moment, so that the cut is asked for again."""
        return self._answers.get(key)

    def request(self, action: RequestCut) -> None:
        """Ask, unless this very question is at work already."""
        running = self._running.get(action.key)
        if running is not None:
            if running[0] == action.question:
                return
            running[1].cancel()
        self._running[action.key] = action.question, asyncio.create_task(self._run(action))

    def forget(self, key: JobKey) -> None:
        """The job is gone."""
        self._answers.pop(key, None)
        running = self._running.pop(key, None)
        if running is not None:
            running[1].cancel()

    def stop(self) -> None:
        """Cut off what runs; whoever comes next asks again."""
        for key in list(self._running):
            self.forget(key)

    async def _run(self, action: RequestCut) -> None:
        key, question = action.key, action.question
        try:
            answer = CutAnswer(question=question, step=await self._ask(action))
        except CutRefusedError as error:
            answer = CutAnswer(question=question, problem=shorten(str(error), PROBLEM_LENGTH))
        self._answers[key] = answer
        if self._running.get(key, (None,))[0] == question:
            del self._running[key]
        self._wake(key)
        if answer.step is None:
            asyncio.get_running_loop().call_later(AGAIN_S, self._drop, key, answer)

    def _drop(self, key: JobKey, answer: CutAnswer) -> None:
        if self._answers.get(key) == answer:
            del self._answers[key]
            self._wake(key)

    async def _ask(self, action: RequestCut) -> int:
        """The step of the cut, or the first that it can have."""
        host = f"[{action.ip}]" if ":" in action.ip else action.ip
        url, asked = f"http://{host}:{Port.TRAINER}/cut", {"reason": action.reason}
        headers = {TOKEN_HEADER: await self._token(action)}
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.post(url, json=asked, headers=headers, allow_redirects=False) as response,
            ):
                body = (await response.content.read(MOST_BYTES)).decode(errors="replace")
                if response.status not in (200, 202):
                    raise CutRefusedError(f"pod 0 answered {response.status}: {body}")
        except TimeoutError as error:
            raise CutRefusedError(f"pod 0 did not answer within {TIMEOUT_S:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise CutRefusedError(f"pod 0 did not answer: {error}") from error
        return _step(body)

    async def _token(self, action: RequestCut) -> str:
        path = f"/api/v1/namespaces/{action.key.namespace}/secrets/{action.secret}"
        try:
            found = await self._api.call("GET", path)
            token = base64.b64decode(found["data"][Path.TOKEN.rpartition("/")[2]]).decode().strip()
        except (ClusterUnavailableError, ClusterRefusedError) as error:
            raise CutRefusedError(f"Secret {action.secret}: {error}") from error
        except (KeyError, ValueError):
            token = ""
        if not (token and token.isascii() and token.isprintable()):
            raise CutRefusedError(f"Secret {action.secret} holds no token")
        return token


def _step(body: str) -> int:
    try:
        step = CutWord.model_validate_json(body).step
    except ValueError as error:
        raise CutRefusedError(f"pod 0 answered without a step: {body}") from error
    return step
