"""Tool calls: how each family of models writes them, in and out."""
