"""Shows the answers while they are written."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from chunkcache.engine import StreamOutput

_QUESTION_WIDTH = 34
_REFRESHES_PER_SECOND = 8


class Display:
    """A live table of all users on a terminal; elsewhere one line per finished answer."""

    def __init__(self, console: Console, questions: list[str], title: str) -> None:
        """Show nothing yet."""
        self._console = console
        self._questions = questions
        self._title = title
        self._answers = [""] * len(questions)
        self._begun = [False] * len(questions)
        self._finished = [False] * len(questions)
        self._num_tokens = 0
        self._begin = time.perf_counter()
        self._live = Live(
            console=console,
            get_renderable=self._table,
            refresh_per_second=_REFRESHES_PER_SECOND,
            transient=False,
        )

    def __enter__(self) -> Self:
        """Begin the clock and the display."""
        self._begin = time.perf_counter()
        if self._console.is_terminal:
            self._live.start()
        else:
            self._line(f"{self._title}: {len(self._questions)} users")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leave the last state on the screen."""
        if self._console.is_terminal:
            self._live.stop()

    def show(self, piece: StreamOutput) -> None:
        """Add a piece of an answer."""
        user = piece.request_index
        self._answers[user] += piece.text
        self._num_tokens += len(piece.token_ids)
        if not self._begun[user] and not self._console.is_terminal:
            seconds = piece.request.time_to_first_token
            self._line(f"user {user + 1}: first token after {seconds:.1f} s")
        self._begun[user] = True
        if piece.finish_reason is not None:
            self._finished[user] = True
            if not self._console.is_terminal:
                self._line(f"user {user + 1}: {_one_line(self._questions[user])}")
                self._line(f"  {_one_line(self._answers[user])}")

    def _line(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _table(self) -> Table:
        seconds = time.perf_counter() - self._begin
        table = Table(
            title=f"{self._title}: {sum(self._begun)} of {len(self._questions)} users answered, "
            f"{sum(self._finished)} done, {self._num_tokens} tokens, {seconds:.1f} s",
            title_justify="left",
            title_style="bold",
            expand=True,
            box=None,
            pad_edge=False,
        )
        table.add_column("user", justify="right", width=4)
        table.add_column("question", width=_QUESTION_WIDTH, no_wrap=True, overflow="ellipsis")
        table.add_column("answer", ratio=1, no_wrap=True)
        width = max(10, self._console.width - _QUESTION_WIDTH - 8)
        for user, question in enumerate(self._questions):
            style = "green" if self._finished[user] else ""
            answer = _one_line(self._answers[user]) or ("waiting" if not self._begun[user] else "")
            # The end of an answer is where it grows.
            shown = answer if len(answer) <= width else "…" + answer[-(width - 1) :]
            dimmed = "dim" if not self._begun[user] else style
            table.add_row(str(user + 1), Text(question), Text(shown, style=dimmed))
        return table


def _one_line(text: str) -> str:
    return " ".join(text.split())
