"""What the engine reports of itself: statistics, traces, and each step's place under the roofline."""
