"""Recorded traces, as their publishers wrote them.

Three formats are read:

- Mooncake (kvcache-ai/Mooncake): JSON lines with ``timestamp`` (milliseconds), ``input_length``,
  ``output_length`` and ``hash_ids``, one for each block of 512 tokens of the prompt.
- Azure (AzurePublicDataset, 2023 and 2024): CSV with ``TIMESTAMP``, ``ContextTokens`` and
  ``GeneratedTokens``. It says nothing of what prompts have in common.
- agent tokens: JSON lines with ``timestamp_us``, ``input_ids`` and ``output_ids``; the token ids
  themselves.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Any, NoReturn

from chunkcache.errors import InvalidConfigError

MOONCAKE_BLOCK = 512
_AZURE_COLUMNS = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]
_MAX_TOKEN_ID = 2**32 - 1


class TraceFormat(StrEnum):
    """The formats."""

    MOONCAKE = "mooncake"
    AZURE = "azure"
    AGENT = "agent"


@dataclass(frozen=True)
class TraceEntry:
    """A request of a trace.

    Attributes:
        line: where it stands in the file, from 1.
        seconds: when it came, on the trace's own clock.
        num_input_tokens: length of the prompt.
        num_output_tokens: length of the answer.
        hash_ids: of the prompt's blocks; empty if the trace has none.
        token_ids: of the prompt; empty if the trace has none.
    """

    line: int
    seconds: float
    num_input_tokens: int
    num_output_tokens: int
    hash_ids: tuple[int, ...] = ()
    token_ids: tuple[int, ...] = ()


def read_trace(
    path: Path, trace_format: TraceFormat | None = None, max_requests: int | None = None
) -> tuple[TraceFormat, list[TraceEntry]]:
    """Read the requests of a trace, by time.

    Args:
        path: the file.
        trace_format: how it is written; None to tell by its first line.
        max_requests: read no more than the first so many.

    Raises:
        InvalidConfigError: the file is none of the formats; the message names line and field.
        OSError: the file cannot be read.
    """
    lines = _Lines(path)
    found = trace_format or _format_of(lines)
    parse = {
        TraceFormat.MOONCAKE: _mooncake,
        TraceFormat.AZURE: _azure,
        TraceFormat.AGENT: _agent,
    }[found]
    entries: list[TraceEntry] = []
    for entry in parse(lines):
        entries.append(entry)
        if len(entries) == max_requests:
            break
    if not entries:
        raise InvalidConfigError(f"trace {path} has no requests; allowed is at least one")
    return found, sorted(entries, key=lambda entry: entry.seconds)


class _Lines:
    """The lines of a file that are not blank, and the errors in them."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __iter__(self) -> Iterator[tuple[int, str]]:
        with self.path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                try:
                    text = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                except UnicodeDecodeError as error:
                    self.refuse(number, None, f"is not UTF-8 ({error.reason})", "text")
                if text:
                    yield number, text

    def refuse(self, line: int, field: str | None, given: str, allowed: str) -> NoReturn:
        where = f"trace {self.path}, line {line}" + (f", field {field}" if field else "")
        raise InvalidConfigError(f"{where}: {given}; allowed is {allowed}") from None


def _format_of(lines: _Lines) -> TraceFormat:
    for number, text in lines:
        if not text.startswith("{"):
            if text.split(",")[0].strip() == _AZURE_COLUMNS[0]:
                return TraceFormat.AZURE
            break
        keys = _json_object(lines, number, text).keys()
        if "hash_ids" in keys:
            return TraceFormat.MOONCAKE
        if "input_ids" in keys:
            return TraceFormat.AGENT
        lines.refuse(
            number, "hash_ids", "is missing, and so is input_ids", "a Mooncake or agent trace"
        )
    raise InvalidConfigError(
        f"trace {lines.path} is none of the known formats; allowed are JSON lines with hash_ids "
        f"(Mooncake) or input_ids (agent), or CSV with the columns {', '.join(_AZURE_COLUMNS)}"
    )


def _mooncake(lines: _Lines) -> Iterator[TraceEntry]:
    for number, text in lines:
        record = _json_object(lines, number, text)
        milliseconds = _number(lines, number, record, "timestamp")
        num_input = _count(lines, number, record, "input_length")
        num_output = _count(lines, number, record, "output_length")
        hash_ids = _ids(lines, number, record, "hash_ids", None)
        num_blocks = -(-num_input // MOONCAKE_BLOCK)
        if len(hash_ids) != num_blocks:
            lines.refuse(
                number,
                "hash_ids",
                f"has {len(hash_ids)} ids",
                f"{num_blocks}, one for each {MOONCAKE_BLOCK} of input_length {num_input}",
            )
        yield TraceEntry(number, milliseconds / 1e3, num_input, num_output, hash_ids=hash_ids)


def _agent(lines: _Lines) -> Iterator[TraceEntry]:
    for number, text in lines:
        record = _json_object(lines, number, text)
        microseconds = _number(lines, number, record, "timestamp_us")
        tokens = _ids(lines, number, record, "input_ids", _MAX_TOKEN_ID)
        answer = _ids(lines, number, record, "output_ids", _MAX_TOKEN_ID)
        yield TraceEntry(number, microseconds / 1e6, len(tokens), len(answer), token_ids=tokens)


def _azure(lines: _Lines) -> Iterator[TraceEntry]:
    rows = iter(lines)
    number, header = next(rows, (1, ""))
    columns = [column.strip() for column in header.split(",")]
    for column in _AZURE_COLUMNS:
        if column not in columns:
            lines.refuse(number, column, "is missing", f"a header with {','.join(_AZURE_COLUMNS)}")
    first: datetime | None = None
    for number, text in rows:
        values = next(csv.reader([text]))
        if len(values) != len(columns):
            field = columns[len(values)] if len(values) < len(columns) else None
            lines.refuse(number, field, f"{len(values)} columns", f"{len(columns)}")
        record: dict[str, Any] = dict(zip(columns, values, strict=True))
        try:
            moment = datetime.fromisoformat(record["TIMESTAMP"].strip())
            first = first or moment
            seconds = (moment - first).total_seconds()
        except (ValueError, TypeError):
            given = f"is {record['TIMESTAMP']!r}"
            lines.refuse(number, "TIMESTAMP", given, "a date and time in the form of the first")
        for column in _AZURE_COLUMNS[1:]:
            try:
                record[column] = int(record[column])
            except ValueError:
                lines.refuse(number, column, f"is {record[column]!r}", "a number of tokens")
        yield TraceEntry(
            number,
            seconds,
            _count(lines, number, record, "ContextTokens"),
            _count(lines, number, record, "GeneratedTokens"),
        )


def _json_object(lines: _Lines, number: int, text: str) -> dict[str, Any]:
    try:
        record = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        lines.refuse(number, None, f"is not JSON ({error})", "one object on each line")
    if not isinstance(record, dict):
        lines.refuse(number, None, f"is a {type(record).__name__}", "one object on each line")
    return record


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def _field(lines: _Lines, number: int, record: dict[str, Any], field: str) -> Any:
    if field not in record:
        lines.refuse(number, field, "is missing", "a line with every field of the format")
    return record[field]


def _number(lines: _Lines, number: int, record: dict[str, Any], field: str) -> float:
    value = _field(lines, number, record, field)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0 <= value < 1e18:
        lines.refuse(number, field, f"is {_shown(value)}", "a time of at least 0")
    return float(value)


def _count(lines: _Lines, number: int, record: dict[str, Any], field: str) -> int:
    value = _field(lines, number, record, field)
    if not _is_int(value) or value < 1:
        lines.refuse(number, field, f"is {_shown(value)}", "an int of at least 1")
    return int(value)


def _ids(
    lines: _Lines, number: int, record: dict[str, Any], field: str, most: int | None
) -> tuple[int, ...]:
    values = _field(lines, number, record, field)
    if not isinstance(values, list) or not values:
        lines.refuse(number, field, f"is {_shown(values)}", "a list of at least one id")
    for value in values:
        if not _is_int(value) or value < 0 or (most is not None and value > most):
            allowed = "ids of at least 0" if most is None else f"ids in [0, {most}]"
            lines.refuse(number, field, f"has {_shown(value)}", allowed)
    return tuple(values)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
