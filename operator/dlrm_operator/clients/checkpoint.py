"""``POST /cut`` to pod 0, and the key from which control tokens and gang secrets are derived."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import secrets
from collections.abc import Callable

from dlrm_api.names import FIELD_MANAGER, TOKEN_HEADER, Label, Port
from dlrm_api.progress import CutResponse
from dlrm_operator.api_client import API_ERRORS, Api, ClusterRefusedError, ConflictError, NotFoundError, Object
from dlrm_operator.clients.pod_requests import POD_ERRORS, PendingRequests, pod_session, pod_url, read_body
from dlrm_operator.reconcile.findings import shorten
from dlrm_operator.reconcile.state import CutAnswer, CutQuestion, JobKey, RequestCut

KEY_OBJECT = "dlrm-operator-control-key"
KEY_FIELD = "key"
KEY_BYTES = 32
RETRY_INTERVAL_S = 5.0
# A trainer answers within 5 s, if only with the first step that the cut can have.
TIMEOUT_S = 15.0
MAX_PROBLEM_CHARACTERS = 300
MAX_ANSWER_BYTES = 4_096


class ControlKey:
    """Derive the control token and the gang secret of each attempt from one key.

    A token is a function of the key, the job's uid and the attempt, so every replica and every later version derives
    the same one and none is stored. Pods get its digest only. The key is a Secret in the operator's namespace, created
    if absent and read once.
    """

    def __init__(self, api: Api, namespace: str) -> None:
        self._api, self._namespace = api, namespace
        self._key = b""
        self._reading = asyncio.Lock()

    async def token(self, uid: str, attempt: int) -> str:
        """Return the control token of one attempt of the job with that uid, in hexadecimal digits.

        Raises:
            ClusterUnavailableError: the key cannot be read now; repeat the call later.
            ClusterRefusedError: the Secret may not be read or created, or holds no key; the message names it.
        """
        return await self._derive(f"{uid}/{attempt}")

    async def gang_secret(self, uid: str, attempt: int) -> str:
        """Return the secret that the ranks of one attempt share. Raises like :meth:`token`."""
        return await self._derive(f"{uid}/{attempt}/gang")

    async def _derive(self, about: str) -> str:
        async with self._reading:
            if not self._key:
                self._key = await self._read()
        return hmac.digest(self._key, about.encode(), hashlib.sha256).hex()

    async def _read(self) -> bytes:
        path = f"/api/v1/namespaces/{self._namespace}/secrets"
        try:
            found = await self._api.call("GET", f"{path}/{KEY_OBJECT}")
        except NotFoundError:
            try:
                found = await self._api.call("POST", path, _new_secret(), {"fieldManager": FIELD_MANAGER})
            except ConflictError:
                # Another replica has created it since.
                found = await self._api.call("GET", f"{path}/{KEY_OBJECT}")
        try:
            key = base64.b64decode(found["data"][KEY_FIELD], validate=True)
        except (KeyError, TypeError, ValueError):
            key = b""
        if len(key) < KEY_BYTES:
            where = f"Secret {self._namespace}/{KEY_OBJECT}, data.{KEY_FIELD}"
            problem = f"invalid {where}: expected {KEY_BYTES} bytes in base64, got {len(key)}; delete the Secret"
            raise ClusterRefusedError(422, problem)
        return key


class CheckpointClient(PendingRequests[CutQuestion, CutAnswer]):
    """Request cuts. After ``RETRY_INTERVAL_S`` a failure is dropped, so that a reconcile asks again."""

    def __init__(self, control_key: ControlKey, wake: Callable[[JobKey], None]) -> None:
        super().__init__(wake, keep_s=lambda answer: RETRY_INTERVAL_S if answer.step is None else None)
        self._control_key = control_key

    def request(self, action: RequestCut) -> None:
        """Request the cut unless the same request is running."""
        self.ask(action.key, action.question, lambda: self._answer(action))

    async def _answer(self, action: RequestCut) -> CutAnswer:
        try:
            return CutAnswer(question=action.question, step=await self._cut(action))
        except _NoCutError as error:
            return CutAnswer(question=action.question, problem=shorten(str(error), MAX_PROBLEM_CHARACTERS))

    async def _cut(self, action: RequestCut) -> int:
        """Return the step of the cut, or the first that it can have."""
        try:
            headers = {TOKEN_HEADER: await self._control_key.token(action.uid, action.attempt)}
        except API_ERRORS as error:
            raise _NoCutError(f"failed to read the control key: {error}") from error
        url, body = pod_url(action.ip, Port.TRAINER, "/cut"), {"reason": action.reason}
        try:
            async with (
                pod_session(TIMEOUT_S) as session,
                # A redirect would send the token to an address that the pod chose.
                session.post(url, json=body, headers=headers, allow_redirects=False) as response,
            ):
                answer = (await read_body(response, MAX_ANSWER_BYTES)).decode(errors="replace")
        except TimeoutError as error:
            raise _NoCutError(f"pod 0 did not answer within {TIMEOUT_S:g} s") from error
        except POD_ERRORS as error:
            raise _NoCutError(f"pod 0 did not answer: {error}") from error
        if response.status not in (200, 202):
            raise _NoCutError(f"pod 0 answered {response.status}: {answer}")
        try:
            return CutResponse.model_validate_json(answer).step
        except ValueError as error:
            raise _NoCutError(f"pod 0 answered without a step: {answer}") from error


class _NoCutError(Exception):
    pass


def _new_secret() -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": KEY_OBJECT, "labels": {Label.MANAGED_BY: FIELD_MANAGER}},
        "type": "Opaque",
        "immutable": True,
        "data": {KEY_FIELD: base64.b64encode(secrets.token_bytes(KEY_BYTES)).decode()},
    }
