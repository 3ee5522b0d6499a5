"""The report while a run goes on: served on the loopback address, and newer when a file has
changed.
"""

from __future__ import annotations

import http.client
import json
import socket
import threading

import pytest
from report_runs import write_run

from titanlite.runtime.errors import ConfigError
from titanlite.tools.report.live import build_server


@pytest.fixture
def server(tmp_path):
    server = build_server([write_run(tmp_path / "a")], 0)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join(5)


def get(server, path: str = "/data.json", **headers: str) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection(*server.server_address[:2], timeout=10)
    connection.request(
        "GET", path, headers={name.replace("_", "-"): value for name, value in headers.items()}
    )
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer.status, dict(answer.headers), content


def test_it_listens_on_the_loopback_address_only(server):
    address = server.server_address
    assert address[0] == "127.0.0.1"
    other = next(
        (info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)),
        "127.0.0.1",
    )
    if not other.startswith("127."):
        with pytest.raises(OSError, match="refused"):
            socket.create_connection((other, address[1]), timeout=5)


def test_the_data_is_newer_when_a_file_has_changed(server, tmp_path):
    status, headers, content = get(server)
    first = json.loads(content)
    assert (status, first["live"]) == (200, True)
    assert get(server, If_None_Match=headers["ETag"])[0] == 304
    with (tmp_path / "a/metrics.jsonl").open("a") as file:
        file.write('{"step": 3010, "loss": 2.0}\n')
    status, _, content = get(server, If_None_Match=headers["ETag"])
    assert status == 200
    loss = json.loads(content)["charts"][0]["series"][0]
    assert (loss["x"][-1], loss["y"][-1]) == (3010, 2)


def test_the_page(server):
    status, headers, content = get(server, "/")
    assert status == 200
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    assert b"<title>a</title>" in content


def test_a_page_of_the_web_gets_nothing(server):
    """A name of the web may lead to 127.0.0.1, so that a browser takes the two for one site."""
    port = server.server_address[1]
    assert get(server, "/", Host=f"evil.example:{port}")[0] == 403
    for name in ("localhost.evil.example", "evil.example:127.0.0.1", "[::1]:8765", ""):
        assert get(server, "/data.json", Host=name)[0] == 403


def test_a_forwarded_port_may_be_another_one(server):
    for host in (
        "127.0.0.1:9999",
        "localhost:9999",
        "127.0.0.1",
        f"localhost:{server.server_address[1]}",
    ):
        assert get(server, "/", Host=host)[0] == 200


def test_a_browser_that_goes_away_is_no_message(server, capsys):
    for error, shown in ((ConnectionResetError(), False), (ValueError("x"), True)):
        try:
            raise error
        except (ConnectionResetError, ValueError):
            server.handle_error(None, ("127.0.0.1", 1))
        assert ("Traceback" in capsys.readouterr().err) == shown


@pytest.mark.parametrize(
    "path", ["/metrics.jsonl", "/../a/config.toml", "/etc/passwd", "/data.jsonl"]
)
def test_no_file_is_served(server, path):
    assert get(server, path)[0] == 404


def test_a_port_in_use_is_one_error(server, tmp_path):
    with pytest.raises(
        ConfigError, match=r"--port \d+: Address already in use; expected a free port"
    ):
        build_server([tmp_path], server.server_address[1])
