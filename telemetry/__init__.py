"""What the engine says about itself. The library configures neither logging nor tracing for its host."""
