"""Model families, and how a checkpoint becomes a model in memory."""
