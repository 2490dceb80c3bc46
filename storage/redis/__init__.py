"""The Redis tier: blocks that several engines share through a Redis or Valkey server (extra ``redis``)."""

from .tier import RedisOptions, RedisTier

__all__ = ["RedisOptions", "RedisTier"]
