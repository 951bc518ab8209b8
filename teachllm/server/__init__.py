"""An OpenAI-compatible server: HTTP in front of `AsyncLLM`. Needs the extra `serve`."""
