"""What a command line asks for: which models, which plan, where to; and the same in one line, to run it again."""

from __future__ import annotations

import dataclasses
import re
import shlex
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

from specverify.errors import PlanError, UsageError
from specverify.pairs import embedded
from specverify.plan import BUDGETS, Plan
from specverify.policy import Policy

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["DRAFTERS", "Invocation", "Sources", "require_known"]

SCORERS = ("target", "engine", "texts")
"""What `--score-by` takes probabilities from; from texts alone there are none."""
DRAFTERS = ("model", "prompt-lookup", "shared-ids", "text")
"""Where `--drafter` takes drafts from: the last two are a draft model with another tokenizer than the target's."""


@dataclass(frozen=True, kw_only=True)
class Sources:
    """Where models and prompts come from."""

    name: str
    """Of the pair; the folder of the certificate is named after it."""
    target: str
    draft: str | None
    prompts: Path


@dataclass(frozen=True, kw_only=True)
class Invocation:
    """The arguments and options of `specverify certify`, as they were given."""

    target: str | None = None
    draft: str | None = None
    pair: str | None = None
    drafter: str = "model"
    rule: str = "chain"
    branching: str | None = None
    """Children of a node by its depth, such as `3,2,1`, for a rule over trees."""
    num_speculative_tokens: int | None = None
    fault: str = ""
    engine: str = ""
    """Decodes in place of the reference decoder."""
    url: str = ""
    model: str = ""
    serve: str = ""
    option: tuple[str, ...] = ()
    off: str = ""
    score_by: str = "target"
    """The target, loaded here, the engine's own log-probabilities without speculation, or nothing but its texts."""
    trust_remote_code: bool = False
    prompts: Path | None = None
    plan_file: Path | None = None
    policy: Path | None = None
    """What the gate will want: the plan asks for at least that much."""
    budget: str | None = None
    only: tuple[str, ...] = ()
    seed: int | None = None
    device: str | None = None
    dtype: str | None = None
    device_map: str | None = None
    tensor_parallel: int = 0
    """Processes that torchrun has started to hold the target together; 0 where that isn't asked for."""
    out: Path | None = None

    def sources(self) -> Sources:
        """Which models and prompts. Raises `UsageError` where the arguments don't go together."""
        require_known("drafter", self.drafter, DRAFTERS)
        require_known("scorer", self.score_by, SCORERS)
        if not self.engine:
            for option in ("url", "serve", "model", "off", "option", "score_by"):
                if getattr(self, option) != getattr(Invocation, option):
                    named = option.replace("_", "-")
                    msg = f"--{named} is for an engine, so say which: add --engine NAME, or leave --{named} out"
                    raise UsageError(msg)
        lookup = self.drafter == "prompt-lookup"
        if self.target is None and self.draft is not None:
            msg = f"the draft {self.draft} has no target; give both, or neither for the embedded pair"
            raise UsageError(msg)
        if self.target is None:
            shipped = embedded(self.pair or "embedded")
            draft = None if lookup else str(shipped.draft)
            return Sources(
                name=shipped.name,
                target=str(shipped.target),
                draft=draft,
                prompts=self.prompts or shipped.prompts,
            )
        if self.pair is not None:
            msg = f"give either TARGET and DRAFT, or --pair {self.pair}, not both"
            raise UsageError(msg)
        if self.draft is None and not lookup:
            msg = f"{self.target} needs a DRAFT after it; or use --drafter prompt-lookup, which needs none"
            raise UsageError(msg)
        if self.draft is not None and lookup:
            msg = "prompt lookup drafts from the prompt itself; leave DRAFT out, or use --drafter model"
            raise UsageError(msg)
        parts = [Path(part).name or "model" for part in (self.target, self.draft or "prompt-lookup")]
        name = re.sub(r"[^\w.+-]+", "-", "+".join(parts))
        return Sources(name=name, target=self.target, draft=self.draft, prompts=self.prompts or embedded().prompts)

    def plan(self) -> Plan:
        """The plan: the budget's numbers, changed by the plan file, changed by the options. Raises `PlanError`."""
        from specverify.codec import check_plan, read_plan

        budget = require_known("budget", self.budget or "standard", BUDGETS)
        plan = dataclasses.replace(Plan(budget=budget), **BUDGETS[budget])  # type: ignore[arg-type]  # the table holds ints and floats
        plan = self._asked_by_policy(plan)
        if self.plan_file is not None:
            plan = read_plan(self.plan_file, plan)
            if self.budget and plan.budget != self.budget:
                msg = f"{self.plan_file} sets budget to '{plan.budget}' and the command to '{self.budget}'; drop one"
                raise PlanError(msg)
        names = ("num_speculative_tokens", "seed", "device", "dtype")
        options = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        if self.only:
            options["only"] = self.only
        return self._at_least_policy(check_plan(dataclasses.replace(plan, **options), source="the command"))

    def _asked_by_policy(self, plan: Plan) -> Plan:
        if self.policy is None:
            return plan
        from specverify.policy_plan import asked_by

        return asked_by(plan, self.wanted())

    def _at_least_policy(self, plan: Plan) -> Plan:
        """Nowhere laxer than the policy, with the tokens that this takes."""
        if self.policy is None:
            return plan
        from specverify.codec import check_plan
        from specverify.policy_plan import at_least, with_enough_tokens

        source = f"the policy {self.policy}"
        return check_plan(with_enough_tokens(check_plan(at_least(plan, self.wanted()), source=source)), source=source)

    def wanted(self) -> Policy:
        """The policy, which wants nothing where none was named. Raises `PolicyError`."""
        from specverify.policy_file import read_policy

        return Policy() if self.policy is None else read_policy(self.policy)

    def folder(self, sources: Sources, plan: Plan) -> Path:
        """Where the certificate goes: neither a planted fault nor a part of the checks overwrites a whole certificate."""
        by = "-" + re.sub(r"[^\w.+-]+", "-", self.engine) if self.engine else ""
        name = f"{sources.name}-fault-{self.fault}" if self.fault else sources.name + by
        part = f"-only-{'+'.join(sorted(set(plan.only)))}" if plan.only else ""
        return self.out if self.out is not None else Path("specverify-out") / f"{name}{part}"

    def command(self) -> str:
        """The command line, but for `--only`, `--seed` and `--budget`, which a reproduction sets itself."""
        return self._command(leave_out={"only", "seed", "budget", "out"})

    def whole_command(self) -> str:
        """The command line with everything that decides what is seen, as the certificate records it."""
        return self._command(leave_out={"out"})

    def _command(self, *, leave_out: set[str]) -> str:
        words = ["specverify", "certify"]
        if self.tensor_parallel:
            words = ["torchrun", "--nproc-per-node", str(self.tensor_parallel), "-m", *words, "--tensor-parallel"]
        words += [*(word for word in (self.target, self.draft) if word is not None)]
        usual = Invocation()
        for each in dataclasses.fields(self):
            value = getattr(self, each.name)
            if each.name in {"target", "draft", "tensor_parallel", *leave_out} or value == getattr(usual, each.name):
                continue
            option = "--" + each.name.removesuffix("_file").replace("_", "-")
            values = value if isinstance(value, tuple) else (value,)
            words += [option] if value is True else [word for one in values for word in (option, str(one))]
        return shlex.join(words)


def require_known(kind: str, name: str, known: Iterable[str]) -> str:
    """The same name; raises `PlanError` with the nearest known one."""
    names = list(known)
    if name not in names:
        near = get_close_matches(str(name), names, n=1, cutoff=0.5)
        hint = f"did you mean '{near[0]}'?" if near else f"known: {', '.join(names)}"
        msg = f"there is no {kind} named '{name}'; {hint}"
        raise PlanError(msg)
    return name
