"""OpenAI's HTTP API: reads its requests, has the service's own calls serve them, and writes its answers."""
