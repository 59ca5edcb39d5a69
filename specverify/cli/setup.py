"""From names to a `Subject`: models loaded and found fit for each other, prompts encoded, the decoder built."""

from __future__ import annotations

import os
from collections import defaultdict
from typing import TYPE_CHECKING

import torch

from specverify.checks.check import spread
from specverify.checks.compatibility import compare_ids, eos_ids, token_strings
from specverify.cli.invocation import require_known
from specverify.codec import read_prompts
from specverify.decoding import Decoder
from specverify.drafting import DraftModel, PromptLookup
from specverify.engines.reference import ReferenceEngine
from specverify.errors import PairError, PromptError
from specverify.faults import find_fault
from specverify.models.loading import load_pair
from specverify.subject import EncodedPrompt, Subject
from specverify.verification.rules import RULES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specverify.cli.invocation import Invocation, Sources
    from specverify.models.loading import LoadedModel, Pair
    from specverify.plan import Plan
    from specverify.records import Prompt

__all__ = ["balanced", "encode", "make_subject", "require_fit", "require_names"]

_SMALL = 100_000_000
"""Parameters below which a second thread in one operation costs more than it saves."""
_MOST_WORKERS = 4


def require_names(invocation: Invocation) -> None:
    """Raise `PlanError` for the name of a rule or fault that isn't there, before anything is loaded."""
    require_known("rule", invocation.rule, RULES)
    if invocation.fault:
        find_fault(invocation.fault)


def make_subject(invocation: Invocation, sources: Sources, plan: Plan) -> Subject:
    """Load, refuse what can't be certified, and put the reference decoder together.

    Raises `PairError`, `PromptError`, `PlanError` or `UnsupportedModel`: one sentence that says what to do.
    """
    prompts = read_prompts(sources.prompts)
    pair = load_pair(
        sources.target,
        sources.draft,
        device=plan.device,
        dtype=plan.dtype,
        device_map=invocation.device_map,
        trust_remote_code=invocation.trust_remote_code,
    )
    if pair.draft is not None:
        require_fit(pair.target, pair.draft)
    encoded = encode(balanced(prompts, plan.max_prompts), pair.target, max_new_tokens=plan.max_new_tokens)
    decoder = _decoder(pair, invocation, plan)
    workers = _workers(pair.target)
    subject = Subject(
        engine=ReferenceEngine(decoder, batch_size=plan.batch_size, workers=workers),
        target=pair.target.model,
        draft=pair.draft.model if pair.draft is not None else None,
        prompts=encoded,
        eos_token_ids=eos_ids(pair.target),
        decoder=decoder,
        pair=pair,
        workers=workers,
        command=invocation.command(),
    )
    return find_fault(invocation.fault).plant(subject) if invocation.fault else subject


def _workers(target: LoadedModel) -> int:
    """Batches side by side for a small model on the CPU, one thread each; see Note [Threads]."""
    if target.model.device.type != "cpu" or target.model.num_parameters > _SMALL:
        return 1
    torch.set_num_threads(1)
    return min(_MOST_WORKERS, os.cpu_count() or 1)


def _decoder(pair: Pair, invocation: Invocation, plan: Plan) -> Decoder:
    target, tokenizer = pair.target.model, pair.target.tokenizer

    def detokenize(token_ids: Sequence[int]) -> str:
        text = tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return str(text)

    return Decoder(
        target=target,
        drafter=PromptLookup(target.vocab_size)
        if pair.draft is None
        else DraftModel(pair.draft.model, vocab_size=target.vocab_size),
        rule=RULES[invocation.rule].rule,
        num_speculative_tokens=plan.num_speculative_tokens,
        detokenize=detokenize,
    )


def require_fit(target: LoadedModel, draft: LoadedModel) -> None:
    """Raise `PairError` for a pair that can't be run as one: swapped, or of two vocabularies.

    A few ids that differ are for the `compatibility` check to judge; here most of them do, or the draft can't read one.
    """
    ours, theirs = target.model.num_parameters, draft.model.num_parameters
    if theirs > ours:
        msg = (
            f"the draft {draft.source} ({theirs:,} parameters) is larger than the target {target.source} ({ours:,}); "
            "swap them: TARGET comes first"
        )
        raise PairError(msg)
    tokens, readable = token_strings(target.tokenizer), draft.model.num_embeddings
    unread = [number for number in sorted(tokens) if readable <= number < target.model.vocab_size]
    if unread:
        msg = (
            f"the vocabularies are unlike: the draft {draft.source} has {readable:,} embeddings, so it can't read id "
            f"{unread[0]} ({tokens[unread[0]]!r}) of the target; use a draft with the target's tokenizer"
        )
        raise PairError(msg)
    differing = [each for each in compare_ids(target, draft) if each.emittable]
    if 2 * len(differing) > len(tokens):
        msg = (
            f"the vocabularies are unlike: {len(differing):,} of {len(tokens):,} ids are another token to the draft "
            f"{draft.source} ({differing[0]}); use a draft with the target's tokenizer"
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


def encode(prompts: Sequence[Prompt], target: LoadedModel, *, max_new_tokens: int) -> tuple[EncodedPrompt, ...]:
    """The prompts in the target's ids, with the special tokens that its tokenizer puts there.

    Raises `PromptError` for a prompt without a token, or one that leaves no room for the answer.
    """
    room = target.model.max_length - max_new_tokens
    encoded = []
    for prompt in prompts:
        ids = tuple(int(number) for number in target.tokenizer.encode(prompt.text, verbose=False))
        if not ids:
            msg = f"prompt '{prompt.id}' is empty: {target.source} makes no token of it; give it some text"
            raise PromptError(msg)
        if len(ids) > room:
            msg = (
                f"prompt '{prompt.id}' has {len(ids):,} tokens and the plan asks for {max_new_tokens:,} more, but "
                f"{target.source} has {target.model.max_length:,} positions; shorten it, or lower max_new_tokens"
            )
            raise PromptError(msg)
        encoded.append(EncodedPrompt(id=prompt.id, domain=prompt.domain, token_ids=ids))
    return tuple(encoded)
