"""The system prompt and the questions of the demo."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from chunkcache.errors import InvalidConfigError


@dataclass(frozen=True)
class DemoInputs:
    """What the demo serves.

    Attributes:
        system_prompt: the text in front of every question.
        questions: one for each user.
    """

    system_prompt: str
    questions: list[str]

    def chats(self) -> list[list[dict[str, str]]]:
        """Return the chat of each user, as messages."""
        return [
            [
                {"role": "system", "content": self.system_prompt},
                {"role": "user", "content": question},
            ]
            for question in self.questions
        ]


def load_inputs(prompt: Path | None, questions: Path | None) -> DemoInputs:
    """Read the caller's files, or those of the package where a path is None.

    Raises:
        InvalidConfigError: a file holds nothing to serve.
    """
    data = files("chunkcache.cli.demo") / "data"
    prompt_text = (prompt or data / "system_prompt.md").read_text(encoding="utf-8").strip()
    question_text = (questions or data / "questions.txt").read_text(encoding="utf-8")
    lines = [line.strip() for line in question_text.splitlines() if line.strip()]
    if not prompt_text:
        raise InvalidConfigError(f"prompt {prompt} is empty; allowed is a file with text")
    if not lines:
        raise InvalidConfigError(f"questions {questions} is empty; allowed is one per line")
    return DemoInputs(prompt_text, lines)
