"""KV events: which blocks there are, told as they come and go, within the process and to routers elsewhere."""

from .log import Cleared, EventBatch, EventLog, KvEvent, Removed, Stored, Subscription

__all__ = ["Cleared", "EventBatch", "EventLog", "KvEvent", "Removed", "Stored", "Subscription"]
