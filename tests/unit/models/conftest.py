"""Tiny models and a folder of files, as fixtures."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from specverify.models.transformers import TransformersModel
from tests.unit.models.checkpoints import BUILDERS, VOCAB_SIZE, random_module

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(params=sorted(BUILDERS))
def model(request: pytest.FixtureRequest) -> TransformersModel:
    """One model of each supported kind of attention."""
    return TransformersModel(random_module(request.param), request.param)


@pytest.fixture
def llama() -> TransformersModel:
    """A model with full attention in every layer."""
    return TransformersModel(random_module("llama"), "llama")


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as `save_pretrained` writes it: fp16 safetensors, tokenizer, template. Copy it before you change it."""
    folder = tmp_path_factory.mktemp("checkpoint")
    random_module("llama").half().save_pretrained(folder)
    words = Tokenizer(WordLevel({f"w{index}": index for index in range(VOCAB_SIZE)}, unk_token="w0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0")
    tokenizer.chat_template = "{{ messages[0].content }}"
    tokenizer.save_pretrained(folder)
    return folder
