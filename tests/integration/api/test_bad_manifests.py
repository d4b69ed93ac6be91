"""Bad manifests and their messages, from dlrmctl (the models) and from kubectl (the API server)."""

import copy
from dataclasses import dataclass
from typing import Any

import pytest

from dlrm_api.errors import InvalidSpecError
from dlrm_api.fields import BYTES_PATTERN
from dlrm_api.hardware import parse_profile
from dlrm_api.job import parse_job
from dlrm_api.pod_template import REQUIRED

GONE = object()
PARSERS = {"DLRMJob": parse_job, "HardwareProfile": parse_profile}


@dataclass(frozen=True)
class Bad:
    """One way to spoil a good manifest."""

    change: dict[str, Any]
    """Path to value; a path that is GONE is removed."""
    field: str
    """Path of the field that the models name."""
    server: str | None = ""
    """Part of the server's message; empty: the models' message; None: the server accepts it, the webhook does not."""
    kind: str = "DLRMJob"


def job(change: dict[str, Any], field: str, server: str | None = "") -> Bad:
    return Bad(change, field, server)


def profile(change: dict[str, Any], field: str, server: str | None = "") -> Bad:
    return Bad(change, field, server, kind="HardwareProfile")


FILES = {"spec.data.format": "criteo-tsv", "spec.data.train.uris": ["/data/train"]}
KEYS = {"hash": "unique"}
SIZED = {"rows": 10, "dim": 16, "embedding": {"dimension": {"keepBytes": 0.5}}}
SHARED = {"unknown": "shared", "sharedRows": 6}
UNIQUE = {"rows": 10, "dim": 16, "embedding": KEYS}
GROUP = {"name": "g", "count": 2, "template": {"rows": 10, "dim": 16}}

BAD = {
    # required
    "no spec": job({"spec": GONE}, "spec", "spec: Required value"),
    "no model": job({"spec.model": GONE}, "spec.model", "spec.model: Required value"),
    "no data": job({"spec.data": GONE}, "spec.data", "spec.data: Required value"),
    "no format": job({"spec.data.format": GONE}, "spec.data.format", "spec.data.format: Required value"),
    "no uri": job({"spec.checkpoint.uri": GONE}, "spec.checkpoint.uri", "spec.checkpoint.uri: Required value"),
    "no rows": job(
        {"spec.model.tables.0.rows": GONE}, "spec.model.tables[0].rows", "spec.model.tables[0].rows: Required value"
    ),
    # types
    "text for an integer": job(
        {"spec.data.epochs": "two"}, "spec.data.epochs", "spec.data.epochs in body must be of type integer"
    ),
    "quoted number": job(
        {"spec.trainer.replicas": "2"}, "spec.trainer.replicas", "spec.trainer.replicas in body must be of type integer"
    ),
    "fraction for an integer": job(
        {"spec.trainer.replicas": 1.5}, "spec.trainer.replicas", "spec.trainer.replicas in body must be of type integer"
    ),
    "number for a boolean": job(
        {"spec.training.deterministic": 1},
        "spec.training.deterministic",
        "spec.training.deterministic in body must be of type boolean",
    ),
    "number for a text": job(
        {"spec.checkpoint.s3.region": 5},
        "spec.checkpoint.s3.region",
        "spec.checkpoint.s3.region in body must be of type string",
    ),
    "list for an object": job({"spec.data": []}, "spec.data", "spec.data in body must be of type object"),
    "object for a list": job(
        {"spec.model.tables": {"ads": {}}}, "spec.model.tables", 'unknown field "spec.model.tables.ads"'
    ),
    "seconds without a unit": job(
        {"spec.lifecycle.restart.backoff": 90},
        "spec.lifecycle.restart.backoff",
        "spec.lifecycle.restart.backoff in body must be of type string",
    ),
    # words
    "unknown format": job(
        {"spec.data.format": "csv"},
        "spec.data.format",
        'spec.data.format: Unsupported value: "csv": supported values: "criteo-tsv", "delta", "iceberg", "parquet", '
        '"synthetic"',
    ),
    "unknown interaction": job(
        {"spec.model.interaction": "sum"},
        "spec.model.interaction",
        'spec.model.interaction: Unsupported value: "sum": supported values: "dot", "dcn"',
    ),
    "bits that no version has": job(
        {"spec.checkpoint.bits": 5},
        "spec.checkpoint.bits",
        "spec.checkpoint.bits: Invalid value: 5: use one of auto, 2, 3, 4, 8, 16, 32",
    ),
    "bits in quotes": job(
        {"spec.checkpoint.bits": "8"},
        "spec.checkpoint.bits",
        'spec.checkpoint.bits: Invalid value: "8": use one of auto, 2, 3, 4, 8, 16, 32',
    ),
    "policy of another name": job(
        {"spec.checkpoint.policy": "incremental"},
        "spec.checkpoint.policy",
        'spec.checkpoint.policy: Unsupported value: "incremental": '
        'supported values: "full", "one-shot", "consecutive", "intermittent"',
    ),
    "encryption of another name": job(
        {"spec.checkpoint.s3": {"encryption": "aes256"}},
        "spec.checkpoint.s3.encryption",
        'spec.checkpoint.s3.encryption: Unsupported value: "aes256": supported values: "none", "AES256", "aws:kms"',
    ),
    # unknown fields
    "misspelt field": job({"spec.trainer.replica": 2}, "spec.trainer.replica", 'unknown field "spec.trainer.replica"'),
    "required field of a table, misspelt": job(
        {"spec.model.tables.1.rows": GONE, "spec.model.tables.1.row": 2},
        "spec.model.tables[1].row",
        'unknown field "spec.model.tables[1].row"',
    ),
    "required part, misspelt": job(
        {"spec.checkpoint": GONE, "spec.checkpoints": {"uri": "s3://bucket/job"}},
        "spec.checkpoints",
        'unknown field "spec.checkpoints"',
    ),
    "required field of a profile, misspelt": profile(
        {"spec.tiers.ddr": {"byte": "1Gi"}}, "spec.tiers.ddr.byte", 'unknown field "spec.tiers.ddr.byte"'
    ),
    "unknown field that is near to none": job(
        {"spec.model.hidden": 8}, "spec.model.hidden", 'unknown field "spec.model.hidden"'
    ),
    "misspelt field of a table": job(
        {"spec.model.tables.1.row": 2}, "spec.model.tables[1].row", 'unknown field "spec.model.tables[1].row"'
    ),
    "Python's name of a field": job(
        {"spec.data.global_batch_size": 64},
        "spec.data.global_batch_size",
        'unknown field "spec.data.global_batch_size"',
    ),
    # bounds
    "no rows in a table": job(
        {"spec.model.tables.0.rows": 0},
        "spec.model.tables[0].rows",
        "spec.model.tables[0].rows in body should be greater than or equal to 1",
    ),
    "odd dim": job(
        {"spec.model.tables.0.dim": 17},
        "spec.model.tables[0].dim",
        "spec.model.tables[0].dim in body should be a multiple of 4",
    ),
    "huge dim": job(
        {"spec.model.tables.0.dim": 8_192},
        "spec.model.tables[0].dim",
        "spec.model.tables[0].dim in body should be less than or equal to 4096",
    ),
    "no replicas": job(
        {"spec.trainer.replicas": 0},
        "spec.trainer.replicas",
        "spec.trainer.replicas in body should be greater than or equal to 1",
    ),
    "negative learning rate": job(
        {"spec.training.rowOptimizer.learningRate": -0.1},
        "spec.training.rowOptimizer.learningRate",
        "spec.training.rowOptimizer.learningRate in body should be greater than or equal to 0",
    ),
    "empty top MLP": job(
        {"spec.model.topMlp": []}, "spec.model.topMlp", "spec.model.topMlp in body should have at least 1 items"
    ),
    "too many layers": job(
        {"spec.model.topMlp": [1] * 65},
        "spec.model.topMlp",
        "spec.model.topMlp: Too many: 65: must have at most 64 items",
    ),
    # texts
    "duration in words": job(
        {"spec.lifecycle.restart.backoff": "90 seconds"},
        "spec.lifecycle.restart.backoff",
        "spec.lifecycle.restart.backoff in body should match",
    ),
    "empty duration": job(
        {"spec.lifecycle.restart.backoff": ""},
        "spec.lifecycle.restart.backoff",
        "spec.lifecycle.restart.backoff in body should be at least 2 chars long",
    ),
    "bytes with an unknown unit": job(
        {"spec.checkpoint.handoffBudget": "16GiB"},
        "spec.checkpoint.handoffBudget",
        f"spec.checkpoint.handoffBudget in body should match '{BYTES_PATTERN}'",
    ),
    "negative bytes": job(
        {"spec.trainer.tierBudgets.ddr": -1},
        "spec.trainer.tierBudgets.ddr",
        "spec.trainer.tierBudgets.ddr in body should be greater than or equal to 0",
    ),
    "resources in words": job(
        {"spec.trainer.resources.requests": {"cpu": "two"}},
        "spec.trainer.resources.requests.cpu",
        "spec.trainer.resources.requests.cpu in body should match",
    ),
    "name of a Secret": job(
        {"spec.checkpoint.credentialsSecret": "My_Keys"},
        "spec.checkpoint.credentialsSecret",
        "spec.checkpoint.credentialsSecret in body should match",
    ),
    "name of a profile that leads elsewhere": job(
        {"spec.trainer.hardware": "../../../../api/v1/namespaces/other/secrets/s3"},
        "spec.trainer.hardware",
        "spec.trainer.hardware in body should match",
    ),
    "endpoint without a scheme": job(
        {"spec.checkpoint.s3.endpoint": "minio:9000"},
        "spec.checkpoint.s3.endpoint",
        "spec.checkpoint.s3.endpoint in body should match '^https?://'",
    ),
    "name of a table": job(
        {"spec.model.tables.0.name": "ads/1"},
        "spec.model.tables[0].name",
        "spec.model.tables[0].name in body should match",
    ),
    # names
    "name too long": job({"metadata.name": "a" * 41}, "metadata", "metadata.name"),
    "name with a dot": job({"metadata.name": "my.job"}, "metadata", "metadata.name"),
    "name from a digit on": job({"metadata.name": "1job"}, "metadata", "metadata.name"),
    # what fields together may not be
    "top MLP without a logit": job({"spec.model.topMlp": [8, 2]}, "spec.model"),
    "dense features without an MLP": job({"spec.model.bottomMlp": []}, "spec.model"),
    "no tables": job({"spec.model.tables": []}, "spec.model"),
    "one vector alone": job(
        {"spec.model.denseFeatures": [], "spec.model.bottomMlp": [], "spec.model.tables.1": GONE}, "spec.model"
    ),
    "dims of two widths": job({"spec.model.tables.1.dim": 32}, "spec.model"),
    "dim of a group": job({"spec.model.tableGroups": [{**GROUP, "template": {"rows": 10, "dim": 32}}]}, "spec.model"),
    "buckets of a table without keys": job(
        {"spec.model.tables.0.embedding": {"hash": "mix", "buckets": 2}}, "spec.model.tables[0].embedding"
    ),
    "eviction from a table without keys": job(
        {"spec.model.tables.0.embedding": {"eviction": {}}}, "spec.model.tables[0].embedding"
    ),
    "buckets that are no power of two": job(
        {"spec.model.tables.0.embedding": {"buckets": 3}},
        "spec.model.tables[0].embedding.buckets",
        "spec.model.tables[0].embedding.buckets: Unsupported value: 3: supported values: ",
    ),
    "maintenance of tables without keys": job({"spec.model.maintenanceSteps": 8}, "spec.model"),
    "maintenance too seldom": job(
        {"spec.model.maintenanceSteps": 65},
        "spec.model.maintenanceSteps",
        "spec.model.maintenanceSteps in body should be less than or equal to 64",
    ),
    "maintenance in words": job(
        {"spec.model.maintenanceSteps": "8"},
        "spec.model.maintenanceSteps",
        "spec.model.maintenanceSteps in body should match '^auto$'",
    ),
    "two intervals": job({"spec.checkpoint.interval": "30m"}, "spec.checkpoint"),
    "store of another kind": job({"spec.checkpoint.uri": "gs://bucket/job"}, "spec.checkpoint"),
    "relative folder": job({"spec.checkpoint.uri": "file://snapshots"}, "spec.checkpoint"),
    "two lengths": job({"spec.training.maxSteps": 5, "spec.training.maxSamples": 5}, "spec.training"),
    "shards that do not divide the batch": job(
        {"spec.data.globalBatchSize": 1_000, "spec.data.virtualShards": 64}, "spec.data"
    ),
    "snapshots of another job by ftp": job({"spec.checkpoint.restoreFrom": "ftp://host/x"}, "spec.checkpoint"),
    "deltas to a relative path": job({"spec.checkpoint.publish": {"uri": "deltas"}}, "spec.checkpoint.publish"),
    "deltas among the snapshots": job(
        {
            "spec.checkpoint.publish": {"uri": "s3://bucket/ranker-v12//"},
            "spec.checkpoint.uri": "s3://bucket/ranker-v12/",
        },
        "spec.checkpoint",
    ),
    "deltas at too few bits": job(
        {"spec.checkpoint.publish": {"uri": "s3://bucket/deltas", "bits": 4}},
        "spec.checkpoint.publish.bits",
        'spec.checkpoint.publish.bits: Unsupported value: 4: supported values: "8", "16", "32"',
    ),
    "a key without encryption by it": job(
        {"spec.checkpoint.s3": {"encryption": "AES256", "kmsKeyId": "alias/snapshots"}}, "spec.checkpoint.s3"
    ),
    "encryption of data that is only read": job(
        {"spec.data.s3": {"encryption": "AES256"}}, "spec.data.s3.encryption", 'unknown field "spec.data.s3.encryption"'
    ),
    "a period of no length": job({"spec.checkpoint.retention": {"keepEvery": "0h0m"}}, "spec.checkpoint.retention"),
    "no time to make a step in": job({"spec.lifecycle.hangTimeout": "0s"}, "spec.lifecycle"),
    "no bandwidth": job({"spec.checkpoint.restoreBandwidth": 0}, "spec.checkpoint"),
    "no bandwidth, in megabytes": job({"spec.checkpoint.restoreBandwidth": "0.0M"}, "spec.checkpoint"),
    "no snapshot above a base": job(
        {"spec.checkpoint.maxChain": 0},
        "spec.checkpoint.maxChain",
        "spec.checkpoint.maxChain in body should be greater than or equal to 1",
    ),
    "prior with a trace": job(
        {"spec.model.tables.0.distribution": {"prior": "uniform", "reference": "configmap:reuse"}},
        "spec.model.tables[0].distribution",
    ),
    "trace in an object store": job(
        {"spec.model.tables.0.distribution": {"reference": "s3://bucket/trace.json"}},
        "spec.model.tables[0].distribution.reference",
        "spec.model.tables[0].distribution.reference in body should match",
    ),
    "too many batches ahead": job(
        {"spec.trainer.cache": {"lookahead": 9}},
        "spec.trainer.cache.lookahead",
        "spec.trainer.cache.lookahead in body should be less than or equal to 8",
    ),
    "more ranks than shards": job(
        {"spec.data.virtualShards": 64, "spec.trainer.replicas": 33, "spec.trainer.processesPerReplica": 2}, "spec"
    ),
    "more ranks than samples of a batch": job(
        {"spec.data.globalBatchSize": 65, "spec.trainer.replicas": 33, "spec.trainer.processesPerReplica": 2}, "spec"
    ),
    "a smallest gang of more ranks than shards": job(
        {
            "spec.data.virtualShards": 64,
            "spec.trainer.objective": {"minReplicas": 33, "maxReplicas": 99},
            "spec.trainer.processesPerReplica": 2,
        },
        "spec",
    ),
    "two targets of one objective": job(
        {"spec.trainer.objective": {"maxReplicas": 9, "samplesPerSecond": 1, "deadline": "1h"}},
        "spec.trainer.objective",
    ),
    "bounds of an objective that hold no number": job(
        {"spec.trainer.objective": {"minReplicas": 3, "maxReplicas": 2}}, "spec.trainer.objective"
    ),
    "hardware that is named and chosen": job(
        {
            "spec.trainer.hardware": "a",
            "spec.trainer.hardwareProfiles": ["a", "b"],
            "spec.trainer.objective": {"maxReplicas": 2},
        },
        "spec.trainer",
    ),
    "hardware to choose from and no objective": job({"spec.trainer.hardwareSelector": {"pool": "a"}}, "spec.trainer"),
    "hardware that is listed twice": job(
        {"spec.trainer.hardwareProfiles": ["a", "b", "a"], "spec.trainer.objective": {"maxReplicas": 2}}, "spec.trainer"
    ),
    "a deadline for samples that nobody has counted": job(
        {
            "spec.trainer.objective": {"maxReplicas": 2, "deadline": "1h"},
            "spec.data.format": "parquet",
            "spec.data.train.uris": ["/data"],
            "spec.data.eval.uris": ["/data"],
        },
        "spec",
    ),
    "a label that no object can have": job(
        {"spec.trainer.hardwareSelector": {"pool": "a b"}, "spec.trainer.objective": {"maxReplicas": 2}},
        "spec.trainer.hardwareSelector.pool",
        "spec.trainer.hardwareSelector.pool in body should match",
    ),
    "nothing to train on": job({"spec.data.format": "parquet"}, "spec.data"),
    "files that nobody would read": job({"spec.data.eval.uris": ["/data/eval"]}, "spec.data"),
    "data of a place that nobody reads": job(
        {"spec.data.format": "parquet", "spec.data.train.uris": ["/data", "gs://bucket/a"]},
        "spec.data.train.uris[1]",
        "expected a path, file:///path or s3://bucket/prefix",
    ),
    "data of another machine": job(
        {"spec.data.format": "parquet", "spec.data.train.uris": ["file://host/data"]}, "spec.data.train.uris[0]"
    ),
    "requests above limits": job(
        {"spec.trainer.resources": {"requests": {"memory": "2Gi", "cpu": 1}, "limits": {"memory": "2G", "cpu": "1"}}},
        "spec.trainer.resources",
    ),
    "requests of the checkpointer above limits": job(
        {"spec.checkpoint.resources": {"requests": {"cpu": "1500m"}, "limits": {"cpu": 1}}}, "spec.checkpoint.resources"
    ),
    "an S3 service that is no URL": job(
        {"spec.data.s3": {"endpoint": "minio:9000"}},
        "spec.data.s3.endpoint",
        "spec.data.s3.endpoint in body should match '^https?://'",
    ),
    # over all tables: too much for CEL
    "two tables of one name": job({"spec.model.tables.1.name": "ads"}, "spec", None),
    "one feature twice in a table": job({"spec.model.tables.1.features": ["C1", "C2", "C1"]}, "spec", None),
    "weights in criteo-tsv": job(
        {**FILES, "spec.model.tables.1.features": ["C2"], "spec.model.tables.1.weights": ["C3"]}, "spec", None
    ),
    "fewer weights than features": job(
        {"spec.model.tables.1.features": ["C1", "C2"], "spec.model.tables.1.weights": ["W"]}, "spec.model.tables[1]"
    ),
    "a block of columns that does not divide them": job(
        {"spec.model.tables.1.columnBlock": 12}, "spec.model.tables[1]"
    ),
    "bags longer on average than the longest": job({"spec.model.tables.1.avgLookups": 3.5}, "spec.model.tables[1]"),
    "bags of a group longer on average than the longest": job(
        {"spec.model.tableGroups": [{**GROUP, "template": {"rows": 10, "dim": 16, "avgLookups": 2}}]},
        "spec.model.tableGroups[0].template",
    ),
    "columns that are one block pinned to several ranks": job(
        {"spec.model.tables.1.pin": {"sharding": "column"}}, "spec.model.tables[1]"
    ),
    "a block as wide as a group's tables that are split by columns": job(
        {
            "spec.model.tableGroups": [
                {**GROUP, "template": {"rows": 10, "dim": 16, "columnBlock": 16, "pin": {"sharding": "column"}}}
            ]
        },
        "spec.model.tableGroups[0].template",
    ),
    # tables of unique ids
    "unique ids on every rank": job(
        {"spec.model.tables.1": {"name": "t", **UNIQUE, "pin": {"sharding": "data"}}}, "spec.model.tables[1]"
    ),
    "unique ids in blocks of columns": job(
        {"spec.model.tables.1": {"name": "t", **UNIQUE, "columnBlock": 8}}, "spec.model.tables[1]"
    ),
    "more buckets than rows": job(
        {"spec.model.tables.1": {"name": "t", **UNIQUE, "embedding": {"hash": "unique", "buckets": 16}}},
        "spec.model.tables[1]",
    ),
    "buckets without unique ids": job(
        {"spec.model.tables.1.embedding": {"buckets": 2}}, "spec.model.tables[1].embedding"
    ),
    "half-life of scores that rows do not have": job(
        {"spec.model.tables.1": {"name": "t", **UNIQUE, "embedding": {**KEYS, "eviction": {"halfLifeSamples": 9}}}},
        "spec.model.tables[1].embedding.eviction",
    ),
    "ages of other features": job(
        {"spec.model.tables.1": {"name": "t", **UNIQUE, "embedding": {**KEYS, "eviction": {"maxAgeSamples": [9, 9]}}}},
        "spec.model.tables[1]",
    ),
    "ages of many features of a group": job(
        {
            "spec.model.tableGroups": [
                GROUP | {"template": {**UNIQUE, "embedding": {**KEYS, "eviction": {"maxAgeSamples": [9, 9]}}}}
            ]
        },
        "spec.model.tableGroups[0]",
    ),
    "chance and count": job(
        {
            "spec.model.tables.1": {
                "name": "t",
                **UNIQUE,
                "embedding": {**KEYS, "admission": {"probability": 0.5, "count": 2}},
            }
        },
        "spec.model.tables[1].embedding.admission",
    ),
    "counters without a name": job(
        {"spec.model.tables.1": {"name": "t" * 57, **UNIQUE, "embedding": {**KEYS, "admission": {"count": 2}}}},
        "spec.model.tables[1]",
    ),
    "no chance": job(
        {"spec.model.tables.1": {"name": "t", **UNIQUE, "embedding": {**KEYS, "admission": {"probability": 0}}}},
        "spec.model.tables[1].embedding.admission",
    ),
    "shared rows without unique ids": job(
        {"spec.model.tables.1.embedding": {"unknown": "shared", "sharedRows": 8}}, "spec.model.tables[1].embedding"
    ),
    "ids without rows to share": job(
        {"spec.model.tables.1": {"name": "t", **UNIQUE, "embedding": {**KEYS, "unknown": "shared"}}},
        "spec.model.tables[1].embedding",
    ),
    "shared rows that no id reads": job(
        {"spec.model.tables.1": {"name": "t", **UNIQUE, "embedding": {**KEYS, "sharedRows": 8}}},
        "spec.model.tables[1].embedding",
    ),
    "buckets that cannot share evenly": job(
        {"spec.model.tables.1": {"name": "t", **UNIQUE, "embedding": {**KEYS, **SHARED, "buckets": 4}}},
        "spec.model.tables[1]",
    ),
    "default buckets that cannot share evenly": job(
        {"spec.model.tables.1": {"name": "t", **UNIQUE, "rows": 196_608, "embedding": {**KEYS, **SHARED}}},
        "spec.model.tables[1]",
    ),
    "shared rows of a group without names": job(
        {
            "spec.model.tableGroups": [
                GROUP | {"name": "g" * 52, "template": {**UNIQUE, "embedding": {**KEYS, **SHARED}}}
            ]
        },
        "spec.model.tableGroups[0]",
    ),
    "maintenance without unique ids": job({"spec.model.maintenanceSteps": 8}, "spec.model"),
    "lost shards of unique ids": job(
        {"spec.model.tables.1": {"name": "t", **UNIQUE}, "spec.checkpoint.partialRestore": True}, "spec"
    ),
    "columns that are not kept": job(
        {"spec.model.tables.1": {"name": "t", **SIZED, "embedding": {"dimension": {"keepBytes": 0}}}},
        "spec.model.tables[1].embedding.dimension",
    ),
    "sizes out of order": job(
        {
            "spec.model.tables.1": {
                "name": "t",
                **SIZED,
                "embedding": {"dimension": {"keepBytes": 0.5, "sizes": [8, 4, 16]}},
            }
        },
        "spec.model.tables[1].embedding.dimension",
    ),
    "sizes without all columns": job(
        {"spec.model.tables.1": {"name": "t", **SIZED, "embedding": {"dimension": {"keepBytes": 0.5, "sizes": [4]}}}},
        "spec.model.tables[1]",
    ),
    "sizes of column blocks": job(
        {"spec.model.tables.1": {"name": "t", **SIZED, "columnBlock": 8}}, "spec.model.tables[1]"
    ),
    "sizes of fp16": job({"spec.model.tables.1": {"name": "t", **SIZED, "dtype": "fp16"}}, "spec.model.tables[1]"),
    "sizes on block storage": job(
        {"spec.model.tables.1": {"name": "t", **SIZED, "pin": {"tier": "block"}}}, "spec.model.tables[1]"
    ),
    "sizes of replicas": job(
        {"spec.model.tables.1": {"name": "t", **SIZED, "pin": {"sharding": "data"}}}, "spec.model.tables[1]"
    ),
    "sizes under adam": job(
        {"spec.model.tables.1": {"name": "t", **SIZED}, "spec.training.rowOptimizer": {"kind": "adam"}}, "spec"
    ),
    "sizes in HBM": job(
        {"spec.model.tables.1": {"name": "t", **SIZED}, "spec.trainer.tierBudgets": {"hbm": "1Gi"}}, "spec"
    ),
    "rows regularized for bits that auto may not choose": job(
        {"spec.training.rowRegularizer": {"bits": 2, "lastSteps": 9}, "spec.checkpoint.bits": "auto"}, "spec"
    ),
    "rows regularized for other bits than the stored ones": job(
        {"spec.training.rowRegularizer": {"bits": 2, "lastSteps": 9}, "spec.checkpoint.bits": 4}, "spec"
    ),
    "feature that criteo lacks": job({**FILES, "spec.model.tables.1.features": ["C27"]}, "spec", None),
    "dense feature that criteo lacks": job({**FILES, "spec.model.denseFeatures": ["I0", "I1"]}, "spec", None),
    "too many tables by groups": job({"spec.model.tableGroups": [{**GROUP, "count": 4_999}]}, "spec.model"),
    # the pods' overlay
    "overlay of the host's network": job(
        {"spec.trainer.podTemplate.spec": {"hostNetwork": True}},
        "spec.trainer.podTemplate.spec",
        'unknown field "spec.trainer.podTemplate.spec.hostNetwork"',
    ),
    "overlay of the command": job(
        {"spec.trainer.podTemplate.container": {"command": ["sh"]}},
        "spec.trainer.podTemplate.container",
        'unknown field "spec.trainer.podTemplate.container.command"',
    ),
    "overlay of the name": job(
        {"spec.trainer.podTemplate.metadata": {"name": "mine"}},
        "spec.trainer.podTemplate.metadata",
        'unknown field "spec.trainer.podTemplate.metadata.name"',
    ),
    "overlay of another type": job(
        {"spec.trainer.podTemplate.spec": {"volumes": {}}},
        "spec.trainer.podTemplate.spec.volumes",
        "spec.trainer.podTemplate.spec.volumes in body must be of type array",
    ),
    "overlay of a variable with a list for a name": job(
        {"spec.trainer.podTemplate.container": {"env": [{"name": ["A"], "value": "1"}]}},
        "spec.trainer.podTemplate.container.env[0].name",
        "spec.trainer.podTemplate.container.env[0].name in body must be of type string",
    ),
    "overlay of a variable without a name": job(
        {"spec.trainer.podTemplate.container": {"env": [{"name": "A"}, {"value": "1"}]}},
        "spec.trainer.podTemplate.container.env[1].name",
        "spec.trainer.podTemplate.container.env[1].name: Required value",
    ),
    "overlay of a text for a volume": job(
        {"spec.trainer.podTemplate.spec": {"volumes": ["data"]}},
        "spec.trainer.podTemplate.spec.volumes[0]",
        "spec.trainer.podTemplate.spec.volumes[0] in body must be of type object",
    ),
    "overlay of a label that is a number": job(
        {"spec.trainer.podTemplate.metadata": {"labels": {"version": 2}}},
        "spec.trainer.podTemplate.metadata.labels.version",
        "spec.trainer.podTemplate.metadata.labels.version in body must be of type string",
    ),
    "overlay of an affinity to nothing": job(
        {"spec.trainer.podTemplate.spec": {"affinity": {"nodeAffinty": {}}}},
        "spec.trainer.podTemplate.spec.affinity.nodeAffinty",
        'unknown field "spec.trainer.podTemplate.spec.affinity.nodeAffinty"',
    ),
    "overlay of a list for an affinity": job(
        {"spec.trainer.podTemplate.spec": {"affinity": {"nodeAffinity": []}}},
        "spec.trainer.podTemplate.spec.affinity.nodeAffinity",
        "spec.trainer.podTemplate.spec.affinity.nodeAffinity in body must be of type object",
    ),
    "overlay of a text for a term": job(
        {"spec.trainer.podTemplate.spec": {"affinity": {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": ["a"]}}}}},
        f"spec.trainer.podTemplate.spec.affinity.nodeAffinity.{REQUIRED}.nodeSelectorTerms[0]",
        f"affinity.nodeAffinity.{REQUIRED}.nodeSelectorTerms[0] in body must be of type object",
    ),
    "overlay of an expression with a misspelt key": job(
        {
            "spec.trainer.podTemplate.spec": {
                "affinity": {
                    "nodeAffinity": {
                        REQUIRED: {"nodeSelectorTerms": [{"matchFields": [{"key": "a", "operater": "Exists"}]}]}
                    }
                }
            }
        },
        f"spec.trainer.podTemplate.spec.affinity.nodeAffinity.{REQUIRED}.nodeSelectorTerms[0].matchFields[0].operater",
        f'unknown field "spec.trainer.podTemplate.spec.affinity.nodeAffinity.{REQUIRED}.nodeSelectorTerms[0]'
        '.matchFields[0].operater"',
    ),
    "overlay of an object for a list of terms": job(
        {"spec.trainer.podTemplate.spec": {"affinity": {"podAffinity": {REQUIRED: {}}}}},
        f"spec.trainer.podTemplate.spec.affinity.podAffinity.{REQUIRED}",
        f"affinity.podAffinity.{REQUIRED} in body must be of type array",
    ),
    # where pods go
    "pack without a domain": job({"spec.scheduling": {"topology": "pack"}}, "spec.scheduling"),
    "domain of no topology": job({"spec.scheduling": {"topologyKey": "zone"}}, "spec.scheduling"),
    "kueue without a queue": job({"spec.scheduling": {"gang": "kueue"}}, "spec.scheduling"),
    "queue that nobody reads": job({"spec.scheduling": {"gang": "coscheduling", "queue": "ads"}}, "spec.scheduling"),
    # hardware profiles
    "profile without tiers": profile({"spec.tiers": GONE}, "spec.tiers", "spec.tiers: Required value"),
    "profile without DDR": profile(
        {"spec.tiers": {"block": {"bytes": 1}}}, "spec.tiers.ddr", "spec.tiers.ddr: Required value"
    ),
    "profile's bytes in words": profile(
        {"spec.tiers.ddr.bytes": "lots"},
        "spec.tiers.ddr.bytes",
        f"spec.tiers.ddr.bytes in body should match '{BYTES_PATTERN}'",
    ),
    "tier with two mounts": profile(
        {"spec.tiers.scm": {"bytes": "1Ti", "hostPath": "/mnt/scm", "storageClass": "local"}}, "spec.tiers.scm"
    ),
    "a variable that is not NCCL's": profile(
        {"spec.network": {"ncclEnvironment": {"NCCL_DEBUG": "INFO", "LD_PRELOAD": "x.so"}}}, "spec.network"
    ),
    "no devices": profile(
        {"spec.devices": {"resource": "nvidia.com/gpu", "count": 0, "hbm": {"bytes": "80Gi"}}},
        "spec.devices.count",
        "spec.devices.count in body should be greater than or equal to 1",
    ),
    "negative rate": profile(
        {"spec.tiers.ddr.readBytesPerSecond": -5},
        "spec.tiers.ddr.readBytesPerSecond",
        "spec.tiers.ddr.readBytesPerSecond in body should be greater than or equal to 0",
    ),
    "profile's expression with a misspelt key": profile(
        {"spec.nodeAffinityTerms": [{"matchExpressions": [{"keys": "pool", "operator": "Exists"}]}]},
        "spec.nodeAffinityTerms[0].matchExpressions[0].keys",
        'unknown field "spec.nodeAffinityTerms[0].matchExpressions[0].keys"',
    ),
    "text for a profile's expressions": profile(
        {"spec.nodeAffinityTerms": [{"matchExpressions": "memory.dlrm.dev/scm"}]},
        "spec.nodeAffinityTerms[0].matchExpressions",
        "spec.nodeAffinityTerms[0].matchExpressions in body must be of type array",
    ),
    "price in words": profile(
        {"spec.pricePerHour": "cheap"}, "spec.pricePerHour", "spec.pricePerHour in body must be of type number"
    ),
    "unknown field of a profile": profile({"spec.gpu": 1}, "spec.gpu", 'unknown field "spec.gpu"'),
}
CASES = [pytest.param(bad, id=name) for name, bad in BAD.items()]


def spoiled(good: dict[str, dict[str, Any]], bad: Bad) -> dict[str, Any]:
    document = copy.deepcopy(good[bad.kind])
    for path, value in bad.change.items():
        *above, last = (int(step) if step.isdigit() else step for step in path.split("."))
        place: Any = document
        for step in above:
            place = place.setdefault(step, {}) if isinstance(place, dict) else place[step]
        if value is GONE:
            del place[last]
        else:
            place[last] = value
    return document


def test_the_good_manifests_are_good(good: dict[str, dict[str, Any]]) -> None:
    assert parse_job(good["DLRMJob"]).metadata.name == "job"
    assert parse_profile(good["HardwareProfile"]).spec.tiers.ddr.bytes == 256 * 2**30


def refusal(document: dict[str, Any], kind: str) -> InvalidSpecError:
    with pytest.raises(InvalidSpecError) as refused:
        PARSERS[kind](document)
    return refused.value


@pytest.mark.parametrize("bad", CASES)
def test_models_reject_a_bad_manifest_and_name_the_field(good: dict[str, dict[str, Any]], bad: Bad) -> None:
    error = refusal(spoiled(good, bad), bad.kind)

    assert error.path == bad.field
    assert str(error).startswith(f"{bad.field}: ")


@pytest.mark.cluster
@pytest.mark.parametrize("bad", CASES)
def test_api_server_rejects_it_with_the_same_message(server: Any, good: dict[str, dict[str, Any]], bad: Bad) -> None:
    document = spoiled(good, bad)

    try:
        server.create(document)
    except RuntimeError as refused:
        message = str(refused)
    else:
        message = None

    expected = refusal(document, bad.kind).problem if bad.server == "" else bad.server
    assert (message is None) == (expected is None)
    if message and expected:
        assert expected in message
