"""Decide which requests the web server answers, and add security headers to its responses.

The server listens on the loopback interface only. This is not sufficient, because other users of the machine can
connect to the server. Every web page that the user's browser shows can connect, too. Each request must therefore pass
these checks:

    Host     names this machine (127.0.0.1, localhost or [::1]). This refuses pages of another host whose name points
             to 127.0.0.1 (DNS rebinding). Any port is accepted, because `ssh -L` changes the port.
    Origin   if present, is the address of the server itself. A WebSocket request must have it.
    token    the cookie contains the secret token. A URL with the token sets the cookie.

The Content-Security-Policy lets pages load and contact only this server. Scripts inside a page are executed only if
they have the random number (nonce) of this response. Markup in the name of a run can therefore never become a script.
"""

import re
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

LOCAL_HOSTS = {"127.0.0.1", "localhost", "::1"}
TOKEN_PARAMETER = "token"
REFUSAL = (
    "bestiary view: this page needs a token. Open the complete URL, with token=..., that `bestiary view` has printed.\n"
)
POLICY_VIOLATION = 1008  # close code of a refused WebSocket


def new_token() -> str:
    """Return a random token of 256 bits."""
    return secrets.token_urlsafe(32)


def cookie_name(port: int) -> str:
    """Return the name of the cookie. Cookies of several servers on one machine have different names."""
    return f"bestiary-view-{port}"


def content_security_policy(nonce: str) -> str:
    """Return the policy of a page. It allows `eval`: the web framework compiles its components in the browser."""
    return "; ".join(
        [
            "default-src 'none'",
            f"script-src 'self' 'nonce-{nonce}' 'unsafe-eval'",
            "style-src 'self' 'unsafe-inline'",
            "img-src 'self' data: blob:",
            "media-src 'self'",
            "font-src 'self'",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        ]
    )


def is_local_host(host: str) -> bool:
    """Return whether the Host header names this machine, with any port."""
    try:
        parts = urlsplit(f"//{host}")
        port_is_valid = parts.port is None or parts.port > 0
        return port_is_valid and parts.hostname in LOCAL_HOSTS and parts.username is None and not parts.path
    except ValueError:
        return False


def is_own_origin(origin: str, host: str) -> bool:
    """Return whether the Origin header is the address that the browser has used for this server."""
    return origin in (f"http://{host}", f"https://{host}")


class Guard:
    """ASGI middleware that answers only requests that pass the checks of this module."""

    def __init__(self, app: App, token: str, port: int):
        self.app = app
        self.token = token
        self.cookie = cookie_name(port)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one HTTP request or WebSocket connection."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope)
        if not self._comes_from_here(scope, headers):
            await _refuse(
                scope, send, 403, "bestiary view: refused, because the request does not come from its pages\n"
            )
        elif scope["type"] == "http" and scope["method"] in ("GET", "HEAD") and self._has_token(scope):
            await self._set_cookie(scope, send)
        elif self._has_cookie(headers):
            await self.app(scope, receive, _with_security_headers(send))
        else:
            await _refuse(scope, send, 403, REFUSAL)

    def _comes_from_here(self, scope: Scope, headers: "Headers") -> bool:
        hosts, origins = headers.all("host"), headers.all("origin")
        if len(hosts) != 1 or not is_local_host(hosts[0]) or len(origins) > 1:
            return False
        if not origins:
            return scope["type"] != "websocket"
        return is_own_origin(origins[0], hosts[0])

    def _has_cookie(self, headers: "Headers") -> bool:
        for text in headers.all("cookie"):
            try:
                cookies = SimpleCookie(text)
            except CookieError:
                continue
            if self.cookie in cookies and secrets.compare_digest(
                cookies[self.cookie].value.encode(), self.token.encode()
            ):
                return True
        return False

    def _has_token(self, scope: Scope) -> bool:
        query = parse_qsl(scope["query_string"].decode("latin-1"))
        return any(
            name == TOKEN_PARAMETER and secrets.compare_digest(value.encode(), self.token.encode())
            for name, value in query
        )

    async def _set_cookie(self, scope: Scope, send: Send) -> None:
        """Redirect to the same page without the token in its URL, and set the cookie."""
        query = [pair for pair in parse_qsl(scope["query_string"].decode("latin-1")) if pair[0] != TOKEN_PARAMETER]
        # `raw_path` may contain any bytes. A browser would read a path that starts with // as the address of another
        # host.
        path = "/" + scope.get("raw_path", b"/").decode("latin-1").lstrip("/\\")
        location = path + (f"?{urlencode(query)}" if query else "")
        cookie = f"{self.cookie}={self.token}; Path=/; HttpOnly; SameSite=Strict"
        await _respond(send, 303, "", [("location", location), ("set-cookie", cookie)])


class Headers:
    """The headers of a request."""

    def __init__(self, scope: Scope):
        self.pairs = [(name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in scope["headers"]]

    def all(self, name: str) -> list[str]:
        """Return all values of a header."""
        return [value for key, value in self.pairs if key == name]


async def _refuse(scope: Scope, send: Send, status: int, text: str) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": POLICY_VIOLATION})
    else:
        await _respond(send, status, text)


async def _respond(send: Send, status: int, text: str, headers: list[tuple[str, str]] | None = None) -> None:
    body = text.encode()
    pairs = [
        ("content-type", "text/plain; charset=utf-8"),
        ("content-length", str(len(body))),
        ("cache-control", "no-store"),
        *_general_headers("none"),
        *(headers or []),
    ]
    start = {"type": "http.response.start", "status": status}
    await send({**start, "headers": [(name.encode(), value.encode("latin-1")) for name, value in pairs]})
    await send({"type": "http.response.body", "body": body})


def _general_headers(nonce: str) -> list[tuple[str, str]]:
    return [
        ("content-security-policy", content_security_policy(nonce)),
        ("x-content-type-options", "nosniff"),
        ("x-frame-options", "DENY"),
        ("referrer-policy", "no-referrer"),
        ("cross-origin-opener-policy", "same-origin"),
        ("cross-origin-resource-policy", "same-origin"),
    ]


def _with_security_headers(send: Send) -> Send:
    """Return a `send` function that adds the security headers, and the nonce of the response to the scripts of pages.

    The body of a page is collected before it is changed and sent. All `<script` tags of a page come from the framework,
    because the framework escapes `<` in all texts.
    """
    nonce = secrets.token_urlsafe(16)
    page: list[bytes] = []  # parts of the body, if the response is a page
    start: Message = {}

    async def send_secured(message: Message) -> None:
        nonlocal start
        if message["type"] == "http.response.start":
            added = _general_headers(nonce)
            replaced = {name for name, _ in added}
            headers = [pair for pair in message["headers"] if pair[0].decode("latin-1").lower() not in replaced]
            headers += [(name.encode(), value.encode()) for name, value in added]
            message = {**message, "headers": headers}
            if _is_page(headers):
                start = message
                return
        elif message["type"] == "http.response.body" and start:
            page.append(message.get("body", b""))
            if message.get("more_body"):
                return
            body = re.sub(rb"<script\b", b'<script nonce="%s"' % nonce.encode(), b"".join(page))
            kept = [pair for pair in start["headers"] if pair[0].lower() not in (b"content-length", b"cache-control")]
            kept += [(b"content-length", str(len(body)).encode()), (b"cache-control", b"no-store")]
            await send({**start, "headers": kept})
            message = {"type": "http.response.body", "body": body}
        await send(message)

    return send_secured


def _is_page(headers: list[tuple[bytes, bytes]]) -> bool:
    return any(name.lower() == b"content-type" and value.startswith(b"text/html") for name, value in headers)
