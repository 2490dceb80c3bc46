"""One file for each kind of route: it reads a wire form, asks the engine, and writes a wire form."""
