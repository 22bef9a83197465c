"""Trace files: what is read, and what is refused with its line and field."""

import json
from pathlib import Path

import pytest

from chunkcache.cli.serve_bench.traces import TraceEntry, TraceFormat, read_trace
from chunkcache.errors import InvalidConfigError

MOONCAKE = {"timestamp": 1500, "input_length": 600, "output_length": 7, "hash_ids": [3, 9]}
AGENT = {"timestamp_us": 2_500_000, "session": "a", "input_ids": [5, 6, 7], "output_ids": [1, 2]}
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens"


@pytest.fixture
def write(tmp_path: Path):
    def write(*lines: str) -> Path:
        path = tmp_path / "trace"
        path.write_text("\n".join(lines) + "\n")
        return path

    return write


def message(path: Path, trace_format: TraceFormat | None = None) -> str:
    with pytest.raises(InvalidConfigError) as caught:
        read_trace(path, trace_format)
    return str(caught.value)


def test_a_mooncake_line_is_read(write) -> None:
    found, entries = read_trace(write(json.dumps(MOONCAKE)))
    assert found is TraceFormat.MOONCAKE
    assert entries == [TraceEntry(1, 1.5, 600, 7, hash_ids=(3, 9))]


def test_an_agent_line_is_read(write) -> None:
    found, entries = read_trace(write(json.dumps(AGENT)))
    assert found is TraceFormat.AGENT
    assert entries == [TraceEntry(1, 2.5, 3, 2, token_ids=(5, 6, 7))]


def test_azure_lines_are_read_relative_to_the_first(write) -> None:
    found, entries = read_trace(
        write(AZURE, "2023-11-16 18:17:03.9799600,4808,10", "2023-11-16 18:17:05.2299600,34,12")
    )
    assert found is TraceFormat.AZURE
    assert entries == [TraceEntry(2, 0.0, 4808, 10), TraceEntry(3, 1.25, 34, 12)]


def test_azure_times_may_have_a_zone(write) -> None:
    path = write(AZURE, "2024-05-10 00:00:00.5+00:00,1,2", "2024-05-10 00:00:02+00:00,3,4")
    assert [entry.seconds for entry in read_trace(path)[1]] == [0.0, 1.5]


def test_requests_are_ordered_by_time(write) -> None:
    late, early = {**MOONCAKE, "timestamp": 9}, {**MOONCAKE, "timestamp": 2}
    _, entries = read_trace(write(json.dumps(late), json.dumps(early)))
    assert [entry.line for entry in entries] == [2, 1]


def test_only_the_first_requests_are_read(write) -> None:
    path = write(*[json.dumps(MOONCAKE)] * 3, "broken")
    assert len(read_trace(path, max_requests=3)[1]) == 3


def test_blank_lines_and_carriage_returns_are_nothing(tmp_path) -> None:
    path = tmp_path / "trace"
    path.write_bytes(b"\xef\xbb\xbf" + AZURE.encode() + b"\r\n\r\n2023-11-16 18:17:03,8,1\r\n")
    assert [entry.line for entry in read_trace(path)[1]] == [3]


@pytest.mark.parametrize("field", MOONCAKE)
def test_a_missing_mooncake_field_is_named(write, field: str) -> None:
    broken = {name: value for name, value in MOONCAKE.items() if name != field}
    text = message(write(json.dumps(MOONCAKE), json.dumps(broken)))
    assert f"line 2, field {field}" in text


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("timestamp", "soon"),
        ("timestamp", -1),
        ("timestamp", True),
        ("timestamp", None),
        ("input_length", 0),
        ("input_length", 600.0),
        ("input_length", True),
        ("output_length", -3),
        ("output_length", [1]),
        ("hash_ids", 3),
        ("hash_ids", []),
        ("hash_ids", [3]),
        ("hash_ids", [3, 9, 10]),
        ("hash_ids", [3, "9"]),
        ("hash_ids", [3, -9]),
    ],
)
def test_a_wrong_mooncake_value_is_named(write, field: str, value: object) -> None:
    text = message(write(json.dumps(MOONCAKE), json.dumps({**MOONCAKE, field: value})))
    assert f"line 2, field {field}" in text
    assert "allowed is" in text


@pytest.mark.parametrize("field", ["timestamp_us", "input_ids", "output_ids"])
def test_a_missing_agent_field_is_named(write, field: str) -> None:
    broken = {name: value for name, value in AGENT.items() if name != field}
    text = message(write(json.dumps(AGENT), json.dumps(broken)))
    assert f"line 2, field {field}" in text


@pytest.mark.parametrize("tokens", [[], [1, -1], [1, 2**32], [1.5], "text"])
def test_wrong_token_ids_are_named(write, tokens: object) -> None:
    text = message(write(json.dumps(AGENT), json.dumps({**AGENT, "input_ids": tokens})))
    assert "line 2, field input_ids" in text


@pytest.mark.parametrize(
    ("line", "field"),
    [
        ("yesterday,8,1", "TIMESTAMP"),
        ("2023-11-16 18:17:03+00:00,8,1", "TIMESTAMP"),
        ("2023-11-16 18:17:03,many,1", "ContextTokens"),
        ("2023-11-16 18:17:03,0,1", "ContextTokens"),
        ("2023-11-16 18:17:03,8,-1", "GeneratedTokens"),
        ("2023-11-16 18:17:03,8,", "GeneratedTokens"),
        ("2023-11-16 18:17:03,8", "GeneratedTokens"),
    ],
)
def test_a_wrong_azure_value_is_named(write, line: str, field: str) -> None:
    text = message(write(AZURE, "2023-11-16 18:17:03,8,1", line))
    assert f"line 3, field {field}" in text


def test_too_many_azure_columns_are_refused(write) -> None:
    assert "line 2: 4 columns" in message(write(AZURE, "2023-11-16 18:17:03,8,1,9"))


def test_a_missing_azure_column_is_named(write) -> None:
    text = message(write("TIMESTAMP,ContextTokens", "2023-11-16 18:17:03,8"))
    assert "line 1, field GeneratedTokens" in text


@pytest.mark.parametrize("line", ["{", "[1]", '{"timestamp": NaN}', "text", "[" * 100_000])
def test_a_line_that_is_no_json_object_is_named(write, line: str) -> None:
    assert "line 2" in message(write(json.dumps(MOONCAKE), line))


def test_a_line_that_is_not_utf8_is_named(tmp_path) -> None:
    path = tmp_path / "trace"
    path.write_bytes(json.dumps(MOONCAKE).encode() + b"\n\xff\xfe\n")
    assert "line 2" in message(path)


def test_an_unknown_format_is_refused_with_the_known_ones(write) -> None:
    text = message(write("time;tokens", "1;2"))
    assert "hash_ids" in text
    assert "TIMESTAMP" in text


def test_json_of_neither_kind_is_refused(write) -> None:
    assert "line 1, field hash_ids" in message(write('{"timestamp": 1}'))


def test_an_empty_file_is_refused(write) -> None:
    assert "none of the known formats" in message(write(""))
    assert "no requests" in message(write(AZURE))


def test_a_given_format_is_not_guessed(write) -> None:
    text = message(write(json.dumps(AGENT)), TraceFormat.MOONCAKE)
    assert "line 1, field timestamp" in text


@pytest.mark.parametrize(
    ("name", "trace_format", "num_requests"),
    [
        ("mooncake_conversation_trace.jsonl", TraceFormat.MOONCAKE, 12_031),
        ("mooncake_synthetic_trace.jsonl", TraceFormat.MOONCAKE, 3_993),
        ("azure2023_code.csv", TraceFormat.AZURE, 8_819),
        ("azure2023_conv.csv", TraceFormat.AZURE, 19_366),
        ("agent_miniswe_smollm2_tokens.jsonl", TraceFormat.AGENT, 332),
    ],
)
def test_published_traces_are_read_whole(
    shared_data: Path, name: str, trace_format: TraceFormat, num_requests: int
) -> None:
    found, entries = read_trace(shared_data / "traces" / name)
    assert (found, len(entries)) == (trace_format, num_requests)
