"""The kernels of a decode step beside the attention: skinny products, and what lies between them.

For few rows a product takes as long as reading its weights, and a small kernel as long as its
launch. So each product leaves parts of its sums (`cuda/decode/parts.cuh`), which the next small
kernel adds while it does its own work, and each kernel starts while the one before it ends: the
ring of a product fills with weights meanwhile.
"""

import ctypes
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from chunkcache.errors import InvalidConfigError
from chunkcache.kernels.driver import Launch, check, driver, limits, load
from chunkcache.kernels.table import find
from chunkcache.kernels.tensors import ELEMENTS, dtype_name, stream_of

if TYPE_CHECKING:
    import torch

#: Rows that products are compiled for (`cuda/decode/product.cuh`).
PRODUCT_ROWS = (8, 32, 64, 96)
MAX_ROWS = PRODUCT_ROWS[-1]
MAX_WEIGHTS = 3
#: Width of a row that `decode_normalize` takes: 2 vectors of 4 columns for each thread of 4 blocks.
MAX_WIDTH = 8192
_TILE = 128  # weight rows of a tile
_DEPTH = 64  # columns of a unit
_MAX_STAGES = 16
_PRODUCT_THREADS = 288
_WEIGHTS_BYTES = 448
_NORM_BLOCKS = 4
_THREADS = 256
#: Left for the blocks of the small kernels, which run beside those of a product.
_SPARE_SHARED_BYTES = 4096


class Cut(NamedTuple):
    """How a product is shared out.

    Attributes:
        num_units: units of all tiles.
        num_blocks: blocks, with an equal run of units each.
        tile_units: units of a tile.
        max_parts: the most blocks that share a tile.
    """

    num_units: int
    num_blocks: int
    tile_units: int
    max_parts: int

    def begin_of(self, block: int) -> int:
        """Return the first unit of a block."""
        return block * self.num_units // self.num_blocks

    def block_of(self, unit: int) -> int:
        """Return the block that has a unit."""
        return ((unit + 1) * self.num_blocks - 1) // self.num_units


def cut_product(num_tiles: int, columns: int, num_blocks: int) -> Cut:
    """Share the units of a product out in equal runs.

    Args:
        num_tiles: tiles of all its weights.
        columns: of a weight row.
        num_blocks: blocks that run at once.
    """
    tile_units = -(-columns // _DEPTH)
    num_units = num_tiles * tile_units
    cut = Cut(num_units, min(num_blocks, num_units), tile_units, 0)
    max_parts = max(
        cut.block_of(first + tile_units - 1) - cut.block_of(first) + 1
        for first in range(0, num_units, tile_units)
    )
    return cut._replace(max_parts=max_parts)


def compiled_rows(rows: int) -> int:
    """Return the rows of the smallest product that has room for so many.

    Raises:
        InvalidConfigError: there is none.
    """
    found = next((n for n in PRODUCT_ROWS if n >= rows), None)
    if rows < 1 or found is None:
        raise InvalidConfigError(f"rows: got {rows}, allowed is 1 to {MAX_ROWS}")
    return found


class Parts(NamedTuple):
    """The sums of a product, in parts.

    Attributes:
        packed: the bytes of `Parts` in `cuda/decode/parts.cuh`.
        first_tiles: of each of its weights.
    """

    packed: bytes
    first_tiles: tuple[int, ...]


class Pages(NamedTuple):
    """One layer's K and V pages `[chunks, num_kv_heads, chunk_size, head_dim]`."""

    k: "torch.Tensor"
    v: "torch.Tensor"


class HeadNorms(NamedTuple):
    """RMS norms of the heads of q and k: weights `[head_dim]`."""

    q: "torch.Tensor"
    k: "torch.Tensor"
    epsilon: float


class Rotation(NamedTuple):
    """Cosines and sines of each position, float32 `[positions, head_dim / 2]`."""

    cosine: "torch.Tensor"
    sine: "torch.Tensor"


class DecodeKernels:
    """Launches of one decode step of so many rows, on torch's current stream.

    The buffers that rows are multiplied from have room for `padded_rows` rows.
    """

    def __init__(self, rows: int, parts: "torch.Tensor") -> None:
        """Keep where products leave their parts.

        Args:
            rows: of the step, up to `MAX_ROWS`.
            parts: float32, `num_part_values` of the largest product; products take turns.
        """
        self.rows = rows
        self.padded_rows = compiled_rows(rows)
        self._parts = parts
        self._device: int = parts.device.index

    @staticmethod
    def num_part_values(weights: "Sequence[torch.Tensor]", rows: int, device: int) -> int:
        """Return how many values the parts of a product of so many rows are."""
        cut = _cut_of(weights, device)
        return sum(_tiles_of(weights)) * cut.max_parts * rows * _TILE

    def product(
        self,
        weights: "Sequence[torch.Tensor]",
        x: "torch.Tensor",
    ) -> Parts:
        """Multiply the rows of x by one to three weights.

        Args:
            weights: ``[rows, columns]`` each, contiguous, of x's dtype.
            x: ``[padded_rows, columns]``, contiguous.
        """
        cut = _cut_of(weights, self._device)
        parts = struct.pack("<Q5I4x", self._parts.data_ptr(), *cut, self.rows)
        stage_bytes = (_TILE + self.padded_rows) * _DEPTH * 2
        room = limits(self._device).shared_bytes - 1024 - _SPARE_SHARED_BYTES
        stages = min(room // stage_bytes, _MAX_STAGES)
        params = b"".join(
            [
                _packed_weights(weights),
                _matrix_map(x, self.padded_rows),
                parts,
                struct.pack("<2I", self.padded_rows, stages),
            ]
        )
        params += bytes(-len(params) % 64)
        shared = stages * stage_bytes + 1024
        function = load(
            find(f"decode_product_{_element(x)}".lower(), "sm_90a"), self._device, shared
        )
        self._run(function, cut.num_blocks, _PRODUCT_THREADS, params, shared)
        tiles = _tiles_of(weights)
        return Parts(parts, tuple(sum(tiles[:i]) for i in range(len(tiles))))

    def embed(
        self,
        sources: "torch.Tensor",
        picked: "torch.Tensor",
        embedding: "torch.Tensor",
        hidden: "torch.Tensor",
        weight: "torch.Tensor",
        epsilon: float,
        out: "torch.Tensor",
    ) -> None:
        """Begin with the embeddings of the tokens, and normalise them.

        Args:
            sources: int64 ``[rows]``: i >= 0 is ``picked[i]``, else the token ``-1 - i``.
            picked: int64, tokens.
            embedding: ``[vocab_size, width]``.
            hidden: ``[rows, width]``, where the embeddings go.
            weight: ``[width]`` of the norm.
            epsilon: of the norm.
            out: ``[rows, width]``, where what is normalised goes.
        """
        addresses = (embedding.data_ptr(), sources.data_ptr(), picked.data_ptr())
        self._normalize(bytes(32), addresses, hidden, weight, epsilon, out)

    def add_and_normalize(
        self,
        parts: Parts,
        hidden: "torch.Tensor",
        weight: "torch.Tensor",
        epsilon: float,
        out: "torch.Tensor",
    ) -> None:
        """Add a product to ``hidden`` and normalise the sum; see `embed`."""
        self._normalize(parts.packed, (0, 0, 0), hidden, weight, epsilon, out)

    def _normalize(
        self,
        parts: bytes,
        addresses: tuple[int, int, int],
        hidden: "torch.Tensor",
        weight: "torch.Tensor",
        epsilon: float,
        out: "torch.Tensor",
    ) -> None:
        width = weight.shape[0]
        params = parts + struct.pack(
            "<6QIf",
            *addresses,
            hidden.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            width,
            epsilon,
        )
        threads = min(_THREADS, -(-width // (128 * _NORM_BLOCKS)) * 32)
        function = self._function(f"decode_normalize_{_element(hidden)}")
        self._run(function, _NORM_BLOCKS * self.rows, threads, params)

    def rotate(
        self,
        parts: Parts,
        biases: "Sequence[torch.Tensor | None]",
        norms: HeadNorms | None,
        rotation: Rotation,
        positions: "torch.Tensor",
        slot_mapping: "torch.Tensor",
        q: "torch.Tensor",
        pages: Pages,
    ) -> None:
        """Finish q, k and v: bias, norm, rotation of halves; and write K and V.

        Args:
            parts: of the product with the weights of q, k and v.
            biases: of q, k and v.
            norms: of the heads of q and k.
            rotation: of all positions that come.
            positions: int64 ``[rows]``.
            slot_mapping: int64 ``[rows]``; below 0 is for rows that are not written.
            q: ``[rows, num_qo_heads, head_dim]``, contiguous, where q goes.
            pages: where k and v go.
        """
        _, num_kv_heads, page_size, head_dim = pages.k.shape
        num_qo_heads = q.shape[1]
        strides = [
            pages_.stride(dim) * pages_.element_size() for pages_ in pages for dim in (0, 1, 2)
        ]
        params = parts.packed + struct.pack(
            "<12Q6q7If",
            *(0 if bias is None else bias.data_ptr() for bias in biases),
            *((0, 0) if norms is None else (norms.q.data_ptr(), norms.k.data_ptr())),
            rotation.cosine.data_ptr(),
            rotation.sine.data_ptr(),
            positions.data_ptr(),
            slot_mapping.data_ptr(),
            q.data_ptr(),
            pages.k.data_ptr(),
            pages.v.data_ptr(),
            *strides,
            *parts.first_tiles,
            num_qo_heads,
            num_kv_heads,
            head_dim,
            page_size,
            0.0 if norms is None else norms.epsilon,
        )
        pieces = (num_qo_heads + 2 * num_kv_heads) * head_dim // 8
        function = self._function(f"decode_rotate_{_element(q)}")
        self._run(function, (-(-pieces // _THREADS), self.rows), _THREADS, params)

    def gate(self, parts: Parts, out: "torch.Tensor") -> None:
        """Put ``silu(gate) * up`` of a product with both weights into ``out`` ``[rows, width]``."""
        width = out.shape[1]
        params = parts.packed + struct.pack("<Q2I", out.data_ptr(), parts.first_tiles[1], width)
        function = self._function(f"decode_gate_{_element(out)}")
        self._run(function, (-(-width // (4 * _THREADS)), self.rows), _THREADS, params)

    def _function(self, name: str) -> object:
        return load(find(name.lower(), "sm_90a"), self._device, 0)

    def _run(
        self,
        function: object,
        grid: int | tuple[int, int],
        threads: int,
        params: bytes,
        shared_bytes: int = 0,
    ) -> None:
        launch = Launch(function, grid, threads, shared_bytes, params, overlap=True)
        launch.run(stream_of(self._device))


def _tiles_of(weights: "Sequence[torch.Tensor]") -> list[int]:
    return [-(-weight.shape[0] // _TILE) for weight in weights]


def _cut_of(weights: "Sequence[torch.Tensor]", device: int) -> Cut:
    num_blocks = limits(device).num_multiprocessors
    return cut_product(sum(_tiles_of(weights)), weights[0].shape[1], num_blocks)


def _packed_weights(weights: "Sequence[torch.Tensor]") -> bytes:
    """Return the bytes of `Weights` in `cuda/decode/product.cuh`."""
    tiles = _tiles_of(weights)
    ends = [sum(tiles[: i + 1]) for i in range(MAX_WEIGHTS)]
    maps = [_matrix_map(weight, _TILE) for weight in weights]
    maps += [bytes(128)] * (MAX_WEIGHTS - len(maps))
    packed = b"".join(maps) + struct.pack("<3I", *ends)
    return packed.ljust(_WEIGHTS_BYTES, b"\0")


def _element(tensor: "torch.Tensor") -> str:
    return ELEMENTS[dtype_name(tensor)]


def _matrix_map(matrix: "torch.Tensor", box_rows: int) -> bytes:
    """Describe a matrix to the copy engine, in boxes of 64 columns: 128 bytes."""
    cu = driver()
    kinds = cu.CUtensorMapDataType
    kind = {
        "F16": kinds.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        "BF16": kinds.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
    }[_element(matrix)]
    rows, columns = matrix.shape
    result = check(
        cu.cuTensorMapEncodeTiled(
            kind,
            2,
            matrix.data_ptr(),
            [cu.cuuint64_t(columns), cu.cuuint64_t(rows)],
            [cu.cuuint64_t(matrix.stride(0) * matrix.element_size())],
            [cu.cuuint32_t(_DEPTH), cu.cuuint32_t(box_rows)],
            [cu.cuuint32_t(1)] * 2,
            cu.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            cu.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            cu.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
            cu.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        ),
        "cuTensorMapEncodeTiled",
    )
    return ctypes.string_at(int(result.getPtr()), 128)
