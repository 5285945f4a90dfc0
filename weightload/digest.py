"""A digest of a tensor's bytes that is quick on every device and sees values that changed places."""

from __future__ import annotations

import torch

__all__ = ["digest"]

_MODULUS = 1 << 64
_ODD = 0x9E3779B97F4A7C15
"""Multiplier of the digest of a part, odd so that no bit of it is lost."""
_SPREAD = 0xBF58476D1CE4E5B9 - _MODULUS
"""Multiplier of a word, odd for the same reason; as a signed number, which torch's words are."""
_COLUMNS = 128
_AT_ONCE = 1 << 20
"""Words that are looked at twice while a processor has them in its cache."""


def digest(tensor: torch.Tensor) -> int:
    """Return 64 bits that depend on every byte of ``tensor`` and on where it stands.

    The bytes are laid out as matrices of 64 bit words, 128 in a row. The sums of the rows and those
    of the columns are scrambled and weighted by odd numbers: without the scrambling, what a flipped
    high bit adds to the rows could cancel what it adds to the columns. That is no cryptographic
    digest: it finds accidents, not attacks.

    Args:
        tensor: any strided tensor, or one of mkldnn; one that is not contiguous is copied.
    """
    if tensor.is_mkldnn:  # it is laid out as the machine likes it
        tensor = tensor.to_dense()
    # One element counts as contiguous, whatever its stride, and then is no view of bytes.
    flat = (
        tensor.detach()
        .resolve_conj()
        .resolve_neg()
        .contiguous()
        .as_strided((tensor.numel(),), (1,))
    )
    if not flat.numel():
        return 0
    size = flat.numel() * flat.element_size()
    if flat.storage_offset() * flat.element_size() % 8:
        flat = flat.clone()
    octets = flat.view(torch.uint8)
    words = octets[: size // 8 * 8].view(torch.int64)
    tail = octets[size // 8 * 8 :].tolist()
    result = size
    for value in tail:
        result = (result * _ODD + value) % _MODULUS
    if words.numel():
        for value in torch.stack([_of_part(part) for part in words.split(_AT_ONCE)]).tolist():
            result = (result * _ODD + value) % _MODULUS
    return result


def _of_part(words: torch.Tensor) -> torch.Tensor:
    square = words[: words.numel() // _COLUMNS * _COLUMNS].view(-1, _COLUMNS)
    sums = torch.cat((square.sum(1), square.sum(0), words[square.numel() :]))
    weights = torch.arange(1, 2 * sums.numel(), 2, device=sums.device)
    return (_scrambled(sums) * weights).sum()


def _scrambled(words: torch.Tensor) -> torch.Tensor:
    """Map 64 bit words one to one, so that a change in one bit spreads over all of them."""
    for factor, shift in ((_SPREAD, 32), (_SPREAD, 29)):
        words = words * factor
        words = words ^ (words >> shift)
    return words
