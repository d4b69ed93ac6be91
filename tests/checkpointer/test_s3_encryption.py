"""Every write asks for the encryption that the job names, whatever way it goes up."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import boto3
import pytest
from moto import mock_aws

from dlrm_api.objects import SnapshotS3Spec
from dlrm_checkpointer.attempts import claim_attempt
from dlrm_checkpointer.store import ObjectStore, StoreOptions, open_store

LARGE = bytes(20 << 20)


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A client of a made-up S3 that has a bucket."""
    for name, value in {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}.items():
        monkeypatch.setenv(name, value)
    with mock_aws():
        client = boto3.client("s3", region_name="us-east-1")
        client.create_bucket(Bucket="bucket")
        yield client


def opened(**encryption: str) -> ObjectStore:
    return open_store("s3://bucket/job", StoreOptions(s3=SnapshotS3Spec.model_validate(encryption)))


def write_all_ways(store: ObjectStore) -> list[str]:
    """A whole object, one in parts, one on condition, and what a claim of an attempt writes."""
    store.put("whole", b"1")
    store.put("parts", LARGE)
    assert store.put_if_absent("new", b"2")
    claim_attempt(store, None, "")
    return [info.key for info in store.list("")]


@pytest.mark.parametrize(
    ("encryption", "found"),
    [
        ({"encryption": "AES256"}, ("AES256", None)),
        ({"encryption": "aws:kms"}, ("aws:kms", None)),
        ({"encryption": "aws:kms", "kmsKeyId": "alias/snapshots"}, ("aws:kms", "alias/snapshots")),
    ],
)
def test_every_write_names_the_encryption(service: Any, encryption: dict[str, str], found: tuple[str, str | None]):
    store = opened(**encryption)

    keys = write_all_ways(store)

    heads = [service.head_object(Bucket="bucket", Key=f"job/{key}") for key in keys]
    assert len(keys) == 4
    assert {(head.get("ServerSideEncryption"), head.get("SSEKMSKeyId")) for head in heads} == {found}
    assert (store.get("whole"), store.get("parts"), store.get("new")) == (b"1", LARGE, b"2")


def test_without_encryption_no_write_names_any(service: Any):
    asked: list[str] = []

    def look(model: Any, params: dict[str, Any], **_: Any) -> None:
        asked.extend(name for name in params["headers"] if "server-side-encryption" in name.lower())

    store = opened()
    store._clients.current().meta.events.register("before-call.s3", look)  # the one way to see headers of a mocked call

    write_all_ways(store)

    assert asked == []
