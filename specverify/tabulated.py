"""Speculative decoding by look-up: millions of whole texts from a pair so small that all its laws fit into a cache.

`tabulate` asks both models once for their law after every prefix. Then there are two samplers:

- `sample` runs the *unchanged rule*, right or faulty, on looked-up laws: drafts, acceptance and residual draw their own
  uniforms, so it shows faults of streams, too. What is not in it is the loop of `decoding` and its caches.
- `sample_steps` draws whole steps from a `StepTable`, in which the rule's exact law after each prefix was worked out once
  over all drafts (`Enumerate`). It is several times faster, and shows what the rule's *law* does, never its use of uniforms.

Note [Texts as nodes]: a text is a node of the V-ary tree: the prompt is node 0, and id x after node n is node nV + 1 + x. So
a prefix is its row in the tables, a step is a pair of nodes, and counting texts is counting nodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn.functional import embedding  # the fastest look-up of whole rows

from specverify.choices import Stream
from specverify.choices.enumerate import Enumerate, every_path
from specverify.choices.splitmix import SplitMix
from specverify.context import pad_vocab
from specverify.records import SamplingParams
from specverify.sampling import probabilities
from specverify.verification import Proposal

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    from specverify.choices import Choices
    from specverify.models import LanguageModel
    from specverify.verification import Rule

__all__ = ["Samples", "StepTable", "TabulatedPair", "sample", "sample_steps", "tabulate", "tabulate_rule"]

_CHUNK_NUMBERS = 2**18
"""Target probabilities at a time (2 MiB): with fewer the calls cost most, with more every tensor is fresh pages."""
_STEPS_CHUNK = 2**16
"""Sequences at a time where a step is one look-up."""


@dataclass(frozen=True, kw_only=True)
class TabulatedPair:
    """The laws of target and draft after every text that is shorter than `max_new_tokens`."""

    target_probs: Float[Tensor, "prefixes vocab"]
    draft_probs: Float[Tensor, "prefixes vocab"]
    draft_cdf: Float[Tensor, "prefixes vocab"]
    """Infinite from the last possible id on, so that none after it is ever drawn."""
    max_new_tokens: int
    ends: Bool[Tensor, " vocab"]
    """Which ids are an EOS."""

    @property
    def vocab_size(self) -> int:
        """Number of ids."""
        return self.target_probs.shape[1]

    @property
    def num_texts(self) -> int:
        """Nodes of the tree down to the longest texts, the empty one included."""
        return _first_node(self.vocab_size, self.max_new_tokens + 1)

    def node(self, token_ids: Sequence[int]) -> int:
        """The number of a text (Note [Texts as nodes])."""
        node = 0
        for token in token_ids:
            node = node * self.vocab_size + 1 + token
        return node

    def nodes(self, length: int) -> Int[Tensor, " texts"]:
        """The texts of this length."""
        return torch.arange(_first_node(self.vocab_size, length), _first_node(self.vocab_size, length + 1))

    def texts(self) -> Int[Tensor, "texts length"]:
        """The ids of each node's text, -1 past its end."""
        texts = torch.full((self.num_texts, self.max_new_tokens), -1)
        for length in range(1, self.max_new_tokens + 1):
            children = self.nodes(length)
            texts[children] = texts[(children - 1) // self.vocab_size]
            texts[children, length - 1] = (children - 1) % self.vocab_size
        return texts


@dataclass(frozen=True)
class Step:
    """One draft-and-verify step of each row."""

    after: Int[Tensor, " rows"]
    """The node that it leads to."""
    num_accepted_tokens: Int[Tensor, " rows"]
    num_emitted_tokens: Int[Tensor, " rows"]
    ended: Bool[Tensor, " rows"]
    """Whether its last token is an EOS."""


@dataclass(frozen=True, kw_only=True)
class Samples:
    """What was decoded: one row a sequence."""

    nodes: Int[Tensor, " n"]
    """The number of each text, for counting (Note [Texts as nodes])."""
    token_ids: Int[Tensor, "n length"]
    """Emitted ids, EOS included, -1 past the end."""
    num_accepted_tokens: Int[Tensor, " n"]
    """Drafts that were accepted and emitted."""
    num_steps: Int[Tensor, " n"]
    """Draft-and-verify steps."""


def _first_node(vocab_size: int, length: int) -> int:
    """The number of the first text of this length."""
    return sum(vocab_size**shorter for shorter in range(length))


def tabulate(
    target: LanguageModel,
    draft: LanguageModel,
    *,
    max_new_tokens: int,
    prompt_ids: tuple[int, ...] = (0,),
    params: SamplingParams | None = None,
    eos_token_ids: tuple[int, ...] = (),
) -> TabulatedPair:
    """Ask both models for their laws after the prompt and every text of fewer than `max_new_tokens` ids.

    pair = tabulate(random_table(8, 5, seed=0), random_table(8, 5, seed=1), max_new_tokens=4)
    """
    asked = params or SamplingParams()
    laws = [_laws(model, target.vocab_size, prompt_ids, max_new_tokens, asked) for model in (target, draft)]
    cdf = laws[1].cumsum(-1)
    last = (cdf >= cdf[:, -1:]).byte().argmax(-1, keepdim=True)
    ids = torch.arange(target.vocab_size)
    return TabulatedPair(
        target_probs=laws[0],
        draft_probs=laws[1],
        draft_cdf=torch.where(ids >= last, torch.inf, cdf),
        max_new_tokens=max_new_tokens,
        ends=torch.isin(ids, torch.tensor(eos_token_ids, dtype=torch.int64)),
    )


def _laws(
    model: LanguageModel, vocab_size: int, prompt_ids: tuple[int, ...], max_new_tokens: int, params: SamplingParams
) -> Float[Tensor, "prefixes vocab"]:
    """The model's laws in the order of the nodes, one length at a time."""
    levels = []
    for length in range(max_new_tokens):
        prefixes = [prompt_ids + text for text in product(range(vocab_size), repeat=length)]
        levels.append(
            probabilities(
                pad_vocab(model.logits(prefixes)[:, -1:], vocab_size),
                [params] * len(prefixes),
                token_ids=torch.tensor(prefixes),
                prefix_lengths=torch.full((len(prefixes), 1), len(prompt_ids) + length),
                prompt_lengths=torch.full((len(prefixes),), len(prompt_ids)),
            )[:, 0]
        )
    return torch.cat(levels)


# ---------------------------------------------------------------------------------------------------- the unchanged rule


@torch.inference_mode()
def sample(
    pair: TabulatedPair, rule: Rule, num_sequences: int, *, num_speculative_tokens: int, seed: int = 0, first: int = 0
) -> Samples:
    """Decode sequences `first`, `first` + 1, ... with the rule itself, drafts drawn one after the other.

    A sequence depends on the seed and its own number only, so parts that are drawn apart are the parts of the whole.
    """
    rows_of_each = 1 + min(num_speculative_tokens, pair.max_new_tokens - 1)
    size = max(1, _CHUNK_NUMBERS // (rows_of_each * pair.vocab_size))
    chunks = [
        _decoded(pair, rule, choices, num_speculative_tokens) for choices in _chunks(num_sequences, size, seed, first)
    ]
    return _samples(pair, chunks)


def _chunks(num_sequences: int, size: int, seed: int, first: int) -> Iterator[SplitMix]:
    end = first + num_sequences
    for begin in range(first, end, size):
        yield SplitMix.start(seed, torch.arange(begin, min(begin + size, end)))


def _decoded(pair: TabulatedPair, rule: Rule, choices: SplitMix, num_speculative_tokens: int) -> Int[Tensor, "3 n"]:
    """Nodes, accepted tokens and steps of a chunk.

    A step moves on by a token at least, so one sweep over the lengths meets every step: at each length all sequences that
    stand there take one, with equally many drafts. The length is the position, and numbers the step as well.
    """
    node, length, accepted, steps = torch.zeros(4, len(choices.who), dtype=torch.int64)
    for here in range(pair.max_new_tokens):
        rows = (length == here).nonzero()[:, 0]
        place = torch.tensor([here])
        moved = choices.select(rows).moved(place, place)
        path, ids = _drafted(pair, moved, node[rows], min(num_speculative_tokens, pair.max_new_tokens - here - 1))
        step = _verified(pair, rule, moved, path, ids)
        node[rows] = step.after
        accepted[rows] += step.num_accepted_tokens
        steps[rows] += 1
        length[rows] = torch.where(step.ended, pair.max_new_tokens, here + step.num_emitted_tokens)
    return torch.stack((node, accepted, steps))


def _drafted(
    pair: TabulatedPair, choices: SplitMix, node: Int[Tensor, " rows"], num_drafts: int
) -> tuple[Int[Tensor, "rows k_plus_1"], Int[Tensor, "rows k"]]:
    """The nodes before and after each draft, and the drafts: the inverse CDF, as `Choices.draw` does it."""
    uniforms = choices.uniform(Stream.DRAFT, torch.arange(num_drafts))
    path, ids = [node], []
    for uniform in uniforms.unbind(1):
        ids.append((embedding(path[-1], pair.draft_cdf) <= uniform[:, None]).sum(-1))
        path.append(path[-1] * pair.vocab_size + 1 + ids[-1])
    return torch.stack(path, 1), torch.stack(ids, 1) if ids else node.new_zeros(len(node), 0)


def _verified(
    pair: TabulatedPair,
    rule: Rule,
    choices: Choices,
    path: Int[Tensor, "rows k_plus_1"],
    ids: Int[Tensor, "rows k"],
) -> Step:
    """What the rule makes of these drafts, up to the first EOS."""
    num_drafts = torch.full_like(path[:, 0], ids.shape[1])
    proposal = Proposal(ids, num_drafts, embedding(path[:, :-1], pair.draft_probs))
    verification = rule(proposal, embedding(path, pair.target_probs), choices)
    accepted, next_ids = verification.num_accepted_tokens, verification.next_token_ids
    after = path.gather(1, accepted[:, None])[:, 0] * pair.vocab_size + 1 + next_ids
    if not bool(pair.ends.any()):
        return Step(after, accepted, accepted + 1, torch.zeros_like(accepted, dtype=torch.bool))
    emitted = torch.nn.functional.pad(ids, (0, 1)).scatter_(1, accepted[:, None], next_ids[:, None])
    nodes = torch.nn.functional.pad(path[:, 1:], (0, 1)).scatter_(1, accepted[:, None], after[:, None])
    ends = pair.ends[emitted] & (torch.arange(emitted.shape[1]) <= accepted[:, None])
    ended = ends.any(-1)
    last = torch.where(ended, ends.byte().argmax(-1), accepted)  # as `decoding.first_stop` cuts it
    return Step(nodes.gather(1, last[:, None])[:, 0], torch.minimum(accepted, last + 1), last + 1, ended)


def _samples(pair: TabulatedPair, chunks: list[Int[Tensor, "3 n"]]) -> Samples:
    nodes, accepted, steps = torch.cat(chunks, 1)
    return Samples(
        nodes=nodes, token_ids=pair.texts().index_select(0, nodes), num_accepted_tokens=accepted, num_steps=steps
    )


# ---------------------------------------------------------------------------------------------------- the tabulated rule


@dataclass(frozen=True, kw_only=True)
class StepTable:
    """The exact law of a step after each prefix, as alias tables [Walker1977], one after the other.

    An outcome is the node after the step, shifted by eight bits, plus the number of accepted tokens.
    """

    begin: Int[Tensor, " prefixes"]
    """Where a prefix's table begins."""
    size: Int[Tensor, " prefixes"]
    threshold: Float[Tensor, " entries"]
    outcome: Int[Tensor, " entries"]
    """Below the threshold."""
    alias: Int[Tensor, " entries"]
    """At the threshold and above."""
    going_on: Bool[Tensor, " texts"]
    """Whether a text is shorter than the limit and has no EOS."""


def tabulate_rule(pair: TabulatedPair, rule: Rule, *, num_speculative_tokens: int) -> StepTable:
    """Ask the unchanged rule about every prefix and every draft that can be drawn there, over all of its paths."""
    laws: list[tuple[list[int], list[float]]] = []
    for here in range(pair.max_new_tokens):
        laws += _step_laws(pair, rule, pair.nodes(here), min(num_speculative_tokens, pair.max_new_tokens - here - 1))
    tables = [_alias_table(outcomes, weights) for outcomes, weights in laws]
    size = torch.tensor([len(threshold) for threshold, _, _ in tables])
    last_ids = torch.cat((torch.zeros(1, dtype=torch.int64), (torch.arange(1, pair.num_texts) - 1) % pair.vocab_size))
    ended = pair.ends[last_ids]
    ended[0] = False
    ended[len(laws) :] = True
    return StepTable(
        begin=size.cumsum(0) - size,
        size=size,
        threshold=torch.tensor([each for threshold, _, _ in tables for each in threshold], dtype=torch.float64),
        outcome=torch.tensor([each for _, outcomes, _ in tables for each in outcomes]),
        alias=torch.tensor([each for _, _, aliases in tables for each in aliases]),
        going_on=~ended,
    )


def _step_laws(
    pair: TabulatedPair, rule: Rule, nodes: Int[Tensor, " nodes"], num_drafts: int
) -> list[tuple[list[int], list[float]]]:
    """Outcomes and their probabilities after each node: over the drafts, and over the rule's choices given the drafts."""
    texts = list(product(range(pair.vocab_size), repeat=num_drafts))
    drafts = torch.tensor(texts, dtype=torch.int64).view(len(texts), num_drafts)
    ids = drafts.repeat(len(nodes), 1)
    path = [nodes.repeat_interleave(len(drafts))]
    drawn = torch.ones(len(ids), dtype=torch.float64)
    for token in ids.unbind(1):
        drawn = drawn * pair.draft_probs[path[-1], token]
        path.append(path[-1] * pair.vocab_size + 1 + token)
    possible = drawn > 0
    ids, paths, drawn = ids[possible], torch.stack(path, 1)[possible], drawn[possible]

    def program(choices: Enumerate) -> Int[Tensor, "paths 3"]:
        start = choices.begun_at
        step = _verified(pair, rule, choices, paths[start], ids[start])
        return torch.stack((paths[start, 0] - nodes[0], (step.after << 8) + step.num_accepted_tokens, start), 1)

    parts = list(every_path(program, starts=len(ids)))
    origin, outcome, start = torch.cat([outcomes for outcomes, _ in parts]).numpy().T
    weights = torch.cat([weights for _, weights in parts]).numpy() * drawn.numpy()[start]
    found, place = np.unique(np.stack((origin, outcome), 1), axis=0, return_inverse=True)
    sums = np.bincount(place.ravel(), weights=weights)
    begin = np.searchsorted(found[:, 0], np.arange(1, len(nodes)))
    laws = zip(np.split(found[:, 1], begin), np.split(sums, begin), strict=True)
    return [(outcomes.tolist(), law.tolist()) for outcomes, law in laws]


def _alias_table(outcomes: list[int], weights: list[float]) -> tuple[list[float], list[int], list[int]]:
    """Threshold, own outcome and alias of each of n equally likely entries [Walker1977], in linear time [Vose1991]."""
    scale = len(weights) / sum(weights)
    left = [weight * scale for weight in weights]
    threshold, alias = [1.0] * len(left), list(outcomes)
    small = [entry for entry, share in enumerate(left) if share < 1]
    large = [entry for entry, share in enumerate(left) if share >= 1]
    while small and large:
        low, high = small.pop(), large[-1]
        threshold[low], alias[low] = left[low], outcomes[high]
        left[high] -= 1 - left[low]
        if left[high] < 1:
            small.append(large.pop())
    return threshold, outcomes, alias


@torch.inference_mode()
def sample_steps(
    pair: TabulatedPair, table: StepTable, num_sequences: int, *, seed: int = 0, first: int = 0
) -> Samples:
    """Decode sequences `first`, `first` + 1, ... by drawing whole steps from their exact laws, one uniform a step.

    An entry is taken from the leading bits of a 53-bit uniform, and the threshold is compared with what is left of it, so
    that among n outcomes a probability is off by n / 2^53 at most.
    """
    chunks = [_decoded_by_steps(pair, table, choices) for choices in _chunks(num_sequences, _STEPS_CHUNK, seed, first)]
    return _samples(pair, chunks)


def _decoded_by_steps(pair: TabulatedPair, table: StepTable, choices: SplitMix) -> Int[Tensor, "3 n"]:
    node, accepted, steps = torch.zeros(3, len(choices.who), dtype=torch.int64)
    at = torch.zeros(1, dtype=torch.int64)
    rows = torch.arange(len(node))
    for number in range(pair.max_new_tokens):
        uniform = choices.select(rows).moved(at, at + number).uniform(Stream.ACCEPT, at)[:, 0]
        scaled = uniform * table.size[node[rows]]
        place = scaled.long()
        entry = table.begin[node[rows]] + place
        outcome = torch.where(scaled - place < table.threshold[entry], table.outcome[entry], table.alias[entry])
        node[rows] = outcome >> 8
        accepted[rows] += outcome & 0xFF
        steps[rows] += 1
        rows = rows[table.going_on[node[rows]]]
    return torch.stack((node, accepted, steps))
