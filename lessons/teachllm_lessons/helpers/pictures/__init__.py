"""Pictures that one lesson draws."""
