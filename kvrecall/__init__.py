"""Conversational memory for self-hosted LLMs. `import kvrecall` loads the HTTP client only."""

from importlib.metadata import version

from kvrecall.client import AsyncKvrecallClient, KvrecallClient, KvrecallError

__version__ = version("kvrecall")

__all__ = ["AsyncKvrecallClient", "KvrecallClient", "KvrecallError", "__version__"]
