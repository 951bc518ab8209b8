"""OpenAI's endpoints: chat, completions, batches, tokenization."""
