"""Engines as users write them, in as few lines as it takes; tests and docs name them as `module:callable`."""

from __future__ import annotations

import contextlib

import numpy as np

from specverify.engines.fake import fake_engine

VOCAB = 24
TARGET = fake_engine().target


def decode(prompt_ids, n, max_new_tokens, seed, temperature=1.0, eos_token_ids=()):
    """The smallest engine: n texts after a prompt."""
    texts = []
    for sample in range(n):
        random, ids = np.random.default_rng([seed, sample]), []
        while len(ids) < max_new_tokens and (not ids or ids[-1] not in eos_token_ids):
            logits = TARGET.logits([[*prompt_ids, *ids]])[0, -1].numpy()
            law = np.exp((logits - logits.max()) / max(temperature, 1e-4))
            ids.append(int(random.choice(VOCAB, p=law / law.sum())))
        texts.append(ids)
    return texts


def everything(prompt_ids, n, max_new_tokens, seed, **sampling):
    """Takes whatever is asked, and ignores it."""
    return decode(prompt_ids, n, max_new_tokens, seed)


def from_settings(settings):
    """A factory of a function."""
    assert settings.num_speculative_tokens
    return decode


def engine(settings):
    """A factory of an engine."""
    return fake_engine(num_speculative_tokens=settings.num_speculative_tokens)


@contextlib.contextmanager
def context(settings):
    """A factory of a context, without its argument named as ours."""
    yield engine(settings)


def number():
    """No engine."""
    return 3


def text(prompt_ids, n, max_new_tokens, seed):
    """Answers with a text."""
    return "hello"


def too_few(prompt_ids, n, max_new_tokens, seed):
    """Answers one sample only."""
    return [[1, 2]]


def strings(prompt_ids, n, max_new_tokens, seed):
    """Answers with strings in place of ids."""
    return [["a"]] * n


def raises(prompt_ids, n, max_new_tokens, seed):
    """Breaks."""
    msg = "no slots"
    raise ZeroDivisionError(msg)
