"""Hostile and malformed files of every kind end in one clear sentence and exit code 2, quickly, and nothing is left behind."""

from __future__ import annotations

import hashlib
import json
import lzma
import os
import shutil
import struct
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from specverify.model_files import model_files
from specverify.pairs import embedded
from specverify.statement import render_statement
from tests.cli.test_bad_input import refused
from tests.unit.certificates import certificate_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.cli.conftest import Run

PAIR = embedded()
ROOT = Path(__file__).parents[2]
GOOD = render_statement(certificate_of())
DEEP = "[" * 100_000
BOMB = "9" * 100_000


def edited(change: Callable[[dict], object]) -> str:
    """The text of a good certificate after a change."""
    raw = json.loads(GOOD)
    change(raw)
    return json.dumps(raw)


def record(raw: dict) -> dict:
    """The record in it."""
    return raw["predicate"]["specverify"]["certificate"]


CERTIFICATES = {
    "empty": ("", "not JSON"),
    "binary": ("\x00\x01\x02", "not JSON"),
    "deep": (DEEP, "nested more than 64 deep"),
    "long-integer": (f'{{"seed": {BOMB}}}', "not JSON"),
    "list": ("[]", "no certificate of specverify"),
    "null": ("null", "no certificate of specverify"),
    "other-statement": (
        edited(lambda raw: raw.update(predicateType="https://slsa.dev/provenance/v1")),
        "no certificate of",
    ),
    "no-predicate": (edited(lambda raw: raw.pop("predicate")), "no certificate of specverify"),
    "predicate-of-text": (edited(lambda raw: raw.update(predicate="x")), "no certificate of specverify"),
    "old-schema": (edited(lambda raw: record(raw).update(schema_version=1)), "certify the pair again"),
    "new-schema": (edited(lambda raw: record(raw).update(schema_version=7)), "upgrade specverify"),
    "unknown-key": (edited(lambda raw: record(raw).update(__class__="os.system")), "unknown key '__class__'"),
    "missing-key": (edited(lambda raw: record(raw).pop("checks")), "'checks' is missing"),
    "wrong-type": (edited(lambda raw: record(raw).update(checks={"a": 1})), "checks: "),
    "verdict": (edited(lambda raw: record(raw).update(verdict="SURE")), "verdict: "),
    "repeated-key": (GOOD.replace('"_type"', '"_type": "x", "_type"', 1), "'_type' is there twice"),
    "many-repeats": ("{" + ",".join(f'"{n}":0' for n in [*range(100_000), 99_999]) + "}", "'99999' is there twice"),
    "open-strings": ('"\\' * 1_000_000, "not JSON"),
    "pickle": ("\x80\x04cos\nsystem\n", "not JSON"),
}
POLICIES = {
    "not-toml": ("minimum_speedup == 2", "is not TOML"),
    "unknown-key": ("minimum_speed_up = 2", "did you mean 'minimum_speedup'?"),
    "unknown-domain-key": ("[domains.code]\nminimum = 1", "did you mean 'minimum_acceptance'?"),
    "unknown-check": ("required_checks = ['loseless']", "did you mean 'lossless'?"),
    "unknown-package": ("versions = { tourch = '>2' }", "did you mean 'torch'?"),
    "no-range": ("versions = { torch = 'newest' }", "no range such as"),
    "wrong-type": ("devices = 'cpu'", "devices: "),
    "number-as-text": ("minimum_speedup = '2'", "minimum_speedup: "),
    "negative": ("minimum_prompts = -1", "minimum_prompts to -1"),
    "infinite": ("maximum_age_days = inf", "maximum_age_days"),
    "share": ("minimum_acceptance = 70.0", "at most 1"),
    "both": ("required_checks = ['cost']\ntolerated_inconclusive = ['cost']", "drop one"),
    "deep": (f"required_checks = {DEEP}", "nested more than 64 deep"),
    "large": ("#" * 2_000_000, "larger than 1 MiB"),
    "hexadecimal": (f"minimum_prompts = 0x{'f' * 6000}", "more digits than any setting"),
    "version": (f"versions = {{ torch = '>={BOMB}' }}", "no range such as"),
    "date": ("engines = [1979-05-27]", "1979-05-27 is a date or a time"),
    "dotted": ("a." * 100_000 + "a = 1", "nested more than 64 deep"),
    "quoted-dots": ("\"a\" . 'b'." * 100_000 + "a = 1", "nested more than 64 deep"),
    "unset-range": ("versions = { torch = '' }", "an empty text in versions"),
    "unset-device": ("devices = ['cpu', ' ']", "an empty text in devices"),
}
PROMPTS = {
    "deep": ('{"text": ' + DEEP, "nested more than 64 deep"),
    "control": ('{"text": "\x00"}', "is not JSON"),
    "list": ("[1]", "is not an object"),
    "number": ('{"text": 3}', "is not a string"),
    "surrogate": ('{"text": "\\ud800"}', "surrogate"),
    "twice": ('{"id": "a", "text": "x"}\n{"id": "a", "text": "y"}', "which line 1 has too"),
    "role": ('{"messages": [{"role": "root", "content": "x"}]}', "the role 'root'"),
    "both": ('{"text": "x", "messages": []}', "both text and messages"),
    "huge": ('{"text": "' + "x" * 5_000_000 + '"}', "longer than"),
}
PLANS = {
    "deep": (f"only = {DEEP}", "nested more than 64 deep"),
    "large": ("#" * 2_000_000, "larger than 1 MiB"),
    "date": ("seed = 1979-05-27", "1979-05-27 is a date or a time"),
    "hexadecimal": (f"seed = 0x{'f' * 6000}", "more digits than any setting"),
    "huge-batch": ("batch_size = -5", "batch_size to -5"),
    "nan": ("minimum_speedup = nan", "minimum_speedup"),
    "no-id": ("params.banned_token_ids = [[1], [2048]]", "banned_token_ids[1] to [2048], of which 2048 is no id"),
    "negative-id": ("params.eos_token_ids = [-1]", "of which -1 is no id"),
    "no-ids": ("params.banned_token_ids = [[]]", "banned_token_ids[0]"),
}


MATRICES = {
    "empty": ("", "'targets' is missing"),
    "deep": (f"targets = {DEEP}", "nested more than 64 deep"),
    "large": ("#" * 2_000_000, "larger than 1 MiB"),
    "unknown-key": ("target = ['t']", "did you mean 'targets'?"),
    "too-many": (
        f"targets = ['t']\ndrafts = ['d']\nnum_speculative_tokens = {list(range(2000))}",
        "at most 1,000 cells",
    ),
    "twice": ("targets = ['t', 't']\ndrafts = ['d']", "names one of targets twice"),
    "text-for-a-list": ("targets = 't'\ndrafts = ['d']", "targets: "),
    "negative": ("targets = ['t']\ndrafts = ['d']\nnum_speculative_tokens = [-1]", "num_speculative_tokens to -1"),
    "escaping": ("targets = ['../../nowhere/t']\ndrafts = ['d']", "'../../nowhere/t' does not exist"),
    "rate": ("targets = ['t']\ndrafts = ['d']\nfalse_discovery_rate = nan", "between 0 and 1"),
    "date": ("targets = [1979-05-27]\ndrafts = ['d']", "1979-05-27 is a date or a time"),
    "parameters": ("targets = ['t']\ndrafts = ['d']\nparameters.hot.temperature = 'high'", "params.temperature"),
}
ENGINE_OPTIONS = {
    "unknown": (["fake", "--option", "colour=red"], "no option 'colour'"),
    "no-value": (["fake", "--option", "seed"], "has no value"),
    "unknown-engine": (["transfomers"], "did you mean 'transformers'?"),
    "no-module": (["no.such.module:engine"], "no.such.module"),
    "no-callable": (["os:nothing"], "nothing"),
    "not-an-engine": (["os:getcwd"], "is no engine"),
    "url": (["openai", "--url", "file:///etc/passwd"], "file:///etc/passwd"),
    "not-a-number": (["transformers", "--option", "early_exit=soon"], "early_exit"),
    "dtype": (["transformers", "--option", "dtype=float3"], "dtype"),
}


@pytest.mark.parametrize("name", CERTIFICATES)
def test_certificates(run: Run, tmp_path: Path, name: str) -> None:
    """Read by the gate."""
    text, said = CERTIFICATES[name]
    (tmp_path / "c.json").write_text(text)
    refused(run("gate", "c.json", "--pair", "embedded", "--quiet"), said, tmp_path / "none")


@pytest.mark.parametrize("name", POLICIES)
def test_policies(run: Run, tmp_path: Path, name: str) -> None:
    """Read before anything else."""
    text, said = POLICIES[name]
    (tmp_path / "p.toml").write_text(text)
    (tmp_path / "c.json").write_text(GOOD)
    refused(run("gate", "c.json", "--pair", "embedded", "--policy", "p.toml", "--quiet"), said, tmp_path / "none")


@pytest.mark.parametrize("name", PROMPTS)
def test_prompts(run: Run, tmp_path: Path, name: str) -> None:
    """Before a model is loaded."""
    text, said = PROMPTS[name]
    (tmp_path / "p.jsonl").write_text(text)
    refused(run("certify", "--prompts", "p.jsonl", "--quiet"), said, tmp_path)


@pytest.mark.parametrize("name", PLANS)
def test_plans(run: Run, tmp_path: Path, name: str) -> None:
    """As prompts."""
    text, said = PLANS[name]
    (tmp_path / "p.toml").write_text(text)
    refused(run("certify", "--plan", "p.toml", "--quiet"), said, tmp_path)


@pytest.mark.parametrize("name", MATRICES)
def test_matrices(run: Run, tmp_path: Path, name: str) -> None:
    """Before a cell's folder is made."""
    text, said = MATRICES[name]
    (tmp_path / "m.toml").write_text(text)
    refused(run("certify", "--matrix", "m.toml", "--quiet"), said, tmp_path)
    assert not (tmp_path / "specverify-out").exists()


@pytest.mark.parametrize("name", ENGINE_OPTIONS)
def test_engines_options(run: Run, tmp_path: Path, name: str) -> None:
    """Before anything is asked of the engine."""
    arguments, said = ENGINE_OPTIONS[name]
    refused(run("qualify", *arguments, "--quiet"), said, tmp_path)


def _golden_text(change: Callable[[dict], object]) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        raw = json.loads((folder / "golden.json").read_text(encoding="utf-8"))
        change(raw)
        (folder / "golden.json").write_text(json.dumps(raw), encoding="utf-8")

    return spoil


def _with_bomb(folder: Path) -> None:
    """A digest that fits, and more spaces in a few kilobytes than any tokenizer has letters."""
    packer = lzma.LZMACompressor(preset=0)
    bomb = b"".join(packer.compress(b" " * 2**20) for _ in range(65)) + packer.flush()
    (folder / "tokenizer.json.xz").write_bytes(bomb)
    digest = hashlib.sha256(bomb).hexdigest()
    _golden_text(lambda raw: raw["files_sha256"].update({"tokenizer.json.xz": digest}))(folder)


GOLDENS: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty": (lambda folder: (folder / "golden.json").write_text(""), "is not JSON"),
    "deep": (lambda folder: (folder / "golden.json").write_text('{"a": ' + DEEP), "nested more than 64 deep"),
    "list": (lambda folder: (folder / "golden.json").write_text("[]"), "is not a Golden"),
    "unknown-key": (_golden_text(lambda raw: raw.update(extra=1)), "unknown key 'extra'"),
    "missing-key": (_golden_text(lambda raw: raw.pop("weights")), "'weights' is missing"),
    "new-schema": (_golden_text(lambda raw: raw.update(schema_version=99)), "upgrade specverify"),
    "escaping": (_golden_text(lambda raw: raw["files_sha256"].update({"../../p": "0"})), "names other files than"),
    "no-arrays": (_golden_text(lambda raw: raw["files_sha256"].pop("arrays.safetensors")), "names other files than"),
    "half": (lambda folder: (folder / "arrays.safetensors").unlink(), "lacks arrays.safetensors"),
    "endless": (
        lambda folder: (
            (folder / "arrays.safetensors").unlink(),
            (folder / "arrays.safetensors").symlink_to("/dev/null"),
        ),
        "is not the file that golden.json was written with",
    ),
    "bomb": (_with_bomb, "can't be read"),
    "pipe": (
        lambda folder: ((folder / "arrays.safetensors").unlink(), os.mkfifo(folder / "arrays.safetensors")),
        "lacks arrays.safetensors",
    ),
    "no-prompts": (_golden_text(lambda raw: raw.update(prompts=[])), "what no golden has been recorded with"),
    "no-provenance": (_golden_text(lambda raw: raw.update(provenances=[])), "what no golden has been recorded with"),
    "no-block": (
        _golden_text(lambda raw: raw.update(num_speculative_tokens=-1)),
        "what no golden has been recorded with",
    ),
    "seed": (_golden_text(lambda raw: raw.update(seed=10**400)), "what no golden has been recorded with"),
}


@pytest.mark.parametrize("name", GOLDENS)
def test_goldens(run: Run, tmp_path: Path, name: str) -> None:
    """Before a model is loaded; no file is opened but the two that a golden has."""
    spoil, said = GOLDENS[name]
    spoil(Path(shutil.copytree(ROOT / "golden" / "embedded", tmp_path / "g" / "embedded")))
    refused(run("golden", "check", "--goldens", "g", "--quiet"), said, tmp_path)


def _escaping_index(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../../outside.safetensors"}}')


def _absolute_index(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "/etc/hostname"}}')


def _index_of_numbers(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text('{"weight_map": [1]}')


def _pickles(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04cos\nsystem\n(S'touch owned'\ntR.")


def _huge_header(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 2**62) + b"{}")


def _deep_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"a": ' + DEEP)


def _config_is_a_folder(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir()


def _config_of_a_list(folder: Path) -> None:
    (folder / "config.json").write_text("[]")


def _long_name(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "x" * 300}}))


def _hub_kernel(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"_attn_implementation": "somebody/kernel"}))


def _wordy_eos(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": "x"}')


def _own_code(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "mine.C", "AutoModelForCausalLM": "mine.M"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "mine.py").write_text("import pathlib\npathlib.Path('owned').touch()\n")


MODELS = {
    _escaping_index: "not inside its folder",
    _absolute_index: "not inside its folder",
    _index_of_numbers: "no weight_map",
    _pickles: "pickled weights only",
    _huge_header: "truncated or corrupt",
    _deep_config: "config.json",
    _config_is_a_folder: "config.json",
    _config_of_a_list: "does not hold a JSON object",
    _own_code: "--trust-remote-code",
    _long_name: "file name too long; check the path",
    _hub_kernel: "asks for code from the hub (_attn_implementation is 'somebody/kernel')",
    _wordy_eos: "sets eos_token_id to 'x', which is no id",
}


@pytest.mark.parametrize("spoil", MODELS, ids=lambda spoil: spoil.__name__.strip("_"))
def test_model_folders(run: Run, tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    """No code of theirs runs, no file outside is read."""
    target = Path(shutil.copytree(PAIR.target, tmp_path / "t"))
    spoil(target)
    refused(run("certify", target, PAIR.draft, "--quiet"), MODELS[spoil], tmp_path)
    assert not list(tmp_path.rglob("owned"))


@pytest.mark.parametrize(
    "spoil", [_escaping_index, _absolute_index, _index_of_numbers], ids=lambda s: s.__name__.strip("_")
)
def test_the_gate_hashes_nothing_outside_a_folder(run: Run, tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    """An index in what is about to be served could name any file of the machine."""
    target = Path(shutil.copytree(PAIR.target, tmp_path / "t"))
    spoil(target)
    (tmp_path / "c.json").write_text(GOOD)
    refused(run("gate", "c.json", target, PAIR.draft, "--quiet"), MODELS[spoil], tmp_path / "none")


@pytest.mark.parametrize("place", ["/dev/zero", "pipe"])
def test_the_gate_waits_for_no_weights_without_an_end(run: Run, tmp_path: Path, place: str) -> None:
    """A shard that is a pipe, or a link to a device, is a missing file."""
    target = Path(shutil.copytree(PAIR.target, tmp_path / "t"))
    (target / "model.safetensors").unlink()
    (target / "model.safetensors.index.json").write_text('{"weight_map": {"a": "s.safetensors"}}')
    if place == "pipe":
        os.mkfifo(target / "s.safetensors")
    else:
        (target / "s.safetensors").symlink_to(place)
    (tmp_path / "c.json").write_text(GOOD)
    outcome = run("gate", "c.json", target, PAIR.draft)
    assert outcome.code == 1
    assert "target: model.safetensors is missing" in outcome.out


def test_folders_a_thousand_deep_are_looked_through(tmp_path: Path) -> None:
    """A model's folder may hold more of them than Python's own calls go deep."""
    deep = [str(tmp_path)]
    while len(deep) < 1_200:
        deep.append(f"{deep[-1]}/a")
        os.mkdir(deep[-1])  # noqa: PTH102 - pathlib is slow with such names
    try:
        assert model_files(tmp_path) == []
    finally:
        for each in reversed(deep[1:]):
            os.rmdir(each)  # noqa: PTH106 - as above


def test_a_name_in_a_certificate_opens_no_file(run: Run, tmp_path: Path) -> None:
    """What is hashed is what lies in the folders; a certificate's names are compared, never followed."""
    (tmp_path / "c.json").write_text(
        edited(lambda raw: record(raw)["target"]["files"].update({"../../etc/passwd": "0" * 64}))
    )
    outcome = run("gate", "c.json", "--pair", "embedded")
    assert outcome.code == 1
    assert "target: ../../etc/passwd is missing" in outcome.out


def test_an_endless_file_is_neither_certificate_nor_plan(run: Run, tmp_path: Path) -> None:
    """Read up to the bound, and not further."""
    if not os.path.exists("/dev/zero"):  # noqa: PTH110 - a device
        pytest.skip("no /dev/zero here")
    refused(run("gate", "/dev/zero", "--pair", "embedded", "--quiet"), "larger than 64 MiB", tmp_path)
    refused(run("certify", "--plan", "/dev/zero", "--quiet"), "larger than 1 MiB", tmp_path)


def test_there_are_thirty_of_them() -> None:
    """And every kind of file is among them."""
    kinds = (CERTIFICATES, POLICIES, PROMPTS, PLANS, MODELS, MATRICES, ENGINE_OPTIONS, GOLDENS)
    assert all(len(kind) >= 5 for kind in kinds)
    assert sum(map(len, kinds)) >= 30
