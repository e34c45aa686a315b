"""Alignment of two tokenizers by the bytes of their tokens.

`aligned` finds the positions of one text that can be compared, `nearest_tokens` the tokens that
mean the same bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from vgrout.ground.io import Refused

# Byte-level BPE writes every byte as a character of its own.
_BYTE = {character: byte for byte, character in bytes_to_unicode().items()}
_SAMPLE = "def f(x):\n    return x >= 10  # naïve Ünïcode 文字"


def _spell(token: str, byte_level: bool) -> bytes:
    """The bytes of an ordinary token, as the tokenizer writes it."""
    if byte_level and all(c in _BYTE for c in token):
        return bytes(_BYTE[c] for c in token)
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes([int(token[3:5], 16)])
    return token.replace("▁", " ").encode()


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """Bytes of every token of one tokenizer, b"" for special tokens."""

    of: tuple[bytes, ...]
    end_id: int

    def text(self, ids: Sequence[int]) -> bytes:
        """The bytes that these tokens make together."""
        return b"".join(self.of[i] for i in ids)

    def starts(self, ids: Sequence[int]) -> list[int]:
        """Byte at which each token begins."""
        if not ids:
            return []
        return list(accumulate((len(self.of[i]) for i in ids[:-1]), initial=0))


def token_bytes(tok: PreTrainedTokenizerBase, end_id: int) -> TokenBytes:
    """Bytes of a tokenizer's tokens.

    It may write them as byte-level BPE does, as sentencepiece does (▁ for a space, <0x0A> for a
    byte), or as plain text. end_id: the token that ends an answer.

    Raises:
        Refused: the bytes of a sample text's tokens are not the text.
    """
    core: Any = getattr(tok, "backend_tokenizer", None)
    byte_level = core is not None and "ByteLevel" in str(core.decoder)
    added = tok.added_tokens_decoder
    special = set(tok.all_special_ids)
    special.update(i for i, token in added.items() if token.special)
    size = max(tok.get_vocab().values()) + 1  # ids may have gaps
    tokens: Any = tok.convert_ids_to_tokens(list(range(size)))
    bytes_of: list[bytes] = []
    for i, token in enumerate(tokens):
        if i in special or token is None:
            bytes_of.append(b"")
        elif i in added:
            bytes_of.append(token.encode())
        else:
            bytes_of.append(_spell(token, byte_level))
    spelled = TokenBytes(tuple(bytes_of), end_id)

    ids = tok(_SAMPLE, add_special_tokens=False)["input_ids"]
    want = _SAMPLE
    if special.intersection(ids):
        want = str(tok.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))
    if spelled.text(ids).removeprefix(b" ") != want.encode():
        raise Refused(
            f"{type(tok).__name__}: its tokens cannot be spelled out, so ULD cannot align them"
        )
    return spelled


def aligned(
    student: TokenBytes, ids: Sequence[int], teacher: TokenBytes, teacher_ids: Sequence[int]
) -> list[tuple[int, int]]:
    """Pairs (i, j) of tokens that begin at the same byte, up to where the two texts first differ.

    The two tokens of a pair have the same prefix, so the distributions that they were drawn from
    can be compared. The texts differ from where a tokenizer has no token for a character. Of
    several tokens that begin at one byte (special ones are empty) the last counts; where the texts
    differ, the first, since what it stands for is part of the others' prefix. One leading space is
    ignored: sentencepiece puts it before a text.
    """
    own, other = student.text(ids), teacher.text(teacher_ids)
    own_shift = int(own.startswith(b" ") and not other.startswith(b" "))
    other_shift = int(other.startswith(b" ") and not own.startswith(b" "))
    own, other = own[own_shift:], other[other_shift:]
    unlike = (n for n, (a, b) in enumerate(zip(own, other, strict=False)) if a != b)
    same = next(unlike, min(len(own), len(other)))  # bytes that both begin with
    differ_at = None if own == other else same  # where one of them was cut short, it ends
    own_starts = token_at(student.starts(ids), own_shift, differ_at)
    other_starts = token_at(teacher.starts(teacher_ids), other_shift, differ_at)
    pairs: list[tuple[int, int]] = []
    for start, i in sorted(own_starts.items()):
        if start in other_starts and start <= same:
            pairs.append((i, other_starts[start]))
    return pairs


def token_at(starts: Sequence[int], shift: int, differ_at: int | None) -> dict[int, int]:
    """Byte → the token that begins there: the last of several, at `differ_at` the first.

    shift: bytes of the text's start that do not count.
    """
    tokens: dict[int, int] = {}
    for i, start in enumerate(starts):
        byte = max(0, start - shift)
        if byte != differ_at or byte not in tokens:
            tokens[byte] = i
    return tokens


def nearest_tokens(student: TokenBytes, teacher: TokenBytes, width: int) -> Int[Tensor, " width"]:
    """For every logit of the teacher the student's token of the same bytes, or −1.

    The tokens that end an answer correspond. The map is one to one: of several tokens of the same
    bytes, the last on either side counts. width: number of the teacher's logits.
    """
    own = {text: i for i, text in enumerate(student.of) if text}
    other = {text: j for j, text in enumerate(teacher.of[:width]) if text}
    nearest = torch.full((width,), -1, dtype=torch.long)
    for text, j in other.items():
        nearest[j] = own.get(text, -1)
    nearest[teacher.end_id] = student.end_id
    return nearest
