"""The loop, and the ways to use it: `LLM`, `AsyncLLM`, and the engine that both share."""
