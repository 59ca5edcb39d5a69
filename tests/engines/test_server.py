"""Servers start, are waited for, and end; nothing of theirs is left behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from specverify.engines.server import API_KEY, free_port, serving
from specverify.errors import UsageError

HEALTHY = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    asked = 0
    def do_GET(self):
        Handler.asked += 1
        self.send_response(200 if Handler.asked > 2 else 503); self.end_headers()
print("listening", flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + HEALTHY
PARENT = "import subprocess, sys; print(subprocess.Popen(['sleep', '300']).pid, flush=True)\n" + HEALTHY


def alive(pid: int) -> bool:
    """Whether it runs; a zombie, whose parent alone is late, does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"


def starting(program: str, folder, **options):
    port = free_port()
    return serving(
        [sys.executable, "-c", program, str(port)],
        port=port,
        health_url=f"http://127.0.0.1:{port}/health",
        log_path=folder / "server.log",
        **options,
    )


def test_a_server_is_healthy_inside_and_gone_outside(tmp_path):
    said = []
    with starting(HEALTHY, tmp_path, say=said.append) as server:
        assert server.running
        assert server.obituary() == ""
    assert not server.running
    assert server.obituary() == ""
    assert not alive(server.process.pid)
    assert "healthy after" in said[-1]
    assert b"listening" in (tmp_path / "server.log").read_bytes()


def test_it_ends_when_the_block_is_interrupted(tmp_path):
    with pytest.raises(KeyboardInterrupt), starting(HEALTHY, tmp_path) as server:
        raise KeyboardInterrupt
    assert not alive(server.process.pid)


@pytest.mark.parametrize(("served", "times"), [(HEALTHY, 1), (STUBBORN, 2)])
def test_sigterm_ends_it_too(tmp_path, served, times):
    """Also where a second one comes while a server that ignores the first is still given its time."""
    program = f"""
        import sys, time, pathlib
        from specverify.engines.server import free_port, serving
        port = free_port()
        with serving([sys.executable, "-c", {served!r}, str(port)], port=port,
                     health_url=f"http://127.0.0.1:{{port}}/", log_path=pathlib.Path({str(tmp_path / "log")!r})) as server:
            print(server.process.pid, flush=True)
            time.sleep(60)
    """
    outer = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE,
                             stderr=subprocess.DEVNULL, text=True)  # fmt: skip
    pid = int(outer.stdout.readline())
    for _ in range(times):
        outer.send_signal(signal.SIGTERM)
        time.sleep(0.3)
    outer.wait(timeout=30)
    outer.stdout.close()
    assert not alive(pid)


def test_one_that_ignores_sigterm_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr("specverify.engines.server._GRACE_S", 0.3)
    with starting(STUBBORN, tmp_path) as server:
        pass
    assert server.process.returncode == -signal.SIGKILL


def test_its_own_children_end_with_it(tmp_path):
    with starting(PARENT, tmp_path):
        child = int((tmp_path / "server.log").read_text().split()[0])
        assert alive(child)
    deadline = time.monotonic() + 5
    while alive(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(child)


def test_one_that_ends_at_once_is_one_sentence_with_its_last_lines(tmp_path, monkeypatch):
    monkeypatch.setenv(API_KEY, "sesame")
    with (
        pytest.raises(UsageError) as raised,
        starting("import sys; print('loading\\nno such model, key sesame'); sys.exit(3)", tmp_path),
    ):
        pass
    sentence = str(raised.value)
    assert "exit code 3" in sentence
    assert "no such model, key ***" in sentence
    assert "sesame" not in sentence
    assert "\n" not in sentence
    assert str(tmp_path / "server.log") in sentence


def test_one_that_never_is_healthy_is_ended(tmp_path):
    with (
        pytest.raises(UsageError, match=r"not healthy after 1 s .*its log ends: still loading"),
        starting("import time; print('still loading', flush=True); time.sleep(60)", tmp_path, timeout_s=1.0),
    ):
        pass


def test_progress_is_told_while_it_loads(tmp_path, monkeypatch):
    monkeypatch.setattr("specverify.engines.server._SAY_S", 0.2)
    said = []
    with starting("import time; print('layer 1', flush=True); time.sleep(1)\n" + HEALTHY, tmp_path, say=said.append):
        pass
    assert any("layer 1" in line for line in said)


def test_a_command_that_is_not_there(tmp_path):
    with (
        pytest.raises(UsageError, match="can't start no-such-program"),
        serving(["no-such-program"], port=free_port(), health_url="http://127.0.0.1:1/", log_path=tmp_path / "log"),
    ):
        pass


def test_a_port_that_is_taken(tmp_path):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with (
            pytest.raises(UsageError, match=rf"port {port} of 127.0.0.1 is taken"),
            serving(["true"], port=port, health_url=f"http://127.0.0.1:{port}/", log_path=tmp_path / "log"),
        ):
            pass


def test_what_the_environment_adds_arrives(tmp_path):
    program = "import os; print(os.environ['SHADE'], flush=True)\n" + HEALTHY
    with starting(program, tmp_path, environment={"SHADE": "teal"}):
        assert "teal" in (tmp_path / "server.log").read_text()
