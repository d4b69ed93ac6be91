"""Where ``dlrmctl`` and ``python -m dlrm_cli`` begin: what takes its while to load is loaded within reach of Ctrl-C."""

import sys


def main() -> int:
    """Run dlrmctl; returns its exit code, also where Ctrl-C comes before it knows what was asked."""
    try:
        from dlrm_cli.app import main as run

        return run()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
