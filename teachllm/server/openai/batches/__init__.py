"""OpenAI's batch files: many requests in, many answers out."""
