"""The paths, by who asks: OpenAI clients, whoever watches over the server, and people with curl."""
