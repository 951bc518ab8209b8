"""Where `teachllm` and `python -m teachllm_cli` begin."""

from __future__ import annotations

from teachllm_cli.app import app


def main() -> None:
    app(prog_name="teachllm")


if __name__ == "__main__":
    main()
