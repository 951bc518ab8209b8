"""`teachllm viz`: the view of export.py over a live session, in a Gradio page.

One `gr.HTML` holds everything: its script mounts the views, and its server functions are the session's buttons. A tab
asks for the news in a long poll. The page loads nothing from outside, and answers this machine alone unless told
otherwise.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from teachllm_webui.export import assets
from teachllm_webui.forms import changes_of, request_of, what_if_of
from teachllm_webui.guard import EVERYWHERE, LOOPBACK, Guard
from teachllm_webui.presets import PRESETS, preset
from teachllm_webui.session import LiveSession
from teachllm_webui.timeline import Seen
from teachllm_webui.what_if import SHAPE_NAMES, WhatIf

POLL_S = 5.0
MAX_TABS = 200  # each has a thread while it waits for news
LIVE_VIEW = Path(__file__).parent / "live_view"
LIVE_SCRIPTS = ("forms.js", "compare.js", "live.js")
# Orders about what a tab shows, which something else may have replaced by now.
ABOUT_SHOWN = ("abort", "fork", "drop")
REPLACING = ("preset", "home", "what_if")
_QUESTION = "Another tab watches this run, which has not ended. Replace it for both?"
Answer = dict[str, Any]
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Page:
    """A page that is up.

    Attributes:
        url: its address.
        close: ends it.
        is_open: other machines can reach it, and `url` holds a token.
    """

    url: str
    close: Callable[[], None]
    is_open: bool = False


def server_functions(session: LiveSession) -> list[Callable[..., Any]]:
    """Return the functions that the page's script can call. Each takes one object or nothing; a refusal has `error`."""

    def news(seen: Mapping[str, Any]) -> Answer:
        wait_s = POLL_S if seen.get("wait") else 0.0
        tab = str(seen.get("tab", ""))
        return session.news(Seen(seen["generation"], seen["cursors"], seen["status"], tab), wait_s)

    def drive(given: Mapping[str, Any]) -> Answer:
        try:
            is_sure = given.get("sure") is True or given.get("action") not in REPLACING
            if not is_sure and session.would_disturb(str(given.get("tab", ""))):
                return {"question": _QUESTION}
            _drive(session, given)
        except (ValueError, RuntimeError) as error:
            return {"error": str(error)}
        except Exception as error:
            _log.exception("an order of the page failed: %s", given)
            return {"error": f"{type(error).__name__}: {error}"}
        return {}

    return [news, drive]


def _drive(session: LiveSession, given: Mapping[str, Any]) -> None:
    name, value, form = given.get("action"), given.get("value"), given.get("form") or {}
    if name in ABOUT_SHOWN and given.get("generation") != session.generation:
        raise ValueError("the page has moved on meanwhile: try again")
    actions: dict[Any, Callable[[], None]] = {
        "play": session.play,
        "pause": session.pause,
        "step": session.step,
        "speed": lambda: session.set_speed(None if value is None else float(str(value))),
        "abort": lambda: session.abort(int(given["side"]), str(value)),
        "home": lambda: session.home[1]() if session.home else None,
        "preset": lambda: session.start_preset(preset(str(value))),
        "submit": lambda: session.submit(request_of(form)),
        "fork": lambda: session.fork_and_wait(_step(given), changes_of(form)),
        "drop": session.drop_fork,
        "what_if": lambda: session.what_if(what_if_of(form)),
    }
    if name not in actions:
        raise ValueError(f"there is no order {name!r}")
    actions[name]()


def _step(given: Mapping[str, Any]) -> int:
    step = given.get("step")
    if not isinstance(step, int):
        raise ValueError("there is no step to fork at yet: play or step first")
    return step


def build(session: LiveSession) -> Any:
    """The `gr.Blocks`, and what `launch` needs beside it.

    Raises:
        ImportError: gradio is not installed; one line says what installs it.
    """
    gr = _gradio()
    told = {
        "home": session.home and session.home[0],
        "presets": [{"name": p.name, "title": p.title, "look_at": p.look_at} for p in PRESETS],
        "what_if": {"defaults": asdict(WhatIf()), "models": SHAPE_NAMES},
    }
    script = "\n".join([assets().script, *((LIVE_VIEW / name).read_text(encoding="utf-8") for name in LIVE_SCRIPTS)])
    mount = f"teachllm.mountLive(element.querySelector('#teachllm'), server, {json.dumps(told)});"
    with gr.Blocks(analytics_enabled=False, title="teachllm viz", fill_width=True) as blocks:
        gr.HTML(
            html_template='<div id="teachllm"></div>',
            js_on_load=f"{script}\n{mount}",
            server_functions=server_functions(session),
            apply_default_css=False,
        )
    return blocks


def launch(session: LiveSession, host: str = "127.0.0.1", port: int | None = None) -> Page:
    """Puts the page up, in a thread of its own.

    Args:
        port: 0 or None picks a free one.

    Raises:
        ImportError: gradio is not installed.
        OSError: the port is in use.
    """
    port = _free_port(host, port or 0)
    if host not in EVERYWHERE:  # Gradio looks whether it is up, which no proxy can tell
        os.environ["NO_PROXY"] = ",".join(filter(None, (os.environ.get("NO_PROXY"), host, "localhost")))
    from starlette.middleware import Middleware
    from starlette.middleware.gzip import GZipMiddleware

    blocks = build(session)
    token = None if host in LOOPBACK else secrets.token_urlsafe()
    style = assets().style + (LIVE_VIEW / "live.css").read_text(encoding="utf-8")
    _, url, _ = blocks.launch(
        server_name=host,
        server_port=port,
        prevent_thread_lock=True,
        quiet=True,
        share=False,
        ssr_mode=False,
        inbrowser=False,
        max_threads=MAX_TABS,
        footer_links=[],
        head=f'<link rel="icon" href="data:,"><style>{style}</style>',
        app_kwargs={"middleware": [Middleware(Guard, host=host, token=token), Middleware(GZipMiddleware)]},
    )

    def close() -> None:
        session.close()
        blocks.close(verbose=False)

    return Page(url if token is None else f"{url}?token={token}", close, is_open=token is not None)


def _free_port(host: str, port: int) -> int:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        with socket.create_server((host, port), family=family) as server:
            return int(server.getsockname()[1])
    except OSError as error:
        why = error.strerror if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0)
        raise OSError(f"{host}:{port} cannot be listened on ({why}): choose another --host or --port") from error


def _gradio() -> Any:
    try:
        import gradio
    except ImportError as error:
        raise ImportError("the visualizer is a Gradio page: pip install 'teachllm[ui]'") from error
    return gradio
