"""Start `teachllm` and `python -m teachllm_cli`."""

from __future__ import annotations

import sys


def main() -> None:
    try:
        from teachllm_cli.app import app

        app(prog_name="teachllm")
    except KeyboardInterrupt:  # before a command has begun, which would have answered it
        sys.exit(130)  # as `errors.INTERRUPTED`, which may not be loaded yet


if __name__ == "__main__":
    main()
