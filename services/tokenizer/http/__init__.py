"""OpenAI's HTTP API, and Anthropic's Messages: reads requests, has the service's own calls serve them, and answers."""
