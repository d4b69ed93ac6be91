"""A model of five times its memory limit, trained to the end: ``python -m benchmarks.memory_limit``.

Runs ``dlrmctl run`` in a control group whose memory the kernel limits: dlrmctl, launcher, trainer and checkpointer, the
page cache of their files and the hand-off in shared memory together. Needs root.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import yaml

from benchmarks.measure import tell
from benchmarks.memory_groups import MemoryGroup, MemoryGroupError
from benchmarks.scratch import Scratch
from dlrm_api.job import DLRMJob, parse_job
from dlrm_api.tiers import row_bytes
from dlrm_checkpointer.read.catalog import verify_snapshot
from dlrm_checkpointer.read.restore import newest_snapshot
from dlrm_stores import StoreOptions, open_store

MANIFEST = Path(__file__).parents[1] / "examples" / "larger-than-memory.yaml"
LIMIT = 3 << 30
QUICK = ("spec.training.maxSteps=6", "spec.checkpoint.intervalSteps=3", "spec.data.synthetic.evalSamples=4096")
SAMPLED_S = 0.25


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print one JSON line, and answer 1 where the run failed or a process was killed for its memory."""
    given = _parse(arguments)
    try:
        group = MemoryGroup("memory-limit")
    except MemoryGroupError as error:
        tell(f"NOT MEASURED: {error}")
        return 1
    with closing(group), Scratch(given.tier_dir) as scratch:
        group.limit(given.limit)
        line = _run(group, given, scratch.path)
    print(json.dumps(line), flush=True)
    return 0 if line["exit_code"] == 0 and not line["killed"] else 1


def _run(group: MemoryGroup, given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    settings = [f"spec.checkpoint.uri={(folder / 'store').as_uri()}", *(QUICK if given.quick else ()), *given.set]
    command = [str(Path(sys.executable).with_name("dlrmctl")), "run", str(given.manifest), "--output", "json"]
    command += ["--workdir", str(folder / "run"), "--tier-dir", str(folder / "tiers")]
    command += [word for setting in settings for word in ("--set", setting)]
    enter = 'echo $$ > "$0" && exec "$@"'  # before dlrmctl is loaded, so that nothing of it is charged elsewhere
    started = time.monotonic()
    with subprocess.Popen(["/bin/sh", "-c", enter, str(group.folder / "cgroup.procs"), *command], stdout=-1) as process:
        anonymous = _watch(group, process)
        output = b"" if process.stdout is None else process.stdout.read()
    line = {
        "benchmark": "memory_limit",
        "limit_bytes": given.limit,
        "peak_bytes": group.peak,
        "peak_anonymous_and_shared_bytes": anonymous,
        **group.events(),
        "exit_code": process.returncode,
        "seconds": round(time.monotonic() - started, 1),
    }
    return line | _outcome(given.manifest, folder / "store", output) if process.returncode == 0 else line


def _watch(group: MemoryGroup, process: subprocess.Popen[bytes]) -> int:
    """Most bytes, at any sample until the process ends, that no page cache could give back."""
    most = 0
    while process.poll() is None:
        most = max(most, group.anonymous())
        time.sleep(SAMPLED_S)
    return most


def _outcome(manifest: Path, store: Path, output: bytes) -> dict[str, Any]:
    """Return the bytes of all tables with their state, and of the rows that the last snapshot holds."""
    job: DLRMJob = parse_job(yaml.safe_load(manifest.read_text()))
    kind = job.spec.training.row_optimizer.kind
    sizes = {table.name: row_bytes(table.dim, table.dtype, kind) for table in job.spec.model.all_tables()}
    result = json.loads(output)
    snapshot, _ = newest_snapshot(open_store(store.as_uri(), StoreOptions()), check=None)
    assert snapshot is not None, "dlrmctl ended well, and so left a snapshot"
    touched = sum(rows * sizes[table] for table, rows in verify_snapshot(snapshot).rows.items())
    return {
        "table_bytes": sum(table.rows * sizes[table.name] for table in job.spec.model.all_tables()),
        "touched_bytes": touched,
        "steps": result["step"],
        "samples_per_s": result["samples_per_s"],
        "snapshots_committed": len(result["snapshots"]),
        "eval": result["eval"],
    }


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory_limit", description=__doc__)
    parser.add_argument("--manifest", type=Path, default=MANIFEST, help="of the job; the store's folder is replaced")
    parser.add_argument("--limit", type=int, default=LIMIT, metavar="BYTES", help="of memory (default 3 GiB)")
    parser.add_argument("--quick", action="store_true", help="a few steps: tries the program")
    parser.add_argument("--tier-dir", type=Path, default=Path(tempfile.gettempdir()), help="on the block device")
    parser.add_argument("--set", action="append", default=[], metavar="spec.path=value", help="as of dlrmctl run")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
