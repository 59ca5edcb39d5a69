"""Counters are read as servers write them, scraped no more than asked, and a fall raises the alarm that was promised."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import TYPE_CHECKING

import numpy as np
import pytest

from specverify.errors import UsageError
from specverify.metrics import http_fetch, parse, watch
from specverify.records import Verdict
from specverify.report.compare import drift_verdict, render_drift

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

VLLM = """# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{{engine="0",model_name="m"}} 100.0
vllm:spec_decode_num_draft_tokens_total{{engine="0",model_name="m"}} {drafted}
vllm:spec_decode_num_draft_tokens_total{{engine="1",model_name="m"}} 1e2
vllm:spec_decode_num_draft_tokens_created{{engine="0",model_name="m"}} 1.7e+09
vllm:spec_decode_num_accepted_tokens_total{{engine="0",model_name="m"}} {accepted}
vllm:spec_decode_num_accepted_tokens_total{{engine="1",model_name="m"}} 50
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="0"}} 60.0
"""
SGLANG = 'sglang:spec_accept_rate{model_name="m"} 0.6\nsglang:spec_accept_length{model_name="m"} 2.8\n'


class Server:
    """A fake clock and a server that drafts 100 tokens between two scrapes."""

    def __init__(self, rates: Iterator[float]) -> None:
        self.rates, self.now, self.slept = rates, 0.0, [0.0][:0]
        self.accepted = self.drafted = 0.0

    def fetch(self) -> str:
        text = VLLM.format(accepted=self.accepted, drafted=self.drafted)
        self.drafted += 100
        self.accepted += 100 * next(self.rates)
        return text

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds

    def watch(self, **options: float) -> object:
        return watch(self.fetch, clock=self.clock, sleep=self.sleep, **options)  # type: ignore[arg-type]  # by name


def steady(rate: float, seed: int = 1) -> Iterator[float]:
    generator = np.random.default_rng(seed)
    while True:
        yield float(np.clip(generator.normal(rate, 0.05), 0, 1))


def test_counters_of_vllm_are_summed_over_engines() -> None:
    """And neither `_created` nor `_per_pos` is taken for them."""
    found = parse(VLLM.format(accepted=70, drafted=100))
    assert (found.accepted, found.drafted) == (120, 200)


def test_gauges_of_sglang_are_read() -> None:
    """The rate itself; the length only with the number of drafts."""
    assert parse(SGLANG).rate == pytest.approx(0.6)
    length = SGLANG.splitlines()[1]
    assert parse(length, num_speculative_tokens=3).rate == pytest.approx(0.6)
    with pytest.raises(UsageError, match="num-speculative-tokens"):
        parse(length)


def test_a_page_without_acceptance_says_what_is_missing() -> None:
    """One sentence."""
    with pytest.raises(UsageError, match="runs with speculation"):
        parse("up 1\n")


def test_a_fall_raises_the_alarm() -> None:
    """And the watch ends there."""
    server = Server(steady(0.5))
    seen = server.watch(baseline=0.7, interval_s=15, duration_s=15 * 400)
    assert drift_verdict(seen) is Verdict.FAIL
    assert len(seen.observations) == seen.alarm_at < 150
    assert "fell below 0.700" in render_drift(seen, quiet=True)


def test_a_steady_stream_raises_none() -> None:
    """All observations are made, at the rate that was asked for."""
    server = Server(steady(0.72))
    seen = server.watch(baseline=0.7, interval_s=15, duration_s=15 * 400)
    assert drift_verdict(seen) is Verdict.PASS
    assert len(seen.observations) == 400
    assert server.slept == [15.0] * 400


def test_false_alarms_are_no_more_than_promised() -> None:
    """At the baseline itself, 400 watches of 50 observations at a rate of 5 %."""
    alarms = sum(
        Server(steady(0.7, seed)).watch(
            baseline=0.7, interval_s=1, duration_s=50, false_alarm_rate=0.05
        ).alarm_at is not None
        for seed in range(400)
    )  # fmt: skip
    assert alarms <= 32  # 20 are allowed in the mean; more than 32 come with probability 0.004


def test_a_restart_and_idle_intervals_are_skipped() -> None:
    """Counters that go back to 0, and intervals in which nothing was drafted, are no observation."""
    totals = iter([(100.0, 50.0), (200.0, 110.0), (10.0, 6.0), (10.0, 6.0), (110.0, 66.0)])
    pages = (VLLM.format(drafted=drafted, accepted=accepted) for drafted, accepted in totals)
    seen = watch(lambda: next(pages), baseline=0.5, interval_s=1, duration_s=4, sleep=lambda _: None)
    assert seen.observations == pytest.approx((0.6, 0.6))
    assert seen.skipped == 2


def test_nothing_drafted_is_inconclusive() -> None:
    """Not a pass."""
    page = VLLM.format(drafted=5, accepted=3)
    seen = watch(lambda: page, baseline=0.5, interval_s=1, duration_s=3, sleep=lambda _: None)
    assert drift_verdict(seen) is Verdict.INCONCLUSIVE


def test_a_few_failed_scrapes_are_survived_and_many_are_not() -> None:
    """A server that is gone ends the watch with its own sentence."""
    answers = iter([VLLM.format(drafted=0, accepted=0), *["up 1"] * 2, VLLM.format(drafted=100, accepted=60)])
    seen = watch(lambda: next(answers), baseline=0.5, interval_s=1, duration_s=3, sleep=lambda _: None)
    assert (len(seen.observations), seen.skipped) == (1, 2)
    gone = iter([VLLM.format(drafted=0, accepted=0), *["up 1"] * 9])
    with pytest.raises(UsageError):
        watch(lambda: next(gone), baseline=0.5, interval_s=1, duration_s=9, sleep=lambda _: None)


@pytest.mark.parametrize(
    "options",
    [
        {"baseline": 0},
        {"interval_s": 0.1},
        {"duration_s": 1e9},
        {"false_alarm_rate": 1},
        {"interval_s": 99, "duration_s": 9},
    ],
)
def test_what_can_not_be_watched_is_refused_first(options: dict[str, float]) -> None:
    """Before the server is asked."""
    with pytest.raises(UsageError):
        watch(lambda: pytest.fail("asked"), **{"baseline": 0.5, **options})  # type: ignore[arg-type]  # by name


@pytest.fixture
def served() -> Iterator[Callable[[int, bytes], str]]:
    """A server on loopback that gives one answer; its address."""
    pytest.importorskip("httpx2")
    servers = []

    def serve(status: int, content: bytes) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(status)
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *words: object) -> None:
                """Say nothing."""

        server = HTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return f"http://127.0.0.1:{server.server_port}/metrics"

    yield serve
    for server in servers:
        server.shutdown()
        server.server_close()


def test_a_real_page_is_fetched(served: Callable[[int, bytes], str]) -> None:
    """Over HTTP."""
    assert parse(http_fetch(served(200, SGLANG.encode()))()).rate == pytest.approx(0.6)


def test_failures_are_one_sentence(served: Callable[[int, bytes], str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong path, nobody there, and no address at all."""
    with pytest.raises(UsageError, match="status 404"):
        http_fetch(served(404, b""))()
    with pytest.raises(UsageError, match="is the server up"):
        http_fetch("http://127.0.0.1:9/metrics")()
    for address in ("file:///etc/passwd", "http://me:hunter2/x@127.0.0.1:9/metrics"):
        with pytest.raises(UsageError, match="is no address"):
            http_fetch(address)
    monkeypatch.setenv("HTTP_PROXY", "http://me:hunter2/x@proxy")
    with pytest.raises(UsageError, match=r"no client can be made .*\(InvalidURL\).* proxies") as caught:
        http_fetch("http://metrics.test/")()
    assert "hunter2" not in str(caught.value)
