"""Runs with snapshots in a real S3 server: one that honours ``If-None-Match``, one that ignores it."""

from __future__ import annotations

import time
from typing import Any

import pytest

pytestmark = pytest.mark.cluster


@pytest.fixture(params=["versitygw", "rclone_s3"])
def server(request: pytest.FixtureRequest) -> Any:
    running = request.getfixturevalue(request.param)
    (running.data / "bucket").mkdir()
    return running


def keys(server: Any, secret: str | None = None) -> dict[str, str]:
    return {
        "AWS_ACCESS_KEY_ID": server.access_key,
        "AWS_SECRET_ACCESS_KEY": secret or server.secret_key,
        "AWS_DEFAULT_REGION": server.region,
    }


def use(local: Any, server: Any, bucket: str = "bucket") -> str:
    uri = f"s3://{bucket}/jobs/tiny"
    local.write(checkpoint={"uri": uri, "s3": {"endpoint": server.endpoint}, "intervalSteps": 60})
    return uri


def test_a_run_commits_to_the_server_and_restores_from_it(local: Any, server: Any) -> None:
    uri = use(local, server)

    result = local.done("--digest", **keys(server))
    where = ("--endpoint", server.endpoint)
    verified = local.run("verify", uri, *where, command="snapshots", **keys(server))
    restored = local.run("restore", uri, *where, "--to", "out", command="snapshots", **keys(server))

    assert [snapshot["step"] for snapshot in result["snapshots"]] == [60, 120]
    assert result["snapshots"][-1]["uri"].startswith(f"{uri}/manifests/")
    assert "verified step 120: " in verified.stdout
    assert restored.stdout.strip() == result["state_digest"]
    assert (local.folder / "out" / "tables" / "C2.safetensors").exists()


def test_keys_in_a_folder_do_for_a_manifest_that_names_a_secret(local: Any, versitygw: Any) -> None:
    (versitygw.data / "bucket").mkdir()
    uri = "s3://bucket/jobs/tiny"
    local.write(
        checkpoint={
            "uri": uri,
            "s3": {"endpoint": versitygw.endpoint},
            "intervalSteps": 60,
            "credentialsSecret": "keys",
        }
    )
    folder = local.folder / "keys"
    folder.mkdir()
    (folder / "accessKeyId").write_text(versitygw.access_key)
    (folder / "secretAccessKey").write_text(versitygw.secret_key)

    result = local.done(DLRM_CREDENTIALS_DIR=str(folder))
    where = ("--endpoint", versitygw.endpoint, "--credentials-dir", str(folder))
    listed = local.run("list", uri, *where, command="snapshots")

    assert result["snapshots"][-1]["step"] == 120
    assert f"{uri}/manifests/" in listed.stdout


def test_wrong_keys_and_a_missing_bucket_are_told_before_anything_starts(local: Any, versitygw: Any) -> None:
    (versitygw.data / "bucket").mkdir()

    use(local, versitygw)
    wrong_keys = local.run(**keys(versitygw, "wrong"))
    use(local, versitygw, bucket="absent")
    missing_bucket = local.run(**keys(versitygw))

    assert wrong_keys.code == 77
    assert "bucket" in wrong_keys.error
    assert "credentials" in wrong_keys.error
    assert missing_bucket.code == 66
    assert "bucket absent" in missing_bucket.error
    assert not list(local.workdir.glob("logs/*"))


STEPS_WITHOUT_STORE = 80
"""A cut lies among them: a trainer that waited for its snapshot would stand still."""


def test_an_outage_of_the_store_delays_the_snapshot_and_nothing_else(local: Any, versitygw: Any) -> None:
    (versitygw.data / "bucket").mkdir()
    use(local, versitygw)
    process = local.start(**keys(versitygw))
    while len(local.steps()) < 5:
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.02)

    versitygw.kill()
    killed_at = len(local.steps())
    while len(local.steps()) < killed_at + STEPS_WITHOUT_STORE:
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.02)
    versitygw.start()
    stdout, stderr = process.communicate(timeout=240)

    assert process.returncode == 0, stderr + local.logs()
    assert '"step": 120' in stdout
    assert "Traceback" not in stderr
