"""``octavo bench``: load for any OpenAI-compatible server, and what it did with it (extra ``bench``)."""
