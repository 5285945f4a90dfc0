"""Entry point of the group ``vllm.general_plugins``: makes load format and transports known to vLLM."""

from __future__ import annotations

__all__ = ["register"]


def register() -> None:
    """Register the load format ``weightload`` and the transfer engines. Safe to call again."""
    import weightload.vllm.loader  # noqa: F401
    from weightload.vllm import transfer

    transfer.register()
