"""Names for the types of arguments."""

from collections.abc import Iterable
from typing import Literal, SupportsIndex, TypeAlias

#: Token ids: any sequence of integers, or an array of uint32, int32 or int64.
Tokens: TypeAlias = Iterable[SupportsIndex]

#: Which shared segments attention reads once for all their sequences.
Sharing: TypeAlias = Literal["auto", "always", "never"]

#: Instruction sets of the CPU kernels.
Isa: TypeAlias = Literal["portable", "avx2", "avx512", "avx512_bf16"]

#: The order of a paged cache's dimensions: tokens or heads first.
KvLayout: TypeAlias = Literal["NHD", "HND"]
