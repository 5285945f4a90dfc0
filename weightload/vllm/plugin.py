"""Entry point of the group ``vllm.general_plugins``: makes the load format known to vLLM."""

from __future__ import annotations

__all__ = ["register"]


def register() -> None:
    """Register the load format ``weightload``. Safe to call again."""
    import weightload.vllm.loader  # noqa: F401
