"""What the benchmarks share: a quiet process, the time of a call, and the place of their tables in README.md."""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from gnmr._machine import cpu_name

# glibc gives large blocks back to the system and asks for them again: page faults would be half of the noise.
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "4294967296", "MALLOC_TRIM_THRESHOLD_": "68719476736"}
README = Path(__file__).with_name("README.md")


def write(name: str, section: str, path: Path = README) -> None:
    """Replace the part of a page between the markers of a benchmark, or add it."""
    text = path.read_text() if path.exists() else "# Benchmarks\n"
    begin, end = _marks(name)
    block, before = f"{begin}\n{section}\n{end}", written(name, path)
    path.write_text(text.replace(before, block) if before else f"{text.rstrip()}\n\n{block}\n")


def written(name: str, path: Path) -> str:
    """Return the part of a page that a benchmark has written, with its markers; nothing if it has not."""
    text, (begin, end) = path.read_text() if path.exists() else "", _marks(name)
    return text[text.index(begin) : text.index(end) + len(end)] if begin in text else ""


def _marks(name: str) -> tuple[str, str]:
    return f"<!-- {name} begins -->", f"<!-- {name} ends -->"


def machine() -> str:
    """Name the processor and how much of it a benchmark uses."""
    return f"{cpu_name()}, {os.cpu_count()} cores, one used"


def timed(work: Callable[[], object]) -> float:
    """Return the CPU seconds of a call, which on one thread are the wall seconds of an idle core."""
    begin = time.process_time()
    work()
    return time.process_time() - begin


def run(main: Callable[[], None]) -> None:
    """Run ``main`` in a process of one thread that keeps its memory."""
    wanted = KEEP_MEMORY | {"OMP_NUM_THREADS": "1"}
    if wanted.items() <= os.environ.items():
        main()
    else:
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | wanted)  # noqa: S606
