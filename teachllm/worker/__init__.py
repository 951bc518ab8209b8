"""How a plan is computed: executors, model runners, and the memory that they use."""
