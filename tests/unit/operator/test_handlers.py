"""Check that listing jobs catches up with what kopf's watch did not show."""

import asyncio
from typing import Any, cast

from dlrm_operator.controller.handlers import Engine
from dlrm_operator.settings import Settings
from dlrm_testing.operator.memory_api import MemoryApi
from dlrm_testing.operator.operator_cluster import job_document

JOBS = "/apis/dlrm.dev/v1alpha1/namespaces/space/dlrmjobs"
ENDED = {"phase": "Failed", "attempt": 1, "gangAttempt": 1, "completionTime": "2026-01-01T00:00:00Z"}


class Asked:
    """An engine of one namespace, the jobs that the server has, and what was woken."""

    def __init__(self, *names: str) -> None:
        self.api = MemoryApi()
        for name in names:
            self.api.put(f"{JOBS}/{name}", self.document(name))
        api = cast("Any", self.api)
        self.engine = Engine(Settings(namespace="space"), api, api)
        self.woken: list[str] = []
        self.engine.queue.add = lambda key: self.woken.append(key.name)  # type: ignore[method-assign]

    def document(self, name: str) -> dict[str, Any]:
        document = job_document(name)
        return {**document, "metadata": {"name": name, "namespace": "space"}, "status": ENDED}

    def known(self) -> set[str]:
        return {key.name for key in self.engine.jobs.known()}

    def ask(self) -> None:
        asyncio.run(self.engine.list_jobs())


def test_unseen_deletion_of_a_finished_job_is_found_by_the_list() -> None:
    asked = Asked("there", "gone")
    for path, document in list(asked.api.objects.items()):
        asked.engine.jobs.saw(document)
        if path.endswith("gone"):
            del asked.api.objects[path]

    asked.ask()

    assert asked.known() == {"there"}
    assert sorted(asked.woken) == ["gone", "there"]


def test_a_job_that_is_created_while_the_list_is_read_stays_known() -> None:
    asked = Asked("there")
    list_all = asked.api.list_all

    async def read(*args: Any) -> tuple[list[dict[str, Any]], str]:
        found = await list_all(*args)
        asked.engine.jobs.saw(asked.api.put(f"{JOBS}/new", asked.document("new")))
        return found

    asked.api.list_all = read  # type: ignore[method-assign,assignment]

    asked.ask()

    assert "new" in asked.known()
