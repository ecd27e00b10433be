"""The process that plans, runs the model and turns tokens into text. Never imports fastapi or api_server."""
