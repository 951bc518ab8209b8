"""What the benchmark commands run: workloads, the machine's ceilings, and the time no engine can beat."""
