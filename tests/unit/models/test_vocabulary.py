"""Added tokens: the tokenizer reads them, the model has rows for them, and what cannot be is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import normalizers
from torch import nn
from transformers import AutoConfig

from leantune.bases import build_base, load_base
from leantune.data.cache import tokenizer_identity
from leantune.errors import ModelError
from leantune.models.precision import PRECISIONS
from leantune.models.source import check_vocabulary, load_config, resolve_model
from leantune.models.vocabulary import Growth, add_tokens, check_grown, grown_config, load_vocabulary
from tests.fixtures import tiny_tokenizer
from tests.models import save_tiny, tiny_model

TOKENS = ["<act>", "<obs>"]


def test_added_tokens_are_one_token_each_and_stay_in_answers() -> None:
    """A special token would be cut out of generated text."""
    tokenizer = tiny_tokenizer()
    rows = len(tokenizer)
    assert add_tokens(tokenizer, TOKENS, rows) == Growth(rows, rows + 2)
    ids = tokenizer("SELECT<act>name <obs>", add_special_tokens=False)["input_ids"]
    assert [i for i in ids if i >= rows] == [rows, rows + 1]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "SELECT<act>name <obs>"


def test_added_tokens_are_matched_as_they_are_written() -> None:
    """A tokenizer that folds case took every `act` for the token `ACT`."""
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    rows = len(tokenizer)
    add_tokens(tokenizer, ["ACT"], rows)
    assert rows in tokenizer("an ACT of")["input_ids"]
    assert rows not in tokenizer("an act of")["input_ids"]


def test_tokens_that_are_in_use_are_refused_by_name() -> None:
    tokenizer = tiny_tokenizer()
    with pytest.raises(ModelError, match=r"model\.add_tokens: '<pad>', 'a': the tokenizer has them already"):
        add_tokens(tokenizer, ["<act>", "<pad>", "a"], len(tokenizer))
    assert "<act>" not in tokenizer.get_vocab(), "the tokenizer was changed before the refusal"


def test_a_token_without_a_row_gets_one_if_it_is_named() -> None:
    """Case 12: an added pad token whose id equals the number of rows."""
    tokenizer = tiny_tokenizer()
    rows = len(tokenizer)
    tokenizer.add_special_tokens({"pad_token": "<fresh-pad>"})
    config = AutoConfig.for_model("llama", vocab_size=rows)
    with pytest.raises(ModelError, match=r"name it in model\.add_tokens"):
        check_vocabulary(config, tokenizer)
    growth = add_tokens(tokenizer, ["<fresh-pad>"], rows)
    assert growth == Growth(rows, rows + 1)
    check_vocabulary(grown_config(config, growth, "m"), tokenizer)
    assert tokenizer.pad_token_id == rows


def test_rows_to_spare_are_used_first() -> None:
    """Models pad their vocabulary to a round number; adding rows behind would leave those unused."""
    tokenizer = tiny_tokenizer()
    rows = len(tokenizer)
    assert add_tokens(tokenizer, TOKENS, rows + 100) == Growth(rows + 100, rows + 100)
    tokenizer = tiny_tokenizer()
    assert add_tokens(tokenizer, TOKENS, rows + 1) == Growth(rows + 1, rows + 2)


def test_encoded_records_of_other_tokens_are_not_taken_from_the_cache() -> None:
    """The cache gave back records in which the new tokens were still letters."""
    plain, grown, other = tiny_tokenizer(), tiny_tokenizer(), tiny_tokenizer()
    add_tokens(grown, TOKENS, len(grown))
    add_tokens(other, TOKENS[::-1], len(other))
    assert len({tokenizer_identity(t) for t in (plain, grown, other)}) == 3


def test_a_grown_configuration_leaves_the_original_alone_and_wants_the_same_model() -> None:
    config = AutoConfig.for_model("llama", vocab_size=400)
    assert grown_config(config, Growth(400, 402), "m").vocab_size == 402
    assert config.vocab_size == 400
    with pytest.raises(ModelError, match=r"m has 400 embedding rows, .* a model that has 401"):
        grown_config(config, Growth(401, 402), "m")


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt2", "gpt_neox", "phi3", "cohere"])
@pytest.mark.parametrize("tied", [True, False])
def test_new_rows_are_the_mean_and_old_ones_stay(architecture: str, tied: bool, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "m", tiny_tokenizer(vocab_size=320), architecture, tie_word_embeddings=tied)
    source = resolve_model(str(folder))
    tokenizer, growth = load_vocabulary(source, None, TOKENS)
    assert growth == Growth(320, 322)
    model: Any = load_base("dense", source, growth=growth)
    before: Any = load_base("dense", source)
    assert model.config.get_text_config().vocab_size == len(tokenizer) == 322
    for old, new in (
        (before.get_input_embeddings(), model.get_input_embeddings()),
        (before.get_output_embeddings(), model.get_output_embeddings()),
    ):
        assert torch.equal(new.weight[:320], old.weight)
        mean = old.weight.double().mean(0).float()
        torch.testing.assert_close(new.weight[320:], mean.expand(2, -1), rtol=1e-6, atol=1e-9)
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == tied
    ids = torch.tensor([[5, 9, 17, 40]])
    assert torch.equal(model(input_ids=ids).logits[..., :320], before(input_ids=ids).logits)
    assert model(input_ids=torch.tensor([[320, 321]])).logits.isfinite().all()
    assert load_config(source).get_text_config().vocab_size == 320


def test_the_bias_of_a_head_grows_by_its_mean(tmp_path: Path) -> None:
    """A zero would make new tokens likelier or less likely than the average one from the start."""
    tokenizer = tiny_tokenizer(vocab_size=320)
    config = AutoConfig.for_model(
        "phi",
        vocab_size=320,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_config(config)
    model.lm_head.bias.data.uniform_(1, 2)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    grown: Any = load_base("dense", resolve_model(str(tmp_path)), growth=Growth(320, 321))
    assert torch.equal(grown.lm_head.bias[:320], model.lm_head.bias)
    torch.testing.assert_close(grown.lm_head.bias[320], model.lm_head.bias.double().mean().float())


def test_the_notes_say_how_many_rows_there_are_and_whether_the_head_is_tied(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(vocab_size=320)
    for tied in (True, False):
        folder = save_tiny(tmp_path / str(tied), tokenizer, tie_word_embeddings=tied)
        base = build_base("dense", resolve_model(str(folder)), PRECISIONS["fp32"], growth=Growth(320, 322))
        kind = "tied" if tied else "not tied"
        assert (
            f"embeddings and output head ({kind}) have 322 rows, 2 more than the checkpoint" in base.notes[-1]
        )
        spare = build_base("dense", resolve_model(str(folder)), PRECISIONS["fp32"], growth=Growth(320, 320))
        assert "rows that the model has to spare: it has 320" in spare.notes[-1]


def test_a_model_with_other_weights_of_one_row_a_token_is_refused() -> None:
    """Those rows would be missing, or filled with what nobody trains."""
    original: Any = tiny_model(vocab_size=320)
    grown: Any = tiny_model(vocab_size=322)
    names: dict[str, str | None] = {name: name for name in original.state_dict()}
    check_grown(original, grown, names)
    original.model.extra, grown.model.extra = nn.Embedding(320, 4), nn.Embedding(322, 4)
    with pytest.raises(
        ModelError, match=r"model\.extra\.weight of LlamaForCausalLM has a row for each token too"
    ):
        check_grown(original, grown, {**names, "model.extra.weight": "model.extra.weight"})
