"""A language-model engine inside your asyncio application."""

from asyncllm.version import __version__

__all__ = ["__version__"]
