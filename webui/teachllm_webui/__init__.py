"""The visualizer of block tables and batch timelines. It comes later; this package holds its place."""
