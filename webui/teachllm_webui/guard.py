"""Let only the page, and who may see it, talk to its server.

Any website that a user has open can send requests to 127.0.0.1, and one that gives its own name that address can
read the answers, too. Browsers say where a request comes from (`Origin`) and which name it was sent to (`Host`): the
name has to be the page's own, and so has the origin, where there is one.

Where other machines can reach the page, its address holds a token, which the browser then keeps as a cookie. Files are
taken from nobody: the page needs none, and Gradio would keep them.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, MutableMapping
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qs, urlsplit

_Scope = MutableMapping[str, Any]
_App = Callable[[_Scope, Any, Any], Awaitable[None]]
_OTHER_SITE = b"This page answers to its own address alone.\n"
_NO_TOKEN = b"This page opens with the address that `teachllm viz` printed, token and all.\n"
_NO_FILES = b"This page takes no files.\n"
_COOKIE = "teachllm_token"
_STARTUP = "/startup-events"  # which Gradio asks itself for; it tells nothing
EVERYWHERE = ("0.0.0.0", "::", "")
LOOPBACK = ("localhost", "127.0.0.1", "::1")


class Guard:
    """Refuse all other requests.

    Args:
        host: the address listened on. One for all interfaces has names that are not known here, and any may be used.
        token: that the first address asked for has to hold, as `?token=`; None: none is needed.
    """

    def __init__(self, app: _App, host: str, token: str | None = None) -> None:
        self._app, self._token = app, token
        self._names = None if host in EVERYWHERE else {host, *LOOPBACK}

    async def __call__(self, scope: _Scope, receive: Any, send: Any) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        refusal = self._refusal(scope["path"], headers, scope.get("query_string", b""))
        if refusal is not None:
            status, text = refusal
            await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", b"text/plain")]})
            await send({"type": "http.response.body", "body": text})
            return
        is_new = self._token is not None and not self._has_cookie(headers) and not scope["path"].endswith(_STARTUP)
        await self._app(scope, receive, self._giving_cookie(send) if is_new else send)

    def _refusal(self, path: str, headers: dict[bytes, bytes], query: bytes) -> tuple[int, bytes] | None:
        if not self._is_own(headers):
            return 403, _OTHER_SITE
        if path.rstrip("/").endswith(("/upload", "/upload_progress")):
            return 403, _NO_FILES
        if self._token is None or self._has_cookie(headers) or path.endswith(_STARTUP):
            return None
        given = parse_qs(query.decode("latin-1")).get("token", [""])[0]
        return None if self._is_token(given) else (401, _NO_TOKEN)

    def _is_own(self, headers: dict[bytes, bytes]) -> bool:
        host, origin = (headers.get(name, b"").decode("latin-1") for name in (b"host", b"origin"))
        try:
            name = urlsplit(f"//{host}").hostname
            is_own = not origin or urlsplit(origin).netloc == host
        except ValueError:
            return False
        return is_own and (self._names is None or name in self._names)

    def _has_cookie(self, headers: dict[bytes, bytes]) -> bool:
        try:
            cookies = SimpleCookie(headers.get(b"cookie", b"").decode("latin-1"))
        except CookieError:
            return False
        return _COOKIE in cookies and self._is_token(cookies[_COOKIE].value)

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), (self._token or "").encode())

    def _giving_cookie(self, send: Any) -> Any:
        cookie = f"{_COOKIE}={self._token}; HttpOnly; SameSite=Strict; Path=/".encode()

        async def send_with_cookie(message: Any) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], (b"set-cookie", cookie)]}
            await send(message)

        return send_with_cookie
