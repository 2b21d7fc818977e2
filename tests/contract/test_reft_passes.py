"""Interventions act the same however the tokens come through the model.

In training each text is read at once; packed into one row with others, padded on the left, continued with a
cache, computed twice to save memory, or compiled, the same tokens must be edited in the same way.
"""

from __future__ import annotations

import inspect
import shutil
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from leantune.generate.decode import Sampling, generate
from leantune.methods import Attached, attach
from leantune.models.anatomy import COMPONENTS
from leantune.models.recompute import recompute_blocks
from tests.batches import gradients, lively, logits_of, shake, small_batch
from tests.fixtures import tiny_tokenizer
from tests.models import tiny_model

GENERATOR = torch.Generator().manual_seed(7)
PROMPTS, ANSWERS = (6, 9, 1, 3), (4, 2, 5, 1)  # tokens
TEXTS = [torch.randint(6, 300, (p + a,), generator=GENERATOR) for p, a in zip(PROMPTS, ANSWERS, strict=True)]
ARCHITECTURES = ["llama", "qwen3", "gemma2", "gpt2", "gpt_neox", "phi3"]
# Edits of many kinds at once.
EVERYWHERE = [
    {"layers": "0", "component": "block_input", "position": "all"},
    {"layers": "1", "component": "attention_output", "position": "f2+l2", "tied": False},
    {"layers": "1", "component": "mlp_output", "position": (0, -2)},
    {"layers": "1-2"},
    {"layers": "2", "component": "mlp_activation", "position": "l1"},
]


def edited(architecture: str = "llama", scale: float = 0.5, **settings: Any) -> Any:
    model = lively(tiny_model(architecture), 4.0)
    options = {"rank": 3, "position": "f2+l2", "interventions": EVERYWHERE, **settings}
    attached = attach("loreft", model, options, seed=0)
    shake(attached, scale)
    return attached


@torch.no_grad()
def alone(attached: Attached, index: int, **options: Any) -> Tensor:
    """Logits of one text read at once, as training reads it."""
    model: Any = attached.model
    with attached.edits(torch.tensor([PROMPTS[index]]), **options):
        return model(input_ids=TEXTS[index][None], use_cache=False).logits[0]


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-5)


def pack(indices: Sequence[int], width: int = 16) -> tuple[Tensor, Tensor, Tensor, dict[int, int]]:
    """A row of texts: tokens, additive mask [1, 1, T, T] and positions, and where each text starts."""
    texts = [TEXTS[index] for index in indices]
    texts.append(torch.zeros(width - sum(map(len, texts)), dtype=torch.int64))  # padding
    seen = torch.block_diag(*(torch.ones(len(text), len(text)).tril() for text in texts)) > 0
    mask = torch.zeros(width, width).masked_fill(~seen, torch.finfo(torch.float32).min)
    starts = torch.tensor([0, *(len(text) for text in texts)]).cumsum(0).tolist()
    positions = torch.cat([torch.arange(len(text)) for text in texts])
    return torch.cat(texts)[None], mask[None, None], positions[None], dict(zip(indices, starts, strict=False))


@pytest.mark.parametrize("generation", ["prompt", "all", "new"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@torch.no_grad()
def test_packed_rows_equal_the_texts_one_by_one(architecture: str, generation: str) -> None:
    """With two texts in a row, the second had no edits, or those of the first at its columns."""
    attached = edited(architecture, generation=generation)
    rows = [pack([0, 2]), pack([1, 3])]
    tokens, mask, positions = (torch.cat(parts) for parts in zip(*(row[:3] for row in rows), strict=True))
    starts, at = torch.zeros(4, dtype=torch.int64), torch.tensor([0, 1, 0, 1])
    for row in rows:
        starts[list(row[3])] = torch.tensor(list(row[3].values()))
    ends = starts + torch.tensor([len(text) for text in TEXTS])
    with attached.edits(torch.tensor(PROMPTS), starts, rows=at, ends=ends):
        packed = attached.model(
            input_ids=tokens, attention_mask=mask, position_ids=positions, use_cache=False
        ).logits
    for index in range(4):
        found = packed[at[index], starts[index] : ends[index]]
        close(found, alone(attached, index))
    with attached.disabled():
        assert not torch.allclose(alone(attached, 3), packed[1, starts[3] : ends[3]], atol=1e-2)


@torch.no_grad()
def test_what_is_chosen_for_a_prompt_follows_it_into_a_packed_row() -> None:
    """Strength, subspaces, markers: the values of the row's number were taken for those of the prompt."""
    attached = edited(interventions=(), position="markers")
    marked = [torch.rand(len(text), generator=GENERATOR) < 0.6 for text in TEXTS]
    strength = torch.tensor([0.5, 1.0, 0.0, 2.0])
    active = torch.tensor([[1, 0, 1], [0, 1, 1], [1, 1, 1], [1, 0, 0]]).bool()
    tokens, mask, positions, begins = pack(range(4), width=33)
    starts = torch.tensor(list(begins.values()))
    ends = starts + torch.tensor([len(text) for text in TEXTS])
    options = {"strength": strength, "subspaces": active, "marked": torch.cat(marked)[None]}
    rows = torch.zeros(4, dtype=torch.int64)
    with attached.edits(torch.tensor(PROMPTS), starts, rows=rows, ends=ends, **options):
        packed = attached.model(
            input_ids=tokens, attention_mask=mask, position_ids=positions, use_cache=False
        ).logits[0]
    for index in range(4):
        one = slice(index, index + 1)
        own = {"strength": strength[one], "subspaces": active[one], "marked": marked[index][None]}
        close(packed[starts[index] : ends[index]], alone(attached, index, **own))


def left_padded(texts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Tokens and mask, int64 [B, T] each."""
    width = max(map(len, texts))
    padding = [torch.zeros(width - len(text), dtype=torch.int64) for text in texts]
    tokens = torch.stack([torch.cat(pair) for pair in zip(padding, texts, strict=True)])
    return tokens, torch.stack(
        [torch.cat([p, torch.ones_like(t)]) for p, t in zip(padding, texts, strict=True)]
    )


def options_for(model: Any, mask: Tensor) -> dict[str, Tensor]:
    """Mask and positions of left-padded texts, as generation gives them."""
    positions = {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    takes = "position_ids" in inspect.signature(model.forward).parameters
    return {"attention_mask": mask, **(positions if takes else {})}


@pytest.mark.parametrize("generation", ["prompt", "all", "new"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@torch.no_grad()
def test_decoding_step_by_step_equals_reading_the_whole_text(architecture: str, generation: str) -> None:
    """In a batch padded on the left, with and without a cache; one token of a prompt is no answer."""
    attached = edited(architecture, generation=generation)
    model = attached.model
    tokens, mask = left_padded([text[:prompt] for text, prompt in zip(TEXTS, PROMPTS, strict=True)])
    starts = (mask == 0).sum(1)
    answers = [text[prompt:] for text, prompt in zip(TEXTS, PROMPTS, strict=True)]
    new = torch.stack([torch.cat([a, a.new_full((5 - len(a),), 7)]) for a in answers])
    whole = [alone(attached, index) for index in range(4)]
    cache = DynamicCache(config=model.config)
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    with attached.edits(torch.tensor(PROMPTS), starts):
        for step in range(5):
            width = tokens.shape[1]
            options = options_for(model, mask)
            plain = model(input_ids=tokens, use_cache=False, **options).logits[:, -1]
            fed = slice(None) if step == 0 else slice(width - 1, None)
            late = {
                key: value if key == "attention_mask" else value[:, fed] for key, value in options.items()
            }
            cached = model(input_ids=tokens[:, fed], use_cache=True, **{name: cache}, **late).logits[:, -1]
            close(cached, plain)
            for index, answer in enumerate(answers):
                if step < len(answer):
                    close(plain[index], whole[index][PROMPTS[index] - 1 + step])
            tokens = torch.cat([tokens, new[:, step : step + 1]], dim=1)
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)


@torch.no_grad()
def test_a_prompt_of_one_token_is_read_once() -> None:
    """One token wide like the prompt itself, every new token was edited as if it were the prompt."""
    attached = edited(interventions=(), position="all")
    model = attached.model
    whole = alone(attached, 2)
    with attached.edits(torch.tensor([1])):
        output = model(input_ids=TEXTS[2][None, :1], use_cache=True)
        name = next(key for key in ("cache", "past_key_values") if output.get(key) is not None)
        cache = output[name]
        for column in range(1, len(TEXTS[2])):
            logits = model(input_ids=TEXTS[2][None, column : column + 1], **{name: cache}).logits
            close(logits[0, -1], whole[column])


PROMPT_TEXTS = [
    "SELECT name FROM employees",
    "t",
    "How many people are there? There are twelve of them",
    "old man",
]


@pytest.mark.parametrize("generation", ["prompt", "all", "new"])
@pytest.mark.parametrize(
    "sampling",
    [Sampling(max_new_tokens=6, num_beams=3), Sampling(max_new_tokens=6, temperature=0.7, top_k=1, seed=1)],
    ids=["beams", "sampling"],
)
def test_answers_of_a_batch_are_those_of_each_prompt_alone(sampling: Sampling, generation: str) -> None:
    """Beams are rows of the batch from the prefill on; their edits are those of their prompt."""
    attached, tokenizer = edited(scale=1.0, generation=generation), tiny_tokenizer(vocab_size=320)
    together = generate(attached.model, tokenizer, PROMPT_TEXTS, sampling, attached=attached, batch_size=4)
    singly = [
        generate(attached.model, tokenizer, [prompt], sampling, attached=attached)[0]
        for prompt in PROMPT_TEXTS
    ]
    assert together == singly
    if sampling.num_beams == 1:  # drawn from one token, it is the greedy answer
        greedy = Sampling(max_new_tokens=6)
        assert together == generate(attached.model, tokenizer, PROMPT_TEXTS, greedy, attached=attached)
    with attached.disabled():
        assert together != generate(attached.model, tokenizer, PROMPT_TEXTS, sampling, attached=attached)


@pytest.mark.parametrize("component", COMPONENTS)
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "mixtral"])
def test_activation_checkpointing_gives_the_same_gradients(architecture: str, component: str) -> None:
    """Inside a block the hooks run again in backward: gone by then, or elsewhere, they were no edits."""
    if (architecture, component) == ("mixtral", "mlp_activation"):
        component = "block_input"
    settings = {"interventions": (), "component": component, "dropout": 0.2, "generation": "all"}
    batch = small_batch()
    plain, saving = (edited(architecture, **settings) for _ in range(2))
    recompute_blocks(saving.model)
    expected, found = gradients(plain, batch), gradients(saving, batch)
    for name in plain.trainable():
        gradient, other = expected[name], found[name]
        assert gradient is not None
        assert other is not None
        torch.testing.assert_close(other, gradient, rtol=1e-5, atol=1e-7)
    assert torch.equal(logits_of(plain, batch), logits_of(saving, batch))


@pytest.mark.parametrize("component", COMPONENTS)
@torch.no_grad()
def test_frozen_weights_in_bf16_keep_their_type_around_the_edits(component: str) -> None:
    """An fp32 intervention turned the hidden states into fp32, and the next frozen layer refused them."""
    batch = small_batch()
    exact = edited(interventions=(), component=component)
    expected = logits_of(exact, batch)
    attached = edited(interventions=(), component=component)
    for parameter in attached.model.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(torch.bfloat16)
    found = logits_of(attached, batch)
    assert found.dtype == torch.bfloat16
    assert {p.dtype for p in attached.trainable().values()} == {torch.float32}
    error = (found.float() - expected).norm() / expected.norm()
    assert error < 0.1
    with torch.enable_grad(), torch.autocast("cpu", torch.bfloat16):
        found_gradients = gradients(attached, batch)
    for name, gradient in gradients_of(exact, batch).items():
        other = found_gradients[name]
        assert other is not None
        assert other.dtype == torch.float32
        assert torch.nn.functional.cosine_similarity(other.flatten(), gradient.flatten(), dim=0) > 0.95, name


def gradients_of(attached: Attached, batch: Any) -> dict[str, Tensor]:
    """Those of the trained parameters."""
    with torch.enable_grad():
        found = gradients(attached, batch)
    return {name: gradient for name, gradient in found.items() if gradient is not None}


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_model_edits_what_each_call_says(backend: str) -> None:
    """Positions of the first call were baked into the graph, and used for prompts of other lengths."""
    if backend == "inductor" and shutil.which("g++") is None:
        pytest.skip("inductor needs a C++ compiler")
    torch._dynamo.reset()
    places = [{"layers": "0"}, {"layers": "0", "component": "attention_output"}]
    model = lively(tiny_model(num_hidden_layers=1), 4.0)
    attached = attach("loreft", model, {"rank": 2, "position": "f2+l2", "interventions": places}, seed=0)
    shake(attached, 0.5)
    compiled: Any = torch.compile(model, backend=backend)
    tokens = torch.stack([TEXTS[1][:8], TEXTS[0][:8]])
    seen: list[Tensor] = []
    for lengths in ([4, 6], [3, 5], [8, 4]):
        results: list[tuple[Tensor, list[Tensor | None]]] = []
        for network in (model, compiled):
            model.zero_grad(set_to_none=True)
            with attached.edits(torch.tensor(lengths)):
                logits = network(input_ids=tokens, use_cache=False).logits
                logits.square().mean().backward()
            results.append((logits.detach(), [p.grad for p in attached.trainable().values()]))
        (plain, expected), (found, gradients) = results
        close(found, plain)
        for gradient, other in zip(gradients, expected, strict=True):
            assert gradient is not None
            assert other is not None
            torch.testing.assert_close(gradient, other, rtol=1e-4, atol=1e-6)
        seen.append(plain)
    assert not torch.allclose(seen[0], seen[1], atol=1e-3)
