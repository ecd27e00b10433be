"""Small tokenizers of each decoder kind."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

WORDS = ["hello", "world", "naïve", "Zürich", "日本語", "🙂", "e", "x", "new\nline", "tab\t"]


def byte_level() -> Tokenizer:
    """GPT-2's kind: every byte is a token, and some words."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, "he", "ll", "hell", "Ġw", "Ġwo", "ðŁ", "ĻĤ"]
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("Ġ", "w"), ("Ġw", "o"), ("ð", "Ł"), ("Ļ", "Ĥ")]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return with_added(tokenizer)


def sentencepiece(decoder: decoders.Decoder) -> Tokenizer:
    """Llama 2's kind: ▁ for a space, <0x00> … <0xFF> for what has no token."""
    tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens += [f"▁{word}" for word in WORDS] + WORDS + ["▁", "▁▁", "a▁b", "<0xZZ>"]
    tokenizer = Tokenizer(
        models.BPE({token: i for i, token in enumerate(dict.fromkeys(tokens))}, [], byte_fallback=True)
    )
    tokenizer.decoder = decoder
    return with_added(tokenizer)


def id_of(tokenizer: Tokenizer, token: str) -> int:
    return tokenizer.get_vocab()[token]


def with_added(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.add_tokens([AddedToken("<tool call>", normalized=False), AddedToken("▁added é", normalized=False)])
    return tokenizer


LLAMA2 = decoders.Sequence(
    [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
)
GEMMA = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
