"""The names of other services' fields: which have no effect here, which ask for what is done anyway, which are refused.

One table for all routes. A name that a route reads as its own, and no name of `WITHOUT_EFFECT`, is not looked up here.
Names inside of other fields are written with a dot, without the indices of lists.
"""

from __future__ import annotations

from collections.abc import Mapping

from services.tokenizer.json.json_values import JsonValue

_STORED = "nothing is stored"
_LABEL = "it labels the request for whoever bills it"
_CACHE = "every prompt is cached, for as long as there is room"
_ROUTE = "it chooses among servers, prices or hardware of which there is one here"
_SERVER_TOOLS = "it is for tools that a provider's own servers run"
_OTHER_ENGINE = "it steers an engine that this is not, without changing what the model says"

WITHOUT_EFFECT: Mapping[str, str] = {
    "store": _STORED,
    "metadata": _LABEL,
    "client_metadata": _LABEL,
    "user": _LABEL,
    "user_profile_id": _LABEL,
    "workspace_id": _LABEL,
    "safety_identifier": _LABEL,
    "billing_policy": _LABEL,
    "fallback_credit_token": _LABEL,
    "access_programs": _LABEL,
    "anthropic_beta": "every feature of Anthropic's that is here is on",
    "anthropic_version": "one version is served",
    "betas": "every feature of Anthropic's that is here is on",
    "diagnostics": "the log and the metrics tell what a cache missed",
    "prompt_cache_key": _CACHE,
    "prompt_cache_retention": _CACHE,
    "prompt_cache_options": _CACHE,
    "prompt_cache_breakpoint": _CACHE,
    "service_tier": _ROUTE,
    "inference_geo": _ROUTE,
    "speed": _ROUTE,
    "provider": _ROUTE,
    "route": _ROUTE,
    "usage": "an answer has its usage anyway",
    "prediction": "guessed text makes an answer faster, never another",
    "verbosity": "a wish that no chat template shows the model",
    "text.verbosity": "a wish that no chat template shows the model",
    "context_management": "a conversation is what the client sends: nothing is cleared or summarized on the way",
    "max_tool_calls": _SERVER_TOOLS,
    "background_options": _SERVER_TOOLS,
    "image": "answers have no images",
    "reasoning.summary": "reasoning is shown as it is",
    "reasoning.generate_summary": "reasoning is shown as it is",
    "reasoning.context": "a template decides which earlier reasoning it shows",
    "reasoning.mode": _ROUTE,
    "thinking.budget_tokens": "a template may tell the model of it; nothing ends the reasoning",
    "thinking.block_binding": "a signature proves nothing here",
    "output_config.task_budget": "a template may not tell the model of it, and nothing ends the task",
    "stream_options.include_obfuscation": "streams have no padding",
    "stream_options.chunk_include_usage": "a stream ends with its usage",
    "guided_decoding_backend": _OTHER_ENGINE,
    "structured_outputs.backend": _OTHER_ENGINE,
    "structured_outputs.disable_fallback": _OTHER_ENGINE,
    "mm_processor_kwargs": "it is for images and sound, which are refused",
    "media_io_kwargs": "it is for images and sound, which are refused",
    "request_id": "the server names each request; X-Request-Id is echoed",
    "rid": "the server names each request; X-Request-Id is echoed",
    "vllm_xargs": _OTHER_ENGINE,
    "cache_prompt": _CACHE,
    "id_slot": _OTHER_ENGINE,
    "slot_id": _OTHER_ENGINE,
    "timings_per_token": "the metrics tell how long each token took",
    "return_progress": "a stream is silent until its first token",
    "keep_alive": "the model stays loaded",
    "num_ctx": "the context is the server's",
    "data_parallel_rank": _ROUTE,
    "log_metrics": _OTHER_ENGINE,
}
"""Names that change nothing in an answer, with the reasons. They are named in the header `x-lockstep-ignored`."""

HARMLESS: Mapping[str, tuple[JsonValue, ...]] = {
    "store": (False,),
    "context_management": ([], {}),
    "metadata": ({},),
    "client_metadata": ({},),
    "mm_processor_kwargs": ({},),
    "betas": ([],),
    "cache_prompt": (True,),
    "return_progress": (False,),
    "timings_per_token": (False,),
}
"""Values of those names that ask for nothing, or for what is done anyway."""

DONE_ANYWAY: Mapping[str, str] = {
    "cache_control": _CACHE,
    "disable_additional_properties": "objects are closed unless their schema speaks of more keys",
    "eager_input_streaming": "arguments are streamed as they are written",
}
"""Names, wherever they are in a request, of what is done anyway: they are not even named."""

REFUSED: Mapping[str, tuple[JsonValue, ...]] = {
    # OpenAI's chats and completions.
    "audio": (),
    "modalities": (["text"], []),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "web_search_options": (),
    "moderation": (),
    "echo": (False,),
    "suffix": ("",),
    "n": (1,),
    "best_of": (1,),
    "logprobs": (False, 0),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True,),
    "stop_sequences": ([],),
    # OpenAI's Responses: nothing is stored.
    "previous_response_id": (),
    "conversation": (),
    "background": (False,),
    "prompt": (),
    "truncation": ("disabled",),
    # Anthropic's Messages.
    "mcp_servers": ([],),
    "container": (),
    "fallbacks": ([],),
    "thread": (),
    "compaction": (),
    # vLLM's.
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "early_stopping": (False,),
    "logits_processors": ([],),
    "documents": ([],),
    "chat_template": (),
    "kv_transfer_params": ({},),
    "prompt_embeds": (),
    "thinking_token_budget": (),
    "guided_whitespace_pattern": (),
    "guided_decoding_disable_any_whitespace": (False,),
    "structural_tag": (),
    "structured_outputs.structural_tag": (),
    "structured_outputs.whitespace_pattern": (),
    "spaces_between_special_tokens": (True,),
    "prompt_logprobs": (),
    "repetition_detection": (),
    "stream_interval": (1,),
    "return_logprobs_as_token_ids": (False,),
    # Those of rerankers' services.
    "max_tokens_per_doc": (),
    "max_chunks_per_doc": (),
    "rank_fields": (),
    # SGLang's.
    "separate_reasoning": (True,),
    "stream_reasoning": (True,),
    "no_stop_trim": (False,),
    "lora_path": (),
    "session_params": (),
    "custom_logit_processor": (),
    "custom_params": ({},),
    "stop_regex": ([], ""),
    "return_hidden_states": (False,),
    "return_routed_experts": (False,),
    "return_cached_tokens_details": (False,),
    "min_new_tokens": (0,),
    # llama.cpp's.
    "repeat_penalty": (1,),
    "repeat_last_n": (),
    "typical_p": (1,),
    "tfs_z": (1,),
    "mirostat": (0,),
    "dynatemp_range": (0,),
    "dry_multiplier": (0,),
    "xtc_probability": (0,),
    "top_n_sigma": (-1,),
    "samplers": (),
    "n_probs": (0,),
    "n_keep": (0,),
    "t_max_predict_ms": (0,),
    "reasoning_budget": (-1,),
    "lora": ([],),
    # Others', which would change what comes before or after the reasoning.
    "thinking_budget": (),
    "reasoning.max_tokens": (),
    "reasoning.exclude": (False,),
    "top_a": (0,),
    "transforms": ([],),
    "plugins": ([],),
    "models": ([],),
}
"""Names that would change the answer and are not honoured, with the values that ask for what is done anyway."""
