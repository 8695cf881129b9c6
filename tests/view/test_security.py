"""The server answers only requests of its own pages, with the token, and sends only files of the run folders."""

import http.client
import json
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote, urlencode

import pytest

from bestiary.cli.main import run_command
from bestiary.utils.errors import UserError
from bestiary.view.security import cookie_name, is_local_host, is_own_origin
from bestiary.view.server import open_socket
from tests.view.conftest import HOSTILE_NAMES, Server, Tab, run_path

pytestmark = pytest.mark.xdist_group("browser")


def request(server: Server, path: str, **headers: str) -> http.client.HTTPResponse:
    """Send a GET request without a token. `headers` replaces or adds headers."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    connection.putrequest("GET", path, skip_host="host" in headers)
    for name, value in headers.items():
        connection.putheader(name, value)
    connection.endheaders()
    return connection.getresponse()


def cookie(server: Server, token: str = "") -> str:
    return f"{cookie_name(server.port)}={token or server.token}"


@pytest.mark.parametrize("path", ["/", "/run?run=a1", "/media?run=a1&folder=videos&file=x.gif", "/favicon.ico"])
def test_requests_without_the_token_are_refused(server: Server, path: str) -> None:
    for headers in ({}, {"cookie": cookie(server, "wrong")}, {"cookie": f"other={server.token}"}):
        response = request(server, path, **headers)
        assert response.status == 403
        assert server.token not in response.read().decode()
    separator = "&" if "?" in path else "?"
    assert request(server, f"{path}{separator}token=wrong").status == 403
    assert request(server, path, cookie=cookie(server)).status in (200, 404)


def test_the_token_becomes_a_cookie_and_leaves_the_url(server: Server) -> None:
    response = request(server, f"/run?run=a1&token={server.token}")
    assert response.status == 303
    assert response.getheader("location") == "/run?run=a1"
    stored = response.getheader("set-cookie")
    assert stored is not None
    assert stored.startswith(cookie(server))
    assert "HttpOnly" in stored
    assert "SameSite=Strict" in stored
    # A path that starts with two slashes would be the address of another host.
    assert request(server, f"//evil.example/x?token={server.token}").getheader("location") == "/evil.example/x"


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "evil.example:80", "[::2]", "", "user@localhost"]
)
def test_other_hosts_are_refused(server: Server, host: str) -> None:
    assert request(server, "/", cookie=cookie(server), host=host).status in (400, 403)


def test_hosts_of_an_ssh_tunnel_are_accepted(server: Server) -> None:
    for host in ("localhost:9000", "127.0.0.1:1234", "[::1]:80"):
        assert is_local_host(host)
        assert request(server, "/", cookie=cookie(server), host=host, origin=f"http://{host}").status == 200


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1:1", "http://localhost"])
def test_other_origins_are_refused(server: Server, origin: str) -> None:
    assert not is_own_origin(origin, f"127.0.0.1:{server.port}")
    assert request(server, "/", cookie=cookie(server), origin=origin).status == 403


def websocket_status(server: Server, **headers: str) -> int:
    """Send the handshake of a WebSocket and return the HTTP status of the response."""
    lines = [
        "GET /_nicegui_ws/socket.io/?EIO=4&transport=websocket HTTP/1.1",
        f"Host: 127.0.0.1:{server.port}",
        "Connection: Upgrade",
        "Upgrade: websocket",
        "Sec-WebSocket-Version: 13",
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
        *(f"{name}: {value}" for name, value in headers.items()),
    ]
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        connection.sendall(("\r\n".join(lines) + "\r\n\r\n").encode())
        return int(connection.recv(1000).split()[1])


def test_websockets_need_the_cookie_and_the_own_origin(server: Server) -> None:
    own = f"http://127.0.0.1:{server.port}"
    assert websocket_status(server, Origin=own, Cookie=cookie(server)) == 101
    assert websocket_status(server, Origin=own) == 403
    assert websocket_status(server, Cookie=cookie(server)) == 403
    assert websocket_status(server, Origin="http://evil.example", Cookie=cookie(server)) == 403


def test_pages_have_a_strict_content_security_policy(server: Server) -> None:
    responses = [request(server, "/", cookie=cookie(server)) for _ in range(2)]
    policies = [response.getheader("content-security-policy") or "" for response in responses]
    for response, policy in zip(responses, policies, strict=True):
        directives = dict(part.strip().split(" ", 1) for part in policy.split(";"))
        assert directives["default-src"] == "'none'"
        assert directives["frame-ancestors"] == "'none'"
        assert "'unsafe-inline'" not in directives["script-src"]
        assert "http" not in policy
        assert "*" not in policy
        assert response.getheader("x-content-type-options") == "nosniff"
        assert response.getheader("cache-control") == "no-store"
        nonce = directives["script-src"].split("'nonce-")[1].split("'")[0]
        page = response.read().decode()
        assert page.count("<script") == page.count(f'<script nonce="{nonce}"') > 0
    assert policies[0] != policies[1]  # the nonce is used once


def test_only_the_loopback_interface_is_used(server: Server) -> None:
    addresses = {info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)}
    for address in addresses - {"127.0.0.1"}:
        if not str(address).startswith("127."):
            with pytest.raises(OSError, match=r"refused|unreachable|timed out"):
                socket.create_connection((str(address), server.port), timeout=5)


def test_only_images_and_videos_of_run_folders_are_sent(server: Server, tmp_path: Path) -> None:
    videos = server.folder / "a1" / "videos"
    videos.mkdir(exist_ok=True)
    (tmp_path / "secret.png").write_bytes(b"secret")
    (videos / "own.png").write_bytes(b"own")
    (videos / "page.html").write_text("<script>alert(1)</script>")
    (videos / "link.png").unlink(missing_ok=True)
    (videos / "link.png").symlink_to(tmp_path / "secret.png")
    (server.folder / "linked-run").unlink(missing_ok=True)
    (tmp_path / "other-run").mkdir()
    shutil.copy(server.folder / "a1" / "config.toml", tmp_path / "other-run")
    (server.folder / "linked-run").symlink_to(tmp_path / "other-run")

    def status(**query: str) -> tuple[int, bytes]:
        response = request(server, f"/media?{urlencode(query)}", cookie=cookie(server))
        return response.status, response.read()

    assert status(run="a1", folder="videos", file="own.png") == (200, b"own")
    refused = [
        {"run": "a1", "folder": "videos", "file": "page.html"},
        {"run": "a1", "folder": "videos", "file": "link.png"},
        {"run": "a1", "folder": "videos", "file": "../config.toml"},
        {"run": "a1", "folder": ".", "file": "config.toml"},
        {"run": "a1", "folder": "videos/../../../..", "file": "secret.png"},
        {"run": str(tmp_path), "folder": "videos", "file": "secret.png"},
        {"run": "../" * 20 + str(tmp_path), "folder": "videos", "file": "secret.png"},
    ]
    for query in refused:
        assert status(**query)[0] == 404, query
    page = request(server, "/run?run=linked-run", cookie=cookie(server)).read().decode()
    assert "There is no run" in page
    for path in ("/../../etc/passwd", f"/{quote('../' * 10)}etc/passwd", "/_nicegui/../../etc/passwd"):
        assert request(server, path, cookie=cookie(server)).status == 404


def test_hostile_names_are_shown_as_text(server: Server, open_tab: Callable[..., Tab]) -> None:
    """Names of runs are shown in the table, in the legend of the chart, and on their own page; no script runs."""
    tab = open_tab()
    page = tab.open("/")
    for name in HOSTILE_NAMES:
        shown = name.replace("\x1b", "\\x1b")
        page.get_by_text(shown, exact=True).first.wait_for()
    page.get_by_label("Search runs").fill("onerror")
    page.wait_for_function("document.querySelectorAll('.run-table tbody tr').length === 1")
    page.get_by_role("link", name=HOSTILE_NAMES[0]).click()
    page.wait_for_url("**/run?*")
    page.get_by_role("heading", name=HOSTILE_NAMES[0]).wait_for()
    assert page.locator("img[src=x]").count() == 0
    for name in (HOSTILE_NAMES[2], HOSTILE_NAMES[-1]):
        key = name.replace("\x1b", "\\x1b")
        tab.open(run_path(key))
        page.get_by_role("heading", name=key).first.wait_for()


def test_a_page_without_a_token_explains_what_to_do(server: Server, open_tab: Callable[..., Tab]) -> None:
    tab = open_tab()
    with tab.page.expect_console_message(lambda message: message.type == "error"):  # it reports the status 403
        response = tab.page.goto(server.base)
    assert response.status == 403
    assert "token" in tab.page.inner_text("body")
    tab.page.close()  # no further messages, for example about a refused request for the icon of the page
    tab.problems.clear()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--port", "0"], "--port 0"),
        (["--port", "70000"], "--port 70000"),
        (["no-such-run"], "no-such-run"),
        (["--prot", "8020"], "--port"),
    ],
)
def test_wrong_arguments_are_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["view", *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1


def test_a_used_port_is_reported(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["view", str(server.folder), "--port", str(server.port)]) == 2
    assert f"--port {server.port}" in capsys.readouterr().err


def test_connections_wait_until_the_server_runs() -> None:
    """The URL is printed before the server runs. A browser that opens it at once must not be refused."""
    with open_socket(None) as listener:
        address = listener.getsockname()
        socket.create_connection(address, timeout=20).close()
        with pytest.raises(UserError, match=str(address[1])):
            open_socket(address[1])


def test_the_token_is_not_visible_to_other_users(server: Server) -> None:
    """The command line and the environment of the process do not contain the token."""
    folder = Path("/proc") / str(server.process.pid)
    assert server.token not in (folder / "cmdline").read_text()
    assert server.token.encode() not in (folder / "environ").read_bytes()
    assert json.dumps(os.listdir(server.folder)).find(server.token) == -1
