"""Which kinds of failures that people have reported of other servers are tested over HTTP, and where.

The kinds are text and stop strings (TEXT), streaming and slow clients (FLOW), the end of the server (STOP), bad input
(INPUT), one request that takes the engine with it (LOOP), tokenizers and templates (TOK), tenants (TENANT), clients
that leave (LEAK), and streams that are closed by another task than the one that reads them (CONC).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

import pytest

TESTS: Final = Path(__file__).parents[2]
HERE: Final = "engine/server"
WHERE: Final[Mapping[str, tuple[tuple[str, str], ...]]] = MappingProxyType(
    {
        "TEXT-01": (
            ("streamed_answers", "text_ends_before_the_first_stop_and_nothing_of_it_is_sent"),
            ("field_reports_http_text", "no_piece_of_a_stop_string_is_sent_of_any_sample"),
        ),
        "TEXT-04": (("field_reports_http_text", "lone_bytes_come_as_they_are_made"),),
        "TEXT-06": (
            ("streamed_answers", "stop_tokens_show_only_where_that_is_asked_for"),
            ("field_reports_http_text", "a_stop_token_takes_its_own_text_and_no_other"),
        ),
        "TEXT-07": (
            ("streamed_answers", "stop_tokens_show_only_where_that_is_asked_for"),
            ("field_reports_http_text", "a_stop_string_that_is_a_special_token_is_found"),
        ),
        "FLOW-01": (
            ("transport_clients", "a_client_that_reads_nothing_is_cut_off_and_others_run_at_full_speed"),
            ("streamed_answers", "a_slow_reader_gets_fewer_events_and_the_same_text"),
            ("storms", "a_crowd_that_reads_slowly_holds_up_nobody_and_little_memory"),
        ),
        "FLOW-04": (
            ("field_reports_http_flow", "while_the_model_computes_everything_else_goes_on"),
            ("field_reports_http_flow", "a_long_text_is_tokenised_while_others_are_served"),
        ),
        "FLOW-06": (
            ("field_reports_http_flow", "a_flood_of_tokens_for_a_client_that_sleeps_waits_in_the_model"),
            ("field_reports_http_flow", "the_loop_ends_in_the_middle_of_streams"),
        ),
        "FLOW-07": (("field_reports_http_flow", "a_store_that_stands_still_keeps_no_stream_waiting"),),
        "FLOW-09": (
            ("streamed_answers", "a_model_that_fails_ends_a_stream_with_one_error"),
            ("streamed_answers", "what_the_server_ends_is_told_as_an_error"),
            ("responses", "failures"),
            ("field_reports_http_flow", "one_prompt_of_several_fails_in_the_middle_of_their_stream"),
            ("field_reports_http_text", "text_that_looks_like_the_end_of_a_stream_is_text"),
        ),
        "STOP-01": (
            ("lifecycle", "what_runs_finishes_and_what_is_new_is_refused"),
            ("lifecycle", "what_does_not_finish_in_time_is_told"),
            ("field_reports_http_end", "those_who_wait_in_the_queue_get_their_turn_before_the_end"),
            ("field_reports_http_end", "those_who_wait_in_the_queue_do_not_hang"),
            ("serve_process", "a_stream_outlives_the_signal_and_the_cache_the_process"),
        ),
        "STOP-04": (("lifecycle", "a_clean_end_logs_nothing_that_is_wrong"),),
        "STOP-06": (("lifecycle", "the_end_is_in_order"),),
        "INPUT-01": (
            ("completions_endpoint", "one_bad_prompt_refuses_all_before_anything_runs"),
            ("field_reports_http_input", "a_tokenizer_that_knows_more_or_fewer_tokens_than_the_model"),
        ),
        "INPUT-03": (
            ("generation_fields", "a_bad_value_is_refused_by_the_name_of_its_field"),
            ("field_reports_http_input", "a_bias_of_a_hundred_forces_or_forbids"),
            ("field_reports_http_input", "ten_thousand_biases_are_as_good_as_one"),
            ("field_reports_http_loop", "numbers_that_json_has_not"),
        ),
        "INPUT-05": (("field_reports_http_input", "temperatures_that_are_next_to_nothing_are_greedy"),),
        "INPUT-08": (
            ("transport", "a_head_without_end_is_cut_off_early"),
            ("transport", "ten_thousand_headers_are_too_many"),
            ("transport", "a_body_without_end_is_refused"),
            ("transport", "a_body_that_trickles_is_not_waited_for"),
            ("transport", "json_that_is_nested_too_deeply_is_refused"),
            ("transport", "ten_thousand_messages_are_answered_or_refused"),
            ("field_reports_http_input", "stop_strings_by_the_thousand_and_by_the_megabyte"),
            ("field_reports_http_input", "fields_that_are_nested_deeply_are_used_or_refused"),
            ("storms", "a_connection_that_is_kept_keeps_no_body"),
        ),
        "INPUT-10": (
            ("access_log", "nothing_that_a_client_chose_gets_into_a_line"),
            ("http_tracing", "spans_are_named_by_route_and_never_by_what_was_asked"),
            ("field_reports_http_input", "odd_text_is_the_same_with_and_without_logging"),
        ),
        "INPUT-11": (
            ("generation_fields", "a_bad_value_is_refused_by_the_name_of_its_field"),
            ("generation_fields", "a_context_that_is_full_to_the_last_token_works_and_one_more_is_refused"),
            ("chat_endpoint", "no_token_at_all_is_an_answer"),
            ("completions_endpoint", "echo_begins_with_the_prompt"),
            ("streamed_answers", "a_stream_joins_to_the_answer_that_is_not_streamed"),
        ),
        "LOOP-01": (
            ("completions_endpoint", "one_bad_prompt_refuses_all_before_anything_runs"),
            ("field_reports_http_loop", "an_empty_prompt_among_running_streams"),
        ),
        "LOOP-04": (
            ("generation_fields", "a_bad_value_is_refused_by_the_name_of_its_field"),
            ("field_reports_http_loop", "bad_values_in_a_crowd_of_good_requests"),
        ),
        "LOOP-06": (
            ("field_reports_http_loop", "a_format_that_takes_for_ever_to_compile_keeps_nobody_waiting"),
            ("field_reports_http_loop", "a_format_that_fails_at_the_third_token"),
            ("field_reports_http_loop", "a_template_that_raises_refuses_the_conversation"),
        ),
        "LOOP-07": (
            ("field_reports_http_loop", "too_little_memory_for_one_prompt_ends_one_request_at_most"),
            ("health_routes", "a_dead_model_is_told_and_one_bad_request_is_not"),
        ),
        "TOK-01": (("field_reports_http_text", "a_conversation_has_the_tokens_of_the_library_and_one_bos"),),
        "TOK-04": (("field_reports_http_text", "text_splits_as_the_library_splits_it"),),
        "TOK-06": (
            ("field_reports_http_text", "nobody_forges_a_turn"),
            ("field_reports_http_text", "a_stop_string_in_the_prompt_stops_nothing"),
        ),
        "TENANT-01": (
            ("http_tenants", "no_prefix_of_another_tenant_is_found"),
            ("http_tenants", "nothing_is_explained_of_another_tenant"),
            ("http_tenants", "a_key_with_a_tenant_cannot_ask_for_another"),
            ("field_reports_http_tenants", "below_the_device_tenants_share_nothing_either"),
            ("field_reports_http_tenants", "tenants_share_no_other_traces_either"),
            ("field_reports_http_tenants", "no_way_of_asking_crosses_over"),
        ),
        "TENANT-04": (
            ("access", "clients_that_use_the_same_name_get_their_own_texts"),
            ("field_reports_http_tenants", "twenty_clients_with_the_same_ids_everywhere"),
        ),
        "TENANT-05": (
            ("field_reports_http_tenants", "what_is_no_text_never_takes_the_place_of_text"),
            ("health_routes", "a_dead_model_is_told_and_one_bad_request_is_not"),
            ("health_routes", "an_engine_that_has_ended_is_dead"),
            ("health_routes", "a_step_that_hangs_is_told"),
        ),
        "TENANT-07": (("field_reports_http_tenants", "what_others_have_planted_in_a_shared_store_is_not_served"),),
        "LEAK-01": (("field_reports_http_flow", "who_leaves_while_its_prefix_is_loaded_holds_nothing"),),
        "LEAK-04": (
            ("leaving_clients", "whoever_leaves_at_any_turn_of_the_event_loop_leaves_nothing"),
            ("field_reports_http_flow", "who_leaves_during_the_last_step_has_left"),
            ("storms", "three_hundred_clients_leave_again_and_again_and_leave_nothing"),
        ),
        "CONC-09": (
            ("field_reports_http_end", "a_framework_between_the_client_and_the_app"),
            ("field_reports_http_end", "a_server_that_cancels_the_app_instead_of_telling_it"),
            ("field_reports_http_end", "an_answer_that_nobody_reads_to_its_end_and_drops"),
        ),
    }
)
"""Kind of report -> files of tests and tests in them, without their ``test_``."""


@pytest.mark.parametrize("kind", WHERE)
def test_the_tests_of_a_kind_are_there(kind: str) -> None:
    for file, test in WHERE[kind]:
        (found,) = [path for folder in (HERE, "system") for path in (TESTS / folder).glob(f"test_{file}.py")]
        assert f"def test_{test}(" in found.read_text(), (file, test)
