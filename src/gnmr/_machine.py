"""What the processor is called, and what it can do."""

import platform
from pathlib import Path

_INFO = Path("/proc/cpuinfo")


def cpu_name() -> str:
    """Return the processor's name, as well as the system tells it."""
    return _field("model name") or platform.processor() or platform.machine()


def cpu_flags() -> frozenset[str]:
    """Return the processor's instruction sets by the kernel's names (``avx512_vnni``); empty where none are told."""
    return frozenset((_field("flags") or _field("Features") or "").split())  # x86, ARM


def _field(name: str) -> str | None:
    lines = _INFO.read_text().splitlines() if _INFO.is_file() else []
    found = (line.partition(":") for line in lines)
    return next((value.strip() for key, _, value in found if key.strip() == name), None)
