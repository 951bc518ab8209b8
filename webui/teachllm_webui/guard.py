"""Let only the page talk to its server.

Any website that a user has open can send requests to 127.0.0.1, and one that gives its own name that address can
read the answers, too. Browsers say where a request comes from (`Origin`) and which name it was sent to (`Host`): the
name has to be the page's own, and so has the origin, where there is one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import urlsplit

_Scope = MutableMapping[str, Any]
_App = Callable[[_Scope, Any, Any], Awaitable[None]]
_REFUSAL = b"This page answers to its own address alone.\n"
EVERYWHERE = ("0.0.0.0", "::", "")


class Guard:
    """Refuse all other requests with 403.

    Args:
        host: the address listened on. One for all interfaces has names that are not known here, and any may be used.
    """

    def __init__(self, app: _App, host: str) -> None:
        self._app = app
        self._names = None if host in EVERYWHERE else {host, "localhost", "127.0.0.1", "::1"}

    async def __call__(self, scope: _Scope, receive: Any, send: Any) -> None:
        if scope["type"] not in ("http", "websocket") or self._may_enter(dict(scope["headers"])):
            await self._app(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 403, "headers": [(b"content-type", b"text/plain")]})
        await send({"type": "http.response.body", "body": _REFUSAL})

    def _may_enter(self, headers: dict[bytes, bytes]) -> bool:
        host, origin = (headers.get(name, b"").decode("latin-1") for name in (b"host", b"origin"))
        try:
            name = urlsplit(f"//{host}").hostname
            is_own = not origin or urlsplit(origin).netloc == host
        except ValueError:
            return False
        return is_own and (self._names is None or name in self._names)
