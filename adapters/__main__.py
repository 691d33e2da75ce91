"""`python -m posttrainllm.adapters` is the console command."""

from posttrainllm.adapters.cli import main

main()
