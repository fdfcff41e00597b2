"""Tiny's tokenizer: a byte-level BPE, trained on Tiny's own dialogues."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

PAD, END = "<|pad|>", "<|end|>"
ROLES = {role: f"<|{role}|>" for role in ("system", "user", "assistant", "tool")}
CALL_MARKS = ("<tool_call>", "</tool_call>")
TEMPLATE = Path(__file__).parent / "chat_template.jinja"


def train_tokenizer(texts: Iterable[str], size: int, max_length: int) -> PreTrainedTokenizerFast:
    """Train a tokenizer of `size` tokens and give it the chat template.

    All 256 bytes are tokens, so every text encodes and comes back. Digits stay single: sums are
    learned digit by digit.
    """
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    special = [PAD, END, *ROLES.values()]
    trainer = trainers.BpeTrainer(
        vocab_size=size - len(CALL_MARKS),
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    # Not special: a decoder that skips special tokens must still show that a tool is called.
    core.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in CALL_MARKS])
    make: Any = PreTrainedTokenizerFast
    tokenizer: PreTrainedTokenizerFast = make(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=list(ROLES.values()),
        clean_up_tokenization_spaces=False,
        model_max_length=max_length,
    )
    tokenizer.chat_template = TEMPLATE.read_text().rstrip("\n")
    return tokenizer
