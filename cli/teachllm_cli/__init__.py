"""The `teachllm` command: thin typer commands over the engine's public API."""
