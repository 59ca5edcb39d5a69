"""An engine for a process of its own, without torch: it says the last id of its prompt again, prints, and dies of some."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass

from specverify.engines import ALL_PARAMETERS, Capability
from specverify.errors import PromptError, UsageError
from specverify.records import DecodeCounters, DecodeStep, DecodeTrace, FinishReason

REFUSED, BROKEN, DEADLY, GONE, SILENT = 90, 91, 92, 93, 94


@dataclass
class Dying:
    """Drafts one token a sample, and has none accepted."""

    drafted: int = 0
    name: str = "dying"
    capabilities = frozenset({Capability.COUNTERS, Capability.STEPS, Capability.SEED, Capability.STREAM})
    parameters = ALL_PARAMETERS

    def counters(self):
        return DecodeCounters(
            num_drafts=self.drafted,
            num_draft_tokens=self.drafted,
            num_accepted_tokens=0,
            num_accepted_tokens_per_pos=(0,),
        )

    def decode(self, requests):
        os.write(1, b"a line that is no answer\n")
        for request in requests:
            last = request.prompt_ids[-1]
            if last == REFUSED:
                msg = "too long"
                raise PromptError(msg)
            if last == BROKEN:
                msg = "no slots\nat all"
                raise ZeroDivisionError(msg)
            if last == DEADLY:
                os.kill(os.getpid(), signal.SIGSEGV)
            if last == GONE:
                os._exit(7)
            if last == SILENT:
                os.fork()
                time.sleep(60)
            for sample in range(request.num_samples):
                self.drafted += 1
                yield DecodeTrace(
                    request=request,
                    sample=sample,
                    token_ids=(last, request.seed),
                    finish=FinishReason.STOP,
                    steps=(DecodeStep(1, 0, 1, (last,)),),
                    logprobs=(-0.5, float("nan")),
                )


@contextlib.contextmanager
def opened(settings):
    assert settings.options == (("a", "1"),)
    yield Dying()


@contextlib.contextmanager
def refusing(settings):
    msg = f"{settings.target} holds no model"
    raise UsageError(msg)
    yield


@contextlib.contextmanager
def dead(settings):
    os.kill(os.getpid(), signal.SIGABRT)
    yield
