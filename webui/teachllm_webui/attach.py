"""Follow the trace of a running server: `GET /trace`, for as long as a page looks.

    server, any machine                          here
    GET /trace: header, line, line, ...   ──▶   a thread that appends them to a log

A connection that ends is made again. The server then sends its trace from the beginning: with the same header it is
the same engine, and the log goes on where it was; another header is another engine, and another log. Of a long trace a
server keeps the newest lines only and says how many are gone.
"""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Callable
from contextlib import closing, suppress
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from teachllm_webui.latecomer import Latecomer
from teachllm_webui.trace_log import TraceLog

if TYPE_CHECKING:
    import httpx2

CONNECT_S = 10.0  # until a server that says nothing counts as not there
WAITS_S = (0.5, 5.0)  # between two tries to connect: at first, and at most
_WAITING, _TRYING = "waiting for the server's engine", "gone, trying again"
_GONE = re.compile(rb": the first (\d+) lines after the header are gone")
_ALIVE = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]  # an idle engine says nothing for hours
if hasattr(socket, "TCP_KEEPIDLE"):
    _ALIVE += [(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30), (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10)]


class AttachedServer:
    """A connection to a server's trace. `follow` reads it in a thread of its own, until `close`.

    Args:
        url: the server's.
        api_key: that it asks for, if it does.
        on_anew: called in that thread when `log` is another one.
        changed: notified at every line, and when one of the attributes below has changed.

    Attributes:
        name: the URL as it may be shown.
        log: the trace.
        is_partial: its beginning is missing.
        connection: how it stands with the server, in a few words.

    Raises:
        ValueError: there is no such trace to be had, in one line.
    """

    def __init__(
        self,
        url: str,
        api_key: str | None,
        on_anew: Callable[[AttachedServer], None],
        changed: threading.Condition | None = None,
    ) -> None:
        root, self.name = _addresses(url)
        self._on_anew, self._has_key = on_anew, bool(api_key)
        self.log = TraceLog(changed=changed)
        self.is_partial = False
        self.connection = _WAITING
        self._lost: str | None = None  # why there is no connection
        self._missing: str | None = None
        self._header: str | None = None
        self._latecomer: Latecomer | None = None
        self._num_read = 0  # lines after the header, counted as the server does
        self._at: int | None = None  # the number of the line that comes next; None before the header
        self._is_closed = threading.Event()
        self._client = _client(api_key)
        try:
            root = self.name if api_key else root  # else the name and password would go in place of the key
            self._request = _request(self._client, given=url, root=root)
            self._response = self._connect()
        except BaseException:
            self._client.close()
            raise

    @property
    def notice(self) -> str | None:
        """Return what should be known of the trace as it is shown."""
        return self._lost or self._missing

    def follow(self) -> None:
        """Begins to read."""
        threading.Thread(target=self._follow, name="trace of a server", daemon=True).start()

    def close(self) -> None:
        self._is_closed.set()
        connection = self._response.extensions["network_stream"].get_extra_info("socket")
        with suppress(OSError):  # it has ended by itself
            socket.socket.shutdown(connection, socket.SHUT_RDWR)  # wakes the thread that reads

    # -- the connection ------------------------------------------------------------------------------------

    def _connect(self) -> httpx2.Response:
        import httpx2

        self._request.extensions["timeout"] = dict.fromkeys(("connect", "read", "write", "pool"), CONNECT_S)
        try:
            response = self._client.send(self._request, stream=True)
        except httpx2.HTTPError as error:
            running = "is `teachllm serve --trace-endpoint` running there?"
            raise ValueError(f"{self.name} does not answer ({_why(error)}): {running}") from error
        if refusal := self._refusal(response):
            response.close()
            raise ValueError(refusal)
        self._request.extensions["timeout"]["read"] = None  # from here on: who has nothing to do says nothing
        self._at = None
        return response

    def _refusal(self, response: httpx2.Response) -> str | None:
        status = response.status_code
        if status in (401, 403):
            return (
                f"{self.name} does not know this API key: give another --api-key"
                if self._has_key
                else f"{self.name} asks for an API key: give --api-key, or set TEACHLLM_API_KEY"
            )
        if status == 404:
            return f"{self.name} shows no trace: start it with `teachllm serve --trace-endpoint`"
        if status != 200:
            return f"{self.name}/trace answers {status} {response.reason_phrase}: is it a server of teachllm?"
        if not response.headers.get("content-type", "").startswith("text/event-stream"):
            return f"{self.name}/trace is no stream of events: is it a server of teachllm?"
        return None

    # -- the thread ----------------------------------------------------------------------------------------

    def _follow(self) -> None:
        with closing(self._client):
            wait_s = WAITS_S[0]
            while not self._is_closed.is_set():
                with closing(self._response):
                    why = self._read()
                if self._at is not None:  # it had something to say
                    wait_s = WAITS_S[0]
                self._tell(_TRYING, f"{self.name} is gone ({why}): this is its trace up to then")
                while not self._is_closed.wait(wait_s):
                    wait_s = min(2 * wait_s, WAITS_S[1])
                    try:
                        self._response = self._connect()
                    except ValueError as error:
                        self._tell(_TRYING, str(error))
                    else:
                        self._tell(_WAITING, None)
                        break

    def _read(self) -> str:
        """To the end of the response; returns why it has ended."""
        import httpx2

        rest = b""
        try:
            for piece in self._response.iter_raw():
                *whole, rest = (rest + piece).split(b"\n")
                for line in whole:
                    if self._is_closed.is_set():
                        break
                    self._take(line.rstrip(b"\r"))
        except (httpx2.HTTPError, httpx2.StreamError, OSError) as error:
            return _why(error)
        return "it has ended"

    def _take(self, line: bytes) -> None:
        """A line of the stream: `data: ...`, a comment, or what stands between events."""
        if line.startswith(b"data:"):
            text = line.removeprefix(b"data:").decode(errors="replace").removeprefix(" ")
            if self._at is None:
                self._take_header(text)
            else:
                self._take_line(text, self._at)
                self._at += 1
        elif (gone := _GONE.match(line)) and self._at is not None:
            self._at = int(gone[1])
            if self._at > self._num_read:
                self._begin(num_gone=self._at)

    def _take_header(self, text: str) -> None:
        self._at, is_first = 0, self._header is None
        if text != self._header:
            self._header = text
            self._begin(is_first=is_first)
        self._tell("attached" if is_first else "the server is back", None)

    def _take_line(self, text: str, number: int) -> None:
        if number >= self._num_read:
            self._num_read = number + 1
            self.log.append(text if self._latecomer is None else self._latecomer.line(text))

    def _begin(self, num_gone: int = 0, is_first: bool = False) -> None:
        """A log from its header on, without the lines that are gone."""
        assert self._header is not None
        self._num_read, self.is_partial = num_gone, num_gone > 0
        self._latecomer = Latecomer() if num_gone else None
        self._missing = None
        if num_gone:
            told = "what they tell of, requests and cached blocks, is missing here"
            self._missing = f"the server keeps the end of its trace alone, {num_gone:,} lines are gone: {told}"
        header = self._header if self._latecomer is None else self._latecomer.header(self._header)
        if is_first:
            self.log.append(header)
        else:
            self.log = TraceLog([header], self.log.changed)
            self._on_anew(self)

    def _tell(self, connection: str, lost: str | None) -> None:
        with self.log.changed:
            self.connection, self._lost = connection, lost
            self.log.changed.notify_all()


def _addresses(given: str) -> tuple[str, str]:
    """A server's URL, and the same without the name and password that it may hold.

    Raises:
        ValueError: it is none.
    """
    root = (given if "://" in given else f"http://{given}").rstrip("/").removesuffix("/trace")
    try:
        parts = urlsplit(root)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_url = False
    if not is_url or parts.query or parts.fragment:
        raise _no_address(given)
    return root, parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def _client(api_key: str | None) -> httpx2.Client:
    import httpx2

    if api_key and not (api_key.isascii() and api_key.isprintable()):
        raise ValueError("the API key has characters that no request can carry: give another --api-key")
    headers = {"Accept": "text/event-stream", "Accept-Encoding": "identity"}
    headers |= {"Authorization": f"Bearer {api_key}"} if api_key else {}
    return httpx2.Client(headers=headers, transport=httpx2.HTTPTransport(socket_options=_ALIVE))


def _request(client: httpx2.Client, given: str, root: str) -> httpx2.Request:
    import httpx2

    try:
        return client.build_request("GET", f"{root}/trace")
    except httpx2.InvalidURL as error:
        raise _no_address(given) from error


def _no_address(given: str) -> ValueError:
    return ValueError(f"{given!r} is no address of a server: give one like http://127.0.0.1:8000")


def _why(error: Exception) -> str:
    """In words, without the number that a system gives it."""
    return re.sub(r"^\[Errno -?\d+\] ", "", str(error)) or type(error).__name__
