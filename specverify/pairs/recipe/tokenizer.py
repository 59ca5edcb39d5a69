"""The pair's tokenizer: byte-level BPE with 2048 ids, trained on the training texts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["CHAT_TEMPLATE", "VOCAB_SIZE", "documents", "train_tokenizer"]

VOCAB_SIZE = 2048
EOS, PAD, USER, ASSISTANT = "<|eos|>", "<|pad|>", "<|user|>", "<|assistant|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_DOCUMENT_CHARACTERS = 450


def documents(text: str, *, unwrap: bool) -> list[str]:
    """Runs of paragraphs of about `_DOCUMENT_CHARACTERS`; an EOS goes after each, so that generation stops."""
    paragraphs = [part.strip("\n") for part in text.split("\n\n") if part.strip()]
    if unwrap:
        paragraphs = [" ".join(part.split()) for part in paragraphs]
    runs, run = [], ""
    for paragraph in paragraphs:
        run = f"{run}\n\n{paragraph}" if run else paragraph
        if len(run) >= _DOCUMENT_CHARACTERS:
            runs.append(run)
            run = ""
    return runs + [run] * bool(run)


def train_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Deterministic for the same texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[EOS, PAD, USER, ASSISTANT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=EOS, pad_token=PAD, additional_special_tokens=[USER, ASSISTANT]
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast
