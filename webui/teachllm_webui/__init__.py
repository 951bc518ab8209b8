"""The visualizer: draw a trace's block tables, batch timeline, ranks and metrics in the browser."""
