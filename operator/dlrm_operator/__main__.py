"""``python -m dlrm_operator``."""

from dlrm_operator.app import main

if __name__ == "__main__":
    main()
