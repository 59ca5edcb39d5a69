"""Everything that specverify raises, drawn as a tree.

    SpecverifyError
    ├── UsageError               the user can mend it: one sentence, exit code 2, no traceback
    │   ├── PairError            a model folder, tokenizer or configuration can't be used
    │   │   └── NonFiniteLogits  a model returned NaN or +inf
    │   ├── PromptError          a prompt or a prompt file can't be used
    │   ├── PlanError            a plan, parameter, check or fault name can't be used
    │   ├── PolicyError          a policy of the gate can't be used
    │   ├── UnsupportedModel     a cache that can't be rolled back, or an architecture we can't drive
    │   └── OutputError          a file can't be written, or can't be read back
    ├── SubjectError             what is under test broke while it was asked: a finding, not a crash
    │   └── RequestRefused       it said aloud that it can't do what a request asks; fine, where ignoring it is not
    ├── ClaimViolated            a claim failed inside somebody's own test (also an AssertionError)
    └── InternalError            a bug in specverify itself

A message is one sentence that says what is wrong, where, and what to do.
"""

from __future__ import annotations

__all__ = [
    "ClaimViolated",
    "InternalError",
    "NonFiniteLogits",
    "OutputError",
    "PairError",
    "PlanError",
    "PolicyError",
    "PromptError",
    "RequestRefused",
    "SpecverifyError",
    "SubjectError",
    "UnsupportedModel",
    "UsageError",
]


class SpecverifyError(Exception):
    """Root of the tree; never raised itself."""


class UsageError(SpecverifyError):
    """The user can mend it; the command line prints the sentence and exits with 2."""


class PairError(UsageError):
    """A model folder, tokenizer or configuration can't be used."""


class PromptError(UsageError):
    """A prompt, or a file of prompts, can't be used."""


class PlanError(UsageError):
    """A plan, a parameter, or the name of a check or fault can't be used."""


class PolicyError(UsageError):
    """A policy of the gate can't be used."""


class UnsupportedModel(UsageError):
    """The model keeps a state that can't be rolled back, or can't be driven at all."""


class OutputError(UsageError):
    """A file can't be written, or one that we wrote earlier can't be read back."""


class SubjectError(SpecverifyError):
    """What is under test broke while it was asked; the run reports it as a finding."""


class RequestRefused(SubjectError):
    """What is under test can't do what a request asks, and says so."""


class NonFiniteLogits(PairError):
    """A model returned NaN or +inf, so no distribution exists at that position."""


class ClaimViolated(SpecverifyError, AssertionError):
    """A claim failed inside somebody's own test."""


class InternalError(SpecverifyError):
    """A bug in specverify itself; please report it with the command that shows it."""
