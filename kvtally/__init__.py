"""kvtally: KV-cache reuse for vLLM that proves itself."""

__version__ = "0.1.0"
