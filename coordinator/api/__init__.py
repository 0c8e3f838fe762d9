"""The HTTP process of the service: the OpenAI-compatible API and the page; text, never slots."""
