"""Case 20: added tokens and trained embeddings are saved whole, and a fresh base gives the same logits."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from leantune.bases import load_base
from leantune.checkpoint.adapter import load_adapter, save_trained, saved_vocabulary
from leantune.checkpoint.merge import merge_run
from leantune.errors import CheckpointError, LeantuneError, ModelError
from leantune.methods import Attached, attach
from leantune.models.precision import PRECISIONS
from leantune.models.source import resolve_model
from leantune.models.vocabulary import Growth, load_vocabulary
from tests.batches import gradients, logits_of, shake, small_batch
from tests.fixtures import tiny_tokenizer
from tests.models import save_tiny, tiny_model

ADDED = ["<act>", "<obs>"]
ROWS = 320
BATCH = small_batch(ROWS + 2)  # draws ids of added tokens too
METHODS: dict[str, dict[str, Any]] = {
    "lora": {"rank": 4},
    "dora": {"rank": 4, "dropout": 0.1},
    "loreft": {"rank": 4, "position": "f2+l2"},
}
MODELS = [("llama", True), ("llama", False), ("gemma2", True), ("gpt2", True), ("gpt_neox", False)]
EVERY_MODEL = pytest.mark.parametrize(("architecture", "tied"), MODELS)
EVERY_METHOD = pytest.mark.parametrize("method", METHODS)


@dataclass
class Grown:
    """A model on disk, and an adapter trained on it with two added tokens."""

    base: Path
    attached: Attached
    tokenizer: Any
    growth: Growth | None

    @property
    def model(self) -> Any:
        return self.attached.model

    def save(self, folder: Path) -> Path:
        save_trained(self.attached, folder, self.tokenizer, str(self.base), None, growth=self.growth)
        return folder


def grown(
    folder: Path,
    method: str,
    architecture: str = "llama",
    tied: bool = True,
    precision: str = "fp32",
    **more: Any,
) -> Grown:
    base = save_tiny(folder, tiny_tokenizer(vocab_size=ROWS), architecture, tie_word_embeddings=tied)
    source = resolve_model(str(base))
    tokenizer, growth = load_vocabulary(source, None, ADDED)
    model = load_base("dense", source, precision=PRECISIONS[precision], growth=growth)
    attached = attach(method, model, {**METHODS[method], **more, "train_embeddings": True}, seed=0)
    return Grown(base, attached, tokenizer, growth)


def loaded(base: Path, folder: Path, precision: str = "fp32") -> Attached:
    """The adapter on a fresh base, from its folder alone."""
    source = resolve_model(str(base))
    saved = saved_vocabulary(folder, source)
    growth = saved[1] if saved else None
    model = load_base("dense", source, precision=PRECISIONS[precision], growth=growth)
    return load_adapter(model, folder)


def change(folder: Path, edit: Callable[[dict[str, Any], dict[str, Tensor]], object]) -> None:
    """Rewrite configuration and tensors of a LoRA adapter."""
    path, file = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    config, tensors = json.loads(path.read_text()), load_file(file)
    edit(config, tensors)
    path.write_text(json.dumps(config))
    save_file(tensors, file)


def is_tied(model: Any) -> bool:
    return model.get_output_embeddings().weight is model.get_input_embeddings().weight


@EVERY_METHOD
@EVERY_MODEL
def test_an_adapter_folder_brings_its_rows_and_its_tokenizer(
    architecture: str, tied: bool, method: str, tmp_path: Path
) -> None:
    """Rows of new tokens were left out of the adapter, or a tied head came apart from its embedding."""
    trained = grown(tmp_path / "base", method, architecture, tied)
    shake(trained.attached)
    assert is_tied(trained.model) == tied
    folder = trained.save(tmp_path / "adapter")
    fresh = loaded(trained.base, folder)
    assert torch.equal(logits_of(fresh, BATCH), logits_of(trained.attached, BATCH))
    assert is_tied(fresh.model) == tied
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.convert_tokens_to_ids(ADDED) == [ROWS, ROWS + 1]
    assert tokenizer.chat_template == trained.tokenizer.chat_template
    line = fresh.describe()[-1]
    assert line == trained.attached.describe()[-1]
    assert f"{ROWS + 2} × 32" in line
    assert ("is tied to it and stays so" in line) == tied
    assert ("which is not tied to it" in line) != tied


@EVERY_METHOD
@EVERY_MODEL
def test_gradients_reach_embeddings_head_and_adapter_and_nothing_else(
    architecture: str, tied: bool, method: str, tmp_path: Path
) -> None:
    trained = grown(tmp_path / "base", method, architecture, tied)
    plain = attach(method, load_base("dense", resolve_model(str(trained.base))), METHODS[method], seed=0)
    shake(trained.attached)
    found = gradients(trained.attached, BATCH)
    owned = trained.attached.trainable()
    assert {name for name, gradient in found.items() if gradient is not None} == set(owned)
    extra = set(owned) - set(plain.trainable())
    ids = {id(p) for p in trained.model.get_input_embeddings().parameters()}
    ids |= {id(p) for p in trained.model.get_output_embeddings().parameters()}
    assert {id(owned[name]) for name in extra} == ids
    assert len(extra) == (1 if tied else 2)
    assert not extra & trained.attached.decay_free()
    for name in extra:
        gradient = found[name]
        assert gradient is not None
        used = BATCH.labels.unique() if "head" in name or tied else BATCH.input_ids[:, 0]
        assert bool((gradient[used[used > 2]].abs().sum(1) > 0).all()), name


@pytest.mark.parametrize("method", ["lora", "dora"])
@pytest.mark.parametrize(
    ("architecture", "tied"), [*MODELS, ("gpt_neox", True), ("phi3", True), ("mixtral", False)]
)
def test_peft_loads_the_adapter_onto_a_resized_model(
    architecture: str, tied: bool, method: str, tmp_path: Path
) -> None:
    """PEFT wants a tied weight under both names, and gives the head other weights if one is missing."""
    trained = grown(tmp_path / "base", method, architecture, tied)
    shake(trained.attached)
    folder = trained.save(tmp_path / "adapter")
    model: Any = AutoModelForCausalLM.from_pretrained(trained.base)
    model.resize_token_embeddings(ROWS + 2, mean_resizing=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*(missing|unexpected|tie|tying).*")
        peft: Any = PeftModel.from_pretrained(model, folder).eval()
    with torch.no_grad():
        logits = peft(input_ids=BATCH.input_ids).logits.flatten(0, 1)[BATCH.label_index]
    torch.testing.assert_close(logits, logits_of(trained.attached, BATCH), rtol=1e-4, atol=1e-5)
    config = json.loads((folder / "adapter_config.json").read_text())
    names = {name.rpartition(".")[2] for name, _ in trained.model.named_modules()}
    assert set(config["modules_to_save"]) <= names
    assert config.get("ensure_weight_tying", False) == tied


@pytest.mark.parametrize("tied", [True, False])
def test_an_adapter_that_peft_trained_with_new_tokens_loads_here(tied: bool, tmp_path: Path) -> None:
    base = save_tiny(tmp_path / "base", tiny_tokenizer(vocab_size=ROWS), "llama", tie_word_embeddings=tied)
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.add_tokens(ADDED)
    model: Any = AutoModelForCausalLM.from_pretrained(base)
    model.resize_token_embeddings(ROWS + 2, mean_resizing=False)
    config = LoraConfig(
        r=4,
        target_modules=["q_proj", "down_proj"],
        modules_to_save=["embed_tokens"] if tied else ["embed_tokens", "lm_head"],
        ensure_weight_tying=tied,
        init_lora_weights=False,
    )
    peft: Any = get_peft_model(model, config).eval()
    with torch.no_grad():
        for parameter in (p for p in peft.parameters() if p.requires_grad):
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)))
        expected = peft(input_ids=BATCH.input_ids).logits.flatten(0, 1)[BATCH.label_index]
    peft.save_pretrained(tmp_path / "adapter")
    tokenizer.save_pretrained(tmp_path / "adapter")
    fresh = loaded(base, tmp_path / "adapter")
    torch.testing.assert_close(logits_of(fresh, BATCH), expected, rtol=1e-4, atol=1e-5)
    assert is_tied(fresh.model) == tied


def test_peft_adapters_that_train_one_of_the_two_are_refused(tmp_path: Path) -> None:
    """The other one would be trained on from here, or a tied head be given weights that it never had."""
    trained = grown(tmp_path / "base", "lora", tied=False)
    folder = trained.save(tmp_path / "adapter")
    for names in (["embed_tokens"], ["lm_head"], ["embed_tokens", "lm_head", "norm"]):
        change(folder, lambda config, _, names=names: config.update(modules_to_save=names))
        with pytest.raises(CheckpointError, match="modules_to_save") as caught:
            loaded(trained.base, folder)
        assert "model.embed_tokens and lm_head, which are trained together" in str(caught.value)


def test_an_adapter_whose_head_left_its_embedding_is_refused_on_a_tied_model(tmp_path: Path) -> None:
    """PEFT's default: the tied model's head and embedding are trained as two, and one of them was dropped."""
    trained = grown(tmp_path / "base", "lora", tied=True)
    folder = trained.save(tmp_path / "adapter")
    change(folder, lambda _, tensors: tensors["base_model.model.lm_head.weight"].add_(1))
    with pytest.raises(CheckpointError, match="are tied in this model, but differ"):
        loaded(trained.base, folder)
    change(folder, lambda _, tensors: tensors.__delitem__("base_model.model.lm_head.weight"))
    with pytest.raises(CheckpointError, match=r"missing: base_model\.model\.lm_head\.weight"):
        loaded(trained.base, folder)


@EVERY_METHOD
def test_a_base_that_the_tokens_were_not_added_to_is_refused(method: str, tmp_path: Path) -> None:
    """A base with one row more would be grown by one row less, and have the size that was trained."""
    trained = grown(tmp_path / "base", method)
    folder = trained.save(tmp_path / "adapter")
    tokenizer = tiny_tokenizer(vocab_size=ROWS)
    larger = save_tiny(tmp_path / "larger", tiny_tokenizer(vocab_size=ROWS + 1), tie_word_embeddings=True)
    with pytest.raises(ModelError, match=f"has {ROWS + 1} embedding rows, .* that has {ROWS}"):
        loaded(larger, folder)
    deeper = save_tiny(tmp_path / "deeper", tokenizer, num_hidden_layers=2, tie_word_embeddings=True)
    with pytest.raises(CheckpointError, match="trained on a model of another configuration"):
        loaded(deeper, folder)
    # Without the tokenizer there is no telling how many rows there must be: refused, not cut.
    for path in folder.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(CheckpointError):
        loaded(trained.base, folder)


@EVERY_METHOD
def test_there_is_no_untouched_model_to_go_back_to(method: str, tmp_path: Path) -> None:
    trained = grown(tmp_path / "base", method)
    with pytest.raises(ModelError, match="changed the embeddings themselves"), trained.attached.disabled():
        pass


def test_embeddings_are_trained_without_added_tokens_too(tmp_path: Path) -> None:
    """No tokens, no tokenizer: the adapter is one of the base's own vocabulary."""
    base = save_tiny(tmp_path / "base", tiny_tokenizer(vocab_size=ROWS), tie_word_embeddings=True)
    model: Any = load_base("dense", resolve_model(str(base)))
    before = model.get_input_embeddings().weight.detach().clone()
    attached = attach("lora", model, {"train_embeddings": True}, seed=0)
    batch = small_batch(ROWS)
    assert torch.equal(
        logits_of(attached, batch),
        logits_of(Attached("base", load_base("dense", resolve_model(str(base)))), batch),
    )
    shake(attached)
    save_trained(attached, tmp_path / "adapter", tiny_tokenizer(), str(base), None)
    assert not list((tmp_path / "adapter").glob("tokenizer*"))
    fresh = loaded(base, tmp_path / "adapter")
    assert torch.equal(logits_of(fresh, batch), logits_of(attached, batch))
    network: Any = fresh.model
    assert not torch.equal(network.get_input_embeddings().weight, before)


@EVERY_METHOD
@pytest.mark.parametrize("tied", [True, False])
def test_frozen_weights_in_bf16_take_and_give_hidden_states_of_embeddings_in_fp32(
    method: str, tied: bool, tmp_path: Path
) -> None:
    """Without autocast a block in bf16 refused the hidden states of an embedding in fp32."""
    trained = grown(tmp_path / "base", method, tied=tied, precision="bf16_mixed")
    shake(trained.attached)
    assert {p.dtype for p in trained.attached.trainable().values()} == {torch.float32}
    seen: list[torch.dtype] = []
    trained.model.model.layers[0].register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
    with torch.autocast("cpu", torch.bfloat16):
        found = gradients(trained.attached, BATCH)
    assert all(found[name] is not None for name in trained.attached.trainable())
    folder = trained.save(tmp_path / "adapter")
    fresh = loaded(trained.base, folder, "bf16_mixed")
    logits = logits_of(fresh, BATCH)
    assert torch.equal(logits, logits_of(trained.attached, BATCH))
    assert bool(logits.isfinite().all())
    assert set(seen) == {torch.bfloat16}


def test_pefts_module_trains_the_same_embeddings(tmp_path: Path) -> None:
    """PEFT freezes all that is not its own, so the embeddings of a comparison run stayed where they were."""
    ours = grown(tmp_path / "a", "lora")
    theirs = grown(tmp_path / "b", "lora", implementation="peft")
    expected, found = gradients(ours.attached, BATCH), gradients(theirs.attached, BATCH)
    name = "model.embed_tokens.weight"
    torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-6)
    with torch.no_grad():
        theirs.model.get_input_embeddings().weight.add_(0.1)
    folder = theirs.save(tmp_path / "adapter")
    fresh = loaded(theirs.base, folder)
    torch.testing.assert_close(logits_of(fresh, BATCH), logits_of(theirs.attached, BATCH))
    with pytest.raises(ModelError), theirs.attached.disabled():
        pass


@pytest.mark.parametrize("method", ["lora", "dora"])
@pytest.mark.parametrize("tied", [True, False])
def test_merging_takes_the_embeddings_and_the_tokenizer_along(
    method: str, tied: bool, tmp_path: Path
) -> None:
    """Merging went by the base's rows; and the dropout of a loaded adapter was active in its comparison."""
    trained = grown(tmp_path / "base", method, tied=tied)
    shake(trained.attached)
    folder = trained.save(tmp_path / "adapter")
    lines = merge_run(folder, tmp_path / "merged")
    assert any(("is tied to it and stays so" in line) == tied for line in lines if "embeddings" in line)
    merged: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    assert is_tied(merged) == tied
    with torch.no_grad():
        logits = merged(input_ids=BATCH.input_ids).logits.flatten(0, 1)[BATCH.label_index]
    torch.testing.assert_close(logits, logits_of(trained.attached, BATCH), rtol=1e-4, atol=1e-5)
    assert len(AutoTokenizer.from_pretrained(tmp_path / "merged")) == merged.config.vocab_size == ROWS + 2


def test_a_tied_head_with_a_bias_of_its_own_is_refused() -> None:
    """No place in an adapter file brings such a bias back."""
    model: Any = tiny_model("llama", tie_word_embeddings=True)
    model.lm_head.register_parameter("bias", torch.nn.Parameter(torch.zeros(ROWS)))
    with pytest.raises(ModelError, match="has a bias of its own"):
        attach("lora", model, {"train_embeddings": True}, seed=0)


def test_a_reft_adapter_of_before_this_setting_loads_as_it_was(tmp_path: Path) -> None:
    attached = attach("loreft", tiny_model(), {}, seed=0)
    shake(attached)
    save_trained(attached, tmp_path / "a", tiny_tokenizer(), "base", None)
    path = tmp_path / "a" / "reft_config.json"
    config = json.loads(path.read_text())
    del config["train_embeddings"]
    path.write_text(json.dumps(config))
    batch = small_batch(ROWS)
    assert torch.equal(
        logits_of(load_adapter(tiny_model(), tmp_path / "a"), batch), logits_of(attached, batch)
    )


def test_a_broken_tokenizer_is_found_when_the_adapter_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An adapter without the tokens that it was trained with can never be used."""
    trained = grown(tmp_path / "base", "lora")
    plain = tiny_tokenizer(vocab_size=ROWS)
    monkeypatch.setattr(type(trained.tokenizer), "save_pretrained", lambda _, folder: _write(plain, folder))
    with pytest.raises(LeantuneError, match="tokenizer"):
        trained.save(tmp_path / "adapter")
    assert not (tmp_path / "adapter").exists()


def _write(tokenizer: Any, folder: Path) -> None:
    tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
