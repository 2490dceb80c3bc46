"""Scheduling policies: who goes first, and who may be displaced for whom."""

from .base import Job, SchedulingPolicy

__all__ = ["Job", "SchedulingPolicy"]
