"""What is loaded for use is what was trained, asked in the way it was trained."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from leantune.checkpoint.trained import is_trained, load_trained
from leantune.errors import CheckpointError, ConfigError
from tests.batches import logits_of, small_batch
from tests.fixtures import tiny_model_folder
from tests.runs import tiny_run


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_folder(tmp_path_factory.mktemp("models") / "tiny")


def test_the_adapter_of_a_run_is_used_as_the_run(model: Path, tmp_path: Path) -> None:
    """RUN/adapter was asked with the tokenizer's chat template, whatever it was trained with."""
    run = tiny_run(tmp_path / "run", model, data={"system": "Be brief."})
    whole, part = load_trained(run.path), load_trained(run.adapter)
    assert whole.template.user_prompt("Hi") == "Be brief.\nHi\n" == part.template.user_prompt("Hi")
    assert part.config == whole.config
    assert part.attached.name == "lora"
    copy = tmp_path / "copy"
    shutil.copytree(run.adapter, copy)
    assert load_trained(copy).template.name == "chat"


def test_a_folder_beside_a_run_file_of_the_user_is_no_run(model: Path, tmp_path: Path) -> None:
    """A folder called model or adapter was taken for the result of the run.yaml beside it."""
    (tmp_path / "run.yaml").write_text("model: [half\n")
    for name in ("adapter", "model"):
        shutil.copytree(model, tmp_path / name)
        assert load_trained(tmp_path / name).run is None
        assert not is_trained(tmp_path / name)


def test_a_run_keeps_its_template_file(model: Path, tmp_path: Path) -> None:
    """The user's file was read again, edited or from another working folder."""
    own = tmp_path / "mine.jinja"
    own.write_text("Q: {{ question }} A: {{ answer }}")
    run = tiny_run(tmp_path / "run", model, format="qa", template=str(own))
    assert load_trained(run.path).template.user_prompt("Hi") == "Q: Hi A: "
    shutil.copy(own, run.path / "template.jinja")
    own.write_text("edited {{ answer }}")
    assert load_trained(run.path).template.user_prompt("Hi") == "Q: Hi A: "


def test_another_template_or_system_message_may_be_named(model: Path, tmp_path: Path) -> None:
    """Naming a template took the system message away."""
    run = tiny_run(tmp_path / "run", model, data={"system": "Be brief."})
    assert load_trained(run.path, template="plain").template.user_prompt("Hi") == "Be brief.\nHi\n"
    assert load_trained(run.path, system="Be kind.").template.user_prompt("Hi") == "Be kind.\nHi\n"
    assert load_trained(run.path, system="").template.user_prompt("Hi") == "Hi\n"
    text = tiny_run(tmp_path / "text", model, format="text")
    assert load_trained(text.path).template.user_prompt("Once") == "Once"


def test_precision_and_attention_are_those_of_the_run(model: Path, tmp_path: Path) -> None:
    """A run in fp32 was evaluated in bf16, and with another attention kernel."""
    run = tiny_run(tmp_path / "1", model, train={"precision": "bf16_mixed"})
    assert load_trained(run.path, device="cpu").model.dtype == torch.bfloat16
    assert load_trained(run.path, device="cpu", precision="fp32").model.dtype == torch.float32
    assert load_trained(model, device="cpu").model.dtype == torch.float32
    for asked, used in (("eager", "eager"), ("flash_attention_2", "sdpa")):
        run = tiny_run(tmp_path / asked, model, model={"name": str(model), "attention": asked})
        assert load_trained(run.path, device="cpu").model.config._attn_implementation == used


def test_the_untouched_model_of_a_run_is_asked_like_the_run(model: Path, tmp_path: Path) -> None:
    """The base had another template and no system message: a difference that looked like training."""
    run = tiny_run(tmp_path / "run", model, data={"system": "Be brief."})
    batch = small_batch()
    trained, base, plain = (
        load_trained(run.path),
        load_trained(run.path, untouched=True),
        load_trained(model),
    )
    assert base.template.user_prompt("Hi") == trained.template.user_prompt("Hi")
    assert torch.equal(logits_of(base.attached, batch), logits_of(plain.attached, batch))
    assert not torch.allclose(logits_of(trained.attached, batch), logits_of(base.attached, batch))
    with pytest.raises(CheckpointError, match="does not say on which base model"):
        load_trained(model, untouched=True)


def test_a_run_of_all_weights_has_its_own_model(model: Path, tmp_path: Path) -> None:
    """A base that is named beside a whole model was ignored."""
    run = tiny_run(tmp_path / "run", model, method={"name": "full"})
    batch = small_batch()
    trained, base = load_trained(run.path), load_trained(run.path, untouched=True)
    assert (trained.attached.name, base.attached.name) == ("full", "base")
    assert not torch.allclose(logits_of(trained.attached, batch), logits_of(base.attached, batch))
    assert load_trained(run.model).template.name == "plain"
    for place in (run.path, model):
        with pytest.raises(ConfigError, match="is a whole model, not an adapter"):
            load_trained(place, base=str(model))


def test_a_base_that_has_moved_needs_no_revision(model: Path, tmp_path: Path) -> None:
    """The revision of the hub model was asked of the folder that stands in for it."""
    run = tiny_run(tmp_path / "run", model, model={"name": "owner/name", "revision": "v2"})
    assert load_trained(run.path, base=str(model)).attached.name == "lora"
