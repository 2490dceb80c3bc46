"""An eviction policy for Octavo: whoever fills the cache makes room in it."""

from .policy import TenantFairLru

__all__ = ["TenantFairLru"]
