"""Data parallelism: several engines that share the requests."""
