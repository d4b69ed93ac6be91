"""The key behind control tokens: one an operator, made once, and tokens that only its holder can tell."""

import asyncio
import base64
from typing import Any

import pytest

from dlrm_operator.api_client import ClusterRefusedError, ClusterUnavailableError, ConflictError, NotFoundError
from dlrm_operator.clients.checkpoint import KEY_OBJECT, ControlKey
from dlrm_testing.operator.memory_api import MemoryApi

SECRET = f"/api/v1/namespaces/operators/secrets/{KEY_OBJECT}"


def tokens(api: Any, *attempts: tuple[str, int]) -> list[str]:
    """Of one process, all asked for at once."""

    async def ask() -> list[str]:
        key = ControlKey(api, "operators")
        return await asyncio.gather(*(key.token(uid, attempt) for uid, attempt in attempts))

    return asyncio.run(ask())


def test_the_key_is_made_once_and_read_once() -> None:
    api = MemoryApi()

    tokens(api, ("uid", 1), ("uid", 2), ("other", 1))

    assert api.asked == [("GET", SECRET), ("POST", SECRET.rpartition("/")[0])]
    assert len(base64.b64decode(api.objects[SECRET]["data"]["key"])) == 32
    assert api.objects[SECRET]["immutable"]


def test_every_process_derives_the_same_token_and_each_attempt_of_each_job_has_its_own() -> None:
    api = MemoryApi()
    asked = [("uid", 1), ("uid", 2), ("uid", 12), ("uid1", 2)]

    first, second = tokens(api, *asked), tokens(api, *asked)

    assert first == second
    assert len(set(first)) == len(asked)


def test_a_gang_s_secret_is_derived_likewise_and_is_no_token() -> None:
    api, asked = MemoryApi(), [("uid", 1), ("uid", 2), ("uid", 12), ("uid1", 2)]

    async def secrets_of(key: ControlKey) -> list[str]:
        return [await key.gang_secret(uid, attempt) for uid, attempt in asked]

    first, second = (asyncio.run(secrets_of(ControlKey(api, "operators"))) for _ in range(2))

    assert first == second
    assert len({*first, *tokens(api, *asked)}) == 2 * len(asked)


def test_another_key_gives_other_tokens() -> None:
    assert tokens(MemoryApi(), ("uid", 1)) != tokens(MemoryApi(), ("uid", 1))


def test_of_two_replicas_that_make_the_key_at_once_both_use_the_one_that_was_stored() -> None:
    api = MemoryApi()
    stored = tokens(api, ("uid", 1))

    class SeesItLate:
        """Says that there is no key, until it is refused to make one."""

        refused = False

        async def call(self, method: str, path: str, *rest: Any) -> Any:
            if method == "GET" and not self.refused:
                raise NotFoundError(404, "there is none")
            try:
                return await api.call(method, path, *rest)
            except ConflictError:
                self.refused = True
                raise

    assert tokens(SeesItLate(), ("uid", 1)) == stored


def test_a_key_that_could_not_be_had_is_asked_for_again() -> None:
    api = MemoryApi()

    class SilentOnce:
        silent = True

        async def call(self, *asked: Any) -> Any:
            if self.silent:
                self.silent = False
                raise ClusterUnavailableError("no answer")
            return await api.call(*asked)

    async def ask() -> str:
        key = ControlKey(SilentOnce(), "operators")  # type: ignore[arg-type]
        with pytest.raises(ClusterUnavailableError):
            await key.token("uid", 1)
        return await key.token("uid", 1)

    assert [asyncio.run(ask())] == tokens(api, ("uid", 1))


@pytest.mark.parametrize(
    "data",
    [{}, {"data": None}, {"data": {"key": "not base64"}}, {"data": {"key": base64.b64encode(b"short").decode()}}],
)
def test_a_secret_that_holds_no_key_is_named_with_the_mend(data: dict[str, Any]) -> None:
    api = MemoryApi()
    api.put(SECRET, {"metadata": {"name": KEY_OBJECT}, **data})

    with pytest.raises(ClusterRefusedError, match=f"Secret operators/{KEY_OBJECT}, data.key"):
        tokens(api, ("uid", 1))
