"""Start dlrmctl. Everything slow to load is imported within reach of Ctrl-C."""

import sys


def main() -> int:
    """Run dlrmctl and return its exit code, also after Ctrl-C during start-up."""
    try:
        from dlrm_cli.app import main as run

        return run()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
