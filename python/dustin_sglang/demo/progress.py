"""Show that something is going on while it takes long."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from tqdm import tqdm


class Progress:
    """A bar for a known number of stages, with the time that has passed. Without a terminal, a line for each stage.

    Parameters
    ----------
    title : str
        What takes long.
    stages : int
        Number of times that `advance` may be called; 0 if nobody knows how far it is.
    """

    def __init__(self, title: str, stages: int = 0) -> None:
        bar = "|{bar:24}| " if stages else ""
        self._live = sys.stderr.isatty()
        self._title = title
        self._bar = tqdm(
            total=stages or None,
            desc=title,
            bar_format=f"{{desc:<44.44}} {bar}{{elapsed}}",
            file=sys.stderr,
            disable=not self._live,
            leave=False,
        )
        if not self._live:
            print(f"{title} ...", file=sys.stderr, flush=True)

    def advance(self, stage: str) -> None:
        """Go one stage further; `stage` says what is being done now."""
        self._bar.update()
        self._bar.set_description_str(f"{self._title}: {stage}")
        if not self._live:
            print(f"{self._title}: {stage} ...", file=sys.stderr, flush=True)

    def refresh(self) -> None:
        """Bring the time on the screen up to date."""
        self._bar.refresh()

    def close(self) -> None:
        """Take the bar off the screen."""
        self._bar.close()


@contextmanager
def waiting(title: str) -> Iterator[Progress]:
    """Keep the time on the screen running, from a thread, until the block ends or closes what it is given."""
    progress = Progress(title)
    done = threading.Event()

    def tick() -> None:
        while not done.wait(0.5):
            progress.refresh()

    ticker = threading.Thread(target=tick, daemon=True)
    ticker.start()
    try:
        yield progress
    finally:
        done.set()
        ticker.join()
        progress.close()
