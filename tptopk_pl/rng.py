"""Random streams addressed by (key, purpose, step), replayable by whoever holds the key.

Privacy rests on the noise and the sampling being unpredictable, so the default generator is a
cipher (ChaCha20) under a key drawn from the operating system. A stream is a pure function of its
address: every rank that holds the key draws the same batch for a step without talking to the
others, and no draw here moves the global generators of Python, NumPy or torch.

>>> key = seeded_key(7)  # a known seed: reproducible, NOT private
>>> Stream(key, "sampling", 3).subset(1000, 3).equal(Stream(key, "sampling", 3).subset(1000, 3))
True
"""

import hashlib
import math
import os

import numpy as np
import numpy.typing as npt
import torch
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from scipy import stats

KEY_BYTES = 32
_NONCE = bytes(16)  # may be constant: each stream has its own cipher key
_CHUNK = 1 << 15  # Gaussian pairs at a time: the scratch memory stays in the cache


def fresh_key() -> bytes:
    """Return a secret key of 32 bytes from the operating system."""
    return os.urandom(KEY_BYTES)


def seeded_key(seed: int) -> bytes:
    """Return the key that belongs to `seed`: reproducible, and therefore NOT private."""
    return hashlib.blake2b(str(int(seed)).encode(), digest_size=KEY_BYTES, person=b"seed").digest()


def _derived_key(key: bytes, purpose: str, step: int) -> bytes:
    # The step has a fixed width, so that no two addresses are the same bytes.
    address = step.to_bytes(8, "little") + purpose.encode()
    return hashlib.blake2b(address, digest_size=KEY_BYTES, key=key, person=b"stream").digest()


class Stream:
    """The random numbers of one purpose at one step.

    Successive calls go on in the same keystream; a new `Stream` of the same address replays it.

    Args:
        key: 32 bytes, from `fresh_key` (private) or `seeded_key` (not private).
        purpose: what the numbers are for; other purposes get independent numbers.
        step: index ≥ 0, usually the logical training step.
    """

    def __init__(self, key: bytes, purpose: str, step: int) -> None:
        cipher = Cipher(ChaCha20(_derived_key(key, purpose, step), _NONCE), mode=None)
        self._encryptor = cipher.encryptor()

    def words(self, n: int) -> npt.NDArray[np.uint64]:
        """Return uniform 64-bit words, `[n]`."""
        out = np.empty(n, dtype="<u8")
        if n:  # encrypting zeros gives the bare keystream
            self._encryptor.update_into(bytes(8 * n), out.view(np.uint8).data)
        return out.astype(np.uint64, copy=False)

    def uniform(self, n: int) -> npt.NDArray[np.float64]:
        """Return uniform numbers in [0, 1) with 53 bits each, `[n]`."""
        return (self.words(n) >> np.uint64(11)).astype(np.float64) * 2.0**-53

    def integers(self, bound: int, n: int) -> npt.NDArray[np.int64]:
        """Return integers in [0, bound), exactly uniform, `[n]`."""
        # Words above the last multiple of `bound` would favour small residues: draw those again.
        last = np.uint64((1 << 64) - (1 << 64) % bound - 1)
        words = self.words(n)
        while (rejected := np.flatnonzero(words > last)).size:
            words[rejected] = self.words(rejected.size)
        return (words % np.uint64(bound)).astype(np.int64)

    def gaussian(self, n: int) -> torch.Tensor:
        """Return standard normal numbers, float64 `[n]`, by the Box–Muller transform."""
        out = torch.empty(n, dtype=torch.float64)
        for start in range(0, n, 2 * _CHUNK):
            part = out[start : start + 2 * _CHUNK]
            half = (part.numel() + 1) // 2
            u = torch.from_numpy(self.uniform(2 * half))
            # 1 − u lies in (0, 1], so that the logarithm is finite.
            radius = u[:half].neg_().log1p_().mul_(-2.0).sqrt_()
            angle = u[half:].mul_(2.0 * math.pi)
            torch.mul(radius, angle.cos(), out=part[:half])
            rest = part.numel() - half
            torch.mul(radius[:rest], angle[:rest].sin(), out=part[half:])
        return out

    def binomial(self, trials: int, probability: float) -> int:
        """Return one Binomial(trials, probability) draw, by inverting its distribution function."""
        return int(stats.binom.ppf(1.0 - self.uniform(1)[0], trials, probability))

    def subset(self, population: int, size: int) -> torch.Tensor:
        """Return a uniform subset of range(population), sorted int64 `[size]`.

        Work and memory are O(size).

        Raises:
            ValueError: if `size` is not between 0 and `population`.
        """
        if not 0 <= size <= population:
            raise ValueError(f"Expected size={size} in [0, {population}].")
        if 2 * size > population:  # the complement is smaller, and as uniform
            left_out = self._distinct(population, population - size)
            keep = np.ones(population, dtype=bool)
            keep[left_out] = False
            return torch.from_numpy(np.flatnonzero(keep))
        return torch.from_numpy(np.sort(self._distinct(population, size)))

    def _distinct(self, population: int, size: int) -> npt.NDArray[np.int64]:
        """Return `size` ≤ population/2 distinct integers, uniform as a set.

        Draws with replacement in sequence and keeps first occurrences, which is the sequential
        draw without replacement; each round finds at least half of what is missing.
        """
        found = np.empty(0, dtype=np.int64)
        while found.size < size:
            candidates = np.concatenate([found, self.integers(population, size - found.size)])
            first = np.sort(np.unique(candidates, return_index=True)[1])
            found = candidates[first]
        return found


def gaussian_noise(
    key: bytes,
    step: int,
    size: int,
    *,
    device: str | torch.device = "cpu",
    secure: bool = True,
) -> torch.Tensor:
    """Return the standard normal noise of one step, float64 `[size]` on `device`.

    Args:
        key: the noise key; as secret as the data.
        step: logical step.
        size: number of coordinates that get noise.
        device: where the noise is wanted.
        secure: draw by the cipher on the CPU and copy. False: torch's generator on `device`, seeded
            from the key (63 bits), float32 draws; fast on an accelerator, not cryptographic.
    """
    if secure:
        return Stream(key, "noise", step).gaussian(size).to(device)
    seed = int(Stream(key, "noise seed", step).words(1)[0] >> np.uint64(1))
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(size, generator=generator, device=device).double()
