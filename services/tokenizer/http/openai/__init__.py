"""OpenAI's chats and completions, and vLLM's /tokenize: reads their requests, and writes their answers."""
