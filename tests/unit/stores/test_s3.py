from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import boto3
import pytest

from dlrm_api.errors import DLRMError, InvalidSpecError, NoInputError, NoPermissionError, StoreUnavailableError
from dlrm_api.fields import S3Spec
from dlrm_api.names import ExitCode
from dlrm_cluster.ports import free_port
from dlrm_stores import ObjectStore, StoreOptions, open_store
from dlrm_stores.s3_errors import S3Location, translate
from dlrm_testing.checkpointer.tls import self_signed
from dlrm_testing.waiting import wait_until


def write_keys(folder: Path, access: str, secret: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "accessKeyId").write_text(access)
    (folder / "secretAccessKey").write_text(secret)
    return folder


def open_at(endpoint: str, folder: Path, uri: str = "s3://bucket/a") -> ObjectStore:
    return open_store(uri, StoreOptions(s3=S3Spec(endpoint=endpoint), credentials_dir=folder))


@pytest.mark.slow
def test_an_endpoint_that_does_not_answer_is_named_and_may_be_tried_again(tmp_path: Path):
    endpoint = f"http://127.0.0.1:{free_port()}"
    store = open_at(endpoint, write_keys(tmp_path / "keys", "a", "b"))

    with pytest.raises(StoreUnavailableError, match=f"{endpoint}.*bucket") as caught:
        store.put("x", b"1")
    assert caught.value.exit_code == ExitCode.TEMPORARY


@pytest.mark.cluster
def test_a_missing_bucket_is_named(versitygw, tmp_path: Path):
    keys = write_keys(tmp_path / "keys", versitygw.access_key, versitygw.secret_key)
    store = open_at(versitygw.endpoint, keys, "s3://nowhere/a")

    with pytest.raises(NoInputError, match="bucket nowhere") as caught:
        store.put("x", b"1")
    assert caught.value.exit_code == ExitCode.NO_INPUT
    with pytest.raises(NoInputError, match="bucket nowhere"):
        list(store.list(""))


def test_credentials_files_that_are_missing_are_named(tmp_path: Path):
    (tmp_path / "keys").mkdir()
    store = open_at("http://127.0.0.1:1", tmp_path / "keys")

    with pytest.raises(NoPermissionError, match="keys/accessKeyId"):
        store.get("x")


def test_without_any_credentials_the_message_says_where_to_set_them(monkeypatch, tmp_path: Path):
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    store = open_store("s3://bucket/a", StoreOptions(s3=S3Spec(endpoint="http://127.0.0.1:1")))

    with pytest.raises(NoPermissionError, match=r"bucket bucket .*spec\.checkpoint"):
        store.get("x")


def test_a_missing_authority_file_is_named(tmp_path: Path):
    options = StoreOptions(s3=S3Spec(endpoint="https://127.0.0.1:1", ca_file=f"{tmp_path}/ca.pem"))

    with pytest.raises(NoInputError, match=r"/ca\.pem.*spec\.checkpoint\.s3\.caFile"):
        open_store("s3://bucket/a", options).get("x")


@pytest.mark.cluster
def test_wrong_credentials_are_refused_by_bucket_until_they_are_rotated(versitygw, tmp_path: Path):
    keys = write_keys(tmp_path / "keys", versitygw.access_key, versitygw.secret_key)
    right = boto3.client(
        "s3",
        endpoint_url=versitygw.endpoint,
        region_name="us-east-1",
        aws_access_key_id=versitygw.access_key,
        aws_secret_access_key=versitygw.secret_key,
    )
    right.create_bucket(Bucket="bucket")
    store = open_at(versitygw.endpoint, write_keys(keys, versitygw.access_key, "wrong"))
    with pytest.raises(NoPermissionError, match=r"bucket bucket at http.* refused the key for x") as caught:
        store.put("x", b"1")

    write_keys(keys, versitygw.access_key, versitygw.secret_key)
    wait_until(lambda: not store_refuses(store))

    assert caught.value.exit_code == ExitCode.NO_PERMISSION
    assert store.get("x") == b"2"


def store_refuses(store: ObjectStore) -> bool:
    try:
        store.put("x", b"2")
    except NoPermissionError:
        return True
    return False


@pytest.mark.cluster
def test_a_server_that_comes_back_is_used_again(versitygw, tmp_path: Path):
    keys = write_keys(tmp_path / "keys", versitygw.access_key, versitygw.secret_key)
    (versitygw.data / "bucket").mkdir(parents=True, exist_ok=True)
    store = open_at(versitygw.endpoint, keys)
    store.put("x", b"1")
    versitygw.kill()
    with pytest.raises(StoreUnavailableError):
        store.put("x", b"2")

    versitygw.start()

    assert store.get("x") == b"1"
    store.put("x", b"3")
    assert store.get("x") == b"3"


@pytest.mark.cluster
def test_a_multipart_upload_that_fails_is_given_back(versitygw, tmp_path: Path, monkeypatch):
    keys = write_keys(tmp_path / "keys", versitygw.access_key, versitygw.secret_key)
    (versitygw.data / "bucket").mkdir(parents=True, exist_ok=True)
    store = open_at(versitygw.endpoint, keys)
    store.put("warm", b"1")
    client = store._call(lambda s3: s3)  # the one of this store: its calls are made to fail on their third part

    real, lock, parts = client.upload_part, threading.Lock(), []

    def upload_part(**arguments: object) -> object:
        with lock:
            parts.append(arguments["PartNumber"])
        if arguments["PartNumber"] == 3:
            raise boto3.client("s3", region_name="us-east-1").exceptions.ClientError(
                {"Error": {"Code": "SlowDown"}, "ResponseMetadata": {"HTTPStatusCode": 503}}, "UploadPart"
            )
        return real(**arguments)

    monkeypatch.setattr(client, "upload_part", upload_part)
    with pytest.raises(StoreUnavailableError, match="SlowDown"):
        store.put("large", bytes(80 << 20))

    assert store.size("large") is None
    assert client.list_multipart_uploads(Bucket="bucket").get("Uploads", []) == []


@pytest.mark.cluster
def test_a_sweep_aborts_old_uploads_below_its_prefix_alone(versitygw, tmp_path: Path):
    keys = write_keys(tmp_path / "keys", versitygw.access_key, versitygw.secret_key)
    (versitygw.data / "bucket").mkdir(parents=True, exist_ok=True)
    store = open_at(versitygw.endpoint, keys)
    store.put("warm", b"1")
    client = store._call(lambda s3: s3)
    for key in ("a/chunks/1", "other/1"):
        client.create_multipart_upload(Bucket="bucket", Key=key)

    young, old = store.sweep_uploads(3_600), store.sweep_uploads(-60)

    left = [upload["Key"] for upload in client.list_multipart_uploads(Bucket="bucket").get("Uploads", [])]
    assert (young, old) == (0, 1)
    assert left == ["other/1"]


def answer(code: str, status: int) -> Exception:
    error = Exception(code)
    error.response = {"Error": {"Code": code, "Message": "said so"}, "ResponseMetadata": {"HTTPStatusCode": status}}  # type: ignore[attr-defined]
    return error


@pytest.mark.parametrize(
    ("code", "status", "exit_code"),
    [
        ("SlowDown", 503, ExitCode.TEMPORARY),
        ("InternalError", 500, ExitCode.TEMPORARY),
        ("RequestTimeout", 400, ExitCode.TEMPORARY),
        ("TooManyRequests", 429, ExitCode.TEMPORARY),
        ("AccessDenied", 403, ExitCode.NO_PERMISSION),
        ("ExpiredToken", 400, ExitCode.NO_PERMISSION),
        ("InvalidAccessKeyId", 403, ExitCode.NO_PERMISSION),
        ("XAdminUserNotFound", 404, ExitCode.NO_PERMISSION),
        ("RequestTimeTooSkewed", 403, ExitCode.NO_PERMISSION),
        ("NoSuchBucket", 404, ExitCode.NO_INPUT),
        ("NoSuchKey", 404, ExitCode.NO_INPUT),
        ("InsufficientStorage", 507, ExitCode.DEVICE),
        ("PermanentRedirect", 301, ExitCode.BAD_CONFIG),
        ("AuthorizationHeaderMalformed", 400, ExitCode.BAD_CONFIG),
        ("InvalidRequest", 400, ExitCode.BAD_CONFIG),
    ],
)
def test_an_answer_of_the_service_says_who_can_act(code: str, status: int, exit_code: ExitCode):
    known = translate(answer(code, status), S3Location(bucket="b", endpoint="http://s3"), "key")

    assert isinstance(known, DLRMError)
    assert known.exit_code == exit_code
    assert "b" in str(known)


class NoSuchKey(BaseHTTPRequestHandler):
    """Answer every GET as S3 does for an absent object."""

    def do_GET(self) -> None:
        body = b"<Error><Code>NoSuchKey</Code><Message>none</Message></Error>"
        self.send_response(404)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def tls_server(tmp_path: Path) -> Iterator[str]:
    """An HTTPS endpoint whose certificate signs itself: ``tmp_path / "ca.pem"``."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), NoSuchKey)
    server.daemon_threads = True
    server.socket = self_signed(tmp_path).wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    yield f"https://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_an_endpoint_of_an_unknown_authority_is_trusted_only_with_its_file(tls_server: str, tmp_path: Path):
    keys = write_keys(tmp_path / "keys", "a", "b")
    trusting = StoreOptions(s3=S3Spec(endpoint=tls_server, ca_file=str(tmp_path / "ca.pem")), credentials_dir=keys)

    with pytest.raises(InvalidSpecError, match=r"spec\.checkpoint\.s3\.caFile.*https"):
        open_at(tls_server, keys).get("x")
    with pytest.raises(NoInputError, match="x"):
        open_store("s3://bucket/a", trusting).get("x")
