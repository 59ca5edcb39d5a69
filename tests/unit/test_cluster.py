"""What Ray raises while it starts is one sentence; the cluster itself is tried in `tests/ray`."""

from __future__ import annotations

import socket
import sys
from types import ModuleType

import pytest

from specverify.cluster import _connected
from specverify.errors import UsageError


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("local", "can't start a cluster on this machine"),
        ("auto", "no Ray cluster at auto"),
        ("127.0.0.1:{port}", "the Ray cluster at .* does not let this process in"),
    ],
)
def test_a_cluster_that_does_not_start(monkeypatch: pytest.MonkeyPatch, address: str, said: str) -> None:
    """Ray raises a bare `Exception` for a node that doesn't come up, and for one that wants a token."""

    def init(**options: object) -> None:
        del options
        msg = "The current node timed out during startup."
        raise Exception(msg)  # noqa: TRY002 - as Ray does

    fake = ModuleType("ray")
    fake.init = init  # type: ignore[attr-defined]  # a module of ours
    monkeypatch.setitem(sys.modules, "ray", fake)
    with (
        socket.create_server(("127.0.0.1", 0)) as listening,
        pytest.raises(UsageError, match=f"{said}.*The current node timed out") as raised,
    ):
        _connected(address.format(port=listening.getsockname()[1]))
    assert ("RAY_AUTH_MODE=token" in str(raised.value)) is (":" in address)
