"""An S3 server on this machine, and stores in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.measure import tell
from dlrm_api.fields import S3Spec
from dlrm_stores import ObjectStore, StoreOptions, open_store

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client


@dataclass(frozen=True, kw_only=True)
class Service:
    """Describe an S3 service."""

    endpoint: str
    access_key: str
    secret_key: str
    region: str
    bucket: str
    keys: Path
    """Folder with the two keys, as a mounted Secret has them."""
    process: int
    """Its number."""

    def store(self, prefix: str = "", endpoint: str = "") -> ObjectStore:
        """Keys below a prefix of the bucket, reached at another place than the service's own where one is given."""
        options = StoreOptions(s3=S3Spec(endpoint=endpoint or self.endpoint), credentials_dir=self.keys)
        return open_store(f"s3://{self.bucket}/{prefix}".rstrip("/"), options)

    def client(self, connections: int) -> S3Client:
        """boto3's, as it comes but for the size of its pool."""
        import boto3
        from botocore.config import Config

        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            region_name=self.region,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            config=Config(max_pool_connections=connections),
        )


@contextmanager
def served(root: Path, bucket: str) -> Iterator[Service | None]:
    """Yield a server with an empty bucket, or None with a message if there is none."""
    try:
        from dlrm_cluster.errors import ClusterError
        from dlrm_cluster.process import ProcessId
        from dlrm_cluster.s3 import VersityGateway
    except ModuleNotFoundError:
        tell("NOT MEASURED: s3: run with hack/cluster on PYTHONPATH")
        yield None
        return
    server = VersityGateway(root / "server")
    try:
        server.root.mkdir()
        server.start()
    except ClusterError as error:
        tell(f"NOT MEASURED: s3: {error}")
        yield None
        return
    keys = root / "keys"
    keys.mkdir()
    (keys / "accessKeyId").write_text(server.access_key)
    (keys / "secretAccessKey").write_text(server.secret_key)
    (server.data / bucket).mkdir(parents=True, exist_ok=True)
    with server:
        identity = ProcessId.read(server.root / f"{server.name}.pid")
        assert identity is not None, "it runs"
        yield Service(
            endpoint=server.endpoint,
            access_key=server.access_key,
            secret_key=server.secret_key,
            region=server.region,
            bucket=bucket,
            keys=keys,
            process=identity.pid,
        )
