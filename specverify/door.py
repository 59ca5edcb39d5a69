"""The Python door: a pair's certificate in one call, as `specverify certify` makes it."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any

from specverify.certify import certify, chosen
from specverify.cli.invocation import Invocation, require_known
from specverify.cli.setup import make_subject, require_names
from specverify.codec import typed_plan
from specverify.engines import require_engine
from specverify.errors import PromptError, UsageError
from specverify.plan import BUDGETS, Plan
from specverify.prompt_file import require_text
from specverify.records import Prompt

if TYPE_CHECKING:
    from specverify.engines import Engine
    from specverify.records import Certificate
    from specverify.subject import Subject
    from specverify.watch import Watch

__all__ = ["certify_pair", "plan_of", "subject_of"]


def certify_pair(
    target: str | Path | None = None,
    draft: str | Path | None = None,
    *,
    prompts: str | Path | Iterable[str | Prompt] | None = None,
    engine: Engine | None = None,
    out: str | Path | None = None,
    watch: Watch | None = None,
    pair: str | None = None,
    drafter: str = "model",
    rule: str = "chain",
    branching: str | None = None,
    device_map: str | None = None,
    trust_remote_code: bool = False,
    **plan: Any,  # noqa: ANN401 - fields of Plan, each checked against its own type and range
) -> Certificate:
    """Whether a pair may go out: folders or hub names, and any field of `Plan` by its name (`budget`, `seed`, `only`, ...).

    Without a pair, the embedded one. `prompts` is a JSONL file, or texts. An `engine` of your own is held against the
    target in place of the reference decoder. With `out`, certificate and reports are written to that folder.

    Raises `UsageError` (one sentence) for what can't be certified; a pair that fails is a certificate that says so.

        certificate = certify_pair("models/target", "models/draft", prompts=["Once upon"], budget="quick")
        assert certificate.lets_out, certificate.headline  # PASS, and of all checks
    """
    asked = plan_of(**plan)
    chosen(asked)
    _require_kinds(engine=engine, out=out, prompts=prompts, trust_remote_code=trust_remote_code)
    invocation = Invocation(
        target=None if target is None else str(target), draft=None if draft is None else str(draft), pair=pair,
        drafter=drafter, rule=rule, branching=branching, device_map=device_map, trust_remote_code=trust_remote_code,
        prompts=Path(prompts) if isinstance(prompts, (str, Path)) else None,
    )  # fmt: skip
    texts = None if prompts is None or isinstance(prompts, (str, Path)) else _prompts(prompts)

    def made() -> Certificate:
        subject = subject_of(invocation, asked, prompts=texts, engine=engine)
        return certify(subject, asked, watch=watch, trust_remote_code=trust_remote_code)

    if out is None:
        return made()
    from specverify.cli.output import last_of, render, require_other_folder, reserved, set_aside, write_all  # noqa: PLC0415 - needed for files only

    require_other_folder(folder := Path(out), (invocation.target, invocation.draft))
    with reserved(folder):
        set_aside(folder)
        certificate = made()
        write_all(folder, render(certificate, last_of(folder)))
    return certificate


def _require_kinds(*, engine: object, out: object, prompts: object, trust_remote_code: object) -> None:
    """Raise `UsageError` for what a checker of types would have refused, before a model is loaded."""
    if engine is not None:
        require_engine(engine)
    if not isinstance(out, (str, Path, NoneType)):
        msg = f"out={out!r:.80} is no folder; give its path"
        raise UsageError(msg)
    if not isinstance(prompts, (str, Path, Iterable, NoneType)):
        msg = f"prompts={prompts!r:.80} is neither a file nor a list of texts"
        raise PromptError(msg)
    if isinstance(prompts, str) and not os.path.exists(prompts):  # noqa: PTH110 - a long text is no path at all
        msg = f"prompts={prompts!r:.80} is no file; texts go into a list"
        raise PromptError(msg)
    if not isinstance(trust_remote_code, bool):
        msg = f"trust_remote_code={trust_remote_code!r:.80} is neither True nor False"
        raise UsageError(msg)


def plan_of(**fields: Any) -> Plan:  # noqa: ANN401 - as above
    """A plan from its budget and the fields that are set; raises `PlanError` with the nearest name or the range."""
    budget = require_known("budget", fields.get("budget", "standard"), BUDGETS)
    if isinstance(only := fields.get("only", ()), str):
        fields["only"] = (only,)
    elif isinstance(only, (list, set, frozenset)):
        fields["only"] = tuple(only)
    return typed_plan(Plan(), {**BUDGETS[budget], **fields})


def subject_of(
    invocation: Invocation, plan: Plan, *, prompts: tuple[Prompt, ...] | None = None, engine: Engine | None = None
) -> Subject:
    """Models loaded, prompts encoded, and what is under test: the reference decoder, or an engine of somebody else's."""
    require_names(invocation, plan)
    subject = make_subject(invocation, invocation.sources(), plan, prompts=prompts)
    if engine is None:
        return subject
    return dataclasses.replace(subject, engine=engine, decoder=None, rule="", drafts_follow_law=False)


def _prompts(given: Iterable[str | Prompt]) -> tuple[Prompt, ...]:
    prompts: list[Prompt] = []
    known: set[str] = set()
    for number, each in enumerate(given, start=1):
        prompt = each if isinstance(each, Prompt) else Prompt(id=f"prompt-{number:04}", domain="default", text=each)
        if not prompt.messages:
            require_text(prompt.text, f"prompt {number}")
        if prompt.id in known:
            msg = f"prompt {number} has the id {prompt.id!r:.80}, which one before it has too"
            raise PromptError(msg)
        known.add(prompt.id)
        prompts.append(prompt)
    if not prompts:
        msg = "there is no prompt; give some texts, or leave prompts out for the embedded ones"
        raise PromptError(msg)
    return tuple(prompts)
