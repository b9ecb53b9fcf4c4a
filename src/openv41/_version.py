"""The version, in a file that imports nothing, so that building the package does not need torch."""

__version__ = "0.1.0"
