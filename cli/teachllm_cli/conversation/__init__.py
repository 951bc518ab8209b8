"""A chat in a terminal: its history, who answers, and how an answer is shown."""
