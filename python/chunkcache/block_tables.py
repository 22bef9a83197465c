"""Plans over paged caches that others manage, from their block tables.

Prefixes that sequences share are found by equal leading page ids.
"""

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from chunkcache import _arrays, _core
from chunkcache._arrays import int_array
from chunkcache._core import Plan

#: Tokens of a sequence, and so of a page, at most: positions are of 31 bits.
_MAX_POSITIONS = 2**31 - 1

_Indices: TypeAlias = npt.NDArray[np.int32] | npt.NDArray[np.int64]


def plan_from_block_tables(
    block_table: Any, seq_lens: Any, page_size: int, qo_indptr: Any = None
) -> Plan:
    """Plan a step over a paged cache that others manage, from vLLM's tables.

    Args:
        block_table: page ids, integers `[sequences, width]`; entries after a sequence's pages are
            not read.
        seq_lens: tokens of each sequence, this step's included, integers `[sequences]`.
        page_size: tokens per page.
        qo_indptr: sequence i has the rows `qo_indptr[i]` to `qo_indptr[i + 1]` of q, which stand
            for its last tokens, integers `[sequences + 1]`; by default one row each.

    Raises:
        InvalidConfigError: tables that do not fit each other, negative ids or lengths, or more rows
            than a sequence has tokens.
    """
    return _core.plan_from_block_tables(
        int_array("block_table", block_table, 2),
        int_array("seq_lens", seq_lens, 1, _MAX_POSITIONS),
        page_size,
        None if qo_indptr is None else int_array("qo_indptr", qo_indptr, 1),
    )


def plan_from_csr(
    kv_indptr: Any, kv_indices: Any, kv_last_page_len: Any, page_size: int, qo_indptr: Any = None
) -> Plan:
    """Plan a step over a paged cache that others manage, from FlashInfer's tables.

    Args:
        kv_indptr: sequence i has the pages `kv_indices[kv_indptr[i]:kv_indptr[i + 1]]`, integers
            `[sequences + 1]`.
        kv_indices: page ids, integers.
        kv_last_page_len: tokens in the last page of each sequence, integers `[sequences]`.
        page_size: tokens per page.
        qo_indptr: sequence i has the rows `qo_indptr[i]` to `qo_indptr[i + 1]` of q, which stand
            for its last tokens, integers `[sequences + 1]`; by default one row each.

    Raises:
        InvalidConfigError: tables that do not fit each other, negative ids or lengths, or more rows
            than a sequence has tokens.
    """
    return _core.plan_from_csr(
        int_array("kv_indptr", kv_indptr, 1),
        int_array("kv_indices", kv_indices, 1),
        int_array("kv_last_page_len", kv_last_page_len, 1, _MAX_POSITIONS),
        page_size,
        None if qo_indptr is None else int_array("qo_indptr", qo_indptr, 1),
    )


class BlockTablePlanner:
    """Plans step after step over a paged cache that others manage, and reuses what it has found.

    Shared prefixes, tables and, on a CUDA device, work items and the copy of the tables are kept
    from plan to plan while sequences only grow: a step that adds no page sends the device nothing.
    Where the batch has changed, everything is found anew. A plan is valid until
    the next one is made::

        planner = BlockTablePlanner(page_size=16)
        while decoding:
            plan = planner.plan(block_table, seq_lens)
            out = attention.run(plan, q, k_pages, v_pages)

    Use one planner for each kind of layer whose head counts differ.

    Attributes:
        page_size: tokens per page.
    """

    def __init__(self, page_size: int) -> None:
        """Begin without tables; they get as large as the batches need.

        Args:
            page_size: tokens per page; on a CUDA device a multiple of 16.

        Raises:
            InvalidConfigError: a page size that is not allowed.
        """
        self._planner = _core.BlockTablePlanner(page_size)
        self.page_size: int = self._planner.page_size

    def plan(
        self, block_table: Any, seq_lens: Any, qo_indptr: Any = None, *, only_grew: bool = False
    ) -> Plan:
        """Plan the next step from vLLM's tables; see `plan_from_block_tables`.

        Args:
            block_table: page ids, integers `[sequences, width]`.
            seq_lens: tokens of each sequence, this step's included, integers `[sequences]`.
            qo_indptr: the rows of each sequence, integers `[sequences + 1]`; by default one each.
            only_grew: promises that each sequence has the full pages of the last plan still, so
                that they are not compared. A batch of another size, or with a sequence that is
                shorter, is found anew all the same.

        Raises:
            InvalidConfigError: as `plan_from_block_tables`; the last plan stays valid then.
        """
        table, lens, rows = _of_one_width(
            int_array("block_table", block_table, 2, keep_int32=True),
            int_array("seq_lens", seq_lens, 1, _MAX_POSITIONS, keep_int32=True),
            _rows(qo_indptr),
        )
        return self._planner.plan(table, lens, rows, _arrays.flag("only_grew", only_grew))

    def plan_csr(
        self,
        kv_indptr: Any,
        kv_indices: Any,
        kv_last_page_len: Any,
        qo_indptr: Any = None,
        *,
        only_grew: bool = False,
    ) -> Plan:
        """Plan the next step from FlashInfer's tables; see `plan_from_csr`.

        Args:
            kv_indptr: offsets of each sequence's pages, integers `[sequences + 1]`.
            kv_indices: page ids, integers.
            kv_last_page_len: tokens in the last page of each sequence, integers `[sequences]`.
            qo_indptr: the rows of each sequence, integers `[sequences + 1]`; by default one each.
            only_grew: as for `plan`.

        Raises:
            InvalidConfigError: as `plan_from_csr`; the last plan stays valid then.
        """
        indptr, indices, last, rows = _of_one_width(
            int_array("kv_indptr", kv_indptr, 1, keep_int32=True),
            int_array("kv_indices", kv_indices, 1, keep_int32=True),
            int_array("kv_last_page_len", kv_last_page_len, 1, _MAX_POSITIONS, keep_int32=True),
            _rows(qo_indptr),
        )
        only_grew = _arrays.flag("only_grew", only_grew)
        return self._planner.plan_csr(indptr, indices, last, rows, only_grew)


def _rows(qo_indptr: Any) -> _Indices | None:
    return None if qo_indptr is None else int_array("qo_indptr", qo_indptr, 1, keep_int32=True)


def _of_one_width(*arrays: Any) -> Any:
    """Return arrays as they are if all are int32, else all as int64; None stays None."""
    if all(array is None or array.dtype == np.int32 for array in arrays):
        return arrays
    return [None if array is None else array.astype(np.int64, copy=False) for array in arrays]
