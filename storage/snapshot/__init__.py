"""Snapshots: a cache in one folder, written all at once, read as a tier that takes no writes."""

from .backend import FolderBackend

__all__ = ["FolderBackend"]
