"""Every module has a test file in the expected place, or is listed here with the file that tests it."""

from __future__ import annotations

from pathlib import Path

from tests.support.system.processes import ROOT

UNIT = ROOT / "tests" / "unit"

# The tests of modules without their own test file: paths below tests/.
TESTED_BY = {
    "unit/scheduler/cell/test_engine.py": (
        "services/scheduler/cell/cell.py",
        "services/scheduler/cell/cell_facts.py",
        "services/scheduler/cell/events.py",
        "services/scheduler/cell/requests/intake.py",
        "services/scheduler/cell/requests/request_manager.py",
        "services/scheduler/cell/requests/requests.py",
        "services/scheduler/cell/state.py",
        "services/scheduler/core/assemble.py",
        "services/scheduler/core/batch/sequence.py",
        "services/scheduler/core/batch/step.py",
        "services/scheduler/core/decode.py",
        "services/scheduler/core/endings.py",
        "services/scheduler/core/postprocess.py",
        "services/scheduler/core/prefill.py",
        "services/scheduler/core/running_batch.py",
        "services/scheduler/core/scheduler.py",
    ),
    "unit/scheduler/cell/test_engine_drains.py": ("services/scheduler/cell/domains/drains.py",),
    "unit/scheduler/cell/test_engine_epochs.py": (
        "services/scheduler/cell/domains/domain.py",
        "services/scheduler/cell/heartbeat.py",
        "services/scheduler/core/step_deadline.py",
        "services/scheduler/core/worker_facts.py",
    ),
    "unit/scheduler/cell/test_engine_logprobs.py": ("services/scheduler/core/batch/logprobs.py",),
    "unit/scheduler/cell/test_engine_policies.py": (),
    "unit/scheduler/cell/test_engine_recovery.py": (
        "services/scheduler/cell/quarantine/quarantine.py",
        "services/scheduler/cell/domains/recoveries.py",
    ),
    "unit/scheduler/cell/test_engine_results.py": ("services/scheduler/core/validate_result.py",),
    "unit/scheduler/core/cache/test_kv_feed.py": ("services/scheduler/core/cache/kv_changes.py",),
    "unit/scheduler/core/cache/test_prefix_cache.py": ("services/scheduler/core/batch/cached_prefix.py",),
    "unit/scheduler/core/queue/test_waiting_queue.py": ("services/scheduler/core/queue/drain_rate.py",),
    "unit/scheduler/server/test_direct_clients.py": ("services/scheduler/server/token_stream.py",),
    "unit/scheduler/discovery/test_watch_messages.py": ("services/scheduler/discovery/last_seen.py",),
    "unit/scheduler/server/test_worker_links.py": ("services/scheduler/discovery/kubernetes_discovery.py",),
    "unit/scheduler/test_config.py": ("services/scheduler/membership.py",),
    "unit/scheduler/test_main.py": ("services/scheduler/make_cell.py", "services/scheduler/server/failpoint.py"),
    "unit/tokenizer/chat/test_chat_template.py": (
        "services/tokenizer/chat/conversation.py",
        "services/tokenizer/chat/template_rendering.py",
    ),
    "unit/tokenizer/chat/test_template_trial.py": ("services/tokenizer/trial_limits.py",),
    "unit/tokenizer/exchange/test_cell_requests.py": ("services/tokenizer/exchange/exchange_codec.py",),
    "unit/tokenizer/exchange/test_request_ledger.py": ("services/tokenizer/request/request.py",),
    "unit/tokenizer/grammar/test_structured_output.py": ("services/tokenizer/grammar/grammar_child.py",),
    "unit/tokenizer/replies/test_call_grammar.py": ("services/tokenizer/replies/lark.py",),
    "unit/tokenizer/replies/test_json_reading.py": ("services/tokenizer/replies/reader.py",),
    "unit/tokenizer/replies/test_parsers.py": (
        "services/tokenizer/replies/json_calls.py",
        "services/tokenizer/replies/parts.py",
        "services/tokenizer/replies/plain.py",
    ),
    "unit/tokenizer/request/test_prompts.py": (
        "services/tokenizer/request/prepare.py",
        "services/tokenizer/text/encoding_pools.py",
    ),
    "unit/tokenizer/request/test_checks.py": ("services/tokenizer/text_size.py",),
    "unit/tokenizer/server/test_complete.py": ("services/tokenizer/server/whole_answer.py",),
    "unit/tokenizer/server/test_generation.py": (
        "services/tokenizer/exchange/logprobs.py",
        "services/tokenizer/server/choice.py",
    ),
    "unit/tokenizer/test_main.py": ("services/tokenizer/request/reply_parsers.py",),
    "unit/tokenizer/test_metrics.py": ("services/tokenizer/server/request_totals.py",),
    "unit/worker/group/test_group.py": (
        "services/worker/group/group_servicer.py",
        "services/worker/group/joined_link.py",
        "services/worker/group/link.py",
        "services/worker/group/meeting.py",
        "services/worker/group/member.py",
        "services/worker/process/exits.py",
        "services/worker/server/leader.py",
    ),
    "unit/worker/layers/test_layers.py": (
        "services/worker/layers/activation.py",
        "services/worker/layers/attention.py",
        "services/worker/layers/linear.py",
        "services/worker/layers/norm.py",
    ),
    "unit/worker/layers/test_rotary.py": ("services/worker/layers/rope_scaling.py",),
    "unit/worker/layers/test_shard.py": (
        "services/worker/layers/embedding.py",
        "services/worker/parallel/communicator.py",
        "services/worker/weights/model_weights.py",
    ),
    "unit/worker/models/parts/test_latent_attention.py": (
        "services/worker/layers/indexer.py",
        "services/worker/layers/mla.py",
        "services/worker/models/parts/decoder.py",
    ),
    "unit/worker/models/test_loader_memory.py": ("services/worker/weights/freed_memory.py",),
    "unit/worker/models/test_model_configs.py": (
        "services/worker/models/config.py",
        "services/worker/models/parts/plain_attention.py",
        "services/worker/models/registry.py",
    ),
    "parity/test_architectures.py": (
        "services/worker/models/deepseek_v2.py",
        "services/worker/models/deepseek_v3.py",
        "services/worker/models/deepseek_v32.py",
        "services/worker/models/glm4_moe.py",
        "services/worker/models/gpt_oss.py",
        "services/worker/models/llama.py",
        "services/worker/models/mixtral.py",
        "services/worker/models/qwen3.py",
        "services/worker/models/qwen3_moe.py",
        "services/worker/models/parts/sparse_mlp.py",
    ),
    "parity/test_mtp.py": ("services/worker/models/parts/mtp.py", "services/worker/models/protocol.py"),
    "unit/worker/ops/test_attention_ops.py": (
        "services/worker/forward/forward_context.py",
        "services/worker/ops/cpu/attention.py",
        "services/worker/ops/reference/attention.py",
    ),
    "unit/worker/ops/test_advance_batch.py": ("services/worker/ops/cpu/batch.py",),
    "unit/worker/ops/test_experts.py": (
        "services/worker/ops/cpu/experts.py",
        "services/worker/ops/reference/experts.py",
    ),
    "unit/worker/ops/test_mla_ops.py": ("services/worker/ops/cpu/mla.py",),
    "unit/worker/ops/test_ops.py": (
        "services/worker/ops/cpu/backend.py",
        "services/worker/ops/arguments.py",
        "services/worker/ops/attention_protocol.py",
        "services/worker/ops/protocol.py",
        "services/worker/ops/reference/backend.py",
    ),
    "unit/worker/ops/test_routing.py": ("services/worker/layers/moe.py",),
    "unit/worker/ops/aiter_ops/test_models.py": (
        "services/worker/ops/aiter_ops/asm_attention.py",
        "services/worker/ops/aiter_ops/asm_backend.py",
        "services/worker/ops/aiter_ops/asm_latent.py",
        "services/worker/ops/aiter_ops/attention.py",
        "services/worker/ops/aiter_ops/backend.py",
        "services/worker/ops/aiter_ops/elementwise.py",
        "services/worker/ops/aiter_ops/experts.py",
        "services/worker/ops/aiter_ops/linear.py",
    ),
    "unit/worker/ops/aiter_ops/test_load.py": ("services/worker/ops/aiter_ops/builds.py",),
    "unit/worker/ops/triton/attention/test_decode.py": ("services/worker/ops/triton/attention/context_splits.py",),
    "unit/worker/ops/triton/products/test_linear.py": (
        "services/worker/ops/triton/products/row_products.py",
        "services/worker/ops/triton/products/tile_sizes.py",
        "services/worker/ops/triton/products/weight_tile.py",
    ),
    "unit/worker/ops/triton/attention/test_prefill.py": (
        "services/worker/ops/triton/attention/tile.py",
        "services/worker/ops/triton/attention/token_tiles.py",
    ),
    "unit/worker/ops/triton/sampling/test_sample.py": (
        "services/worker/ops/triton/sampling/candidates.py",
        "services/worker/ops/triton/sampling/edge_search.py",
        "services/worker/ops/triton/sampling/group_choice.py",
        "services/worker/ops/triton/sampling/ordering.py",
        "services/worker/ops/triton/sampling/row_decision.py",
        "services/worker/ops/triton/sampling/row_scan.py",
    ),
    "unit/worker/runner/test_input_batch.py": (
        "services/worker/batch/block_tables.py",
        "services/worker/batch/enter_checks.py",
        "services/worker/batch/slot_changes.py",
        "services/worker/batch/step_input.py",
        "services/worker/runner/device_batch.py",
    ),
    "unit/worker/runner/steps/test_late_device.py": (
        "services/worker/runner/batch_runner.py",
        "services/worker/runner/steps/host_end.py",
        "services/worker/runner/steps/pending_step.py",
        "services/worker/runner/rank.py",
        "services/worker/runner/steps/step_work.py",
        "services/worker/runner/stream.py",
        "services/worker/sampling/device_sampler.py",
        "services/worker/sampling/row_options.py",
        "services/worker/sampling/sampling_rows.py",
    ),
    "unit/worker/runner/graphs/test_graph_runner.py": (
        "services/worker/runner/graphs/draft_graphs.py",
        "services/worker/runner/graphs/step_graphs.py",
    ),
    "unit/worker/runner/test_input_batch_drafts.py": ("services/worker/spec_decode/decodes.py",),
    "unit/worker/runner/test_model_runner_drafts.py": (
        "services/worker/spec_decode/ngram_drafts.py",
        "services/worker/spec_decode/token_runs.py",
    ),
    "unit/worker/server/test_servicer.py": ("services/worker/server/step_stream.py",),
    "unit/worker/weights/test_dummy_weights.py": ("services/worker/weights/dummy_parts.py",),
    "unit/worker/weights/quantization/test_formats.py": (
        "services/worker/weights/quantization/compressed_tensors.py",
        "services/worker/weights/quantization/dequantize.py",
        "services/worker/weights/quantization/fp8.py",
        "services/worker/weights/quantization/layer_format.py",
        "services/worker/weights/quantization/mxfp4.py",
        "services/worker/weights/quantization/packed_int.py",
        "services/worker/weights/quantization/rules.py",
        "services/worker/weights/quantization/scaled.py",
    ),
    "unit/worker/ops/native/test_backend.py": (
        "services/worker/ops/native/build.py",
        "services/worker/ops/native/isa.py",
        "services/worker/ops/native/library.py",
    ),
    "unit/worker/ops/native/test_attention.py": ("services/worker/ops/native/formats.py",),
    "unit/worker/ops/native/test_products.py": ("services/worker/ops/native/packed.py",),
    "unit/worker/weights/test_gguf_conversion.py": (
        "services/worker/weights/gguf_tensors.py",
        "services/worker/weights/quantization/gguf_blocks.py",
    ),
    "unit/worker/models/test_quantized_models.py": ("services/worker/weights/format_costs.py",),
    "unit/worker/weights/test_checkpoint.py": (
        "services/worker/weights/weight_files.py",
        "services/worker/weights/weight_problems.py",
    ),
    "unit/scheduler/server/test_exchange_codec.py": ("shared/sampling_codec.py",),
    "unit/tokenizer/grammar/test_grammar_trial.py": ("shared/grammar.py",),
    "unit/shared/cli/test_main.py": (
        "shared/release.py",
        "shared/cli/clients/client.py",
        "shared/cli/clients/generate.py",
        "shared/cli/clients/request_flags.py",
    ),
    "unit/shared/cli/clients/test_conversation.py": (
        "shared/cli/clients/chat.py",
        "shared/cli/clients/typed_turns.py",
        "shared/cli/clients/wrong_service.py",
    ),
    "unit/shared/cli/processes/test_service_process.py": ("shared/cli/processes/child_process.py",),
    "unit/shared/cli/processes/test_supervisor.py": ("shared/cli/processes/cell_processes.py",),
    "integration/test_interrupts.py": ("shared/process/parent.py",),
    "unit/worker/test_metrics.py": ("services/worker/runner/step_totals.py",),
    "unit/shared/cli/test_cell_plan.py": (
        "shared/cli/processes/manage_flag.py",
        "shared/cli/processes/rank_plan.py",
        "shared/cli/processes/service_command.py",
        "shared/cli/tls_flags.py",
    ),
    "unit/shared/cli/test_serve_settings.py": ("shared/cli/launcher_settings.py",),
    "unit/shared/network/test_tls.py": ("shared/process/metrics.py",),
}


def test_every_module_has_a_test_file() -> None:
    tested_elsewhere = {module for modules in TESTED_BY.values() for module in modules}
    untested = [module for module in modules() if module not in tested_elsewhere and not has_test_file(module)]
    assert not untested, f"no test file, and none named in TESTED_BY: {untested}"


def test_the_table_lists_only_existing_files() -> None:
    assert [test for test in TESTED_BY if not (ROOT / "tests" / test).exists()] == []
    named = [module for modules in TESTED_BY.values() for module in modules]
    assert [module for module in named if not (ROOT / module).exists() or has_test_file(module)] == []
    assert len(named) == len(set(named))


def modules() -> list[str]:
    """The paths of all modules of the services and of shared."""
    files = [path for package in ("services", "shared") for path in (ROOT / package).rglob("*.py")]
    return sorted(str(path.relative_to(ROOT)) for path in files if path.name != "__init__.py")


def has_test_file(module: str) -> bool:
    """Whether tests/unit has one or more files named after a module, in a folder named after the module's."""
    path = Path(module.removeprefix("services/"))
    name = "main" if path.stem == "__main__" else path.stem
    return any((UNIT / path.parent).glob(f"test_{name}*.py"))
