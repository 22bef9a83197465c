"""Shows how far the benchmark is and how long it will take."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from chunkcache.cli.serve_bench.budget import TimeBudget


class BenchProgress:
    """A bar over the requests to serve on a terminal; elsewhere a line for each run."""

    def __init__(self, console: Console, num_requests: int, budget: TimeBudget) -> None:
        """Begin with nothing served.

        Args:
            console: where it is shown.
            num_requests: of all runs together, as far as is known.
            budget: the time that is left at most.
        """
        self._console = console
        self._budget = budget
        self._total = num_requests
        self._done = 0
        self._begin = time.perf_counter()
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("requests"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=num_requests, left="")

    def __enter__(self) -> Self:
        """Show the bar."""
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leave the bar as it is."""
        self._bar.stop()

    def begin(self, what: str) -> None:
        """Name what runs now."""
        self._bar.update(self._task, description=what)
        if not self._console.is_terminal:
            left = f", {self._left()}" if self._done else ""
            self._line(f"{what} ({self._done} of {self._total} requests{left})")

    def expect(self, num_requests: int) -> None:
        """Note requests that there are beyond those known so far, or that fall away."""
        self._total += num_requests
        self._bar.update(self._task, total=self._total)

    def advance(self, num_requests: int = 1) -> None:
        """Note requests that were served, or need not be."""
        self._done += num_requests
        self._bar.update(self._task, advance=num_requests, left=self._left())

    def _left(self) -> str:
        if not self._done:
            return ""
        seconds = time.perf_counter() - self._begin
        left = seconds / self._done * (self._total - self._done)
        return f"about {min(left, max(0.0, self._budget.left)):.0f} s left"

    def _line(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)
