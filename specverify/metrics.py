"""Acceptance as a server reports it, scraped at a bounded rate for a bounded time, and an alarm when it falls.

vLLM counts drafted and accepted tokens: between two scrapes their quotient is one observation. SGLang publishes gauges: each
scrape of one is an observation. Both are accepted / drafted, so the baseline has to be that too, not Σ min(p, q).

Note [False alarm of a watch]: S of Note [e-detector] has expectation at most k after k observations, and S_k - k is a
supermartingale, while acceptance is at least the baseline. So in a watch of at most n observations it ever reaches
A = n / rate with probability at most rate [ShinRamdasRinaldo2024], whatever the law and however the observations depend.
"""

from __future__ import annotations

import math
import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from specverify.errors import UsageError
from specverify.redaction import is_address
from specverify.statistics.drift import DriftDetector

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["Drift", "Scrape", "http_fetch", "parse", "watch"]

_ACCEPTED = ("vllm:spec_decode_num_accepted_tokens_total", "vllm:spec_decode_num_accepted_tokens")
_DRAFTED = ("vllm:spec_decode_num_draft_tokens_total", "vllm:spec_decode_num_draft_tokens")
_RATE = ("sglang:spec_accept_rate",)
_LENGTH = ("sglang:spec_accept_length",)
_LINE = re.compile(r"^(?P<name>[A-Za-z_:][\w:]*)(?:\{[^}]*\})?\s+(?P<value>[-+.\w]+)")
_MOST_BYTES = 16 * 1024 * 1024
_TIMEOUT_S = 10.0
SHORTEST_INTERVAL_S = 1.0
LONGEST_DURATION_S = 24 * 3600.0
_MOST_FAILURES = 5
"""Scrapes that may fail one after the other before the watch gives up."""


@dataclass(frozen=True)
class Scrape:
    """One answer of the server."""

    accepted: float
    drafted: float
    """Totals; NaN where it publishes no counters."""
    rate: float
    """The gauge; NaN where it publishes none."""


@dataclass(frozen=True, kw_only=True)
class Drift:
    """What a watch saw."""

    baseline: float
    false_alarm_rate: float
    most_observations: int
    observations: tuple[float, ...]
    """Accepted / drafted, one each interval in which something was drafted."""
    evidence: float
    """Largest S; an alarm from `threshold` on."""
    threshold: float
    alarm_at: int | None
    """Number of the observation that raised it, from 1."""
    skipped: int
    """Intervals without a draft, or across a restart of the server."""
    elapsed_s: float

    @property
    def mean(self) -> float:
        """Of the observations."""
        return float(np.mean(self.observations)) if self.observations else math.nan


def parse(text: str, *, num_speculative_tokens: int | None = None) -> Scrape:
    """The figures of one scrape, summed over engines (gauges: averaged). Raises `UsageError` where there are none.

    `num_speculative_tokens` turns a mean length into a rate, for a server that publishes nothing else.
    """
    values: dict[str, list[float]] = {}
    for line in text.splitlines():
        found = _LINE.match(line)
        if found and ":spec_" in found["name"]:
            try:
                values.setdefault(found["name"], []).append(float(found["value"]))
            except ValueError:
                continue
    accepted, drafted = (_total(values, names) for names in (_ACCEPTED, _DRAFTED))
    rate = _mean(values, _RATE)
    if math.isnan(rate) and num_speculative_tokens:
        rate = (_mean(values, _LENGTH) - 1) / num_speculative_tokens
    if math.isnan(rate) and (math.isnan(accepted) or math.isnan(drafted)):
        if not math.isnan(_mean(values, _LENGTH)):
            msg = "the server publishes a mean acceptance length alone; say --num-speculative-tokens, so that it is a rate"
            raise UsageError(msg)
        msg = (
            "the metrics hold no acceptance (vllm:spec_decode_num_accepted_tokens_total, sglang:spec_accept_rate); "
            "check the address, and that the server runs with speculation and with metrics"
        )
        raise UsageError(msg)
    return Scrape(accepted, drafted, rate)


def _total(values: dict[str, list[float]], names: tuple[str, ...]) -> float:
    return next((sum(values[name]) for name in names if name in values), math.nan)


def _mean(values: dict[str, list[float]], names: tuple[str, ...]) -> float:
    return next((float(np.mean(values[name])) for name in names if name in values), math.nan)


def watch(
    fetch: Callable[[], str],
    *,
    baseline: float,
    interval_s: float = 15.0,
    duration_s: float = 600.0,
    false_alarm_rate: float = 1e-3,
    num_speculative_tokens: int | None = None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Drift:
    """Scrape every `interval_s` until an alarm or the end. Raises `UsageError` for a server that can't be asked.

    In all, a false alarm comes with probability at most `false_alarm_rate` while mean acceptance is at least `baseline`.
    """
    _require(baseline, interval_s, duration_s, false_alarm_rate)
    most = max(1, math.floor(duration_s / interval_s))
    threshold = most / false_alarm_rate
    detector = DriftDetector(baseline)
    started = clock()
    observations: list[float] = []
    skipped, alarm, evidence = 0, None, 0.0
    for rate in _rates(fetch, most, interval_s, num_speculative_tokens, clock=clock, sleep=sleep):
        if math.isnan(rate):
            skipped += 1
            continue
        observations.append(min(1.0, max(0.0, rate)))
        evidence = max(evidence, detector.update(observations[-1]))
        if evidence >= threshold:
            alarm = len(observations)
            break
    return Drift(
        baseline=baseline,
        false_alarm_rate=false_alarm_rate,
        most_observations=most,
        observations=tuple(observations),
        evidence=evidence,
        threshold=threshold,
        alarm_at=alarm,
        skipped=skipped,
        elapsed_s=clock() - started,
    )


def _rates(
    fetch: Callable[[], str],
    most: int,
    interval_s: float,
    num_speculative_tokens: int | None,
    *,
    clock: Callable[[], float],
    sleep: Callable[[float], None],
) -> Iterator[float]:
    """The acceptance of each interval; NaN where nothing was drafted in it, or the server did not answer."""
    before = parse(fetch(), num_speculative_tokens=num_speculative_tokens)
    failures, due = 0, clock()
    for _ in range(most):
        due += interval_s
        sleep(max(0.0, due - clock()))
        try:
            now = parse(fetch(), num_speculative_tokens=num_speculative_tokens)
            failures = 0
        except UsageError:
            failures += 1
            if failures >= _MOST_FAILURES:
                raise
            yield math.nan
            continue
        yield _between(before, now)
        before = now


def _between(before: Scrape, now: Scrape) -> float:
    if math.isnan(now.drafted) or math.isnan(now.accepted):
        return now.rate
    drafted, accepted = now.drafted - before.drafted, now.accepted - before.accepted
    return accepted / drafted if drafted > 0 and accepted >= 0 else math.nan  # a restart counts from 0 again


def _require(baseline: float, interval_s: float, duration_s: float, false_alarm_rate: float) -> None:
    if not 0 < baseline <= 1:
        msg = f"the baseline {baseline:g} is no acceptance rate; it must be above 0 and at most 1"
        raise UsageError(msg)
    if not 0 < false_alarm_rate < 1:
        msg = f"the false-alarm rate {false_alarm_rate:g} must lie between 0 and 1"
        raise UsageError(msg)
    if not interval_s >= SHORTEST_INTERVAL_S:
        msg = f"a scrape every {interval_s:g} s is too often; use at least {SHORTEST_INTERVAL_S:g} s"
        raise UsageError(msg)
    if not interval_s <= duration_s <= LONGEST_DURATION_S:
        msg = f"a watch of {duration_s:g} s must last at least one interval and at most {LONGEST_DURATION_S:g} s"
        raise UsageError(msg)


def http_fetch(url: str) -> Callable[[], str]:
    """Asks `url`, with a time limit and a size limit; every failure is a `UsageError` of one sentence."""
    import httpx2  # noqa: PLC0415 - the extra `metrics`

    if not is_address(url):
        msg = f"{url!r} is no address of metrics; give one such as http://127.0.0.1:8000/metrics"
        raise UsageError(msg)

    def fetch() -> str:
        try:
            with httpx2.stream("GET", url, timeout=_TIMEOUT_S, follow_redirects=False) as response:
                if response.status_code != httpx2.codes.OK:
                    msg = f"{url} answered with status {response.status_code}; give the address of the metrics page"
                    raise UsageError(msg)
                content = bytearray()
                for part in response.iter_bytes():
                    content += part
                    if len(content) > _MOST_BYTES:
                        msg = f"{url} answers with more than {_MOST_BYTES // 2**20} MiB; that is no metrics page"
                        raise UsageError(msg)
        except (httpx2.InvalidURL, ImportError, ValueError) as error:  # its text may hold a part of a password
            msg = f"no client can be made for {url} ({type(error).__name__}); look at it, and at the proxies of the environment"
            raise UsageError(msg) from error
        except httpx2.HTTPError as error:
            msg = f"{url} can't be asked ({type(error).__name__}: {' '.join(str(error).split())[:120]}); is the server up?"
            raise UsageError(msg) from error
        return content.decode("utf-8", errors="replace")

    return fetch
