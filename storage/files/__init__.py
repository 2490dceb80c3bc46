"""Files: how bytes get to a disk so that a crash leaves the old or the new, and segments of checksummed frames."""
