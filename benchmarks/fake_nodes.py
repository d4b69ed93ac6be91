"""A fresh control plane with kwok's nodes, whose pods run as soon as they are bound, and what happened on it."""

from __future__ import annotations

import asyncio
import functools
import json
import multiprocessing
import re
import tempfile
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from dlrm_api.names import Port
from dlrm_api.progress import CheckpointerProgress, Progress, TrainerPhase
from dlrm_cluster.build import binaries, module_folder
from dlrm_cluster.components import NODE_LABELS
from dlrm_cluster.control_plane import ControlPlane
from dlrm_cluster.ports import LOOPBACK
from dlrm_cluster.process import Server

WRITES = frozenset({"create", "update", "patch", "delete", "deletecollection"})
STAGES = ("node/fast/node-initialize.yaml", "pod/fast/pod-ready.yaml", "pod/fast/pod-delete.yaml")


class FakeNodes:
    """``ControlPlane`` and kwok; a context manager. Every pod's address is loopback, where one endpoint answers."""

    def __init__(self, nodes: int) -> None:
        self._nodes = nodes
        self._folder = tempfile.TemporaryDirectory(prefix="dlrm-scale-")
        self.work_dir = Path(self._folder.name)
        self.plane = ControlPlane(self.work_dir, audit=True)
        self._kwok: Server | None = None
        self._progress: BaseProcess | None = None

    def __enter__(self) -> FakeNodes:
        """Start everything, and wait for the nodes."""
        self._progress = multiprocessing.get_context("spawn").Process(target=_serve_progress, daemon=True)
        self._progress.start()
        self.plane.start()
        config = self.work_dir / "stages.yaml"
        config.write_text("---\n".join(_stages()))
        flags = ["--manage-all-nodes", "--node-lease-duration-seconds=0", f"--config={config}"]
        argv = [str(binaries("kwok") / "kwok"), f"--kubeconfig={self.plane.kubeconfig}", *flags]
        self._kwok = Server("kwok", argv, self.work_dir)
        self._kwok.start()
        for number in range(self._nodes):
            meta = {"name": f"fake-{number}", "labels": NODE_LABELS}
            node = {"apiVersion": "v1", "kind": "Node", "metadata": meta}
            self.plane.api.call("POST", "/api/v1/nodes", node)
        self._kwok.wait_until(self._nodes_ready)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop everything, and drop its files."""
        if self._kwok is not None:
            self._kwok.stop()
        self.plane.stop()
        if self._progress is not None:
            self._progress.kill()
            self._progress.join()
        self._folder.cleanup()

    def calls(self, agent: str) -> Iterator[dict[str, Any]]:
        """Return the requests of user agents that begin as this regular expression says, from the audit log."""
        wanted = re.compile(f'"userAgent":"(?:{agent})')
        with self.plane.audit_log.open() as lines:
            for line in lines:
                if wanted.search(line):
                    yield json.loads(line)

    def writes(self, agent: str) -> int:
        """Return how many of the calls were writes."""
        return sum(call["verb"] in WRITES for call in self.calls(agent))

    def cpu_s(self) -> dict[str, float]:
        """Processor time that each of the servers took by now."""
        assert self._kwok is not None, "it has not begun"
        servers = {**self.plane.servers, "kwok": self._kwok}
        times = {
            name: psutil.Process(found.pid).cpu_times()
            for name, server in servers.items()
            if (found := server.identity)
        }
        return {name: spent.user + spent.system for name, spent in times.items()}

    def _nodes_ready(self) -> bool:
        nodes = self.plane.api.call("GET", "/api/v1/nodes")["items"]
        ready = [c for node in nodes for c in node["status"].get("conditions", []) if c["type"] == "Ready"]
        return [condition["status"] for condition in ready] == ["True"] * self._nodes


def _stages() -> Iterator[str]:
    """Kwok's own stages, with another pod address."""
    folder = module_folder("kwok", "sigs.k8s.io/kwok") / "kustomize" / "stage"
    for name in STAGES:
        lines = (folder / name).read_text().splitlines()
        yield (
            "\n".join(f"      podIP: {LOOPBACK}" if line.strip().startswith("podIP:") else line for line in lines)
            + "\n"
        )


def _serve_progress() -> None:
    """Return the progress of pod 0 of every job: it trains."""
    trainer = Progress(attempt=1, phase=TrainerPhase.TRAINING, step=1, loss=0.5).model_dump_json()
    answers = {Port.TRAINER: trainer, Port.CHECKPOINTER: CheckpointerProgress().model_dump_json()}

    async def serve() -> None:
        for port, answer in answers.items():
            head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(answer)}\r\n\r\n"
            said = (head + answer).encode()
            loop = asyncio.get_running_loop()
            await loop.create_server(functools.partial(_Answer, said), LOOPBACK, port, backlog=512)
        await asyncio.Event().wait()

    asyncio.run(serve())


class _Answer(asyncio.Protocol):
    """Says the same to whatever is asked."""

    def __init__(self, said: bytes) -> None:
        self._said = said

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        assert isinstance(self._transport, asyncio.Transport)
        if data.endswith(b"\r\n\r\n"):
            self._transport.write(self._said)
