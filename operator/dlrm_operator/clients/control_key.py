"""The operator's one secret: the key from which it derives the control token and the gang's secret of each attempt."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import secrets

from dlrm_api.names import FIELD_MANAGER, Label
from dlrm_operator.api_client import Api, ClusterRefusedError, ConflictError, NotFoundError, Object

NAME = "dlrm-operator-control-key"
FIELD = "key"
KEY_BYTES = 32


class ControlKey:
    """Tokens by which this operator, each replica of it and each later version asks gangs for cuts.

    A token is a function of the key, the job's uid and the attempt, so none is stored; pods are told its digest, which
    tells nobody the token. The key is a Secret of the operator's own namespace, made where there is none and read once.
    """

    def __init__(self, api: Api, namespace: str) -> None:
        self._api = api
        self._namespace = namespace
        self._key = b""
        self._reading = asyncio.Lock()

    async def token(self, uid: str, attempt: int) -> str:
        """The token of one attempt of the job with that uid, in hexadecimal digits.

        Raises:
            ClusterUnavailableError: the key could not be had, and may be later.
            ClusterRefusedError: the key's Secret may not be read or made, or holds no key; the message names it.
        """
        return await self._derived(f"{uid}/{attempt}")

    async def gang_secret(self, uid: str, attempt: int) -> str:
        """What the ranks of one attempt know each other by (``Env.GANG_SECRET``), in hexadecimal digits.

        Raises:
            ClusterUnavailableError, ClusterRefusedError: as ``token``.
        """
        return await self._derived(f"{uid}/{attempt}/gang")

    async def _derived(self, about: str) -> str:
        async with self._reading:
            if not self._key:
                self._key = await self._read()
        return hmac.digest(self._key, about.encode(), hashlib.sha256).hex()

    async def _read(self) -> bytes:
        secrets_of = f"/api/v1/namespaces/{self._namespace}/secrets"
        try:
            found = await self._api.call("GET", f"{secrets_of}/{NAME}")
        except NotFoundError:
            try:
                found = await self._api.call("POST", secrets_of, _fresh(), {"fieldManager": FIELD_MANAGER})
            except ConflictError:  # another replica was first
                found = await self._api.call("GET", f"{secrets_of}/{NAME}")
        try:
            key = base64.b64decode(found["data"][FIELD], validate=True)
        except (KeyError, TypeError, ValueError):
            key = b""
        if len(key) < KEY_BYTES:
            held = f"Secret {self._namespace}/{NAME} holds no {FIELD!r} of {KEY_BYTES} bytes"
            raise ClusterRefusedError(422, f"{held}: delete it, and a new one is made")
        return key


def _fresh() -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": NAME, "labels": {Label.MANAGED_BY: FIELD_MANAGER}},
        "type": "Opaque",
        "immutable": True,
        "data": {FIELD: base64.b64encode(secrets.token_bytes(KEY_BYTES)).decode()},
    }
