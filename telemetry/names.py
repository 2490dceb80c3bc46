"""The names of spans, attributes and events, in one place, as Octavo writes them.

``gen_ai.*`` are those of the OpenTelemetry semantic conventions for generative AI, release 0.1.0
(https://github.com/open-telemetry/semantic-conventions-genai), which are still in development: they are pinned here,
and a change of them is a change of this file. ``octavo.*`` are ours.
"""

from __future__ import annotations

from typing import Final

TRACER: Final = "octavo"
PROVIDER: Final = "octavo"
"""Value of ``gen_ai.provider.name``: the convention asks for a name of one's own where it lists none."""

# spans

STEP: Final = "octavo.step"  # that of a request is ``{operation} {model}``, as the convention wants it

ADD_REQUEST: Final = "add_request"
QUEUE: Final = "queue"
LOAD: Final = "load"
PREFILL: Final = "prefill"
DECODE: Final = "decode"
FINISH: Final = "finish"
ROUTE: Final = "route"
"""Of a gateway: from naming a prompt to the first of the answer, with all tries."""
PHASES: Final = (ADD_REQUEST, QUEUE, LOAD, PREFILL, DECODE, FINISH)

PREFILL_CHUNK: Final = "prefill_chunk"
EVICT: Final = "evict"
COW_FORK: Final = "cow_fork"
SWAP_OUT: Final = "swap_out"
"""Blocks copied off the device, for a tier or a snapshot."""
SWAP_IN: Final = "swap_in"
"""Blocks copied back to the device."""
PERSIST: Final = "persist"
"""Blocks written into a tier, or a checkpoint of all that persistent tiers lack."""
RESTORE: Final = "restore"
"""What an earlier run left was found, warmed or imported."""
SNAPSHOT: Final = "snapshot"
POLICY_FAULTED: Final = "policy_fault"
"""The eviction policy broke its contract when it was told something."""
POLICY_SWITCH: Final = "policy_switch"
"""Another eviction policy took over while the engine ran."""
ACTS: Final = (EVICT, COW_FORK, SWAP_OUT, SWAP_IN, PERSIST, RESTORE, SNAPSHOT)

# events

FIRST_TOKEN: Final = "first_token"  # noqa: S105  # no secret
PREEMPT: Final = "preempt"
RESUME: Final = "resume"
FORK: Final = "fork"

# attributes of the convention

OPERATION_NAME: Final = "gen_ai.operation.name"
PROVIDER_NAME: Final = "gen_ai.provider.name"
REQUEST_MODEL: Final = "gen_ai.request.model"
REQUEST_MAX_TOKENS: Final = "gen_ai.request.max_tokens"
REQUEST_TEMPERATURE: Final = "gen_ai.request.temperature"
REQUEST_TOP_P: Final = "gen_ai.request.top_p"
REQUEST_TOP_K: Final = "gen_ai.request.top_k"
REQUEST_SEED: Final = "gen_ai.request.seed"
REQUEST_FREQUENCY_PENALTY: Final = "gen_ai.request.frequency_penalty"
REQUEST_PRESENCE_PENALTY: Final = "gen_ai.request.presence_penalty"
REQUEST_STOP_SEQUENCES: Final = "gen_ai.request.stop_sequences"
REQUEST_CHOICE_COUNT: Final = "gen_ai.request.choice.count"
REQUEST_STREAM: Final = "gen_ai.request.stream"
RESPONSE_ID: Final = "gen_ai.response.id"
RESPONSE_MODEL: Final = "gen_ai.response.model"
RESPONSE_FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
RESPONSE_TIME_TO_FIRST_CHUNK: Final = "gen_ai.response.time_to_first_chunk"
USAGE_INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
USAGE_OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
USAGE_CACHE_READ: Final = "gen_ai.usage.cache_read.input_tokens"
INPUT_MESSAGES: Final = "gen_ai.input.messages"
OUTPUT_MESSAGES: Final = "gen_ai.output.messages"
ERROR_TYPE: Final = "error.type"

OPERATION_CHAT: Final = "chat"
OPERATION_COMPLETION: Final = "text_completion"

# attributes of ours

REQUEST_ID: Final = "octavo.request.id"
PRIORITY: Final = "octavo.request.priority"
TENANT: Final = "octavo.tenant"
"""In spans only, never a label: there is no bound on their number."""
SAMPLE: Final = "octavo.sample"
SAMPLES: Final = "octavo.samples"
RESUMED: Final = "octavo.resumed"
BLOCKS: Final = "octavo.blocks"
BYTES: Final = "octavo.bytes"
TOKENS: Final = "octavo.tokens"
CACHED_TOKENS: Final = "octavo.cached_tokens"
"""Tokens that were found and need not be computed, at this admission."""
TIER: Final = "octavo.tier"
REASON: Final = "octavo.reason"
POLICY: Final = "octavo.policy"
POLICY_BEFORE: Final = "octavo.policy.before"
POLICY_FAULT: Final = "octavo.policy_fault"
"""What the policy did wrong during this eviction: where, and a word about it. Some of the victims are not its choice
then, but the least recently used."""
VICTIMS: Final = "octavo.victims"
"""Prefixes that an eviction shortened."""
OUTCOME: Final = "octavo.outcome"
KIND: Final = "octavo.kind"
PREEMPTIONS: Final = "octavo.preemptions"
QUEUE_SECONDS: Final = "octavo.queue_seconds"
STEP_NUMBER: Final = "octavo.step.number"
STEP_TRACE_ID: Final = "octavo.step.trace_id"
STEP_SPAN_ID: Final = "octavo.step.span_id"
FIRST_STEP: Final = "octavo.first_step"
LAST_STEP: Final = "octavo.last_step"
ROWS: Final = "octavo.rows"
PREFILL_ROWS: Final = "octavo.prefill_rows"
DECODE_ROWS: Final = "octavo.decode_rows"
USAGE_RATIO: Final = "octavo.block_pool.usage"
LINKS_DROPPED: Final = "octavo.links_dropped"
SPANS_DROPPED: Final = "octavo.spans_dropped"
EVENTS_DROPPED: Final = "octavo.events_dropped"
RELATION: Final = "octavo.relation"
"""Of a link: ``step``, ``victim_owner``, ``forked_from``, ``cause``."""
DEVICE_BLOCKS: Final = "octavo.device_blocks"
LOST: Final = "octavo.lost_blocks"

FLEET_REPLICA: Final = "octavo.fleet.replica"
FLEET_REASON: Final = "octavo.fleet.reason"
FLEET_MATCHED: Final = "octavo.fleet.matched_tokens"
FLEET_LOAD: Final = "octavo.fleet.load"
FLEET_TRIES: Final = "octavo.fleet.tries"
