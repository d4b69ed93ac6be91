"""Bytes that go to an S3 server from a process that only sends: what the server, and a link to it, cost alone."""

from __future__ import annotations

import http.client
import multiprocessing
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from urllib.parse import urlsplit

import numpy as np
import psutil
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from benchmarks.loopback import Service


@dataclass(frozen=True)
class Request:
    """One object that is put, signed ahead of its time."""

    path: str
    headers: dict[str, str]
    size: int


class Carrier:
    """Puts as many objects as a snapshot has, of the same sizes, one after another; implements ``uploading.Saving``.

    The server checks the SHA-256 of each, as it does for a checkpointer.

    Args:
        service: the server.
        endpoint: where it is reached.
        sizes: bytes of each object.
    """

    def __init__(self, service: Service, endpoint: str, sizes: Sequence[int]) -> None:
        self._service, self._endpoint, self._sizes = service, endpoint, sizes
        self._body = np.random.default_rng(0).bytes(max(sizes))
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_run, args=(theirs, endpoint, self._body), daemon=True)
        self._process.start()
        self._pipe.recv()  # it has started
        self._requests: list[Request] = []
        self._carried = False
        self.prepare()

    def prepare(self) -> None:
        """Sign the next requests, which ``begin`` has sent: signing is no part of what is measured."""
        self._requests = [self._signed(number, size) for number, size in enumerate(self._sizes)]

    def begin(self) -> None:
        """Have all of it sent."""
        self._carried = False
        self._pipe.send(self._requests)

    def durable(self) -> bool:
        """Return whether the server has everything."""
        if not self._carried and self._pipe.poll():
            answer = self._pipe.recv()
            if answer:
                raise RuntimeError(f"the server refused an object: {answer}")
            self._carried = True
        return self._carried

    @property
    def cpu_s(self) -> float:
        """Return the CPU seconds of the sending process since its start."""
        times = psutil.Process(self._process.pid).cpu_times()
        return float(times.user + times.system)

    def close(self) -> None:
        """End the process that sends."""
        self._process.kill()
        self._process.join()

    def _signed(self, number: int, size: int) -> Request:
        service, path = self._service, f"/{self._service.bucket}/carried/{number:06d}"
        request = AWSRequest("PUT", self._endpoint + path, data=self._body[:size])
        keys = Credentials(service.access_key, service.secret_key)
        S3SigV4Auth(keys, "s3", service.region).add_auth(request)
        return Request(path, dict(request.headers.items()), size)


def _run(pipe: Connection, endpoint: str, body: bytes) -> None:
    there = http.client.HTTPConnection(str(urlsplit(endpoint).hostname), urlsplit(endpoint).port)
    pipe.send("started")
    while True:
        refused = ""
        for request in pipe.recv():
            there.request("PUT", request.path, memoryview(body)[: request.size], request.headers)
            answer = there.getresponse()
            said = answer.read()
            if answer.status != 200:
                refused = f"{answer.status}: {said!r}"
        pipe.send(refused)
