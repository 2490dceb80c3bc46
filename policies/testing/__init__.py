"""The kit for authors of policies: the contracts as tests, and what they are made of.

Say how the policy is made, and run pytest; nothing else is needed:

.. code-block:: python

    from octavo.policies.testing import EvictionPolicyContract

    class TestMyPolicy(EvictionPolicyContract):
        def make(self, capacity: int) -> EvictionPolicy:
            return MyPolicy(capacity)

:class:`EvictionPolicyContract` holds a policy to this:

* it names candidates only: never what is held, has something after it, or is gone; not in random walks either, with
  splits, growth, evicted runs that come back with their memories, and entries whose retention changes;
* it gives up everything at last, also while parents become candidates between two victims;
* the same events give the same victims;
* a victim costs O(log n) at most, counted in calls and looks at entries, so the machine does not matter; and it
  remembers no more than a pool's worth, however long it runs;
* it can take over in the middle (memories are ``None`` then), and its state is plain data that a new object can load,
  whole, in part or damaged.

:class:`SchedulingPolicyContract` does the same for policies that rank requests: ranks are tuples of numbers, asking
changes nothing, nobody displaces who would displace him, and nobody starves where the policy claims that.

:class:`RoutingPolicyContract` is for policies that rank replicas: each once, those that are to be avoided last, asking
changes nothing, and the same events give the same choices.

:class:`PrefixModel` plays the engine and can drive tests of your own; :func:`play` does one random act with it. The kit
needs what Octavo needs and ``assert``; pytest only finds and runs the tests.
"""

from .eviction import EvictionPolicyContract
from .model import Evicted, Ghost, PrefixModel, play, walk
from .routing import RoutingPolicyContract
from .scheduling import SchedulingPolicyContract

__all__ = [
    "Evicted",
    "EvictionPolicyContract",
    "Ghost",
    "PrefixModel",
    "RoutingPolicyContract",
    "SchedulingPolicyContract",
    "play",
    "walk",
]
