# SPDX-License-Identifier: Apache-2.0
"""A byte-level tokenizer of 1,024 tokens with a chat template: any text goes in, every token id comes out."""

import json
from itertools import islice, product
from pathlib import Path
from string import ascii_lowercase, digits

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
    *(f"<|reserved_{i}|>" for i in range(9)),
)
NUM_SPECIAL_TOKENS = len(SPECIAL_TOKENS)
VOCAB_SIZE = 1024
PAD_TOKEN_ID = SPECIAL_TOKENS.index("<|endoftext|>")
BOS_TOKEN_ID = SPECIAL_TOKENS.index("<|im_start|>")
EOS_TOKEN_ID = SPECIAL_TOKENS.index("<|im_end|>")

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{{ part['text'] }}{% endfor %}{% endif %}"
    "{{ '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write_tokenizer(path: Path, *, model_max_length: int) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`.

    Ids: the special tokens first, then the 256 bytes, then pairs of letters up to `VOCAB_SIZE`, so that a
    model that samples any id yields text.

    Args:
        path: an existing directory.
        model_max_length: longest sequence, tokens.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    byte_alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    num_merges = VOCAB_SIZE - NUM_SPECIAL_TOKENS - len(byte_alphabet)
    space = "\u0120"  # what ByteLevel writes for a space
    pairs = [
        *product(ascii_lowercase, ascii_lowercase),
        *product(space, ascii_lowercase),
        *product(digits, digits),
    ]
    merges = list(islice(pairs, num_merges))
    tokens = [*SPECIAL_TOKENS, *byte_alphabet, *(first + second for first, second in merges)]
    assert len(set(tokens)) == VOCAB_SIZE

    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special_tokens = [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    tokenizer.add_special_tokens(special_tokens)
    tokenizer.save(str(path / "tokenizer.json"))

    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": model_max_length,
        "pad_token": SPECIAL_TOKENS[PAD_TOKEN_ID],
        "eos_token": SPECIAL_TOKENS[EOS_TOKEN_ID],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
