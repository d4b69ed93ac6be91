"""Both S3 servers keep objects over a crash; one honours conditional writes, the other ignores them."""

import threading
from typing import Any

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError, EndpointConnectionError

from dlrm_cluster.s3 import S3Server

pytestmark = pytest.mark.cluster

BUCKET = "snapshots"


def client(server: S3Server, secret: str | None = None) -> Any:
    # By default boto3 checks every answer's checksum: it would refuse what a test damaged, and also any part
    # of an object from rclone, which sends the whole object's checksum with a part.
    lenient = Config(
        s3={"addressing_style": "path"}, retries={"total_max_attempts": 1}, response_checksum_validation="when_required"
    )
    return boto3.client(
        "s3",
        endpoint_url=server.endpoint,
        aws_access_key_id=server.access_key,
        aws_secret_access_key=secret or server.secret_key,
        region_name=server.region,
        config=lenient,
    )


@pytest.fixture(params=["versitygw", "rclone_s3"])
def server(request: pytest.FixtureRequest) -> S3Server:
    found: S3Server = request.getfixturevalue(request.param)
    client(found).create_bucket(Bucket=BUCKET)
    return found


def read(server: S3Server, key: str) -> bytes:
    body: bytes = client(server).get_object(Bucket=BUCKET, Key=key)["Body"].read()
    return body


def test_an_object_comes_back_whole_and_in_parts(server: S3Server) -> None:
    body = bytes(range(256)) * 64
    client(server).put_object(Bucket=BUCKET, Key="manifests/1", Body=body)

    assert read(server, "manifests/1") == body
    part = client(server).get_object(Bucket=BUCKET, Key="manifests/1", Range="bytes=300-399")
    assert part["Body"].read() == body[300:400]
    listed = client(server).list_objects_v2(Bucket=BUCKET, Prefix="manifests/")["Contents"]
    assert [(entry["Key"], entry["Size"]) for entry in listed] == [("manifests/1", len(body))]


def test_a_crashed_server_restarts_with_its_objects_and_endpoint(server: S3Server) -> None:
    client(server).put_object(Bucket=BUCKET, Key="kept", Body=b"rows")
    endpoint = server.endpoint

    server.kill()
    with pytest.raises(EndpointConnectionError):
        read(server, "kept")
    server.start()

    assert server.endpoint == endpoint
    assert read(server, "kept") == b"rows"


def test_a_wrong_secret_is_refused(server: S3Server) -> None:
    with pytest.raises(ClientError, match="SignatureDoesNotMatch"):
        client(server, secret="guess").list_objects_v2(Bucket=BUCKET)


def test_a_test_can_damage_an_object_behind_the_servers_back(server: S3Server) -> None:
    client(server).put_object(Bucket=BUCKET, Key="chunk", Body=b"rows")
    assert read(server, "chunk") == b"rows"

    (server.data / BUCKET / "chunk").write_bytes(b"rots")

    assert read(server, "chunk") == b"rots"


def test_versitygw_honours_if_none_match(versitygw: S3Server) -> None:
    s3 = client(versitygw)
    s3.create_bucket(Bucket=BUCKET)
    s3.put_object(Bucket=BUCKET, Key="lock", Body=b"first", IfNoneMatch="*")

    with pytest.raises(ClientError) as refusal:
        s3.put_object(Bucket=BUCKET, Key="lock", Body=b"second", IfNoneMatch="*")

    assert refusal.value.response["ResponseMetadata"]["HTTPStatusCode"] == 412
    assert read(versitygw, "lock") == b"first"


def test_versitygw_lets_one_of_many_rivals_win(versitygw: S3Server) -> None:
    client(versitygw).create_bucket(Bucket=BUCKET)
    rivals = [client(versitygw) for _ in range(6)]
    start, winners = threading.Barrier(len(rivals)), []

    def compete(number: int) -> None:
        start.wait()
        try:
            rivals[number].put_object(Bucket=BUCKET, Key="lock", Body=f"{number}".encode(), IfNoneMatch="*")
        except ClientError:
            return
        winners.append(number)

    threads = [threading.Thread(target=compete, args=(number,)) for number in range(len(rivals))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(winners) == 1
    assert read(versitygw, "lock") == f"{winners[0]}".encode()


def test_rclone_ignores_if_none_match(rclone_s3: S3Server) -> None:
    s3 = client(rclone_s3)
    s3.create_bucket(Bucket=BUCKET)
    s3.put_object(Bucket=BUCKET, Key="lock", Body=b"first", IfNoneMatch="*")

    s3.put_object(Bucket=BUCKET, Key="lock", Body=b"second", IfNoneMatch="*")

    assert read(rclone_s3, "lock") == b"second"
