"""A user's engine that tells the laws of texts: the reference decoder; for tests of `--score-by engine`."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from pathlib import Path

from specverify.engines import Capability
from specverify.engines.reference import ReferenceEngine
from specverify.engines.reference import opened as reference


@dataclass
class Telling:
    """Sampled at half the temperature with speculation where `sharp`."""

    inner: ReferenceEngine
    sharp: bool = False
    name: str = "telling"

    @property
    def capabilities(self):
        return self.inner.capabilities | {Capability.PROMPT_LOGPROBS}

    @property
    def parameters(self):
        return self.inner.parameters

    def decode(self, requests):
        if not self.sharp:
            yield from self.inner.decode(requests)
            return
        flat = [
            replace(one, params=replace(one.params, temperature=0.5))
            if one.speculation and one.params.temperature
            else one
            for one in requests
        ]
        rows = [one for one in requests for _ in range(one.num_samples)]
        for request, trace in zip(rows, self.inner.decode(flat), strict=True):
            yield replace(trace, request=request)

    def prompt_logprobs(self, traces, *, top):
        for trace in traces:
            ids, start = trace.request.prompt_ids + trace.token_ids, len(trace.request.prompt_ids) - 1
            rows = self.inner.decoder.target.logits([ids])[0].double().log_softmax(-1)[start:-1]
            likeliest = rows.topk(top, -1)
            yield [
                dict(zip(best, values, strict=True)) | {token: float(row[token])}
                for row, best, values, token in zip(
                    rows, likeliest.indices.tolist(), likeliest.values.tolist(), trace.token_ids, strict=True
                )
            ]


TARGET = ""
"""The folder with its weights, where the one of the settings has none."""


@contextlib.contextmanager
def sound(settings):
    with reference(replace(settings, target=Path(TARGET or settings.target))) as engine:
        yield Telling(engine)


@contextlib.contextmanager
def sharp(settings):
    with reference(replace(settings, target=Path(TARGET or settings.target))) as engine:
        yield Telling(engine, sharp=True)
