"""Run the benchmark commands: workloads, the machine's ceilings, the time no engine can beat, a quantization's loss."""
