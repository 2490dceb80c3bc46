"""Maintenance: what the command line does with stored caches, without an engine."""
