"""Model families, and what a checkpoint's config.json says of them."""
