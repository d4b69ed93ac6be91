"""In-memory API server for one job that counts requests."""

import copy
import itertools
import math
from collections.abc import Mapping
from typing import Any

from dlrm_operator.api_client import JSON, AlreadyExistsError, ConflictError, NotFoundError, ServerClock

Object = dict[str, Any]


class MemoryApi:
    """Store objects by path. Refuse a stale resource version and a POST of an existing object."""

    def __init__(self) -> None:
        self.objects: dict[str, Object] = {}
        self.asked: list[tuple[str, str]] = []
        self.clock = ServerClock()
        self._versions = itertools.count(1)

    def put(self, path: str, document: Object) -> Object:
        """Store an object and return it with its metadata."""
        meta = {"uid": path, "generation": 1, **document["metadata"], "resourceVersion": str(next(self._versions))}
        self.objects[path] = {**copy.deepcopy(document), "metadata": meta}
        return copy.deepcopy(self.objects[path])

    async def call(
        self,
        method: str,
        path: str,
        body: Object | None = None,
        query: Mapping[str, str] | None = None,
        accept: str = JSON,
        done_by: float = math.inf,
    ) -> Object:
        self.asked.append((method, path))
        if method == "POST":
            assert body is not None
            path = f"{path}/{body['metadata']['name']}"
            if path in self.objects:
                raise AlreadyExistsError(409, "it exists")
            return self.put(path, body)
        if method == "PUT" and path.endswith("/status"):
            return self._status(path.removesuffix("/status"), body or {})
        if path not in self.objects:
            raise NotFoundError(404, "there is none")
        if method == "PUT":
            return self._update(path, body or {})
        return copy.deepcopy(self.objects[path])

    async def list_all(self, path: str, query: Mapping[str, str], accept: str = JSON) -> tuple[list[Object], str]:
        self.asked.append(("LIST", path))
        found = [copy.deepcopy(item) for place, item in self.objects.items() if place.rpartition("/")[0] == path]
        return found, "1"

    def _update(self, path: str, body: Object) -> Object:
        if self.objects[path]["metadata"]["resourceVersion"] != body["metadata"]["resourceVersion"]:
            raise ConflictError(409, "the object has been modified")
        return self.put(path, body)

    def _status(self, path: str, body: Object) -> Object:
        if path not in self.objects:
            raise NotFoundError(404, "there is none")
        if self.objects[path]["metadata"]["resourceVersion"] != body["metadata"]["resourceVersion"]:
            raise ConflictError(409, "the object has been modified")
        return self.put(path, {**self.objects[path], "status": body["status"]})
