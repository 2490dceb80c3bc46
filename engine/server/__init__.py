"""An OpenAI-compatible ASGI app around an engine (extra ``server``).

Embed it: ``app.mount("/", create_app(engine))``, or run it: ``octavo serve MODEL``. Everything is pure ASGI; what a
request needs is done in the engine, this package only translates.
"""
