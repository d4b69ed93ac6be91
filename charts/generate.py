"""Writes the tables of metrics into each process' METRICS.md, and the chart's Grafana dashboards.

``python charts/generate.py`` writes them; with ``--check`` it writes nothing and fails where a file differs.
"""

from __future__ import annotations

import argparse
import sys

from dlrm_monitoring.files import rendered


def main() -> int:
    """Write or check the files; 1 where a checked file differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where a file differs")
    check = parser.parse_args().check
    wanted = rendered()
    stale = [path for path, text in wanted.items() if not path.exists() or path.read_text("utf-8") != text]
    for path in stale:
        if check:
            print(f"{path} is not what the code gives: run make generate", file=sys.stderr)
        else:
            path.write_text(wanted[path], "utf-8")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
