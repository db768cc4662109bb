"""Real text that is on every machine: the source of the running interpreter's standard library.

About 30 MB of Python. It differs a little between Python versions, so its hash goes into every run.
"""

import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gnmr.errors import RecipeError

HELD_OUT = 20
"""One file of so many is held out, chosen by the hash of its name."""

_FOREIGN = {"site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True)
class EmbeddedText:
    """The two parts of the text.

    Attributes:
        train: the files to learn from, in the order of their names.
        validation: the files that are held out.
        sha256: of all names and contents.
        skipped: how many files are left out, since they are empty or no UTF-8: the library tests its own handling of
            other encodings.
    """

    train: tuple[bytes, ...]
    validation: tuple[bytes, ...]
    sha256: str
    skipped: int


def embedded_text(root: Path | None = None) -> EmbeddedText:
    """Read every ``*.py`` of the standard library that is valid UTF-8.

    Args:
        root: another folder in its place.

    Raises:
        gnmr.RecipeError: there is no source (a stripped or zipped installation), or nothing to hold out.
    """
    root = Path(sysconfig.get_path("stdlib")) if root is None else root
    digest, skipped = hashlib.sha256(), 0
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for name, content in _sources(root):
        if not content or not _is_utf8(content):
            skipped += 1
            continue
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
        parts[_is_held_out(name)].append(content)
    train, validation = parts
    if not train or not validation:
        raise RecipeError(
            f"{root}: this Python comes without the source of its standard library ({len(train)} files to learn from, "
            f"{len(validation)} to hold out): set data.name to a file of your own"
        )
    return EmbeddedText(tuple(train), tuple(validation), digest.hexdigest(), skipped)


def _sources(root: Path) -> Iterator[tuple[str, bytes]]:
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix()):
        name = path.relative_to(root)
        if _FOREIGN & set(name.parts):
            continue
        yield name.as_posix(), path.read_bytes()


def _is_utf8(content: bytes) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True


def _is_held_out(name: str) -> bool:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) % HELD_OUT == 0
