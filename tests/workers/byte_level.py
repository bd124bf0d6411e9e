"""A tokenizer of single bytes, with any chat template and marks of one's own."""

from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def make_byte_level(
    template: str, end: str, special: Sequence[str] = (), added: Sequence[str] = ()
) -> PreTrainedTokenizerFast:
    """Make a tokenizer with that chat template and end of turn.

    Its marks are special tokens, or only added ones.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    inner = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=end, extra_special_tokens=list(special)
    )
    inner.add_tokens([AddedToken(text, special=False, normalized=False) for text in added])
    inner.chat_template = template
    return inner
