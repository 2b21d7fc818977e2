"""Batched and streamed decoding: same answers in any batch, right ends, right positions for edits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Unpack

import pytest
import torch
from torch import Tensor, nn
from transformers import GenerationConfig, GPT2Config, GPT2LMHeadModel

from leantune.errors import ConfigError, DataError
from leantune.generate.decode import RepetitionPenalty, Sampling, generate, stream
from leantune.generate.prompts import encode_prompts, left_pad, stop_ids
from leantune.methods.prompts import EditOptions
from leantune.methods.protocol import Attached
from tests.fixtures import tiny_llama, tiny_tokenizer

PROMPTS = [
    "the",
    "How many people are there? There are twelve",
    "SELECT name FROM",
    "a man said to the woman: the capital of France is Paris, and so on and on",
    "Q: ",
]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def tokenizer() -> Any:
    return tiny_tokenizer()


@pytest.fixture
def model() -> Any:
    return lively(tiny_llama())


def lively(model: Any) -> Any:
    """Larger weights, so that a random model's answers depend on its prompt and positions."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(6.0)
    return model


def encode_prompt(tokenizer: Any, prompt: str) -> list[int]:
    return encode_prompts(tiny_llama(num_layers=1), tokenizer, [prompt], 1)[0].ids


class Recorder(Attached):
    """Notes what each `edits` was told, and shifts the hidden states of the last prompt tokens."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__("recorder", model)
        self.calls: list[tuple[list[int], list[int]]] = []
        self.rows: list[int] = []

    @contextmanager
    def edits(
        self, prompt_lengths: Tensor, prompt_starts: Tensor | None = None, **options: Unpack[EditOptions]
    ) -> Iterator[None]:
        del options
        assert prompt_starts is not None
        self.calls.append((prompt_lengths.tolist(), prompt_starts.tolist()))
        last = prompt_starts + prompt_lengths - 1
        first = prompt_starts
        fresh = True

        def edit(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            nonlocal fresh
            if not fresh:
                return output
            fresh = False
            self.rows.append(output.shape[0])
            edited = output.clone()
            for row in range(output.shape[0]):
                edited[row, last[row]] += 3.0 * torch.linspace(-1, 1, output.shape[-1])
                edited[row, first[row]] -= 3.0 * torch.linspace(-1, 1, output.shape[-1]) ** 2
            return edited

        handle = self.model.model.layers[0].register_forward_hook(edit)  # pyright: ignore
        try:
            yield
        finally:
            handle.remove()


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(max_new_tokens=12),
        Sampling(max_new_tokens=12, repetition_penalty=1.8),
        Sampling(max_new_tokens=8, num_beams=3),
        Sampling(max_new_tokens=8, num_beams=2, repetition_penalty=1.5),
    ],
    ids=["greedy", "penalty", "beams", "beams+penalty"],
)
@pytest.mark.parametrize("pad", ["<pad>", "<|im_end|>", None], ids=["pad", "pad=eos", "no pad"])
def test_a_prompt_answers_the_same_alone_and_in_an_uneven_batch(
    model: Any, sampling: Sampling, pad: str | None
) -> None:
    tokenizer = tiny_tokenizer(pad=pad)
    together = generate(model, tokenizer, PROMPTS, sampling)
    alone = [generate(model, tokenizer, [prompt], sampling)[0] for prompt in PROMPTS]
    assert together == alone
    assert len(set(together)) == len(PROMPTS)


def test_the_repetition_penalty_leaves_the_padding_out() -> None:
    """With pad = eos, penalised padding would make short prompts of a batch end later than alone."""
    tokens = torch.tensor([[1, 1, 1, 2], [1, 3, 2, 2]])
    scores = torch.tensor([[1.0, 1.0, -1.0, 1.0], [1.0, 1.0, -1.0, 1.0]])
    penalised = RepetitionPenalty(2.0, starts=torch.tensor([3, 0]))(tokens, scores)
    assert penalised.tolist() == [[1.0, 1.0, -2.0, 1.0], [1.0, 0.5, -2.0, 0.5]]


def test_learned_positions_count_from_the_first_real_token(tokenizer: Any) -> None:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=400, n_embd=32, n_layer=2, n_head=2, n_positions=128)
    model = lively(GPT2LMHeadModel(config).eval())
    sampling = Sampling(max_new_tokens=10)
    together = generate(model, tokenizer, PROMPTS, sampling)
    assert together == [generate(model, tokenizer, [prompt], sampling)[0] for prompt in PROMPTS]
    assert len(set(together)) > 1


def test_small_batches_and_any_order_give_the_answers_in_the_order_of_the_prompts(
    model: Any, tokenizer: Any
) -> None:
    sampling = Sampling(max_new_tokens=6)
    progress: list[tuple[int, int]] = []
    answers = generate(
        model,
        tokenizer,
        PROMPTS,
        sampling,
        batch_size=2,
        on_progress=lambda done, total: progress.append((done, total)),
    )
    backwards = generate(model, tokenizer, PROMPTS[::-1], sampling, batch_size=3)
    assert answers == backwards[::-1]
    assert progress == [(2, 5), (4, 5), (5, 5)]


@pytest.mark.parametrize("beams", [1, 2])
def test_edits_get_lengths_and_starts_of_every_row_of_the_forward_pass(
    model: Any, tokenizer: Any, beams: int
) -> None:
    recorder = Recorder(model)
    sampling = Sampling(max_new_tokens=8, num_beams=beams)
    together = generate(model, tokenizer, PROMPTS, sampling, attached=recorder)
    lengths, starts = recorder.calls[0]
    true_lengths = sorted((len(encode_prompt(tokenizer, p)) for p in PROMPTS), reverse=True)
    assert lengths == [n for n in true_lengths for _ in range(beams)]
    assert starts == [max(true_lengths) - n for n in lengths]
    assert recorder.rows == [len(PROMPTS) * beams]
    alone = [generate(model, tokenizer, [p], sampling, attached=recorder)[0] for p in PROMPTS]
    assert together == alone
    assert together != generate(model, tokenizer, PROMPTS, sampling)


def test_an_answer_ends_at_any_end_token_and_does_not_contain_it(model: Any, tokenizer: Any) -> None:
    free = Sampling(max_new_tokens=12)
    model.generation_config.eos_token_id = None
    long = _generated_ids(model, tokenizer, "the", 12)
    for index in (2, 5):
        end = long[index]
        model.generation_config.eos_token_id = [399, end]
        kept = long[: long.index(end)]
        assert generate(model, tokenizer, ["the"], free) == [tokenizer.decode(kept)]
        assert generate(model, tokenizer, ["the", PROMPTS[3]], free)[0] == tokenizer.decode(kept)


def test_further_stop_tokens_end_an_answer_and_a_stream(model: Any, tokenizer: Any) -> None:
    model.generation_config.eos_token_id = None
    ids = _generated_ids(model, tokenizer, "the", 8)
    expected = tokenizer.decode(ids[: ids.index(ids[4])])
    free = Sampling(max_new_tokens=8)
    assert generate(model, tokenizer, ["the"], free, stop_token_ids=[ids[4]]) == [expected]
    assert "".join(stream(model, tokenizer, "the", free, stop_token_ids=[ids[4]])) == expected


def _generated_ids(model: Any, tokenizer: Any, prompt: str, count: int) -> list[int]:
    """Greedy tokens by one full forward pass each: no cache, no padding, no `generate`."""
    tokens = encode_prompt(tokenizer, prompt)
    prompt_length = len(tokens)
    for _ in range(count):
        logits = model(torch.tensor([tokens])).logits[0, -1]
        tokens.append(int(logits.argmax()))
    return tokens[prompt_length:]


def test_greedy_answers_are_those_of_plain_forward_passes(model: Any, tokenizer: Any) -> None:
    model.generation_config.eos_token_id = None
    ids = _generated_ids(model, tokenizer, PROMPTS[1], 10)
    assert not set(ids) & stop_ids(model, tokenizer)
    expected = tokenizer.decode(ids, skip_special_tokens=True)
    assert generate(model, tokenizer, PROMPTS, Sampling(max_new_tokens=10))[1] == expected


def test_end_tokens_come_from_model_and_tokenizer() -> None:
    model = tiny_llama()
    tokenizer = tiny_tokenizer(eos="</s>")
    model.generation_config.eos_token_id = [7, 8]
    assert stop_ids(model, tokenizer) == {7, 8, 3}  # the model's two and </s>


def test_generation_defaults_of_the_model_do_not_leak_and_stay_as_they_were(
    model: Any, tokenizer: Any
) -> None:
    sampling = Sampling(max_new_tokens=8)
    expected = generate(model, tokenizer, PROMPTS, sampling)
    own = GenerationConfig(
        do_sample=True,
        temperature=5.0,
        top_k=3,
        repetition_penalty=9.0,
        num_beams=4,
        max_length=7,
        min_new_tokens=4,
        suppress_tokens=[11, 12],
        no_repeat_ngram_size=1,
        use_cache=False,
        eos_token_id=1,
    )
    model.generation_config = own
    assert generate(model, tokenizer, PROMPTS, sampling) == expected
    assert model.generation_config is own
    assert own.temperature == 5.0


def test_sampling_repeats_with_a_seed_and_leaves_the_random_state_alone(model: Any, tokenizer: Any) -> None:
    def draw(seed: int | None) -> list[str]:
        sampling = Sampling(max_new_tokens=10, temperature=1.5, top_p=0.95, top_k=50, seed=seed)
        return generate(model, tokenizer, PROMPTS, sampling, batch_size=2)

    torch.manual_seed(3)
    state = torch.get_rng_state()
    assert draw(1) == draw(1)
    assert draw(1) != draw(2)
    assert torch.equal(torch.get_rng_state(), state)
    assert draw(None) != draw(None)


def test_every_module_gets_its_own_mode_back_even_after_an_error(model: Any, tokenizer: Any) -> None:
    model.train()
    model.model.layers[1].eval()
    before = [module.training for module in model.modules()]
    generate(model, tokenizer, ["the"], Sampling(max_new_tokens=2))
    assert [module.training for module in model.modules()] == before

    def fail(*_: Any) -> None:
        assert not model.training
        raise RuntimeError("broken layer")

    model.model.layers[0].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="broken layer"):
        generate(model, tokenizer, ["the"], Sampling(max_new_tokens=2))
    assert [module.training for module in model.modules()] == before


def test_the_model_can_be_trained_after_generating(model: Any, tokenizer: Any) -> None:
    model.train()
    generate(model, tokenizer, PROMPTS, Sampling(max_new_tokens=3))
    tokens = torch.tensor([encode_prompt(tokenizer, PROMPTS[1])])
    model(tokens, labels=tokens).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_there_is_one_bos_whoever_writes_it() -> None:
    adding = tiny_tokenizer(bos="<s>", adds_bos=True)
    assert encode_prompt(adding, "the")[0] == 2
    assert encode_prompt(adding, "<s>the") == encode_prompt(adding, "the")
    plain = tiny_tokenizer(bos="<s>")
    assert encode_prompt(plain, "<s>the").count(2) == 1
    assert 2 not in encode_prompt(plain, "the")


def test_an_eos_that_the_tokenizer_appends_does_not_close_the_prompt() -> None:
    from tokenizers import processors

    tokenizer = tiny_tokenizer(eos="</s>")
    open_prompt = encode_prompt(tokenizer, "the")
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 3)]
    )
    assert tokenizer("the")["input_ids"][-1] == 3
    assert encode_prompt(tokenizer, "the") == open_prompt
    assert encode_prompt(tokenizer, "the</s>")[-1] == 3


def test_left_padding_masks_by_length_even_where_a_prompt_holds_the_pad_token() -> None:
    batch = left_pad([[1, 1, 5], [1]], pad=1, device=torch.device("cpu"))
    assert batch.tokens.tolist() == [[1, 1, 5], [1, 1, 1]]
    assert batch.mask.tolist() == [[1, 1, 1], [0, 0, 1]]
    assert batch.starts.tolist() == [0, 2]
    assert batch.lengths.tolist() == [3, 1]


def test_no_prompts_give_no_answers(model: Any, tokenizer: Any) -> None:
    assert generate(model, tokenizer, [], Sampling()) == []


def test_prompts_that_cannot_be_answered_are_named(model: Any, tokenizer: Any) -> None:
    with pytest.raises(DataError, match="prompt 2 is empty"):
        generate(model, tokenizer, ["the", ""], Sampling())
    with pytest.raises(DataError, match=r"the prompt has \d+ tokens, but the model has 512 positions"):
        generate(model, tokenizer, ["x" * 600], Sampling(max_new_tokens=1))
    with pytest.raises(DataError, match="max_new_tokens to at most 412"):
        generate(model, tokenizer, ["\u2603" * 33 + "x"], Sampling(max_new_tokens=450))
    with pytest.raises(DataError, match="one string"):
        generate(model, tokenizer, "the", Sampling())
    with pytest.raises(ConfigError, match="batch_size"):
        generate(model, tokenizer, ["the"], Sampling(), batch_size=0)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(max_new_tokens=40),
        Sampling(max_new_tokens=40, temperature=2.0, seed=5),
        Sampling(max_new_tokens=40, repetition_penalty=1.5),
    ],
    ids=["greedy", "sampled", "penalty"],
)
def test_the_pieces_of_a_stream_join_to_the_generated_answer(
    model: Any, tokenizer: Any, sampling: Sampling
) -> None:
    for prompt in PROMPTS[:3]:
        pieces = list(stream(model, tokenizer, prompt, sampling))
        assert "".join(pieces) == generate(model, tokenizer, [prompt], sampling)[0]
        assert len(pieces) > 1


def test_a_character_of_several_tokens_is_streamed_whole(tokenizer: Any) -> None:
    """A model that spells out a snowman byte by byte must not show half characters."""
    text = "a\u2603b\u00e9"
    model = Parrot([*encode_prompt(tokenizer, text), 1])
    pieces = list(stream(model.llama, tokenizer, "the", Sampling(max_new_tokens=20)))
    assert pieces == ["a", "\u2603", "b", "\u00e9"]


class Parrot:
    """A Llama whose logits are replaced so that it says the given tokens."""

    def __init__(self, tokens: list[int]) -> None:
        self.llama = tiny_llama()
        self.tokens = list(tokens)
        self.said = 0
        self.llama.lm_head.register_forward_hook(self._say)

    def _say(self, module: nn.Module, args: Any, logits: Tensor) -> Tensor:
        spoken = torch.zeros_like(logits)
        spoken[..., self.tokens[min(self.said, len(self.tokens) - 1)]] = 10.0
        self.said += 1
        return spoken


def test_an_error_in_the_stream_reaches_the_reader(model: Any, tokenizer: Any) -> None:
    calls = 0

    def fail_late(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise RuntimeError("broken layer")

    model.model.layers[0].register_forward_pre_hook(fail_late)
    pieces = stream(model, tokenizer, "the", Sampling(max_new_tokens=9))
    with pytest.raises(RuntimeError, match="broken layer"):
        list(pieces)


def test_leaving_a_stream_stops_the_model(model: Any, tokenizer: Any) -> None:
    steps = 0

    def count(*_: Any) -> None:
        nonlocal steps
        steps += 1

    model.generation_config.eos_token_id = None
    model.train()
    model.model.layers[0].register_forward_pre_hook(count)
    pieces = stream(model, tokenizer, "the", Sampling(max_new_tokens=400))
    next(pieces)
    pieces.close()
    seen = steps
    assert seen < 400
    assert model.training
    assert "".join(stream(model, tokenizer, "the", Sampling(max_new_tokens=2))) != ""


def test_a_stream_refuses_at_once_what_it_cannot_do(model: Any, tokenizer: Any) -> None:
    with pytest.raises(ConfigError, match="num_beams"):
        stream(model, tokenizer, "the", Sampling(num_beams=2))
    with pytest.raises(DataError, match="empty"):
        stream(model, tokenizer, "", Sampling())
