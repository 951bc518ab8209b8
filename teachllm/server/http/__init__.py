"""Provide what every HTTP endpoint shares: bodies, errors, middleware, request ids, server-sent events."""
