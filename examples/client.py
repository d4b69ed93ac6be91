"""Train a job from Python, and look at its snapshots: python examples/client.py examples/quickstart.yaml."""

import sys

from dlrm_client import load, run, snapshots

job = load(sys.argv[1])
result = run(job)
print(f"{result.step} steps, training loss {result.train_loss:.4f}")
if result.eval is not None:
    print(f"normalized entropy {result.eval.ne:.4f}")
for each in snapshots(job.spec.checkpoint.uri):
    print(f"step {each.step}: {each.kind} at {each.bits} bits, {each.bytes:,} bytes")
