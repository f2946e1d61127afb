"""What every test needs of its own process."""

from __future__ import annotations

import signal

# A shell that runs pytest in the background makes it ignore SIGINT, and whatever the tests start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
