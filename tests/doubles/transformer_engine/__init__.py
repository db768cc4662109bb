"""A recording double of TransformerEngine's documented interface (2.9 to 2.20), on the CPU.

A module rounds its operands to E4M3 where its region is enabled, and notes in ``log`` what ran under which region.
"""

__version__ = "2.20.0"

log: list[dict] = []
"""What happened: forwards of modules, and reductions of amax at the end of the outermost regions."""

chip = {"fp8": (True, ""), "mxfp8": (False, "MXFP8 needs compute capability 10.0"), "block": (True, "")}
"""What the chip has, and why not."""
