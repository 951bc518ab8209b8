"""Report on the engine: statistics, traces, and each step's place under the roofline."""
