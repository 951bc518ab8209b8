"""Turn a checkpoint into a model in memory: read its weights, or draw random ones."""
