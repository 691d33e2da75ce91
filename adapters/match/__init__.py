"""Which draft pays best: `posttrainllm match`, and `--draft-model auto`."""
