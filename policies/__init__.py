"""Policies decide, the engine acts: which cached blocks go first, which request runs next."""
