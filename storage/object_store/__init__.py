"""The object store tier: blocks that several engines share through a bucket (extra ``object-store``)."""

from .tier import ObjectStoreOptions, ObjectStoreTier

__all__ = ["ObjectStoreOptions", "ObjectStoreTier"]
