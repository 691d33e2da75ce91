"""`posttrainllm chat`."""
