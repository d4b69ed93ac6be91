"""Credentials that a machine's or a pod's service hands out late, not at all, or not any more."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from botocore.utils import ContainerMetadataFetcher

from dlrm_api.errors import InvalidSpecError, NoPermissionError, StoreUnavailableError
from dlrm_api.fields import S3Spec
from dlrm_api.names import ExitCode
from dlrm_stores import ObjectStore, StoreOptions, open_store, s3
from dlrm_stores.s3_client import MAX_ATTEMPTS
from dlrm_testing.checkpointer.loopback_http import served

ROLE = "/latest/meta-data/iam/security-credentials/"
POD = "/v1/credentials"
NOTHING_THERE = b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>"


class Machine:
    """Serve the metadata of a machine and of its pods, and an S3 service with an empty bucket."""

    def __init__(self) -> None:
        self.refusals_left = 0
        self.late_s = 0.0
        """Delay of the next answer."""
        self.expires_in = timedelta(hours=6)
        self.asked: list[str] = []

    def answer(self, path: str) -> tuple[int, bytes]:
        if path not in (ROLE, ROLE + "trainer", POD):
            return 200, NOTHING_THERE
        self.asked.append(path)
        late_s, self.late_s = self.late_s, 0.0
        time.sleep(late_s)
        if self.refusals_left:
            self.refusals_left -= 1
            return 503, b""
        if path == ROLE:
            return 200, b"trainer"
        expiration = f"{datetime.now(UTC) + self.expires_in:%Y-%m-%dT%H:%M:%SZ}"
        return 200, json.dumps(
            {"AccessKeyId": "a", "SecretAccessKey": "b", "Token": "c", "Expiration": expiration}
        ).encode()


class Handler(BaseHTTPRequestHandler):
    """Serve all services of a machine."""

    machine: Machine

    def do_PUT(self) -> None:
        self.send(200, b"token")

    def do_GET(self) -> None:
        self.send(*self.machine.answer(self.path.partition("?")[0]))

    def send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def machine() -> Machine:
    return Machine()


@pytest.fixture
def endpoint(machine: Machine) -> Iterator[str]:
    with served(Handler, machine=machine) as address:
        yield address


@pytest.fixture
def told() -> list[str]:
    """Reasons of retries."""
    return []


@pytest.fixture
def store(endpoint: str, told: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    """A store on a machine with a role and no other identity."""
    for name in [each for each in os.environ if each.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", endpoint)
    monkeypatch.setattr(s3, "MAX_BACKOFF_S", 0.001)
    return open_store("s3://bucket/job", StoreOptions(s3=S3Spec(endpoint=endpoint), on_retry=told.append))


@pytest.fixture
def of_a_pod(store: ObjectStore, endpoint: str, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    """A store in a pod with an identity."""
    monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", endpoint + POD)
    monkeypatch.setattr(ContainerMetadataFetcher, "SLEEP_TIME", 0)
    monkeypatch.setattr(ContainerMetadataFetcher, "RETRY_ATTEMPTS", 1)
    return store


def test_credentials_of_a_machine_that_come_late_are_waited_for(store: ObjectStore, machine: Machine, told: list[str]):
    machine.refusals_left = 3

    assert list(store.list("")) == []
    assert told == ["credentials"] * 3


@pytest.mark.slow
def test_a_metadata_service_that_takes_longer_than_botocore_waits_is_heard(
    store: ObjectStore, machine: Machine, told: list[str]
):
    machine.late_s = 1.1

    assert list(store.list("")) == []
    assert told == []


def test_missing_credentials_are_reported_after_bounded_attempts(store: ObjectStore, machine: Machine):
    machine.refusals_left = 10**9

    with pytest.raises(NoPermissionError, match=r"bucket bucket .*spec\.checkpoint") as caught:
        store.get("x")

    assert caught.value.exit_code == ExitCode.NO_PERMISSION
    assert len(machine.asked) == MAX_ATTEMPTS


def test_credentials_that_arrive_later_are_used_by_the_next_call(store: ObjectStore, machine: Machine):
    machine.refusals_left = MAX_ATTEMPTS
    with pytest.raises(NoPermissionError):
        store.get("x")

    assert list(store.list("")) == []


def test_credentials_that_were_found_are_not_asked_for_at_each_call(store: ObjectStore, machine: Machine):
    for _ in range(3):
        assert list(store.list("")) == []

    assert machine.asked == [ROLE, ROLE + "trainer"]


def test_missing_credentials_fail_at_once_without_a_metadata_service(
    store: ObjectStore, machine: Machine, told: list[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")

    with pytest.raises(NoPermissionError, match="bucket bucket"):
        store.get("x")

    assert (told, machine.asked) == ([], [])


def test_credentials_of_a_pod_that_come_late_are_waited_for(of_a_pod: ObjectStore, machine: Machine, told: list[str]):
    machine.refusals_left = 3

    assert list(of_a_pod.list("")) == []
    assert told == ["credentials"] * 3


def test_pod_with_an_identity_may_retry_without_credentials(of_a_pod: ObjectStore, machine: Machine):
    machine.refusals_left = MAX_ATTEMPTS

    with pytest.raises(StoreUnavailableError, match=r"credentials for bucket bucket") as caught:
        of_a_pod.get("x")

    assert caught.value.exit_code == ExitCode.TEMPORARY
    assert list(of_a_pod.list("")) == []


def test_expired_credentials_are_waited_for_while_their_service_is_down(
    of_a_pod: ObjectStore, machine: Machine, told: list[str]
):
    machine.expires_in = timedelta(minutes=5)  # botocore asks for newer ones at each call
    assert list(of_a_pod.list("")) == []
    machine.refusals_left = 2

    assert list(of_a_pod.list("")) == []
    assert told == ["credentials"] * 2


def test_an_address_that_no_credentials_may_come_from_is_named(
    store: ObjectStore, told: list[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", "http://192.0.2.1/credentials")

    with pytest.raises(InvalidSpecError, match=r"bucket bucket at http.*: Unsupported host '192\.0\.2\.1'"):
        store.get("x")

    assert told == []
