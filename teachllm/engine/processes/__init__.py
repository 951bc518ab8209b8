"""The engine's core in a process of its own, and the messages between it and the API process."""
