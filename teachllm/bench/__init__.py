"""Run the benchmark commands: workloads, the machine's ceilings, and the time no engine can beat."""
