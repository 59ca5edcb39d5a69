"""The embedded pair: complete folders, one tokenizer, prompts that fit, and drafts as good and as poor as promised."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from specverify.errors import PairError
from specverify.pairs import PairPaths, embedded, embedded_pairs

FOLDER = embedded().target.parent
MODELS = ("target", "draft", "draft-marginal", "draft-poor")
DRAFTS = MODELS[1:]
MODEL_FILES = {
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}
MAX_BYTES = 12_000_000
IN_DOMAIN = {"austen", "dialogue", "shakespeare", "code", "long"}
# What the data card measures is 0.72, 0.58 and 0.29; a few short samples, wide enough for their noise.
BANDS = {"draft": (0.65, 0.80), "draft-marginal": (0.50, 0.65), "draft-poor": (0.20, 0.40)}
ODD = "Anne — said “no”\n\n\tdef f(x):  学 \u200b\u202e\x1b[31m \U0001f600 <|eos|>"


@pytest.fixture(scope="module")
def models() -> dict[str, torch.nn.Module]:
    """All four, in fp32."""
    return {name: AutoModelForCausalLM.from_pretrained(FOLDER / name, dtype=torch.float32) for name in MODELS}


@pytest.fixture(scope="module")
def prompts() -> list[dict[str, str]]:
    """The lines of the prompt file."""
    return [json.loads(line) for line in embedded().prompts.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def tokenizer() -> AutoTokenizer:
    """The target's."""
    return AutoTokenizer.from_pretrained(FOLDER / "target")


# ------------------------------------------------------------------------------------------------------------ names
def test_each_name_gives_folders_that_are_there() -> None:
    """The three pairs share target and prompts, and differ in the draft."""
    pairs = [embedded(name) for name in embedded_pairs()]
    assert embedded_pairs() == ("embedded", "embedded-marginal", "embedded-poor")
    assert [pair.name for pair in pairs] == list(embedded_pairs())
    assert [pair.draft.name for pair in pairs] == ["draft", "draft-marginal", "draft-poor"]
    assert len({(pair.target, pair.prompts) for pair in pairs}) == 1
    assert all(path.exists() for pair in pairs for path in (pair.target, pair.draft, pair.prompts))
    assert embedded() == pairs[0]
    assert isinstance(pairs[0], PairPaths)


@pytest.mark.parametrize(
    ("name", "hint"),
    [("embeded", "did you mean embedded"), ("embedded-por", "did you mean embedded-poor"), ("zzz", "known: embedded")],
)
def test_an_unknown_name_is_a_sentence_with_the_nearest_one(name: str, hint: str) -> None:
    """A user's error, not a KeyError."""
    with pytest.raises(PairError, match=f"no embedded pair named '{name}'.*{hint}"):
        embedded(name)


# ------------------------------------------------------------------------------------------------------------ files
def test_folders_are_complete_and_hold_nothing_else() -> None:
    """Each is what `from_pretrained` wants; no pickle, no hidden leftover of a replacement."""
    for name in MODELS:
        assert {path.name for path in (FOLDER / name).iterdir()} == MODEL_FILES
    assert {path.name for path in FOLDER.iterdir()} == {*MODELS, "README.md", "prompts.jsonl", "training.json"}


def test_all_files_are_under_twelve_megabytes() -> None:
    """They travel in every wheel."""
    assert sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file()) < MAX_BYTES


@pytest.mark.parametrize("name", MODELS)
def test_weights_are_fp16_once_and_finite_and_the_configuration_asks_for_fp32(name: str) -> None:
    """Half the bytes, the tied head not repeated, and a plain `from_pretrained` computes in fp32."""
    with safe_open(FOLDER / name / "model.safetensors", framework="pt") as weights:
        tensors = {key: weights.get_tensor(key) for key in weights.keys()}  # noqa: SIM118 - no mapping
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float16}
    assert all(bool(tensor.isfinite().all()) for tensor in tensors.values())
    assert "lm_head.weight" not in tensors
    config = json.loads((FOLDER / name / "config.json").read_text(encoding="utf-8"))
    assert (config["dtype"], config["tie_word_embeddings"], config["max_position_embeddings"]) == ("float32", True, 512)
    plain = AutoModelForCausalLM.from_pretrained(FOLDER / name)
    assert plain.dtype == torch.float32
    assert plain.get_output_embeddings().weight is plain.get_input_embeddings().weight


def test_training_record_names_each_model(models: dict[str, torch.nn.Module]) -> None:
    """Its parameters are those of the files."""
    record = json.loads((FOLDER / "training.json").read_text(encoding="utf-8"))
    assert {name: record[name]["parameters"] for name in MODELS} == {
        name: model.num_parameters() for name, model in models.items()
    }


# -------------------------------------------------------------------------------------------------------- tokenizer
def test_all_share_one_tokenizer_and_vocabulary(models: dict[str, torch.nn.Module], tokenizer: AutoTokenizer) -> None:
    """Byte for byte; the embeddings have a row for each id."""
    assert len({(FOLDER / name / "tokenizer.json").read_bytes() for name in MODELS}) == 1
    assert {model.get_input_embeddings().weight.shape[0] for model in models.values()} == {len(tokenizer)} == {2048}
    assert {model.config.eos_token_id for model in models.values()} == {tokenizer.eos_token_id}
    assert {model.generation_config.pad_token_id for model in models.values()} == {tokenizer.pad_token_id}


def test_tokenizer_gives_back_any_text(tokenizer: AutoTokenizer, prompts: list[dict[str, str]]) -> None:
    """It is byte-level: nothing is unknown, nothing is normalised."""
    for text in [ODD, *(prompt["text"] for prompt in prompts)]:
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_chat_template_uses_the_role_tokens(tokenizer: AutoTokenizer) -> None:
    """Roles are single ids, and the chat prompts are what the template renders."""
    chat = [{"role": "user", "content": "Who was the master of Kellynch Hall?"}]
    rendered = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    prompts = embedded().prompts.read_text(encoding="utf-8").splitlines()
    assert rendered in [json.loads(line)["text"] for line in prompts if '"chat-' in line]
    assert len(tokenizer("<|user|><|assistant|>")["input_ids"]) == 2


# ---------------------------------------------------------------------------------------------------------- prompts
def test_prompts_have_unique_ids_and_are_mostly_in_domain(prompts: list[dict[str, str]]) -> None:
    """Each line is id, domain and text; an id begins with its domain."""
    assert all(list(prompt) == ["id", "domain", "text"] for prompt in prompts)
    assert len({prompt["id"] for prompt in prompts}) == len(prompts) == 64
    assert len({prompt["text"] for prompt in prompts}) == len(prompts)
    assert all(prompt["id"].rpartition("-")[0] == prompt["domain"] for prompt in prompts)
    domains = Counter(prompt["domain"] for prompt in prompts)
    assert set(domains) == IN_DOMAIN | {"repetition", "language", "chat", "odd"}
    assert sum(domains[domain] for domain in IN_DOMAIN) >= 40


def test_prompts_leave_room_in_the_context(prompts: list[dict[str, str]], tokenizer: AutoTokenizer) -> None:
    """The long ones have about 300 tokens; 150 new ones fit after any."""
    lengths = {prompt["id"]: len(tokenizer(prompt["text"])["input_ids"]) for prompt in prompts}
    long = [length for name, length in lengths.items() if name.startswith("long-")]
    short = [length for name, length in lengths.items() if not name.startswith("long-")]
    assert all(5 <= length <= 70 for length in short)
    assert all(280 <= length <= 320 for length in long)


# ------------------------------------------------------------------------------------------------------- acceptance
def test_drafts_are_as_good_and_as_poor_as_the_data_card_says(
    models: dict[str, torch.nn.Module], prompts: list[dict[str, str]], tokenizer: AutoTokenizer
) -> None:
    """Mean Σ min(p, q) on the target's own samples: poor < marginal < distilled, each inside its band."""
    generator = torch.Generator().manual_seed(3)
    texts = [prompt["text"] for prompt in prompts if prompt["domain"] in {"austen", "dialogue"}]
    ids = [tokenizer(text)["input_ids"] for text in texts]
    rows = torch.tensor([row[:14] for row in ids if len(row) >= 14][::2])
    start = rows.shape[1]
    with torch.inference_mode():
        for _ in range(24):
            probs = models["target"](rows, logits_to_keep=1, use_cache=False).logits[:, -1].softmax(-1)
            rows = torch.cat([rows, torch.multinomial(probs, 1, generator=generator)], dim=1)
        laws = {name: model(rows).logits[:, start - 1 : -1].softmax(-1) for name, model in models.items()}
    overlap = {name: float(torch.minimum(laws["target"], laws[name]).sum(-1).mean()) for name in DRAFTS}
    assert overlap["draft-poor"] < overlap["draft-marginal"] < overlap["draft"]
    for name, (low, high) in BANDS.items():
        assert low < overlap[name] < high, overlap
