"""Keeps transformers from talking over the caller's own output."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Keep transformers from drawing bars of its own."""
    import transformers

    logging: Any = transformers.utils.logging

    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            logging.enable_progress_bar()
