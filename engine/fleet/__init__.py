"""Several engines behind one door: the gateway, and what carries its requests to replicas.

Each replica is one engine with its whole HTTP app. The gateway reads a request, works out which blocks its prompt has
(a tokenizer is enough for that), and sends it where most of them lie; what comes back goes on to the client as it is.
"""
