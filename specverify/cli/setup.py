"""From names to a `Subject`: models loaded and found fit for each other, prompts encoded, the decoder built."""

from __future__ import annotations

import os
from collections import defaultdict
from typing import TYPE_CHECKING

import torch

from specverify.checks.check import spread
from specverify.checks.compatibility import compare_ids, eos_ids, token_strings
from specverify.cli.exits import say
from specverify.cli.invocation import require_known
from specverify.decoding import Decoder
from specverify.drafting import DEFAULT_BRANCHING, TREES, PromptLookup, TextDraft, branching_of, drafter_for
from specverify.engines.reference import ReferenceEngine
from specverify.errors import PairError, PlanError, PromptError
from specverify.faults import find_fault
from specverify.models.loading import load_pair
from specverify.models.transformers import require_working_trees
from specverify.models.two_tokenizers import text_of, translated
from specverify.prompt_file import read_prompts
from specverify.subject import EncodedPrompt, Subject
from specverify.verification.rules import RULES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specverify.cli.invocation import Invocation, Sources
    from specverify.drafting import Drafter
    from specverify.models import LanguageModel
    from specverify.models.led import Processes
    from specverify.models.loading import LoadedModel, Pair
    from specverify.plan import Plan
    from specverify.records import Prompt

__all__ = ["balanced", "encode", "make_subject", "require_names", "require_one_vocabulary", "require_smaller"]

_SMALL = 100_000_000
"""Parameters below which a second thread in one operation costs more than it saves."""
_MOST_WORKERS = 4


def require_names(invocation: Invocation, plan: Plan) -> None:
    """Raise `PlanError` for the name of a rule or fault that isn't there, before anything is loaded.

    And for a drafter that can't draft what the rule verifies, or a shape that is no tree of it.
    """
    require_known("rule", invocation.rule, RULES)
    if invocation.fault:
        find_fault(invocation.fault)
    tree = RULES[invocation.rule].drafts in TREES
    if tree and invocation.drafter not in {"model", "shared-ids"}:
        msg = f"--rule {invocation.rule} verifies trees, which {invocation.drafter} can't draft; use --drafter model"
        raise PlanError(msg)
    if not tree and invocation.branching is not None:
        msg = f"--rule {invocation.rule} verifies chains, so there is nothing to branch; leave --branching out"
        raise PlanError(msg)
    _branching(invocation, plan)


def _branching(invocation: Invocation, plan: Plan) -> tuple[int, ...]:
    """Children of a node by its depth, one number for each token that may be drafted."""
    depth = plan.num_speculative_tokens
    if invocation.branching is None:
        return branching_of(depth, DEFAULT_BRANCHING)
    parts = invocation.branching.split(",")
    if not all(part.strip().isdecimal() and int(part) for part in parts):
        msg = f"--branching '{invocation.branching}' is no shape of a tree; give the children of each level, such as 3,2,1"
        raise PlanError(msg)
    if len(parts) > depth:
        msg = (
            f"--branching {invocation.branching} has {len(parts)} levels, but at most {depth} tokens are drafted one "
            f"after the other; use --num-speculative-tokens {len(parts)}"
        )
        raise PlanError(msg)
    return tuple(int(part) for part in parts)


def make_subject(
    invocation: Invocation,
    sources: Sources,
    plan: Plan,
    *,
    prompts: Sequence[Prompt] | None = None,
    processes: Processes | None = None,
) -> Subject:
    """Load, refuse what can't be certified, and put the reference decoder together; `prompts` are used for the file's.

    `processes` hold the target together.

    Raises `PairError`, `PromptError`, `PlanError` or `UnsupportedModel`: one sentence that says what to do.
    """
    prompts = read_prompts(sources.prompts) if prompts is None else prompts
    pair = load_pair(
        sources.target,
        sources.draft,
        device=plan.device,
        dtype=plan.dtype,
        device_map=invocation.device_map,
        trust_remote_code=invocation.trust_remote_code,
        processes=processes,
    )
    _require_own_ids(plan, pair.target)
    if pair.draft is not None:
        require_smaller(pair.target, pair.draft)
        if invocation.drafter == "model":
            require_one_vocabulary(pair.target, pair.draft)
    if len(prompts) > plan.max_prompts:
        say(
            f"{plan.max_prompts} of the {len(prompts):,} prompts are used, evenly from every domain (max_prompts in the plan)"
        )
    room = min(one.model.max_length for one in (pair.target, pair.draft) if one is not None)
    encoded = encode(
        balanced(prompts, plan.max_prompts),
        pair.target,
        positions=room,
        max_new_tokens=plan.max_new_tokens,
        ours=invocation.prompts is None,
    )
    draft = _draft_model(pair, invocation)
    decoder = _decoder(pair, draft, invocation, plan)
    workers = _workers(pair.target)
    subject = Subject(
        engine=ReferenceEngine(decoder, batch_size=plan.batch_size, workers=workers),
        target=pair.target.model,
        draft=draft if invocation.drafter != "text" else None,
        prompts=encoded,
        eos_token_ids=eos_ids(pair.target),
        decoder=decoder,
        pair=pair,
        rule=invocation.rule,
        workers=workers,
        command=invocation.command(),
    )
    return find_fault(invocation.fault).plant(subject) if invocation.fault else subject


def _require_own_ids(plan: Plan, target: LoadedModel) -> None:
    """Raise `PlanError` for an id in the plan's parameters that the target doesn't have."""
    params, rows = plan.params, target.model.vocab_size
    named = {f"banned_token_ids[{place}]": ids or (-1,) for place, ids in enumerate(params.banned_token_ids)}
    named |= {"eos_token_ids": params.eos_token_ids, "stop_token_ids": params.stop_token_ids}
    for key, ids in named.items():
        if wrong := [number for number in ids if not 0 <= number < rows]:
            msg = f"the plan sets params.{key} to {list(ids)!r:.80}, of which {wrong[0]!r:.40} is no id of {target.source}; it has {rows:,}"
            raise PlanError(msg)


def _workers(target: LoadedModel) -> int:
    """Batches side by side for a small model on the CPU, one thread each; see Note [Threads]."""
    if target.model.device.type != "cpu" or target.model.num_parameters > _SMALL or target.model.num_processes > 1:
        return 1
    torch.set_num_threads(1)
    return min(_MOST_WORKERS, os.cpu_count() or 1)


def _draft_model(pair: Pair, invocation: Invocation) -> LanguageModel | None:
    """The draft over the target's ids, where it drafts ids and has a vocabulary of its own."""
    if pair.draft is None or invocation.drafter != "shared-ids":
        return pair.draft.model if pair.draft is not None else None
    return translated(pair.target, pair.draft)


def _drafter(pair: Pair, draft: LanguageModel | None, invocation: Invocation, plan: Plan) -> Drafter:
    target = pair.target.model
    if pair.draft is None or draft is None:
        return PromptLookup(target.vocab_size)
    if invocation.drafter == "text":
        return TextDraft(draft, text_of(pair.draft), text_of(pair.target), target.vocab_size)
    branching = _branching(invocation, plan)
    return drafter_for(RULES[invocation.rule].drafts, draft, target.vocab_size, branching=branching)


def _decoder(pair: Pair, draft: LanguageModel | None, invocation: Invocation, plan: Plan) -> Decoder:
    target = pair.target.model
    named = RULES[invocation.rule]
    if named.drafts in TREES:
        require_working_trees(target)
    return Decoder(
        target=target,
        drafter=_drafter(pair, draft, invocation, plan),
        rule=named.rule,
        drafts=named.drafts,
        num_speculative_tokens=plan.num_speculative_tokens,
        detokenize=text_of(pair.target).decode,
    )


def require_smaller(target: LoadedModel, draft: LoadedModel) -> None:
    """Raise `PairError` for a pair that was swapped."""
    ours, theirs = target.model.num_parameters, draft.model.num_parameters
    if theirs > ours:
        msg = (
            f"the draft {draft.source} ({theirs:,} parameters) is larger than the target {target.source} ({ours:,}); "
            "swap them: TARGET comes first"
        )
        raise PairError(msg)


def require_one_vocabulary(target: LoadedModel, draft: LoadedModel) -> None:
    """Raise `PairError` for a pair whose ids can't be handed over as they are.

    A few ids that differ are for the `compatibility` check to judge; here most of them do, or the draft can't read one.
    """
    tokens, readable = token_strings(target.tokenizer), draft.model.num_embeddings
    unread = [number for number in sorted(tokens) if readable <= number < target.model.vocab_size]
    if unread:
        msg = (
            f"the vocabularies are unlike: the draft {draft.source} has {readable:,} embeddings, so it can't read id "
            f"{unread[0]} ({tokens[unread[0]]!r}) of the target; use a draft with the target's tokenizer, or --drafter shared-ids"
        )
        raise PairError(msg)
    differing = [each for each in compare_ids(target, draft) if each.emittable]
    if 2 * len(differing) > len(tokens):
        msg = (
            f"the vocabularies are unlike: {len(differing):,} of {len(tokens):,} ids are another token to the draft "
            f"{draft.source} ({differing[0]}); use a draft with the target's tokenizer, or --drafter shared-ids"
        )
        raise PairError(msg)


def balanced(prompts: Sequence[Prompt], most: int) -> tuple[Prompt, ...]:
    """At most `most` prompts, evenly from every domain and evenly spread within it, in their own order."""
    domains: dict[str, list[Prompt]] = defaultdict(list)
    for prompt in prompts:
        domains[prompt.domain].append(prompt)
    shares, left = dict.fromkeys(domains, 0), min(most, len(prompts))
    while left:
        for domain, members in domains.items():
            if left and shares[domain] < len(members):
                shares[domain] += 1
                left -= 1
    chosen = {prompt.id for domain, members in domains.items() for prompt in spread(tuple(members), shares[domain])}
    return tuple(prompt for prompt in prompts if prompt.id in chosen)


def _ids(prompt: Prompt, target: LoadedModel) -> tuple[int, ...]:
    """A text as the tokenizer encodes it; a conversation as the chat template renders it, up to the answer."""
    conversation = [{"role": message.role, "content": message.content} for message in prompt.messages]
    try:
        ids = (
            target.tokenizer.apply_chat_template(
                conversation, add_generation_prompt=True, tokenize=True, return_dict=False
            )
            if conversation
            else target.tokenizer.encode(prompt.text, verbose=False)
        )
        return tuple(int(number) for number in ids)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # whatever files of theirs raise; a panic of tokenizers is no Exception
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        what = f"a conversation that the template of {target.source} does not take"
        what = what if conversation else f"a text on which the tokenizer of {target.source} fails"
        msg = f"prompt '{prompt.id}' is {what} ({reason}); mend the model's files, or the prompt"
        raise PromptError(msg) from error


def encode(
    prompts: Sequence[Prompt], target: LoadedModel, *, positions: int, max_new_tokens: int, ours: bool = False
) -> tuple[EncodedPrompt, ...]:
    """The prompts in the target's ids, with the special tokens that its tokenizer puts there.

    `positions` is what target and draft both have. Raises `PromptError` for a prompt without a token, or one that leaves
    no room for the answer; of `ours`, which nobody chose for this pair, such are left out as long as others fit.
    """
    room = positions - max_new_tokens
    encoded = []
    for prompt in prompts:
        ids = _ids(prompt, target)
        if not ids:
            msg = f"prompt '{prompt.id}' is empty: {target.source} makes no token of it; give it some text"
            raise PromptError(msg)
        if len(ids) > room:
            if ours:
                continue
            msg = (
                f"prompt '{prompt.id}' has {len(ids):,} tokens and the plan asks for {max_new_tokens:,} more, but "
                f"target and draft both have {positions:,} positions; shorten it, or lower max_new_tokens"
            )
            raise PromptError(msg)
        encoded.append(EncodedPrompt(id=prompt.id, domain=prompt.domain, token_ids=ids))
    if not encoded:
        msg = (
            f"none of specverify's own prompts leaves room for {max_new_tokens:,} tokens in the {positions:,} positions "
            "that target and draft both have; give your own with --prompts, or lower max_new_tokens in the plan"
        )
        raise PromptError(msg)
    if len(encoded) < len(prompts):
        say(f"{len(prompts) - len(encoded)} of specverify's own prompts are too long for this pair and left out")
    return tuple(encoded)
