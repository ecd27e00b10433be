"""The process that speaks HTTP and tokens. Never imports torch, nor engine except in `api_server.single_process`."""
