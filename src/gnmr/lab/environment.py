"""What a run ran on: versions, revision and machine, for its folder and its report."""

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from gnmr._machine import cpu_name
from gnmr.trace import versions


def environment() -> dict[str, Any]:
    """Return JSON-able facts about this machine and this installation."""
    import psutil
    import torch

    packages = ("torch", "transformers", "accelerate", "pytorch-optimizer", "datasets", "tokenizers", "pyarrow")
    return {
        "versions": versions(*packages),
        "revision": _revision(),
        "machine": {
            "cpu": cpu_name(),
            "cores": os.cpu_count(),
            "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
            "system": platform.platform(),
            "threads": torch.get_num_threads(),
        },
    }


def _revision() -> str | None:
    """Return the git revision of the checkout that gnmr runs from, ``+`` if it is changed; None outside one."""
    here = Path(__file__)
    try:
        _git(here, "ls-files", "--error-unmatch", here.name)  # an installed wheel may lie in another's checkout
        revision = _git(here, "rev-parse", "HEAD")
        return revision + ("+" if _git(here, "status", "--porcelain", "--", ":/src") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(file: Path, *arguments: str) -> str:
    command = ["git", "-C", str(file.parent), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
