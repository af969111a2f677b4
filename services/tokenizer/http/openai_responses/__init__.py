"""OpenAI's Responses: reads their requests, and writes their answers, which are lists of items."""
