"""The engine: cache, scheduler, step loop and model."""
