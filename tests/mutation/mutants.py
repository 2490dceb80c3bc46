"""Faults that must not come back: each is a small change of the product's text that at least one of the named tests
must notice.

The first part answers the known faults of the design that Octavo grew from, by number. Where Octavo's structure makes
the letter of a fault impossible, the mutant breaks what corresponds to it, and its note says how.
"""

from __future__ import annotations

from typing import NamedTuple

MANAGER = "engine/kv/cache_manager.py"
CONTROL = "engine/kv/control.py"
PUBLISHING = "engine/kv/publishing.py"
TREE = "engine/kv/prefix_tree.py"
POOL = "engine/kv/block_pool.py"
RUNS = "engine/kv/free_runs.py"
TABLE = "engine/kv/block_table.py"
EVICTION = "engine/kv/eviction.py"
IN_FLIGHT = "engine/kv/in_flight.py"
SEQUENCE = "engine/kv/sequence.py"
KEEP = "engine/kv/keep.py"
RETENTION = "engine/kv/retention.py"
NAMES = "engine/kv/names.py"
LOADS = "engine/kv/loads.py"
FORGET = "engine/kv/forget.py"
LEASES = "engine/kv/leases.py"
EXPLAIN = "engine/kv/explain.py"
IMAGE = "engine/kv/image.py"
TENSORS = "engine/model/attention/kv_tensors.py"
LRU = "policies/eviction/lru.py"
PRIORITY_TTL = "policies/eviction/priority_ttl.py"
TRIALS = "policies/eviction/trials.py"
GITTINS = "policies/eviction/gittins.py"
FAIR = "policies/scheduling/fair.py"
REPLICA = "policies/replica.py"
CLAIRVOYANT = "policies/simulator/clairvoyant.py"
CONTAINMENT = "engine/kv/containment.py"
QUOTA_RULES = "engine/quotas.py"
RECORDING = "engine/recording.py"
SHADOWS = "engine/insight/shadows.py"
TIER_POLICIES = "engine/tier_policies.py"
SCHEDULER = "engine/scheduler.py"
LOOP = "engine/loop.py"
COMMIT = "engine/commit.py"
DELIVERY = "engine/delivery.py"
SUBMISSION = "engine/submission.py"
MEASURES = "engine/insight/measures.py"
READINGS = "engine/insight/readings.py"
METRICS = "engine/insight/metrics.py"
LOADING = "engine/loading.py"
WARMING = "engine/warming.py"
REQUEST_TRACE = "engine/insight/request_trace.py"
RECORD = "telemetry/record.py"
TRACING = "telemetry/tracing.py"
EVENT_LOG = "telemetry/events/log.py"
ACCESS = "engine/server/access.py"
CALL = "engine/server/call.py"
ENDPOINT = "engine/server/endpoint.py"
TRANSPORT = "engine/server/transport.py"
CHAT_ANSWER = "engine/server/endpoints/chat_answer.py"
COMPLETION_ANSWER = "engine/server/endpoints/completion_answer.py"

IN_MANAGER = ("tests/engine/kv/test_cache_manager.py",)
IN_TREE = ("tests/engine/kv/test_prefix_tree.py",)
IN_POOL = ("tests/engine/kv/test_block_pool.py",)
IN_RUNS = ("tests/engine/kv/test_free_runs.py",)
IN_TABLE = ("tests/engine/kv/test_block_table.py",)
IN_CONTAINMENT = ("tests/engine/test_policy_containment.py",)
IN_SWITCH = ("tests/engine/test_policy_switch.py",)
IN_STATE = ("tests/engine/test_policy_state.py",)
IN_EVICTION = ("tests/engine/kv/test_eviction.py",)
IN_PRIORITY_TTL = ("tests/policies/eviction/test_priority_ttl.py",)
IN_GITTINS = ("tests/policies/eviction/test_gittins.py",)
IN_FLIGHT_TESTS = ("tests/engine/kv/test_in_flight.py",)
IN_MACHINE = ("tests/engine/kv/test_cache_manager_machine.py",)
IN_NAMES = ("tests/engine/kv/test_names.py",)
IN_RETENTION = ("tests/engine/kv/test_retention.py",)
IN_LOADS = ("tests/engine/kv/test_loaded_blocks.py",)
IN_FORGET = ("tests/engine/kv/test_forget.py",)
IN_LEASES = ("tests/engine/kv/test_leases.py",)
IN_EXPLAIN = ("tests/engine/kv/test_explain.py",)
IN_IMAGE = ("tests/engine/kv/test_image.py",)
IN_TENSORS = ("tests/engine/model/test_kv_tensors.py",)
IN_TIERING = ("tests/engine/test_tiering.py",)
IN_TIER_CANCELLATION = ("tests/engine/test_tier_cancellation.py",)
IN_LOADING = ("tests/engine/test_loading.py",)
IN_EXPORTS = ("tests/engine/test_exports.py",)
IN_CHECKPOINT = ("tests/engine/test_checkpoint.py",)
IN_SNAPSHOT = ("tests/engine/test_engine_snapshot.py",)
IN_WARMING = ("tests/engine/test_warming.py",)
IN_CONTROL = ("tests/engine/test_cache_control.py",)
IN_PINS = ("tests/engine/test_pins.py",)
IN_METRICS = ("tests/engine/insight/test_metrics.py",)
IN_TRACES = ("tests/engine/insight/test_traces.py",)
IN_COUNTED_ONCE = ("tests/engine/insight/test_counted_once.py",)
IN_RECORD = ("tests/telemetry/test_record.py",)
IN_TRACING = ("tests/telemetry/test_tracing.py",)
IN_EVENTS = ("tests/telemetry/events/test_events.py",)
IN_KV_EVENTS = ("tests/engine/insight/test_kv_events.py",)
IN_HISTOGRAM = ("tests/telemetry/metrics/test_histogram.py",)
IN_CHAT_STREAM = (
    "tests/engine/server/test_chat_endpoint.py::test_a_stream_is_role_then_content_then_finish_then_usage",
)
IN_COMPLETIONS = "tests/engine/server/test_completions_endpoint.py"


class Mutant(NamedTuple):
    """``old``, which occurs exactly once in ``file``, becomes ``new``."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    note: str = ""


KNOWN_FAULTS = (
    # counting
    Mutant(
        "1 two references for one holder",
        TREE,
        "        self.lock(node)\n        return node\n",
        "        self.lock(node)\n        self.lock(node)\n        return node\n",
        IN_TREE,
        "a hold on a shared block is a lock on its node",
    ),
    Mutant(
        "2 looking takes a reference",
        TREE,
        "        return Match(node, used, ids, idle, partial_block, partial_tokens)\n",
        "        self.lock(node)\n        return Match(node, used, ids, idle, partial_block, partial_tokens)\n",
        IN_TREE,
    ),
    Mutant(
        "3 the tree's hold on a block is unprotected",
        PUBLISHING,
        "        if known:\n            self._pool.release(own[: len(known)])\n",
        "        self._pool.release(own)\n        if known:\n",
        IN_MANAGER,
    ),
    Mutant(
        "4 a failed admission leaks",
        MANAGER,
        "            if node is not None:\n                self._unlock(sequence.seq_id, node)\n            raise\n",
        "            raise\n",
        IN_MANAGER,
    ),
    Mutant(
        "5 tokens are accepted after the end",
        MANAGER,
        "        sequence.publish_at = NOT_ADMITTED\n",
        "        sequence.publish_at = NEVER\n",
        IN_MANAGER,
    ),
    Mutant(
        "6 a free block can be retained",
        POOL,
        "            if references[block] < 1:\n",
        "            if references[block] < 0:\n",
        IN_POOL,
    ),
    Mutant(
        "7 the guard against a double free is an assert",
        POOL,
        "            if held < 1:\n"
        '                raise CacheMisuse(f"block {block} is released but nobody holds it (double free)")\n',
        "            assert held >= 1\n",
        IN_POOL,
    ),
    # free list and eviction
    Mutant(
        "8 eviction counts what was free already",
        EVICTION,
        "        return free.count - goal + count\n",
        "        return count\n",
        IN_EVICTION,
    ),
    Mutant(
        "9 an id is twice in the free list",
        POOL,
        "            if held == 1 and block not in pins:\n",
        "            if held == 1:\n",
        IN_POOL,
        "free runs cannot hold an id twice unless a block is freed while it is pinned",
    ),
    Mutant(
        "10 the victim stays a candidate",
        TREE,
        "        del self.candidates[node]\n        node.candidate = False\n        if node.keep",
        "        if node.keep",
        IN_EVICTION,
    ),
    Mutant(
        "11 allocation does not evict",
        MANAGER,
        "        if missing > 0:\n",
        "        if missing > self.pool.num_blocks:\n",
        IN_MANAGER,
    ),
    Mutant(
        "12 a hit does not refresh the time of use",
        TREE,
        "            part.used = part.last_use = now\n",
        "",
        IN_EVICTION,
    ),
    Mutant(
        "13 an inner block goes before its children",
        TREE,
        "                if not part.children:\n                    self._offer(part)\n",
        "                self._offer(part)\n",
        IN_TREE,
    ),
    Mutant(
        "14 the background tick does nothing",
        CONTROL,
        "        if self.pool.free >= low:\n            return 0\n",
        "        if self.pool.free >= 0:\n            return 0\n",
        IN_EVICTION,
        "the tick keeps watermarks instead of an age",
    ),
    Mutant(
        "14 victims are found by a linear search",
        EVICTION,
        "        named_some = True\n        while candidates",
        "        named_some = False\n        while candidates",
        IN_EVICTION,
        "the policy, which has an order at hand, is never asked",
    ),
    # tree
    Mutant(
        "15 entries outlive recycling",
        TREE,
        "        del node.tokens[cut:]\n        del node.ids[left:]\n",
        "",
        IN_TREE,
    ),
    Mutant(
        "16 a block that is not full is hit",
        PUBLISHING,
        "        shared, full = table.shared, sequence.computed // table.block_size\n",
        "        shared, full = table.shared, -(-sequence.computed // table.block_size)\n",
        IN_MANAGER,
    ),
    Mutant(
        "17 a hit block can be handed to someone else",
        TREE,
        "                if part in self.candidates:\n                    self._withdraw(part)\n",
        "",
        IN_TREE,
        "a locked leaf stays a candidate for eviction",
    ),
    Mutant(
        "18 the partial tail is filed under a short key",
        PUBLISHING,
        "memoryview(sequence.tokens)[shared * size : full * size].tobytes()",
        "memoryview(sequence.tokens)[shared * size : sequence.computed].tobytes()",
        IN_MANAGER,
    ),
    Mutant(
        "19 a second publication overwrites the block id",
        TREE,
        "            known += node.ids\n",
        "            known += node.ids\n            node.ids[:] = ids[len(known) - used : len(known)]\n",
        IN_TREE,
    ),
    Mutant(
        "20 the tree is never pruned",
        TREE,
        "            del self._roots[node.namespace]\n            return\n",
        "            return\n",
        IN_TREE,
        "blocks go with their nodes; only a root could stay behind",
    ),
    Mutant(
        "21 generated blocks are not published",
        MANAGER,
        "        if computed >= sequence.publish_at:\n",
        "        if computed >= sequence.publish_at and count > 1:\n",
        IN_MANAGER,
    ),
    Mutant(
        "21 generated tokens are stored as -1",
        MANAGER,
        "            sequence.tokens.append(token)\n",
        "            sequence.tokens.append(-1)\n",
        IN_MANAGER,
    ),
    Mutant(
        "22 one node per block",
        TREE,
        "not node.children and node.locks == 1 and",
        "not node.children and node.locks < 1 and",
        IN_TREE,
    ),
    Mutant(
        "23 the key is the tokens only",
        TREE,
        "        node = self._roots.get(namespace)\n        if node is None:\n",
        "        node = next(iter(self._roots.values()), None)\n        if node is None:\n",
        IN_MANAGER,
    ),
    Mutant(
        "24 tree and pool differ in block size",
        CONTROL,
        "        self.tree = PrefixTree(block_size, self.policy, self._moment)\n",
        "        self.tree = PrefixTree(2 * block_size, self.policy, self._moment)\n",
        IN_MANAGER,
    ),
    Mutant(
        "24 a table of another block size is taken",
        MANAGER,
        "        if sequence.table.block_size != self.block_size:\n",
        "        if sequence.table.block_size < 0:\n",
        IN_MANAGER,
    ),
    # writing
    Mutant(
        "25 no copy on write",
        MANAGER,
        "if self.pool.references(blocks[i]) > 1]\n",
        "if self.pool.references(blocks[i]) > 8]\n",
        IN_MANAGER,
    ),
    Mutant(
        "26 the next slot is somewhere else",
        TABLE,
        "* self.block_size + positions % self.block_size\n",
        "* self.block_size + (positions + 1) % self.block_size\n",
        IN_TABLE,
        "slots are computed, never searched for",
    ),
    Mutant(
        "26 the cursor is wrong after a fork",
        MANAGER,
        "        sequence.writable = child.writable = sequence.computed\n",
        "        child.writable = sequence.writable\n",
        IN_MANAGER,
    ),
    Mutant(
        "27 the view has slots that nobody wrote",
        TABLE,
        "self.blocks[: -(-tokens // self.block_size)]",
        "self.blocks[: -(-tokens // self.block_size) + 1]",
        IN_TABLE,
    ),
    Mutant(
        "28 a full hit leaves no position to compute",
        MANAGER,
        "sequence.tokens.tobytes(), len(sequence.tokens) - 1)\n",
        "sequence.tokens.tobytes(), len(sequence.tokens))\n",
        IN_MANAGER,
    ),
    Mutant(
        "29 an empty prompt is accepted",
        SEQUENCE,
        "        if not tokens:\n",
        "        if tokens is None:\n",
        ("tests/engine/kv/test_sequence.py",),
    ),
    Mutant(
        "30 the ids of siblings repeat",
        MANAGER,
        '            raise CacheMisuse(f"sequence id {seq_id} is in use")\n        child = Sequence(\n',
        "            pass\n        child = Sequence(\n",
        IN_MANAGER,
    ),
    # concurrency and memory
    Mutant(
        "31 match and retain are not one act",
        MANAGER,
        "            fresh = self._allocate(needed, sequence, after=shared[-1] if shared else -1)\n",
        "            if node is not None:\n"
        "                self.tree.unlock(node)\n"
        "            fresh = self._allocate(needed, sequence, after=shared[-1] if shared else -1)\n"
        "            if node is not None:\n"
        "                self.tree.lock(node)\n",
        IN_MACHINE,
        "one coroutine owns the cache; what could come between is the eviction for the same admission",
    ),
    Mutant(
        "32 blocks are found before they are computed",
        PUBLISHING,
        "        shared, full = table.shared, sequence.computed // table.block_size\n",
        "        shared, full = table.shared, len(sequence.tokens) // table.block_size\n",
        IN_MANAGER,
    ),
    Mutant(
        "33 the memory is not one tensor of blocks",
        TENSORS,
        "shapes = [(num_blocks, block_size, g.kv_heads, dim)",
        "shapes = [(block_size, num_blocks, g.kv_heads, dim)",
        IN_TENSORS,
        "a layer's blocks lie in one tensor; here it is cut along another axis than the ids say",
    ),
)

MORE = (
    Mutant(
        "a partial hit is copied the wrong way round",
        MANAGER,
        "        return ((match.partial_block, fresh[0]),) if copying else ()\n",
        "        return ((fresh[0], match.partial_block),) if copying else ()\n",
        IN_MANAGER,
    ),
    Mutant(
        "a fork's block is copied the wrong way round",
        MANAGER,
        "                copies.append((blocks[index], own))\n",
        "                copies.append((own, blocks[index]))\n",
        IN_MANAGER,
    ),
    Mutant(
        "most recently used instead of least",
        LRU,
        "        self._queue.push(entry, entry.last_use)\n",
        "        self._queue.push(entry, -entry.last_use)\n",
        IN_EVICTION,
    ),
    Mutant(
        "the stand-in for a faulty policy takes the youngest",
        "engine/kv/standby.py",
        "    return node.keep.priority, node.used\n",
        "    return node.keep.priority, -node.used\n",
        IN_EVICTION,
    ),
    Mutant(
        "a producer that left is not forgotten",
        MANAGER,
        "        self._in_flight.forget(sequence)\n",
        "",
        IN_MANAGER,
    ),
    Mutant(
        "who parts in the middle of an edge takes the producer at its end for his own",
        IN_FLIGHT,
        "        if node is None or match.used < len(node.ids):\n",
        "        if node is None:\n",
        IN_FLIGHT_TESTS,
    ),
    Mutant(
        "what was computed twice is not released",
        PUBLISHING,
        "            self._pool.release(own[: len(known)])\n",
        "",
        IN_MANAGER,
    ),
    Mutant(
        "the upper watermark is ignored",
        CONTROL,
        "        count = high - self.pool.free\n",
        "        count = low - self.pool.free\n",
        IN_EVICTION,
    ),
    Mutant(
        "headroom is ignored",
        MANAGER,
        "        if spare < headroom:\n",
        "        if spare < 0:\n",
        IN_MANAGER,
    ),
    Mutant(
        "headroom is off by one",
        MANAGER,
        "        if spare < headroom:\n",
        "        if spare <= headroom:\n",
        IN_MANAGER,
    ),
    Mutant(
        "idle hits count as evictable",
        MANAGER,
        "self.tree.idle_blocks - match.idle - needed\n",
        "self.tree.idle_blocks - needed\n",
        IN_MACHINE,
    ),
    Mutant(
        "the source of a copy is not pinned",
        MANAGER,
        "                self.pool.pin(blocks[index])\n",
        "",
        IN_MANAGER,
    ),
    Mutant(
        "the last evictable block is kept to copy from",
        MANAGER,
        "        if spare == 0:",
        "        if spare < 0:",
        IN_MANAGER,
    ),
    Mutant(
        "a resumed sequence counts as a hit",
        MANAGER,
        "        if sequence.resumed:\n            self._counts.resume_hit_tokens += tokens\n            return\n",
        "",
        IN_MANAGER,
    ),
    Mutant(
        "a fork takes no reference",
        MANAGER,
        "        self.pool.retain(sequence.table.own)\n",
        "",
        IN_MANAGER,
    ),
    Mutant(
        "a fork takes no lock",
        MANAGER,
        "        if sequence.node is not None:\n            self.tree.lock(sequence.node)\n",
        "",
        IN_MANAGER,
    ),
    Mutant(
        "a fork shares its parent's list",
        TABLE,
        "        child.blocks = self.blocks[:]\n",
        "        child.blocks = self.blocks\n",
        IN_TABLE,
    ),
    Mutant(
        "nothing is released at the end",
        MANAGER,
        "            self.pool.release(table.blocks[published:])\n",
        "            pass\n",
        IN_MANAGER,
    ),
    Mutant(
        "the lease is not given back at the end",
        MANAGER,
        "        if sequence.node is not None:\n            self.tree.unlock(sequence.node)\n",
        "",
        IN_MANAGER,
    ),
    Mutant(
        "the next publication is a block late",
        PUBLISHING,
        "        sequence.publish_at = (full + 1) * size\n",
        "        sequence.publish_at = (full + 2) * size\n",
        IN_MANAGER,
    ),
    Mutant(
        "a lease locks only what is above its node",
        TREE,
        "        part: Node | None = node\n        while part is not None:  # spelled out",
        "        part: Node | None = node.parent\n        while part is not None:  # spelled out",
        IN_TREE,
    ),
    Mutant(
        "only the leased node is unlocked",
        TREE,
        "                self._offer(part)\n            part = part.parent\n",
        "                self._offer(part)\n            part = None\n",
        IN_TREE,
    ),
    Mutant(
        "a split loses the locks",
        TREE,
        "upper.owner = node.locks,",
        "upper.owner = 0,",
        IN_TREE,
    ),
    Mutant(
        "publishing over known blocks takes no lock",
        TREE,
        "            self._step_down(node)\n",
        "",
        IN_TREE,
    ),
    Mutant(
        "a partial hit claims one token too many",
        TREE,
        "    return same_bits // (8 * TOKEN_BYTES)\n",
        "    return same_bits // (8 * TOKEN_BYTES) + 1\n",
        IN_TREE,
    ),
    Mutant(
        "only the lower neighbour is looked at for a partial hit",
        TREE,
        "keys[near - 1 if near else 0 : near + 1]",
        "keys[near - 1 if near else 0 : near]",
        IN_TREE,
    ),
    Mutant(
        "free neighbours are not joined",
        RUNS,
        "        if start > 0 and (left := lengths[start - 1]):\n",
        "        if start > len(lengths) and (left := lengths[start - 1]):\n",
        IN_RUNS,
    ),
    Mutant(
        "a shortened run is lost",
        RUNS,
        "            bins[bin_of_rest][start_of_rest] = None\n",
        "",
        IN_RUNS,
    ),
    Mutant(
        "a pinned block is freed with its run",
        POOL,
        "            and not (self._pins and any(start <= pinned < end for pinned in self._pins))\n",
        "",
        IN_POOL,
    ),
    Mutant(
        "a shared block is freed with its run",
        POOL,
        "            and self._references[start:end] == self._ones[:length]\n",
        "",
        IN_POOL,
    ),
    Mutant(
        "the hook sees blocks that are free already",
        EVICTION,
        "        ids, head, memory = self._tree.cut_tail(node, count)\n",
        "        ids, head, memory = self._tree.cut_tail(node, count)\n"
        "        self._pool.release(ids)\n"
        "        ids = ids[:0]\n",
        IN_EVICTION,
    ),
    Mutant(
        "ghosts are remembered for ever",
        "engine/kv/ghosts.py",
        "        if len(self._evicted) > self._bound:\n            self._evicted.popitem(last=False)\n",
        "",
        IN_EVICTION,
    ),
    Mutant(
        "a slow call of a policy is as good as any",
        "engine/kv/containment.py",
        "        if seconds <= self._timeout:\n",
        "        if seconds >= 0:\n",
        IN_CONTAINMENT,
    ),
    Mutant(
        "a policy is never set aside",
        "engine/kv/containment.py",
        "        if is_too_much and not self.set_aside:\n",
        "        if is_too_much and self.set_aside:\n",
        IN_CONTAINMENT,
    ),
    Mutant(
        "a policy that takes over is told of no candidates",
        CONTROL,
        "            self.policy.on_candidate(node, now)\n",
        "            pass\n",
        IN_SWITCH,
    ),
    Mutant(
        "memories outlive the policy that made them",
        CONTROL,
        "        self._ghosts.forget_memories()\n",
        "",
        IN_SWITCH,
    ),
    Mutant(
        "what a policy has learned is handed to any other",
        "engine/learned.py",
        "(saved.policy, saved.api) == (kind.kind, kind.major)",
        "saved.api == kind.major",
        IN_STATE,
    ),
    Mutant(
        "a policy's fault is passed on",
        "engine/kv/containment.py",
        "        except BaseException as error:  # noqa: BLE001  # a plug-in may raise anything\n",
        "        except ArithmeticError as error:\n",
        IN_EVICTION,
    ),
    Mutant(
        "a policy may name what is held",
        EVICTION,
        "                if choice is None or choice[0] not in candidates:\n",
        "                if choice is None:\n",
        IN_EVICTION,
    ),
    Mutant(
        "a malformed tenant is read as no tenant",
        "storage/naming.py",
        "            if value is not None and not isinstance(value, str):\n",
        "            if value and not isinstance(value, str):\n",
        ("tests/engine/kv/test_sequence.py",),
    ),
)

TIERS = (
    Mutant(
        "a split keeps the names of the upper half below",
        TREE,
        "        del node.names[:named]\n",
        "",
        IN_NAMES,
    ),
    Mutant(
        "names outlive their blocks",
        TREE,
        "            del node.names[left * NAME_BYTES :]\n",
        "            pass\n",
        IN_NAMES,
    ),
    Mutant(
        "blocks that were added are named after the parent",
        NAMES,
        "bytes((node.names or node.parent.names)[-NAME_BYTES:])",
        "bytes(node.parent.names[-NAME_BYTES:])",
        IN_NAMES,
    ),
    Mutant(
        "a run is said to follow its own first block",
        "engine/kv/runs.py",
        "names_of(node, first - 1) if first",
        "names_of(node, first) if first",
        IN_NAMES,
    ),
    Mutant(
        "names are worked out for nobody",
        EVICTION,
        "self._run(node, count, reason, cause) if self._watchers.of_leaving else None",
        "tail_run(node, count, reason, cause)",
        IN_EVICTION,
    ),
    Mutant(
        "bad blocks are still copied out",
        EVICTION,
        "            self._watchers.dropped(run)\n",
        "            pass\n",
        IN_EVICTION,
    ),
    Mutant(
        "runs of different retention share an edge",
        "engine/kv/node.py",
        "return same_keep and",
        "return",
        IN_RETENTION,
    ),
    Mutant(
        "retention is lowered by a later request",
        KEEP,
        "            return other if other.priority > self.priority else self\n",
        "            return other\n",
        IN_RETENTION,
    ),
    Mutant(
        "the earlier end of retention wins",
        KEEP,
        "other.expires <= self.expires)",
        "other.expires >= self.expires)",
        IN_RETENTION,
    ),
    Mutant(
        "a hit raises all of an edge that it uses in part",
        RETENTION,
        "            if stop < len(part.ids):\n                part = tree.split(part, stop)\n",
        "",
        IN_RETENTION,
    ),
    Mutant(
        "a range misses the block in which it begins",
        RETENTION,
        "Span(retention.start // block_size,",
        "Span(-(-retention.start // block_size),",
        IN_RETENTION,
    ),
    Mutant(
        "retention never ends",
        "engine/kv/expiries.py",
        "self._heap[0].expires <= now:",
        "self._heap[0].expires < 0:",
        IN_RETENTION,
    ),
    Mutant(
        "the end of retention is not announced",
        TREE,
        "        is_candidate = node in self.candidates\n",
        "        is_candidate = False\n",
        IN_RETENTION,
    ),
    Mutant(
        "ends of retention outlive their nodes",
        TREE,
        "            self.expiries.forget(node)\n",
        "            pass\n",
        IN_RETENTION,
    ),
    Mutant(
        "a policy's own order comes before retention",
        PRIORITY_TTL,
        "entry.expires <= now else entry.priority\n",
        "entry.expires <= now else 0\n",
        IN_PRIORITY_TTL,
    ),
    Mutant(
        "the stand-in for a faulty policy ignores retention",
        "engine/kv/standby.py",
        "    return node.keep.priority, node.used\n",
        "    return 0, node.used\n",
        IN_EVICTION,
    ),
    Mutant(
        "what is loaded counts as used just now when a cache is restored",
        LOADS,
        "now if used else now - aged.idle",
        "now",
        IN_LOADS,
    ),
    Mutant(
        "what a request loads is as old as before",
        LOADS,
        "now if used else now - aged.idle",
        "now - aged.idle",
        IN_LOADS,
    ),
    Mutant(
        "time in a tier does not count against retention",
        LOADS,
        "aged = meta.aged(wall_now)",
        "aged = meta",
        IN_LOADS,
    ),
    Mutant(
        "a forgone copy keeps its source",
        MANAGER,
        "        self.copied(copies)\n        border",
        "        border",
        IN_LOADS,
    ),
    Mutant(
        "loaded blocks come after what was computed of a block",
        MANAGER,
        "or start != shared * self.block_size or",
        "or",
        IN_LOADS,
    ),
    Mutant(
        "a preempted sequence's load counts as a hit of a tier",
        MANAGER,
        "+= 0 if sequence.resumed else end - start\n",
        "+= end - start\n",
        IN_LOADS,
    ),
    Mutant(
        "a lease is not given back to the tree",
        LEASES,
        "        self._tree.unlock(lease.node)\n",
        "",
        IN_LEASES,
    ),
    Mutant(
        "leases may hold everything",
        LEASES,
        "        if self.blocks > self._most:\n",
        "        if self.blocks < 0:\n",
        IN_LEASES,
    ),
    Mutant(
        "a part of a prefix can be pinned",
        CONTROL,
        " if len(match.ids) == blocks else None\n",
        "\n",
        IN_LEASES,
    ),
    Mutant(
        "forgetting takes what other prompts share",
        FORGET,
        "            own.clear()\n",
        "            pass\n",
        IN_FORGET,
    ),
    Mutant(
        "forgetting a tenant goes by the whole namespace",
        CONTROL,
        "            if namespace.salt == salt:\n",
        "            if namespace == (namespace.model, None, salt):\n",
        IN_FORGET,
    ),
    Mutant(
        "a forgotten tenant's tokens are remembered as evicted",
        CONTROL,
        "        self._ghosts.forget(salt)\n",
        "",
        IN_FORGET,
    ),
    Mutant(
        "an explanation promises a whole prompt",
        EXPLAIN,
        "min(whole + match.partial_tokens, len(tokens) - 1)",
        "whole + match.partial_tokens",
        IN_EXPLAIN,
    ),
    Mutant(
        "an explanation tells of other tenants unasked",
        EXPLAIN,
        " if others else None,\n",
        ",\n",
        IN_EXPLAIN,
    ),
    Mutant(
        "a run is saved before the one that it continues",
        IMAGE,
        "            values[above] = max(values[above], values[index])\n",
        "            pass\n",
        IN_IMAGE,
    ),
    Mutant(
        "the census forgets leases",
        "engine/kv/census.py",
        "    leases = Counter(lease.node for lease in pinned)\n",
        "    leases: Counter[Node] = Counter()\n",
        IN_LEASES,
    ),
)

TIERED_ENGINE = (
    Mutant(
        "evicted blocks are copied after the step that overwrites them",
        "engine/loop.py",
        "        await self._tiering.save(is_idle=not rows)\n        if not rows:\n            await self._wait()\n",
        "        if not rows:\n            await self._tiering.save(is_idle=True)\n            await self._wait()\n",
        IN_TIERING,
    ),
    Mutant(
        "the tiers do not hear of evictions",
        "engine/assembly.py",
        "    cache.watch(tiering, names=bool(manager.names))\n",
        "",
        IN_TIERING,
    ),
    Mutant(
        "what a tier has already is copied out again",
        "engine/tiering.py",
        "            if not missing:\n                return  # what lies above is there too\n",
        "            missing = list(range(len(run.names)))\n",
        IN_TIERING,
    ),
    Mutant(
        "selective writes everything",
        "engine/tiering.py",
        '        if self._config.demotion == "selective" and not run.entry.hits:\n            return\n',
        "",
        IN_TIERING,
    ),
    Mutant(
        "a request waits although the tiers were asked",
        "engine/tiering.py",
        "            self._looking.discard(sequence.seq_id)\n",
        "            pass\n",
        IN_TIER_CANCELLATION,
    ),
    Mutant(
        "loaded blocks are found before their bytes are there",
        "engine/loading.py",
        "        try:\n            await self._thread.call(self._runner.import_blocks,",
        "        self._publish(load, blocks)\n        blocks, done = [], blocks\n        try:\n"
        "            await self._thread.call(self._runner.import_blocks,",
        IN_LOADING,
        "the list of payloads is empty then, too",
    ),
    Mutant(
        "blocks that the device did not take count as loaded",
        "engine/loading.py",
        '            self._end(load, LoadOutcome(0, "failed"))\n            return\n',
        "",
        IN_LOADING,
    ),
    Mutant(
        "a load that was given up goes on",
        "engine/loading.py",
        "            load.is_over = True\n"
        '            load.scope.cancel()\n            self.outcomes["given up"] += 1\n',
        '            self.outcomes["given up"] += 1\n',
        IN_LOADING + IN_TIER_CANCELLATION,
    ),
    Mutant(
        "a request that is cancelled keeps its load",
        "engine/scheduler.py",
        "            self.loading.remove(sample)\n            self._tiering.loads.give_up(sample.sequence)\n",
        "            self.loading.remove(sample)\n",
        IN_LOADING,
    ),
    Mutant(
        "the whole prompt is loaded and nothing is left to compute",
        "engine/loading.py",
        "        end = len(sequence.tokens) - (0 if whole else 1)\n",
        "        end = len(sequence.tokens)\n",
        IN_LOADING,
    ),
    Mutant(
        "best effort waits for slow tiers",
        "engine/loading.py",
        "            coverage = coverage._replace(tiers=coverage.tiers[:at_hand])\n",
        "",
        IN_LOADING,
    ),
    Mutant(
        "a request may wait for a tier for ever",
        "engine/loading.py",
        'deadline = self._config.promotion_timeout if self._config.promotion == "timeout" else None\n',
        "deadline = None\n",
        IN_LOADING,
    ),
    Mutant(
        "a failed load is nobody's concern",
        "engine/scheduler.py",
        "            self._failed_loads.append((sample, outcome))\n",
        "            pass\n",
        IN_LOADING,
    ),
    Mutant(
        "this run's blocks count as saved by the restart",
        "engine/loading.py",
        "            self.restored_tokens += 0 if block.own else size\n",
        "            self.restored_tokens += size\n",
        IN_LOADING,
    ),
    Mutant(
        "a block is copied although its queue has no room",
        "engine/exports.py",
        "            if all(rooms[export.sink] > len(ready) for export in exports):\n",
        "            if all(rooms[export.sink] > 0 for export in exports):\n",
        IN_EXPORTS,
    ),
    Mutant(
        "a copy that failed stays promised",
        "engine/exports.py",
        "        finally:\n            for export in group:\n                self._settle(export)\n",
        "        for export in group:\n            self._settle(export)\n",
        IN_EXPORTS,
    ),
    Mutant(
        "bad blocks that wait are copied out",
        "engine/exports.py",
        "            for export in self._later.pop(block, ()):\n                self._settle(export)\n",
        "            pass\n",
        IN_EXPORTS,
    ),
    Mutant(
        "an idle engine does not see that a queue has room again",
        "engine/loop.py",
        "anyio.move_on_after(ROOM_POLL if self._tiering.waits_for_room else None)",
        "anyio.move_on_after(None)",
        IN_TIERING,
    ),
    Mutant(
        "a request is given up that had just become possible",
        "engine/loop.py",
        "        if self._tiering.has_work or self._inbox:",
        "        if self._tiering.has_work:",
        IN_TIERING,
    ),
    Mutant(
        "closing saves nothing",
        "engine/tiering.py",
        "                await self.checkpoint.make_last(budget)\n",
        "                pass\n",
        IN_CHECKPOINT,
    ),
    Mutant(
        "the last checkpoint does not wait for the queue",
        "engine/checkpoint.py",
        "            if not await self._exports.run(EXPORT_BLOCKS):\n                await anyio.sleep(POLL)\n",
        "            if not await self._exports.run(EXPORT_BLOCKS):\n                break\n",
        IN_CHECKPOINT,
    ),
    Mutant(
        "a checkpoint takes the least valuable first",
        "engine/checkpoint.py",
        "[image[index] for index in most_valuable(image)]",
        "image",
        IN_CHECKPOINT,
    ),
    Mutant(
        "what was evicted while a snapshot was begun is missing in it",
        "engine/exports.py",
        "        for watcher in self._watchers:\n            watcher.evicted(blocks)\n",
        "",
        IN_SNAPSHOT,
    ),
    Mutant(
        "a snapshot that failed keeps its exports",
        "engine/snapshotting.py",
        "            self._exports.withdraw(lambda export: export.sink is feed)\n",
        "            pass\n",
        IN_SNAPSHOT,
    ),
    Mutant(
        "a snapshot of one prefix holds everything",
        "engine/snapshotting.py",
        "if wanted is None or heads[index].name in wanted]",
        "if heads[index].name]",
        IN_SNAPSHOT,
    ),
    Mutant(
        "a copy ends at the first block that cannot be had",
        "engine/snapshotting.py",
        "            names = names[outcome.blocks + 1 :]\n",
        "            names = []\n",
        IN_SNAPSHOT,
    ),
    Mutant(
        "warming counts as use",
        "engine/warming.py",
        "self._loads.begin(sequence, wanted, finished, is_use=False)",
        "self._loads.begin(sequence, wanted, finished, is_use=True)",
        IN_WARMING,
    ),
    Mutant(
        "warming evicts",
        "engine/warming.py",
        "        if self._cache.pool.free < len(path):\n            return False\n",
        "",
        IN_WARMING,
    ),
    Mutant(
        "warming goes by hits before priority",
        "engine/warming.py",
        "    return 0 if meta.ttl == 0.0 else meta.priority, meta.hits,",
        "    return meta.hits, 0 if meta.ttl == 0.0 else meta.priority,",
        IN_WARMING,
    ),
    Mutant(
        "erasing leaves what waits to be exported",
        "engine/control.py",
        "            self._tiering.exports.withdraw(lambda export: export.shelf.tenant == digest)\n",
        "",
        IN_CONTROL,
    ),
    Mutant(
        "erasing leaves what waits to be written",
        "storage/manager/tier_manager.py",
        "                count += mount.queue.remove(meant)\n",
        "                pass\n",
        IN_CONTROL,
    ),
    Mutant(
        "erasing leaves the tenant's requests",
        "engine/control.py",
        "            if group.namespace.salt == tenant:\n                self._loop.abort(group)\n",
        "            pass\n",
        IN_CONTROL,
    ),
    Mutant(
        "erasing leaves snapshots",
        "engine/control.py",
        "        places += [partial(self._backend.erase, location) for location in snapshots]\n",
        "",
        IN_CONTROL,
    ),
    Mutant(
        "evicting a prefix leaves what tiers have of its continuations",
        "engine/control.py",
        "            ahead += await self._children(shelf, name)\n",
        "            pass\n",
        IN_CONTROL,
    ),
    Mutant(
        "pins are for ever",
        "engine/loop.py",
        "        self._pins.expire(now)\n",
        "",
        IN_PINS,
    ),
    Mutant(
        "the time of a pin is taken for a moment",
        "engine/control.py",
        "        return None if ttl is None else self._clock() + ttl\n",
        "        return ttl\n",
        IN_PINS,
    ),
    Mutant(
        "tenants share a shelf",
        "storage/naming.py",
        "        parts = _framed(self.model) + _framed(self.adapter) + _framed(self.salt)\n"
        "        return Shelf(hashlib.sha256(_SHELF + parts).digest(), tenant_digest(self.salt))\n",
        "        parts = _framed(self.model) + _framed(self.adapter)\n"
        "        return Shelf(hashlib.sha256(_SHELF + parts).digest(), tenant_digest(None))\n",
        IN_TIERING,
    ),
    Mutant(
        "no salt and an empty one are the same",
        "storage/naming.py",
        "    if part is None:\n",
        "    if not part:\n",
        IN_TIERING,
    ),
    Mutant(
        "the checksum is not checked",
        "storage/record.py",
        "        if not hmac.compare_digest(check, self._check(data)):\n",
        "        if not check:\n",
        IN_LOADING,
    ),
    Mutant(
        "any block will do",
        "storage/record.py",
        "        if head.name != name or tuple(names[:2]) != shelf or name_after(head.parent, head.tokens) != name:\n",
        "        if tuple(names[:2]) != shelf:\n",
        IN_LOADING,
    ),
    Mutant(
        "the key signs nothing",
        "storage/record.py",
        "        digest = xxhash.xxh3_128() if self._key is None else hashlib.blake2b(digest_size=16, key=self._key)\n",
        "        digest = xxhash.xxh3_128()\n",
        IN_TIERING,
    ),
    Mutant(
        "a clock that was ahead makes blocks live for ever",
        "storage/base.py",
        "        age = max(now - self.written, 0.0)\n",
        "        age = now - self.written\n",
        IN_SNAPSHOT,
    ),
    Mutant(
        "time spent below does not count",
        "storage/base.py",
        "        ttl = None if self.ttl is None else max(self.ttl - age, 0.0)\n",
        "        ttl = self.ttl\n",
        ("tests/engine/test_retention_requests.py",),
    ),
    Mutant(
        "an explanation leaves the tiers out",
        "engine/control.py",
        "[manager.names[index] for index in coverage.tiers]",
        "[]",
        ("tests/engine/test_explanation.py",),
    ),
    Mutant(
        "a snapshot that is to be restored is forgotten",
        "engine/mounting.py",
        "    return Mounts((*mounted, Mounted(SNAPSHOT_TIER, snapshot, is_open=True)), backend, None)\n",
        "    return Mounts(tuple(mounted), backend, None)\n",
        ("tests/engine/test_mounting.py",),
    ),
)

TELEMETRY = (
    # what is counted
    Mutant(
        "what is found again counts as a hit",
        MANAGER,
        "        if sequence.resumed:\n            self._counts.resume_hit_tokens += tokens\n            return\n",
        "",
        IN_METRICS,
    ),
    Mutant(
        "what warming finds counts as found again",
        WARMING,
        "resumed=True, used=False)",
        "resumed=True)",
        IN_COUNTED_ONCE,
    ),
    Mutant(
        "all that was loaded came from the first tier",
        LOADING,
        "key=lambda block: block.tier)",
        "key=lambda block: blocks[0].tier)",
        IN_COUNTED_ONCE,
    ),
    Mutant(
        "a request ends for the reason of its first draw",
        DELIVERY,
        "        shown = group.samples if results is None else results\n",
        "        shown = group.samples\n",
        IN_COUNTED_ONCE,
    ),
    Mutant(
        "a fork that is refused is not counted",
        SUBMISSION,
        "        except BaseException as error:\n            self._note_refusal(trace, error)\n            raise\n",
        "        except BaseException as error:\n            trace.finish(type(error).__name__)\n            raise\n",
        IN_COUNTED_ONCE,
    ),
    Mutant(
        "a load that is given up has found what it found first",
        SCHEDULER,
        "            self._tiering.loads.give_up(sample.sequence)\n            self._note_found(sample)\n",
        "            self._tiering.loads.give_up(sample.sequence)\n",
        IN_COUNTED_ONCE,
    ),
    Mutant(
        "ready before it has warmed",
        WARMING,
        "Readiness.WARMING if budget_blocks >= 1 and manager.names else Readiness.READY",
        "Readiness.READY",
        IN_COUNTED_ONCE,
    ),
    # what is measured
    Mutant(
        "the first token of every sample is timed",
        COMMIT,
        "        if first is None:\n            self._measures.first_token(group, now)\n",
        "        self._measures.first_token(group, now)\n",
        IN_METRICS,
    ),
    Mutant(
        "aborted requests are timed to their end",
        MEASURES,
        "        if reason is not FinishReason.ABORT:\n",
        "        if reason:\n",
        IN_METRICS,
    ),
    Mutant(
        "the bound of a bucket belongs to the next",
        "telemetry/metrics/histogram.py",
        "        self._counts[bisect_left(self._bounds, value)] += weight\n",
        "        self._counts[bisect_left(self._bounds, value + 1e-9)] += weight\n",
        IN_HISTOGRAM,
    ),
    Mutant(
        "exemplars name traces that nobody kept",
        MEASURES,
        "        if origin is None or not origin.trace_flags.sampled:\n",
        "        if origin is None:\n",
        IN_METRICS,
    ),
    Mutant(
        "gauges of a closed engine keep their last values",
        READINGS,
        "    return Readings({**last.numbers, **still}, last.histograms, last.infos)\n",
        "    return last\n",
        IN_METRICS,
    ),
    Mutant(
        "gauges are as they were at the scrape before",
        METRICS,
        "            return self._take()\n        return self._asked_of(",
        "            return self._take() and self._last if not self._last.numbers else self._last\n"
        "        return self._asked_of(",
        IN_METRICS,
    ),
    Mutant(
        "closing is in no metric",
        METRICS,
        "        with suppress(Exception):  # what cannot be read any more stays as it was\n            self._take()\n",
        "",
        IN_COUNTED_ONCE,
    ),
    Mutant(
        "tenants are labels",
        DELIVERY,
        "        self._counters.finished[reason.value] += 1\n",
        '        self._counters.finished[f"{reason.value} {group.namespace.salt}"] += 1\n',
        IN_METRICS,
    ),
    # what spans say
    Mutant(
        "an eviction says no reason",
        EVICTION,
        "{names.REASON: reason, names.POLICY: self.policy.name, ",
        "{names.POLICY: self.policy.name, ",
        IN_TRACES,
    ),
    Mutant(
        "an eviction links to whom it is for",
        EVICTION,
        "track.act(names.EVICT, note.began, self._clock(), shown, note.links())",
        "track.act(names.EVICT, note.began, self._clock(), shown, "
        '[Link(track.origin, "victim_owner")] if track.origin else [])',
        IN_TRACES,
    ),
    Mutant(
        "a block that is loaded as a whole was copied in part",
        SCHEDULER,
        "        self._cache.forgo_copy(sample.sequence, admission.copies)\n",
        "        self._cache.keep_copy(sample.sequence, admission.copies)\n"
        "        self._cache.forgo_copy(sample.sequence, admission.copies)\n",
        IN_COUNTED_ONCE,
    ),
    Mutant(
        "every beam tells of the preemption of all",
        SCHEDULER,
        "        self._note_preemption(together)\n        self._rules.changed()\n        for member in together:\n",
        "        self._rules.changed()\n        for member in together:\n            self._note_preemption(together)\n",
        IN_COUNTED_ONCE,
    ),
    Mutant(
        "a failed copy is told of as made",
        "engine/exports.py",
        "            self._note(group, began, {names.ERROR_TYPE: type(error).__name__})\n",
        "            self._note(group, began, NOTHING)\n",
        IN_COUNTED_ONCE,
    ),
    Mutant(
        "nobody hears of copies for a snapshot",
        "engine/snapshotting.py",
        "run.meta, feed, journal)",
        "run.meta, feed)",
        IN_COUNTED_ONCE,
    ),
    Mutant(
        "a step without survivors has no span",
        LOOP,
        "        traces = self._traces_in(rows) if self._tracing.live else ()  # before some of them are aborted\n"
        "        self._run_inbox()\n",
        "        self._run_inbox()\n        traces = self._traces_in(rows) if self._tracing.live else ()\n",
        IN_COUNTED_ONCE,
    ),
    Mutant(
        "rows that failed were computed",
        LOOP,
        "            names.TOKENS: computed,\n",
        "            names.TOKENS: sum(row.count for row in rows),\n",
        IN_COUNTED_ONCE,
    ),
    Mutant(
        "what a beam computes again while another decodes is lost",
        TRACING,
        "stage.name == names.PREFILL and len(stage.chunks) == 1",
        "len(stage.chunks) == 1",
        IN_COUNTED_ONCE,
    ),
    Mutant(
        "an act hangs below the request, not the phase",
        RECORD,
        "            (self.acts if stage is None else stage.acts).append(act)\n",
        "            self.acts.append(act)\n",
        IN_RECORD,
    ),
    Mutant(
        "a phase outlasts the decision to finish",
        RECORD,
        "    def begin_finish(self) -> None:\n        for track in self._tracks.values():\n            track.leave()\n",
        "    def begin_finish(self) -> None:\n",
        IN_TRACES,
    ),
    Mutant(
        "an act comes after the end of its parent",
        RECORD,
        "        if self.is_over:\n            self.desk.note(",
        "        if False:\n            self.desk.note(",
        IN_RECORD,
    ),
    Mutant(
        "an abort has no status",
        REQUEST_TRACE,
        '        trace.finish("aborted", "the request was aborted")\n',
        "        trace.finish()\n",
        IN_TRACES,
    ),
    Mutant(
        "prompts are shown to whoever traces",
        SUBMISSION,
        "        if trace.shows_text:\n            trace.describe(input_text(",
        "        if trace.is_on:\n            trace.describe(input_text(",
        IN_TRACES,
    ),
    Mutant(
        "a lost span is counted twice",
        TRACING,
        '        self.dropped["queue"] += item.spans - 1\n',
        '        self.dropped["queue"] += item.spans\n',
        IN_TRACING,
    ),
    Mutant(
        "links beyond the bound are not counted",
        TRACING,
        '        self.dropped["link"] += dropped\n',
        "",
        IN_TRACING,
    ),
    Mutant(
        "what is beyond the bound of a request is not counted",
        TRACING,
        '        self.dropped["bound"] += request.dropped\n',
        "",
        IN_COUNTED_ONCE,
    ),
    # cache events
    Mutant(
        "bad blocks leave the cache and nobody hears of it",
        "engine/insight/kv_events.py",
        "    def dropped(self, run: EvictedRun) -> None:\n        self.evicted(run)\n",
        "    def dropped(self, run: EvictedRun) -> None:\n        pass\n",
        IN_KV_EVENTS,
    ),
    Mutant(
        "a replay begins behind what was asked for",
        EVENT_LOG,
        "            self._next = replay_from\n",
        "            self._next = replay_from + 1\n",
        IN_EVENTS,
    ),
    Mutant(
        "a reader that asks for what is gone hears of no gap",
        EVENT_LOG,
        "            self._start(has_gap=replay_from is not None)\n",
        "            self._start(has_gap=False)\n",
        IN_EVENTS,
    ),
)

POLICIES = (
    # containment and switching
    Mutant(
        "a policy that is set aside goes on hearing",
        CONTAINMENT,
        "self.set_aside, self._heard, self.name = True, _Nobody(self.capacity), STAND_IN",
        "self.set_aside, self.name = True, STAND_IN",
        IN_CONTAINMENT,
    ),
    Mutant(
        "a policy that names nothing is not at fault",
        EVICTION,
        '            policy.fault(VICTIMS, "named nothing")\n',
        "            pass\n",
        IN_EVICTION,
    ),
    Mutant(
        "slow events are never looked for",
        CONTAINMENT,
        "        self._timed_at = SAMPLED if self._timeout < math.inf else math.inf\n",
        "        self._timed_at = math.inf\n",
        IN_CONTAINMENT,
    ),
    Mutant(
        "a memory on its way back outlives a switch",
        MANAGER,
        "[back._replace(memory=None) for back in sequence.returns]",
        "[*sequence.returns]",
        IN_SWITCH,
    ),
    # retention over policies
    Mutant(
        "the highest priority goes first",
        PRIORITY_TTL,
        "self._levels[ready[place]], self._evictions",
        "self._levels[ready[-1 - place]], self._evictions",
        IN_PRIORITY_TTL,
    ),
    Mutant(
        "a wish to be kept never expires",
        PRIORITY_TTL,
        "    return 0 if entry.expires is not None and entry.expires <= now else entry.priority\n",
        "    return entry.priority\n",
        IN_PRIORITY_TTL,
    ),
    Mutant(
        "a memory comes back to any policy",
        PRIORITY_TTL,
        "isinstance(memory, _Memory) and memory.number == level.number else None",
        "isinstance(memory, _Memory) else None",
        IN_PRIORITY_TTL,
    ),
    # policies from papers
    Mutant(
        "the target of ARC never moves",
        "policies/eviction/arc.py",
        "min(max(self._target + change, 0.0)",
        "min(max(self._target, 0.0)",
        (
            "tests/policies/eviction/test_arc.py::test_a_return_from_b1_makes_t1_larger_and_one_from_b2_makes_it_smaller",
        ),
    ),
    Mutant(
        "a use promotes from the first queue of 2Q",
        "policies/eviction/two_q.py",
        "        if self.home(entry) is self._am:\n            self.move(entry, self._am)\n",
        "        self.move(entry, self._am)\n",
        ("tests/policies/eviction/test_two_q.py::test_a_use_in_a1in_changes_nothing",),
    ),
    Mutant(
        "S3-FIFO without ghosts",
        "policies/eviction/s3_fifo.py",
        "        return ghost\n",
        "        return None\n",
        (
            "tests/policies/eviction/test_s3_fifo.py::test_what_comes_back_while_its_ghost_is_there_goes_into_the_main_queue",
        ),
    ),
    Mutant(
        "the hand of SIEVE never moves",
        "policies/eviction/sieve.py",
        "(self._ahead if place >= self._hand else self._behind).push(",
        "self._ahead.push(",
        ("tests/policies/eviction/test_sieve.py::test_the_hand_spares_what_was_used_once_and_stays_where_it_evicts",),
    ),
    Mutant(
        "W-TinyLFU lets everything in",
        "policies/eviction/w_tinylfu.py",
        "        if victim is None or self.frequency(newcomer) <= self.frequency(victim):\n",
        "        if victim is None:\n",
        ("tests/policies/eviction/test_w_tinylfu.py::test_the_newcomer_must_be_used_more_often_than_the_victim",),
    ),
    Mutant(
        "the clock of GDSF never rises",
        "policies/eviction/gdsf.py",
        "max(self._clock, self.score(entry, now))",
        "max(self._clock, 0.0)",
        ("tests/policies/eviction/test_gdsf.py::test_the_clock_is_the_priority_of_the_last_victim",),
    ),
    Mutant(
        "LRU-K goes by the last use",
        "policies/eviction/lru_k.py",
        "            self._history[entry] = _History(now, last)\n",
        "            self._history[entry] = _History(now, now)\n",
        ("tests/policies/eviction/test_lru_k.py::test_the_use_before_the_last_decides",),
    ),
    Mutant(
        "SLRU protects nothing",
        "policies/eviction/slru.py",
        "self.move(entry, self._protected if entry.blocks <= self._most_protected else self._probation)",
        "self.move(entry, self._probation)",
        ("tests/policies/eviction/test_slru.py::test_a_scan_does_not_wash_out_what_was_used_again",),
    ),
    Mutant(
        "FIFO goes by the last use",
        "policies/eviction/fifo.py",
        "        return entry.insert_time\n",
        "        return entry.last_use\n",
        ("tests/policies/eviction/test_fifo.py::test_uses_change_nothing",),
    ),
    # what is learned
    Mutant(
        "Gittins forgets the uses of what was evicted",
        GITTINS,
        "        if not isinstance(memory, Stretches):\n            return\n",
        "        if not isinstance(memory, list):\n            return\n",
        IN_GITTINS,
    ),
    Mutant(
        "Gittins lets a whole run go, whatever its parts",
        GITTINS,
        "            yield Tail(entry, self._runs[entry].last.blocks)\n",
        "            yield entry\n",
        IN_GITTINS,
    ),
    Mutant(
        "Gittins never learns",
        GITTINS,
        "        self._renew(now)\n",
        "",
        IN_GITTINS,
    ),
    Mutant(
        "who came back stays at risk",
        "policies/eviction/hazard.py",
        "            changes[step + 1] -= blocks\n",
        "",
        ("tests/policies/eviction/test_hazard.py",),
    ),
    Mutant(
        "adaptive never changes over",
        TRIALS,
        "            self.followed = number\n",
        "            pass\n",
        ("tests/policies/eviction/test_adaptive.py::test_the_one_that_hits_most_is_followed",),
    ),
    Mutant(
        "adaptive changes over at the least lead",
        TRIALS,
        "self._margin * self._asked + self._chance * math.sqrt(self._spreads[number])",
        "0",
        ("tests/policies/eviction/test_adaptive.py::test_a_lead_by_chance_changes_nothing",),
    ),
    Mutant(
        "adaptive looks at all blocks of a large pool",
        TRIALS,
        "numbers[numbers * _MIXER < self._threshold]",
        "numbers",
        ("tests/policies/eviction/test_adaptive.py::test_the_sample_is_its_share_of_the_names",),
    ),
    Mutant(
        "adaptive never forgets how it stood",
        TRIALS,
        "else 0.5 ** ((now - self._last) / self._half_life)",
        "else 1.0",
        ("tests/policies/eviction/test_adaptive.py::test_what_was_long_ago_counts_little",),
    ),
    # scheduling and quotas
    Mutant(
        "fair charges nothing for what is generated",
        FAIR,
        " + self._output_weight * decode_tokens\n",
        "\n",
        (
            "tests/policies/scheduling/test_fair.py::test_weights_divide_what_was_served",
            "tests/policies/scheduling/test_fair.py::test_counters_follow_the_paper",
        ),
    ),
    Mutant(
        "fair lets new tenants catch up from zero",
        FAIR,
        "            self._lift(tenant)\n",
        "            self._counters.setdefault(tenant, 0.0)\n",
        ("tests/policies/scheduling/test_fair.py::test_a_pause_saves_nothing_up",),
    ),
    Mutant(
        "prefix_first lets others wait for ever",
        "policies/scheduling/prefix_first.py",
        "        if now - job.arrival > self._max_delay:\n            return (0, job.order)\n",
        "",
        (
            "tests/policies/scheduling/test_prefix_first.py::test_the_order_is_late_ones_by_arrival_then_by_prefix_then_copies",
        ),
    ),
    Mutant(
        "copies of a new prefix are not held back",
        "engine/prefixes.py",
        "            job.repeats = is_computed or wanted in leaders\n",
        "            job.repeats = False\n",
        ("tests/engine/test_fairness.py::test_more_copies_than_a_plan_looks_at_do_not_hide_others",),
    ),
    Mutant(
        "what is held within a quota is taken for another tenant",
        QUOTA_RULES,
        "beyond = [s for s in others if s not in chosen and self._is_beyond(s, held)]",
        "beyond = [s for s in others if s not in chosen]",
        (
            "tests/engine/test_quotas.py::test_under_random_load_everybody_gets_his_answer_and_nobody_within_his_quota_gives",
        ),
    ),
    Mutant(
        "what is cached within a quota goes first",
        "engine/kv/shares.py",
        "        return max(ready, key=self._quotas.excess, default=None)\n",
        "        return min(ready, key=self._quotas.excess, default=None)\n",
        ("tests/engine/test_quotas.py::test_what_a_tenant_has_cached_within_its_share_outlives_a_flood",),
    ),
    Mutant(
        "who is overtaken waits for ever",
        QUOTA_RULES,
        "            self.favoured = min(late, key=lambda job: job.order, default=None)\n",
        "            self.favoured = None\n",
        ("tests/engine/test_quotas.py::test_who_is_beyond_its_quota_is_overtaken_but_not_for_ever",),
    ),
    # the cache as policies see it, simulated
    Mutant(
        "the replica lets go of what is in flight",
        REPLICA,
        "                self._withdraw(part)\n",
        "",
        ("tests/policies/test_replica.py::test_what_is_held_or_continued_is_not_dropped",),
    ),
    Mutant(
        "the replica forgets what it evicts",
        REPLICA,
        "        self._ghosts[first] = _Ghost(memory, now, count)\n",
        "",
        ("tests/policies/test_replica.py::test_a_run_that_was_evicted_is_remembered_and_one_that_was_dropped_is_not",),
    ),
    Mutant(
        "the optimum evicts what is used next",
        CLAIRVOYANT,
        "        while not self._is_fresh(item := heappop(self._heap)):\n",
        "        while not self._is_fresh(item := self._heap.pop(self._heap.index(max(self._heap)))):\n",
        ("tests/policies/simulator/test_optimum.py::test_the_one_used_last_goes_first",),
    ),
    Mutant(
        "the bound ignores what a request itself needs",
        CLAIRVOYANT,
        "self._drop(self._all - (self.capacity - demand.blocks - demand.private))",
        "self._drop(self._all - self.capacity)",
        ("tests/policies/simulator/test_optimum.py::test_atomic_optimum_and_bound_are_what_trying_everything_finds",),
    ),
    Mutant(
        "an exact replay compares nothing",
        "policies/simulator/exact.py",
        "            if was != now:\n",
        "            if was is None:\n",
        ("tests/engine/test_live_equals_simulator.py::test_another_policy_is_told_apart",),
    ),
    Mutant(
        "a gap in a recording is passed over",
        "policies/simulator/exact.py",
        '            case Gap():\n                raise KeyError(f"{event.lost} events are missing")\n',
        "",
        ("tests/engine/test_live_equals_simulator.py::test_a_recording_with_a_gap_is_not_played_back",),
    ),
    # recordings and shadows
    Mutant(
        "a recording has the names of the cache",
        RECORDING,
        "msgspec.structs.replace(event, names=self.alias(names))",
        "msgspec.structs.replace(event, names=names)",
        ("tests/engine/test_recording.py::test_guesses_cannot_be_tested_from_one_recording_to_the_next",),
    ),
    Mutant(
        "a recording overwrites another",
        RECORDING,
        "os.O_WRONLY | os.O_CREAT | os.O_EXCL",
        "os.O_WRONLY | os.O_CREAT | os.O_TRUNC",
        ("tests/engine/test_recording.py::test_a_file_is_never_overwritten_and_the_model_not_loaded_for_it",),
    ),
    Mutant(
        "a recording does not say what it lost",
        RECORDING,
        "            self._queue.append(Gap(event.now, self._lost_now))\n",
        "",
        ("tests/engine/test_recording.py::test_a_disk_that_cannot_follow_leaves_a_gap_that_is_told",),
    ),
    Mutant(
        "a shadow counts what is found again as a hit",
        SHADOWS,
        "        used = event.used and not event.resumed\n",
        "        used = event.used\n",
        ("tests/engine/insight/test_shadows.py::test_what_is_found_again_after_a_preemption_counts_nothing",),
    ),
    Mutant(
        "a shadow that failed goes on",
        SHADOWS,
        "        shadow.stop(fault)\n",
        "",
        ("tests/engine/insight/test_shadows.py::test_one_that_fails_is_stopped_and_the_others_go_on",),
    ),
    # tiers by name of a policy
    Mutant(
        "a tier lets go of a block that another one follows",
        "storage/host/index.py",
        "        if entry.offered or entry.readers or entry.head.name in self._shelves[entry.shelf].followers:\n",
        "        if entry.offered or entry.readers:\n",
        ("tests/engine/test_tier_policies.py::test_the_host_tier_lets_go_as_it_should_whatever_the_policy_does",),
    ),
    Mutant(
        "a policy of a tier hears of no uses",
        TIER_POLICIES,
        "            self._policy.on_hit(entry, now)\n",
        "",
        ("tests/engine/test_tier_policies.py::test_the_events_come_in_the_order_of_the_contract",),
    ),
    Mutant(
        "a policy of a tier that names nothing stops it",
        TIER_POLICIES,
        "            if self._candidates:\n                yield from self._stand_in(now)",
        "            if not self._candidates:\n                yield from self._stand_in(now)",
        ("tests/engine/test_tier_policies.py::test_the_host_tier_lets_go_as_it_should_whatever_the_policy_does",),
    ),
    Mutant(
        "a tier remembers evicted blocks of an erased tenant",
        TIER_POLICIES,
        "            del self._ghosts[key]\n",
        "            pass\n",
        ("tests/engine/test_tier_policies.py::test_nothing_is_remembered_of_a_tenant_that_was_erased",),
    ),
)

SERVING = (
    # who comes in, and as whom
    Mutant(
        "any key opens the door",
        ACCESS,
        "        return self.callers.get(digest(key))\n",
        "        return self.callers.get(digest(key), next(iter(self.callers.values()), None))\n",
        ("tests/engine/server/test_access.py::test_who_comes_in_at_which_door",),
    ),
    Mutant(
        "admin routes are open where there are no keys",
        ACCESS,
        "    if door is Door.OPEN or (door is Door.CLIENT and not len(keys)):\n",
        "    if door is Door.OPEN or not len(keys):\n",
        ("tests/engine/server/test_admin_routes.py::test_every_admin_route_needs_the_token",),
    ),
    Mutant(
        "the tenant of a key does not get to the engine",
        CALL,
        "            tenant=own.tenant if own.tenant is not None else tenant,\n",
        "            tenant=tenant,\n",
        ("tests/engine/server/test_http_tenants.py::test_no_prefix_of_another_tenant_is_found",),
    ),
    Mutant(
        "a request is more urgent than its key",
        CALL,
        "priority=own.priority if priority is None else min(priority, own.priority),",
        "priority=own.priority if priority is None else priority,",
        ("tests/engine/server/test_generation_fields.py::test_a_request_is_at_most_as_urgent_as_its_key",),
    ),
    Mutant(
        "the place of a request is not given back",
        CALL,
        "            under_way[name] -= 1\n",
        "            under_way[name] -= 0\n",
        ("tests/engine/server/test_access.py::test_however_a_request_ends_its_place_is_free_again",),
    ),
    Mutant(
        "a client's name for its request is the engine's, too",
        CALL,
        "        self.id = uuid.uuid4().hex\n",
        '        self.id = self.headers.get("x-request-id") or uuid.uuid4().hex\n',
        ("tests/engine/server/test_access.py::test_clients_that_use_the_same_name_get_their_own_texts",),
    ),
    Mutant(
        "a client is told what others of its tenant have stored",
        "engine/server/endpoints/admin.py",
        "    return json_response(ops.own_explained(found))\n",
        "    return json_response(ops.explained(found))\n",
        ("tests/engine/server/test_http_tenants.py::test_not_even_to_its_own_tenant_is_stored_text_shown",),
    ),
    Mutant(
        "a client has explained what another tenant has stored",
        "engine/server/endpoints/admin.py",
        "tenant=salted if own is None else own)",
        "tenant=salted)",
        ("tests/engine/server/test_http_tenants.py::test_nothing_is_explained_of_another_tenant",),
    ),
    Mutant(
        "a response of another tenant is found",
        "engine/server/response_store.py",
        "        shelf = self._shelves.get(tenant)\n        return None if shelf",
        "        shelf = next((each for each in self._shelves.values() if response_id in each.by_id), None)\n"
        "        return None if shelf",
        ("tests/engine/server/test_responses.py::test_nobody_finds_anothers",),
    ),
    Mutant(
        "a snapshot goes wherever the client says",
        "engine/server/wire/operations.py",
        "[A-Za-z0-9][A-Za-z0-9._-]{0,127}",
        ".{1,128}",
        ("tests/engine/server/test_admin_routes.py::test_a_name_is_no_path",),
    ),
    Mutant(
        "the page may run what models write",
        "engine/server/endpoints/ui.py",
        "\"script-src 'self'\",",
        "\"script-src 'self' 'unsafe-inline'\",",
        ("tests/engine/server/test_ui.py::test_nothing_else_may_be_loaded_or_run",),
    ),
    Mutant(
        "a stranger's fault is told in its own words",
        "engine/server/errors.py",
        "    is_ours = isinstance(error, OctavoError) and error.__cause__ is None",
        "    is_ours = True",
        ("tests/engine/server/test_streamed_answers.py::test_a_model_that_fails_ends_a_stream_with_one_error",),
    ),
    # what clients can make a server hold
    Mutant(
        "who has left is generated for",
        ENDPOINT,
        "                tasks.start_soon(_until_gone, receive, tasks.cancel_scope)\n",
        "",
        ("tests/engine/server/test_leaving_clients.py::test_a_request_ends_within_a_step_of_its_client",),
    ),
    Mutant(
        "a body is as long as it likes",
        CALL,
        "                if size > limit:\n                    raise _too_large(limit)\n",
        "",
        ("tests/engine/server/test_transport.py::test_a_body_without_end_is_refused",),
    ),
    Mutant(
        "a body takes as long as it likes",
        CALL,
        "        with anyio.fail_after(timeout):\n",
        "        with anyio.fail_after(None):\n",
        ("tests/engine/server/test_transport.py::test_a_body_that_trickles_is_not_waited_for",),
    ),
    Mutant(
        "a head takes as long as it likes",
        TRANSPORT,
        "        elif self._head_since is not None and now - self._head_since > settings.header_timeout:\n",
        "        elif self._head_since is not None and now - self._head_since > 3600:\n",
        ("tests/engine/server/test_transport.py::test_a_head_that_does_not_come_is_not_waited_for",),
    ),
    Mutant(
        "a client may read nothing for ever",
        TRANSPORT,
        "        if self._stands_still_for(now) > settings.stall_timeout:\n",
        "        if self._stands_still_for(now) > 3600:\n",
        ("tests/engine/server/test_transport_clients.py",),
    ),
    Mutant(
        "what waits for a client that reads nothing waits for ever",
        ENDPOINT,
        "            with anyio.fail_after(self._timeout):\n",
        "            with anyio.fail_after(None):\n",
        ("tests/engine/server/test_access.py::test_however_a_request_ends_its_place_is_free_again",),
    ),
    Mutant(
        "any number of connections is held",
        TRANSPORT,
        "        if len(self.connections) > self._guard.settings.max_connections and not self._make_room():\n",
        "        if len(self.connections) > 2**20 and not self._make_room():\n",
        ("tests/engine/server/test_transport_clients.py::test_one_connection_too_many_is_told_to_come_again",),
    ),
    Mutant(
        "of several prompts of which one is refused the others run on",
        "engine/server/endpoints/side_by_side.py",
        "    except BaseException:  # cancellation, too\n        _close(begun)\n        raise\n",
        "    except BaseException:  # cancellation, too\n        raise\n",
        ("tests/engine/server/test_streamed_answers.py::test_starting_several_is_all_or_nothing",),
    ),
    # streams and answers
    Mutant(
        "a stream that failed is [DONE]",
        "engine/server/event_stream.py",
        "            last = self._on_error(error)\n",
        "            last = self._on_error(error) + self._end\n",
        ("tests/engine/server/test_streamed_answers.py::test_a_model_that_fails_ends_a_stream_with_one_error",),
    ),
    Mutant(
        "what the server has ended is a success",
        "engine/server/endpoints/side_by_side.py",
        '        raise unavailable("the server ended this request before it was done", "aborted")\n',
        "        return output\n",
        ("tests/engine/server/test_streamed_answers.py::test_what_the_server_ends_is_told_as_an_error",),
    ),
    Mutant(
        "a stream does not say why it ends",
        CHAT_ANSWER,
        "            yield self._chunk(ended, usage)\n",
        "            del ended\n",
        IN_CHAT_STREAM,
    ),
    Mutant("the role is told with each chunk", CHAT_ANSWER, "            sample.is_told = True\n", "", IN_CHAT_STREAM),
    Mutant(
        "all samples of a chat have one index in a stream",
        CHAT_ANSWER,
        "            index=index,\n            delta=Delta(content=news.text or UNSET",
        "            index=0,\n            delta=Delta(content=news.text or UNSET",
        ("tests/engine/server/test_streamed_answers.py::test_a_stream_joins_to_the_answer_that_is_not_streamed",),
    ),
    Mutant(
        "usage comes without being asked for",
        "engine/server/endpoints/answering.py",
        "    if options.include_usage:\n        yield",
        "    if True:\n        yield",
        IN_CHAT_STREAM,
    ),
    Mutant(
        "usage does not tell what was cached",
        "engine/server/endpoints/usage.py",
        "        return Usage(prompt, generated, total, PromptTokensDetails(cached), CompletionTokensDetails())\n",
        "        return Usage(prompt, generated, total, PromptTokensDetails(0), CompletionTokensDetails())\n",
        (f"{IN_COMPLETIONS}::test_usage_counts_each_prompt_once_and_every_sample",),
    ),
    Mutant(
        "an echo lacks the prompt",
        COMPLETION_ANSWER,
        "            text=self._echo.text + text if is_first else text,\n",
        "            text=text,\n",
        (f"{IN_COMPLETIONS}::test_echo_begins_with_the_prompt",),
    ),
    Mutant(
        "log-probabilities of a prompt stand one token too early",
        COMPLETION_ANSWER,
        "[*(first.prompt_logprobs or ()), *scores]",
        "[*(first.prompt_logprobs or ())[1:], *scores, None]",
        (f"{IN_COMPLETIONS}::test_log_likelihoods_are_told_as_evaluation_harnesses_ask_for_them",),
    ),
    Mutant(
        "samples of several prompts have the same index",
        COMPLETION_ANSWER,
        "        index = heard.number * (self._form.n or 1) + heard.output.index\n",
        "        index = heard.number + heard.output.index\n",
        (f"{IN_COMPLETIONS}::test_prompts_run_side_by_side_and_choices_come_in_order",),
    ),
    Mutant(
        "stop text is shown",
        "engine/model/stops.py",
        "text[: end if self._include else end - len(stop)]",
        "text[:end]",
        (
            "tests/engine/server/test_streamed_answers.py::test_text_ends_before_the_first_stop_and_nothing_of_it_is_sent",
        ),
    ),
    Mutant(
        "a model that is not there answers",
        CALL,
        "        if name is None or name in names:\n            return name or names[0]\n",
        "        if names:\n            return name or names[0]\n",
        ("tests/engine/server/test_chat_endpoint.py::test_the_model_goes_by_the_names_it_is_served_under",),
    ),
    Mutant(
        "the first of two formats wins",
        "engine/server/params.py",
        "    if len(made) > 1:\n        raise invalid(f\"{' and '.join",
        "    if len(made) > 99:\n        raise invalid(f\"{' and '.join",
        ("tests/engine/server/test_generation_fields.py::test_fields_that_contradict_each_other_are_refused",),
    ),
    # conversations and tools
    Mutant(
        "the beginning of a call is shown as text",
        "engine/server/tools/reader.py",
        "        cut = [_cut_at(text, opening) for opening in self._notation.openings]\n",
        "        cut = [len(text)]\n",
        ("tests/engine/server/test_tool_reader.py::test_what_a_model_writes_is_read_wherever_it_is_cut",),
    ),
    Mutant(
        "a call that is required is left to the model",
        "engine/server/endpoints/chat.py",
        "    return tools.forced\n",
        "    return wanted\n",
        ("tests/engine/server/test_structured_answers.py::test_a_call_that_is_required_is_made",),
    ),
    Mutant(
        "special tokens are forged in names and arguments",
        "engine/model/forgery.py",
        "    parts: list[Json] = [*chat.messages, *chat.tools, chat.options]\n",
        '    parts: list[Json] = [message["content"] for message in chat.messages]\n',
        ("tests/engine/model/test_forgery.py::test_no_string_makes_a_special_token",),
    ),
    Mutant(
        "what a developer says has no role",
        "engine/model/chat_messages.py",
        '        return "system"\n',
        "        return role\n",
        ("tests/engine/model/test_chat_messages.py::test_roles_are_those_of_the_api_and_of_the_template",),
    ),
    Mutant(
        "an open answer does not fit into the pool",
        "engine/fitting.py",
        "    return min(max_context - prompt_tokens, in_pool, MAX_TOKENS)\n",
        "    return min(max_context - prompt_tokens, MAX_TOKENS)\n",
        ("tests/engine/test_fitting.py::test_left_open_it_is_the_most_that_could_be_asked_for",),
    ),
    # formats
    Mutant(
        "a guide does not move on",
        "engine/sequence.py",
        "            self.guide.accept(sampled.token_id)\n",
        "            pass\n",
        ("tests/engine/test_structured_output.py::test_random_formats_hold_side_by_side",),
    ),
    Mutant(
        "samples share a guide",
        "engine/sequence.py",
        "        guide = None if self.guide is None else self.guide.copy()\n",
        "        guide = self.guide\n",
        ("tests/engine/test_structured_output.py::test_random_formats_hold_side_by_side",),
    ),
    Mutant(
        "a fork has no guide",
        "engine/sequence.py",
        "        guide = None if self.guide is None else self.guide.copy()\n",
        "        guide = None if self.guide is None or self.token_ids else self.guide.copy()\n",
        ("tests/engine/test_structured_output.py::test_a_fork_goes_on_in_the_format",),
    ),
    Mutant(
        "what was preempted has no guide",
        "engine/plan.py",
        "        guide=sample.guide,\n",
        "        guide=None if sample.sequence.uncomputed > 1 and sample.token_ids else sample.guide,\n",
        ("tests/engine/test_structured_output.py::test_preemption_and_repeated_steps_do_not_show",),
    ),
    Mutant(
        "nobody asks the guide",
        "engine/model/processors.py",
        "    if masks:\n        _mask(scores, masks)\n",
        "",
        ("tests/engine/model/test_guides_in_rows.py::test_only_allowed_tokens_come_out_and_neighbours_see_nothing",),
    ),
    Mutant(
        "a guide allows ids behind the vocabulary",
        "engine/model/guided_rows.py",
        "        words[-1] &= np.uint32((1 << vocab % 32) - 1)\n",
        "        pass\n",
        ("tests/engine/model/test_guides_in_rows.py::test_bias_and_bans_come_after_the_mask",),
    ),
    Mutant(
        "how long a format takes tells who has used it",
        "engine/guiding.py",
        "repr((tenant, wanted.kind, wanted.definition))",
        "repr((wanted.kind, wanted.definition))",
        ("tests/engine/test_structured_output.py", "tests/engine/model/test_guides_trial.py"),
    ),
    # the end
    Mutant(
        "a server that drains takes new requests",
        "engine/server/service.py",
        "        if self.is_draining:\n            raise unavailable(",
        "        if self.failure:\n            raise unavailable(",
        ("tests/engine/server/test_health_routes.py::test_draining_is_alive_and_not_ready",),
    ),
    Mutant(
        "a drain leaves the rest running",
        "engine/async_engine.py",
        "        for group in list(self._loop.groups.values()):\n            self._loop.abort(group)\n        with",
        "        with",
        ("tests/engine/test_shutdown.py::test_drain_aborts_what_does_not_end_in_time",),
    ),
    Mutant(
        "the cache is saved when the engine is closed",
        "engine/server/lifecycle.py",
        "            saved = await self._save(engine)\n",
        "            await engine.close()\n            saved = await self._save(engine)\n",
        ("tests/engine/server/test_lifecycle.py::test_the_end_is_in_order",),
    ),
    Mutant(
        "one bad request makes the model look dead",
        "engine/server/endpoints/health.py",
        '    if signs.status != "dead" or engine is None or not engine.is_open:\n',
        "    if signs.status or engine is None or not engine.is_open:\n",
        ("tests/engine/server/test_health_routes.py::test_requests_that_break_the_model_do_not_make_it_look_dead",),
    ),
    Mutant(
        "the cache is shown with text that nobody asked for",
        "engine/insight/cache_view.py",
        "        if not text or self._codec is None:\n",
        "        if self._codec is None:\n",
        ("tests/engine/insight/test_cache_view.py::test_text_is_shown_to_those_only_who_ask",),
    ),
    # octavo bench
    Mutant(
        "an event that breaks off is none",
        "engine/bench/sse.py",
        '            raise MalformedStream("the stream ended inside an event")\n',
        "            return\n",
        ("tests/engine/bench/test_bench_sse.py::test_an_end_inside_an_event_is_an_error",),
    ),
    Mutant(
        "a stream without its end is a whole answer",
        "engine/bench/listener.py",
        '            raise Failed(TRUNCATED, "the stream ended without [DONE]")\n',
        "            return\n",
        ("tests/engine/bench/test_bench_client.py::test_a_stream_that_does_not_end_properly_is_an_error",),
    ),
    Mutant(
        "the first token counts among those after it",
        "engine/bench/rows.py",
        "        return (self.e2e - self.ttft) / (self.output_tokens - 1)\n",
        "        return (self.e2e - self.ttft) / self.output_tokens\n",
        ("tests/engine/bench/test_bench_statistics.py::test_first_token_and_all_others_make_the_whole",),
    ),
    Mutant(
        "a refusal for want of room is a failure",
        "engine/bench/client.py",
        'Failed(REFUSED if response.status_code == 429 else f"http {response.status_code}", message)',
        'Failed(f"http {response.status_code}", message)',
        ("tests/engine/bench/test_bench_client.py::test_a_refusal_is_no_error_and_ends_the_request",),
    ),
)

MUTANTS = KNOWN_FAULTS + MORE + TIERS + TIERED_ENGINE + TELEMETRY + POLICIES + SERVING
