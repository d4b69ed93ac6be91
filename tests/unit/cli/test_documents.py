"""Reading manifests: several documents, and what is wrong where."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
import yaml

from dlrm_api.errors import BadDataError, InvalidSpecError, NoInputError, UsageError
from dlrm_api.job import DLRMJob
from dlrm_api.names import ExitCode
from dlrm_cli import app
from dlrm_cli.documents import find_profiles, only_job, parse_document, read_documents

JOB = """
apiVersion: dlrm.dev/v1alpha1
kind: DLRMJob
metadata: {name: small}
spec:
  model: {interaction: dcn, tables: [{name: C1, rows: 10, dim: 4}]}
  data: {format: synthetic}
  checkpoint: {uri: file:///tmp/small}
"""
PROFILE = """
apiVersion: dlrm.dev/v1alpha1
kind: HardwareProfile
metadata: {name: box}
spec: {tiers: {ddr: {bytes: 16Gi}}}
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "job.yaml"
    path.write_text(text)
    return path


def test_a_file_may_hold_a_job_and_its_hardware_profile(tmp_path: Path) -> None:
    path = write(tmp_path, f"---\n{JOB}\n---\n{PROFILE}\n---\n")

    documents = read_documents(path)

    assert [document.title for document in documents] == ["DLRMJob small", "HardwareProfile box"]
    assert [type(parse_document(document)).__name__ for document in documents] == ["DLRMJob", "HardwareProfile"]


def test_a_json_file_is_read_too(tmp_path: Path) -> None:
    path = write(tmp_path, '{"kind": "DLRMJob", "metadata": {"name": "a"}}')

    documents = read_documents(path)

    assert documents[0].title == "DLRMJob a"


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(NoInputError, match=r"absent\.yaml"):
        read_documents(tmp_path / "absent.yaml")


def test_json_is_read_with_tabs_and_surrogate_pairs(tmp_path: Path) -> None:
    path = write(tmp_path, '{\n\t"kind": "DLRMJob",\n\t"metadata": {"annotations": {"owner": "\\ud83d\\ude00"}}\n}')

    [document] = read_documents(path)

    assert document.body["metadata"]["annotations"] == {"owner": "\U0001f600"}


def test_a_folders_manifests_are_read_as_kubectl_reads_them(tmp_path: Path) -> None:
    with pytest.raises(NoInputError, match="no manifests found"):
        read_documents(tmp_path)
    for name, text in (("b.yml", PROFILE), ("a.yaml", JOB), ("notes.txt", "not a manifest")):
        (tmp_path / name).write_text(text)

    assert [document.title for document in read_documents(tmp_path)] == ["DLRMJob small", "HardwareProfile box"]


def test_a_dash_reads_stdin(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(JOB.encode())))

    assert app.main(["validate", "-"]) == 0
    assert capsys.readouterr().out.startswith("stdin: DLRMJob small is valid")


def test_items_of_lists_are_objects_of_their_own(tmp_path: Path) -> None:
    jobs = [yaml.safe_load(JOB) | {"metadata": {}}, yaml.safe_load(JOB) | {"status": {"phase": "Running"}}]
    inner = {"apiVersion": "dlrm.dev/v1alpha1", "kind": "DLRMJobList", "items": jobs}
    path = write(tmp_path, yaml.safe_dump({"apiVersion": "v1", "kind": "List", "items": [inner]}))

    documents = read_documents(path)

    assert [document.title for document in documents] == ["DLRMJob (document 1, items[0], items[0])", "DLRMJob small"]
    with pytest.raises(BadDataError, match="document 1: expected a list of items"):
        read_documents(write(tmp_path, "kind: List\n"))


def test_merge_keys_may_be_overridden(tmp_path: Path) -> None:
    text = "a: &a {rows: 1, dim: 2}\nb: &b {<<: *a, rows: 3}\nc: {<<: *b, rows: 4, name: c}\n"

    [document] = read_documents(write(tmp_path, text))

    assert document.body["b"] == {"rows": 3, "dim": 2}
    assert document.body["c"] == {"rows": 4, "dim": 2, "name": "c"}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e3", 1_000),
        ("-2E+2", -200),
        ("1.5e-3", 0.0015),
        (".5e1", 5),
        ("1e", "1e"),
        ("2026-02-31", "2026-02-31"),
        ("0x1F", 31),
        ("yes", True),
    ],
)
def test_scalars_are_what_kubectl_sends(tmp_path: Path, text: str, value: object) -> None:
    [document] = read_documents(write(tmp_path, f"value: {text}\n"))

    assert document.body["value"] == value
    assert type(document.body["value"]) is type(value)


def test_objects_of_other_apis_are_named_and_not_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    secret = "apiVersion: v1\nkind: Secret\nmetadata: {name: s}\n"

    assert app.main(["validate", str(write(tmp_path, f"{secret}---{JOB}"))]) == 0
    told = capsys.readouterr()
    assert "Secret s is not checked" in told.err
    assert "DLRMJob small is valid" in told.out
    assert app.main(["validate", str(write(tmp_path, secret))]) == ExitCode.BAD_DATA


def test_an_object_without_its_api_version_is_refused(tmp_path: Path) -> None:
    [document] = read_documents(write(tmp_path, JOB.replace("apiVersion: dlrm.dev/v1alpha1", "")))

    with pytest.raises(InvalidSpecError, match="apiVersion: missing"):
        parse_document(document)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("kind: [DLRMJob\nmetadata: {}\n", "line 2 column 9"),
        ("kind: DLRMJob\nspec:\n\tmodel: {}\n", "line 3 column 1"),
        ("kind: DLRMJob\nkind: DLRMJob\n", "line 2 column 1"),
        ("- kind: DLRMJob\n", "document 1"),
        ("# nothing\n", "DLRMJob"),
        ('{"kind": "DLRMJob", "kind": "Pod"}', "duplicate key kind"),
        (f"kind: DLRMJob\nseed: {'1' * 5_000}\n", "invalid value"),
        (f'{{"kind": "DLRMJob", "seed": {"1" * 5_000}}}', "invalid value"),
    ],
)
def test_an_invalid_manifest_is_refused_with_path_and_reason(tmp_path: Path, text: str, words: str) -> None:
    path = write(tmp_path, text)

    with pytest.raises(BadDataError) as caught:
        read_documents(path)

    assert str(path) in str(caught.value)
    assert words in str(caught.value)


def test_invalid_utf8_is_refused_with_the_byte(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_bytes(b"kind: \xff\n")

    with pytest.raises(BadDataError, match="byte 6"):
        read_documents(path)


@pytest.mark.parametrize("command", ["validate", "plan", "render"])
def test_yaml_that_no_json_can_say_is_refused_with_its_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    path = write(tmp_path, f"{JOB}  loop: &loop {{again: *loop}}\n")

    code = app.main([command, str(path)])

    told = capsys.readouterr().err
    assert code == ExitCode.BAD_DATA, told
    assert f"{path}: DLRMJob small: " in told
    assert "Circular reference" in told


def test_a_bad_profile_is_named_with_its_file(tmp_path: Path) -> None:
    job = parse_document(read_documents(write(tmp_path, JOB))[0])
    other = tmp_path / "other.yaml"
    assert isinstance(job, DLRMJob)

    other.write_text(PROFILE.replace("16Gi", "lots"))
    with pytest.raises(InvalidSpecError, match=r"other\.yaml: HardwareProfile box: spec\.tiers\.ddr\.bytes"):
        find_profiles(job, [], [other])
    other.write_text(PROFILE.replace("{bytes: 16Gi}", "&loop {again: *loop}"))
    with pytest.raises(BadDataError, match=r"other\.yaml: HardwareProfile box: "):
        find_profiles(job, [], [other])


def test_another_kind_is_refused_by_name(tmp_path: Path) -> None:
    path = write(tmp_path, "apiVersion: dlrm.dev/v1alpha1\nkind: Pod\nmetadata: {name: a}\n")

    with pytest.raises(InvalidSpecError, match="DLRMJob, HardwareProfile, got 'Pod'"):
        parse_document(read_documents(path)[0])


def test_a_run_needs_exactly_one_job(tmp_path: Path) -> None:
    none = read_documents(write(tmp_path, PROFILE))
    two = read_documents(write(tmp_path, f"{JOB}\n---\n{JOB}"))

    with pytest.raises(InvalidSpecError, match="HardwareProfile"):
        only_job(none)
    with pytest.raises(UsageError, match=r"job\.yaml"):
        only_job(two)


def test_a_job_finds_its_profile_in_its_own_file_or_in_another(tmp_path: Path) -> None:
    documents = read_documents(write(tmp_path, f"{JOB}  trainer: {{hardware: box}}\n---\n{PROFILE}"))
    job = parse_document(documents[0])
    other = tmp_path / "other.yaml"
    other.write_text(PROFILE)
    assert isinstance(job, DLRMJob)

    own = find_profiles(job, documents, [])
    given = find_profiles(job, documents[:1], [other])

    assert own == given
    assert [profile.metadata.name for profile in own] == ["box"]
    with pytest.raises(UsageError, match=r"spec\.trainer\.hardware.*box"):
        find_profiles(job, documents[:1], [])


def test_a_job_without_a_profile_name_takes_one_only_if_it_is_unique(tmp_path: Path) -> None:
    job = parse_document(read_documents(write(tmp_path, JOB))[0])
    one, two = tmp_path / "one.yaml", tmp_path / "two.yaml"
    one.write_text(PROFILE)
    two.write_text(f"{PROFILE}\n---\n{PROFILE.replace('box', 'rack')}")
    assert isinstance(job, DLRMJob)

    (only,) = find_profiles(job, [], [one])

    assert only.metadata.name == "box"
    with pytest.raises(UsageError, match=r"--hardware.*\(box, rack\)"):
        find_profiles(job, [], [two])


@pytest.mark.parametrize(
    ("trainer", "names"),
    [
        ("objective: {maxReplicas: 2}", ["box", "rack"]),
        ("objective: {maxReplicas: 2}, hardwareProfiles: [rack]", ["rack"]),
        ("objective: {maxReplicas: 2}, hardwareProfiles: [rack, box]", ["rack", "box"]),
        ("objective: {maxReplicas: 2}, hardwareSelector: {zone: a}", ["box"]),
    ],
)
def test_profiles_to_choose_from_come_from_several_files(tmp_path: Path, trainer: str, names: list[str]) -> None:
    job = parse_document(read_documents(write(tmp_path, f"{JOB}  trainer: {{{trainer}}}\n"))[0])
    files = [tmp_path / "one.yaml", tmp_path / "two.yaml"]
    files[0].write_text(PROFILE.replace("name: box", "name: box, labels: {zone: a, tier: x}"))
    files[1].write_text(PROFILE.replace("box", "rack"))
    assert isinstance(job, DLRMJob)

    assert [profile.metadata.name for profile in find_profiles(job, [], files)] == names


@pytest.mark.parametrize(
    ("trainer", "field"),
    [
        ("hardwareProfiles: [box, rack]", r"spec\.trainer\.hardwareProfiles\[1\].*rack"),
        ("hardwareSelector: {zone: b}", r"spec\.trainer\.hardwareSelector.*zone"),
    ],
)
def test_a_missing_profile_to_choose_from_is_named_with_its_field(tmp_path: Path, trainer: str, field: str) -> None:
    text = f"{JOB}  trainer: {{objective: {{maxReplicas: 2}}, {trainer}}}\n---\n{PROFILE}"
    documents = read_documents(write(tmp_path, text))
    job = parse_document(documents[0])
    assert isinstance(job, DLRMJob)

    with pytest.raises(UsageError, match=field):
        find_profiles(job, documents, [])


@pytest.mark.parametrize(
    ("meta", "words"),
    [
        ("annotation: {a: b}", "metadata.annotation: "),
        ("team: ads", "metadata.team: "),
        ("namespace: My_Team", "metadata.namespace: "),
        ("labels: {a b: c}", "metadata.labels[a b]: "),
        ("labels: {example.com/x/y: c}", "metadata.labels[example.com/x/y]: "),
        ("labels: {team: a b}", "metadata.labels[team]: "),
        ("labels: {version: 2}", "metadata.labels[version]: "),
        ("annotations: [a]", "metadata.annotations: "),
    ],
)
@pytest.mark.parametrize("text", [JOB, PROFILE], ids=["job", "profile"])
def test_metadata_that_no_api_server_takes_is_refused(tmp_path: Path, text: str, meta: str, words: str) -> None:
    path = write(tmp_path, text.replace("metadata: {", f"metadata: {{{meta}, "))

    with pytest.raises(InvalidSpecError) as refused:
        parse_document(read_documents(path)[0])

    assert str(refused.value).startswith(words)


def test_metadata_as_kubectl_prints_it_is_taken(tmp_path: Path) -> None:
    meta = (
        "namespace: ads, uid: u, resourceVersion: '1', generation: 1, creationTimestamp: '2026-01-01T00:00:00Z', "
        "labels: {example.com/team: ads, a.b_c: ''}, annotations: {example.com/note: 'any text: at all'}, "
        "managedFields: [], "
    )

    documents = read_documents(write(tmp_path, JOB.replace("metadata: {", f"metadata: {{{meta}")))

    assert isinstance(parse_document(documents[0]), DLRMJob)
