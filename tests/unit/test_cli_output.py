"""What the command line prints of texts that others wrote."""

from __future__ import annotations

import pytest

from bitmill.cli import output

EVIL = "a\x1b]0;title\x07\x9b31m\r[bold]é"
SHOWN = "a�]0;title��31m�[bold]é"


def test_a_text_controls_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """Escape sequences can retitle it, move its cursor, or write what was never said."""
    output.facts([("name", EVIL)])
    output.table(["NAME"], [[EVIL]])
    output.complain(EVIL, EVIL)
    printed = capsys.readouterr()
    assert printed.out.count(SHOWN) == 2
    assert printed.err == f"error: {SHOWN}\n  {SHOWN}\n"
    assert output.plain("two\nlines\tand a tab") == "two\nlines\tand a tab"
