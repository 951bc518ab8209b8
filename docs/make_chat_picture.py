"""Make docs/chat.svg: a real chat with the embedded model, as a terminal shows it.

.venv/bin/python docs/make_chat_picture.py
"""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

from teachllm.config import EngineConfig
from teachllm_cli.commands.chat import answer, print_banner
from teachllm_cli.conversation.answerers import EngineAnswerer
from teachllm_cli.conversation.chat_session import ChatSession
from teachllm_cli.engine import make_llm, sampling_params

QUESTIONS = ("What is a KV cache?", "Why is it needed?", "What is paged attention?")
WIDTH = 100
PICTURE = Path(__file__).with_name("chat.svg")
# rich's own template loads a font from the network; any monospace font will do.
TEMPLATE = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)


def chat() -> str:
    """The chat with its terminal codes."""
    screen = Console(file=io.StringIO(), force_terminal=True, width=WIDTH, highlight=False, color_system="standard")
    with contextlib.closing(make_llm(EngineConfig(device="cpu"))) as llm:
        params = sampling_params(llm, {}, {"max_tokens": 256})
        answerer = EngineAnswerer(llm, params)
        session = ChatSession(answerer=answerer, out=screen, notes=screen, show_stats=True, interactive=False)
        print_banner(session)
        for question in QUESTIONS:
            screen.print(f"[bold cyan]>[/] {question}")
            answer(session, question)
    return screen.file.getvalue().rstrip()  # type: ignore[attr-defined]


def main() -> None:
    paper = Console(record=True, file=io.StringIO(), width=WIDTH)
    paper.print("[bold green]$[/] make chat ARGS=--stats", highlight=False)
    paper.print(Text.from_ansi(chat()))
    paper.save_svg(str(PICTURE), title="teachllm chat", code_format=TEMPLATE, unique_id="chat")
    print(f"wrote {PICTURE}")


if __name__ == "__main__":
    main()
