"""Tensor parallelism: one model over the processes (ranks) of one ``torchrun`` job, for models that one device cannot
hold.

Transformers' own plan says how the weights are cut. Rank 0 has the engine; its runner tells the other ranks each call,
and they carry it out on their shares. Every rank keeps the K and V of its heads, and only rank 0 chooses tokens.
Outside of the devices a block is the same bytes as on one rank, so tiers and snapshots are shared with engines of any
size.
"""
