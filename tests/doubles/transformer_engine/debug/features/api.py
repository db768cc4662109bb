"""The base of features."""


class TEConfigAPIMapper:
    """Reads a feature's configuration."""
