"""What has been said so far, for each live row of a batch: the one state that target, drafter and stop rule share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from specverify.choices.philox import Philox
from specverify.errors import InternalError
from specverify.records import DecodeTrace

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from jaxtyping import Float, Int
    from torch import Tensor

    from specverify.choices import Choices
    from specverify.records import DecodeRequest, DecodeStep, FinishReason, SamplingParams

__all__ = ["Context", "Row", "pad_vocab"]


@dataclass(frozen=True)
class Row:
    """One sample of one request."""

    request: DecodeRequest
    sample: int


@dataclass
class Context:
    """Prompt and emitted tokens of the live rows, right-padded, and where each row stands.

    Invariant: the sessions of target and draft hold at most `lengths - 1` tokens of a row between steps; the last token
    is always the one whose logits are asked for next.
    """

    rows: list[Row]
    token_ids: Int[Tensor, "batch length"]
    lengths: Int[Tensor, " batch"]
    prompt_lengths: Int[Tensor, " batch"]
    limits: Int[Tensor, " batch"]
    """Length at which a row must stop."""
    choices: Choices
    step: Int[Tensor, " batch"]
    """Draft-and-verify steps so far."""
    detokenize: Callable[[Sequence[int]], str] | None = None
    steps: list[list[DecodeStep]] = field(default_factory=list)
    """Of each row, so far."""

    @staticmethod
    def start(
        rows: Sequence[Row],
        device: torch.device,
        *,
        choices: Callable[[Sequence[Row]], Choices] | None = None,
        window: int = 8,
        detokenize: Callable[[Sequence[int]], str] | None = None,
    ) -> Context:
        """Nothing said yet; choices are `Philox` of each row's seed and sample unless given."""
        prompts = [row.request.prompt_ids for row in rows]
        prompt_lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
        limits = prompt_lengths + torch.tensor([row.request.params.max_new_tokens for row in rows], device=device)
        token_ids = torch.zeros(len(rows), int(limits.max()) + 1, dtype=torch.int64)
        for row, prompt in enumerate(prompts):
            token_ids[row, : len(prompt)] = torch.tensor(prompt)
        seeds = torch.tensor([row.request.seed for row in rows], dtype=torch.int64, device=device)
        samples = torch.tensor([row.sample for row in rows], device=device)
        return Context(
            rows=list(rows),
            token_ids=token_ids.to(device),
            lengths=prompt_lengths.clone(),
            prompt_lengths=prompt_lengths,
            limits=limits,
            choices=choices(rows) if choices else Philox.start(seeds, samples, window=window),
            step=torch.zeros_like(samples),
            detokenize=detokenize,
            steps=[[] for _ in rows],
        )

    @property
    def params(self) -> list[SamplingParams]:
        """Sampling parameters of each row."""
        return [row.request.params for row in self.rows]

    @property
    def reads_prefix(self) -> bool:
        """Whether the law of some row depends on more than the logits."""
        return any(params.prefix_dependent for params in self.params)

    def with_drafts(
        self, draft_ids: Int[Tensor, "rows k"], rows: Int[Tensor, " rows"] | None = None
    ) -> Int[Tensor, "rows length"]:
        """The tokens so far followed by drafted ones, as the sampling parameters must see them.

        `rows` names the sequence of each row of `draft_ids` where several follow the same one (paths of a tree).
        """
        token_ids, lengths = (
            (self.token_ids, self.lengths) if rows is None else (self.token_ids[rows], self.lengths[rows])
        )
        if draft_ids.shape[1] == 0:
            return token_ids
        longer = torch.nn.functional.pad(token_ids, (0, draft_ids.shape[1]))
        places = lengths[:, None] + torch.arange(draft_ids.shape[1], device=draft_ids.device)
        return longer.scatter(1, places, draft_ids)

    def last_tokens(self) -> Int[Tensor, "batch 1"]:
        """The token after which the next is to be chosen."""
        return self.token_ids.gather(1, self.lengths[:, None] - 1)

    def emitted(self, row: int) -> list[int]:
        """What a row has said after its prompt."""
        ids: list[int] = self.token_ids[row, int(self.prompt_lengths[row]) : int(self.lengths[row])].tolist()
        return ids

    def completes_stop_string(self, row: int, new_ids: Sequence[int]) -> bool:
        """Whether the text after the prompt, with these ids, holds one of the row's stop strings."""
        if self.detokenize is None:
            msg = "stop strings need a decoder with a detokenizer"
            raise InternalError(msg)
        text = self.detokenize([*self.emitted(row), *new_ids])
        return any(stop in text for stop in self.rows[row].request.params.stop_strings)

    def commit(
        self, emitted: Int[Tensor, "batch n"], cuts: Sequence[tuple[int, FinishReason | None]], steps: list[DecodeStep]
    ) -> Generator[DecodeTrace, None, Int[Tensor, " rows"]]:
        """Append what each row emits and move on by one step; yields the rows that ended, returns those that go on."""
        num_emitted = torch.tensor([kept for kept, _ in cuts], device=emitted.device)
        places = torch.arange(emitted.shape[1], device=emitted.device)
        spare = self.token_ids.shape[1] - 1  # where nothing is ever read
        self.token_ids.scatter_(
            1, torch.where(places < num_emitted[:, None], self.lengths[:, None] + places, spare), emitted
        )
        self.lengths = self.lengths + num_emitted
        self.step = self.step + 1
        self.choices = self.choices.moved(self.lengths - self.prompt_lengths, self.step)
        for done, step in zip(self.steps, steps, strict=True):
            done.append(step)
        for index, (_, finish) in enumerate(cuts):
            if finish is not None:
                yield DecodeTrace(
                    request=self.rows[index].request,
                    sample=self.rows[index].sample,
                    token_ids=tuple(self.emitted(index)),
                    finish=finish,
                    steps=tuple(self.steps[index]),
                )
        going_on = [index for index, (_, finish) in enumerate(cuts) if finish is None]
        return torch.tensor(going_on, dtype=torch.int64, device=emitted.device)

    def select(self, keep: Int[Tensor, " rows"]) -> None:
        """Finished rows leave."""
        if len(keep) == len(self.rows):
            return
        self.rows = [self.rows[row] for row in keep.tolist()]
        self.steps = [self.steps[row] for row in keep.tolist()]
        self.token_ids, self.lengths = self.token_ids[keep], self.lengths[keep]
        self.prompt_lengths, self.limits = self.prompt_lengths[keep], self.limits[keep]
        self.choices, self.step = self.choices.select(keep), self.step[keep]

    def catch_up(self, held: Int[Tensor, " batch"]) -> tuple[Int[Tensor, "batch n"], Int[Tensor, " batch"]]:
        """The tokens that a session holding `held` tokens of each row still lacks, right-padded, and how many."""
        missing = self.lengths - held
        places = held[:, None] + torch.arange(int(missing.max()), device=held.device)
        return self.token_ids.gather(1, places.clamp(max=self.token_ids.shape[1] - 1)), missing


def pad_vocab(logits: Float[Tensor, "batch n ours"], vocab_size: int) -> Float[Tensor, "batch n vocab"]:
    """Logits over the target's ids: rows that only one of the two output layers has are padding, never drafted."""
    if logits.shape[-1] >= vocab_size:
        return logits[..., :vocab_size]
    return torch.nn.functional.pad(logits, (0, vocab_size - logits.shape[-1]), value=-torch.inf)
