"""An S3 server in the cluster, whose objects outlive its pod."""

from __future__ import annotations

import contextlib
from pathlib import Path

import boto3
from botocore.exceptions import BotoCoreError

from dlrm_checkpointer.read.restore import newest_snapshot
from dlrm_cluster.real_cluster import Object, RealCluster
from dlrm_stores.file import FileStore
from dlrm_testing.digests import snapshot_digest

KEYS = ("quickstart-key", "quickstart-secret")
IMAGE, PORT, REGION, BUCKET = "dlrm.local/versitygw:1", 7070, "us-east-1", "snapshots"
START_S = 300.0


class ClusterS3:
    """Reached as ``http://s3.default.svc:7070`` by pods, and by ``url`` from this machine."""

    def __init__(self, cluster: RealCluster, folder: Path) -> None:
        self._cluster, self._folder = cluster, folder
        self.url = ""

    def start(self) -> None:
        """Create the Service, the keys' Secret and the pod; returns when the bucket is there."""
        meta = {"namespace": "default", "name": "s3"}
        service = {"selector": {"app": "s3"}, "ports": [{"port": PORT}]}
        keys = {"accessKeyId": KEYS[0], "secretAccessKey": KEYS[1]}
        self._cluster.apply(
            {"apiVersion": "v1", "kind": "Service", "metadata": meta, "spec": service},
            {"apiVersion": "v1", "kind": "Secret", "metadata": meta | {"name": "s3-keys"}, "stringData": keys},
            self._pod(),
        )
        address = self._cluster.eventually(self._address, START_S, "the S3 pod runs")
        self.url = f"http://{address}:{PORT}"
        self._cluster.eventually(self._has_bucket, START_S, "the S3 server answers")

    def stop(self) -> None:
        """Take the pod away; its objects stay."""
        self._cluster.kubectl("delete", "pod", "s3", "--namespace=default", "--grace-period=1", "--wait")

    def digest(self, job: str) -> str:
        """Return the digest of the state in a job's newest snapshot."""
        snapshot, _ = newest_snapshot(FileStore(self._folder / "data" / BUCKET / job))
        assert snapshot is not None, f"{job} has no snapshot"
        return snapshot_digest(snapshot)

    def _pod(self) -> Object:
        command = ["/bin/versitygw", "--access", KEYS[0], "--secret", KEYS[1], "--port", f":{PORT}"]
        container = {
            "name": "s3",
            "image": IMAGE,
            "command": [*command, "--region", REGION, "posix", "--sidecar", "/store/metadata", "/store/data"],
            "volumeMounts": [{"name": "store", "mountPath": "/store"}],
        }
        meta = {"namespace": "default", "name": "s3", "labels": {"app": "s3"}}
        volume = {"name": "store", "hostPath": {"path": str(self._folder)}}
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": meta,
            "spec": {"containers": [container], "volumes": [volume]},
        }

    def _address(self) -> str:
        status = self._cluster.get("pod", "s3", "--namespace=default")["status"]
        address: str = status.get("podIP", "") if status["phase"] == "Running" else ""
        return address

    def _has_bucket(self) -> bool:
        client = boto3.client(
            "s3", endpoint_url=self.url, region_name=REGION, aws_access_key_id=KEYS[0], aws_secret_access_key=KEYS[1]
        )
        with contextlib.suppress(BotoCoreError):  # the server needs a moment to listen
            if BUCKET not in {bucket["Name"] for bucket in client.list_buckets()["Buckets"]}:
                client.create_bucket(Bucket=BUCKET)
            return True
        return False
