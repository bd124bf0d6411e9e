"""Whose work something is, and what share of the service it may have."""

from dataclasses import dataclass

STEP_TOKENS = 64
"""A step of decoding costs as much as the prefill of so many tokens, shared by its sessions."""
DECODED_TOKENS = STEP_TOKENS // 4
"""What a decoded token costs, in prefilled ones, where the number of sessions in its step is unknown."""


@dataclass(frozen=True)
class Share:
    """Work of a tenant, beside which others' work gets its turns in proportion to the weights.

    `flow`: within the tenant, flows share evenly: a key, or a session where there is none.
    `background`: nobody waits for it, so it comes after all other work.
    """

    tenant: str = ""
    flow: str = ""
    weight: float = 1.0
    background: bool = False
