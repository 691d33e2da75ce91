"""What is here to decode with: `posttrainllm doctor`."""
