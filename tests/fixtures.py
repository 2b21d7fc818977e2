"""Small tokenizers and models that the tests build for themselves; nothing is downloaded."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

# ChatML: one marker opens a turn, another closes it, and a newline follows the closing one.
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Writes its own BOS, closes an assistant turn with EOS, and has no generation prompt beyond [/INST].
LLAMA2 = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "[INST] {{ message['content'] }} [/INST]{% elif message['role'] == 'assistant' %}"
    " {{ message['content'] }}{{ eos_token }}{% else %}[SYS] {{ message['content'] }} [/SYS]{% endif %}"
    "{% endfor %}"
)
SPECIAL = ("<|im_start|>", "<|im_end|>", "<s>", "</s>", "<pad>", "<unk>")
SAMPLES = (
    "system user assistant SELECT name FROM employees WHERE age > 30",
    "Below is an instruction that describes a task. Write a response that completes the request.",
    "### Instruction: ### Input: ### Response: the capital of France is Paris. Question: Answer:",
    "How many people are there? There are twelve of them, said the old man to the woman.",
)


def tiny_tokenizer(
    *,
    eos: str | None = "<|im_end|>",
    pad: str | None = "<pad>",
    bos: str | None = None,
    adds_bos: bool = False,
    chat_template: str | None = CHATML,
    vocab_size: int = 400,
) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer that reads any text.

    `adds_bos`: the tokenizer itself puts `bos` before every text. Special tokens are
    `<|im_start|> <|im_end|> <s> </s> <pad> <unk>`, with ids 0 to 5 in this order.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SAMPLES, trainer)
    if adds_bos:
        assert bos is not None
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=eos, pad_token=pad, bos_token=bos, unk_token="<unk>"
    )
    fast.chat_template = chat_template
    return fast


def tiny_llama(
    *,
    vocab_size: int = 400,
    hidden_size: int = 32,
    num_layers: int = 3,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    tied: bool = False,
    seed: int = 0,
) -> LlamaForCausalLM:
    """A random fp32 Llama decoder, the same for the same seed."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        bos_token_id=2,
        eos_token_id=1,
        pad_token_id=4,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).eval()


def tiny_model_folder(folder: Path, *, tied: bool = False, seed: int = 0) -> Path:
    """A folder with a tiny Llama and its tokenizer, as `from_pretrained` reads it."""
    tokenizer = tiny_tokenizer()
    tiny_llama(vocab_size=len(tokenizer), tied=tied, seed=seed).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
