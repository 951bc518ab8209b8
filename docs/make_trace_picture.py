"""Make docs/trace.png: a step of the embedded model on a small pool, as the exported page shows it.

.venv/bin/python docs/make_trace_picture.py

It needs a Chromium.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from pathlib import Path

from playwright.sync_api import sync_playwright

from teachllm import EngineConfig, SamplingParams
from teachllm.core.trace import Recorder
from teachllm.engine.engine import Engine
from teachllm_webui.export import html_page

QUESTIONS = [
    *("What is a KV cache?", "What is paged attention?", "What is continuous batching?", "What is prefix caching?"),
    *("What is chunked prefill?", "What is preemption?", "What is a block table?", "What is speculative decoding?"),
    *("What is quantization?", "What is a token?", "What is a CUDA graph?", "What is the roofline?"),
]
SYSTEM = "You are a patient teacher. Answer in short and simple sentences, and give one example."


def trace() -> list[str]:
    lines: list[str] = []
    limits = {"num_gpu_blocks_override": 16, "max_num_seqs": 6, "max_num_batched_tokens": 48, "max_model_len": 128}
    config = EngineConfig(model="teachlm", device="cpu", **limits)
    engine = Engine(config, recorder=Recorder(lines.append, time.perf_counter, lambda ids: engine.token_texts(ids)))
    assert engine.tokenizer is not None
    for i, question in enumerate(QUESTIONS):
        messages = [{"role": "user", "content": question}]
        if i % 3:
            messages.insert(0, {"role": "system", "content": SYSTEM})
        prompt = engine.tokenizer.apply_chat_template(messages)
        params = SamplingParams(temperature=0.0, max_tokens=60, n=2 if i == 4 else 1)
        engine.add_request(question[8:-1].removeprefix("a "), {"prompt_token_ids": prompt}, params)
    while engine.has_unfinished_requests:
        engine.step()
    return lines


def main() -> None:
    target = Path(__file__).with_name("trace.png")
    lines = trace()
    steps = [event for event in map(json.loads, lines) if event["event"] == "step"]
    step = next(event["step"] for event in steps if event["preempted"])
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        path = Path(folder) / "trace.html"
        path.write_text(html_page(lines, "a trace"), encoding="utf-8")
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 720}, color_scheme="light")
        page.goto(path.as_uri())
        page.evaluate("(k) => { view.show(k); view.settle(); }", step)
        page.wait_for_timeout(500)
        page.screenshot(path=target)
        browser.close()
    print(f"wrote {target}")


if __name__ == "__main__":
    main()
