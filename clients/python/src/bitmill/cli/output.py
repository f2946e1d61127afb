"""What the command line prints: results on standard output, everything else on standard error."""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC

from google.protobuf import json_format
from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp
from rich import filesize
from rich.console import Console
from rich.table import Table

# A pipe has no width: nothing is wrapped or cut there.
_PIPE_WIDTH = 10_000
# A terminal obeys them, whoever wrote them: a checkpoint's tensor names come here, and what a model generated.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class OutputError(Exception):
    """Standard output takes no more, as on a full disk."""


def console(*, stderr: bool = False) -> Console:
    """Returns a console on standard output or error as they are now."""
    stream = sys.stderr if stderr else sys.stdout
    # None: closed by the caller, who wants none of it.
    is_terminal = stream is not None and stream.isatty()
    return Console(file=stream, highlight=False, width=None if is_terminal else _PIPE_WIDTH)


def emit(message: Message) -> None:
    """Prints a message as canonical protobuf JSON on one line, fields with default values too."""
    write(json_format.MessageToJson(message, indent=None, always_print_fields_with_no_presence=True) + "\n")


def write(text: str) -> None:
    """Writes text to standard output at once; OutputError when that takes none."""
    if sys.stdout is None:
        return  # Closed by the caller, who wants none of it.
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise  # The reader has had enough.
    except OSError as error:
        # What is left in the buffer must not fail once more when the interpreter ends.
        with open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), sys.stdout.fileno())
        raise OutputError(f"cannot write to standard output: {error.strerror}") from error


def note(text: str) -> None:
    """Prints a line on standard error."""
    print(text, file=sys.stderr, flush=True)


def complain(text: str, *hints: str) -> None:
    """Prints an error and its hints on standard error."""
    note(plain("\n".join([f"error: {text}", *(f"  {hint}" for hint in hints)])))


def plain(text: str) -> str:
    """Returns a text without what would control a terminal, but for ends of lines and tabs."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Prints a table; a cell that does not fit the terminal is folded, never cut."""
    _print(grid(columns, rows))


def grid(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Returns the table that `table` prints."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        made.add_column(column, overflow="fold")
    for row in rows:
        made.add_row(*map(plain, row))
    return made


def facts(rows: Iterable[tuple[str, str]]) -> None:
    """Prints names and values, those with a value only."""
    made = Table(box=None, pad_edge=False, show_header=False)
    made.add_column(style="bold", no_wrap=True)
    made.add_column(overflow="fold")
    for name, value in rows:
        if value:
            made.add_row(name, plain(value))
    _print(made)


def _print(made: Table) -> None:
    """Prints a table without the spaces that fill its last column."""
    screen = console()
    # Rich writes to a string: `write` alone knows what to do when standard output takes no more.
    page = Console(
        file=io.StringIO(),
        highlight=False,
        width=screen.width,
        force_terminal=screen.is_terminal,
        color_system=screen.color_system,  # type: ignore[arg-type]  # one of the names that it takes
    )
    page.print(made, markup=False)
    write("".join(f"{line.rstrip()}\n" for line in page.file.getvalue().splitlines()))  # type: ignore[attr-defined]


def word(enum: EnumTypeWrapper, value: int) -> str:
    """Returns an enum value without its prefix in lower case; empty for the unspecified one."""
    if not value:
        return ""
    prefix = enum.Name(0).removesuffix("UNSPECIFIED")
    return enum.Name(value).removeprefix(prefix).lower() if value in enum.values() else str(value)


def size(number: int) -> str:
    """Returns a number of bytes in decimal units; empty for 0."""
    return filesize.decimal(number) if number else ""


def time(timestamp: Timestamp) -> str:
    """Returns a time in the local zone; empty for an unset one."""
    if not timestamp.ByteSize():
        return ""
    return timestamp.ToDatetime(tzinfo=UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S")
