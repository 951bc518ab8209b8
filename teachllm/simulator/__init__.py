"""Simulate: the real engine on a pretended device, hundreds of requests in a second or two, without a model.

`simulate` runs `EngineCore` with its own scheduler, block pool and recorder. Only what computes is replaced: by an
executor that makes token ids up, a cost model that says how long a step takes, and a clock that is moved on instead of
read. What comes out is a trace like any other, and figures of it. There is no second scheduler that could differ.

Source of the idea: Agrawal et al., "Vidur: A Large-Scale Simulation Framework for LLM Inference", MLSys 2024.
"""
