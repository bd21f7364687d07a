"""Whether a storage's bytes changed, asked without copying them to the host."""

from __future__ import annotations

import functools

import torch

_COLUMNS = 1021  # a prime, so that rows swapped in a matrix of round size change the fingerprint
_PIECE_NBYTES = 8 * _COLUMNS * 2048


def fingerprints(storages: list[torch.UntypedStorage]) -> list[int]:
    """Return a 64-bit sum of each storage's bytes, weighted by position; computed on the device, read once."""
    if not storages:
        return []
    weights = _weights(storages[0].device)
    return [int(one) for one in torch.stack([_fingerprint(bytes_of(one), weights) for one in storages]).tolist()]


def _fingerprint(data: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    whole = data.numel() - data.numel() % (8 * _COLUMNS)
    rest = data[whole:]
    total = (rest * weights[: rest.numel()]).sum()
    for piece in torch.split(data[:whole], _PIECE_NBYTES) if whole else ():
        columns = piece.view(torch.int64).view(-1, _COLUMNS).sum(0)
        total = total * 31 + (columns * weights[:_COLUMNS]).sum()
    return total


@functools.cache
def _weights(device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0x68_77_72_6C)
    weights = torch.randint(-(2**62), 2**62, (8 * _COLUMNS,), generator=generator, dtype=torch.int64)
    return (weights * 2 + 1).to(device)


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return all bytes of ``storage`` as a 1-d uint8 tensor that shares its memory."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
