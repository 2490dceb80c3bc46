"""The engine of ``octavo top``'s tests is that of the engine's own."""

from octavo.tests.engine.conftest import engine_of

__all__ = ["engine_of"]
