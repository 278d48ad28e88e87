"""The errors of a lease that cannot be served, with every figure that explains them.

Runs in: trainer.
"""

from __future__ import annotations

from mpwriter._memory import Headroom
from mpwriter._segment import ClaimError
from mpwriter.errors import StagingMemoryError

__all__ = ["cannot_claim", "not_admitted"]


def not_admitted(
    needed: int, budget: int, leased: int, available: Headroom, waited_s: float
) -> StagingMemoryError:
    """No room for `needed` bytes, before anything was claimed.

    Args:
        leased: bytes that other saves hold.
        waited_s: how long they were waited for; 0 where waiting is of no use.
    """
    if needed > budget:
        reason = f"staging_budget_bytes is {budget}"
    else:
        system = f"{available.limited_by} leaves {available.nbytes} bytes"
        reason = f"staging_budget_bytes is {budget} and {system}"
        if leased:
            waited = f" and were not released within {waited_s:g} s" if waited_s else ""
            reason = f"{leased} bytes are leased to other saves{waited} ({reason})"
    return StagingMemoryError(
        f"staging needs {needed} bytes of shared memory, but {reason}",
        needed_bytes=needed,
        budget_bytes=budget,
        available_bytes=available.nbytes,
    )


def cannot_claim(needed: int, budget: int, exc: ClaimError) -> StagingMemoryError:
    """The budget has room for `needed` bytes, but the system did not give them."""
    return StagingMemoryError(
        f"cannot claim shared memory to stage {needed} bytes: {exc} "
        f"(staging_budget_bytes is {budget})",
        needed_bytes=needed,
        budget_bytes=budget,
        available_bytes=exc.available_bytes,
    )
